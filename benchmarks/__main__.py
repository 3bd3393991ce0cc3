"""`python -m benchmarks [NAME …] [--scale S] [--output FOLDER]`: measures, writes, renews the page."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

import filelock

from benchmarks import page
from benchmarks.harness import RESULTS, run_benchmark, write_result

# Two benchmarks at once would measure each other.
ONE_AT_A_TIME = Path(tempfile.gettempdir()) / "lakehouse-benchmarks.lock"

OWN_MODULES = {"__init__", "__main__", "hand_written_main_job", "harness", "page"}


def names() -> list[str]:
    """All benchmarks: the modules of this folder that aren't the harness itself."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in OWN_MODULES)


def main() -> int:
    """Runs each benchmark in a process of its own: none inherits another's warm JVM or session settings."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measures patterns side by side."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(names())}; all by default")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all row counts (default: 1.0)")
    parser.add_argument(
        "--output",
        type=Path,
        default=None,
        help="folder of the results (default: benchmarks/results at scale 1.0)",
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(names()))
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; there are {', '.join(names())}.")
    if arguments.output is None and arguments.scale != 1.0:
        parser.error(
            "only results at scale 1.0 are kept in the repository; give --output FOLDER for a smoke run."
        )
    output: Path = arguments.output or RESULTS

    if len(arguments.names) != 1:
        command = [
            sys.executable,
            "-m",
            "benchmarks",
            "--scale",
            str(arguments.scale),
            "--output",
            str(output),
        ]
        codes = [subprocess.run([*command, name]).returncode for name in arguments.names or names()]
        return max(codes, default=0)

    (name,) = arguments.names
    with filelock.FileLock(ONE_AT_A_TIME):
        comparisons = importlib.import_module(f"benchmarks.{name}").comparisons
        result = run_benchmark(name, comparisons, arguments.scale)
    path = write_result(result, output)
    print(page.section(result))
    print(f"written to {path}")
    if output.resolve() == RESULTS.resolve():
        page.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
