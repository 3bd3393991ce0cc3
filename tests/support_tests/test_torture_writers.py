"""The list of writers that `make torture` kills names each program and materialization that writes."""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_second_run import MODELS, PROGRAMS
from tests.torture import dbt_writers
from tests.torture.writers import WRITERS

# What writes and isn't killed, with the reason.
NOT_TORTURED = {
    "case_study/datasets/blog_platform.py": "makes input, no table",
    "case_study/datasets/topic_hours.py": "one append of the case study's; its next run takes what is newer",
    "python_jobs/data_value/bin_pack_orderer.py": "delivers at least once; its own test ends it behind a bin",
    "python_jobs/data_value/fifo_orderer_kafka.py": "delivers at least once; its own test kills it behind the delivery",
    "python_jobs/data_value/bucketed_table.py": "each run writes a table of its own, in a metastore of its process",
    "python_jobs/data_value/local_aggregator.py": "reads a topic; its own test ends it between write and commit",
    "python_jobs/data_value/local_aggregator_kafka.py": "its replication is killed as the Passthrough Replicator's",
    "python_jobs/data_value/metadata_decorator.py": "delivers at least once; its own test ends it behind the delivery",
    "python_jobs/data_value/metadata_decorator_s3.py": "sets tags and changes no data",
    "python_jobs/error_management/pipeline_circuit_breaker.py": "the state of a circuit, no data",
    "python_jobs/ingestion/external_trigger_http.py": "the state of runs, no data",
    "python_jobs/streaming/api_gateway_http.py": "takes requests; its own test kills it, its benchmark its broker",
    "python_jobs/streaming/api_gateway_replay.py": "delivers at least once; its own test stops it behind the delivery",
    "python_jobs/streaming/streaming_reprocessor.py": "files of a checkpoint; its own tests end it between two files",
}
PLACES = {"": "", "batch": "", "PostgreSQL": "_postgres", "S3": "_s3", "Kafka": ""}


def test_every_program_and_materialization_that_writes_is_tortured() -> None:
    """Of a writer ``proxy (S3)`` the program is ``proxy_s3.py``; ``(batch)`` is a program's other way to run."""
    tortured = set()
    for writer in WRITERS:
        name, _, place = writer.rstrip(")").partition(" (")
        tortured.add(f"{name}{PLACES[place]}")
    assert {Path(program).stem for program in PROGRAMS.keys() - NOT_TORTURED} == {
        name for name in tortured if not name.startswith("dbt ")
    }
    assert NOT_TORTURED.keys() <= PROGRAMS.keys()
    built = {re.findall(r"materialized='(\w+)'", model)[0] for model in dbt_writers.MODELS.values()}
    assert built | {"snapshot"} == MODELS.keys() - {"view"}
