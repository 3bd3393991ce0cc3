"""The case study's input: landing files of a blogging platform, with the expected results.

Problem
    A test of a pipeline needs input with known faults and known results, at any size and reproducible.
Guarantee
    The files (names and bytes) and ``truth.json`` depend on the parameters only: each value is a hash of the
    seed, a salt and its row's number, and one task sorts and writes each file. Cores, partitions and shuffle
    settings have no influence. ``truth.json`` is written last: without it a folder is incomplete.
    The truth is aggregated from the plan of each line, before the line becomes JSON.
Cost
    Linear in the number of visits: one shuffle to write them, and a smaller one for the truth's distinct counts.
Layout (``--output`` is the landing folder)
    ``visits/date=D/hour=H``, ``user_changes/date=D/hour=H``, ``users/date=D``, ``devices/date=D``,
    ``devices_list/date=D``, ``truth.json``.
Submit
    ``spark-submit case_study/datasets/blog_platform.py --output landing --visits 200000 --days 3``
Source
    The blogging platform is the case study of B. Konieczny, "Data Engineering Design Patterns", chapter 1.
    Fields and faults are those of its public data generator; none of its code is used.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from case_study.datasets.devices import device_changes, device_lines, device_list_lines, devices_by_day
from case_study.datasets.landing import LandingFolder, tasks_for
from case_study.datasets.parameters import Parameters
from case_study.datasets.truth import (
    change_counts,
    gold_of_devices,
    gold_of_users,
    gold_of_visits,
    kept_visits,
    reference_counts,
    visit_counts,
)
from case_study.datasets.users import user_change_lines, user_changes, user_lines, users_by_day
from case_study.datasets.visits import visit_line_plan, visit_lines
from python_jobs.shared.spark.job import run_job

FEEDS = ("visits", "user_changes", "users", "devices", "devices_list")
TRUTH_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """Plan of all feeds: rows with their meaning, from which the truth is computed, and lines with a payload."""

    visits: DataFrame
    changes: DataFrame
    users: DataFrame
    devices: DataFrame
    lines: dict[str, DataFrame]


def plan_of(spark: SparkSession, params: Parameters) -> Plan:
    """Return the plan of the feeds; Spark computes nothing yet."""
    visits, devices = visit_line_plan(spark, params), device_changes(spark, params)
    changes = user_changes(spark, params)
    users = users_by_day(changes, params)
    lines = {
        "visits": visit_lines(visits, params),
        "user_changes": user_change_lines(changes, params),
        "users": user_lines(users, params),
        "devices": device_lines(devices, params),
        "devices_list": device_list_lines(devices_by_day(devices, params)),
    }
    return Plan(visits, changes, users, devices, lines)


def write_feeds(plan: Plan, params: Parameters, landing: LandingFolder) -> dict[str, int]:
    """Write the feeds; return the number of files of each feed."""
    hours, days, users = params.hour_folders, params.day_folders, params.user_count
    how = {
        "visits": (tasks_for(params.visits), hours, ("at_ms", "event", "copy")),
        "user_changes": (tasks_for(2 * users), hours, ("shuffled", "user", "step", "line")),
        "users": (tasks_for(users * params.days), days, ("user", "line")),
        "devices": (1, days, ("device", "line")),
        "devices_list": (1, days, ("device",)),
    }
    return {feed: landing.write_feed(feed, lines, *how[feed]) for feed, lines in plan.lines.items()}


def truth_of(plan: Plan, params: Parameters) -> dict[str, Any]:
    """Return the exact counts of the imperfections and the expected results of the gold tables."""
    users = gold_of_users(plan.users, params)
    given = dataclasses.asdict(params)
    return {
        "format_version": TRUTH_FORMAT_VERSION,
        "parameters": {name: given[name] for name in given if name not in ("output", "overwrite")},
        "feeds": {
            "visits": visit_counts(plan.visits, params),
            "user_changes": reference_counts(plan.lines["user_changes"], params.hour_folders)
            | change_counts(plan.changes),
            "users": reference_counts(plan.lines["users"], params.day_folders),
            "devices": reference_counts(plan.lines["devices"], params.day_folders),
            "devices_list": reference_counts(plan.lines["devices_list"], params.day_folders),
        },
        "gold": gold_of_visits(kept_visits(plan.visits, params), params)
        | {
            "users_by_day": users,
            "current_users": users[params.day_name(params.days - 1)],
            "current_devices": gold_of_devices(plan.devices),
        },
    }


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Write the feeds, then truth.json; return the report."""
    landing = LandingFolder(spark, params.output)
    landing.prepare(FEEDS, params.overwrite)
    plan = plan_of(spark, params)
    files = write_feeds(plan, params, landing)
    truth = truth_of(plan, params)
    landing.finish(truth)
    visits = truth["feeds"]["visits"]
    return {
        "output": params.output,
        "files": files,
        "lines": {feed: counts["lines"] for feed, counts in truth["feeds"].items()},
        "imperfections": visits["imperfections"],
        "precedence": visits["precedence"],
    }


if __name__ == "__main__":
    run_job(Parameters, run)
