"""The contract of a job as a process: command line, report, exit codes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.spark.job import known_failure, run_job
from python_jobs.shared.spark.jvm import require_classic


@dataclass(frozen=True)
class Parameters:
    """Copy a table."""

    source: str
    """Table to read."""
    share: float = 0.1
    """Share of rows, 0 to 1."""
    columns: list[str] = field(default_factory=list)
    """Columns to keep."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise WrongUse(f"--share is a share from 0 to 1, got {self.share}")


def call(argv, run=lambda spark, parameters: {"rows": 3}):
    with pytest.raises(SystemExit) as stopped:
        run_job(Parameters, run, argv)
    return stopped.value.code


def test_the_report_is_the_last_line_and_a_file(spark, tmp_path, capsys):
    seen = []

    def run(spark, parameters):
        seen.append(parameters)
        print("on the way")  # noqa: T201
        return {"rows": 3, "who": "Zoë"}

    report = tmp_path / "report.json"
    assert call(["--source", "a.b", "--columns", "[x, y]", "--report", str(report)], run) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"rows": 3, "who": "Zoë"}
    assert json.loads(report.read_text(encoding="utf-8")) == {"rows": 3, "who": "Zoë"}
    assert seen == [Parameters("a.b", 0.1, ["x", "y"])]


def test_a_configuration_file_gives_what_flags_override(spark, tmp_path):
    config = tmp_path / "job.yml"
    config.write_text("source: a.b\nshare: 0.3\n", encoding="utf-8")
    seen = []
    call(["--config", str(config), "--share", "0.5"], lambda spark, p: seen.append(p) or {})
    assert seen == [Parameters("a.b", 0.5)]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "required"),
        (["--source", "a", "--colour", "red"], "colour"),
        (["--source", "a", "--share", "much"], "share"),
        (["--source", "a", "--share", "2"], "--share is a share from 0 to 1, got 2.0"),
    ],
)
def test_wrong_use_exits_2_and_says_why(argv, sentence, capsys):
    assert call(argv) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("failure", "code"), [(JobFailed, 1), (WrongUse, 2), (DataRefused, 3), (NotReady, 4)]
)
def test_a_failure_is_one_sentence_and_its_own_exit_code(spark, capsys, failure, code):
    def run(spark, parameters):
        raise failure("the source is empty")

    assert call(["--source", "a"], run) == code
    assert capsys.readouterr().err.strip() == f"{failure.__name__}: the source is empty"


def test_a_fault_of_ours_keeps_its_trace(spark):
    def run(spark, parameters):
        raise KeyError("no such column")

    with pytest.raises(KeyError):
        run_job(Parameters, run, ["--source", "a"])


@pytest.mark.parametrize(
    ("variable", "value"), [("SPARK_REMOTE", "sc://localhost"), ("SPARK_API_MODE", "connect")]
)
def test_a_session_of_spark_connect_is_refused(monkeypatch, capsys, variable, value):
    monkeypatch.setenv(variable, value)
    assert call(["--source", "a"]) == 2
    assert "jobs need a classic Spark session, got one of Spark Connect" in capsys.readouterr().err


def test_a_classic_session_is_taken_and_another_one_is_refused(spark):
    require_classic(spark)
    with pytest.raises(WrongUse, match="jobs need a classic Spark session"):
        require_classic(object())


@pytest.mark.parametrize(
    ("message", "kind", "sentence"),
    [
        ("a\nPermission denied: /x\nat java…", JobFailed, "permission denied (Permission denied: /x)"),
        (
            "[DELTA_INVALID_CHARACTERS_IN_COLUMN_NAMES] Found…\nInvalid column names: b c.\n\tat java…",
            WrongUse,
            "a Delta table takes no column of this name; name it otherwise "
            "([DELTA_INVALID_CHARACTERS_IN_COLUMN_NAMES] Found… Invalid column names: b c.)",
        ),
        (
            "[CANNOT_MERGE_SCHEMAS] Failed merging schemas:",
            DataRefused,
            "the Parquet files hold what Spark doesn't read as one table "
            "([CANNOT_MERGE_SCHEMAS] Failed merging schemas:)",
        ),
        (
            "TASK_WRITE_FAILED…\nCaused by: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file "
            "file:///a.gz.  SQLSTATE: KD001",
            JobFailed,
            "cannot read file:///a.gz (TASK_WRITE_FAILED…)",
        ),
    ],
)
def test_what_a_user_can_mend_becomes_a_sentence(message, kind, sentence):
    known = known_failure(ValueError(message))
    assert (type(known), str(known)) == (kind, sentence)
    assert known_failure(ValueError("something else")) is None


@pytest.mark.parametrize(
    ("sql", "code", "sentence"),
    [
        ("1/0", 3, "DataRefused: source fails at a value ([DIVIDE_BY_ZERO] Division by zero."),
        ("cast('a'  as int)", 3, "DataRefused: source fails at a value ([CAST_INVALID_INPUT] The value 'a'"),
        ("array(1)[7]", 3, "DataRefused: source fails at a value ([INVALID_ARRAY_INDEX]"),
        ("raise_error('a rule')", 3, "DataRefused: source fails at a value ([USER_RAISED_EXCEPTION] a rule"),
        ("nocol + 1", 2, "WrongUse: source can't be used ([UNRESOLVED_COLUMN.WITH_SUGGESTION]"),
        ("nofunc(1)", 2, "WrongUse: source can't be used ([UNRESOLVED_ROUTINE] Cannot resolve"),
        ("1 +", 2, "WrongUse: source can't be used ([PARSE_SYNTAX_ERROR] Syntax error at or near end"),
    ],
)
def test_a_failure_in_sql_of_the_user_is_a_sentence_and_in_sql_of_ours_a_trace(
    spark, capsys, tmp_path, sql, code, sentence
):
    rows = spark.range(1)
    file = tmp_path / "expression.sql"
    file.write_text(sql.replace("  ", "\n  "), encoding="utf-8")

    def run(spark, parameters):
        return {"rows": len(rows.select(F.expr(sql)).collect())}

    for source in (f"id > 0 and {sql}", str(file)):
        assert call(["--source", source], run) == code
        assert capsys.readouterr().err.splitlines()[-1].startswith(sentence)
    with pytest.raises((PySparkException, Py4JJavaError)):
        run_job(Parameters, run, ["--source", "id > 0"])
