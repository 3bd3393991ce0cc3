"""Users: a feed of their changes, and the daily extract of all existing users."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from case_study.datasets.drawing import (
    DAY_MS,
    HOUR_MS,
    REPEAT_DELAYS,
    happens,
    hour_of,
    landing_hour,
    pick,
    roll,
)
from case_study.datasets.json_lines import (
    json_any_text,
    json_object,
    json_text,
    json_time,
    key_field,
    or_null,
    with_extra_lines,
    with_payload,
)
from case_study.datasets.landing import files_for, tasks_for
from case_study.datasets.parameters import Parameters


@dataclass(frozen=True)
class Change:
    """A step in a user's biography: the operation, its time, and the state of the user after it."""

    op: str
    """Operation: I (insert), U (update) or D (hard delete)."""
    minutes: int = 0
    """Time of the change, in minutes after the biography's start; equal minutes give equal timestamps."""
    plan: int = 0
    """Number of the plan, counted from the user's first plan."""
    email: int | None = 0
    """Number of the address; None is NULL."""
    is_deleted: bool = False
    """Whether the user is soft-deleted."""
    delay: int = 0
    """Number of hourly folders between the change's hour and its landing folder."""
    connected: bool = False
    """Whether the user connected at this time."""


PLANS = ("free", "premium", "business")

# Changes of a user after the insert, with which every user begins. The longest biography takes 11 hours.
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
# Every second user has one of these biographies; the other users never change.
BIOGRAPHY_CYCLE = 2 * len(BIOGRAPHIES)

AWKWARD_LOGINS = ("jürgen", 'søren "the dane"', "ольга", "李小龙", "o'neill\\admin")


def user_id(params: Parameters, index: str) -> Column:
    """Return the id of the user with this number, which is unique because the number is a part of it."""
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
    """Return one row for each (user, step): the change, its landing folder and the user's state after it."""
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
            # The sequence orders a user's changes even if their times are equal, and is exact as a JSON number.
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


def users_by_day(changes: DataFrame, params: Parameters) -> DataFrame:
    """Return one row for each (day, user) that exists at the end of the day, with the user's state."""
    days = F.broadcast(changes.sparkSession.range(params.days).select(F.col("id").cast("int").alias("day")))
    state = F.struct(*(name for name in changes.columns if name not in ("user", "landing_hour")))
    return (
        changes.join(days, F.col("changed_ms") < params.start_ms + (F.col("day") + 1) * DAY_MS)
        .groupBy("day", "user")
        .agg(F.max_by(state, "step").alias("state"))
        .select("day", "user", "state.*")
        .where("op <> 'D' and not is_deleted")
    )


def user_fields(is_given: Column) -> dict[str, Column]:
    """Return the fragments of a user's attributes; all are null if ``is_given`` is false."""

    def given(name: str) -> Column:
        return F.when(is_given, F.col(name))

    return {
        "login": or_null(json_any_text(given("login"))),
        "email": or_null(json_text(given("email"))),
        "registered_datetime": or_null(json_time(given("registered_ms"))),
        "first_connection_datetime": or_null(json_time(given("first_ms"))),
        "last_connection_datetime": or_null(json_time(given("last_ms"))),
        "plan": or_null(json_text(given("plan"))),
        "updated_at": json_time(F.col("changed_ms")),
    }


def user_change_lines(changes: DataFrame, params: Parameters) -> DataFrame:
    """Return the lines of the change feed; a hard delete has the user's id and no attributes."""
    lines = with_extra_lines(
        changes,
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
        is_deleted=or_null(F.when(is_given, F.col("is_deleted").cast("string"))),
    )
    # The initial load of all users lands in the first hour, the changes land in the later hours.
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


def user_lines(users: DataFrame, params: Parameters) -> DataFrame:
    """Return the lines of the daily full extract, which has all users that exist at the end of the day."""
    lines = with_extra_lines(users, params, "users", ("unparsable", "null_key"), "user", "day")
    json_line = json_object(id=key_field(F.col("id")), **user_fields(F.lit(True)))
    return with_payload(
        lines.withColumn("file", roll(params, "file", files_for(params.user_count), "user")),
        params,
        json_line,
        F.col("line") == "unparsable",
        "user",
        "day",
    ).withColumn("partition", F.col("day"))
