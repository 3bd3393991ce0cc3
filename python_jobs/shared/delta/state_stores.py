"""The state of streams in RocksDB: its settings, and the reasons for which a query can't load it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from python_jobs.shared.core.failures import JobFailed

# On the heap (Spark's default) the state of millions of keys slows garbage collection. With the changelog a batch
# doesn't upload whole files.
STATE_STORE = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
# Reasons in the state that end a query, by a part of Spark's error text.
_FAILURES = {
    "STREAMING_STATEFUL_OPERATOR_MISSING_STATE_DIRECTORY": "is gone",
    "CANNOT_LOAD_STATE_STORE": "is damaged",
    "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE": "is that of another query",
    "STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE": "is that of another query",
}


@contextmanager
def loading_state(checkpoint: str) -> Iterator[None]:
    """Run a query in the block.

    Raises:
        JobFailed: the query can't load the state in its checkpoint; the message is one sentence.
    """
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        for sign, sentence in _FAILURES.items():
            if sign in str(error):
                raise JobFailed(
                    f"the state in the checkpoint '{checkpoint}' {sentence}: restore the checkpoint, or "
                    "start again with a new one and a new target"
                ) from None
        raise
