"""The contract of a program without Spark: flags, report, exit codes."""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from python_jobs.shared.core.command_line import end, program_outcome, run_program
from python_jobs.shared.core.failures import DataRefused


@dataclass(frozen=True)
class Parameters:
    """Copy the lines of a topic."""

    topic: str
    """Topic to read."""
    from_: str = "earliest"
    """Where to begin."""
    options: dict[str, str] = field(default_factory=dict)
    """Settings of the client."""


def described(parameters: Parameters) -> Mapping[str, Any]:
    return {"topic": parameters.topic, "from": parameters.from_, "options": parameters.options}


def test_flags_become_parameters_and_the_report_is_one_line() -> None:
    argv = ["--topic", "Größe", "--from", "latest", "--options.acks", "all"]
    assert program_outcome(Parameters, described, argv) == (
        0, '{"topic": "Größe", "from": "latest", "options": {"acks": "all"}}',
    )  # fmt: skip


def test_a_time_in_the_report_is_a_text() -> None:
    moment = dt.datetime(2024, 3, 1, 10, tzinfo=dt.UTC)
    assert program_outcome(Parameters, lambda _: {"at": moment}, ["--topic", "t"]) == (
        0, '{"at": "2024-03-01 10:00:00+00:00"}',
    )  # fmt: skip


def test_the_configuration_gives_what_flags_override(tmp_path: Path) -> None:
    config = tmp_path / "copy.yml"
    config.write_text("topic: visits\nfrom_: latest\noptions: {acks: all}\n", encoding="utf-8")
    _, report = program_outcome(Parameters, described, ["--config", str(config), "--from", "5"])
    assert json.loads(report or "") == {"topic": "visits", "from": "5", "options": {"acks": "all"}}


def test_a_number_that_is_no_json_is_a_text_in_the_report(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    code, report = program_outcome(
        Parameters,
        lambda _: {"share": float("nan"), "limits": [float("-inf"), 0.5]},
        ["--topic", "t", "--report", str(file)],
    )
    assert (code, report) == (0, '{"share": "NaN", "limits": ["-Infinity", 0.5]}')
    assert file.read_text(encoding="utf-8") == f"{report}\n"


def test_the_report_is_also_written_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    code, report = program_outcome(
        Parameters, lambda _: {"name": "Größe"}, ["--topic", "t", "--report", str(file)]
    )
    assert (code, report) == (0, '{"name": "Größe"}')
    assert file.read_bytes() == '{"name": "Größe"}\n'.encode()


def test_a_known_failure_is_its_sentence_and_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(_: Parameters) -> Mapping[str, Any]:
        raise DataRefused("a line is empty")

    assert program_outcome(Parameters, refuse, ["--topic", "t"]) == (3, None)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "DataRefused: a line is empty\n")


@pytest.mark.parametrize("failure", [OverflowError("date value out of range"), ValueError("not a time")])
def test_another_wrong_value_keeps_its_trace(failure: Exception) -> None:
    def fail(_: Parameters) -> Mapping[str, Any]:
        raise failure

    with pytest.raises(type(failure), match=str(failure)):
        program_outcome(Parameters, fail, ["--topic", "t"])


def test_another_failure_is_raised() -> None:
    def fail(_: Parameters) -> Mapping[str, Any]:
        raise KeyError("offset")

    with pytest.raises(KeyError, match="offset"):
        program_outcome(Parameters, fail, ["--topic", "t"])


def test_the_help_names_each_flag_with_its_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["jobs/copy_topic.py"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        program_outcome(Parameters, described, ["--help"])
    assert stopped.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("usage: copy_topic.py ")
    for text in (
        "Copy the lines of a topic.",
        "--topic TOPIC Topic to read. (required, type: str)",
        "--from FROM Where to begin. (type: str, default: earliest)",
        "YAML file with the parameters below.",
        "Also write the JSON report to this file. (type: str | null, default: null)",
    ):
        assert text in printed
    assert "from_" not in printed
    assert printed.count("Copy the lines of a topic.") == 1


def test_flags_that_are_missing_unknown_or_wrong_end_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, named in (
        ([], "topic"),
        (["--topic", "t", "--form", "x"], "--form"),
        (["--from_", "x"], "--from_"),
    ):
        with pytest.raises(SystemExit) as stopped:
            program_outcome(Parameters, described, argv)
        assert stopped.value.code == 2
        assert named in capsys.readouterr().err


def test_a_program_ends_with_its_code_and_prints_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_program(Parameters, described, ["--topic", "t"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == '{"topic": "t", "from": "earliest", "options": {}}\n'


def test_no_report_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        end(4, None)
    assert stopped.value.code == 4
    assert capsys.readouterr().out == ""
