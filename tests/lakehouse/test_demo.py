"""`make demo` says in one sentence what it can't do, before it starts anything."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from case_study import demo
from case_study.main_job import FEEDS, main_job

NOBODY = 65534


@pytest.fixture
def lakehouse_root(tmp_path, monkeypatch):
    root = tmp_path / "lakehouse"
    monkeypatch.setenv("LAKEHOUSE_ROOT", str(root))
    return root


@pytest.fixture
def landing(tmp_path):
    (tmp_path / "landing" / "visits").mkdir(parents=True)
    return tmp_path / "landing"


def refusal(capsys) -> str:
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    return printed.err.strip()


def test_a_second_demo_at_once_says_so_in_one_sentence(lakehouse_root, landing, capsys):
    with demo.only_run(lakehouse_root):
        assert demo.main(input=str(landing)) == 1
    assert refusal(capsys) == f"another main job is running on {lakehouse_root}; wait for it to end"


def test_a_missing_input_folder_is_not_ready(lakehouse_root, tmp_path, capsys):
    assert demo.main(input=str(tmp_path / "nowhere")) == 4
    assert refusal(capsys) == f"the input folder '{tmp_path}/nowhere' doesn't exist"
    assert not lakehouse_root.exists()


def test_a_folder_without_feeds_is_not_ready(lakehouse_root, tmp_path, capsys):
    assert demo.main(input=str(tmp_path)) == 4
    assert refusal(capsys) == f"'{tmp_path}' holds none of the folders {', '.join(FEEDS)}"


def test_without_the_environment_it_says_what_to_do(monkeypatch, capsys):
    monkeypatch.delenv("LAKEHOUSE_ROOT", raising=False)
    assert demo.main() == 2
    assert "source .venv/bin/activate" in refusal(capsys)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_lakehouse_that_may_not_be_written_is_named(tmp_path):
    os.chmod(tmp_path, 0o755)  # noqa: PTH101
    asked, answers = multiprocessing.get_context("fork").Pipe()

    def unprivileged() -> None:
        os.setuid(NOBODY)
        try:
            with demo.only_run(tmp_path / "lakehouse"):
                answers.send("written")
        except demo.DemoFailed as failure:
            answers.send(str(failure))

    child = multiprocessing.get_context("fork").Process(target=unprivileged)
    child.start()
    assert asked.recv() == f"the lakehouse at {tmp_path}/lakehouse can't be written: Permission denied"
    child.join()


def test_a_failed_step_ends_the_run_with_its_exit_code(capfd):
    step = demo.Step("broken", ("bash", "-c", "echo why >&2; exit 3"))
    with pytest.raises(demo.DemoFailed, match="step 'broken' exited 3") as stopped:
        demo.run_steps([step])
    assert stopped.value.exit_code == 3


def test_complete_generated_data_is_kept(tmp_path, capsys):
    (tmp_path / "truth.json").write_text(json.dumps({"parameters": {"visits": 100}}), encoding="utf-8")
    demo.generate(tmp_path, 100)
    assert capsys.readouterr().out == f"landing data is there: {tmp_path}\n"


def test_absent_feeds_are_left_out_of_every_step():
    steps = main_job("/lakehouse", Path("/landing"), ["users", "devices"])
    assert [step.name for step in steps] == ["load users", "load devices", "dbt build"]
    assert steps[-1].command == (
        "dbt", "build", "--target", "local",
        "--exclude", "source:bronze.bronze_visits+", "source:bronze.bronze_visits_files+",
        "source:bronze.bronze_user_changes+", "source:bronze.bronze_user_changes_files+",
        "source:bronze.bronze_devices_list+", "source:parsed+",
    )  # fmt: skip
    assert [step.name for step in main_job("/lakehouse", Path("/landing"), FEEDS)] == [
        "load visits", "load users", "load user_changes", "load devices", "dead-letter visits", "dbt build", "report",
    ]  # fmt: skip
