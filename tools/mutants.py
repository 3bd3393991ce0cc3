"""Makes every small change (mutmut) to modules without Spark and requires that tests notice nine of ten changes.

    python -m tools.mutants

It works on a copy of the tree, because mutmut writes next to the code. `[tool.mutmut]` of pyproject.toml names the
modules and their tests. The mutants that survive are printed with their change.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tools.check_project import committed_files
from tools.findings import ROOT

LEAST_SHARE = 0.9
MUTMUT = [sys.executable, "-m", "mutmut"]
RESULT = re.compile(r"^ *(?P<mutant>(?P<module>[\w.]+)\.x\S+): (?P<status>[\w ]+)$", re.MULTILINE)
NOTICED = {"killed", "timeout", "suspicious", "segfault", "caught by type check"}


def main() -> int:
    """Run every mutant; return 1 if a module's tests notice too few."""
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        tree = Path(folder) / "tree"
        for path in committed_files(ROOT):
            copy = tree / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        # The project is installed editable from the tree itself, and mutmut puts its copy first.
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables["SPARK_CONF_DIR"] = str(tree / "conf")
        done = subprocess.run([*MUTMUT, "run"], cwd=tree, env=variables, check=False)
        if done.returncode != 0:
            return done.returncode
        listed = _answer(tree, "results", "--all", "true")
        for survivor in survivors(listed):
            print(_answer(tree, "show", survivor))
    few = [
        f"{module}: {killed} of {total} noticed" for module, (killed, total) in shares(listed).items()
        if killed < LEAST_SHARE * total
    ]  # fmt: skip
    for module, (killed, total) in shares(listed).items():
        print(f"{module:60} {killed:5} of {total:5} noticed")
    if few or not shares(listed):
        print(f"at least {LEAST_SHARE:.0%} must be noticed: {'; '.join(few) or 'no mutant was run'}")
        return 1
    return 0


def shares(listed: str) -> dict[str, tuple[int, int]]:
    """Return the numbers of noticed mutants and of all mutants of each module, from mutmut's results."""
    noticed: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for match in RESULT.finditer(listed):
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
