"""The expected results, aggregated from the plan of each line, without reading JSON and without any pattern."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from case_study.datasets.parameters import Parameters
from case_study.datasets.visits import IMPERFECTIONS, PRECEDENCE, VARIANTS, happened, visit_lines

VALID = ("exact_duplicate", "superseded", "kept")
# Buckets of the delay in folders (hours) between a line's event hour and its landing hour, with their upper bounds.
DELAYS: dict[str, float] = {"0 hours": 0, "1 hour": 1, "3 hours": 3, "12 hours": 12, "more": math.inf}
RULES = tuple(dict.fromkeys(variant.rule for variant in VARIANTS if variant.rule))


def visit_counts(plan: DataFrame, params: Parameters) -> dict[str, Any]:
    """Return the numbers of planned visit lines by folder, imperfection, precedence, broken rule and delay.

    The counts by delay have the valid lines only.
    """
    columns = ("landing_hour", "event_hour", "imperfection", "rule", "verdict", "is_later", "is_counted")
    hours = params.hour_folders
    folders, imperfections, details = Counter[str](), Counter[str](), Counter[str]()
    precedence, rules, delays = Counter[str](), Counter[str](), Counter[str]()
    for row in plan.groupBy(*columns).count().collect():
        name, lines = row["imperfection"], row["count"]
        folders[hours[row["landing_hour"]]] += lines
        precedence[row["verdict"]] += lines
        if row["verdict"] in VALID:
            delays[bucket_of(row["landing_hour"] - row["event_hour"])] += lines
        if row["rule"]:
            rules[row["rule"]] += lines
        if row["is_counted"]:
            imperfections[name] += lines
            if name in ("exact_duplicate", "corrected"):
                folder = "a_later" if row["is_later"] else "the_same"
                details[f"{name}_in_{folder}_folder"] += lines
            if name == "wrong_type":
                details["wrong_type_unusable" if row["rule"] else "wrong_type_usable"] += lines
    return {
        "lines": folders.total(),
        "partitions": dict(folders),
        "imperfections": {name: imperfections[name] for name in IMPERFECTIONS},
        "details": dict(details),
        "precedence": {name: precedence[name] for name in PRECEDENCE},
        "invalid_by_first_rule": {name: rules[name] for name in RULES},
        "valid_by_delay": {name: delays[name] for name in DELAYS},
    }


def bucket_of(delay: int) -> str:
    """Return the bucket of a line that landed ``delay`` folders after its event hour."""
    return next(name for name, bound in DELAYS.items() if delay <= bound)


def kept_visits(plan: DataFrame, params: Parameters) -> DataFrame:
    """Return the kept line of each valid event: the line of the latest folder, and of several the highest SHA-256."""
    columns = ("visit", "user", "event_hour", "page", "referral")
    strongest_first = Window.partitionBy("event").orderBy(
        F.desc("landing_hour"), F.sha2(F.encode("payload", "utf-8"), 256).desc()
    )
    corrected = (
        visit_lines(plan.where(happened("corrected")), params)
        .withColumn("rank", F.row_number().over(strongest_first))
        .where("rank = 1")
    )
    others = plan.where(~happened("corrected") & (F.col("verdict") == "kept"))
    return others.select(*columns).union(corrected.select(*columns))


def gold_of_visits(kept: DataFrame, params: Parameters) -> dict[str, Any]:
    """Return the expected results of the gold tables that are computed from visits."""
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
    """Return the sum over the rows of the first 32 bits of md5('a|b|…'); NULL counts as empty text."""
    text = F.concat_ws("|", *(F.coalesce(column, F.lit("")) for column in columns))
    return F.sum(F.conv(F.left(F.md5(text), F.lit(8)), 16, 10).cast("bigint"))


def gold_of_users(users: DataFrame, params: Parameters) -> dict[str, Any]:
    """Return the users at the end of each day: their number, numbers by plan, and hash of id, login, email and plan."""
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
    """Return the number of devices after the last increment, and their hash of type, version and full name."""
    latest = F.max_by(F.struct("type", "version", "full_name", "is_deleted"), "day").alias("latest")
    hashed = row_hash(F.col("type"), F.col("version"), F.col("full_name"))
    devices = changes.groupBy("device").agg(latest).select("latest.*").where("not is_deleted")
    row = devices.agg(F.count("*").alias("devices"), F.coalesce(hashed, F.lit(0)).alias("hash")).collect()[0]
    return {"devices": row["devices"], "hash": row["hash"]}


def reference_counts(lines: DataFrame, folders: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of lines of a feed of users or devices, by folder and by imperfection."""
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
    """Return the numbers of user changes by operation, and the number of soft deletes among the updates."""
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
