"""`make demo` says in one sentence what it can't do, before it starts anything."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import tempfile
from pathlib import Path

import pytest

from case_study import demo
from case_study.main_job import FEEDS, main_job
from case_study.runners import as_process

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


@pytest.fixture
def open_path():
    """Return a folder that any user may enter, which pytest's own isn't."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # noqa: PTH101
        yield Path(folder)


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


def refused_as_nobody(do) -> str:
    """Return what the demo says to a user without rights."""
    asked, answers = multiprocessing.get_context("fork").Pipe()

    def unprivileged() -> None:
        os.setuid(NOBODY)
        try:
            answers.send(f"done: {do()}")
        except Exception as failure:
            answers.send(f"{type(failure).__name__}: {failure}")

    child = multiprocessing.get_context("fork").Process(target=unprivileged)
    child.start()
    sentence = asked.recv()
    child.join()
    return sentence


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_folders_that_may_not_be_entered_are_named(open_path):
    assert refused_as_nobody(lambda: demo.only_run(open_path / "lakehouse").__enter__()) == (
        f"DemoFailed: the lakehouse at {open_path}/lakehouse can't be written: Permission denied"
    )
    closed = open_path / "closed" / "visits"
    closed.mkdir(parents=True)
    assert refused_as_nobody(lambda: demo.present_feeds(closed.parent)) == "done: ['visits']"
    closed.chmod(0o700)
    assert refused_as_nobody(lambda: demo.present_feeds(closed.parent)) == (
        f"DemoFailed: the folder '{closed}' can't be read: Permission denied"
    )
    closed.parent.chmod(0o700)
    assert refused_as_nobody(lambda: demo.present_feeds(closed.parent)) == (
        f"DemoFailed: the input folder '{closed.parent}' can't be entered: Permission denied"
    )


def test_a_failed_step_ends_the_run_with_its_exit_code(capfd):
    step = demo.Step("broken", ("bash", "-c", "echo why >&2; exit 3"))
    with pytest.raises(demo.DemoFailed, match="step 'broken' exited 3") as stopped:
        demo.run_steps([step], as_process)
    assert stopped.value.exit_code == 3


def test_refused_data_name_the_command_that_goes_on(capfd):
    parse = next(s for s in main_job("/lake house", Path("/landing"), ["visits"]) if s.when_refused)
    for code, named in ((3, True), (1, False)):
        step = dataclasses.replace(parse, command=("bash", "-c", f"exit {code}"))
        with pytest.raises(demo.DemoFailed) as stopped:
            demo.run_steps([step], as_process)
        assert (" --checkpoint '/lake house/checkpoints/dead_letter_visits' --max_bad_share 1`, then run" in
                str(stopped.value)) == named  # fmt: skip


def test_the_tables_from_kafka_are_a_lakehouse_of_their_own(lakehouse_root, landing, monkeypatch, capsys):
    monkeypatch.setenv("LAKEHOUSE_SOURCE", "files")
    monkeypatch.setattr(
        demo, "run_from_kafka", lambda lakehouse, *_: ({"at": 1.0}, {"lines": []}, [lakehouse])
    )
    monkeypatch.setattr(demo, "summarise", lambda *_: None)
    used = []
    monkeypatch.setattr(
        demo, "only_run", lambda lakehouse: used.append(lakehouse) or contextlib.nullcontext()
    )
    (lakehouse_root / "by_kafka").mkdir(parents=True)
    assert demo.main(input=str(landing), source="kafka") == 0
    assert used == [lakehouse_root / "by_kafka"]
    assert os.environ["LAKEHOUSE_ROOT"] == f"{lakehouse_root}/by_kafka"
    assert os.environ["LAKEHOUSE_SOURCE"] == "kafka"


def test_complete_generated_data_is_kept(tmp_path, capsys):
    (tmp_path / "truth.json").write_text(json.dumps({"parameters": {"visits": 100}}), encoding="utf-8")
    demo.generate(tmp_path, 100, as_process)
    assert capsys.readouterr().out == f"landing data exists: {tmp_path}\n"


def test_absent_feeds_are_left_out_of_the_loads():
    steps = main_job("/lakehouse", Path("/landing"), ["users", "devices"])
    assert [step.name for step in steps] == ["load users", "load devices", "dbt build"]
    assert steps[-1].command == ("dbt", "build", "--target", "local"), "models of absent feeds get no rows"
    assert [step.name for step in main_job("/lakehouse", Path("/landing"), FEEDS)] == [
        "load visits", "load users", "load user_changes", "load devices", "dead-letter visits", "dbt build", "report",
    ]  # fmt: skip
