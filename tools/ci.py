"""Runs CI within a time budget: the linters, two mutations, then tests in the order of their value.

    python -m tools.ci

The tests that the change affects run first. A fourteenth of all units (a module's tests of one tier) follows: the units
that have waited longest. Then come the other tests of `make test`, the longest first, and the other tests of
`make test-all`, the oldest first. After 45 minutes no test starts, and the output lists the units that were not run
with the day of their last run. So each test of `make test-all` runs at least once in fourteen runs, if the affected
tests leave the time. The day of each unit's last run is in `tests/durations.json` and the user's cache folder.
"""

import datetime as dt
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.suite import FOLDERS, REST
from tools import durations
from tools.affected import affected, base_of_change, changed_files, git
from tools.durations import Record, Unit
from tools.findings import ROOT

START_NOTHING_AFTER = 45 * 60
LINT_SECONDS, MUTATIONS_SECONDS = 15 * 60, 20 * 60
END_AFTER = 80 * 60  # whatever still runs is interrupted, so that the run ends by itself
GRACE_SECONDS = 60
RUNS = 14  # in which every test has its turn
SAMPLE = 2
NOTHING_COLLECTED = 5  # pytest's exit code
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lakehouse-patterns"

_REST = re.compile(rf"pytest\.mark\.(?:{'|'.join(sorted(REST))})\b")
_ALL_REST = re.compile(rf"^pytestmark\b.*{_REST.pattern}", re.MULTILINE)


@dataclass(frozen=True)
class Change:
    """The test modules that a change affects, and the reason."""

    modules: frozenset[str]
    """Test modules that the change affects; none if it may affect all."""
    why: str


def main() -> int:
    """Run everything; return 1 if anything failed."""
    started = time.time()
    if run([sys.executable, "-m", "tools.lint"], LINT_SECONDS) != 0:
        return 1
    mutations = [sys.executable, "-m", "tests.mutations.runner", "--sample", str(SAMPLE)]
    failed = run(mutations, MUTATIONS_SECONDS) != 0
    state = CACHE / "ci"
    record = durations.merged(
        durations.read(ROOT / durations.RECORD), durations.read(state / "durations.json")
    )
    change = change_of(state / "commit")
    print(change.why, flush=True)
    ordered = order(units(), record, change.modules, dt.datetime.now(dt.UTC).date())
    with tempfile.TemporaryDirectory(prefix="ci_") as folder:
        plan, ran = Path(folder) / "plan.json", Path(folder) / "durations.json"
        listed = [[*unit, record[unit][1] if unit in record else ""] for unit in ordered]
        plan.write_text(json.dumps({"deadline": started + START_NOTHING_AFTER, "units": listed}))
        code = run(tests_of(plan, ran), started + END_AFTER - time.time())
        durations.write(state / "durations.json", durations.merged(record, durations.read(ran)), ROOT)
    failed = failed or code not in (0, NOTHING_COLLECTED)
    if not failed:
        (state / "commit").write_text(git(ROOT, "rev-parse", "HEAD"), encoding="utf-8")
    return 1 if failed else 0


def tests_of(plan: Path, ran: Path) -> list[str]:
    """Return the command that runs a plan and writes the record of what ran.

    pytest reads a separate word that names an existing path as the place of its configuration, so the options are
    written with "=".
    """
    return [sys.executable, "-m", "pytest", f"--plan={plan}", f"--record={ran}"]


def units(root: Path = ROOT) -> list[Unit]:
    """Return each module with all tiers; a tier without tests costs nothing."""
    found = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        module, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        all_rest = module.startswith(tuple(FOLDERS)) or _ALL_REST.search(text)
        if not all_rest:
            found.append((module, "test"))
        if all_rest or _REST.search(text):
            found.append((module, "rest"))
    return found


def order(every: Sequence[Unit], record: Record, affected: frozenset[str], day: dt.date) -> list[Unit]:
    """Return the units in the order in which they should run.

    Units of one age take turns by the day, so that each gets its turn even if no cache remembers a run. If a change
    affects more than half of all units, its tests get no priority, because they would take the turns of the others.
    """
    share = math.ceil(len(every) / RUNS)
    turn = day.toordinal() * share
    places = {unit: (place - turn) % len(every) for place, unit in enumerate(sorted(every))}

    def age(unit: Unit) -> tuple[str, int]:
        return record.get(unit, (0.0, ""))[1], places[unit]

    def length(unit: Unit) -> tuple[bool, float, Unit]:
        # A unit without a record may be long.
        return unit[1] == "rest", -record.get(unit, (math.inf, ""))[0], unit

    first = sorted((unit for unit in every if unit[0] in affected), key=length)
    if len(first) > len(every) / 2:
        first = []
    due = sorted((unit for unit in every if unit not in first), key=age)[:share]
    left = [unit for unit in every if unit not in {*first, *due}]
    return [
        *first,
        *sorted(due, key=length),
        *sorted((unit for unit in left if unit[1] == "test"), key=length),
        *sorted((unit for unit in left if unit[1] == "rest"), key=age),
    ]


def change_of(last_commit: Path, root: Path = ROOT) -> Change:
    """Return the change since the last green run on this machine, else since the last landing."""
    known = last_commit.read_text(encoding="utf-8") if last_commit.is_file() else ""
    is_earlier = known and git(root, "merge-base", "HEAD", known) == known
    base = known if is_earlier else base_of_change(root)
    if base is None:
        return Change(frozenset(), "affected: all, the state before is unknown")
    modules, reason = affected(changed_files(base, root), root)
    if modules is None:
        return Change(frozenset(), f"affected since {base[:10]}: all, {reason}")
    names = "".join(f"\n  {module}" for module in modules)
    return Change(frozenset(modules), f"affected since {base[:10]}: {len(modules)} test modules{names}")


def run(command: list[str], seconds: float) -> int:
    """Run a command from the repository's root, interrupt it after ``seconds``, and return its exit code."""
    print(f"$ {' '.join(['python', *command[1:]])}", flush=True)
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(max(seconds, 1))
    except subprocess.TimeoutExpired:
        print(f"interrupted after {seconds / 60:.0f} minutes", flush=True)
        process.send_signal(signal.SIGINT)  # pytest closes its report
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return 1


if __name__ == "__main__":
    sys.exit(main())
