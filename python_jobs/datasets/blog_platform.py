"""The case study's input: landing files of a blogging platform, with their right answers.

Problem
    A pipeline is proved only on input whose every fault and every result is known, at any size, and the same again
    tomorrow.
Guarantee
    The files (names and bytes) and ``truth.json`` depend on the parameters alone: each value is a hash of the seed,
    a salt and its row's number, and each file is written, sorted, by one task; so cores, partitions and shuffle
    settings don't matter. ``truth.json`` is written last: a folder without it is a run that didn't end.
    The truth is aggregated from what was planned for each line, before the line is turned into JSON.
Cost
    Linear in the number of visits: one shuffle to write them, and one of (day, visit) pairs for the distinct counts.
Layout (``--output`` is the landing folder)
    ``visits/date=D/hour=H``, ``user_changes/date=D/hour=H``, ``users/date=D``, ``devices/date=D``, ``truth.json``.
Submit
    ``spark-submit python_jobs/datasets/blog_platform.py --output landing --visits 200000 --days 3``
Source
    The blogging platform is the case study of "Data Engineering Design Patterns" (B. Konieczny, O'Reilly 2025),
    chapter 1; fields and faults are those of its public data generator, none of whose code is used.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from python_jobs.job import JobFailed, WrongUse, run_job

TRUTH_FORMAT_VERSION = 1
FEEDS = ("visits", "user_changes", "users", "devices")
LINES_PER_FILE = 100_000
LINES_PER_TASK = 50_000


@dataclass(frozen=True)
class Parameters:
    """Make the case study's landing files. A share (0 to 1) is of the rows drawn for one imperfection; 0 = none."""

    output: str
    """Landing folder (path or URI) for the feeds and truth.json."""
    visits: int = 200_000
    """Number of page events; duplicates and corrections come on top."""
    users: int | None = None
    """Number of users ever known; by default one for each 100 visits, at least 100."""
    days: int = 3
    """Number of days covered."""
    start: str = "2024-03-01"
    """First day, as YYYY-MM-DD (UTC)."""
    seed: int = 42
    """Same seed and parameters, same bytes."""
    unparsable_share: float = 0.01
    """Visits whose line is not JSON: garbage, or cut in the middle. In the other feeds: extra lines."""
    missing_field_share: float = 0.01
    """Visits whose user_id, page or context is absent or null."""
    wrong_type_share: float = 0.01
    """Visits with a number, text or object where another type is due; some are usable all the same."""
    exact_duplicate_share: float = 0.02
    """Visits and user changes that come again byte for byte, in the same or a later folder."""
    corrected_share: float = 0.01
    """Visits that come again with the same key and another payload, in the same or a later folder."""
    late_share: float = 0.03
    """Visits that land one to many folders after their hour; 0 also stops late and out-of-order user changes."""
    unknown_user_share: float = 0.01
    """Visits of a user_id that no feed of users ever names."""
    null_key_share: float = 0.005
    """Visits whose visit_id or event_time is absent or null. In the other feeds: extra lines without key."""
    awkward_text_share: float = 0.02
    """Visits and logins with non-ASCII characters, quotes, backslashes, tabs and line ends."""
    probe_share: float = 0.02
    """Visits of monitoring probes, whose page starts with healthcheck."""
    overwrite: bool = False
    """Replace the feeds and truth.json of an earlier run; anything else in the folder stays."""

    def __post_init__(self) -> None:
        for name in ("visits", "users", "days"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise WrongUse(f"--{name} is {value}, but must be at least 1")
        for name in (option.name for option in dataclasses.fields(self) if option.name.endswith("_share")):
            if not 0 <= getattr(self, name) <= 1:
                raise WrongUse(f"--{name} is {getattr(self, name)}, but must be between 0 and 1")
        try:
            dt.date.fromisoformat(self.start)
        except ValueError:
            raise WrongUse(f"--start is '{self.start}', but must be a day written YYYY-MM-DD") from None

    @property
    def user_count(self) -> int:
        return max(100, self.visits // 100) if self.users is None else self.users

    @property
    def hours(self) -> int:
        return self.days * 24

    @property
    def start_ms(self) -> int:
        """Midnight of the first day, in milliseconds since the epoch."""
        midnight = dt.datetime.combine(dt.date.fromisoformat(self.start), dt.time(), dt.UTC)
        return int(midnight.timestamp()) * 1000

    def day_name(self, day: int) -> str:
        """The day as YYYY-MM-DD, counted from the first."""
        return (dt.date.fromisoformat(self.start) + dt.timedelta(days=day)).isoformat()

    def hour_name(self, hour: int) -> str:
        """The hour as YYYY-MM-DDTHH, counted from the first."""
        return f"{self.day_name(hour // 24)}T{hour % 24:02d}"


# --- Drawing values ---------------------------------------------------------------------------------------------------

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
SHARE_STEPS = 1_000_000


def roll(params: Parameters, salt: str, sides: int | Column, *key: str) -> Column:
    """Return a number in ``[0, sides)`` that depends on the seed, the salt and the key columns alone."""
    drawn = F.xxhash64(F.lit(f"{params.seed}/{salt}"), *key)
    return F.pmod(drawn, sides if isinstance(sides, Column) else F.lit(sides))


def roll_low(params: Parameters, salt: str, sides: int, *key: str) -> Column:
    """Return a number in ``[0, sides)`` that is more often low: some users and pages are popular."""
    return roll(params, salt, 1 + roll(params, f"{salt} reach", sides, *key), *key)


def happens(params: Parameters, feed: str, imperfection: str, *key: str) -> Column:
    """Return true for the knob's share of rows; each one rolls alone, so that no knob moves another one's rows."""
    steps = round(getattr(params, f"{imperfection}_share") * SHARE_STEPS)
    return roll(params, f"{feed} {imperfection}", SHARE_STEPS, *key) < steps


def pick(values: Sequence[Any], index: Column) -> Column:
    """Return the value at the index, from 0."""
    return F.get(F.array(*map(F.lit, values)), index.cast("int"))


# --- Writing JSON -----------------------------------------------------------------------------------------------------
# Lines are put together from fragments: to_json can't write a wrong type, nor null in one line and nothing in the next.

ABSENT = "cast(null as string)"
NULL = "'null'"


def json_object(**fragments: Column) -> Column:
    """Return a JSON object of the fragments in their order; a NULL fragment leaves its field out."""
    members = [F.concat(F.lit(f'"{name}": '), fragment) for name, fragment in fragments.items()]
    return F.concat(F.lit("{"), F.concat_ws(", ", *members), F.lit("}"))


def json_text(text: Column) -> Column:
    """Return a JSON string of a text that needs no escapes; NULL gives null."""
    return F.coalesce(F.concat(F.lit('"'), text, F.lit('"')), F.lit("null"))


def json_any_text(text: Column) -> Column:
    """Return a JSON string of a text that may hold quotes, backslashes, tabs and line ends; NULL gives null."""
    for character, escape in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t")):
        text = F.replace(text, F.lit(character), F.lit(escape))
    return json_text(text)


def json_time(milliseconds: Column) -> Column:
    """Return an ISO 8601 time with offset (the session's, UTC) from milliseconds since the epoch; NULL gives null."""
    return json_text(F.date_format(F.timestamp_millis(milliseconds), "yyyy-MM-dd'T'HH:mm:ss.SSSxxx"))


# SQL over `json`, the good line. None of them is JSON to any reader: no strict prefix of an object is.
DAMAGES = (
    "'{........'",
    "'ERROR 502 upstream closed the connection'",
    "left(json, cast(length(json) / 2 as int))",
    "left(json, length(json) - 1)",
)


def with_payload(
    lines: DataFrame, params: Parameters, json_line: Column, unparsable: Column, *key: str
) -> DataFrame:
    """Add ``payload``: the line's JSON, damaged where ``unparsable`` holds."""
    kind = roll(params, "damage", len(DAMAGES), *key)
    damaged = reduce(
        lambda other, number: F.when(kind == number, F.expr(DAMAGES[number])).otherwise(other),
        range(1, len(DAMAGES)),
        F.expr(DAMAGES[0]),
    )
    return lines.withColumn("json", json_line).withColumn(
        "payload", F.when(unparsable, damaged).otherwise(F.col("json"))
    )


# --- Users ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A step in a user's biography: the operation, when it happens, and what it leaves behind."""

    op: str
    """I (insert), U (update) or D (hard delete)."""
    minutes: int = 0
    """When, after the biography's start; equal minutes give equal timestamps."""
    plan: int = 0
    """Which plan, counted from the user's first one."""
    email: int | None = 0
    """Which address; None is NULL."""
    is_deleted: bool = False
    """Soft deleted."""
    delay: int = 0
    """How many hourly folders the change lands after its own hour."""
    connected: bool = False
    """The user was seen at this time."""


PLANS = ("free", "premium", "business")

# What happens to a user after the insert that every user begins with. The longest one takes 11 hours.
BIOGRAPHIES: Mapping[str, tuple[Change, ...]] = {
    "upgraded": (Change("U", plan=1),),
    "seen again": (Change("U", connected=True),),
    "several changes in a batch": (
        Change("U", plan=1),
        Change("U", 2, plan=2),
        Change("U", 5, plan=2, email=1),
    ),
    "equal timestamps": (Change("U", plan=1), Change("U", plan=2)),
    "deleted at the time of an update": (Change("U", plan=1), Change("D")),
    "late": (Change("U", plan=1, delay=4),),
    "out of order": (Change("U", plan=1, delay=6), Change("U", 60, plan=2)),
    "late delete": (Change("D", delay=5),),
    "only to NULL, and back": (Change("U", email=None), Change("U", 180)),
    "reverted": (Change("U", plan=1), Change("U", 120)),
    "hard deleted": (Change("D"),),
    "soft deleted": (Change("U", is_deleted=True),),
    "back after a hard delete": (Change("D"), Change("I", 600, plan=1)),
    "back after a soft delete": (Change("U", is_deleted=True), Change("U", 300, plan=1)),
    "registered on the way": (Change("U", 90, email=1),),
    "gone in the batch that brought them": (Change("D", 2),),
}
NEWCOMERS = ("registered on the way", "gone in the batch that brought them")
BIOGRAPHY_HOURS = 12
# Every second user lives one of them, the others stay as they are.
BIOGRAPHY_CYCLE = 2 * len(BIOGRAPHIES)

AWKWARD_LOGINS = ("jürgen", 'søren "the dane"', "ольга", "李小龙", "o'neill\\admin")


def user_id(params: Parameters, index: str) -> Column:
    """Return the id of the user with this number; unique, because the number is part of it."""
    drawn = F.hex(F.xxhash64(F.lit(f"{params.seed}/user"), index))
    return F.lower(F.concat(F.lpad(F.hex(index), 8, "0"), F.lit("-"), F.lpad(drawn, 16, "0")))


def user_login(params: Parameters, index: str) -> Column:
    """Return the login of the user with this number."""
    name = F.when(
        happens(params, "users", "awkward_text", index),
        pick(AWKWARD_LOGINS, roll(params, "login", len(AWKWARD_LOGINS), index)),
    ).otherwise(F.lit("user"))
    return F.concat(name, F.lit("_"), F.col(index).cast("string"))


def user_changes(spark: SparkSession, params: Parameters) -> DataFrame:
    """Return every change of every user: (user, step), op, sequence, changed_ms, landing hour, the state it leaves."""
    biographies = [
        (2 * number, step, *dataclasses.astuple(change))
        for number, (name, changes) in enumerate(BIOGRAPHIES.items())
        for step, change in enumerate((Change("I"), *changes))
    ] + [(number, 0, *dataclasses.astuple(Change("I"))) for number in range(1, BIOGRAPHY_CYCLE, 2)]
    steps = spark.createDataFrame(
        biographies,
        "biography bigint, step int, op string, minutes int, plan_shift int, email_version int, "
        "is_deleted boolean, delay int, connected boolean",
    )
    newcomers = [2 * list(BIOGRAPHIES).index(name) for name in NEWCOMERS]
    begins_ms = (
        params.start_ms
        + roll(params, "hour of change", params.hours - BIOGRAPHY_HOURS, "user") * HOUR_MS
        + roll(params, "second of change", 50 * 60, "user") * 1000
    )
    registered_ms = params.start_ms - (1 + roll(params, "registered", 700 * 24, "user")) * HOUR_MS
    users = spark.range(0, params.user_count, 1, tasks_for(params.user_count)).withColumnRenamed("id", "user")
    is_newcomer = F.col("biography").isin(newcomers)
    changes = (
        users.withColumn("biography", F.pmod("user", F.lit(BIOGRAPHY_CYCLE)))
        .withColumn("begins_ms", begins_ms)
        .withColumn("registered_ms", F.when(is_newcomer, F.col("begins_ms")).otherwise(registered_ms))
        .join(F.broadcast(steps), "biography")
    )
    is_initial = (F.col("step") == 0) & ~is_newcomer
    changed_ms = F.when(is_initial, F.col("registered_ms")).otherwise(
        F.col("begins_ms") + F.col("minutes") * 60_000
    )
    delay = F.col("delay") if params.late_share > 0 else F.lit(0)
    first_ms = F.when(
        ~is_newcomer & (roll(params, "connected", 10, "user") > 0),
        F.col("registered_ms") + roll(params, "first connection", 3_600, "user") * 1000,
    )
    last_ms = F.when(F.col("connected"), F.col("changed_ms")).otherwise(F.col("first_ms"))
    email = F.when(F.col("email_version") == 0, F.concat(F.lit("user_"), "user", F.lit("@example.com"))).when(
        F.col("email_version") == 1, F.concat(F.lit("user_"), "user", F.lit("@example.org"))
    )
    return (
        changes.withColumn("changed_ms", changed_ms)
        .withColumn("first_ms", first_ms)
        .select(
            "user",
            "step",
            "op",
            # Orders the changes of a user even where the times are equal, and stays exact in a JSON number.
            (F.col("changed_ms") * 100 + F.col("step")).alias("sequence"),
            "changed_ms",
            F.when(is_initial, 0)
            .otherwise(landing_hour(params, hour_of(params, "changed_ms"), delay))
            .cast("int")
            .alias("landing_hour"),
            user_id(params, "user").alias("id"),
            user_login(params, "user").alias("login"),
            email.alias("email"),
            "registered_ms",
            "first_ms",
            last_ms.alias("last_ms"),
            pick(PLANS, F.pmod(roll(params, "plan", 3, "user") + F.col("plan_shift"), F.lit(3))).alias(
                "plan"
            ),
            "is_deleted",
        )
    )


def users_by_day(spark: SparkSession, params: Parameters) -> DataFrame:
    """Return the users that exist at the end of each day: (day, user) and their state."""
    changes = user_changes(spark, params)
    days = F.broadcast(spark.range(params.days).select(F.col("id").cast("int").alias("day")))
    state = F.struct(*(name for name in changes.columns if name not in ("user", "landing_hour")))
    return (
        changes.join(days, F.col("changed_ms") < params.start_ms + (F.col("day") + 1) * DAY_MS)
        .groupBy("day", "user")
        .agg(F.max_by(state, "step").alias("state"))
        .select("day", "user", "state.*")
        .where("op <> 'D' and not is_deleted")
    )


def user_fields(is_given: Column) -> dict[str, Column]:
    """Return the fragments of a user's attributes; all null unless ``is_given``."""
    given = lambda column: F.when(is_given, column)  # noqa: E731
    return {
        "login": json_any_text(given(F.col("login"))),
        "email": json_text(given(F.col("email"))),
        "registered_datetime": json_time(given(F.col("registered_ms"))),
        "first_connection_datetime": json_time(given(F.col("first_ms"))),
        "last_connection_datetime": json_time(given(F.col("last_ms"))),
        "plan": json_text(given(F.col("plan"))),
        "updated_at": json_time(F.col("changed_ms")),
    }


def with_extra_lines(
    rows: DataFrame, params: Parameters, feed: str, imperfections: Sequence[str], *key: str
) -> DataFrame:
    """Add ``line``: 'row' for each row, and one more line named after each imperfection that happens to it.

    The reference feeds carry their faults in lines of their own, so that no row is lost with them.
    """
    extra = [F.when(happens(params, feed, name, *key), F.lit(name)) for name in imperfections]
    return rows.withColumn("line", F.explode(F.array_compact(F.array(F.lit("row"), *extra))))


def key_field(value: Column) -> Column:
    """Return the fragment of a key field: null in a line without key."""
    return json_text(F.when(F.col("line") != "null_key", value))


def user_change_lines(spark: SparkSession, params: Parameters) -> DataFrame:
    """Return the lines of the change feed; a hard delete names the user and nothing else."""
    lines = with_extra_lines(
        user_changes(spark, params),
        params,
        "user_changes",
        ("unparsable", "null_key", "exact_duplicate"),
        "user",
        "step",
    ).withColumn(
        "landing_hour",
        landing_hour(
            params,
            F.col("landing_hour"),
            F.when(
                F.col("line") == "exact_duplicate",
                pick(REPEAT_DELAYS, roll(params, "repeat", len(REPEAT_DELAYS), "user", "step")),
            ).otherwise(0),
        ),
    )
    is_given = F.col("op") != "D"
    json_line = json_object(
        op=json_text(F.col("op")),
        sequence=F.col("sequence").cast("string"),
        changed_at=json_time(F.col("changed_ms")),
        id=key_field(F.col("id")),
        **user_fields(is_given),
        is_deleted=F.coalesce(F.when(is_given, F.col("is_deleted").cast("string")), F.lit("null")),
    )
    # The initial load of all users lands in the first hour; the later hours share the rest.
    first_hour, other_hours = files_for(params.user_count), files_for(2 * params.user_count // params.hours)
    files = F.when(F.col("landing_hour") == 0, first_hour).otherwise(other_hours)
    return with_payload(
        lines.withColumn("file", roll(params, "file", files, "user", "step")),
        params,
        json_line,
        F.col("line") == "unparsable",
        "user",
        "step",
    ).withColumns(
        {
            "partition": F.col("landing_hour"),
            "shuffled": roll(params, "order of changes", 2**62, "user", "step", "line"),
        }
    )


def user_lines(spark: SparkSession, params: Parameters) -> DataFrame:
    """Return the lines of the daily full extract, which holds who exists at the end of the day."""
    lines = with_extra_lines(
        users_by_day(spark, params), params, "users", ("unparsable", "null_key"), "user", "day"
    )
    json_line = json_object(id=key_field(F.col("id")), **user_fields(F.lit(True)))
    return with_payload(
        lines.withColumn("file", roll(params, "file", files_for(params.user_count), "user")),
        params,
        json_line,
        F.col("line") == "unparsable",
        "user",
        "day",
    ).withColumn("partition", F.col("day"))


# --- Devices ----------------------------------------------------------------------------------------------------------

DEVICE_TYPES = {
    "galaxy": 'Galaxy S "3" mini',
    "iphone": "APPLE iPhone 12 Pro Max (Graphite, 128 GB)",
    "ipad": "iPad Air",
    "mac": "MacBook Pro – 16″",
    "lenovo": 'ThinkPad X1 Carbon Gen 10 (14" Intel)',
    "pixel": "Pixel 8 Größe XL",
}
DEVICE_VERSIONS = ("v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8")
DEVICE_COUNT = len(DEVICE_TYPES) * len(DEVICE_VERSIONS)


def of_device(number: Column, values: Sequence[str]) -> Column:
    """Return the value of the device with this number, from values listed by type."""
    return pick(values, F.floor(number / len(DEVICE_VERSIONS)))


def device_version(number: Column) -> Column:
    """Return the version of the device with this number."""
    return pick(DEVICE_VERSIONS, F.pmod(number, F.lit(len(DEVICE_VERSIONS))))


def device_changes(spark: SparkSession, params: Parameters) -> DataFrame:
    """Return the daily increments, (day, device): first reports, new names, deletes, deletes of what never was."""
    days = spark.range(params.days).select(F.col("id").cast("int").alias("day"))
    devices = spark.range(0, DEVICE_COUNT, 1, 1).withColumnRenamed("id", "device")
    first_day = F.when(
        F.pmod("device", F.lit(6)) == 5, 1 + roll(params, "first day", max(1, params.days - 1), "device")
    ).otherwise(0)
    is_first = F.col("day") == first_day
    is_reported = is_first | ((F.col("day") > first_day) & (roll(params, "report", 4, "device", "day") == 0))
    never_was = is_first & (F.pmod("device", F.lit(16)) == 7)
    is_removed = ~is_first & (roll(params, "removal", 3, "device", "day") == 0)
    name = of_device(F.col("device"), tuple(DEVICE_TYPES.values()))
    return (
        devices.crossJoin(F.broadcast(days))
        .where(is_reported)
        .select(
            "day",
            "device",
            of_device(F.col("device"), tuple(DEVICE_TYPES)).alias("type"),
            F.when(is_first, name).otherwise(F.concat(name, F.lit(" rev. "), "day")).alias("full_name"),
            device_version(F.col("device")).alias("version"),
            (never_was | is_removed).alias("is_deleted"),
        )
    )


def device_lines(spark: SparkSession, params: Parameters) -> DataFrame:
    """Return the lines of the daily increments."""
    lines = with_extra_lines(
        device_changes(spark, params), params, "devices", ("unparsable", "null_key"), "device", "day"
    )
    json_line = json_object(
        type=json_text(F.col("type")),
        full_name=json_any_text(F.col("full_name")),
        version=key_field(F.col("version")),
        is_deleted=F.col("is_deleted").cast("string"),
    )
    return with_payload(lines, params, json_line, F.col("line") == "unparsable", "device", "day").withColumns(
        {"file": F.lit(0), "partition": F.col("day")}
    )


# --- Visits -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One way in which a visit's fields go wrong."""

    imperfection: str
    fields: Mapping[str, str] = field(default_factory=dict)
    """The faulty fields and the SQL of their JSON fragment."""
    rule: str | None = None
    """The first rule that it breaks; None: the visit is usable."""
    page: str | None = None
    """The page that a reader gets, if it is another one."""


VARIANTS = (
    Variant("missing_field", {"user_id": ABSENT}, "user_id_missing"),
    Variant("missing_field", {"user_id": NULL}, "user_id_missing"),
    Variant("missing_field", {"page": ABSENT}, "page_missing"),
    Variant("missing_field", {"page": NULL}, "page_missing"),
    Variant("missing_field", {"context": ABSENT}, "context_missing"),
    Variant("missing_field", {"context": NULL}, "context_missing"),
    Variant("missing_field", {"user_id": ABSENT, "page": NULL}, "user_id_missing"),
    Variant("missing_field", {"page": ABSENT, "context": ABSENT}, "page_missing"),
    Variant("null_key", {"visit_id": ABSENT}, "visit_id_missing"),
    Variant("null_key", {"visit_id": NULL}, "visit_id_missing"),
    Variant("null_key", {"event_time": ABSENT}, "event_time_missing"),
    Variant("null_key", {"event_time": NULL}, "event_time_missing"),
    Variant("null_key", {"visit_id": NULL, "event_time": NULL}, "visit_id_missing"),
    # A JSON number where text is due is taken as text, and a flag that can't be read is unknown.
    Variant("wrong_type", {"visit_id": "cast(visit as string)"}),
    Variant("wrong_type", {"keep_private": "'\"yes\"'"}),
    Variant("wrong_type", {"page": "'404'"}, page="404"),
    Variant("wrong_type", {"event_time": "cast(at_ms as string)"}, "event_time_unparsable"),
    Variant("wrong_type", {"event_time": "'\"03/01/2024 10:15\"'"}, "event_time_unparsable"),
    Variant("wrong_type", {"page": '\'{"name": "index"}\''}, "page_missing"),
    Variant("wrong_type", {"context": "'\"unknown\"'"}, "context_missing"),
)
VARIANT_NUMBERS = {
    name: [number for number, variant in enumerate(VARIANTS) if variant.imperfection == name]
    for name in dict.fromkeys(variant.imperfection for variant in VARIANTS)
}

# The first that happens to a visit is its one imperfection, so that each line counts once.
IMPERFECTIONS = (
    "unparsable",
    "null_key",
    "missing_field",
    "wrong_type",
    "probe",
    "corrected",
    "exact_duplicate",
    "late",
    "unknown_user",
    "awkward_text",
)

# An hour's weight is how often it stands here: quiet nights, busy evenings.
HOUR_WEIGHTS = (2, 1, 1, 1, 1, 2, 3, 5, 6, 6, 6, 6, 7, 6, 5, 5, 6, 7, 8, 9, 9, 8, 6, 4)
HOURS_BY_WEIGHT = tuple(hour for hour, weight in enumerate(HOUR_WEIGHTS) for _ in range(weight))
PAGES = (
    *("index", "home", "about", "contact", "search", "archive", "categories", "login"),
    *(f"category_{number}" for number in range(1, 9)),
    *(f"article_{number}" for number in range(1, 25)),
)
PROBES = ("healthcheck", "healthcheck/live", "healthcheck?deep=true")
AWKWARD_PAGES = (
    "über uns",
    'caffè "latte"',
    "日本語/ブログ",
    "c:\\temp\\notes",
    "ελληνικά 'και' άλλα",
    "rocket 🚀",
    "tab\there",
    "two\nlines",
)
REFERRALS = (
    "Google",
    "LinkedIn",
    "StackOverflow",
    "Medium",
    "Facebook",
    'Newsletter "Daten & Café"',
    None,
    None,
    None,
)
BROWSERS = ("Firefox", "Chrome", "Safari", "Edge")
NETWORKS = ("4G", "5G", "LAN", "Wi-Fi")
DOCUMENTATION_NETWORKS = ("192.0.2.", "198.51.100.", "203.0.113.")
LATE_DELAYS = (1, 1, 1, 2, 3, 5, 8, 24)
REPEAT_DELAYS = (0, 0, 0, 1, 2, 6)

VISIT_BLOCK = 16
"""A visit's events are consecutive numbers within one block of this size: about four of them."""
VISIT_MINUTES = VISIT_BLOCK
FIRST_VISIT_ID = 10_000_000_000


def hour_of(params: Parameters, milliseconds: str) -> Column:
    """Return the hour, counted from the first, of a time in milliseconds since the epoch."""
    return F.expr(f"({milliseconds} - {params.start_ms}L) div {HOUR_MS}L")


def landing_hour(params: Parameters, hour: Column, delay: Column) -> Column:
    """Return the folder of a line that comes ``delay`` hours after ``hour``; the last folder takes the rest."""
    return F.least(hour + delay, F.lit(params.hours - 1)).cast("int")


def visit_events(spark: SparkSession, params: Parameters) -> DataFrame:
    """Return one row an event: its key, its content, its one imperfection and how often it comes again."""
    # A visit starts at each position of the block whose bit is set in two draws (one in four), and at its first.
    starts = (
        roll(params, "starts", 2**VISIT_BLOCK, "block")
        .bitwiseAND(roll(params, "starts too", 2**VISIT_BLOCK, "block"))
        .bitwiseAND(F.expr("shiftleft(2L, position) - 1"))
        .bitwiseOR(F.lit(1))
    )
    last_start = F.length(F.bin(starts)) - 1
    started = (
        roll(params, "day", params.days, "visit") * DAY_MS
        + pick(HOURS_BY_WEIGHT, roll(params, "hour", len(HOURS_BY_WEIGHT), "visit")) * HOUR_MS
        + roll(params, "second", 3_600, "visit") * 1000
    )
    latest = params.days * DAY_MS - VISIT_MINUTES * 60_000
    at_ms = (
        params.start_ms
        + F.when(started < latest, started).otherwise(started - HOUR_MS)
        + F.col("ordinal") * 60_000
        + roll(params, "pause", 50_000, "event")
    )
    imperfection = F.coalesce(
        *(F.when(happens(params, "visits", name, "event"), name) for name in IMPERFECTIONS)
    )
    happened = lambda name: F.col("imperfection") == name  # noqa: E731
    variant = F.coalesce(
        *(
            F.when(happened(name), pick(numbers, roll(params, f"variant {name}", len(numbers), "event")))
            for name, numbers in VARIANT_NUMBERS.items()
        )
    )
    page = F.coalesce(
        *(
            F.when(F.col("variant") == number, variant.page)
            for number, variant in enumerate(VARIANTS)
            if variant.page
        ),
        F.when(happened("probe"), pick(PROBES, roll(params, "probe page", len(PROBES), "event"))),
        F.when(
            happened("awkward_text"),
            pick(AWKWARD_PAGES, roll(params, "awkward page", len(AWKWARD_PAGES), "event")),
        ),
        pick(PAGES, F.col("page_number")),
    )
    known_user = roll_low(params, "user", params.user_count, "visit")
    unknown_user = params.user_count + roll(params, "unknown user", params.user_count, "event")
    outcome = (
        F.when(happened("unparsable"), "unparsable")
        .when(F.col("rule").isNotNull(), "invalid")
        .when(happened("probe"), "filtered")
        .otherwise("good")
    )
    return (
        spark.range(0, params.visits, 1, tasks_for(params.visits))
        .withColumnRenamed("id", "event")
        .withColumns(
            {
                "block": F.expr(f"event div {VISIT_BLOCK}"),
                "position": F.pmod("event", F.lit(VISIT_BLOCK)).cast("int"),
            }
        )
        .withColumn("last_start", last_start)
        .withColumns(
            {
                "visit": FIRST_VISIT_ID + F.col("block") * VISIT_BLOCK + F.col("last_start"),
                "ordinal": F.col("position") - F.col("last_start"),
                "page_number": roll_low(params, "page", len(PAGES), "event"),
                "imperfection": imperfection,
            }
        )
        .withColumns({"at_ms": at_ms, "variant": variant})
        .withColumns(
            {
                "event_hour": hour_of(params, "at_ms").cast("int"),
                "rule": pick([variant.rule for variant in VARIANTS], F.col("variant")),
                "user": F.when(happened("unknown_user"), unknown_user).otherwise(known_user),
                "page": page,
                "referral": pick(REFERRALS, roll(params, "referral", len(REFERRALS), "visit")),
                "repeats": F.when(
                    happened("corrected") | happened("exact_duplicate"),
                    1 + F.floor(roll(params, "repeats", 5, "event") / 4),
                ).otherwise(0),
            }
        )
        .withColumn("outcome", outcome)
        .drop("block", "position", "last_start", "ordinal")
    )


def visit_line_plan(spark: SparkSession, params: Parameters) -> DataFrame:
    """Return one row a line: the event, its ``copy`` (0 = first delivery), its folder, the content of that copy."""
    is_late = F.col("imperfection") == "late"
    delay = (
        F.when(is_late, pick(LATE_DELAYS, roll(params, "delay", len(LATE_DELAYS), "event")))
        .when(
            F.col("copy") > 0,
            pick(REPEAT_DELAYS, roll(params, "repeat", len(REPEAT_DELAYS), "event", "copy")),
        )
        .otherwise(0)
    )
    is_correction = (F.col("copy") > 0) & (F.col("imperfection") == "corrected")
    # A correction moves to one of the next pages, so that no two copies of an event are alike.
    corrected_page = pick(PAGES, F.pmod(F.col("page_number") + F.col("copy"), F.lit(len(PAGES))))
    corrected_referral = pick(REFERRALS, roll(params, "corrected referral", len(REFERRALS), "event", "copy"))
    return (
        visit_events(spark, params)
        .withColumn("copy", F.explode(F.sequence(F.lit(0), F.col("repeats").cast("int"))))
        .withColumns(
            {
                "landing_hour": landing_hour(params, F.col("event_hour"), delay),
                "page": F.when(is_correction, corrected_page).otherwise(F.col("page")),
                "referral": F.when(is_correction, corrected_referral).otherwise(F.col("referral")),
            }
        )
    )


def visit_fragment(name: str, good: Column) -> Column:
    """Return a field's fragment: the good one, or what the visit's variant puts in its place."""
    faults = [
        (number, variant.fields[name]) for number, variant in enumerate(VARIANTS) if name in variant.fields
    ]
    return reduce(
        lambda fragment, fault: F.when(F.col("variant") == fault[0], F.expr(fault[1])).otherwise(fragment),
        faults,
        good,
    )


def visit_lines(plan: DataFrame, params: Parameters) -> DataFrame:
    """Return the planned lines with their ``payload``, partition and file."""
    drawn_by_visit = lambda what, values: pick(values, roll(params, what, len(values), "visit"))  # noqa: E731
    device = roll(params, "device", DEVICE_COUNT, "visit")
    version = F.concat(roll(params, "browser version", 30, "visit") + 90, F.lit(".0"))
    ad = F.when(F.col("imperfection") == "awkward_text", F.lit('ad "50 % größer" \\ ☕')).when(
        roll(params, "has ad", 3, "visit") == 0, F.concat(F.lit("ad "), roll(params, "ad", 20, "visit"))
    )
    connected_ms = F.col("at_ms") - roll(params, "connected since", 30 * 24, "visit") * HOUR_MS
    user = json_object(
        ip=json_text(
            F.concat(drawn_by_visit("network", DOCUMENTATION_NETWORKS), 1 + roll(params, "ip", 254, "visit"))
        ),
        login=json_any_text(user_login(params, "user")),
        connected_since=F.when(roll(params, "is connected", 4, "visit") > 0, json_time(connected_ms)),
    )
    technical = json_object(
        browser=json_text(drawn_by_visit("browser", BROWSERS)),
        browser_version=json_text(version),
        network_type=json_text(drawn_by_visit("network type", NETWORKS)),
        device_type=json_text(of_device(device, tuple(DEVICE_TYPES))),
        device_version=json_text(device_version(device)),
    )
    context = json_object(
        referral=json_any_text(F.col("referral")), ad_id=json_any_text(ad), user=user, technical=technical
    )
    keep_private = (roll(params, "keep private", 10, "visit") == 0).cast("string")
    json_line = json_object(
        visit_id=visit_fragment("visit_id", json_text(F.col("visit").cast("string"))),
        event_time=visit_fragment("event_time", json_time(F.col("at_ms"))),
        user_id=visit_fragment("user_id", json_text(user_id(params, "user"))),
        keep_private=visit_fragment("keep_private", keep_private),
        page=visit_fragment("page", json_any_text(F.col("page"))),
        context=visit_fragment("context", context),
    )
    return with_payload(plan, params, json_line, F.col("imperfection") == "unparsable", "event")


# --- Landing folder ---------------------------------------------------------------------------------------------------


def files_for(lines: int) -> int:
    """Return how many files hold this many lines."""
    return max(1, -(-lines // LINES_PER_FILE))


def tasks_for(lines: int) -> int:
    """Return how many tasks make this many lines."""
    return max(1, -(-lines // LINES_PER_TASK))


class LandingFolder:
    """The output folder, on whatever file system its path or URI names."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._jvm: Any = spark._jvm
        self._root = self._jvm.org.apache.hadoop.fs.Path(path)
        self._files = self._root.getFileSystem(spark._jsc.hadoopConfiguration())  # type: ignore[attr-defined]
        if self._files.getScheme() == "file":
            # Without Hadoop's checksum files: who edits a landing file with another tool would break its reading.
            self._files = self._files.getRawFileSystem()
        self.path = path

    def child(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, name)

    def prepare(self, overwrite: bool) -> None:
        """Make the folder; an earlier run is removed if it may be, the truth first.

        Raises:
            WrongUse: the folder is not empty and ``overwrite`` is not set, or the path is a file.
            JobFailed: the folder can't be made.
        """
        if self._files.exists(self._root):
            if not self._files.getFileStatus(self._root).isDirectory():
                raise WrongUse(f"--output '{self.path}' is a file, but must be a folder")
            if len(self._files.listStatus(self._root)) and not overwrite:
                raise WrongUse(
                    f"--output '{self.path}' is not empty; pass --overwrite true to replace its feeds"
                )
            for name in ("truth.json", STAGING, *FEEDS):
                self._files.delete(self.child(name), True)
        elif not self._files.mkdirs(self._root):
            raise JobFailed(f"--output '{self.path}' can't be made")

    def write_feed(
        self, feed: str, lines: DataFrame, tasks: int, folders: Sequence[str], order: Sequence[str]
    ) -> int:
        """Write ``payload`` as ``<feed>/<folder>/<feed>-<file>.json``; return the number of files.

        ``partition`` counts the folders from 0. All lines of a file go to one task, which sorts them by ``order``
        (unique within a file), so that the bytes don't depend on how the tasks are cut.
        """
        staging = self.child(f"{STAGING}/{feed}")
        slot = F.col("partition").cast("bigint") * MOST_FILES + F.col("file")
        (
            lines.withColumn("slot", slot)
            .repartition(tasks, "slot")
            .sortWithinPartitions("slot", *order)
            .select("slot", "payload")
            .write.partitionBy("slot")
            .text(str(staging))
        )
        written = [status.getPath() for status in self._files.listStatus(staging)]
        for folder in (path for path in written if path.getName().startswith("slot=")):
            partition, file = divmod(int(folder.getName().removeprefix("slot=")), MOST_FILES)
            (part,) = (
                path for path in map(_path_of, self._files.listStatus(folder)) if path.getName()[0] == "p"
            )
            target = self.child(f"{feed}/{folders[partition]}/{feed}-{file:05d}.json")
            self._files.mkdirs(target.getParent())
            if not self._files.rename(part, target):
                raise JobFailed(f"'{target}' can't be written")
        return len(written)

    def finish(self, truth: Mapping[str, Any]) -> None:
        """Write truth.json in one step and remove the staging folder."""
        aside = self.child(f"{STAGING}/truth.json")
        stream = self._files.create(aside, True)
        stream.write(
            bytearray(json.dumps(truth, ensure_ascii=False, indent=1, sort_keys=True) + "\n", "utf-8")
        )
        stream.close()
        self._files.rename(aside, self.child("truth.json"))
        self._files.delete(self.child(STAGING), True)


def _path_of(status: Any) -> Any:
    return status.getPath()


# --- Truth ------------------------------------------------------------------------------------------------------------


def visit_counts(plan: DataFrame, params: Parameters) -> dict[str, Any]:
    """Count the planned visit lines: per folder, per imperfection, per outcome of the precedence, per first rule."""
    groups = (
        plan.groupBy(
            "landing_hour",
            "imperfection",
            "variant",
            "outcome",
            "rule",
            (F.col("copy") > 0).alias("again"),
            (F.col("landing_hour") > F.col("event_hour")).alias("later"),
        )
        .count()
        .collect()
    )
    folders, precedence, rules = Counter[str](), Counter[str](), Counter[str]()
    imperfections, details = Counter[str](), Counter[str]()
    for group in groups:
        name, lines = group["imperfection"], group["count"]
        folders[hour_folder(params, group["landing_hour"])] += lines
        repeated = {"corrected": "superseded", "exact_duplicate": "exact_duplicate"}.get(name)
        precedence[
            group["outcome"] if group["outcome"] != "good" else repeated if group["again"] else "kept"
        ] += lines
        if group["rule"]:
            rules[group["rule"]] += lines
        if (
            name == "late"
            and group["later"]
            or group["again"]
            or repeated is None
            and name not in (None, "late")
        ):
            imperfections[name] += lines
        if group["again"]:
            details[f"{name}_in_a_later_folder" if group["later"] else f"{name}_in_the_same_folder"] += lines
        if name == "wrong_type":
            details["wrong_type_unusable" if group["rule"] else "wrong_type_usable"] += lines
    return {
        "lines": folders.total(),
        "partitions": dict(folders),
        "imperfections": {name: imperfections[name] for name in IMPERFECTIONS},
        "details": dict(details),
        "precedence": {name: precedence[name] for name in PRECEDENCE},
        "invalid_by_first_rule": {name: rules[name] for name in RULES},
    }


def kept_visits(plan: DataFrame, params: Parameters) -> DataFrame:
    """Return the line that wins of each good event: the latest folder, then the higher SHA-256 of the payload."""
    good = plan.where("outcome = 'good'")
    is_corrected = F.coalesce(F.col("imperfection") == "corrected", F.lit(False))
    strongest_first = Window.partitionBy("event").orderBy(
        F.desc("landing_hour"), F.sha2("payload", 256).desc()
    )
    corrected = (
        visit_lines(good.where(is_corrected), params)
        .withColumn("rank", F.row_number().over(strongest_first))
        .where("rank = 1")
    )
    columns = ("visit", "user", "event_hour", "page", "referral")
    return good.where(~is_corrected & (F.col("copy") == 0)).select(*columns).union(corrected.select(*columns))


def gold_of_visits(kept: DataFrame, params: Parameters) -> dict[str, Any]:
    """Return the right answers of the gold tables made from visits."""
    page_views: dict[str, dict[str, int]] = defaultdict(dict)
    for row in kept.groupBy("event_hour", "page").count().collect():
        page_views[params.hour_name(row["event_hour"])][row["page"]] = row["count"]
    visits = (
        kept.groupBy(
            F.expr("event_hour div 24").alias("day"),
            F.coalesce("referral", F.lit("direct")).alias("referral"),
            "visit",
            "user",
        )
        .count()
        .persist()
    )
    distinct = (F.count_distinct("visit").alias("visits"), F.count_distinct("user").alias("users"))
    referrals: dict[str, dict[str, Any]] = defaultdict(dict)
    for row in visits.groupBy("day", "referral").agg(*distinct).collect():
        referrals[params.day_name(row["day"])][row["referral"]] = {
            "visits": row["visits"],
            "users": row["users"],
        }
    days = {
        params.day_name(row["day"]): {"events": row["events"], "visits": row["visits"], "users": row["users"]}
        for row in visits.groupBy("day").agg(F.sum("count").alias("events"), *distinct).collect()
    }
    visits.unpersist()
    return {
        "page_views_by_hour": page_views,
        "page_views_total_by_hour": {hour: sum(pages.values()) for hour, pages in page_views.items()},
        "referral_statistics_by_day": referrals,
        "visit_statistics_by_day": days,
    }


def row_hash(*columns: Column) -> Column:
    """Return the sum over the rows of the first 32 bits of md5('a|b|…'), NULL as empty text: any order, any engine."""
    text = F.concat_ws("|", *(F.coalesce(column, F.lit("")) for column in columns))
    return F.sum(F.conv(F.left(F.md5(text), F.lit(8)), 16, 10).cast("bigint"))


def gold_of_users(users: DataFrame, params: Parameters) -> dict[str, Any]:
    """Return the users at the end of each day: how many, how many a plan, and a hash of id, login, email and plan."""
    days: dict[str, dict[str, Any]] = {
        params.day_name(day): {"users": 0, "by_plan": {}, "hash": 0} for day in range(params.days)
    }
    hashed = row_hash(F.col("id"), F.col("login"), F.col("email"), F.col("plan"))
    for row in users.groupBy("day", "plan").agg(F.count("*").alias("users"), hashed.alias("hash")).collect():
        day = days[params.day_name(row["day"])]
        day["users"] += row["users"]
        day["by_plan"][row["plan"]] = row["users"]
        day["hash"] += row["hash"]
    return days


def gold_of_devices(changes: DataFrame) -> dict[str, int]:
    """Return the devices that exist after the last increment, and a hash of type, version and full name."""
    latest = F.max_by(F.struct("type", "version", "full_name", "is_deleted"), "day").alias("latest")
    hashed = row_hash(F.col("type"), F.col("version"), F.col("full_name"))
    devices = changes.groupBy("device").agg(latest).select("latest.*").where("not is_deleted")
    row = devices.agg(F.count("*").alias("devices"), F.coalesce(hashed, F.lit(0)).alias("hash")).collect()[0]
    return {"devices": row["devices"], "hash": row["hash"]}


def reference_counts(lines: DataFrame, folders: Sequence[str]) -> dict[str, Any]:
    """Count the lines of a feed of users or devices: per folder and per imperfection."""
    partitions, kinds = Counter[str](), Counter[str]()
    for row in lines.groupBy("partition", "line").count().collect():
        partitions[folders[row["partition"]]] += row["count"]
        kinds[row["line"]] += row["count"]
    rows = kinds.pop("row", 0)
    return {
        "lines": partitions.total(),
        "rows": rows,
        "partitions": dict(partitions),
        "imperfections": dict(kinds),
    }


def change_counts(changes: DataFrame) -> dict[str, int]:
    """Count the changes of users by operation, and those that land after their hour."""
    soft = F.when((F.col("op") == "U") & F.col("is_deleted"), 1)
    rows = (
        changes.groupBy("op")
        .agg(F.count("*").alias("changes"), F.count(soft).alias("soft_deletes"))
        .collect()
    )
    counts = {row["op"]: row["changes"] for row in rows}
    return {
        "inserts": counts.get("I", 0),
        "updates": counts.get("U", 0),
        "hard_deletes": counts.get("D", 0),
        "soft_deletes": sum(row["soft_deletes"] for row in rows),
    }


# --- The job ----------------------------------------------------------------------------------------------------------

STAGING = "_staging"
MOST_FILES = 1_000_000
"""Files a folder may have; only a factor in a number."""
PRECEDENCE = ("unparsable", "invalid", "filtered", "exact_duplicate", "superseded", "kept")
RULES = tuple(dict.fromkeys(variant.rule for variant in VARIANTS if variant.rule))


def hour_folder(params: Parameters, hour: int) -> str:
    """Return the folder of an hour, counted from the first."""
    return f"date={params.day_name(hour // 24)}/hour={hour % 24:02d}"


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Write the four feeds, then truth.json; return what was written."""
    landing = LandingFolder(spark, params.output)
    landing.prepare(params.overwrite)
    hours = [hour_folder(params, hour) for hour in range(params.hours)]
    days = [f"date={params.day_name(day)}" for day in range(params.days)]

    plan = visit_line_plan(spark, params)
    visits = visit_lines(plan, params).withColumns(
        {
            "partition": F.col("landing_hour"),
            "file": roll(params, "file", files_for(params.visits // params.hours), "event", "copy"),
        }
    )
    changes = user_change_lines(spark, params)
    users = user_lines(spark, params)
    devices = device_lines(spark, params)
    files = {
        "visits": landing.write_feed(
            "visits", visits, tasks_for(params.visits), hours, ("at_ms", "event", "copy")
        ),
        "user_changes": landing.write_feed(
            "user_changes", changes, tasks_for(2 * params.user_count), hours, ("shuffled",)
        ),
        "users": landing.write_feed(
            "users", users, tasks_for(params.user_count * params.days), days, ("user", "line")
        ),
        "devices": landing.write_feed("devices", devices, 1, days, ("device", "line")),
    }

    visit_truth = visit_counts(plan, params)
    users_truth = gold_of_users(users_by_day(spark, params), params)
    truth = {
        "format_version": TRUTH_FORMAT_VERSION,
        "parameters": {
            name: value
            for name, value in dataclasses.asdict(params).items()
            if name not in ("output", "overwrite")
        },
        "feeds": {
            "visits": visit_truth,
            "user_changes": reference_counts(changes, hours) | change_counts(user_changes(spark, params)),
            "users": reference_counts(users, days),
            "devices": reference_counts(devices, days),
        },
        "gold": gold_of_visits(kept_visits(plan, params), params)
        | {
            "users_by_day": users_truth,
            "current_users": users_truth[params.day_name(params.days - 1)],
            "current_devices": gold_of_devices(device_changes(spark, params)),
        },
    }
    landing.finish(truth)
    return {
        "output": params.output,
        "files": files,
        "lines": {feed: truth["feeds"][feed]["lines"] for feed in FEEDS},
        "imperfections": visit_truth["imperfections"],
        "precedence": visit_truth["precedence"],
    }


if __name__ == "__main__":
    run_job(Parameters, run)
