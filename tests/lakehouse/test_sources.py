"""What is played into Kafka and PostgreSQL is what the Incremental Loader takes from the same files."""

from __future__ import annotations

import datetime as dt
import gzip
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from case_study.sources import first_hour, landing_files, user_changes, visit_records
from python_jobs.ingestion import incremental_loader
from python_jobs.shared.core.failures import DataRefused
from tests.support.rows import assert_rows

HOUR = "visits/date=2024-03-01/hour=10"
FILES = {
    f"{HOUR}/plain.json": b'{"page": "a"}\n{"page": "b"}\n',
    f"{HOUR}/packed.json.gz": gzip.compress(b'{"page": "gz"}\n{"page": "gz, without an end"}'),
    f"{HOUR}/marked.json": b'\xef\xbb\xbf{"page": "after a mark"}\n',
    f"{HOUR}/windows.json": b'{"page": "cr"}\r\n\n',
    f"{HOUR}/what [1]?.jsonl": b'{"page": "odd name"}\n',
    f"{HOUR}/latin.json": b'{"page": "caf\xe9"}\n',
    f"{HOUR}/empty.json": b"",
    f"{HOUR}/_being_written.json": b"half",
    "visits/date=2024-03-01/hour=9/more/deep.json": b'{"page": "deep"}\n',
}
LINES = {
    (b'{"page": "a"}', 10), (b'{"page": "b"}', 10),
    (b'{"page": "gz"}', 10), (b'{"page": "gz, without an end"}', 10),
    (b'{"page": "after a mark"}', 10),
    (b'{"page": "cr"}\r', 10), (b"", 10),
    (b'{"page": "odd name"}', 10),
    (b'{"page": "caf\xe9"}', 10),
    (b'{"page": "deep"}', 9),
}  # fmt: skip


def land(landing: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (landing / name).parent.mkdir(parents=True, exist_ok=True)
        (landing / name).write_bytes(content)


def test_a_topic_gets_the_lines_that_the_loader_takes(spark: SparkSession, tmp_path: Path) -> None:
    landing = tmp_path / "landing [1]"
    land(landing, FILES)
    records = list(visit_records(spark, landing_files(spark, landing, "visits")))
    hours = {int(dt.datetime(2024, 3, 1, h, tzinfo=dt.UTC).timestamp() * 1000): h for h in (9, 10)}
    sent = [(record.value, hours[record.timestamp or 0]) for record in records]
    assert len(sent) == len(LINES)
    assert set(sent) == LINES

    target = str(tmp_path / "bronze_visits")
    incremental_loader.run(
        spark, incremental_loader.Parameters(source=str(landing / "visits"), target=target)
    )
    loaded = spark.read.format("delta").load(target).selectExpr("cast(payload as binary)", "hour")
    assert_rows(loaded, [(bytearray(line or b""), hour) for line, hour in sent])


def test_a_visit_without_a_date_has_no_time_for_its_record(spark: SparkSession, tmp_path: Path) -> None:
    land(tmp_path, {"visits/stray.json": b"{}"})
    with pytest.raises(DataRefused, match=r"stray\.json is in no date=YYYY-MM-DD folder"):
        list(visit_records(spark, landing_files(spark, tmp_path, "visits")))


def test_a_database_gets_the_usable_changes_in_their_order(spark: SparkSession, tmp_path: Path) -> None:
    feed = "user_changes/date=2024-03-01/hour=07"
    land(
        tmp_path,
        {
            f"{feed}/a.json.gz": gzip.compress(
                b'{"id": "u2", "op": "I", "sequence": 2, "changed_at": "2024-03-01T07:00:00Z", "is_deleted": "false"}'
            ),
            f"{feed}/b.json": b'\xef\xbb\xbf{"id": 1, "op": "U", "sequence": "1", "changed_at": "2024-03-01 06:00:00",'
            b' "login": 7, "registered_datetime": "soon", "is_deleted": true}\nno json\n[]\n{"id": "u3", "op": "X"}\n'
            b'{"id": "u4", "op": "D", "sequence": 3, "changed_at": "soon"}\n'
            b'{"id": "u\\u0000", "op": "D", "sequence": 3, "changed_at": "2024-03-01"}\n',
        },
    )
    changes = user_changes(spark, tmp_path)
    assert [(c["id"], c["op"], c["sequence"], c["login"], c["is_deleted"]) for c in changes] == [
        ("1", "U", 1, "7", True),
        ("u2", "I", 2, None, False),
    ]
    assert changes[0]["changed_at"] == dt.datetime(2024, 3, 1, 6, tzinfo=dt.UTC)
    assert changes[0]["registered_datetime"] is None
    assert first_hour(spark, tmp_path) == dt.datetime(2024, 3, 1, 7, tzinfo=dt.UTC)
