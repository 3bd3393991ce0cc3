"""The main job end to end on generated input: the truth's numbers, then reruns, new hours and corrections.

The tests of this module run in order on one lakehouse: each takes up where the one before ended.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import re
import shlex
import shutil
from collections import Counter

import pytest
from pyspark.sql import functions as F

from case_study.main_job import FEEDS, Step, main_job
from python_jobs.idempotency.proxy import read_exposed
from python_jobs.ingestion import compactor
from python_jobs.shared.files.readiness import ready_versions
from tests.support.dbt_project import REPOSITORY
from tests.support.lakehouse import Lakehouse
from tests.support.rows import assert_rows
from tests.support.snippets import snippet
from tools.check_documented import relations, sources

pytestmark = pytest.mark.end_to_end

VISIT_TABLES = (
    "silver_visits",
    "gold_page_views_by_hour",
    "gold_referral_statistics_by_day",
    "gold_visit_statistics",
    "gold_page_cube_by_day",
    "gold_page_cube_by_week",
)


EMPTIED_DAY = "2024-02-10"


def event(visit_id: str, event_time: str, page: str, user_id: str = "u") -> str:
    """Return the line of one page event."""
    fields = {"visit_id": visit_id, "event_time": event_time, "user_id": user_id, "page": page}
    return json.dumps(fields | {"keep_private": False, "context": {"referral": page}}) + "\n"


def documented_step(lakehouse, test) -> dict:
    """Run the command that the case study's page has for a test; return its report."""
    command = snippet("docs/case_study.md", f"tests/lakehouse/test_main_job.py::{test}").replace("\\\n", " ")
    return lakehouse.step(
        Step(test, tuple(shlex.split(command.replace("$LAKEHOUSE_ROOT", str(lakehouse.root)))))
    )


@pytest.fixture(scope="module")
def first_report(lakehouse: Lakehouse) -> dict:
    """Load the newer days first and the oldest day after them; return the second run's report.

    With the newer days comes a file of two events that the truth does not know: the only one of its day, and one on a
    page of its own. With the oldest day the file lands again, empty. The truth knows nothing of loads, so every test
    against it also shows that neither their order nor what they took back decides anything.
    """
    oldest = lakehouse.landing / "visits" / "date=2024-03-01"
    held_back = lakehouse.landing.parent / oldest.name
    shutil.move(oldest, held_back)
    taken_back = lakehouse.landing / "visits" / "date=2024-03-03" / "hour=23" / "taken_back.json"
    taken_back.parent.mkdir(parents=True, exist_ok=True)
    taken_back.write_text(
        event("alone", f"{EMPTIED_DAY}T10:00:00Z", "taken-back")
        + event("also", "2024-03-02T10:00:00Z", "taken-back"),
        encoding="utf-8",
    )
    lakehouse.run()
    views = (
        lakehouse.table("gold_page_views_by_hour").where("page = 'taken-back'").select("event_date", "views")
    )
    assert_rows(views, [(dt.date(2024, 2, 10), 1), (dt.date(2024, 3, 2), 1)])
    assert lakehouse.table("gold_visit_statistics").where(f"event_date = '{EMPTIED_DAY}'").count() == 1

    shutil.move(held_back, oldest)
    taken_back.write_text("", encoding="utf-8")
    return lakehouse.run()


def test_the_six_counts_add_up_to_the_lines_read_and_match_the_truth(first_report, truth):
    statuses = Counter()
    for entry in first_report["lines"]:
        statuses[entry["status"]] += entry["lines"]
    read = statuses.pop("read")
    assert read == sum(statuses.values()) == truth["feeds"]["visits"]["lines"]
    assert dict(statuses) == truth["feeds"]["visits"]["precedence"]


def test_every_column_of_every_table_is_documented_and_no_other(first_report, lakehouse):
    documented = {
        name: {column["name"] for column in entry["columns"]} for name, entry in relations(REPOSITORY).items()
    }
    # A companion that a pattern keeps beside its model (`…__audit_results`) is described with the pattern.
    tables = {log.parent.name for log in lakehouse.root.glob("*/*/_delta_log")}
    for name in tables:
        if "__" not in name and not re.search(r"_\d{8}$", name):  # neither companions nor versions
            assert set(lakehouse.table(name).columns) == documented[name], name
    # A source that isn't there yet stands in for its table with the types that its YAML has.
    for source in sources(REPOSITORY):
        if source["name"] in tables:
            declared = {c["name"]: c["data_type"].replace(" ", "") for c in source["columns"]}
            assert dict(lakehouse.table(source["name"]).dtypes) == declared, source["name"]


def test_invalid_lines_carry_their_first_rule(first_report, truth):
    invalid = {e["reason"]: e["lines"] for e in first_report["lines"] if e["status"] == "invalid"}
    assert invalid == truth["feeds"]["visits"]["invalid_by_first_rule"]


def test_late_lines_by_delay_match_the_truth(first_report, truth):
    delays = {entry["landed_after"]: entry["valid_lines"] for entry in first_report["delays"]}
    assert list(delays) == ["0 hours", "1 hour", "3 hours", "12 hours", "more"]
    assert delays == truth["feeds"]["visits"]["valid_by_delay"]
    assert min(delays.values()) > 0


def test_page_views_by_hour_match_the_truth(first_report, lakehouse, truth):
    views: dict[str, dict[str, int]] = {}
    for row in lakehouse.table("gold_page_views_by_hour").collect():
        views.setdefault(f"{row.event_hour:%Y-%m-%dT%H}", {})[row.page] = row.views
    assert views == truth["gold"]["page_views_by_hour"]


def test_referral_statistics_by_day_match_the_truth(first_report, lakehouse, truth):
    days: dict[str, dict] = {}
    for row in lakehouse.table("gold_referral_statistics_by_day").collect():
        days.setdefault(f"{row.event_date}", {})[row.referral] = {"visits": row.visits, "users": row.users}
    assert days == truth["gold"]["referral_statistics_by_day"]


def test_visit_statistics_match_the_truth(first_report, lakehouse, truth):
    days = {
        f"{row.event_date}": {"events": row.events, "visits": row.visits, "users": row.users}
        for row in lakehouse.table("gold_visit_statistics").collect()
    }
    assert days == truth["gold"]["visit_statistics_by_day"]


def test_a_file_that_lands_again_without_its_lines_takes_its_events_away(first_report, lakehouse):
    assert lakehouse.table("silver_visits").where("page = 'taken-back'").count() == 0
    for name in VISIT_TABLES[1:-1]:
        assert lakehouse.table(name).where(f"event_date = '{EMPTIED_DAY}'").count() == 0, name
    assert lakehouse.table("gold_referral_statistics_by_day").where("referral = 'taken-back'").count() == 0


def test_users_as_of_each_day_match_the_truth(first_report, lakehouse, truth):
    history = lakehouse.table("gold_users_history")
    for day, expected in truth["gold"]["users_by_day"].items():
        end_of_day = F.expr(f"timestamp'{day}' + interval 1 day - interval 1 microsecond")
        valid = history.where(
            (F.col("effective_from") <= end_of_day)
            & (F.col("effective_to").isNull() | (F.col("effective_to") > end_of_day))
        )
        plans = {row["plan"]: row["count"] for row in valid.groupBy("plan").count().collect()}
        assert plans == expected["by_plan"], day


def test_todays_plan_stands_on_every_version_of_a_user(first_report, lakehouse):
    versions = lakehouse.spark.table("lakehouse.gold_users_by_plan")
    assert set(versions.columns) == {
        column["name"] for column in relations(REPOSITORY)["gold_users_by_plan"]["columns"]
    }
    today = lakehouse.table("silver_users").selectExpr("id", "if(is_deleted, null, plan)")
    assert_rows(versions.select("id", "plan_current").distinct(), [tuple(row) for row in today.collect()])
    assert versions.count() == versions.select("user_version_key").distinct().count()


def test_a_visit_has_the_plan_of_its_time_and_the_name_of_its_device(first_report, lakehouse):
    versions: dict[str, list] = {}
    for row in lakehouse.table("gold_users_history").collect():
        versions.setdefault(row.id, []).append((row.effective_from, row.effective_to, row.plan))
    names = {(row.type, row.version): row.full_name for row in lakehouse.table("silver_devices").collect()}
    visits = lakehouse.spark.table("lakehouse.silver_visits_in_context").collect()
    for visit in visits:
        valid = [
            plan
            for begin, end, plan in versions.get(visit.user_id, [])
            if begin <= visit.event_time and (end is None or visit.event_time < end)
        ]
        assert [visit.plan] == (valid or [None]), visit
        assert visit.device == names.get((visit.device_type, visit.device_version)), visit
    assert len(visits) == lakehouse.table("silver_visits").count()
    assert {None, "free"} < {visit.plan for visit in visits}
    assert {visit.device for visit in visits} & set(names.values())


def test_the_page_cubes_hold_each_view_of_a_day_and_of_a_week_once_in_each_level(first_report, lakehouse):
    cells: Counter = Counter()
    for visit in lakehouse.spark.table("lakehouse.silver_visits_in_context").collect():
        week = visit.event_date - dt.timedelta(days=visit.event_date.weekday())
        for all_pages, all_plans, all_types in itertools.product((0, 1), repeat=3):
            level = 4 * all_pages + 2 * all_plans + all_types
            page, plan = (None if all_pages else visit.page), (None if all_plans else visit.plan)
            values = (level, page, plan, None if all_types else visit.device_type)
            cells["day", visit.event_date, *values] += 1
            cells["week", week, *values] += 1
    for period, column in (("day", "event_date"), ("week", "week_start")):
        columns = [column, "grouping_id", "page", "plan", "device_type", "row_count"]
        expected = [(*cell[1:], views) for cell, views in cells.items() if cell[0] == period]
        assert_rows(lakehouse.table(f"gold_page_cube_by_{period}"), expected, columns)


def test_an_empty_build_changes_nothing_that_is_published(first_report, lakehouse):
    """Not the replica, a plain table; not the views, which would keep the empty subqueries; not gold's readiness."""
    views = ("gold_users_by_plan", "silver_visits_valid", "silver_users_extract")
    rows = {name: lakehouse.spark.table(f"lakehouse.{name}").count() for name in views}
    hashes = lakehouse.hashes()
    lakehouse.dbt("build", "--empty")
    assert {name: lakehouse.spark.table(f"lakehouse.{name}").count() for name in views} == rows
    assert lakehouse.hashes() == hashes
    assert min(rows.values()) > 0
    assert lakehouse.table("staging_users").count() == lakehouse.table("silver_users").count() > 0
    assert lakehouse.table("observability_readiness").where("dataset = 'gold'").count() == 1


def test_a_rerun_without_its_metastore_changes_no_table_and_loses_no_version(first_report, lakehouse, spark):
    hashes, versions = lakehouse.hashes(), lakehouse.versions()
    files = {name: lakehouse.data_files(name) for name in VISIT_TABLES}
    spark.sql("drop database lakehouse cascade")
    report = lakehouse.run()
    assert lakehouse.hashes() == hashes
    assert {name: lakehouse.data_files(name) for name in VISIT_TABLES} == files
    assert report["lines"] == first_report["lines"]
    after = lakehouse.versions()
    assert {
        name for name in versions if name.startswith("bronze_") and after[name] != versions[name]
    } == set()
    replaced = [
        name
        for name, version in after.items()
        if spark.sql(f"describe history delta.`{lakehouse.path(name)}`")
        .where("operation like 'CREATE OR REPLACE%' or operation like 'CREATE TABLE AS%'")
        .where(f"version > {versions[name]}")
        .count()
    ]
    assert replaced == ["staging_users"], "a replica is replaced by design: its older versions are purged"


def test_the_queue_of_dead_letters_is_watched(first_report, lakehouse, truth):
    report = documented_step(lakehouse, "test_the_queue_of_dead_letters_is_watched")
    letters = lakehouse.table("silver_visits_dead_letter").count()
    assert (report["open"], report["per_day"], report["alerts"]) == (letters, letters, [])
    assert letters >= truth["feeds"]["visits"]["precedence"]["unparsable"] > 0


def integrated_late(lakehouse) -> list[str]:
    """Run the Dynamic Late Data Integrator as the page has it, compare with gold; return the late dates."""
    report = documented_step(lakehouse, "test_the_days_with_late_lines_are_integrated_another_way")
    columns = ["event_date", "referral", "events", "visits", "users"]
    gold = lakehouse.table("gold_referral_statistics_by_day").where("event_date <= '2024-03-04'")
    integrated = lakehouse.spark.read.format("delta").load(f"{lakehouse.root}/examples/referral_statistics")
    assert_rows(integrated, [tuple(row) for row in gold.select(columns).collect()], columns)
    return report["late"]


def test_the_days_with_late_lines_are_integrated_another_way(first_report, lakehouse):
    assert set(integrated_late(lakehouse)) >= {"2024-03-01", "2024-03-02", "2024-03-03"}
    assert integrated_late(lakehouse) == []


def sessions_of(events, gap: int) -> list[tuple]:
    """Return user, start, end and number of events of each session, without the jobs' own rule."""
    owned: dict[str, set] = {}
    for user, at, page in events:
        owned.setdefault(user, set()).add((at, page))
    sessions = []
    for user, of_user in owned.items():
        ordered, begin = sorted(at for at, _ in of_user), 0
        for number in range(1, len(ordered) + 1):
            if number == len(ordered) or ordered[number] - ordered[number - 1] > gap:
                sessions.append((user, ordered[begin], ordered[number - 1], number - begin))
                begin = number
    return sessions


def sessions_of_users(lakehouse) -> list[tuple]:
    """Return the sessions of all parsed visits, each with whether it is closed at the watermark."""
    parsed = lakehouse.table("silver_visits_parsed").where("user_id is not null and event_time is not null")
    events = parsed.selectExpr("user_id", "unix_micros(event_time) as at", "page").collect()
    gap, hour = 30 * 60 * 1_000_000, 3_600 * 1_000_000
    watermark = max(row["at"] for row in events) - hour
    return [(*session, session[2] + gap <= watermark) for session in sessions_of(events, gap)]


SESSION_COLUMNS = ["user_id", "unix_micros(started_at)", "unix_micros(ended_at)", "events", "is_final"]


def test_sessions_of_users_are_written_when_they_end(first_report, lakehouse):
    report = documented_step(lakehouse, "test_sessions_of_users_are_written_when_they_end")
    closed = [session for session in sessions_of_users(lakehouse) if session[-1]]
    written = lakehouse.spark.read.format("delta").load(f"{lakehouse.root}/examples/sessions")
    assert_rows(written.selectExpr(*SESSION_COLUMNS), closed)
    assert report["sessions_written"] == len(closed) > 0


def test_sessions_of_users_are_written_while_they_grow(first_report, lakehouse):
    documented_step(lakehouse, "test_sessions_of_users_are_written_while_they_grow")
    sessions = sessions_of_users(lakehouse)
    written = lakehouse.spark.read.format("delta").load(f"{lakehouse.root}/examples/live_sessions")
    assert_rows(written.selectExpr(*SESSION_COLUMNS), sessions)
    assert {session[-1] for session in sessions} == {True, False}


def test_raw_visits_and_statistics_of_devices_come_from_the_same_batches(first_report, lakehouse):
    documented_step(lakehouse, "test_raw_visits_and_statistics_of_devices_come_from_the_same_batches")
    raw, statistics = (
        lakehouse.spark.read.format("delta").load(f"{lakehouse.root}/examples/{name}")
        for name in ("raw_visits", "device_statistics")
    )
    parsed = lakehouse.table("silver_visits_parsed").select("visit_id", "event_time")
    assert_rows(raw.select("visit_id", "event_time"), parsed)
    devices = Counter(tuple(row) for row in raw.select("batch_id", "type", "version").collect())
    counted = statistics.select("batch_id", "type", "version", "visits").collect()
    assert {tuple(row[:3]): row.visits for row in counted} == devices
    assert len(devices) > 1


def test_sessions_of_users_are_written_each_hour(first_report, lakehouse):
    """Events of three hours: sessions that no visit of the fourth hour can join are completed by the third run."""
    name = "test_sessions_of_users_are_written_each_hour"
    text = snippet("docs/case_study.md", f"tests/lakehouse/test_main_job.py::{name}").replace("\\\n", " ")
    words = shlex.split(text.replace("$LAKEHOUSE_ROOT", str(lakehouse.root)))
    place = words.index("--run") + 1
    first = dt.datetime.fromisoformat(words[place])
    for hour in range(3):
        words[place] = (first + dt.timedelta(hours=hour)).isoformat()
        lakehouse.step(Step(name, tuple(words)))
    begin = int(first.replace(tzinfo=dt.UTC).timestamp()) * 1_000_000
    silver = lakehouse.table("silver_visits").selectExpr("user_id", "unix_micros(event_time) as at", "page")
    end, gap = begin + 3 * 3_600 * 1_000_000, 30 * 60 * 1_000_000
    sessions = sessions_of(silver.where(f"at >= {begin} and at < {end}").collect(), gap)
    written = lakehouse.spark.read.format("delta").load(f"{lakehouse.root}/examples/hourly_sessions")
    completed = [session for session in sessions if session[2] + gap < end]
    assert_rows(written.selectExpr(*SESSION_COLUMNS[:-1]), completed)
    assert 0 < len(completed) < len(sessions)


def test_the_billed_version_of_a_gold_table_is_kept(first_report, lakehouse):
    report = documented_step(lakehouse, "test_the_billed_version_of_a_gold_table_is_kept")
    assert report["named"] == {"bill-2024-03": 0}
    statistics = lakehouse.path("gold_visit_statistics")
    lakehouse.spark.sql(f"vacuum delta.`{statistics}`").collect()
    billed = lakehouse.spark.read.format("delta").option("versionAsOf", 0).load(str(statistics))
    assert billed.count() > 0


def test_a_report_is_handed_over_and_each_delivery_stays(first_report, lakehouse):
    documented_step(lakehouse, "test_a_report_is_handed_over_and_each_delivery_stays")
    statistics = lakehouse.table("gold_visit_statistics").select("event_date", "visits", "users")
    delivered = read_exposed(lakehouse.spark, f"{lakehouse.root}/examples/report")
    assert_rows(delivered, [tuple(row) for row in statistics.collect()])


def test_a_corrected_event_changes_its_hour_and_day_and_no_other_days_files(first_report, lakehouse):
    corrected = (
        lakehouse.table("silver_visits")
        .where("event_date = '2024-03-02'")
        .orderBy("visit_id", "event_time")
        .first()
    )
    before = {name: lakehouse.data_files(name) for name in VISIT_TABLES}
    at = corrected.event_time.isoformat() + "Z"
    line = event(corrected.visit_id, at, "corrected-page", corrected.user_id)
    folder = lakehouse.landing / "visits" / "date=2024-03-03" / "hour=23"
    (folder / "correction.json").write_text(line, encoding="utf-8")
    lakehouse.run()

    kept = lakehouse.table("silver_visits").where(
        (F.col("visit_id") == corrected.visit_id) & (F.col("event_time") == F.lit(corrected.event_time))
    )
    assert [row.page for row in kept.collect()] == ["corrected-page"]
    views = lakehouse.table("gold_page_views_by_hour").where("page = 'corrected-page'").collect()
    assert [(row.event_hour, row.views) for row in views] == [
        (corrected.event_time.replace(minute=0, second=0, microsecond=0), 1)
    ]
    for name in ("silver_visits", "gold_page_views_by_hour", "gold_referral_statistics_by_day"):
        untouched = {file for file in before[name] if "event_date=2024-03-02" not in file}
        assert untouched <= lakehouse.data_files(name), name


def test_the_day_of_a_corrected_event_is_the_only_late_one(first_report, lakehouse):
    assert integrated_late(lakehouse) == ["2024-03-02"]


def test_tables_of_absent_feeds_are_empty_and_every_command_of_dbt_works(spark, generated, tmp_path_factory):
    root = tmp_path_factory.mktemp("partial")
    for feed in ("users", "devices"):
        shutil.copytree(generated / feed, root / "landing" / feed)
    partial = Lakehouse(root / "lakehouse", spark, root / "landing")
    partial.run()
    tables = {log.parent.name for log in partial.root.glob("*/*/_delta_log")}
    bronze = {name for name in tables if name.startswith("bronze_")}
    assert bronze == {"bronze_users", "bronze_users_files", "bronze_devices", "bronze_devices_files"}
    filled = {name for name in tables - bronze if "__" not in name and partial.table(name).count()}
    dead = {"silver_devices_dead_letter", "silver_users_extract_dead_letter"}  # the generator's broken lines
    assert filled == {"silver_devices", "snapshot_users", "observability_readiness"} | dead
    ledger = str(partial.path("observability_readiness"))
    assert ready_versions(spark, ledger, "gold")["gold_visit_statistics"] == 0
    for command in (["docs", "generate"], ["run"], ["test"]):
        partial.dbt(*command)
    assert ready_versions(spark, ledger, "gold")["gold_visit_statistics"] == 0


def test_a_compacted_bronze_table_is_no_news(first_report, lakehouse, spark):
    steps = {step.name: step for step in main_job(str(lakehouse.root), lakehouse.landing, FEEDS)}

    def load_and_read():
        loaded = lakehouse.step(steps["load visits"])["lines_written"]
        return loaded, lakehouse.step(steps["dead-letter visits"])["read"]

    folder = lakehouse.landing / "visits" / "date=2024-03-05" / "hour=00"
    folder.mkdir(parents=True)
    for number in range(2):  # two loads of one hour: two small files
        (folder / f"{number}.json").write_text('{"page": "healthcheck"}\n', encoding="utf-8")
        assert load_and_read() == (1, 1)
    before = lakehouse.hashes(["bronze_visits", "silver_visits_parsed"])
    report = compactor.run(
        spark, compactor.Parameters(table=str(lakehouse.path("bronze_visits")), min_small_files=2)
    )
    assert report["files_after"] < report["files_before"]
    assert load_and_read() == (0, 0)
    assert lakehouse.hashes(["bronze_visits", "silver_visits_parsed"]) == before


def test_the_full_list_of_devices_is_exposed_and_its_version_is_kept(first_report, lakehouse, truth):
    listed = lakehouse.table("bronze_devices_list")
    assert listed.count() == truth["gold"]["current_devices"]["devices"]
    version = lakehouse.spark.read.format("delta").load(str(lakehouse.path("bronze_devices_list_20240303")))
    assert version.count() == listed.count()
    assert lakehouse.table("silver_devices").count() == listed.count()


def test_gold_is_ready_with_the_versions_of_its_tables(first_report, lakehouse):
    ledger = str(lakehouse.path("observability_readiness"))
    versions = ready_versions(lakehouse.spark, ledger, "gold")
    now = lakehouse.versions()
    assert versions == {name: now[name] for name in now if name.startswith("gold_") and "__" not in name}
