"""The record of the test suite's durations: `tests/durations.json`, seconds by test module and tier.

A line a module, sorted: `"tests/test_job.py": {"test": [12.0, "2026-11-29"]}`. The tier is `test` (what `make test`
runs) or `rest` (what only `make test-all` runs), the seconds are those of a calm machine with two significant digits,
the date is the day of the last run. An empty date says that the seconds were measured and the day isn't known: CI
orders the module by its seconds, and its rotation treats it as one that waits. A record is written on purpose only:

    pytest --record tests/durations.json
"""

import datetime as dt
import json
import timeit
from collections.abc import Mapping
from pathlib import Path

RECORD = "tests/durations.json"
TIERS = ("test", "rest")
CALM_SECONDS = 0.7  # of the loop below, on a calm machine

Unit = tuple[str, str]
"""A test module, from the repository's root, and the tier: the tests that are scheduled together."""
Record = dict[Unit, tuple[float, str]]
"""The seconds on a calm machine, and the day of the last run (`2026-11-29`, empty if unknown), of each unit."""


def machine_factor() -> float:
    """Return how many times slower than a calm machine this one is now."""
    return timeit.timeit("sum(range(1000000))", number=50) / CALM_SECONDS


def today() -> str:
    """Return the day that a run of now is recorded under."""
    return dt.datetime.now(dt.UTC).date().isoformat()


def read(path: Path) -> Record:
    """Return a file's record; an absent file is an empty record."""
    if not path.is_file():
        return {}
    lines = json.loads(path.read_text(encoding="utf-8"))
    return {
        (module, tier): (seconds, day)
        for module, tiers in lines.items()
        for tier, (seconds, day) in tiers.items()
    }


def merged(*records: Mapping[Unit, tuple[float, str]]) -> Record:
    """Return the newest entry of each unit; of one day the later record's."""
    newest: Record = {}
    for record in records:
        for unit, entry in record.items():
            if unit not in newest or entry[1] >= newest[unit][1]:
                newest[unit] = entry
    return newest


def write(path: Path, record: Mapping[Unit, tuple[float, str]], root: Path) -> None:
    """Write a record; modules that are not below `root` any more are left out."""
    modules: dict[str, dict[str, tuple[float, str]]] = {}
    for (module, tier), (seconds, day) in sorted(record.items()):
        if (root / module).is_file():
            modules.setdefault(module, {})[tier] = (max(0.1, float(f"{seconds:.2g}")), day)
    lines = [f"{json.dumps(module)}: {json.dumps(tiers)}" for module, tiers in modules.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
