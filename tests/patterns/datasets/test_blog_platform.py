"""The generated case study: same bytes every time, exact counts, right answers checked by plain Python."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import itertools
import json
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from case_study.datasets import blog_platform, landing
from case_study.datasets.blog_platform import run
from case_study.datasets.parameters import Parameters
from case_study.datasets.users import BIOGRAPHIES, user_changes
from case_study.datasets.visits import IMPERFECTIONS, visit_line_plan, visit_lines
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.spark.job import run_job
from tests.patterns.datasets.blog_landing import (
    USER_FIELDS,
    as_time,
    gold_of,
    gold_of_users,
    hash_of,
    lines_of,
    parsed,
    read_changes,
    read_devices,
    read_visits,
    users_at,
)
from tests.support.session import setting
from tests.support.snippets import snippet

VISITS = 1_500
DAYS = ("2024-03-01", "2024-03-02", "2024-03-03")
# The users feeds are small at this size: their faults need larger shares to show.
DEFAULT = Parameters(output="", visits=VISITS, null_key_share=0.02)
NO_IMPERFECTION = {f"{name}_share": 0.0 for name in IMPERFECTIONS}


@dataclasses.dataclass(frozen=True)
class Generated:
    folder: Path
    report: dict[str, Any]
    truth: dict[str, Any]


@pytest.fixture(scope="module")
def generated(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Generated:
    folder = tmp_path_factory.mktemp("blog") / "landing"
    report = run(spark, dataclasses.replace(DEFAULT, output=str(folder)))
    return Generated(folder, report, json.loads((folder / "truth.json").read_text("utf-8")))


def end_of(day: str) -> dt.datetime:
    return dt.datetime.fromisoformat(f"{day}T00:00:00+00:00") + dt.timedelta(days=1)


def hashes(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


# --- Truth against an independent reading ---


def test_the_counts_of_visits_are_those_of_a_plain_reading(generated: Generated) -> None:
    truth = generated.truth["feeds"]["visits"]
    counts, _ = read_visits(generated.folder)

    assert {name: truth[name] for name in counts} == counts
    assert sum(truth["precedence"].values()) == truth["lines"]
    assert (
        truth["lines"] == VISITS + truth["precedence"]["exact_duplicate"] + truth["precedence"]["superseded"]
    )


def test_the_gold_tables_of_visits_are_those_of_a_plain_reading(generated: Generated) -> None:
    _, kept = read_visits(generated.folder)
    expected = gold_of(kept)

    assert {name: generated.truth["gold"][name] for name in expected} == expected


def test_each_imperfection_of_the_visits_is_counted_exactly(generated: Generated) -> None:
    known_users = {change["id"] for _, change in read_changes(generated.folder)}
    counts, deliveries = Counter[str](), defaultdict(list)
    for folder, line in lines_of(generated.folder, "visits"):
        visit = parsed(line)
        if visit is None:
            counts["unparsable"] += 1
            continue
        required = ("visit_id", "event_time", "user_id", "page", "context")
        absent = [field for field in required if visit.get(field) is None]
        if absent:
            counts["null_key" if set(absent) & {"visit_id", "event_time"} else "missing_field"] += 1
        elif not (
            isinstance(visit["visit_id"], str)
            and (as_time(str(visit["event_time"])))
            and isinstance(visit["keep_private"], bool)
            and isinstance(visit["page"], str)
            and isinstance(visit["context"], dict)
        ):
            counts["wrong_type"] += 1
        elif visit["page"].startswith("healthcheck"):
            counts["probe"] += 1
        else:
            deliveries[visit["visit_id"], visit["event_time"]].append((folder, line, visit))
    for lines in deliveries.values():
        payloads = {line for _, line, _ in lines}
        counts["exact_duplicate"] += len(lines) - len(payloads)
        counts["corrected"] += len(payloads) - 1
        folder, line, visit = lines[0]
        hour = as_time(visit["event_time"]).strftime("date=%Y-%m-%d/hour=%H")
        counts["late"] += len(lines) == 1 and folder > hour
        counts["unknown_user"] += visit["user_id"] not in known_users
        counts["awkward_text"] += visit["context"]["ad_id"] == 'ad "50 % größer" \\ ☕'

    assert generated.truth["feeds"]["visits"]["imperfections"] == dict(counts)
    assert min(counts[name] for name in IMPERFECTIONS) > 0
    assert generated.report["imperfections"] == dict(counts)


def test_lines_come_late_by_one_to_many_folders_and_again_in_the_same_or_a_later_one(
    generated: Generated,
) -> None:
    delays = set()
    for folder, line in lines_of(generated.folder, "visits"):
        visit = parsed(line)
        if visit and (time := as_time(str(visit.get("event_time")))):
            landed = dt.datetime.strptime(f"{folder}+0000", "date=%Y-%m-%d/hour=%H%z")
            delays.add((landed - time.replace(minute=0, second=0, microsecond=0)) // dt.timedelta(hours=1))

    assert {0, 1, 2, 3, 5, 8, 24} <= delays
    assert min(delays) == 0
    details = generated.truth["feeds"]["visits"]["details"]
    for name in ("exact_duplicate", "corrected"):
        assert details[f"{name}_in_the_same_folder"] > 0
        assert details[f"{name}_in_a_later_folder"] > 0


def test_a_visit_is_a_series_of_events_of_one_user(generated: Generated) -> None:
    _, kept = read_visits(generated.folder)
    known_users = {change["id"] for _, change in read_changes(generated.folder)}
    series = defaultdict(list)
    for visit in kept:
        series[str(visit["visit_id"])].append(visit)

    assert max(len(events) for events in series.values()) >= 6
    assert 2.5 < len(kept) / len(series) < 5
    assert all(
        len({visit["user_id"] for visit in events if visit["user_id"] in known_users}) <= 1
        for events in series.values()
    )


# --- Users and devices ---


@pytest.mark.parametrize("day", DAYS)
def test_the_daily_extract_is_the_state_of_the_change_feed_at_the_end_of_the_day(
    generated: Generated, day: str
) -> None:
    lines = (parsed(line) for folder, line in lines_of(generated.folder, "users") if folder == f"date={day}")
    extract = [record for record in lines if record and record["id"] is not None]
    expected = users_at(read_changes(generated.folder), end_of(day))

    assert {record.pop("id"): record for record in extract} == expected
    assert len(extract) == len(expected)
    assert generated.truth["gold"]["users_by_day"][day] == gold_of_users(expected)


def test_the_current_users_are_those_after_all_changes(generated: Generated) -> None:
    expected = gold_of_users(users_at(read_changes(generated.folder), end_of("2100-01-01")))

    assert generated.truth["gold"]["current_users"] == expected


def test_the_reference_feeds_are_counted_exactly(generated: Generated) -> None:
    for feed, key in (("user_changes", "id"), ("users", "id"), ("devices", "version")):
        partitions, faults, rows = Counter[str](), Counter[str](), 0
        seen = set()
        for folder, line in lines_of(generated.folder, feed):
            partitions[folder] += 1
            record = parsed(line)
            if record is None:
                faults["unparsable"] += 1
            elif record[key] is None:
                faults["null_key"] += 1
            elif feed == "user_changes" and line in seen:
                faults["exact_duplicate"] += 1
            else:
                rows += 1
            seen.add(line)
        truth = generated.truth["feeds"][feed]
        assert truth["partitions"] == dict(partitions)
        assert truth["lines"] == rows + faults.total()
        assert (truth["rows"], truth["imperfections"]) == (rows, dict(faults))


def test_the_change_feed_holds_every_kind_of_change(generated: Generated) -> None:
    changes = read_changes(generated.folder)
    by_user = defaultdict(list)
    for folder, change in changes:
        by_user[change["id"]].append((folder, change))
    kinds = set()
    for biography in by_user.values():
        sequences = [change["sequence"] for _, change in biography]
        times = [as_time(change["changed_at"]) for _, change in biography]
        assert len(set(sequences)) == len(sequences)
        assert times == sorted(times)
        for (folder, before), (next_folder, change) in itertools.pairwise(biography):
            different = {field for field in USER_FIELDS if before[field] != change[field]} - {"updated_at"}
            kinds |= {("op", change["op"])}
            if change["op"] == "U" and change["is_deleted"]:
                kinds.add("soft delete")
            if change["op"] == "U" and before["is_deleted"]:
                kinds.add("back after a soft delete")
            if change["op"] == "I" and before["op"] == "D":
                kinds.add("back after a hard delete")
            if folder == next_folder and folder != "date=2024-03-01/hour=00":
                kinds.add("several in a batch")
            if before["changed_at"] == change["changed_at"]:
                kinds.add("equal timestamps")
            if folder > next_folder:
                kinds.add("out of order")
            if different == {"email"} and change["email"] is None:
                kinds.add("only to NULL")
            if as_time(change["changed_at"]).strftime("date=%Y-%m-%d/hour=%H") < next_folder:
                kinds.add("late")
        plans = [change["plan"] for _, change in biography]
        if any(
            first == third != second
            for first, second, third in zip(plans, plans[1:], plans[2:], strict=False)
        ):
            kinds.add("reverted")

    assert kinds == {
        ("op", "I"),
        ("op", "U"),
        ("op", "D"),
        "soft delete",
        "back after a soft delete",
        "back after a hard delete",
        "several in a batch",
        "equal timestamps",
        "out of order",
        "only to NULL",
        "late",
        "reverted",
    }
    truth = generated.truth["feeds"]["user_changes"]
    operations = Counter(change["op"] for _, change in changes)
    assert {"I": truth["inserts"], "U": truth["updates"], "D": truth["hard_deletes"]} == operations
    soft = sum(change["op"] == "U" and change["is_deleted"] for _, change in changes)
    assert truth["soft_deletes"] == soft


def test_the_current_devices_are_those_after_all_increments(generated: Generated) -> None:
    devices = read_devices(generated.folder)
    rows = [(*key, full_name) for key, full_name in devices.items()]

    assert generated.truth["gold"]["current_devices"] == {"devices": len(devices), "hash": hash_of(rows)}
    assert 0 < len(devices) < 48


def test_the_daily_list_of_devices_is_the_state_of_the_increments(generated: Generated) -> None:
    lists: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    for folder, line in lines_of(generated.folder, "devices_list"):
        device = json.loads(line)
        lists[folder][device["type"], device["version"]] = device["full_name"]
    assert sorted(lists) == [f"date={day}" for day in DAYS]
    assert lists[f"date={DAYS[-1]}"] == read_devices(generated.folder)
    assert len({len(devices) for devices in lists.values()}) > 1
    counts = generated.truth["feeds"]["devices_list"]
    assert counts["partitions"] == {folder: len(devices) for folder, devices in lists.items()}


# --- Determinism ---


def test_a_run_over_an_earlier_one_and_split_otherwise_gives_the_same_bytes(
    spark: SparkSession, generated: Generated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = tmp_path / "visits/date=2024-02-01/hour=00/visits-00000.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("{}")
    (tmp_path / "foreign.txt").write_text("mine")
    params = dataclasses.replace(DEFAULT, output=str(tmp_path), overwrite=True)
    monkeypatch.setattr(landing, "LINES_PER_TASK", 400)
    with (
        setting(spark, "spark.sql.shuffle.partitions", "3"),
        setting(spark, "spark.sql.adaptive.enabled", "false"),
    ):
        run(spark, params)

    (tmp_path / "foreign.txt").unlink()
    assert hashes(tmp_path) == hashes(generated.folder)


def test_more_lines_an_hour_make_more_files(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def files(visits: int) -> set[int]:
        params = dataclasses.replace(DEFAULT, visits=visits)
        lines = visit_lines(visit_line_plan(spark, params), params)
        return {row["file"] for row in lines.select("file").distinct().collect()}

    monkeypatch.setattr(landing, "LINES_PER_FILE", 10)

    assert files(visits=72 * 10) == {0}
    assert files(visits=72 * 30) == {0, 1, 2}


# --- Knobs ---


def planned(spark: SparkSession, params: Parameters) -> dict[tuple[int, int], tuple[str | None, bool, str]]:
    """Return (imperfection, is_counted, where and what) of each visit line by (event, copy)."""
    lines = visit_lines(visit_line_plan(spark, params), params)
    rows = lines.select(
        "event", "copy", "imperfection", "is_counted", "partition", "file", "payload"
    ).collect()
    return {(row[0], row[1]): (row[2], row[3], f"{row[4]}/{row[5]}/{row[6]}") for row in rows}


@pytest.fixture(scope="module")
def planned_by_default(spark: SparkSession) -> dict[tuple[int, int], tuple[str | None, bool, str]]:
    return planned(spark, DEFAULT)


@pytest.mark.parametrize("imperfection", IMPERFECTIONS)
def test_a_knob_at_zero_removes_its_imperfection_and_touches_no_other_line(
    spark: SparkSession,
    planned_by_default: dict[tuple[int, int], tuple[str | None, bool, str]],
    imperfection: str,
) -> None:
    without = planned(spark, dataclasses.replace(DEFAULT, **{f"{imperfection}_share": 0.0}))
    others = {key: line for key, line in planned_by_default.items() if line[0] != imperfection}

    assert getattr(Parameters(output=""), f"{imperfection}_share") > 0
    assert any(name == imperfection for name, _, _ in planned_by_default.values())
    assert not any(name == imperfection for name, _, _ in without.values())
    assert {key: without[key] for key in others} == others


def test_without_imperfections_every_line_is_kept(spark: SparkSession) -> None:
    lines = planned(spark, dataclasses.replace(DEFAULT, **NO_IMPERFECTION))

    assert len(lines) == VISITS
    assert {line[:2] for line in lines.values()} == {(None, False)}


def test_no_late_visits_means_no_late_changes_of_users(spark: SparkSession) -> None:
    def late(params: Parameters) -> int:
        hour = f"(changed_ms - {params.start_ms}) div 3600000"
        return user_changes(spark, params).where(f"step > 0 and landing_hour > {hour}").count()

    assert late(DEFAULT) > 0
    assert late(dataclasses.replace(DEFAULT, late_share=0.0)) == 0


def test_all_biographies_are_lived_among_the_fewest_users(spark: SparkSession) -> None:
    assert 2 * len(BIOGRAPHIES) <= Parameters(output="", visits=1).user_count == 100


# --- Use and wrong use ---


def test_the_command_of_the_page() -> None:
    command = shlex.split(
        snippet(
            "docs/datasets.md", "tests/patterns/datasets/test_blog_platform.py::test_the_command_of_the_page"
        ).replace("\\\n", " ")
    )
    parameters, _ = parse_parameters(Parameters, command[2:])

    assert command[:2] == ["spark-submit", "case_study/datasets/blog_platform.py"]
    assert parameters == Parameters(output="landing", late_share=0.1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--visits", "0"], "visits must be 1 or more, got 0"),
        (["--days", "0"], "days must be 1 or more, got 0"),
        (["--users", "0"], "users must be 1 or more, got 0"),
        (["--late_share", "1.5"], "--late_share is 1.5, but must be between 0 and 1"),
        (["--probe_share", "-0.1"], "--probe_share is -0.1, but must be between 0 and 1"),
        (["--start", "1 March"], "--start is '1 March', but must be a day written YYYY-MM-DD"),
    ],
)
def test_wrong_flags_are_named_in_one_sentence(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert exit_code(["--output", str(tmp_path / "landing"), *flags]) == 2
    assert capsys.readouterr().err == f"WrongUse: {message}\n"
    assert not (tmp_path / "landing").exists()


def test_an_unknown_flag_is_wrong_use(spark: SparkSession, tmp_path: Path) -> None:
    assert exit_code(["--output", str(tmp_path / "landing"), "--speed", "9"]) == 2


def test_a_folder_in_use_is_refused_and_left_alone(
    spark: SparkSession, generated: Generated, capsys: pytest.CaptureFixture[str]
) -> None:
    before = hashes(generated.folder)

    assert exit_code(["--output", str(generated.folder)]) == 2
    assert capsys.readouterr().err == (
        f"WrongUse: --output '{generated.folder}' is not empty; pass --overwrite true to replace its feeds\n"
    )
    assert hashes(generated.folder) == before


def test_a_file_is_refused_as_output(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "landing").write_text("not a folder")

    assert exit_code(["--output", str(tmp_path / "landing")]) == 2
    assert capsys.readouterr().err.endswith("is a file, but must be a folder\n")


def test_an_unfinished_run_has_no_truth_and_is_not_continued(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = Parameters(output=str(tmp_path), visits=20, users=10, days=1)
    monkeypatch.setattr(blog_platform, "truth_of", dies)
    with pytest.raises(KeyboardInterrupt):
        run(spark, params)

    assert any((tmp_path / "visits").rglob("*.json"))
    assert not (tmp_path / "truth.json").exists()
    with pytest.raises(WrongUse, match="is not empty"):
        run(spark, params)


def dies(*_: Any) -> Any:
    raise KeyboardInterrupt


def exit_code(argv: Iterable[str]) -> Any:
    with pytest.raises(SystemExit) as stopped:
        run_job(Parameters, run, list(argv))
    return stopped.value.code
