"""Visits: page events with imperfections; each line is planned first and then written as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from case_study.datasets.devices import DEVICE_COUNT, DEVICE_TYPES, device_version, of_device
from case_study.datasets.drawing import (
    DAY_MS,
    HOUR_MS,
    REPEAT_DELAYS,
    happens,
    hour_of,
    landing_hour,
    pick,
    roll,
    roll_low,
)
from case_study.datasets.json_lines import (
    ABSENT,
    NULL,
    json_any_text,
    json_object,
    json_object_of_some,
    json_text,
    json_time,
    or_null,
    with_payload,
)
from case_study.datasets.landing import files_for, tasks_for
from case_study.datasets.parameters import Parameters
from case_study.datasets.users import user_id, user_login


@dataclass(frozen=True)
class Variant:
    """One variant of an imperfection: the faulty fields of a visit."""

    imperfection: str
    fields: Mapping[str, str] = field(default_factory=dict)
    """Faulty fields, each with the SQL of its JSON fragment."""
    rule: str | None = None
    """First rule that the visit breaks; None: the visit is usable."""
    page: str | None = None
    """Page that a reader gets; None: the fault doesn't change the page."""


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
    # Readers take a JSON number in a text field as text, and an unreadable flag as unknown.
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

# A visit has only the first of these imperfections that is drawn for it, so that each line counts once.
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

# Weights of the hours of a day: few visits in the night, many in the evening.
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
AWKWARD_AD = 'ad "50 % größer" \\ ☕'
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
NETWORK_TYPES = ("4G", "5G", "LAN", "Wi-Fi")
# Networks that are reserved for documentation (RFC 5737), so nobody has these addresses.
NETWORKS = ("192.0.2.", "198.51.100.", "203.0.113.")
LATE_DELAYS = (1, 1, 1, 2, 3, 5, 8, 24)
REPEATS = (1, 1, 1, 1, 2)

# A visit's events have consecutive numbers within a block of this size.
VISIT_BLOCK = 16
FIRST_VISIT_ID = 10_000_000_000

PRECEDENCE = ("unparsable", "invalid", "filtered", "exact_duplicate", "superseded", "kept")


def happened(imperfection: str) -> Column:
    """Return true for the events with this imperfection; never NULL."""
    return F.col("imperfection").eqNullSafe(imperfection)


def visit_keys(spark: SparkSession, params: Parameters) -> DataFrame:
    """Return the key of each ``event`` (a number): ``visit`` and ``at_ms``, with the visit's ``started_ms``."""
    # A visit starts at the block's first position and at each position whose bit is set in two draws (one in four).
    starts = (
        roll(params, "starts", 2**VISIT_BLOCK, "block")
        .bitwiseAND(roll(params, "starts too", 2**VISIT_BLOCK, "block"))
        .bitwiseAND(F.expr("shiftleft(2L, position) - 1"))
        .bitwiseOR(F.lit(1))
    )
    started = (
        roll(params, "day", params.days, "visit") * DAY_MS
        + pick(HOURS_BY_WEIGHT, roll(params, "hour", len(HOURS_BY_WEIGHT), "visit")) * HOUR_MS
        + roll(params, "second", 3_600, "visit") * 1000
    )
    # A visit has at most one event a minute. A visit that starts at the end of the last day starts an hour earlier, so
    # that it ends on this day.
    latest = params.days * DAY_MS - VISIT_BLOCK * 60_000
    started_ms = params.start_ms + F.when(started < latest, started).otherwise(started - HOUR_MS)
    # The pause is shorter than a minute, so the times of a visit differ and the keys of its events are unique.
    at_ms = F.col("started_ms") + F.col("ordinal") * 60_000 + roll(params, "pause", 50_000, "event")
    return (
        spark.range(0, params.visits, 1, tasks_for(params.visits))
        .withColumnRenamed("id", "event")
        .withColumns(
            {
                "block": F.expr(f"event div {VISIT_BLOCK}"),
                "position": F.pmod("event", F.lit(VISIT_BLOCK)).cast("int"),
            }
        )
        .withColumn("first", F.length(F.bin(starts)) - 1)
        .withColumns(
            {
                "visit": FIRST_VISIT_ID + F.col("block") * VISIT_BLOCK + F.col("first"),
                "ordinal": F.col("position") - F.col("first"),
            }
        )
        .withColumn("started_ms", started_ms)
        .select("event", "visit", "started_ms", at_ms.alias("at_ms"))
    )


def visit_events(spark: SparkSession, params: Parameters) -> DataFrame:
    """Return :func:`visit_keys` with the imperfection of each event and the content of its first delivery."""
    imperfection = F.coalesce(
        *(F.when(happens(params, "visits", name, "event"), name) for name in IMPERFECTIONS)
    )
    variant = F.coalesce(
        *(
            F.when(happened(name), pick(numbers, roll(params, f"variant {name}", len(numbers), "event")))
            for name, numbers in VARIANT_NUMBERS.items()
        )
    )
    page = F.coalesce(
        pick([variant.page for variant in VARIANTS], F.col("variant")),
        F.when(happened("probe"), pick(PROBES, roll(params, "probe page", len(PROBES), "event"))),
        F.when(
            happened("awkward_text"),
            pick(AWKWARD_PAGES, roll(params, "awkward page", len(AWKWARD_PAGES), "event")),
        ),
        pick(PAGES, F.col("page_number")),
    )
    unknown_user = params.user_count + roll(params, "unknown user", params.user_count, "event")
    user = F.when(happened("unknown_user"), unknown_user).otherwise(
        roll_low(params, "user", params.user_count, "visit")
    )
    # Most of these events are repeated once, some twice.
    repeats = F.when(
        happened("corrected") | happened("exact_duplicate"),
        pick(REPEATS, roll(params, "repeats", 5, "event")),
    ).otherwise(0)
    return (
        visit_keys(spark, params)
        .withColumns(
            {
                "event_hour": hour_of(params, "at_ms").cast("int"),
                "imperfection": imperfection,
                "page_number": roll_low(params, "page", len(PAGES), "event"),
                "referral": pick(REFERRALS, roll(params, "referral", len(REFERRALS), "visit")),
            }
        )
        .withColumn("variant", variant)
        .withColumns(
            {
                "rule": pick([variant.rule for variant in VARIANTS], F.col("variant")),
                "page": page,
                "user": user,
                "repeats": repeats,
            }
        )
    )


def visit_line_plan(spark: SparkSession, params: Parameters) -> DataFrame:
    """Return one row for each line: the event, its ``copy`` (0 is the first delivery), content and folder.

    ``verdict`` is the line's outcome in the precedence. The first line of a corrected event has the verdict
    ``kept``, although another line may win: only the numbers matter. ``is_counted`` is true if the line shows its
    event's imperfection.
    """
    is_again = F.col("copy") > 0
    repeat_delay = pick(REPEAT_DELAYS, roll(params, "repeat", len(REPEAT_DELAYS), "event", "copy"))
    delay = (
        F.when(happened("late"), pick(LATE_DELAYS, roll(params, "delay", len(LATE_DELAYS), "event")))
        .when(is_again, repeat_delay)
        .otherwise(0)
    )
    is_correction = is_again & happened("corrected")
    # A correction has one of the next pages, so that no two lines of an event are equal.
    corrected_page = pick(PAGES, F.pmod(F.col("page_number") + F.col("copy"), F.lit(len(PAGES))))
    corrected_referral = pick(REFERRALS, roll(params, "corrected referral", len(REFERRALS), "event", "copy"))
    verdict = (
        F.when(happened("unparsable"), "unparsable")
        .when(F.col("rule").isNotNull(), "invalid")
        .when(happened("probe"), "filtered")
        .when(is_again & happened("exact_duplicate"), "exact_duplicate")
        .when(is_correction, "superseded")
        .otherwise("kept")
    )
    is_counted = (
        F.when(happened("corrected") | happened("exact_duplicate"), is_again)
        .when(happened("late"), F.col("is_later"))
        .otherwise(F.col("imperfection").isNotNull())
    )
    return (
        visit_events(spark, params)
        .withColumn("copy", F.explode(F.sequence(F.lit(0), "repeats")))
        .withColumns(
            {
                "landing_hour": landing_hour(params, F.col("event_hour"), delay),
                "page": F.when(is_correction, corrected_page).otherwise(F.col("page")),
                "referral": F.when(is_correction, corrected_referral).otherwise(F.col("referral")),
                "verdict": verdict,
            }
        )
        .withColumn("is_later", F.col("landing_hour") > F.col("event_hour"))
        .withColumn("is_counted", is_counted)
    )


def visit_fragment(name: str, good: Column) -> Column:
    """Return a field's fragment: the fragment of the event's variant if it changes the field, or else ``good``."""
    faults = [
        (number, variant.fields[name]) for number, variant in enumerate(VARIANTS) if name in variant.fields
    ]
    return reduce(
        lambda fragment, fault: F.when(F.col("variant") == fault[0], F.expr(fault[1])).otherwise(fragment),
        faults,
        good,
    )


def visit_lines(plan: DataFrame, params: Parameters) -> DataFrame:
    """Return the planned lines with ``payload``, ``partition`` (the number of the hour) and ``file``."""

    def drawn(name: str, values: Sequence[str]) -> Column:
        return pick(values, roll(params, name, len(values), "visit"))

    device = roll(params, "device", DEVICE_COUNT, "visit")
    ad = F.when(happened("awkward_text"), F.lit(AWKWARD_AD)).when(
        roll(params, "has ad", 3, "visit") == 0, F.concat(F.lit("ad "), roll(params, "ad", 20, "visit"))
    )
    connected_ms = F.col("started_ms") - roll(params, "connected since", 30 * 24, "visit") * HOUR_MS
    user = json_object_of_some(
        ip=json_text(F.concat(drawn("network", NETWORKS), 1 + roll(params, "ip", 254, "visit"))),
        login=json_any_text(user_login(params, "user")),
        connected_since=F.when(roll(params, "is connected", 4, "visit") > 0, json_time(connected_ms)),
    )
    technical = json_object(
        browser=json_text(drawn("browser", BROWSERS)),
        browser_version=json_text(F.concat(90 + roll(params, "browser version", 30, "visit"), F.lit(".0"))),
        network_type=json_text(drawn("network type", NETWORK_TYPES)),
        device_type=json_text(of_device(device, tuple(DEVICE_TYPES))),
        device_version=json_text(device_version(device)),
    )
    context = json_object(
        referral=or_null(json_any_text(F.col("referral"))),
        ad_id=or_null(json_any_text(ad)),
        user=user,
        technical=technical,
    )
    keep_private = (roll(params, "keep private", 10, "visit") == 0).cast("string")
    json_line = json_object_of_some(
        visit_id=visit_fragment("visit_id", json_text(F.col("visit").cast("string"))),
        event_time=visit_fragment("event_time", json_time(F.col("at_ms"))),
        user_id=visit_fragment("user_id", json_text(user_id(params, "user"))),
        keep_private=visit_fragment("keep_private", keep_private),
        page=visit_fragment("page", json_any_text(F.col("page"))),
        context=visit_fragment("context", context),
    )
    file = roll(params, "file", files_for(params.visits // params.hours), "event", "copy")
    return with_payload(
        plan.withColumns({"partition": F.col("landing_hour"), "file": file}),
        params,
        json_line,
        happened("unparsable"),
        "event",
    )
