"""Observed metrics: counts that Spark makes while it writes rows."""

from __future__ import annotations

import threading
from typing import Any

from pyspark.sql import Observation


def observed_metrics(observation: Observation, timeout_seconds: float = 30) -> dict[str, Any]:
    """Return the metrics of the first action over the observed rows, which Spark delivers shortly after the action.

    They are empty if no action has run, or none delivers within ``timeout_seconds``: for example because Delta skipped
    the write, since its transaction is committed. ``Observation.get`` alone would wait for ever.
    """
    metrics: dict[str, Any] = {}
    waiting = threading.Thread(target=lambda: metrics.update(observation.get), daemon=True)
    waiting.start()
    waiting.join(timeout_seconds)
    return metrics
