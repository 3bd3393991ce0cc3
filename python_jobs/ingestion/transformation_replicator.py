"""Transformation Replicator: replicate real data into another environment, without what must not leave its own.

Problem: a new version of a job must be tested on real data, whose quality issues no generator has, and real data
holds personal data. ``drop('ip')`` is no protection: it ignores names that don't exist, so that a typo or a renamed
column leaks, and a column that is new tomorrow leaves by itself.

Guarantee: only what the contract (:mod:`python_jobs.ingestion.data_contract`) lists leaves, nested fields one by
one. A column that the contract names and the source lacks is an error; one that the source has and the contract
doesn't list stops the run or is withheld (``--on_unknown drop``) and reported. Bad rows survive: NULLs, duplicates
and odd formats are what the replica is for. Names reported of JSON lines are those that look like names.

Forms of the source, and of the target: a Delta table; JSON lines, where numbers and the order of names stay as they are
written; CSV with a header, one record a line, where every value is a text. A line that can't be read can't be searched
either: it stops the run or is left out and counted (``--on_malformed drop``). A CSV line with a quote that isn't closed
always stops the run: the lines behind it may be a part of a withheld value.

The target is replaced in one step, so that a rerun and a killed run leave a whole replica, and files left behind
there hold nothing but what may leave: the contract is applied while the source is read. Spark's own scratch files
hold statistics of the source's log; with ``spark.io.encryption.enabled`` nobody reads them after a kill. A Delta
target keeps no column statistics (its log would hold values). Once something is withheld, or leaves in another
form, that older versions of the target hold, the target is vacuumed at once: nobody reads old versions, one run at a
time.

Keys of keyed hashes (HMAC-SHA-256) are named by their environment variable, which must be set where tasks run;
plans and logs hold only the name. Equal values get equal hashes in every table and run.

Cost: one pass over the source, of the listed columns; two over text, the first to look for what isn't listed.
About 5 seconds and a core per million keyed hashes.

    spark-submit --conf spark.io.encryption.enabled=true python_jobs/ingestion/transformation_replicator.py \\
        --source lakehouse/silver/silver_users --target /staging/users --contract users.yml

Source: Data Engineering Design Patterns, chapter 2, Transformation Replicator.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from python_jobs.ingestion.data_contract import (
    Contract,
    filter_line,
    load_contract,
    select_list,
    unknown_columns,
)
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.core.paths import absolute, is_path
from python_jobs.shared.delta.commits import commit_note, find_commit, latest_version, noted, numeric_metrics
from python_jobs.shared.delta.tables import (
    create_if_absent,
    delta_table,
    read_table,
    table_exists,
    table_location,
)
from python_jobs.shared.files.csv_records import (
    FIELDS,
    LINE,
    csv_delimiter,
    csv_header,
    csv_lines,
    csv_value,
    is_csv_record,
)
from python_jobs.shared.files.file_sets import SourceFile, is_blank, list_files, read_lines
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.shared.spark.job import run_job, unreadable_files_refused
from python_jobs.shared.spark.session import settings
from python_jobs.shared.spark.sql_text import named_columns, properties_list, table_name

_NO_STATISTICS = ("delta.dataSkippingNumIndexedCols", "0")
_PURGED = "lakehouse_patterns.purged_through"
# Spark's readers leave out names with '_' and '.'.
_OF_A_REPLICA = ("part-", "_", ".")
_NOTHING_LEFT = "nothing was replicated"
_CSV = {"header": "true", "escape": '"'} | {
    f"ignore{place}WhiteSpace": "false" for place in ("Leading", "Trailing")
}


@dataclass(frozen=True)
class Parameters:
    """Replicate a dataset, of which only what a contract lists leaves."""

    source: str
    """Delta table by path or catalog name; for json and csv a folder or file."""
    target: str
    """Delta table made by this job, or a folder; it is replaced."""
    contract: str
    """YAML file with the columns that may leave."""
    format: Literal["delta", "json", "csv"] = "delta"
    """Kind of the source and of the target."""
    on_unknown: Literal["fail", "drop"] = "fail"
    """What to do about columns and fields that the contract doesn't list: stop, or withhold and report them."""
    on_malformed: Literal["fail", "drop"] = "fail"
    """What to do about lines of json and csv that can't be read: stop, or leave them out and count them."""
    allow_empty: bool = False
    """Whether json or csv files without a record replace the replica by an empty one; by default they are refused."""
    row_function: str | None = None
    """module:function called with each row of what may leave; returns the row to write (delta and csv)."""
    separator: str = ","
    """Of csv."""

    def __post_init__(self) -> None:
        source, target = (absolute(path).rstrip("/") + "/" for path in (self.source, self.target))
        if is_path(self.target) and (source.startswith(target) or target.startswith(source)):
            raise WrongUse(f"source {self.source} and target {self.target} must not lie in one another")
        if self.format != "delta" and not is_path(self.target):
            raise WrongUse(f"the target of {self.format} is a folder, got {self.target}")
        if self.row_function is not None and self.format == "json":
            raise WrongUse("row_function needs rows: format delta or csv")
        if self.row_function is not None and not re.fullmatch(r"[\w.]+:\w+", self.row_function):
            raise WrongUse(f"row_function must be module:function, got '{self.row_function}'")


# --- from DataFrames to DataFrames ------------------------------------------------------------------------


def permitted(rows: DataFrame, contract: Contract, on_unknown: str = "fail") -> tuple[DataFrame, list[str]]:
    """Return the rows with only what the contract lets leave, and the columns that it doesn't list.

    Raises:
        DataRefused: there are such columns and ``on_unknown`` is ``fail``, or the contract doesn't fit.
    """
    unknown = unknown_columns(contract, rows.schema)
    _refuse_unknown(contract, unknown, on_unknown)
    return rows.selectExpr(*select_list(contract)), unknown


def mapped(rows: DataFrame, function: Callable[[Row], Any], name: str) -> DataFrame:
    """Return the rows that ``function`` makes of each row; they have the columns they had.

    The function sees what may leave, and returns a row, a tuple or a mapping. Its errors are named by their
    class alone: their text may repeat a value.
    """

    def guarded(row: Row) -> Any:
        try:
            result = function(row)
        except Exception as error:
            raise RuntimeError(f"row function {name} failed with {type(error).__name__}") from None
        if result is None:
            raise RuntimeError(f"row function {name} failed with no row returned")
        return dict(result) if isinstance(result, Mapping) else tuple(result)

    row = F.struct(*named_columns(rows.columns))
    return rows.select(F.udf(guarded, rows.schema)(row).alias("row")).select("row.*")


def filtered_lines(lines: DataFrame, contract: Contract) -> DataFrame:
    """Return ``line`` (NULL if unreadable) and ``unknown`` (paths) for each JSON line of column ``value``."""

    def filtered(line: str | None) -> tuple[str | None, list[str]]:
        if line is None:
            return None, []
        kept, unknown = filter_line(contract, line)
        return kept, [
            path if re.fullmatch(r"[A-Za-z_][\w.-]{0,99}", path) else "(no name)" for path in unknown
        ]

    return lines.select(
        F.udf(filtered, "line string, unknown array<string>")("value").alias("filtered")
    ).select("filtered.*")


def _refuse_unknown(contract: Contract, unknown: list[str], on_unknown: str) -> None:
    if unknown and on_unknown == "fail":
        raise DataRefused(
            f"the contract of {contract.dataset} doesn't list {', '.join(unknown)}: list what may leave, tag what "
            "may not, or withhold it with on_unknown drop"
        )


def _refuse_malformed(lines: int, parameters: Parameters) -> None:
    if lines and parameters.on_malformed == "fail":
        raise DataRefused(
            f"{lines} lines of {parameters.source} can't be read, so nobody can tell what is in them: leave them "
            "out with on_malformed drop"
        )


# --- the run ----------------------------------------------------------------------------------------------


def run(spark: SparkSession, parameters: Parameters) -> dict[str, Any]:
    """Replicate once."""
    contract = load_contract(parameters.contract)
    with _one_sentence():
        replicate = {"delta": _replicate_table, "json": _replicate_json, "csv": _replicate_csv}
        report = replicate[parameters.format](spark, parameters, contract)
    return {
        "source": parameters.source,
        "target": parameters.target,
        "columns": contract.treatments(),
        "withheld": contract.withheld(),
        **report,
    }


def _replicate_table(spark: SparkSession, parameters: Parameters, contract: Contract) -> dict[str, Any]:
    rows, unknown = permitted(read_table(spark, parameters.source), contract, parameters.on_unknown)
    rows = _with_row_function(rows, parameters)
    target, treatments = parameters.target, contract.treatments()
    if parameters.row_function is not None:
        treatments |= {"(row function)": parameters.row_function}
    if table_exists(spark, target):
        properties = delta_table(spark, target).detail().collect()[0]["properties"]
        if properties.get(_NO_STATISTICS[0]) != _NO_STATISTICS[1]:
            raise WrongUse(
                f"target {target} exists and isn't a replica: its log may hold values as statistics "
                f"({_NO_STATISTICS[0]} is not {_NO_STATISTICS[1]})"
            )
    elif not is_path(target):
        create_if_absent(spark, target, rows.schema, properties=dict([_NO_STATISTICS]))
    path = absolute(target) if is_path(target) else table_location(spark, target)
    writer = rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
    with noted(spark, target, {"replicated": treatments}) as replica:
        writer.option(*_NO_STATISTICS).save(path)
    commit = find_commit(spark, target, replica)
    written = {} if commit is None else numeric_metrics(commit)
    return {
        "rows_written": written.get("numOutputRows", 0),
        "unknown_withheld": unknown,
        "table_version": latest_version(spark, target) if commit is None else commit["version"],
        "purged": _purge(spark, target, path, treatments),
    }


def _purge(spark: SparkSession, target: str, path: str, treatments: Mapping[str, str]) -> bool:
    """Remove the files of older versions if they hold columns or values that may no longer leave.

    The purge is recorded after the vacuum: if a run is killed in between, the next run repeats it.
    """
    table = delta_table(spark, target)
    purged = int(table.detail().collect()[0]["properties"].get(_PURGED, -1))
    history = table.history().select("version", "userMetadata").collect()
    newest = max(row.version for row in history)
    stale = min(row.version for row in history) > purged + 1  # older versions have left the log
    for row in history:
        before = commit_note(row.userMetadata).get("replicated", {})
        stale |= row.version > purged and bool(before.items() - treatments.items())
    if not stale:
        return False
    with settings(spark, {"spark.databricks.delta.retentionDurationCheck.enabled": "false"}):
        table.vacuum(0)
    spark.sql(f"alter table {table_name(path)} set tblproperties {properties_list({_PURGED: str(newest)})}")
    return True


def _replicate_json(spark: SparkSession, parameters: Parameters, contract: Contract) -> dict[str, Any]:
    lines = read_lines(spark, _files(spark, parameters))
    lines = lines.select(F.when(F.is_valid_utf8("value"), F.col("value")).alias("value"))
    filtered = filtered_lines(lines, contract)
    with unreadable_files_refused(_NOTHING_LEFT):
        found = filtered.agg(
            F.count_if(~is_blank(F.col("line"))).alias("records"),
            F.count(F.when(F.col("line").isNull(), 1)).alias("malformed"),
            F.array_sort(F.array_distinct(F.flatten(F.collect_set("unknown")))).alias("unknown"),
        ).collect()[0]
    unknown = list(found.unknown or [])
    _refuse_unknown(contract, unknown, parameters.on_unknown)
    _refuse_malformed(found.malformed, parameters)
    _require_records(found.records, parameters)
    kept = filtered.where("line is not null").select("line")
    _replace_folder(spark, parameters.target, lambda path: kept.write.option("lineSep", "\n").text(path))
    return {"unknown_withheld": unknown, "malformed_left_out": found.malformed}


def _replicate_csv(spark: SparkSession, parameters: Parameters, contract: Contract) -> dict[str, Any]:
    files, separator = _files(spark, parameters), csv_delimiter(parameters.separator)
    header = csv_header(spark, files, separator)
    if header is None:
        raise NotReady(f"the files of {parameters.source} hold no header")
    given = {name.casefold() for name in header.names}
    absent = [child.name for name, child in contract.root.children.items() if name not in given]
    if absent:
        raise DataRefused(
            f"the contract names {', '.join(absent)}, which the header of {header.file.path} lacks; the header isn't "
            "repeated here, because it may be a line of data"
        )
    names = [name or f"_c{place}" for place, name in enumerate(header.names)]
    lines = csv_lines(spark, files, header, separator)
    is_record = is_csv_record(F.col(LINE), separator)
    # A separator too many moves the values behind it: one of a withheld column could leave under another name.
    is_good = is_record & F.is_valid_utf8(LINE) & (F.size(FIELDS) == len(names))
    counts = [
        F.count_if(is_good).alias("records"),
        F.count_if(~is_good).alias("malformed"),
        F.count_if(~is_record).alias("open"),
    ]
    with unreadable_files_refused(_NOTHING_LEFT):
        found = lines.agg(*counts).collect()[0]
    if found.open:
        raise DataRefused(
            f"{found.open} lines of {parameters.source} have a quote that isn't closed on its line or isn't around a "
            "whole value, so nobody can tell which lines behind it are records, and on_malformed drop leaves none of "
            "them out: write each record on one line, and double quotes within quotes"
        )
    _refuse_malformed(found.malformed, parameters)
    values = [csv_value(F.col(FIELDS), place).alias(name) for place, name in enumerate(names)]
    kept, unknown = permitted(lines.where(is_good).select(*values), contract, parameters.on_unknown)
    _require_records(found.records, parameters)
    kept = _with_row_function(kept, parameters)
    if len(kept.columns) == 1:
        kept = kept.fillna("")  # a line without a sign would be no record
    _replace_folder(spark, parameters.target, kept.write.options(**_CSV, sep=separator).csv)
    return {"unknown_withheld": unknown, "malformed_left_out": found.malformed}


def _require_records(records: int, parameters: Parameters) -> None:
    if not records and not parameters.allow_empty:
        raise DataRefused(
            f"the files of {parameters.source} hold no record that could be replicated; {_NOTHING_LEFT}: pass "
            "--allow_empty true if the replica is to be empty"
        )


def _files(spark: SparkSession, parameters: Parameters) -> list[SourceFile]:
    files = list_files(HadoopFolder(spark, parameters.source))
    if not files:
        raise NotReady(f"there is no file at {parameters.source}")
    return files


def _with_row_function(rows: DataFrame, parameters: Parameters) -> DataFrame:
    if parameters.row_function is None:
        return rows
    module, name = parameters.row_function.split(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise WrongUse(f"there is no function {parameters.row_function}") from None
    return mapped(rows, function, parameters.row_function)


def _replace_folder(spark: SparkSession, target: str, write: Callable[[str], None]) -> None:
    """Write a staging folder and rename it to the target; a reader finds the old folder, none, or the new one."""
    folder = HadoopFolder(spark, target)
    if folder.exists("_delta_log"):
        raise WrongUse(f"target {target} is a Delta table, not a folder of files")
    others = [name for name in folder.names() if not name.startswith(_OF_A_REPLICA)]
    if others:
        raise WrongUse(
            f"target {target} has {others[0]}, which is no file of a replica and would be deleted: name another folder"
        )
    staging = HadoopFolder(spark, f"{folder.root.getParent()}/.{folder.root.getName()}.replica")
    staging.delete()
    write(str(staging.root))
    folder.delete()
    if not folder.file_system.rename(staging.root, folder.root):
        raise JobFailed(f"{staging.root} could not be renamed to {target}")


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Raise an error that the user can repair as one sentence; any other error keeps its trace."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as failure:
        known = re.search(
            r"the environment variable \w+, which holds the key of a keyed_hash, is not set"
            r"|row function [\w.:]+ failed with [\w ]+",
            str(failure),
        )
        if known is None:
            raise
        raise JobFailed(f"{known[0].strip()}; nothing was written") from None


if __name__ == "__main__":
    run_job(Parameters, run)
