"""NaN and infinity pass no bound: in Python, in the arguments of macros, and in SQL."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from dbt_common.exceptions import DbtRuntimeError
from pyspark.sql import SparkSession

from case_study.datasets.parameters import Parameters as DatasetParameters
from python_jobs.error_management import dead_letter_queue, filter_interceptor
from python_jobs.error_management.circuit_breaker import BreakerPolicy
from python_jobs.error_management.kafka_consumer import Subscription
from python_jobs.idempotency import backfill, proxy_postgres
from python_jobs.ingestion import compactor, full_loader, full_loader_postgres
from python_jobs.ingestion.external_trigger_http import Workload
from python_jobs.ingestion.readiness_marker_sensor import Condition, WrongCondition, wait
from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.retry import RetryPolicy
from tests.support.render import MacroRenderer

NO_NUMBERS = [math.nan, math.inf, -math.inf]
TABLES = {"source": "s", "target": "t"}
FULL_LOAD = {**TABLES, "version": "2024-01-01", "schema": "a int"}
FULL_LOAD_POSTGRES = {**TABLES, "version": "2024-01-01", "columns": "a int"}
BACKFILL = {
    **TABLES,
    "job_id": "j",
    "pipeline_version": "v",
    "ledger": "l",
    "query": "select * from {source}",
    "from_": "2024-03-01",
    "to": "2024-03-01",
}


# Each parameter of a job that is a float and judges something, with the job's other parameters.
BOUNDS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (BreakerPolicy, {}, "failure_rate"),
    (BreakerPolicy, {}, "window_seconds"),
    (BreakerPolicy, {}, "open_seconds"),
    (RetryPolicy, {}, "base_seconds"),
    (Subscription, {"bootstrap_servers": "b", "topic": "t", "group": "g"}, "commit_seconds"),
    (Workload, {"name": "w", "command": ["true"]}, "retry_seconds"),
    (Workload, {"name": "w", "command": ["true"]}, "timeout_seconds"),
    (compactor.Parameters, {"table": "t"}, "min_small_ratio"),
    (compactor.Parameters, {"table": "t"}, "small_file_mb"),
    (compactor.Parameters, {"table": "t"}, "target_file_mb"),
    (compactor.Parameters, {"table": "t", "format": "json"}, "retention_hours"),
    (dead_letter_queue.Parameters, {"dead_letter": "d"}, "max_age_hours"),
    (filter_interceptor.Parameters, {**TABLES, "statistics": "x", "conditions": "c"}, "max_rise"),
    (DatasetParameters, {"output": "o"}, "late_share"),
    (backfill.Parameters, BACKFILL, "tolerance"),
    (backfill.Parameters, BACKFILL, "min_source_share"),
    (full_loader.Parameters, FULL_LOAD, "max_shrink_percent"),
    (full_loader_postgres.Parameters, FULL_LOAD_POSTGRES, "max_shrink_percent"),
    (full_loader_postgres.Parameters, FULL_LOAD_POSTGRES, "lock_seconds"),
    (proxy_postgres.Parameters, {"target": "t", "step": "expose"}, "lock_seconds"),
]


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize(("build", "others", "name"), BOUNDS)
def test_a_bound_that_is_no_number_is_refused(
    build: Callable[..., Any], others: dict[str, Any], name: str, value: float
) -> None:
    build(**others)  # the other parameters are right
    with pytest.raises(WrongUse, match=name):
        build(**others, **{name: value})


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_a_wait_without_an_end_is_refused(value: float) -> None:
    for bounds in ({"timeout_seconds": value}, {"timeout_seconds": 1, "poll_seconds": value}):
        with pytest.raises(WrongCondition, match=r"timeout_seconds must be 0 or more .*, both finite, got"):
            wait(Condition(marker="m"), **bounds)


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize(
    ("macro", "arguments", "name"),
    [
        ("dead_letter_share_failures", {"flagged": "t", "max_share": 0.1, "min_records": 1}, "max_share"),
        ("dead_letter_share_failures", {"flagged": "t", "max_share": 0.1, "min_records": 1}, "min_records"),
        ("dead_letter_queue_failures", {"dead_letter": "t", "max_open": 1}, "max_age_hours"),
        ("rejected_share_rises", {"statistics": "t", "max_rise": 0.1, "baseline_runs": 1}, "max_rise"),
        ("rejected_share_rises", {"statistics": "t", "max_rise": 0.1, "baseline_runs": 1}, "baseline_runs"),
        ("recommended_watermark_delay", {"relation": "t", "event_time": "a", "arrived_at": "b"}, "factor"),
        (
            "recommended_watermark_delay",
            {"relation": "t", "event_time": "a", "arrived_at": "b"},
            "percentile",
        ),
        ("_full_loader_options", {"given": {}}, "max_shrink_percent"),
        ("_full_loader_options", {"given": {}}, "min_rows"),
        ("_full_loader_options", {"given": {}}, "keep_versions"),
        ("_compactor_require_options", {"name": "m", "options": {"mode": "daily"}}, "small_file_mb"),
        ("_compactor_require_options", {"name": "m", "options": {"mode": "daily"}}, "min_files"),
    ],
)
def test_a_macro_s_bound_that_is_no_number_is_refused(
    render: MacroRenderer, macro: str, arguments: dict[str, Any], name: str, value: float
) -> None:
    render(macro, **arguments)  # the other arguments are right
    options = [key for key, given in arguments.items() if isinstance(given, dict)]  # the bound is one of them
    wrong = {options[0]: arguments[options[0]] | {name: value}} if options else {name: value}
    with pytest.raises(DbtRuntimeError, match=name):
        render(macro, **arguments | wrong)


def test_sql_tells_numbers_from_what_is_none(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    is_finite, kept = (
        render(macro, expression="value") for macro in ("_is_finite_sql", "_finite_or_null_sql")
    )
    for type_, values, expected in [
        ("double", ["1.5", "NaN", "Infinity", "-Infinity", None], [(True, "1.5"), *[(False, None)] * 4]),
        ("float", ["NaN", "2"], [(False, None), (True, "2.0")]),
        ("bigint", ["-9223372036854775808"], [(True, "-9223372036854775808")]),
        ("decimal(38, 0)", ["9" * 38], [(True, "9" * 38)]),
        ("string", ["NaN", "7"], [(False, "NaN"), (True, "7")]),
    ]:
        rows = spark.createDataFrame([(value,) for value in values], "text string")
        typed = rows.selectExpr(f"cast(text as {type_}) as value")
        found = typed.selectExpr(is_finite, f"cast({kept} as string)").collect()
        assert [tuple(row) for row in found] == expected, type_
