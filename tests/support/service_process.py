"""HTTP services of this project as processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.pytest_ids import REPOSITORY


@contextmanager
def service_process(
    module: str, config: Path, *arguments: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a service as a user does, with a log beside its configuration; yield the process and its address."""
    command = [sys.executable, "-m", module, "--config", str(config), *arguments]
    with config.with_suffix(".log").open("a") as log:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        process.stdout.close()
