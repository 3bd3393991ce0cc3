"""Change Data Capture in SQL: Debezium's records become typed changes, current state and history."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pytest
from dbt_common.exceptions import DbtRuntimeError
from pyspark.sql import DataFrame

from python_jobs.shared.kafka.bronze_records import BRONZE_TYPES
from tests.support.dbt_project import raw_tables
from tests.support.rows import assert_rows
from tests.support.snippets import snippets

PAGE = "docs/ingestion.md"
SCHEMA = ", ".join(f"{name} {type_}" for name, type_ in BRONZE_TYPES.items())
COLUMNS = {
    "id": "bigint",
    "name": "string",
    "amount": "decimal(10,2)",
    "seen_at": "timestamp",
    "born": "date",
    "tags": "array<int>",
    "raw": "binary",
}
START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def time(seconds: int) -> dt.datetime:
    return START + dt.timedelta(seconds=seconds)


def row(id_: Any, **values: Any) -> dict[str, Any]:
    return {"id": id_, "name": None, **values}


def envelope(
    op: str | None,
    lsn: int | None,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    **more: Any,
) -> str:
    """Return an envelope as Debezium writes it; the change was committed ``lsn`` seconds after START."""
    source = {"db": "shop", "lsn": lsn, "ts_us": None if lsn is None else int(time(lsn).timestamp() * 1e6)}
    return json.dumps({"before": before, "after": after, "source": source, "op": op} | more)


class Records:
    """The bronze rows of one topic, batch by batch."""

    def __init__(self, spark: Any) -> None:
        self.spark, self.offset, self.batch = spark, 0, 0

    def frame(self, *payloads: str | None, key: str | None = None) -> DataFrame:
        """Return the next batch of records."""
        self.batch += 1
        rows = []
        for payload in payloads:
            rows.append(
                (payload, key, "shop.public.users", 0, self.offset, START, None, time(1000 + self.batch))
            )
            self.offset += 1
        return self.spark.createDataFrame(rows, SCHEMA)


@pytest.fixture
def records(spark):
    return Records(spark)


def flagged(spark, render, frame: DataFrame, columns: Any = COLUMNS, key: Any = "id") -> DataFrame:
    frame.createOrReplaceTempView("records")
    return spark.sql(render("change_data_capture_flags", relation="records", columns=columns, key=key))


def test_every_operation_becomes_a_typed_change(spark, render, records, ansi_modes):
    full = row(
        1,
        name="ann",
        amount="12.50",
        seen_at=1_767_225_600_123_456,
        born=20_454,
        tags=[1, 2],
        raw="YWJj",
        extra=7,
    )
    frame = records.frame(
        envelope("r", 1, after=full, transaction=None, unknown_field={"x": [1]}),
        envelope("c", 2, after=row(2, seen_at="2026-01-01T00:00:00.5Z", born="2026-01-02"),
                 transaction={"id": "736:2", "total_order": 3, "data_collection_order": 1}),
        envelope("u", 3, before=full, after=full | {"name": "bea"}),
        envelope("d", 4, before=row(1)),
        None,
        envelope("t", 5),
        json.dumps({"op": "m", "message": {"prefix": "p"}}),
    )  # fmt: skip
    changes = flagged(spark, render, frame)
    assert changes.where("error_class is not null").count() == 0
    seen = START + dt.timedelta(microseconds=123_456)
    typed = (Decimal("12.50"), seen, dt.date(2026, 1, 1), [1, 2], bytearray(b"abc"))
    empty = (None, None, None, None, None)
    half = (None, START + dt.timedelta(milliseconds=500), dt.date(2026, 1, 2), None, None)
    assert_rows(
        changes.drop("record", "ingested_at", "error_class", "error_message"),
        [
            (1, "ann", *typed, "r", 1, None, None, time(1), False),
            (2, None, *half, "c", 2, "736:2", 3, time(2), False),
            (1, "bea", *typed, "u", 3, None, None, time(3), False),
            (1, None, *empty, "d", 4, None, None, time(4), True),
            (None, None, *empty, None, None, None, None, None, None),
            (None, None, *empty, "t", 5, None, None, time(5), False),
            (None, None, *empty, "m", None, None, None, None, False),
        ],
    )


def test_what_is_no_change_is_rejected_with_its_reason(spark, render, records, ansi_modes):
    left_out = "__debezium_unavailable_value"
    frame = records.frame(
        "{broken",
        "[]",
        '{"id": 1}',
        envelope("x", 1, after=row(1)),
        envelope("c", 2),
        envelope("u", None, after=row(1)),
        envelope("c", 4, after=row(None)),
        envelope("c", 5, after=row("seven")),
        envelope("c", 6, after=row(1, amount="1.005")),
        envelope("c", 7, after=row(1, amount="123456789.00", seen_at="soon")),
        envelope("u", 8, after=row(1, name=left_out)),
        envelope("d", 9),
        envelope("c", 10, after=row(3_000_000_000)),
    )
    rejected = flagged(spark, render, frame)
    assert_rows(
        rejected.select("record.offset", "error_class", "error_message"),
        [
            (0, "MALFORMED_ENVELOPE", "the payload is not one JSON object with op"),
            (1, "MALFORMED_ENVELOPE", "the payload is not one JSON object with op"),
            (2, "MALFORMED_ENVELOPE", "the payload is not one JSON object with op"),
            (3, "UNKNOWN_OPERATION", "op is 'x'; known are c, r, u, d, t, m"),
            (4, "MALFORMED_ENVELOPE", "op c without after"),
            (5, "MALFORMED_ENVELOPE", "source.lsn or its time is missing"),
            (6, "NULL_KEY", "the key is missing"),
            (7, "INVALID_VALUE", "no value of the type in id (bigint)"),
            (8, "INVALID_VALUE", "no value of the type in amount (decimal(10,2))"),
            (9, "INVALID_VALUE", "no value of the type in amount (decimal(10,2)), seen_at (timestamp)"),
            (10, "UNAVAILABLE_VALUE", "PostgreSQL left out the unchanged name; set REPLICA IDENTITY FULL"),
            (11, "NULL_KEY", "the key is missing"),
            (12, None, None),
        ],
    )
    narrow = flagged(spark, render, frame.where("offset = 12"), {"id": "int"})
    assert_rows(
        narrow.select("error_class", "error_message"),
        [("INVALID_VALUE", "no value of the type in id (int)")],
    )


def test_a_record_with_anything_but_one_object_is_no_change(spark, render, records, ansi_modes):
    one, other = envelope("c", 1, after=row(1)), envelope("c", 2, after=row(2))
    glued = [
        one + other,
        f"{one} {other}",
        f"{one},{other}",
        f"{one} more",
        one + "]",
        one + "}",
        one.replace('"', "'"),
    ]
    found = flagged(spark, render, records.frame(*glued, f" {one} "))
    malformed = ("MALFORMED_ENVELOPE", "the payload is not one JSON object with op")
    assert_rows(
        found.select("record.offset", "error_class", "error_message"),
        [*((offset, *malformed) for offset in range(len(glued))), (len(glued), None, None)],
    )
    keys = records.frame(envelope("d", 3), key='{"id": 8} {"id": 9}')
    assert_rows(flagged(spark, render, keys).select("id", "error_class"), [(None, "NULL_KEY")])


def test_a_value_is_one_list_or_struct(spark, render, records, ansi_modes):
    columns = {"id": "int", "tags": "array<int>", "place": "struct<city: string>"}
    frame = records.frame(
        envelope("c", 1, after={"id": 1, "tags": "[1, 2]", "place": '{"city": "Bern"}'}),
        envelope("c", 2, after={"id": 2, "tags": "[1, 2] [3]", "place": None}),
        envelope("c", 3, after={"id": 3, "tags": None, "place": '{"city": "Bern"} {"city": "Basel"}'}),
    )
    found = flagged(spark, render, frame, columns)
    assert_rows(
        found.selectExpr("id", "tags", "place.city", "error_message"),
        [
            (1, [1, 2], "Bern", None),
            (2, None, None, "no value of the type in tags (array<int>)"),
            (3, None, None, "no value of the type in place (struct<city: string>)"),
        ],
    )


def test_numbers_of_a_connector_that_sends_decimals_as_numbers_keep_their_digits(
    spark, render, records, ansi_modes
):
    """Connect's converter with decimal.format=NUMERIC; Spark hands such a number to a text through a double."""
    columns = {
        "id": "decimal(30,10)",
        "amount": "decimal(38,10)",
        "amounts": "array<decimal(20,2)>",
        "weight": "double",
        "label": "string",
        "point": "struct<x: double, y: double>",
        "points": "array<struct<x: double>>",
    }
    after = (
        '{"id": 12345678901234567890.1234567890, "amount": 1234567890123456789012345678.0123456789, '
        '"amounts": [123456789012345678.10, 2.50, 3], "weight": 1.5e3, "label": 1.10, '
        '"point": {"x": 1.25, "y": -0.1234567890123456}, "points": [{"x": 0.5}, {"x": 2}]}'
    )
    numbered = envelope("c", 1, after={"id": "AFTER"}).replace('{"id": "AFTER"}', after)
    deleted = envelope("d", 2)
    key = '{"id": 12345678901234567890.1234567890}'
    frame = records.frame(numbered).union(records.frame(deleted, key=key))
    found = flagged(spark, render, frame, columns)
    id_ = Decimal("12345678901234567890.1234567890")
    assert_rows(
        found.select(*columns, "error_class"),
        [
            (
                id_,
                Decimal("1234567890123456789012345678.0123456789"),
                [Decimal("123456789012345678.10"), Decimal("2.50"), Decimal("3.00")],
                1500.0,
                "1.10",
                (1.25, -0.1234567890123456),
                [(0.5,), (2.0,)],
                None,
            ),
            (id_, *[None] * 6, None),
        ],
    )


def test_schemas_sent_along_keys_and_full_identities_are_understood(spark, render, records, ansi_modes):
    left_out = "__debezium_unavailable_value"
    wrapped = json.dumps(
        {"schema": {"type": "struct"}, "payload": json.loads(envelope("c", 1, after=row(1, name="a")))}
    )
    frame = records.frame(
        wrapped, envelope("u", 2, before=row(1, name="long"), after=row(1, name=left_out))
    ).union(records.frame(envelope("d", 3), key='{"id": 8}')).union(
        records.frame(envelope("d", 4), key='{"schema": {}, "payload": {"id": 9}}')
    )  # fmt: skip
    found = flagged(spark, render, frame, {"id": "bigint", "label": {"type": "string", "from": "name"}})
    assert_rows(
        found.select("id", "label", "op", "error_class"),
        [(1, "a", "c", None), (1, "long", "u", None), (8, None, "d", None), (9, None, "d", None)],
    )
    millis = flagged(
        spark, render, records.frame(envelope("c", 1, after=row(1, seen_at=1_767_225_600_123))),
        {"id": "bigint", "seen_at": {"type": "timestamp", "unit": "milliseconds"}},
    )  # fmt: skip
    assert_rows(millis.select("seen_at"), [(START + dt.timedelta(milliseconds=123),)])


# The bytes of Debezium's placeholder, and the UUID of their hash, as connector 3.6.1 sends them for unchanged arrays.
LEFT_OUT_BYTES = list(b"__debezium_unavailable_value")
LEFT_OUT_UUID = "b68a35a7-17ad-35b3-af2a-ae46edb4545a"
ARRAYS = {
    "id": "int",
    "big": "string",
    "tags": "array<int>",
    "btags": "array<bigint>",
    "members": "array<string>",
    "words": "array<string>",
    "days": "array<date>",
}


def test_unchanged_arrays_of_a_real_connector_are_no_values(spark, render, records, ansi_modes):
    """The second update has the old row along, as with REPLICA IDENTITY FULL; in the third one array is unchanged."""
    uuid = "11111111-1111-1111-1111-111111111111"
    known = {
        "id": 1, "big": "text", "tags": [7, 8], "btags": [9], "members": [uuid], "words": ["a"], "days": [20_454],
    }  # fmt: skip
    left_out = {
        "id": 1, "big": "__debezium_unavailable_value", "tags": LEFT_OUT_BYTES, "btags": LEFT_OUT_BYTES,
        "members": [LEFT_OUT_UUID], "words": ["__debezium_unavailable_value"], "days": LEFT_OUT_BYTES,
    }  # fmt: skip
    frame = records.frame(
        envelope("u", 1, after=left_out),
        envelope("u", 2, before=known, after=left_out),
        envelope("u", 3, after=known | {"days": LEFT_OUT_BYTES}),
        envelope("u", 4, after=known | {"tags": LEFT_OUT_BYTES[:-1]}),
    )
    found = flagged(spark, render, frame, ARRAYS)
    wanted = (1, "text", [7, 8], [9], [uuid], ["a"], [dt.date(2026, 1, 1)])
    assert_rows(
        found.where("error_class is null").select("lsn", *ARRAYS),
        [(2, *wanted), (4, *wanted[:2], LEFT_OUT_BYTES[:-1], *wanted[3:])],
    )
    assert_rows(
        found.where("error_class is not null").select("lsn", "error_class", "error_message"),
        [
            (
                1, "UNAVAILABLE_VALUE",
                "PostgreSQL left out the unchanged big, tags, btags, members, words, days; set REPLICA IDENTITY FULL",
            ),
            (3, "UNAVAILABLE_VALUE", "PostgreSQL left out the unchanged days; set REPLICA IDENTITY FULL"),
        ],
    )  # fmt: skip


def test_an_unchanged_bytea_is_no_value(spark, render, records):
    """binary.handling.mode is bytes or base64 for a binary column; with hex it is a string."""
    in_hex, in_base64 = b"__debezium_unavailable_value".hex(), "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="
    known = {"id": 1, "digits": "deadbeef", "raw": "YWJj"}
    frame = records.frame(
        envelope("u", 1, after=known | {"digits": in_hex}),
        envelope("u", 2, after=known | {"raw": in_base64}),
        envelope("u", 3, before=known, after={"id": 1, "digits": in_hex, "raw": in_base64}),
        envelope("u", 4, after=known | {"digits": in_hex[:-1], "raw": "_-8="}),
    )
    found = flagged(spark, render, frame, {"id": "int", "digits": "string", "raw": "binary"})
    assert_rows(
        found.select("lsn", "digits", "raw", "error_message"),
        [
            (1, in_hex, b"abc", "PostgreSQL left out the unchanged digits; set REPLICA IDENTITY FULL"),
            (2, "deadbeef", b"__debezium_unavailable_value",
             "PostgreSQL left out the unchanged raw; set REPLICA IDENTITY FULL"),
            (3, "deadbeef", b"abc", None),
            (4, in_hex[:-1], None, "no value of the type in raw (binary)"),
        ],
    )  # fmt: skip


def snapshot_row(kind: str, lsn: int | None, seconds: int, after: dict[str, Any], op: str = "r") -> str:
    source = {
        "connector": "postgresql",
        "snapshot": kind,
        "lsn": lsn,
        "ts_ms": int(time(seconds).timestamp() * 1000),
    }
    return json.dumps({"op": op, "before": None, "after": after, "source": source})


def test_rows_of_an_incremental_snapshot_are_older_than_every_change(spark, render, records, ansi_modes):
    """Its rows have no lsn, and of two snapshots of a row the later counts."""
    frame = records.frame(
        snapshot_row("incremental", None, 1, row(1, name="old")),
        snapshot_row("incremental", None, 9, row(1, name="old, read again")),
        snapshot_row("false", 0, 5, row(1, name="changed"), op="u"),
        snapshot_row("last", None, 5, row(2)),
        snapshot_row("incremental", None, 5, row(3), op="u"),
    )
    found = flagged(spark, render, frame)
    ordered = found.where("error_class is null").orderBy("lsn").select("name").collect()
    assert [found["name"] for found in ordered] == ["old", "old, read again", "changed"]
    assert_rows(
        found.where("error_class is null and lsn < 0").select("name", "changed_at"),
        [("old", time(1)), ("old, read again", time(9))],
    )
    assert_rows(
        found.where("error_class is not null").select("id", "error_class", "error_message"),
        [
            (2, "MALFORMED_ENVELOPE", "source.lsn or its time is missing"),
            (3, "MALFORMED_ENVELOPE", "source.lsn or its time is missing"),
        ],
    )


def test_a_source_without_an_order_of_changes_is_rejected(spark, render, records, ansi_modes):
    source = {
        "connector": "mysql",
        "file": "mysql-bin.000003",
        "pos": 484,
        "row": 0,
        "ts_ms": 1_767_225_601_000,
    }
    frame = records.frame(
        json.dumps({"op": "c", "before": None, "after": row(1), "source": source}),
        envelope("c", 1, after=row(2)),
    )
    assert_rows(
        flagged(spark, render, frame).select("id", "error_class", "error_message"),
        [
            (1, "UNSUPPORTED_SOURCE", "mysql has no lsn, which orders the changes: postgresql alone has"),
            (2, None, None),
        ],
    )


# What the macros' own SQL calls its parts, and names that SQL reserves or splits.
HELPERS = (
    "error", "invalid", "unavailable", "has_after", "copy_number", "__lp_copy", "cdc", "texts", "typed", "wrong",
    "reason", "text_values", "envelope", "parsed", "once", "record_key", "wrapped_key", "payload", "key", "before",
    "after", "source", "batch", "changes", "held", "known", "truncates", "item", "class", "Order Id", "select", "FROM",
    "it's",
)  # fmt: skip


@pytest.mark.parametrize("key", ["payload", "Order Id"])
def test_columns_may_have_the_names_of_the_macros_own_parts(spark, render, records, key):
    columns = dict.fromkeys(HELPERS, "string")
    values = {name: f"{name}!" for name in HELPERS}
    frame = records.frame(
        envelope("c", 1, after=values),
        envelope("u", 2, after=values | {"error": "__debezium_unavailable_value"}),
    ).union(records.frame(envelope("d", 3), key=json.dumps({key: "gone"}))).union(
        records.frame(envelope("d", 4), key=json.dumps({"schema": {}, "payload": {key: "wrapped"}}))
    )  # fmt: skip
    found = flagged(spark, render, frame, columns, key)
    quoted = ["`" + name.replace("`", "``") + "`" for name in HELPERS]
    assert_rows(
        found.where("lsn = 1").select(*quoted, "error_class"), [(*(f"{name}!" for name in HELPERS), None)]
    )
    assert_rows(
        found.where("lsn > 1").select("lsn", f"`{key}`", "error_class", "error_message"),
        [
            (2, f"{key}!", "UNAVAILABLE_VALUE", "PostgreSQL left out the unchanged error; set REPLICA IDENTITY FULL"),
            (3, "gone", None, None),
            (4, "wrapped", None, None),
        ],
    )  # fmt: skip


TYPES = {
    "id": "bigint", "flag": "boolean", "small": "tinyint", "ratio": "double", "code": "varchar(3)", "fixed": "char(2)",
    "whole": "decimal(4)", "at": "timestamp_ntz", "moment": "timestamp", "times": "array<timestamp>",
    "prices": "array<decimal(5,2)>", "grid": "array<array<int>>", "attributes": "map<string,string>",
    "place": "struct<cityName: string, visits: int>",
}  # fmt: skip


def test_every_type_that_a_column_may_have_is_read_exactly(spark, render, records, ansi_modes):
    """The first record has a value of each, the second none; each of the others has one that is none of its type."""
    good = {
        "id": 1, "flag": True, "small": 127, "ratio": 0.1, "code": "abc", "fixed": "de", "whole": "9999",
        "at": 1_767_225_600_000_001, "moment": "2026-01-01T01:00:00", "times": [1_767_225_600_000_000, None],
        "prices": ["1.20"], "grid": [[1], [2, 3]], "attributes": {"a": "b"}, "place": {"cityName": "Rome", "visits": 2},
    }  # fmt: skip
    bad = {
        "flag": "maybe", "small": 128, "ratio": "much", "code": "abcd", "fixed": "def", "whole": "1.5",
        "at": "10:30", "moment": "10:30", "times": ["soon"], "prices": ["1.239"], "grid": [["x"]],
    }  # fmt: skip
    frame = records.frame(
        envelope("c", 1, after=good),
        envelope("c", 2, after={"id": 2}),
        *(
            envelope("c", 3 + number, after=good | {name: value})
            for number, (name, value) in enumerate(bad.items())
        ),
    )
    found = flagged(spark, render, frame, TYPES)
    assert_rows(
        found.where("error_class is null").select("id", *list(TYPES)[1:]),
        [
            (
                1, True, 127, 0.1, "abc", "de", Decimal("9999"), time(0).replace(microsecond=1, tzinfo=None),
                dt.datetime(2026, 1, 1, 1, tzinfo=dt.UTC), [START, None], [Decimal("1.20")], [[1], [2, 3]],
                {"a": "b"}, ("Rome", 2),
            ),
            (2, *[None] * 13),
        ],
    )  # fmt: skip
    assert_rows(
        found.where("error_class is not null").select("error_class", "error_message"),
        [("INVALID_VALUE", f"no value of the type in {name} ({TYPES[name]})") for name in bad],
    )


Written = dict[str, dict[str, Any]]
"""For each type what JSON writes and the value that is read; None for what is none of the type."""


def assert_read(
    spark: Any, render: Any, records: Records, wanted: Written, unit: str = "microseconds"
) -> None:
    """Compare what is read in one query: each record has one of the values, the other columns are NULL."""
    columns: dict[str, Any] = {
        f"v{number}": {"type": type_, "unit": unit} for number, type_ in enumerate(wanted)
    }
    stories = [
        (name, written, value)
        for name, values in zip(columns, wanted.values(), strict=True)
        for written, value in values.items()
    ]
    payloads = [
        envelope("c", 1, after={"id": id_, name: "WRITTEN"}).replace('"WRITTEN"', written)
        for id_, (name, written, _) in enumerate(stories)
    ]
    found = flagged(spark, render, records.frame(*payloads), {"id": "int", **columns})
    read = {row.id: row for row in found.drop("record", "ingested_at").collect()}
    assert_rows(
        [
            (columns[name]["type"], written, read[id_].error_class or read[id_][name])
            for id_, (name, written, _) in enumerate(stories)
        ],
        [
            (columns[name]["type"], written, "INVALID_VALUE" if value is None else value)
            for name, written, value in stories
        ],
    )


EXACT_NUMBERS = {
    "decimal(38,18)": {
        '"0.123456789012345678"': Decimal("0.123456789012345678"),
        "0.123456789012345678000": Decimal("0.123456789012345678"),
        '"0E-30"': Decimal(0),
        '"0.1234567890123456789"': None,
        "0.1234567890123456789": None,
        "1e-19": None,
    },
    "decimal(38,10)": {'"-1.0000000001"': Decimal("-1.0000000001"), '"1.00000000009"': None, "1E29": None},
    "decimal(20,2)": {"150e-2": Decimal("1.50"), '"1.000000000000000000001"': None, '"NaN"': None},
    "array<decimal(38,18)>": {
        '["0.1", null]': [Decimal("0.1"), None],
        '["0.1", "0.1234567890123456789"]': None,
    },
    "float": {
        "16777216": 16777216.0,
        "2.5e3": 2500.0,
        "1e-3": 0.0010000000474974513,
        "1e39": None,
        "16777217": None,
        "1e-50": None,
    },
    "double": {
        "4.9E-324": 5e-324,
        "9007199254740992": 9007199254740992.0,
        "-1.87755305339348e18": -1.87755305339348e18,
        '"-Infinity"': float("-inf"),
        "1e400": None,
        "-1e400": None,
        "9007199254740993": None,
        "0.12345678901234567890": None,
        "1e-400": None,
        '"1.5d"': None,
    },
}  # fmt: skip


def test_a_number_that_its_type_would_change_is_rejected(spark, render, records, ansi_modes):
    """Rounded, without its last digits, or infinite; each type has values that it holds exactly."""
    assert_read(spark, render, records, EXACT_NUMBERS)


LAST = dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC)
FIRST_MICROS, LAST_MICROS = -62_135_596_800_000_000, 253_402_300_799_999_999
# PostgreSQL's infinity and -infinity, as Debezium's connector sends them.
INFINITIES = dict.fromkeys(("9223372036825200000", "-9223372036832400000"))
# Python reads no timestamp of the first day of year 1.
TIMES = {
    "timestamp": {
        f"{FIRST_MICROS + 86_400_000_000}": dt.datetime(1, 1, 2, tzinfo=dt.UTC),
        f"{LAST_MICROS}": LAST,
        '"9999-12-31T23:59:59.999999Z"': LAST,
        f"{FIRST_MICROS - 1}": None,
        f"{LAST_MICROS + 1}": None,
        '"9999-12-31T23:59:59-01:00"': None,
        '"0001-01-01T00:00:00+01:00"': None,
        '"0000-12-31T00:00:00Z"': None,
        '"+10000-01-01T00:00:00Z"': None,
        **INFINITIES,
    },
    "timestamp_ntz": {
        f"{FIRST_MICROS + 86_400_000_000}": dt.datetime(1, 1, 2, tzinfo=dt.UTC).replace(tzinfo=None),
        f"{LAST_MICROS}": LAST.replace(tzinfo=None),
        f"{FIRST_MICROS - 1}": None,
        f"{LAST_MICROS + 1}": None,
        '"10000-01-01T00:00:00"': None,
        **INFINITIES,
    },
    "date": {
        "-719162": dt.date(1, 1, 1),
        "2932896": dt.date(9999, 12, 31),
        '"9999-12-31"': dt.date(9999, 12, 31),
        "-719163": None,
        "2932897": None,
        '"0000-12-31"': None,
        '"-0001-12-31"': None,
        '"10000-01-01"': None,
        "2147483647": None,
        "-2147483648": None,
    },
    "array<timestamp>": {f"[0, {LAST_MICROS + 1}]": None},
}


def test_times_out_of_the_years_1_to_9999_are_rejected(spark, render, records, ansi_modes):
    assert_read(spark, render, records, TIMES)
    in_milliseconds = {
        "timestamp": {
            "253402300799999": LAST.replace(microsecond=999_000),
            "253402300800000": None,
            "9223372036825200": None,
        }
    }
    assert_read(spark, render, records, in_milliseconds, "milliseconds")
    of_the_source = envelope("c", 1, after=row(1)).replace("1767225601000000", "9223372036825200000")
    assert_rows(
        flagged(spark, render, records.frame(of_the_source)).select("changed_at", "error_class"),
        [(None, "MALFORMED_ENVELOPE")],
    )


NESTED = {
    "struct<n:int>": {
        '{"n": 7, "more": 1}': (7,),
        '{"n": null}': (None,),
        "{}": (None,),
        '{"n": "abc"}': None,
        '{"n": 99999999999}': None,
        '{"n": 1.5}': None,
        '{"n": {"n": 1}}': None,
        "[7]": None,
        "7": None,
    },
    "struct<n:decimal(5,2)>": {'{"n": 1.20}': (Decimal("1.20"),), '{"n": 1.239}': None},
    "struct<d:date,t:timestamp>": {
        '{"d": 20454, "t": 1767225600000000}': (dt.date(2026, 1, 1), START),
        '{"d": "2026-01-01", "t": "2026-01-01T00:00:00Z"}': (dt.date(2026, 1, 1), START),
        '{"d": "2024", "t": "12:00"}': None,
        '{"d": 2147483647}': None,
    },
    "array<struct<n:int>>": {'[{"n": 1}, null]': [(1,), None], "[]": [], '[{"n": 1}, {"n": "x"}]': None},
    "map<string,int>": {
        '{"a": 1, "b": null}': {"a": 1, "b": None},
        "{}": {},
        '{"a": "x", "b": 2}': None,
        '{"a": 1.5}': None,
        '["a"]': None,
    },
    "map<string,array<struct<code:varchar(3)>>>": {
        '{"a": [{"code": "abc"}], "b": null}': {"a": [("abc",)], "b": None},
        '{"a": [{"code": "abcd"}]}': None,
    },
    "STRUCT<`a,b: <c>` string, Deep: struct<x: double, Raw: BINARY, s: string>>": {
        '{"a,b: <c>": 1.10, "Deep": {"x": 0.5, "Raw": "YWJj", "s": {"y": [1.10, 2]}}}': (
            "1.10",
            (0.5, bytearray(b"abc"), '{"y":[1.10,2]}'),
        ),
        '{"Deep": null}': (None, None),
        '{"Deep": {"x": 1e400}}': None,
        '{"Deep": {"Raw": "?"}}': None,
        '{"Deep": 7}': None,
    },
}  # fmt: skip


def test_what_a_struct_or_a_map_holds_is_read_as_exactly_as_a_column(spark, render, records, ansi_modes):
    """A field that is no value of its type makes the whole none; no field is lost, rounded or completed."""
    assert_read(spark, render, records, NESTED)


@pytest.mark.parametrize(
    "type_",
    [
        "variant", "interval day to second", "void", "decimal", "array<variant>", "uuid", "array<interval>",
        "struct<a:interval>", "struct<a:void>", "map<string,variant>", "map<int,string>", "map<varchar(3),int>",
        "array<map<int,string>>", "decimal(40,2)", "decimal(5,7)", "decimal(0)", "struct<a:array<decimal(5,7)>>",
        "struct<a>", "struct<>", "struct<:int>", "struct<a:int,A:int>", "struct<`a:int>", "array<int,int>",
        "map<string>", "array<int", "struct<a:int>>",
    ],
)  # fmt: skip
def test_a_type_that_is_not_known_is_refused(render, type_):
    with pytest.raises(DbtRuntimeError, match=r"column 'it' has the type '.*'; allowed are string"):
        render("change_data_capture_flags", relation="records", columns={"id": "int", "it": type_}, key="id")


@pytest.mark.parametrize(
    ("columns", "key", "sentence"),
    [
        ({}, "id", "columns must map the names of the columns to their types, got {}"),
        ({"id": "int"}, "no", "key names 'no', which is none of the columns id"),
        ({"id": "int"}, [], "key must name the columns of the primary key"),
        ({"id": "int", "op": "string"}, "id", "'op' is a column of a change itself"),
        ({"id": "int", "LSN": "string"}, "id", "'LSN' is a column of a change itself"),
        (
            {"id": "int", "ID": "int"},
            "id",
            "column 'ID' or its name in the source differs from another only in",
        ),
        (
            {"id": "int", "other": {"type": "int", "from": "Id"}},
            "id",
            "column 'other' or its name in the source differs from another only in the case of its letters",
        ),
        ({"id": {"kind": "int"}}, "id", "column 'id' has no option 'kind'; allowed: type, from, unit"),
        (
            {"id": {"type": "timestamp", "unit": "days"}},
            "id",
            "must be one of microseconds, milliseconds, got 'days'",
        ),
    ],
)
def test_wrong_arguments_are_refused(render, columns, key, sentence):
    with pytest.raises(DbtRuntimeError, match=sentence):
        render("change_data_capture_flags", relation="records", columns=columns, key=key)


# --- the models of the page -----------------------------------------------------------------------------

MODELS = ("users_flagged", "users_changes", "users_dead_letter", "users_current", "users_history")


@pytest.fixture(scope="module")
def project(make_project):
    test = "tests/patterns/ingestion/test_change_data_capture_sql.py::test_the_models_of_the_page"
    files = {f"models/{name}.sql": text for name, text in zip(MODELS, snippets(PAGE, test), strict=True)}
    return make_project(files | {"models/sources.yml": raw_tables("users_records")})


@pytest.fixture
def feed(project, spark):
    """Return a function that appends a batch of records and builds the models; tables begin empty."""
    for name in ("users_records", *MODELS[1:]):
        spark.sql(f"drop table if exists {project.schema}.{name}")
    source = Records(spark)

    def build(*payloads: str | None, models: tuple[str, ...] = MODELS) -> None:
        frame = source.frame(*payloads)
        frame.write.format("delta").mode("append").saveAsTable(f"{project.schema}.users_records")
        project.run("run", "--select", *models)

    return build


def test_the_models_of_the_page(project, feed):
    """Snapshot, insert, update, key change, deletion, truncate, tombstone, message, rejects, redelivery.

    Row 6 comes newest change first, row 7 is deleted by the batch that creates it, row 8 comes from the snapshot and
    the stream; row 2 comes again after its deletion, also late; the first truncate meets empty tables.
    """
    first = [
        envelope("t", 9),
        envelope("r", 10, after=row(1, name="ann")),
        envelope("r", 10, after=row(2, name="bob")),
        envelope("c", 11, after=row(3, name="cid")),
        envelope("u", 12, after=row(1, name="bea")),
        envelope("d", 13, before=row(2)), None,
        envelope("u", 12, after=row(6, name="newer")), envelope("c", 11, after=row(6, name="older")),
        envelope("c", 11, after=row(7, name="one")), envelope("u", 12, after=row(7, name="two")),
        envelope("u", 13, after=row(7, name="three")), envelope("d", 14, before=row(7)),
        envelope("r", 10, after=row(8, name="hal")), envelope("c", 11, after=row(8, name="hal")),
    ]  # fmt: skip
    feed(*first, "{broken")
    assert_rows(
        project.table("users_current").select("id", "name", "lsn", "is_deleted"),
        [
            (1, "bea", 12, False), (2, None, 13, True), (3, "cid", 11, False), (6, "newer", 12, False),
            (7, None, 14, True), (8, "hal", 11, False),
        ],
    )  # fmt: skip
    # The connector sends all again from the beginning; then a key changes, and everything is truncated but one row.
    feed(
        *first, envelope("u", 12, after=row(2, name="late")),
        envelope("d", 14, before=row(3)), None, envelope("c", 14, after=row(4, name="cid")),
        envelope("t", 15),
        envelope("c", 16, after=row(5, name="eve")),
        json.dumps({"op": "m", "message": {}}),
    )  # fmt: skip
    assert_rows(
        project.table("users_changes").select("id", "op", "lsn", "is_deleted"),
        [
            (1, "r", 10, False), (2, "r", 10, False), (3, "c", 11, False), (1, "u", 12, False), (2, "d", 13, True),
            (3, "d", 14, True), (4, "c", 14, False),
            (6, "c", 11, False), (6, "u", 12, False),
            (7, "c", 11, False), (7, "u", 12, False), (7, "u", 13, False), (7, "d", 14, True),
            (8, "r", 10, False), (8, "c", 11, False), (2, "u", 12, False),
            (1, "t", 15, True), (4, "t", 15, True), (6, "t", 15, True), (8, "t", 15, True),
            (5, "c", 16, False),
        ],
    )  # fmt: skip
    assert_rows(
        project.table("users_current").select("id", "name", "lsn", "is_deleted"),
        [
            (5, "eve", 16, False),
            (1, None, 15, True), (2, None, 13, True), (3, None, 14, True), (4, None, 15, True), (6, None, 15, True),
            (7, None, 14, True), (8, None, 15, True),
        ],
    )  # fmt: skip
    assert_rows(
        project.table("users_history").select("id", "name", "effective_from", "effective_to", "is_current"),
        [
            (1, "ann", time(10), time(12), False), (1, "bea", time(12), time(15), False),
            (2, "bob", time(10), time(12), False), (2, "late", time(12), time(13), False),
            (3, "cid", time(11), time(14), False),
            (4, "cid", time(14), time(15), False),
            (5, "eve", time(16), None, True),
            (6, "older", time(11), time(12), False), (6, "newer", time(12), time(15), False),
            (7, "one", time(11), time(12), False), (7, "two", time(12), time(13), False),
            (7, "three", time(13), time(14), False),
            (8, "hal", time(10), time(15), False),
        ],
    )  # fmt: skip
    assert_rows(
        project.table("users_dead_letter").select("payload", "error_class"),
        [("{broken", "MALFORMED_ENVELOPE")],
    )
    own = {"record", "before", "after", "source", "op", "transaction_id", "error_class"}
    assert not own & set(project.table("users_current").columns)

    versions = [len(project.history(name)) for name in ("users_changes", "users_current", "users_history")]
    project.run("run", "--select", "users_changes")
    assert_rows(project.table("users_changes").groupBy("op").count(), [
        ("r", 3), ("c", 6), ("u", 5), ("d", 3), ("t", 4)
    ])  # fmt: skip
    assert versions == [2, 2, 2]


def test_a_truncate_that_is_sent_again_is_kept_once(project, feed):
    """Twice in one window, again in the next, and once more when it also deletes a row that came late."""
    changes = [envelope("c", 1, after=row(1)), envelope("c", 2, after=row(2)), envelope("t", 3)]
    known = [(1, "c", 1), (2, "c", 2), (1, "t", 3), (2, "t", 3)]

    def build(*payloads: str) -> list[tuple[Any, ...]]:
        feed(*payloads, models=("users_flagged", "users_changes"))
        return sorted(
            tuple(change) for change in project.table("users_changes").select("id", "op", "lsn").collect()
        )

    assert build(*changes, envelope("t", 3)) == sorted(known)
    known.append((1, "c", 4))
    assert build(envelope("t", 3), envelope("c", 4, after=row(1))) == sorted(known)
    known += [(3, "c", 2), (3, "t", 3), (1, "t", 5)]
    late = envelope("c", 2, after=row(3))
    assert build(*changes, late, envelope("t", 5), envelope("t", 5)) == sorted(known)
    known.append((2, "c", 6))
    assert build(envelope("t", 5), late, envelope("c", 6, after=row(2))) == sorted(known)
