"""A week of input for the writers: a file, a commit or a batch a day."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from delta.tables import DeltaTable
from pyspark.sql import SparkSession

from python_jobs.error_management import dead_letter
from tests.torture.writer import DAYS, NOW

VISITS = "visit_id string, event_time timestamp, event_date date, page string, number int"
APPENDED = "visit_id string, user_id int, event_time timestamp, appended_at timestamp, position bigint"
USERS = "id int, name string, sequence int, changed_at timestamp, is_deleted boolean"
PAYLOAD = "visit_id string, at string"
DERIVED_FROM_PAYLOAD = {
    "broken": {"at": "try_to_timestamp(at)"},
    "fixed": {"at": "coalesce(try_to_timestamp(at), try_to_timestamp(at, 'dd/MM/yyyy'))"},
}
DEVICES = 5_000
Rows = Sequence[tuple[Any, ...]]


def noon(day: dt.date) -> dt.datetime:
    """Return a day's middle."""
    return dt.datetime.combine(day, dt.time(12), dt.UTC)


def visits(day: dt.date) -> Rows:
    """Return three visits of a day, one of the morning before and one that is there twice."""
    number = DAYS.index(day)
    times = [noon(day), noon(day), noon(day) + dt.timedelta(minutes=5), noon(day) - dt.timedelta(hours=26)]
    ids = [f"v{number}", f"v{number}", f"w{number}", f"late{number}"]
    return [
        (visit, time, time.date(), page, number)
        for visit, time, page in zip(ids, times, ["home", "home", "home", "about"], strict=True)
    ]


def visits_by_day(spark: SparkSession, folder: Path) -> None:
    """Append each day's visits to a Delta table, a file and a commit a day."""
    for day in DAYS:
        rows = spark.createDataFrame(visits(day), VISITS).coalesce(1)
        rows.write.format("delta").mode("append").save(str(folder / "visits"))


def visits_and_pages(spark: SparkSession, folder: Path) -> None:
    """The same, and a table with the title of one of their pages."""
    visits_by_day(spark, folder)
    pages = spark.createDataFrame([("home", "Welcome")], "page string, title string")
    pages.write.format("delta").save(str(folder / "pages"))


def arrived_visits(spark: SparkSession, folder: Path) -> None:
    """Append each day's visits with the time at which they came: that of the day before was late."""
    for day in DAYS:
        rows = [(*row, noon(day) + dt.timedelta(hours=1)) for row in visits(day)]
        frame = spark.createDataFrame(rows, f"{VISITS}, arrived_at timestamp").coalesce(1)
        frame.write.format("delta").mode("append").save(str(folder / "visits"))


def visits_by_event_date(spark: SparkSession, folder: Path) -> None:
    """The same, partitioned by the date of the event."""
    rows = spark.createDataFrame([row for day in DAYS for row in visits(day)], VISITS).coalesce(1)
    rows.write.format("delta").partitionBy("event_date").save(str(folder / "visits"))


def appended_visits(spark: SparkSession, folder: Path) -> None:
    """Append two visits of each of two users a day, with when and where the store took them."""
    for number, day in enumerate(DAYS):
        rows = [
            (f"u{user}-{number}-{visit}", user, noon(day) + dt.timedelta(minutes=20 * visit), noon(day),
             4 * number + 2 * user + visit)
            for user in (0, 1)
            for visit in (0, 1)
        ]  # fmt: skip
        frame = spark.createDataFrame(rows, APPENDED).coalesce(1)
        frame.write.format("delta").mode("append").save(str(folder / "visits"))


def records_of_visits(spark: SparkSession, folder: Path) -> None:
    """The same visits as a topic's records, with their positions."""
    appended_visits(spark, folder)
    visits = spark.read.format("delta").load(str(folder / "visits"))
    position = ["'visits' as topic", "0 as partition", "position as offset", "visit_id"]
    records = visits.selectExpr(*position)
    records.write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(
        str(folder / "visits")
    )


def visits_and_ads(spark: SparkSession, folder: Path) -> None:
    """Append the visits, and a minute after each first visit of a user and day an ad."""
    appended_visits(spark, folder)
    for number, day in enumerate(DAYS):
        rows = [(f"a{user}-{number}", user, noon(day) + dt.timedelta(minutes=1)) for user in (0, 1)]
        frame = spark.createDataFrame(rows, "ad_id string, user_id int, shown_at timestamp").coalesce(1)
        frame.write.format("delta").mode("append").save(str(folder / "ads"))


def payloads(spark: SparkSession, folder: Path) -> None:
    """Append a valid and an unparsable line for each day, a file a day."""
    for number in range(len(DAYS)):
        lines = [(json.dumps({"visit_id": f"v{number}", "number": number}),), (f"not json {number}",)]
        rows = spark.createDataFrame(lines, "payload string").coalesce(1)
        rows.write.format("delta").mode("append").save(str(folder / "lines"))


def dead_letters(spark: SparkSession, folder: Path) -> None:
    """Parse two lines of each day by a broken expression: one is set aside."""
    lines = [
        (json.dumps({"visit_id": f"{kind}{number}", "at": f"{day:{form}}"}),)
        for number, day in enumerate(DAYS)
        for kind, form in (("v", "%F"), ("w", "%d/%m/%Y"))
    ]
    rows = spark.createDataFrame(lines, "payload string").coalesce(1)
    rows.write.format("delta").save(str(folder / "lines"))
    parameters = dead_letter.Parameters(
        source=str(folder / "lines"),
        target=str(folder / "parsed"),
        dead_letter=str(folder / "dead"),
        checkpoint=str(folder / "checkpoint"),
        schema=PAYLOAD,
        derive=DERIVED_FROM_PAYLOAD["broken"],
        require=["at"],
        now=NOW,
    )
    dead_letter.run(spark, parameters)


def days_of_files(_: SparkSession, folder: Path) -> None:
    """Land one file of JSON lines a day."""
    for day in DAYS:
        place = folder / "landing" / f"date={day}"
        place.mkdir(parents=True)
        lines = [json.dumps({"visit": f"{day}-{line}"}) + "\n" for line in range(3)]
        (place / "lines.json").write_text("".join(lines), encoding="utf-8")


def lists_of_devices(_: SparkSession, folder: Path) -> None:
    """Land a full list a day, each with a device more."""
    for number, day in enumerate(DAYS):
        place = folder / "landing" / f"date={day}"
        place.mkdir(parents=True)
        lines = [json.dumps({"type": "phone", "version": f"{v}"}) + "\n" for v in range(number + 2)]
        (place / "devices.json").write_text("".join(lines), encoding="utf-8")


def csv_of_devices(_: object, folder: Path) -> None:
    """Land a CSV file a day, with all devices so far: the newest is new, the one before has another name.

    A transaction of a few rows would be over before the killer has seen it.
    """
    (folder / "landing").mkdir()
    for number, day in enumerate(DAYS):
        newest = DEVICES + number
        lines = [f"phone;{v};{'renamed' if v + 1 == newest else 'named'} {v}\n" for v in range(newest + 1)]
        text = "".join(["type;version;full_name\n", *lines])
        (folder / "landing" / f"{day}.csv").write_text(text, encoding="utf-8")


def parts_of_devices(_: object, folder: Path) -> None:
    """Land a folder a day, each with a file more, all of them new."""
    for number, day in enumerate(DAYS):
        place = folder / "landing" / f"date={day}"
        place.mkdir(parents=True)
        for part in range(number + 2):
            (place / f"part-{part}.json").write_text(
                f'{{"day": "{day}", "part": {part}}}\n', encoding="utf-8"
            )


def small_files(spark: SparkSession, folder: Path) -> None:
    """Append four small files to each of a table's partitions."""
    for number in range(4):
        rows = spark.createDataFrame([(day, number) for day in DAYS], "event_date date, number int")
        writer = rows.coalesce(1).write.format("delta").mode("append").partitionBy("event_date")
        writer.save(str(folder / "table"))


def changes(day: dt.date) -> Rows:
    """Return a day's changes of users: a new one, one renamed, one deleted."""
    number, at = DAYS.index(day), noon(day)
    rows: list[tuple[Any, ...]] = [(number, f"new {number}", number, at, False)]
    if number:
        rows.append((number - 1, f"renamed {number}", number, at, False))
    if number > 2:
        rows.append((number - 3, None, number, at, True))
    return rows


def changed_users(spark: SparkSession, folder: Path) -> None:
    """Merge each day's changes into a table that records them, a commit a day."""
    path = str(folder / "users")
    feed = "tblproperties ('delta.enableChangeDataFeed' = 'true')"
    spark.sql(f"create table delta.`{path}` ({USERS}) using delta {feed}")
    for day in DAYS:
        rows = spark.createDataFrame(changes(day), USERS).alias("s")
        merge = DeltaTable.forPath(spark, path).alias("t").merge(rows, "t.id = s.id")
        merge = merge.whenMatchedDelete("s.is_deleted").whenMatchedUpdateAll()
        merge.whenNotMatchedInsertAll("not s.is_deleted").execute()


def extract(day: dt.date) -> Rows:
    """Return all users of a day: the newest as it came, the others as they were renamed a day later."""
    number = DAYS.index(day)
    return [
        (user, f"new {user}", user, noon(day), False)
        if user == number
        else (user, f"renamed {user + 1}", user + 1, noon(DAYS[user + 1]), False)
        for user in range(number + 1)
    ]
