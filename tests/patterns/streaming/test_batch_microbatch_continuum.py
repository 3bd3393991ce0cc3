"""Batch-Microbatch Continuum: one definition gives the same table at every cadence."""

from __future__ import annotations

import datetime as dt
import json
import random
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, NotReady, WrongUse
from python_jobs.shared.delta.commits import write_once
from python_jobs.shared.delta.overwrite import overwrite
from python_jobs.streaming import batch_microbatch_continuum as job
from services.kafka import Broker, Record
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.session_streams import written_batches
from tests.support.snippets import snippet, snippets
from tests.support.topics import recreate
from tests.support.waiting import eventually

PAGE = "docs/streaming.md"
HERE = "tests/patterns/streaming/test_batch_microbatch_continuum.py"
VISITS = (
    "visit_id int, page string, event_time timestamp, duration_s int, amount decimal(18, 2), is_bot boolean"
)


def at(text: str) -> dt.datetime:
    """Return a time of March as Spark's rows have it."""
    return dt.datetime.fromisoformat(f"2024-03-{text}")


DAY = at("01")
LATE = (900, "late", DAY + dt.timedelta(hours=1), 7, Decimal("0.70"), False)

Visit = tuple[int, str | None, dt.datetime | None, int | None, Decimal, bool]
Window = tuple[dt.datetime, str, int, int | None, Decimal]


def five_files_of_three_days() -> list[list[Visit]]:
    """Return visits of twelve pages in order of arrival, each up to two hours after its time.

    Each page is a case of its own: between one and eighty visits, which come at the ends of days and of their quarters,
    where windows and partitions end.
    """
    draw = random.Random(20)
    arrivals: list[tuple[dt.timedelta, Visit]] = []
    for page in range(12):
        for _ in range(draw.randint(1, 80)):
            edge = draw.choice([dt.timedelta(), dt.timedelta(microseconds=-1), dt.timedelta(seconds=599.5)])
            time = max(dt.timedelta(hours=draw.randrange(0, 72, 6)) + edge, dt.timedelta())
            seconds = draw.choice([None, draw.randrange(1000)])
            visit = (
                len(arrivals),
                f"p{page}",
                DAY + time,
                seconds,
                Decimal(draw.randrange(1000)) / 100,
                page % 9 == 8,
            )
            arrivals.append((time + dt.timedelta(minutes=draw.randrange(120)), visit))
    visits = [visit for _, visit in sorted(arrivals)]
    visits[40:40] = [(901, None, DAY, 1, Decimal(1), False), (902, "p1", None, 1, Decimal(1), False)]
    size = len(visits) // 5 + 1
    return [visits[start : start + size] for start in range(0, len(visits), size)]


FILES = five_files_of_three_days()


def windows_of(visits: Iterable[Visit]) -> list[Window]:
    """Return the windows' rows, computed without Spark."""
    events: Counter[tuple[dt.datetime, str]] = Counter()
    seconds: dict[tuple[dt.datetime, str], list[int]] = {}
    revenue: Counter[tuple[dt.datetime, str]] = Counter()
    for _, page, time, duration, amount, is_bot in visits:
        if is_bot or page is None or time is None:
            continue
        window = (time.replace(minute=time.minute // 10 * 10, second=0, microsecond=0), page)
        events[window] += 1
        seconds.setdefault(window, []).extend([] if duration is None else [duration])
        revenue[window] += amount  # type: ignore[assignment]
    return [
        (*window, count, sum(seconds[window]) if seconds[window] else None, Decimal(revenue[window]))
        for window, count in events.items()
    ]


ON_TIME = windows_of(visit for visits in FILES for visit in visits)
WITH_LATE = windows_of([*(visit for visits in FILES for visit in visits), LATE])


class Continuum:
    """A table of visits, and the gold tables that the page's definition makes of it."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        test = f"{HERE}::test_every_cadence_leaves_the_same_table"
        definition, commands = snippets(PAGE, test)
        (folder / "visits_by_page.yml").write_text(definition.replace("lakehouse/", f"{folder}/"))
        lines = commands.replace("\\\n", " ").replace("visits_by_page.yml", f"{folder}/visits_by_page.yml")
        words = [shlex.split(line)[2:] for line in lines.splitlines()]
        self._words = dict(zip(["micro_batch", "available_now", "batch"], words, strict=True))

    def append(self, visits: Sequence[Visit]) -> None:
        """Append visits as one file: one micro-batch of a run with ``max_files_per_trigger`` 1."""
        rows = self.spark.createDataFrame(visits, VISITS).coalesce(1)
        write_once(self.spark, rows, str(self.folder / "silver/visits"))

    def parameters(self, command: str, **changes: str) -> job.Parameters:
        """Return the parameters of the page's command for a cadence, with ``changes``."""
        words = list(self._words[command])
        for name, value in changes.items():
            words += [f"--{name}", value]
        return parse_parameters(job.Parameters, words)[0]

    def run(self, cadence: str, into: str = "visits_by_page", **changes: str) -> dict[str, Any]:
        """Run the page's command for the cadence, with another target and checkpoint."""
        folders = {
            "target": f"{self.folder}/gold/{into}",
            "checkpoint": f"{self.folder}/checkpoints/{into}",
        }
        return job.run(self.spark, self.parameters(cadence, **(folders | changes)))

    def batch(self, first: int, end: int, into: str = "visits_by_page", **changes: str) -> dict[str, Any]:
        """Run a batch over days of March."""
        dates = {"from": f"2024-03-{first:02}", "to": f"2024-03-{end:02}"}
        return self.run("batch", into, **(dates | changes))

    def gold(self, name: str = "visits_by_page") -> DataFrame:
        """Return the rows of a gold table."""
        return (
            self.spark.read.format("delta")
            .load(f"{self.folder}/gold/{name}")
            .select("window_start", "page", "events", "seconds", "revenue")
        )


@pytest.fixture(scope="module")
def continuum(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Continuum:
    return Continuum(spark, tmp_path_factory.mktemp("continuum"))


@pytest.fixture(scope="module")
def filled(continuum: Continuum) -> Continuum:
    """Return the continuum with the visits of three days."""
    for visits in FILES:
        continuum.append(visits)
    return continuum


# One story: a live stream dies in its third batch and goes on as a scheduled one; batches do the same days.


@pytest.fixture(scope="module")
def interrupted(filled: Continuum) -> list[Any]:
    """Run micro-batches until a crash between the write and the commit of the third; return the rows of each."""
    third = iter([False, False, True])
    with written_batches(lambda _: next(third)) as batches, pytest.raises(ConnectionResetError):
        filled.run("micro_batch", trigger="1 second", max_files_per_trigger="1")
    return batches


@pytest.fixture(scope="module")
def switched(continuum: Continuum, interrupted: list[Any]) -> dict[str, Any]:
    """Go on with ``available_now``: the third batch again, and two more."""
    return continuum.run("available_now", max_files_per_trigger="1")


@pytest.fixture(scope="module")
def five_micro_batches(continuum: Continuum, switched: dict[str, Any]) -> list[Any]:
    """Return the rows that the five micro-batches left."""
    return continuum.gold().collect()


@pytest.fixture(scope="module")
def one_batch(filled: Continuum) -> dict[str, Any]:
    return filled.batch(1, 4, "one_batch")


@pytest.fixture(scope="module")
def one_run(filled: Continuum) -> dict[str, Any]:
    return filled.run("available_now", "one_run")


def test_every_cadence_leaves_the_same_table(
    continuum: Continuum, five_micro_batches: list[Any], one_batch: dict[str, Any], one_run: dict[str, Any]
) -> None:
    assert len(ON_TIME) > 150
    assert_rows(five_micro_batches, ON_TIME)
    assert_rows(continuum.gold("one_batch"), ON_TIME)
    assert_rows(continuum.gold("one_run"), ON_TIME)


def test_an_append_of_each_batch_would_have_doubled_windows(
    interrupted: list[Any], five_micro_batches: list[Any]
) -> None:
    """The negative control: windows that span two files come with each of them."""
    written = Counter((row.window_start, row.page) for batch in interrupted for row in batch)
    assert max(written.values()) > 1


def test_a_switch_to_available_now_goes_on_at_the_checkpoint(switched: dict[str, Any]) -> None:
    read = [len([visit for visit in visits if not visit[5]]) for visits in FILES]
    assert switched["read"] == sum(read[2:]), "the third batch again, which had not been committed"
    assert [batch["batch_id"] for batch in switched["batches"]][:3] == [2, 3, 4]
    assert switched["late"] == 0


def test_a_batch_reads_the_files_of_its_dates(continuum: Continuum, one_batch: dict[str, Any]) -> None:
    params = continuum.parameters("batch", **{"from": "2024-03-03", "to": "2024-03-04"})
    visits = continuum.spark.read.format("delta").load(str(params.source))
    assert len(visits.inputFiles()) >= 5
    assert len(params.usable(visits, params.dates).inputFiles()) == 2


def test_records_without_key_or_time_are_counted(one_run: dict[str, Any], one_batch: dict[str, Any]) -> None:
    assert (one_run["without_key"], one_run["without_time"]) == (1, 1)
    assert one_batch["without_key"] == 1
    assert one_batch["rows"] == len(ON_TIME)


@pytest.fixture(scope="module")
def days(filled: Continuum) -> str:
    """Run a batch over the last two days, and one over the first two that ends with an alert; return its sentence."""
    filled.batch(2, 4, "days")
    with pytest.raises(DataRefused) as alert:
        filled.batch(1, 3, "days", max_left_out="0")
    return str(alert.value)


def test_the_days_in_any_order_and_again_give_the_same_rows(continuum: Continuum, days: str) -> None:
    assert_rows(continuum.gold("days"), ON_TIME)


def test_more_records_in_no_row_than_allowed_end_the_run_with_its_rows_written(
    continuum: Continuum, days: str
) -> None:
    assert days.startswith("alert: 1 records are in no row"), days
    assert continuum.gold("days").where("window_start < '2024-03-02'").count() > 0


def test_an_interval_without_records_gives_no_rows(
    continuum: Continuum, one_batch: dict[str, Any], one_run: dict[str, Any]
) -> None:
    for first, end in [(20, 21), (2, 2)]:
        report = continuum.batch(first, end, "one_batch")
        assert (report["read"], report["rows"]) == (0, 0)
        assert report["target"]["version"] == one_batch["target"]["version"]
    report = continuum.run("available_now", "one_run")
    assert (report["read"], report["target"]["version"]) == (0, one_run["target"]["version"])


@pytest.fixture(scope="module")
def started_over(filled: Continuum, one_batch: dict[str, Any]) -> list[Any]:
    """Let a new stream begin on the batch's table; it dies after its first batch, of two files. Return its rows."""
    with written_batches(lambda _: True) as batches, pytest.raises(ConnectionResetError):
        filled.run("available_now", "one_batch", max_files_per_trigger="2")
    return batches[0]


def test_a_stream_that_starts_over_never_replaces_a_window_by_a_smaller_one(
    continuum: Continuum, started_over: list[Any]
) -> None:
    events = {window[:2]: window[2] for window in ON_TIME}
    assert any(row.events < events[row.window_start, row.page] for row in started_over)
    assert_rows(continuum.gold("one_batch"), ON_TIME)


def test_dbt_s_daily_model_has_the_same_windows(
    continuum: Continuum, render: MacroRenderer, one_batch: dict[str, Any]
) -> None:
    visits = (
        f"(select * from delta.`{continuum.folder}/silver/visits` where not is_bot and page is not null and "
    )
    sql = render(
        "windowed_aggregate",
        relation=f"{visits} event_time is not null and visit_id < 900)",
        event_time="event_time",
        window="10 minutes",
        by=["page"],
        measures={"seconds": {"value": "duration_s"}},
    )
    model = continuum.spark.sql(sql).selectExpr(
        "window_start", "page", "row_count", "cast(seconds_sum as bigint)"
    )
    assert_rows(model, [window[:4] for window in ON_TIME])


@pytest.fixture(scope="module")
def late(
    continuum: Continuum, five_micro_batches: list[Any], one_run: Any, days: str, started_over: Any
) -> dict[str, Any]:
    """Give the stream a visit of the first day; its watermark is at the third. All others have read the table."""
    continuum.append([LATE])
    return continuum.run("available_now")


@pytest.fixture(scope="module")
def left_by_the_stream(continuum: Continuum, late: dict[str, Any]) -> list[Any]:
    return continuum.gold().collect()


@pytest.fixture(scope="module")
def repaired(continuum: Continuum, left_by_the_stream: list[Any]) -> list[Any]:
    """Run a batch over the first day; return the rows that are then in the table."""
    continuum.batch(1, 2)
    return continuum.gold().collect()


def test_a_stream_reports_a_late_event_and_a_batch_adds_it(
    late: dict[str, Any], left_by_the_stream: list[Any], repaired: list[Any]
) -> None:
    assert late["late"] == 1
    assert_rows(left_by_the_stream, ON_TIME)
    assert_rows(repaired, WITH_LATE)


def test_a_stream_s_commit_during_a_batch_is_not_lost(
    continuum: Continuum, one_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source gets a visit, and the stream publishes it, after the batch has read the source."""
    calls: list[str] = []
    visit = (903, "p0", at("03 23:00"), 5, Decimal("0.50"), False)

    def overtaken(spark: SparkSession, rows: DataFrame, *arguments: Any, **keywords: Any) -> Any:
        calls.append("write")
        if len(calls) == 1:
            continuum.append([visit])
            continuum.run("available_now", "one_run")
        return overwrite(spark, rows, *arguments, **keywords)

    monkeypatch.setattr(job, "overwrite", overtaken)
    continuum.batch(3, 4, "one_run")
    assert calls == ["write", "write"]
    assert_rows(
        continuum.gold("one_run"),
        windows_of([*(visit for visits in FILES for visit in visits), visit]),
    )


def test_a_latency_gets_a_report_and_no_run(continuum: Continuum) -> None:
    command = snippet(PAGE, f"{HERE}::test_a_latency_gets_a_report_and_no_run")
    words = shlex.split(command.replace("visits_by_page.yml", f"{continuum.folder}/visits_by_page.yml"))[2:]
    report = job.run(continuum.spark, parse_parameters(job.Parameters, words)[0])
    assert (report["cadence"], report["interval_seconds"]) == ("available_now", 1800)
    with pytest.raises(WrongUse, match=r"^windows can't be published within 1 seconds"):
        job.run(continuum.spark, parse_parameters(job.Parameters, [*words[:-1], "1 second"])[0])


# --- rows without window ------------------------------------------------------------------------------------


def test_a_record_gives_one_row_whatever_the_cadence(spark: SparkSession, tmp_path: Path) -> None:
    """Resent records, in both orders of arrival, and a text of time; the names are words of SQL."""
    records = [
        [
            ("a", "2024-03-01T10:00:00Z", 1),
            ("b", "2024-03-01T10:00:00Z", 2),
            ("c", "2024-03-01T23:59:59.999999Z", 3),
            ("a", "10:00", 5),
            (None, "2024-03-01T10:00:00Z", 6),
        ],
        [
            ("a", "2024-03-01T10:00:00Z", 9),
            ("b", "2024-03-01T09:00:00Z", 7),
            ("b", "2024-03-02T10:00:00Z", 4),
            ("c", "2024-03-01T23:59:59.999999Z", 3),
        ],
    ]
    source = str(tmp_path / "records")
    for rows in records:
        write_once(spark, spark.createDataFrame(rows, "k string, at string, n int").coalesce(1), source)
    definition: dict[str, Any] = {
        "source": source,
        "event_time": "at",
        "key": {"Select": "k"},
        "columns": {"order": "n", "k": "cast(null as int)"},
    }
    days = dt.date(2024, 3, 1), dt.date(2024, 3, 2)
    expected = [
        ("a", at("01 10:00"), days[0], 9, None),
        ("b", at("01 10:00"), days[0], 2, None),  # not the one of 09:00 that came later
        ("b", at("02 10:00"), days[1], 4, None),
        ("c", at("01 23:59:59.999999"), days[0], 3, None),
    ]

    def run(**parameters: Any) -> dict[str, Any]:
        report = job.run(spark, job.Parameters(**definition, target=str(tmp_path / "gold"), **parameters))
        table = spark.read.format("delta").load(str(tmp_path / "gold"))
        assert_rows(table.select("Select", "event_time", "event_date", "order", "k"), expected)
        return report

    run(cadence="available_now", checkpoint=str(tmp_path / "checkpoint"), max_files_per_trigger=1)
    assert run(cadence="batch", from_="2024-03-01", to="2024-03-03")["rows"] == 4, "it replaces each of them"


# --- continuous ---------------------------------------------------------------------------------------------


def test_spark_s_continuous_mode_takes_rows_alone(spark: SparkSession) -> None:
    """What the guide says of it, and why it can't write the table of the other cadences."""
    stream = spark.readStream.format("rate").load()
    counted = stream.groupBy("value").count().writeStream.format("console").outputMode("complete")
    with pytest.raises(AnalysisException, match="Continuous processing does not support Aggregate"):
        counted.trigger(continuous="1 second").start()
    with pytest.raises(AnalysisException, match=r"(?i)foreachBatch.*continuous|continuous.*foreachBatch"):
        stream.writeStream.foreachBatch(lambda _, __: None).trigger(continuous="1 second").start()


@pytest.mark.kafka
def test_continuous_passes_each_record_on_as_it_arrives(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    text = snippet(PAGE, f"{HERE}::test_continuous_passes_each_record_on_as_it_arrives").replace("\\\n", " ")
    text = text.replace("lakehouse/", f"{tmp_path}/").replace("localhost:9092", broker.bootstrap_servers)
    params = parse_parameters(job.Parameters, shlex.split(text)[2:])[0]
    with pytest.raises(NotReady, match="not every topic of payments, checked_payments is at"):
        job.start_continuous(spark, params)
    broker.create_topic("payments")
    broker.create_topic("checked_payments")

    def pay(*payments: dict[str, Any]) -> None:
        broker.produce("payments", [Record(json.dumps(payment).encode()) for payment in payments])

    def passed_on() -> list[tuple[Any, Any]]:
        return [
            (json.loads(message.key() or b""), json.loads(message.value() or b""))
            for message in broker.records("checked_payments")
        ]

    def row(name: str, time: str, amount: str | None) -> tuple[Any, Any]:
        fields = {"event_time": f"2024-03-01T{time}.000000Z", "event_date": "2024-03-01", "payment_id": name}
        return {"payment_id": name}, fields | {"amount": amount}

    pay(
        {"id": "a", "event_time": "2024-03-01T10:00:00Z", "amount": "1.50"},
        {"id": "b", "event_time": "2024-03-01T10:00:01Z", "amount": "-1"},
        {"event_time": "2024-03-01T10:00:02Z", "amount": "2"},
        {"id": "c", "event_time": "10:00", "amount": "3"},
    )
    query = job.start_continuous(spark, params)
    try:
        eventually(lambda: len(passed_on()) >= 1)
        pay({"id": "d", "event_time": "2024-03-01T12:00:00+01:00", "amount": "4"})
        eventually(lambda: len(passed_on()) >= 2)
    finally:
        query.stop()
    assert passed_on() == [row("a", "10:00:00", "1.50"), row("d", "11:00:00", "4")]
    recreate(broker, "payments", [])
    refused = "the topic payments was deleted and recreated: .*; start again with another checkpoint$"
    with pytest.raises(DataRefused, match=refused):
        job.start_continuous(spark, params)


# --- wrong use ----------------------------------------------------------------------------------------------

TABLES = {"source": "s", "target": "t", "checkpoint": "c"}
ROWS = {"key": {"page": "page"}}
TOPICS = {"topic": "a", "target_topic": "b", "bootstrap_servers": "h:1", "checkpoint": "c"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"cadence": "hourly"},
            "cadence must be one of batch, available_now, micro_batch, continuous, got 'hourly'",
        ),
        ({}, "pass either cadence, to run, or latency"),
        ({"cadence": "batch", "latency": "1 hour"}, "pass either cadence, to run, or latency"),
        ({"cadence": "micro_batch"}, "the cadence micro_batch needs trigger"),
        ({"cadence": "batch"}, "the cadence batch needs from and to"),
        (
            {"cadence": "continuous"},
            "the cadence continuous needs topic and target_topic and bootstrap_servers",
        ),
        ({"cadence": "available_now", "from_": "2024-03-01"}, "from and to belong to the cadence batch"),
        (
            {"cadence": "batch", "from_": "2024-03-02", "to": "2024-03-01"},
            "from must not be after to, got 2024-03-02",
        ),
        (
            {"cadence": "batch", "from_": "1 March", "to": "2024-03-01"},
            "from and to: '1 March' is not a date",
        ),
        ({"cadence": "available_now", "target": "s"}, "source and target must be two tables"),
        ({"cadence": "continuous", "window": "1 hour", **TOPICS}, "continuous can't aggregate by window"),
        ({"cadence": "available_now", "window": "7 minutes"}, "window must divide a day, .* got '7 minutes'"),
        ({"cadence": "available_now", "window": "2 days"}, "window must divide a day"),
        ({"cadence": "available_now", "sums": {"n": "1"}}, "sums belong to a window"),
        (
            {"cadence": "available_now", "window": "1 day", "columns": {"n": "1"}},
            "columns belong to rows without",
        ),
        ({"cadence": "available_now", "key": {}}, "key must name at least one column"),
        ({"cadence": "available_now", "key": {"Events": "1"}}, "must have different names.*got Events"),
        ({"cadence": "available_now", "columns": {"PAGE": "1"}}, "must have different names.*got PAGE"),
        ({"cadence": "continuous", **TOPICS, "producer": {"sasl.password": "x"}}, "is a secret"),
        ({"cadence": "available_now", "max_left_out": -1}, "max_left_out must be 0 or more"),
        ({"cadence": "available_now", "max_files_per_trigger": 0}, "max_files_per_trigger must be 1 or more"),
        ({"cadence": "available_now", "delay": "soon"}, "'soon' is no duration"),
        ({"latency": "soon"}, "'soon' is no duration"),
    ],
)
def test_wrong_parameters_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WrongUse, match=sentence):
        job.Parameters(**(TABLES | ROWS | given))


def test_an_unknown_cadence_ends_the_command_with_the_allowed_ones(
    continuum: Continuum, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        continuum.parameters("available_now", cadence="hourly")
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert all(name in message for name in ("batch", "available_now", "micro_batch", "continuous", "hourly"))


def test_definitions_that_give_no_equal_tables_are_refused(
    continuum: Continuum, one_batch: dict[str, Any]
) -> None:
    with pytest.raises(
        WrongUse, match=r"sums of floating-point numbers depend on the order .* cast seconds to a dec"
    ):
        continuum.run("available_now", "doubles", **{"sums.seconds": "duration_s / 2.5e0"})
    with pytest.raises(WrongUse, match=r"^the definition can't be used \(.*nowhere"):
        continuum.run("batch", "nowhere", where="nowhere > 1")
    with pytest.raises(WrongUse, match="one_batch' was made of another source or by another definition"):
        continuum.run("batch", "one_batch", where="is_bot")
    with pytest.raises(NotReady, match="no Delta table"):
        continuum.run("batch", "nothing", source="/nowhere")
