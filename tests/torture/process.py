"""Runs one writer over a folder in a process of its own: what the torture kills.

python -m tests.torture.process WRITER FOLDER [MASTER]

What the writer says of a failure is its last line, with the exit code of :data:`REFUSED`; a fault keeps its trace.
"""

from __future__ import annotations

import sys
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from python_jobs.shared.core.failures import JobFailed
from python_jobs.shared.delta.commits import CONFLICTS
from python_jobs.shared.spark.job import known_failure
from tests.support.session import start_session
from tests.torture.writers import WRITERS

REFUSED = 65


def main(name: str, folder: Path, *master: str) -> None:
    """Do every day."""
    writer = WRITERS[name]
    settings = {"spark.master": master[0]} if master else {}
    spark = start_session(folder / "session", settings) if writer.needs_spark else None
    try:
        writer.run(spark, folder)
    except JobFailed as failure:
        _refuse(type(failure).__name__, failure)
    except CONFLICTS as failure:
        _refuse("Delta's conflict", failure)
    except (PySparkException, Py4JJavaError) as failure:
        if (known := known_failure(failure)) is None:
            raise
        _refuse(type(known).__name__, known)


def _refuse(kind: str, failure: object) -> None:
    print(f"{kind}: {str(failure).splitlines()[0]}")
    sys.exit(REFUSED)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
