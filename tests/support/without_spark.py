"""Programs that run where no pyspark is installed, found by the function that runs them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.support.pytest_ids import REPOSITORY


def programs_without_spark() -> Iterator[str]:
    """Yield the module of each entry point that isn't started by ``run_job``."""
    for path in sorted((REPOSITORY / "python_jobs").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(r"^if __name__ == ", text, re.MULTILINE) and not re.search(
            r"^    run_job\(", text, re.MULTILINE
        ):
            yield ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
