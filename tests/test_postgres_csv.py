"""CSV files into PostgreSQL: each value as the file has it, or one sentence."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import pytest

from python_jobs.shared.core.failures import DataRefused
from python_jobs.shared.postgres import csv
from python_jobs.shared.postgres.clients import table_name
from python_jobs.shared.postgres.csv import create_from_csv
from services.postgres import Database

pytestmark = pytest.mark.postgres


class Loaded:
    def __init__(self, database: Database, file: Path) -> None:
        self.database, self.file = database, file

    def load(self, content: bytes, columns: str = "id int, value text") -> list[tuple[Any, ...]]:
        self.file.write_bytes(content)
        with self.database.connect() as connection, connection.transaction():
            connection.execute("drop table if exists loaded")
            connection.execute("set local time zone 'Asia/Tokyo'")
            create_from_csv(connection, str(self.file), table_name("loaded"), columns, ",", stays="loaded")
            assert connection.execute("show time zone").fetchone() == ("Asia/Tokyo",)
            return connection.execute("select * from loaded").fetchall()

    def value(self, type_: str, text: str) -> str:
        rows = self.load(f'id,value\n1,\n2,"{text}"\n'.encode(), f"id int, value {type_}")
        assert len(rows) == 2
        with self.database.connect() as connection:
            (found,) = connection.execute("select value::text from loaded where id = 2").fetchone() or ("",)
        return str(found)


@pytest.fixture
def loaded(database: Database, tmp_path: Path) -> Loaded:
    return Loaded(database, tmp_path / "file.csv")


NARROW = [
    ("numeric(5,2)", "1.239"),
    ("numeric(5,2)", "1.2300001"),
    ("numeric(5,0)", "1.5"),
    ("numeric(6,-2)", "149"),
    ("numeric(5,2)[]", "{1.23,1.239}"),
    ("varchar(2)", "ab "),
    ("char(2)", "ab "),
    ("double precision", "12345678901234567"),
    ("real", "16777217"),
    ("date", "2024-03-01 10:00:00"),
    ("timestamp", "2024-03-01 10:00:00.1234567"),
    ("timestamp(0)", "2024-03-01 10:00:00.5"),
    ("timestamp(3)", "2024-03-01 10:00:00.1239"),
    ("timestamptz(3)", "2024-03-01 10:00:00.1239+00"),
    ("timestamp", "2024-03-01 10:00:00+02"),
    ("timestamp", "2024-03-01T10:00:00+09:00"),
    ("time", "10:00:00.1234567"),
    ("time", "2024-03-01 10:00:00"),
]
WHOLE = [
    ("numeric(5,2)", "1.23", "1.23"),
    ("numeric(5,2)", "1.2300", "1.23"),
    ("numeric(5,2)", "NaN", "NaN"),
    ("numeric", "1.239", "1.239"),
    ("numeric(6,-2)", "100", "100"),
    ("numeric(5,2)[]", "{1.23,NULL}", "{1.23,NULL}"),
    ("varchar(2)", "ab", "ab"),
    ("double precision", "0.1", "0.1"),
    ("double precision", "NaN", "NaN"),
    ("double precision", "Infinity", "Infinity"),
    ("double precision", "9007199254740992", "9.007199254740992e+15"),
    ("date", "2024-03-01", "2024-03-01"),
    ("date", "2024-03-01 00:00:00", "2024-03-01"),
    ("date", "2024-03-01T00:00", "2024-03-01"),
    ("timestamp", "2024-03-01 10:00:00.123456", "2024-03-01 10:00:00.123456"),
    ("timestamp", "2024-03-01T10:00:00Z", "2024-03-01 10:00:00"),
    ("timestamp(3)", "2024-03-01 10:00:00.123000", "2024-03-01 10:00:00.123"),
    ("timestamp", "2024-03-01", "2024-03-01 00:00:00"),
    ("time(0)", "10:00:00", "10:00:00"),
]


@pytest.mark.parametrize(("type_", "text"), NARROW)
def test_a_value_that_would_lose_something_is_refused_with_row_and_column(
    loaded: Loaded, type_: str, text: str
) -> None:
    with pytest.raises(DataRefused) as refused:
        loaded.value(type_, text)
    assert f"was not loaded: row 2, column value: '{text}' does not fit " in str(refused.value)
    assert str(refused.value).endswith(" without loss; loaded stays as it is")


@pytest.mark.parametrize(("type_", "text", "stored"), WHOLE)
def test_a_value_that_fits_is_stored_as_it_is(loaded: Loaded, type_: str, text: str, stored: str) -> None:
    assert loaded.value(type_, text) == stored


def test_domains_are_judged_by_their_type_and_generated_columns_are_no_part_of_the_file(
    loaded: Loaded,
) -> None:
    loaded.database.execute("create domain price as numeric(5,2)")
    columns = "id int, value price, twice numeric generated always as (value * 2) stored"
    assert [str(x) for x in loaded.load(b"id,value\n1,1.23\n", columns)[0]] == ["1", "1.23", "2.46"]
    with pytest.raises(DataRefused, match=r"row 1, column value: '1.239' does not fit numeric\(5,2\)"):
        loaded.load(b"id,value\n1,1.239\n", columns)


def test_names_are_quoted(loaded: Loaded) -> None:
    columns = '"Id Number" int, "say ""hi""" numeric(5,2), "select" text, "csv of texts" text'
    header = b'Id Number,"say ""hi""",select,csv of texts\n'
    assert len(loaded.load(header + b"1,1.23,x,y\n", columns)) == 1
    with pytest.raises(DataRefused, match=r"column say .hi.: .1\.239. does not fit"):
        loaded.load(header + b"1,1.239,x,y\n", columns)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_utf_8_is_read_with_and_without_a_byte_order_mark_and_with_each_line_end(
    loaded: Loaded, mark: bytes, end: bytes
) -> None:
    content = mark + end.join([b"id,value", "1,käse".encode(), b'2,"a\nb"']) + end
    assert loaded.load(content) == [(1, "käse"), (2, "a\nb")]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"id,value\n1,a\n2,k\xe4se\n", r'invalid byte sequence for encoding "UTF8": .*line 3'),
        (b"id,value\n1,a\x00b\n", r'invalid byte sequence for encoding "UTF8": 0x00 .*line 2'),
        (b"id,value\n1,\xed\xa0\x80\n", r'invalid byte sequence for encoding "UTF8"'),
        ("id,value\n1,a\n".encode("utf-16"), r"was not loaded: "),
        (codecs.BOM_UTF8 * 2 + b"id,value\n1,a\n", r"column name mismatch in header line"),
        (b"id,value\n1,a\r2,b\n", r"unquoted carriage return found in data .*line 2"),
        (b"id,value\n1,a\n\\.\n2,b\n", r"line 3 is '\\.', which PostgreSQL reads as the end of the data"),
        (b"id,value\r\n1,a\r\n\\.\r\n2,b\r\n", r"line 3 is '\\.'"),
        (b"id,value\n1,a\n\\.", r"line 3 is '\\.'"),
        (b"id,value\r1,a\r", r"its header ends with a carriage return alone; end the lines with LF or CRLF$"),
        (codecs.BOM_UTF8 + b'"id",value\r1,"a\nb"\r', r"its header ends with a carriage return alone"),
        (b"id,value\r", r"its header ends with a carriage return alone"),
        (b"id,value\r\n1,a\n2,b\n", r"unquoted newline found in data"),
    ],
)
def test_other_bytes_are_refused_with_file_and_line(loaded: Loaded, content: bytes, error: str) -> None:
    with pytest.raises(DataRefused, match=rf"file\.csv was not loaded: .*{error}|{error}"):
        loaded.load(content)


def test_a_carriage_return_within_quotes_ends_no_line(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (1, 3, 1 << 20):
        monkeypatch.setattr(csv, "_CHUNK", size)
        assert loaded.load(b'id,value\r\n1,"a\rb"\r\n2,"\r"\r\n') == [(1, "a\rb"), (2, "\r")]
        assert loaded.load(b'id,"a\r""b"\n1,x\n', 'id int, "a\r""b" text') == [(1, "x")]


def test_chunks_do_not_hide_the_end_mark_and_a_quoted_one_is_a_value(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loaded.load(b'id,value\n1,\\.\n2,"\\."\n3,x\\.\n') == [(1, "\\."), (2, "\\."), (3, "x\\.")]
    for size in (1, 2, 3, 4, 7):
        monkeypatch.setattr(csv, "_CHUNK", size)
        with pytest.raises(DataRefused, match=r"line 3 is"):
            loaded.load(b"id,value\n1,a\n\\.\n2,b\n")
        assert len(loaded.load(b"id,value\n1,a\\.\n2,b\n")) == 2
