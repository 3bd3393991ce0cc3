"""The Java programs that ``make setup`` fetched into .venv/services/ (conf/service_jars.txt)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from services.processes import ServiceFailed

ROOT = Path(sys.prefix) / "services"

# Options of a short-lived, small JVM: only the first compiler, one collector thread, warnings on standard error.
_OPTIONS = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
)


def java(*folders: str, memory: str = "512m", logged: str | None = None) -> list[str]:
    """Return the beginning of a command that runs a class of these folders of .venv/services/.

    ``logged`` is a class whose progress messages are logged, too.

    Raises:
        ServiceFailed: the jars are missing, because set-up has not fetched them.
    """
    for folder in folders:
        if not (ROOT / folder).is_dir():
            raise ServiceFailed(f"the jars of {folder} are not in {ROOT}: run `make setup`")
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else "java"
    options = [*_OPTIONS, *([f"-Dorg.slf4j.simpleLogger.log.{logged}=info"] if logged else [])]
    return [
        program,
        f"-Xmx{memory}",
        *options,
        "-cp",
        ":".join(str(ROOT / folder / "*") for folder in folders),
    ]
