"""`make` refuses a variable that it does not know, and hands the others on as they are."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tools.findings import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder whose activate script prints what `python` would get."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("""python() { printf '<%s>' "$@"; }\n""")
    return tmp_path


def make(checkout: Path, *arguments: str) -> tuple[int, str]:
    # `make test` passes its own options and level on to the make of the test, which would print its folder.
    outer = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    done = subprocess.run(
        ["make", "--file", str(ROOT / "Makefile"), "PYTHON=true", *arguments],
        cwd=checkout,
        env={name: value for name, value in os.environ.items() if name not in outer},
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


def test_a_misspelt_variable_is_one_sentence(checkout: Path) -> None:
    code, output = make(checkout, "help", "INPTU=landing")
    assert code == 2
    assert (
        "There is no variable INPTU: the variables are INPUT VISITS SOURCE SEPARATE SAMPLE PYTHON." in output
    )
    assert output.count("\n") == 1


@pytest.mark.parametrize("folder", ["landing", "/data/my landing", "/data/it's [1],{2}"])
def test_a_known_variable_is_taken(checkout: Path, folder: str) -> None:
    expected = f"<-m><case_study.demo><--input><{folder}><--visits><10>"
    assert make(checkout, "demo", f"INPUT={folder}", "VISITS=10") == (0, expected)
    assert make(checkout, "demo", "SOURCE=kafka") == (0, "<-m><case_study.demo><--source><kafka>")
    assert make(checkout, "demo", "SEPARATE=true") == (0, "<-m><case_study.demo><--separate><true>")
