"""Makes every small change (mutmut) to modules without Spark and requires that tests notice nine of ten changes.

    python -m tools.mutants                                      all
    python -m tools.mutants python_jobs.data_value.bins ...      the named modules

It works on a copy of the tree, because mutmut writes next to the code. `[tool.mutmut]` of pyproject.toml names the
modules and their tests. `tests/mutants.yml` lists the changes that no test can or need notice, each with the reason,
and the modules without Spark that are not mutated. Listed changes don't count. A change that survives and isn't listed
is printed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tools.check_project import committed_files
from tools.findings import ROOT

LISTED = "tests/mutants.yml"
LEAST_SHARE = 0.9
MUTMUT = [sys.executable, "-m", "mutmut"]
RESULT = re.compile(r"^ *(?P<mutant>(?P<module>[\w.]+)\.x\S+): (?P<status>[\w ]+)$", re.MULTILINE)
NOTICED = {"killed", "timeout", "suspicious", "segfault", "caught by type check"}


@dataclass(frozen=True)
class Survivor:
    """A change that no test notices."""

    module: str
    change: tuple[str, ...]
    """The removed and the added lines, each with its sign."""

    def __str__(self) -> str:
        return "\n".join(
            [f"- module: {self.module}", "  changes:", "    - |", *(f"      {line}" for line in self.change)]
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run every mutant, or those of some modules; return 1 if a module's tests notice too few."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", help="change these modules alone, default all of them")
    modules = parser.parse_args(argv).modules
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        tree = Path(folder) / "tree"
        for path in committed_files(ROOT):
            copy = tree / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        # The project is installed editable from the tree itself, and mutmut puts its copy first.
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables["SPARK_CONF_DIR"] = str(tree / "conf")
        names = [f"{module}.*" for module in modules]
        done = subprocess.run([*MUTMUT, "run", *names], cwd=tree, env=variables, check=False)
        if done.returncode != 0:
            return done.returncode
        listed = of_modules(_answer(tree, "results", "--all", "true"), modules)
        found = {name: survivor_of(name, _answer(tree, "show", name)) for name in survivors(listed)}
    known = {
        survivor for survivor in listed_survivors(ROOT / LISTED) if not modules or survivor.module in modules
    }
    new = [survivor for survivor in found.values() if survivor not in known]
    counted = shares(listed, {name for name, survivor in found.items() if survivor in known})
    if new:
        print(f"no test notices these changes: write a test, or list them in {LISTED} with the reason")
        print(*dict.fromkeys(new), sep="\n")
    if gone := known - set(found.values()):
        print(f"a test notices these changes, or the code has changed: take them out of {LISTED}")
        print(*sorted(gone, key=str), sep="\n")
    few = [
        f"{module}: {killed} of {total} noticed" for module, (killed, total) in counted.items()
        if killed < LEAST_SHARE * total
    ]  # fmt: skip
    for module, (killed, total) in counted.items():
        print(f"{module:60} {killed:5} of {total:5} noticed")
    if few or not counted:
        print(f"at least {LEAST_SHARE:.0%} must be noticed: {'; '.join(few) or 'no mutant was run'}")
        return 1
    return 0


def survivor_of(mutant: str, shown: str) -> Survivor:
    """Return a mutant's change from what mutmut shows of it: a unified diff."""
    lines = [line for line in shown.splitlines() if line[:1] in ("-", "+") and line[:3] not in ("---", "+++")]
    return _survivor(mutant.partition(".x")[0], lines)


def listed_survivors(file: Path) -> set[Survivor]:
    """Return the changes that are listed with a reason."""
    return {
        _survivor(entry["module"], change.splitlines())
        for entry in yaml.safe_load(file.read_text(encoding="utf-8"))["survivors"]
        for change in entry["changes"]
        if entry["reason"]
    }


def _survivor(module: str, lines: Iterable[str]) -> Survivor:
    """Return a change without its indentation, which a diff of a method lacks."""
    return Survivor(module, tuple(f"{line[0]} {line[1:].strip()}" for line in lines if line.strip("+- ")))


def of_modules(listed: str, modules: Collection[str]) -> str:
    """Return those of mutmut's results that are of the modules; no modules are all of them."""
    found = [match for match in RESULT.finditer(listed) if not modules or match["module"] in modules]
    return "\n".join(match[0] for match in found)


def shares(listed: str, without: Collection[str] = ()) -> dict[str, tuple[int, int]]:
    """Return the numbers of noticed mutants and of all mutants of each module but some, from mutmut's results."""
    noticed: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for match in RESULT.finditer(listed):
        if match["mutant"] in without:
            continue
        total[match["module"]] += 1
        noticed[match["module"]] += match["status"] in NOTICED
    return {module: (noticed[module], number) for module, number in sorted(total.items())}


def survivors(listed: str) -> list[str]:
    """Return the mutants that no test noticed."""
    return [match["mutant"] for match in RESULT.finditer(listed) if match["status"] not in NOTICED]


def _answer(tree: Path, *arguments: str) -> str:
    done = subprocess.run([*MUTMUT, *arguments], cwd=tree, check=True, capture_output=True, text=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
