"""Runs one model of a harness project in a process of its own, on a new metastore: what a kill test ends.

python -m tests.patterns.quality.run_dbt ROOT SCHEMA MODEL
"""

import sys
from pathlib import Path

from dbt.cli.main import dbtRunner

from tests.support.session import start_session

if __name__ == "__main__":
    root, schema, model = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    spark = start_session(root)
    spark.sql(f"create database {schema} location '{root}/database'")
    # What the project's adopting hook does for a user: the published table and the sources are known again.
    for location in [root / "lakehouse" / model, *(root / "database").iterdir()]:
        spark.sql(f"create table {schema}.{location.name} using delta location '{location}'")
    folders = ["--project-dir", str(root), "--profiles-dir", str(root)]
    outputs = ["--log-path", str(root / "logs"), "--target-path", str(root / "target_of_process")]
    sys.exit(not dbtRunner().invoke(["run", "--select", model, *folders, *outputs]).success)
