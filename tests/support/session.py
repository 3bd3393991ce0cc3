"""One Spark session per test process, with an in-memory catalog and its own lakehouse root."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tests.support.class_archive import NO_CONFIGURATION, archive_options
from tests.support.local_files import set_permissions_in_java

CONFIGURATION = "SPARK_CONF_DIR_OFF_THE_CLASS_PATH"
JAVA_OPTIONS = "spark.driver.extraJavaOptions"

# Settings in addition to conf/spark-defaults.conf: they make tiny data fast and keep two workers apart.
TEST_SETTINGS = {
    "spark.master": "local[1]",
    "spark.sql.shuffle.partitions": "1",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "1",
    "spark.driver.memory": "2g",
    # Delta keeps the last 10,000 tables with their cached snapshots and plans, 3 MB each: after 500 tables the heap is
    # full, and the JVM mostly collects garbage.
    "spark.databricks.delta.delta.log.cacheSize": "64",
    # An operator takes a page of memory at once, by default a sixteenth of all, which plans of many operators exceed.
    "spark.buffer.pageSize": "2m",
    "spark.memory.storageFraction": "0.1",
    # Hadoop starts processes for the files of the local file system; VFORK starts them without a helper process.
    JAVA_OPTIONS: "-Duser.timezone=UTC -XX:+UseSerialGC -Djdk.lang.Process.launchMechanism=VFORK",
    # Generating and compiling Java for each query pays off after thousands of rows: without it a statement on tiny data
    # takes half the time. The processes of the cluster test and of `make demo` run with it, as a user's do.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.databricks.delta.stalenessLimit": "0",
    "spark.sql.streaming.stateStore.maintenanceInterval": "10min",
    # Delta renames each file of a log, and Spark each file of a checkpoint, by Hadoop's FileContext, which starts eight
    # processes (`readlink`) for a local file and its checksum. These rename by Hadoop's FileSystem, which starts none:
    # a checkpoint's file takes 10 ms instead of 53. Delta's excludes other writers of this process only; processes that
    # tests start, and kill, keep the defaults.
    "spark.delta.logStore.file.impl": "io.delta.storage.LocalLogStore",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


SET_BY_THE_ENGINE = {
    "spark.app.name",
    "spark.databricks.delta.lastCommitVersionInSession",
    "spark.sql.parquet.fieldId.read.enabled",
    "spark.sql.parquet.fieldId.write.enabled",
}
"""Settings that Spark changes when a job asks for its session, and Delta when a session reads or writes a table."""

# The settings that a short-lived JVM of another process needs: it has its own memory and catalog.
SMALL_JVM = ("spark.master", "spark.sql.shuffle.partitions", "spark.databricks.delta.snapshotPartitions")
# A short-lived JVM spends most of its time compiling: the first compiler alone halves its CPU time. The tests' own JVM
# lives so long that the second compiler pays off after some minutes. With the first one alone the JVM reserves 48 MB
# for compiled code, which a whole `dbt build` fills.
FIRST_COMPILER = " -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=128m"
# Even so it takes 28 % of the CPU time of a process that runs for four minutes. With four times its thresholds it takes
# 20 %, and the process a tenth less; without it the Java code takes a third longer already then. The first compiler's
# code has filled the 120 MB that the JVM reserves for it after 25 minutes, and it would discard and compile it again.
SECOND_COMPILER_LATER = (
    " -XX:ReservedCodeCacheSize=512m"
    " -XX:Tier4InvocationThreshold=20000 -XX:Tier4MinInvocationThreshold=2400 -XX:Tier4CompileThreshold=60000"
    " -XX:Tier4BackEdgeThreshold=160000"
)


def small_configuration(folder: Path) -> Path:
    """Write the project's Spark configuration, with the settings for tiny data, for separate processes."""
    shutil.copytree(_configuration(), folder)
    settings = {name: TEST_SETTINGS[name] for name in SMALL_JVM} | {
        JAVA_OPTIONS: _java_options(folder) + FIRST_COMPILER
    }
    settings["spark.executor.extraJavaOptions"] = settings[JAVA_OPTIONS]
    with (folder / "spark-defaults.conf").open("a", encoding="utf-8") as defaults:
        defaults.writelines(f"{name} {value}\n" for name, value in settings.items())
    return folder


def start_session(
    root: Path, settings: Mapping[str, str] | None = None, archived_at_exit: str | None = None
) -> SparkSession:
    """Start the process's session with its warehouse under ``root``; ``settings`` override those of tests.

    ``archived_at_exit`` is the path to which its classes are archived at its end (see :mod:`.class_archive`).
    """
    builder = SparkSession.builder.appName("tests")
    for name, value in {**TEST_SETTINGS, **(settings or {})}.items():
        builder = builder.config(name, value)
    options = _java_options(_configuration(), archived_at_exit) + SECOND_COMPILER_LATER
    builder = builder.config(JAVA_OPTIONS, options)
    builder = builder.config("spark.sql.warehouse.dir", f"file:{root}/warehouse")
    with environment(**process_environment()):
        spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    set_permissions_in_java(spark)
    return spark


def process_environment(*options: str) -> dict[str, str]:
    """Return an environment in which Python starts Spark with its configuration and the archive of classes.

    The configuration's folder then isn't on Java's class path (see :mod:`.class_archive`); ``options`` are further
    options of spark-submit.
    """
    NO_CONFIGURATION.mkdir(parents=True, exist_ok=True)
    folder = _configuration()
    properties = ["--properties-file", str(folder / "spark-defaults.conf")]
    return {
        CONFIGURATION: str(folder),
        "SPARK_CONF_DIR": str(NO_CONFIGURATION),
        "PYSPARK_SUBMIT_ARGS": shlex.join([*properties, *options, "pyspark-shell"]),
    }


def _configuration() -> Path:
    """Return the folder of Spark's configuration, also in a process with that environment."""
    return Path(os.environ.get(CONFIGURATION) or os.environ["SPARK_CONF_DIR"])


def _java_options(configuration: Path, archived_at_exit: str | None = None) -> str:
    log = f" -Dlog4j2.configurationFile=file:{configuration / 'log4j2.properties'}"
    return TEST_SETTINGS[JAVA_OPTIONS] + log + archive_options(archived_at_exit)


@contextlib.contextmanager
def settings_kept(spark: SparkSession) -> Iterator[None]:
    """Restore every session setting afterwards: dbt-spark flips ANSI and the overwrite mode and leaves them."""
    before = settings_of(spark)
    try:
        yield
    finally:
        restore_settings(spark, before)


def settings_of(spark: SparkSession) -> Any:
    """Return a copy of the session's settings as Java's map: to fetch them all takes a twelfth of a second."""
    jvm: Any = spark._jvm
    return jvm.java.util.HashMap(spark._jsparkSession.sessionState().conf().settings())


def restore_settings(spark: SparkSession, before: Any) -> set[str]:
    """Restore the settings that have changed since ``before``, and return their names."""
    jvm: Any = spark._jvm
    now, entries = settings_of(spark), jvm.java.util.HashSet
    left, lost = entries(now.entrySet()), entries(before.entrySet())
    left.removeAll(before.entrySet())
    lost.removeAll(now.entrySet())
    # The end of a Java iterator is an exception, which PySpark takes 60 ms to translate; an array has a length.
    for entry in left.toArray():
        spark.conf.unset(entry.getKey())
    for entry in lost.toArray():
        spark.conf.set(entry.getKey(), entry.getValue())
    return {entry.getKey() for changed in (left, lost) for entry in changed.toArray()}


@contextlib.contextmanager
def setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Set one session setting for the block."""
    with settings_kept(spark):
        spark.conf.set(name, value)
        yield


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables for the block, and restore the whole environment after it."""
    before = dict(os.environ)
    os.environ |= variables
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
