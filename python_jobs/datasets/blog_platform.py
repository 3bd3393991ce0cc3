"""The case study's input: landing files of a blogging platform, with their right answers.

Problem
    A pipeline is proved only on input whose every fault and every result is known, at any size, and the same
    again tomorrow.
Guarantee
    The files (names and bytes) and ``truth.json`` depend on the parameters alone: each value is a hash of the
    seed, a salt and its row's number, and each file is written, sorted, by one task; cores, partitions and
    shuffle settings don't matter. ``truth.json`` comes last: a folder without it is a run that didn't end.
    The truth is aggregated from what was planned for each line, before the line is turned into JSON.
Cost
    Linear in the number of visits: a shuffle to write them, a smaller one for the truth's distinct counts.
Layout (``--output`` is the landing folder)
    ``visits/date=D/hour=H``, ``user_changes/date=D/hour=H``, ``users/date=D``, ``devices/date=D``,
    ``truth.json``.
Submit
    ``spark-submit python_jobs/datasets/blog_platform.py --output landing --visits 200000 --days 3``
Source
    The blogging platform is the case study of B. Konieczny, "Data Engineering Design Patterns", chapter 1;
    fields and faults are those of its public data generator, none of whose code is used.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pyspark.sql import SparkSession

from python_jobs.datasets.devices import device_changes, device_lines
from python_jobs.datasets.landing import LandingFolder, tasks_for
from python_jobs.datasets.parameters import Parameters
from python_jobs.datasets.truth import (
    change_counts,
    gold_of_devices,
    gold_of_users,
    gold_of_visits,
    kept_visits,
    reference_counts,
    visit_counts,
)
from python_jobs.datasets.users import user_change_lines, user_changes, user_lines, users_by_day
from python_jobs.datasets.visits import visit_line_plan, visit_lines
from python_jobs.job import run_job

FEEDS = ("visits", "user_changes", "users", "devices")
TRUTH_FORMAT_VERSION = 1


def write_feeds(spark: SparkSession, params: Parameters, landing: LandingFolder) -> dict[str, int]:
    """Write the four feeds; return the number of files of each."""
    hours, days, users = params.hour_folders, params.day_folders, params.user_count
    visits = visit_lines(visit_line_plan(spark, params), params)
    changes = user_change_lines(spark, params)
    extract = user_lines(spark, params)
    devices = device_lines(spark, params)
    return {
        "visits": landing.write_feed(
            "visits", visits, tasks_for(params.visits), hours, ("at_ms", "event", "copy")
        ),
        "user_changes": landing.write_feed(
            "user_changes", changes, tasks_for(2 * users), hours, ("shuffled", "user", "step", "line")
        ),
        "users": landing.write_feed("users", extract, tasks_for(users * params.days), days, ("user", "line")),
        "devices": landing.write_feed("devices", devices, 1, days, ("device", "line")),
    }


def truth_of(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Return the exact counts of the imperfections and the right answers of the gold tables."""
    plan = visit_line_plan(spark, params)
    users = gold_of_users(users_by_day(spark, params), params)
    given = dataclasses.asdict(params)
    return {
        "format_version": TRUTH_FORMAT_VERSION,
        "parameters": {name: given[name] for name in given if name not in ("output", "overwrite")},
        "feeds": {
            "visits": visit_counts(plan, params),
            "user_changes": reference_counts(user_change_lines(spark, params), params.hour_folders)
            | change_counts(user_changes(spark, params)),
            "users": reference_counts(user_lines(spark, params), params.day_folders),
            "devices": reference_counts(device_lines(spark, params), params.day_folders),
        },
        "gold": gold_of_visits(kept_visits(plan, params), params)
        | {
            "users_by_day": users,
            "current_users": users[params.day_name(params.days - 1)],
            "current_devices": gold_of_devices(device_changes(spark, params)),
        },
    }


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Write the four feeds, then truth.json; return what was written."""
    landing = LandingFolder(spark, params.output)
    landing.prepare(FEEDS, params.overwrite)
    files = write_feeds(spark, params, landing)
    truth = truth_of(spark, params)
    landing.finish(truth)
    visits = truth["feeds"]["visits"]
    return {
        "output": params.output,
        "files": files,
        "lines": {feed: truth["feeds"][feed]["lines"] for feed in FEEDS},
        "imperfections": visits["imperfections"],
        "precedence": visits["precedence"],
    }


if __name__ == "__main__":
    run_job(Parameters, run)
