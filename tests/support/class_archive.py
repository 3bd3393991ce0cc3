"""An archive of the classes that Spark and Delta load: with it a JVM of the tests starts in two thirds of the time.

The archive uses the JVM's class data sharing; ``python -m tests.support.class_archive`` creates it once for each
environment. The JVM uses no archive while a folder with files, such as Spark's configuration folder, is on its class
path. So the processes that use the archive get an empty configuration folder, and their settings as a properties file.
If the archive is missing, or is of another JVM, everything works without it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

import pyspark
from filelock import FileLock

JARS = Path(pyspark.__file__).parent / "jars"
FOLDER = Path(sys.prefix) / "spark-classes"
NO_CONFIGURATION = FOLDER / "no-configuration"

# The program that loads the classes: like the tests, it writes, reads and merges Delta tables in batches and streams.
TRAINING = """
import sys
from pathlib import Path
from tests.support.session import start_session

root, archive = Path(sys.argv[1]), sys.argv[2]
spark = start_session(root, archived_at_exit=archive)
table = f"delta.`{root}/table`"
spark.sql(f"create table {table} (id bigint, day string) using delta partitioned by (day)")
spark.sql(f"insert into {table} select id, string(id % 2) from range(4)")
spark.sql(f"merge into {table} t using (select 3L as id) s on t.id = s.id when matched then delete")
spark.sql(f"optimize {table}")
stream = spark.readStream.format("delta").option("ignoreChanges", "true").load(f"{root}/table")
unique = stream.selectExpr("timestamp_seconds(id) as at").withWatermark("at", "1 day").dropDuplicates(["at"])
unique.writeStream.option("checkpointLocation", f"{root}/checkpoint").trigger(availableNow=True).foreachBatch(
    lambda rows, _: rows.write.format("delta").mode("append").save(f"{root}/copy")
).start().awaitTermination()
spark.sql(f"describe history {table}").collect()
java = spark.sparkContext._gateway.proc
spark.stop()
java.stdin.close()
java.wait()
"""


def archive_file() -> Path:
    """Return the path of the archive for these jars, which may not exist."""
    jars = "\n".join(sorted(jar.name for jar in JARS.glob("*.jar")))
    return FOLDER / f"{hashlib.sha256(jars.encode()).hexdigest()[:16]}.jsa"


def make_archive() -> None:
    """Create the archive if it doesn't exist, or wait for another process that creates it."""
    archive = archive_file()
    FOLDER.mkdir(exist_ok=True)
    with FileLock(f"{archive}.lock"):
        if not archive.exists():
            with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
                new = Path(folder) / archive.name
                subprocess.run([sys.executable, "-c", TRAINING, folder, str(new)], check=True)
                new.replace(archive)


def archive_options(archived_at_exit: str | None = None) -> str:
    """Return Java's options for using the archive, or for creating it at the end of the process."""
    # Java would report an unused archive on standard output, which is a job's report.
    quiet = "-Xlog:cds=off -Xlog:cds+dynamic=off"
    if archived_at_exit is not None:
        return f" -XX:ArchiveClassesAtExit={archived_at_exit} {quiet}"
    return f" -XX:SharedArchiveFile={archive_file()} {quiet}" if archive_file().exists() else ""


if __name__ == "__main__":
    make_archive()
