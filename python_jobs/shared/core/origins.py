"""The origin of a record: one attribute, with the same name and values on every way into and through the platform.

A record that comes again by another way (a replay, a reprocessing) looks like the first one. The origin is what tells
them apart: as header of a Kafka record, and as column of a table.

Source: Data Engineering Design Patterns, chapter 11 (API Gateway, Hybrid Source, Batch Reprocessor).
"""

from __future__ import annotations

from typing import Literal

Origin = Literal["api", "real_time", "replay", "reprocessing", "historical"]
"""Where a record comes from.

* ``api``: a producer sent it to the gateway.
* ``real_time``: a stream read it as it arrived.
* ``replay``: a job sent it again from a fallback or a dead-letter queue.
* ``reprocessing``: a job computed it again after a faulty release.
* ``historical``: a job read it from the history, before a stream's first start.
"""

ORIGIN = "origin"
"""Name of the header and of the column."""
