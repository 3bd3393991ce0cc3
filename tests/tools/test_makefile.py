"""`make` refuses a variable that it does not know."""

import subprocess

from tools.findings import ROOT


def make(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=ROOT,
        text=True,
        check=False,
        stdout=-1,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


def test_a_misspelt_variable_is_one_sentence() -> None:
    code, output = make("help", "INPTU=landing")
    assert code == 2
    assert "There is no variable INPTU: the variables are INPUT VISITS SOURCE SAMPLE PYTHON." in output


def test_a_known_variable_is_taken() -> None:
    code, output = make("demo", "INPUT=landing", "PYTHON=python3")
    assert code == 0
    assert "--input landing" in output
