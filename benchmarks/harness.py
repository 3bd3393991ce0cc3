"""How a benchmark is measured here.

A benchmark is a module `benchmarks/<name>.py` with one function

    def comparisons(bench: Workbench) -> Iterator[Comparison]

and is run with `python -m benchmarks <name>`. A comparison holds variants that do the same work:

- every variant ends in a real sink (a Delta table, `write.format("noop")`), never in `count()`, under which
  Spark drops columns that nobody reads;
- every variant says what it left behind (`result`), and unequal results fail the benchmark;
- repetitions are interleaved (a, b, a, b, …, the starter rotating) after one untimed round, so that a warmer
  JVM or a busier machine falls on all variants alike; medians are compared;
- what a run needs to start from (`prepare`: a fresh copy of the target) is rebuilt before each run, untimed.

The outcome is written to `benchmarks/results/<name>.json` and shown by `docs/benchmarks.md` (`python -m
benchmarks.page`).
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.spark.session import spark_session

RESULTS = Path(__file__).parent / "results"
FORMAT_VERSION = 1
PACKAGES = ("pyspark", "delta-spark", "dbt-core", "dbt-spark")


class UnequalResultsError(AssertionError):
    """Two variants of one comparison left different rows behind: their times mean nothing."""


@dataclass(frozen=True)
class Variant:
    """One way to do the work."""

    name: str
    run: Callable[[], object]
    """The timed part; it must end in a real sink."""
    result: Callable[[], DataFrame] | None
    """The rows that `run` left, compared between variants. None only for a variant that does other
    work on purpose (the comparison's `note` says so), such as a smaller table to show how cost scales."""
    prepare: Callable[[], object] = lambda: None
    """Untimed, before each run: brings the target back to where every run starts."""


@dataclass(frozen=True)
class Aim:
    """A limit on `median(variant) / median(baseline)`; a speed-up of 2 is a ratio of at most 0.5."""

    variant: str
    baseline: str
    at_most: float


@dataclass(frozen=True)
class Comparison:
    """Variants measured against each other on one input."""

    title: str
    rows: int
    """Size of the input, in rows."""
    variants: Sequence[Variant]
    aims: Sequence[Aim] = ()
    repetitions: int = 5
    warm_up: bool = True
    """Whether an untimed round comes first; False where each run starts processes of its own, always cold."""
    note: str = ""
    """What a reader must know to read the numbers."""
    facts: Callable[[], dict[str, Any]] = dict
    """Called after the last run: evidence in addition to the times (files rewritten, a plan's `ReadSchema`)."""


@dataclass
class Workbench:
    """What a benchmark gets: a scratch folder, the scale of its data, a Spark session if it asks for one."""

    name: str
    scale: float = 1.0
    """Factor on the benchmark's own row counts; results below 1.0 are a smoke run and are not committed."""
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="benchmark-")))

    def rows(self, full: int) -> int:
        """`full` rows at scale 1.0, at least 1,000."""
        return max(1_000, int(full * self.scale))

    @cached_property
    def spark(self) -> SparkSession:
        """The session of the project's settings, with its warehouse in the scratch folder."""
        warehouse = f"file:{self.folder}/warehouse"
        SparkSession.builder.config("spark.sql.warehouse.dir", warehouse).getOrCreate()
        return spark_session(f"benchmark {self.name}")

    def table(self, path: str | Path) -> DataFrame:
        """The rows of a Delta table."""
        return self.spark.read.format("delta").load(str(path))

    def close(self) -> None:
        """Stops the session, if one was started, and removes the scratch folder."""
        if "spark" in self.__dict__:
            self.spark.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def fingerprint(rows: DataFrame) -> tuple[int, int]:
    """Row count and sum of row hashes: equal for equal multisets of rows, whatever their order.

    Columns are taken in the order of their names. Spark's hashes skip NULLs, so that (NULL, 1) and (1, NULL)
    would agree: each column's NULL flag is hashed too. Maps have no hash: give sorted arrays of entries.
    """
    columns = [F.col(f"`{name}`") for name in sorted(rows.columns)]
    row_hash = F.xxhash64(*columns, *(column.isNull() for column in columns)).cast("decimal(38,0)")
    count, total = rows.agg(F.count(F.lit(1)), F.sum(row_hash)).collect()[0]
    return int(count), int(total or 0)


def check_equal_results(comparison: Comparison) -> None:
    """Raises UnequalResultsError unless all variants that give a result left the same multiset of rows."""
    prints = {v.name: fingerprint(v.result()) for v in comparison.variants if v.result is not None}
    if len(set(prints.values())) > 1:
        got = ", ".join(f"{name}: {rows} rows, hash sum {total}" for name, (rows, total) in prints.items())
        raise UnequalResultsError(f"{comparison.title}: results differ ({got}).")


def measure(comparison: Comparison) -> dict[str, Any]:
    """Times the variants and returns the comparison's entry of the result file (seconds, medians, aims)."""
    variants = list(comparison.variants)
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    first = -1 if comparison.warm_up else 0
    for repetition in range(first, comparison.repetitions):
        start = repetition % len(variants)
        for variant in variants[start:] + variants[:start]:
            variant.prepare()
            gc.collect()
            begin = time.perf_counter()
            variant.run()
            if repetition >= 0:
                seconds[variant.name].append(round(time.perf_counter() - begin, 3))
        if repetition in (first, comparison.repetitions - 1):
            check_equal_results(comparison)
    medians = {name: round(statistics.median(times), 3) for name, times in seconds.items()}
    return {
        "title": comparison.title,
        "note": comparison.note,
        "rows": comparison.rows,
        "repetitions": comparison.repetitions,
        "variants": [
            {"name": name, "median_seconds": medians[name], "seconds": seconds[name]} for name in seconds
        ],
        "aims": [
            asdict(aim) | {"ratio": (ratio := round(medians[aim.variant] / medians[aim.baseline], 3)),
                           "met": ratio <= aim.at_most}
            for aim in comparison.aims
        ],
        "facts": comparison.facts(),
    }  # fmt: skip


def machine() -> dict[str, Any]:
    """Cores that this process may use, memory in GiB, processor, its speed, and the versions of what is measured.

    `loop_seconds` is one core's time for ``timeit("sum(range(1000000))", number=50)``: machines of the same name, and
    one machine at two times of a day, differ by a factor of two.
    """
    memory_kib = next(
        int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line
    )
    models = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=True)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "processor": models[0] if models else platform.machine(),
        "load_before": round(os.getloadavg()[0], 1),
        "loop_seconds": round(timeit.timeit("sum(range(1000000))", number=50), 2),
        "python": platform.python_version(),
        "java": java.stderr.split('version "')[1].split('"')[0],
        **{package: importlib.metadata.version(package) for package in PACKAGES},
    }


def run_benchmark(
    name: str, comparisons: Callable[[Workbench], Iterator[Comparison]], scale: float = 1.0
) -> dict[str, Any]:
    """Measures all comparisons of one benchmark module and returns the content of its result file."""
    facts = machine()
    bench = Workbench(name, scale)
    try:
        measured = [measure(comparison) for comparison in comparisons(bench)]
    finally:
        bench.close()
    return {
        "format_version": FORMAT_VERSION,
        "benchmark": name,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "scale": scale,
        "machine": facts,
        "comparisons": measured,
    }


def write_result(result: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Writes `<benchmark>.json` and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['benchmark']}.json"
    path.write_text(json_text(result, indent=2) + "\n", encoding="utf-8")
    return path
