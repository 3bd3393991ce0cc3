"""Runs the Transactional Writer's job with a function `fails_once(text)`, whose first call on this machine raises.

    python -m tests.patterns.idempotency.flaky_writer MARKER JOB_ARGUMENTS…

MARKER is the file that remembers the call. The test kills the process.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from python_jobs.idempotency import transactional_writer as job
from python_jobs.shared.spark.job import run_job

marker = Path(sys.argv[1])


def fails_once(text: str) -> str:
    """Return `text`, but not the first time."""
    if not marker.exists():
        marker.touch()
        raise RuntimeError("this task is lost")
    return text


def run(spark: SparkSession, parameters: job.Parameters) -> Mapping[str, Any]:
    """Run the job with the function."""
    spark.udf.register("fails_once", fails_once)
    return job.run(spark, parameters)


if __name__ == "__main__":
    run_job(job.Parameters, run, sys.argv[2:])
