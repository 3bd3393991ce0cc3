"""Which files a source has and what its records are: the same nasty files for every reader."""

from __future__ import annotations

import bz2
import datetime as dt
import gzip
import json
import os
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from python_jobs.data_value import wrapper
from python_jobs.idempotency import data_overwrite
from python_jobs.ingestion import full_loader, incremental_loader, transformation_replicator
from python_jobs.quality import audit_files
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.files.file_sets import UnreadableFile, list_files, read_lines, require_whole, url_path
from python_jobs.shared.files.pointers import PointedDataset
from python_jobs.shared.files.sources import parse_schema, read_files, source_files, with_schema
from python_jobs.shared.records.json_records import load_schema
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.shared.spark.job import unreadable_files_refused
from tests.support.rows import assert_rows

A, B = '{"type":"a","version":"1"}', '{"type":"b","version":"2"}'
DEVICES = "type string, version string"
PRICES = "id int, price decimal(5,2)"


@dataclass
class Source:
    """What a job says of its files."""

    source: str
    schema: str = DEVICES
    format: str = "json"
    delimiter: str = ","
    null_marker: str = ""


def land(folder: Path, files: dict[str, str | bytes]) -> str:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


def rows(spark: SparkSession, source: Source) -> list[tuple[Any, ...]]:
    with unreadable_files_refused("nothing was loaded"):
        read = read_files(spark, source, source_files(spark, source))
        return [tuple(row) for row in read.collect()]


# --- the file set ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"b.json": B, "part-2/a.json": A}, "ab"),
        ({"part-2/deeper/a.json": A}, "a"),
        ({"x=1/b.json": B, "x=2/y=3/a.json": A}, "ab"),
        ({"a.json": A, "_tmp/b.json": B, ".b.json": B, "_b.json": B, "b.json._COPYING_": B}, "a"),
        ({"a.json": A, "_x=1/b.json": B}, "a"),
        ({"a.json.gz": gzip.compress(A.encode()), "b.json.bz2": bz2.compress(B.encode())}, "ab"),
        ({"a.json": A, "empty.json": ""}, "a"),
    ],
    ids=["nested", "only nested", "x=1", "hidden", "hidden x=1", "packed", "one empty"],
)
def test_all_files_below_a_source_are_read_but_hidden_ones(
    spark: SparkSession, tmp_path: Path, files: dict[str, str | bytes], expected: str
) -> None:
    found = rows(spark, Source(land(tmp_path, files)))
    assert_rows(found, [({"a": ("a", "1"), "b": ("b", "2")})[name] for name in expected])


ODD_NAMES = [
    "devices [1].json", "what?.json", "star*.json", "run{1,2}.json", "a,b.json", "%20.json", "ha#sh.json",
    "back\\slash.json", " lead.json", "trail .json", "[a\\].json", "q'uo\"te.json", "é+&.json",
]  # fmt: skip


def test_names_are_no_patterns(spark: SparkSession, tmp_path: Path) -> None:
    pair = land(tmp_path / "pair", {"run[1].json": A, "run1.json": B})
    assert rows(spark, Source(f"{pair}/run[1].json")) == [("a", "1")]
    neighbours = ["devices 1.json", "whats.json", "starry.json", "run1.json", "a.json", " .json"]
    land(tmp_path / "run{1}", {name: f'{{"type":"{i}"}}' for i, name in enumerate(ODD_NAMES)})
    land(tmp_path / "run1", {"b.json": B})
    land(tmp_path / "run{1}" / "[dir]", dict.fromkeys(neighbours, B))
    found = rows(spark, Source(str(tmp_path / "run{1}")))
    assert_rows(found, [(str(i), None) for i in range(len(ODD_NAMES))] + [("b", "2")] * len(neighbours))
    for name in neighbours:
        (tmp_path / "run{1}" / name).write_text(B)
    for i, name in enumerate(ODD_NAMES[:5]):
        assert rows(spark, Source(str(tmp_path / "run{1}" / name))) == [(str(i), None)]


def test_a_colon_in_a_local_name_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=r"12:00\.json can't be opened: .* must have no colon; rename it"):
        rows(spark, Source(land(tmp_path, {"12:00.json": A})))
    assert rows(spark, Source(land(tmp_path / "10:00", {"a.json": A}))) == [("a", "1")]


def test_a_file_is_named_as_spark_names_it(spark: SparkSession, tmp_path: Path) -> None:
    blanks = [chr(code) for code in (0x20, 0x7F, 0x80, 0xA0, 0x1680, 0x2003, 0x2028, 0x202F, 0x3000)]
    signs = "!\"#$%&'()*+,-.;<=>?@[\\]^_`{|}~"
    names = [*ODD_NAMES, *(f"a{sign}b" for sign in [*signs, *blanks, "\u00ad", "é", "e\u0301", "🦆"])]
    land(tmp_path / "x y=1", dict.fromkeys(names, "line\n"))
    files = list_files(HadoopFolder(spark, str(tmp_path)))
    assert [file.file_path for file in files] == sorted(f"x y=1/{name}" for name in names)
    read = read_lines(spark, files).select(url_path().alias("file"))
    assert_rows(read, [(file.url_path,) for file in files])


def test_a_local_name_that_is_no_text_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    land(tmp_path, {"a.json": A, os.fsdecode(b"_hidden-\xe9.json"): B})
    assert rows(spark, Source(str(tmp_path))) == [("a", "1")]
    land(tmp_path, {os.fsdecode(b"latin-\xe9.json"): B})
    with pytest.raises(WrongUse, match=r"latin-\\udce9\.json can't be opened: .* must be UTF-8; rename it"):
        rows(spark, Source(str(tmp_path)))


@pytest.mark.parametrize(
    ("link", "to"),
    [("again", "."), ("x/again", ".."), ("x/up", "../.."), ("x/other", "../../beside")],
    ids=["itself", "parent", "above the source", "by another folder"],
)
def test_a_folder_that_lies_in_itself_is_refused(
    spark: SparkSession, tmp_path: Path, link: str, to: str
) -> None:
    folder = tmp_path / "data"
    land(folder, {"x/a.json": A})
    land(tmp_path, {"beside/b.json": B})
    (tmp_path / "beside" / "back").symlink_to("../data/x")
    (folder / "_hidden").symlink_to(".")
    (folder / "linked").symlink_to("../beside/b.json")
    assert_rows(rows(spark, Source(str(folder))), [("a", "1"), ("b", "2")])
    (folder / link).symlink_to(to)
    with pytest.raises(WrongUse, match=r"is a link to /\S+, in which it lies: .*; remove the link"):
        list_files(HadoopFolder(spark, str(folder)))
    pointed = PointedDataset(spark, str(tmp_path / "pointed"))
    land(tmp_path / "pointed" / "_versions" / "v1", {"x/a.json": A})
    assert [file.path for file in pointed.files("v1")] == ["x/a.json"]
    (tmp_path / "pointed" / "_versions" / "v1" / "x" / "again").symlink_to(".")
    with pytest.raises(WrongUse, match="in which it lies"):
        pointed.files("v1")


def test_hidden_files_are_none(spark: SparkSession, tmp_path: Path) -> None:
    land(tmp_path, {"_SUCCESS": "", "_x/a.json": A, "_a.json": A})
    for source in (tmp_path, tmp_path / "_a.json", tmp_path / "absent"):
        with pytest.raises(NotReady, match="holds no file"):
            rows(spark, Source(str(source)))


# --- the record -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        f"{A}{B}\n",
        f"{A} trailing words\n",
        f"{A}, {B}\n",
        f"{A},\n",
        f"{A}\n{B[:-1]}\n",
        f"[{A}]\n",
        f"{A}\rtrue\r",
        f"{A}\r{B}\r",
        b'{"type":"a\xff"}\n',
        '{"type":"ä"}\n'.encode("latin-1"),
        A.encode("utf-16"),
        '{"type":NaN}\n',
        '{"type":{"x":1}}\n',
    ],
    ids=[
        "glued", "trailing text", "comma", "trailing comma", "cut", "array", "CR", "CR only", "byte", "latin-1",
        "utf-16", "NaN", "object in text",
    ],
)  # fmt: skip
def test_a_line_that_is_not_exactly_one_object_is_refused(
    spark: SparkSession, tmp_path: Path, content: str | bytes
) -> None:
    with pytest.raises(
        DataRefused, match=r"cannot read /.*/a\.json: a (line|value) is.*nothing was loaded"
    ) as no:
        rows(spark, Source(land(tmp_path, {"b.json": B, "a.json": content})))
    assert "\n" not in str(no.value)


def test_a_mark_line_ends_and_numbers_keep_their_text(spark: SparkSession, tmp_path: Path) -> None:
    lines = [
        '{"type":"é\\r","version":1.10}', "", '{"type":true,"version":0.12345678901234567890}', " \t",
        '{"type":"","version":1E+2}',
    ]  # fmt: skip
    content = b"\xef\xbb\xbf" + "\r\n".join(lines).encode()
    expected = [("é\r", "1.10"), ("true", "0.12345678901234567890"), ("", "1E+2")]
    assert_rows(rows(spark, Source(land(tmp_path / "json", {"a.json": content}))), expected)
    assert_rows(rows(spark, Source(land(tmp_path / "gz", {"a.json.gz": gzip.compress(content)}))), expected)


EXACT = [
    ("int", "517.0", 517),
    ("int", "1.5", None),
    ("tinyint", "300", None),
    ("bigint", "1.0E7", 10_000_000),
    ("decimal(5,2)", "1.239", None),
    ("decimal(5,2)", "1.230", Decimal("1.23")),
    ("decimal(5,2)", "12345.6", None),
    ("float", "16777217", None),
    ("float", "0.1", pytest.approx(0.1)),
    ("double", "0.1234567890123456789", None),
    ("double", "0.12345678901234568", 0.12345678901234568),
    ("double", "1e400", None),
    ("double", "1e-400", None),
    ("double", "9007199254740993", None),
    ("double", "9007199254740992", 9007199254740992.0),
    ("double", "2e23", 2e23),  # Java prints more digits for these four
    ("double", "-2.5e22", -2.5e22),
    ("double", "5.684341886080802e-14", 5.684341886080802e-14),
    ("double", "5e-324", 5e-324),
    ("float", "33554434", None),
    ("float", "8.5e9", 8499999744.0),
    ("date", '"2024-03-01"', "2024-03-01"),
    ("date", '"2024-03-01T10:00:00Z"', None),
    ("date", '"2024"', None),
    ("timestamp", '"2024-03-01T10:00:00+02:00"', "2024-03-01 08:00:00"),
    ("timestamp", '"2024-03-01"', None),
    ("timestamp", '"10:00"', None),
    ("timestamp", '"2024-03-01T10:00:00.1234567Z"', None),
    ("timestamp_ntz", '"2024-03-01T10:00:00"', "2024-03-01 10:00:00"),
    ("timestamp_ntz", '"2024-03-01T10:00:00Z"', None),
    ("boolean", '"maybe"', None),
]


@pytest.mark.parametrize("form", ["json", "csv"])
def test_a_value_that_its_type_would_change_is_refused(
    spark: SparkSession, tmp_path: Path, form: str
) -> None:
    for number, (type_, text, expected) in enumerate(EXACT):
        content = f'{{"v":{text}}}\n' if form == "json" else f"v\n{text}\n"
        folder = land(tmp_path / str(number), {f"a.{form}": content})
        source = Source(folder, f"v {type_}", form)
        if expected is None:
            with pytest.raises(DataRefused, match=r"isn't of its type or would be changed by it: v;"):
                rows(spark, source)
        else:
            ((found,),) = rows(spark, source)
            assert (str(found) if isinstance(expected, str) else found) == expected, (type_, text)


def test_a_query_that_needs_no_column_still_meets_the_bad_record(spark: SparkSession, tmp_path: Path) -> None:
    for form, content in (("json", f"{A}\n{A}{B}\n"), ("csv", "type,version\na,1\nb\n")):
        source = Source(land(tmp_path / form, {f"a.{form}": content}), format=form)
        with pytest.raises(DataRefused), unreadable_files_refused("nothing"):
            read_files(spark, source, source_files(spark, source)).count()


CSV = "type,version\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (CSV + 'a,1\n"b","2"\n', [("a", "1"), ("b", "2")]),
        (CSV.replace("\n", "\r\n") + 'a,1\r\n\r\n"b""x",2\r\n', [("a", "1"), ('b"x', "2")]),
        ("\ufeff" + CSV + "é,1\n", [("é", "1")]),
        (CSV + 'type,version\n16" TV,"a,b"\n', [("type", "version"), ('16" TV', "a,b")]),
        (CSV + ' a ,\n#b,\\N\n"",NULL\n', [(" a ", None), ("#b", "\\N"), (None, "NULL")]),
        ('"type","version"\na,1', [("a", "1")]),
        (CSV, []),
        (CSV + 'a,"1\n2"\n', "a line is not one CSV record"),
        (CSV + 'a,"1\n', "a line is not one CSV record"),
        (CSV + 'a,"1"2\n', "a line is not one CSV record"),
        (CSV + "a,1,2\n", "more or fewer columns"),
        (CSV + "a\n", "more or fewer columns"),
        ("version,type\n1,a\n", "its header names version, type, the schema type, version"),
        (CSV.replace("\n", "\r") + "a,1\r", "its header names"),
        (CSV.encode() + b"a,\xff\n", "a line is not one CSV record in UTF-8"),
        (CSV.encode("utf-16") + "a,1\n".encode("utf-16-le"), "its header is not one CSV record in UTF-8"),
        (CSV + "\0a,\0\n#,x\x01y\n", [("\0a", "\0"), ("#", "x\x01y")]),
        (CSV + '"",""\n,\n', [(None, None), (None, None)]),
        ("\n\r\n" + CSV + "a,1\n", [("a", "1")]),
        (CSV + "a," + "1," * 30_000 + "\n", "more or fewer columns"),
        (CSV + 'a,"' + '""' * 30_000 + '"\n', [("a", '"' * 30_000)]),
        (CSV + "a," + "1" * 300_000 + "\n", [("a", "1" * 300_000)]),
    ],
)
def test_csv_records(spark: SparkSession, tmp_path: Path, content: str | bytes, expected: Any) -> None:
    source = Source(land(tmp_path, {"a.csv": content, "empty.csv": ""}), format="csv")
    if isinstance(expected, str):
        with pytest.raises(DataRefused, match=expected):
            rows(spark, source)
    else:
        assert_rows(rows(spark, source), expected)


def test_every_csv_file_has_the_header_and_a_marker_is_null(spark: SparkSession, tmp_path: Path) -> None:
    files = {"1.csv": CSV + "a,NULL\n", "x=1/2.csv": CSV + "NULL,\n"}
    source = Source(land(tmp_path, files), format="csv", null_marker="NULL")
    assert_rows(rows(spark, source), [("a", None), (None, None)])
    for other in ("type,colour\na,red\n", "version,type\n1,a\n", "a,1\n", "type,version,\na,1,\n"):
        land(tmp_path, {"3.csv": other})
        with pytest.raises(
            DataRefused, match=r"cannot read .*/3\.csv: its header isn't that of .*/1\.csv; all"
        ):
            rows(spark, source)
    land(tmp_path, {"3.csv.gz": (CSV + "a,1\n").encode(), "3.csv": ""})
    with pytest.raises(JobFailed, match=r"cannot read .*/3\.csv\.gz"):
        rows(spark, source)


def test_csv_files_whose_headers_name_the_same_are_read_together(spark: SparkSession, tmp_path: Path) -> None:
    """The line ends, the quotes and the case of a header are not its names; only a file's first line is one."""
    files: dict[str, str | bytes] = {
        "1.csv": CSV + "a,1\n",
        "2.csv": CSV.replace("\n", "\r\n") + "b,2\r\n",
        "3.csv": '\ufeff\n"type","VERSION"\nc,3\ntype,version\n',
        "4.csv.gz": gzip.compress(b'type,"version"\r\nd,4\r\n'),
        "5.csv.bz2": bz2.compress(b" \ntype,version\ne,5\n"),
        "6.csv": CSV.strip(),
    }
    source = Source(land(tmp_path, files), format="csv")
    letters = [("a", "1"), ("b", "2"), ("c", "3"), ("d", "4"), ("e", "5")]
    assert_rows(rows(spark, source), [*letters, ("type", "version")])


@pytest.mark.parametrize(
    ("ddl", "sentence"),
    [
        ("", "'' names no columns"),
        ("string", "'string' names no columns"),
        ("id int, ID int", "it names ID twice; names must differ in more than the case of letters"),
        ("id int, s array<struct<a: int, m: map<string, struct<b: int, B: int>>>>", "it names s.m.B twice"),
    ],
)
def test_a_schema_that_declares_none_is_wrong_use(spark: SparkSession, ddl: str, sentence: str) -> None:
    assert parse_schema("id int, s struct<id: int>").names == ["id", "s"]
    for read in (parse_schema, load_schema):
        with pytest.raises(WrongUse, match=re.escape(sentence)):
            read(ddl)


def test_lines_of_blanks_are_rows_where_blanks_delimit_or_are_all_there_is(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Between commas a line of blanks is no record."""
    tabs = Source(land(tmp_path / "tabs", {"a.csv": "type\tversion\n1\t2\n\t\n \t \r\n\n"}), format="csv")
    tabs.delimiter = "\t"
    assert_rows(rows(spark, tabs), [("1", "2"), (None, None), (" ", " ")])
    one = Source(land(tmp_path / "one", {"a.csv": 'type\nx\n  \n""\n\n\r\n\t\n'}), "type string", "csv")
    assert_rows(rows(spark, one), [("x",), ("  ",), (None,), ("\t",)])
    commas = Source(land(tmp_path / "commas", {"a.csv": CSV + "a,1\n \t\n\n,\n"}), format="csv")
    assert_rows(rows(spark, commas), [("a", "1"), (None, None)])
    for delimiter in ("", '"', "\n"):
        commas.delimiter = delimiter
        with pytest.raises(
            WrongUse, match="the delimiter of csv is one or more characters other than quotes"
        ):
            rows(spark, commas)


def test_a_delimiter_of_several_bytes_and_a_type_that_is_not_read(
    spark: SparkSession, tmp_path: Path
) -> None:
    folder = land(tmp_path, {"a.csv": "type§version\na§1,2\n"})
    assert rows(spark, Source(folder, format="csv", delimiter="§")) == [("a", "1,2")]
    with pytest.raises(WrongUse, match=r"column version is of type varchar\(3\), which no text is read as"):
        rows(spark, Source(folder, "type string, version varchar(3)", "csv"))
    with pytest.raises(WrongUse, match="column type is of type array<string>"):
        rows(spark, Source(folder, "type array<string>", "csv"))


def test_a_file_that_is_not_what_its_name_says_fails(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=r"cannot read .*a\.json\.gz"):
        rows(spark, Source(land(tmp_path, {"a.json.gz": A})))


PACKED = bz2.compress(f"{A}\n{B}\n".encode())


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("b.json.bz2", f"{B}\n".encode(), "it isn't bzip2 from its first byte to its last"),
        ("b.json.bz2", PACKED[:-1], "it isn't bzip2 from its first byte to its last"),
        ("b.json.bz2", PACKED[:5], "it isn't bzip2 from its first byte to its last"),
        ("b.json.bz2", PACKED + f"{B}\n".encode(), "it isn't bzip2 from its first byte to its last"),
        ("b.json.BZ2", b"x" + PACKED, "it isn't bzip2 from its first byte to its last"),
        ("b.json.lz4", B.encode(), "lz4 and snappy don't tell where a file ends"),
        ("b.json.Snappy", B.encode(), "lz4 and snappy don't tell where a file ends"),
        ("b.json.bz2", PACKED, [("a", "1"), ("a", "1"), ("b", "2")]),
        (
            "b.json.bz2",
            PACKED + bz2.compress(b"") + bz2.compress(B.encode(), 1),
            [("a", "1"), ("a", "1"), ("b", "2"), ("b", "2")],
        ),
        ("b.json.bz2", b"", [("a", "1")]),
    ],
    ids=[
        "plain",
        "cut",
        "start",
        "bytes behind",
        "bytes before",
        "lz4",
        "snappy",
        "whole",
        "streams",
        "empty",
    ],
)
def test_a_packed_file_that_is_not_whole_is_never_read_in_part(
    spark: SparkSession, tmp_path: Path, name: str, content: bytes, problem: Any
) -> None:
    """A good file beside it makes no difference; each way to read files asks the same question."""
    folder = land(tmp_path / "[1]", {"a.json": A, name: content})
    csv_folder = land(tmp_path / "csv", {"a.csv": CSV, name.replace("json", "csv"): content})
    if isinstance(problem, list):
        assert_rows(rows(spark, Source(folder)), problem)
        return
    for source in (Source(folder), Source(csv_folder, format="csv")):
        with pytest.raises(JobFailed, match=rf"^cannot read \S+/{re.escape(name[:2])}\S+: {problem}"):
            rows(spark, source)
    loads = {"source": folder, "target": str(tmp_path / "bronze")}
    with pytest.raises(JobFailed, match=problem):
        incremental_loader.run(spark, incremental_loader.Parameters(**loads))
    report = incremental_loader.run(
        spark, incremental_loader.Parameters(**loads, unreadable_files="set_aside")
    )
    assert (report["lines_written"], report["files_unreadable"]) == (1, 1)


def test_every_end_of_a_bzip2_stream_is_known(spark: SparkSession, tmp_path: Path) -> None:
    """A stream ends at any bit; the last byte is filled up. Without its last byte, none of them is whole."""
    packed = [bz2.compress(bytes(range(length))) for length in range(40)]
    texts = [f"{int.from_bytes(content, 'big'):b}" for content in packed]
    assert {len(text) - text.rfind(f"{0x177245385090:048b}") - 80 for text in texts} == set(range(8))
    files = {f"{i}.bz2": content for i, content in enumerate(packed)}
    require_whole(spark, list_files(HadoopFolder(spark, land(tmp_path / "whole", files))))
    land(tmp_path / "cut", {name: content[:-1] for name, content in files.items()})
    for file in list_files(HadoopFolder(spark, str(tmp_path / "cut"))):
        with pytest.raises(UnreadableFile, match="it isn't bzip2"):
            require_whole(spark, [file])


def test_columns_of_a_database_are_narrowed_only_without_loss(spark: SparkSession) -> None:
    given = spark.sql("select 1.230 as price, 2.0 as n, timestamp '2024-03-01 00:00:00' as day, '7' as text")
    narrow = "price decimal(5,2), n int, day date, text int"
    expected = [(Decimal("1.23"), 2, dt.date(2024, 3, 1), 7)]
    assert_rows(with_schema(given, parse_schema(narrow)), expected)
    for column, value in (
        ("price", "1.239"),
        ("n", "2.5"),
        ("day", "timestamp '2024-03-01 10:00:00'"),
        ("text", "'x'"),
    ):
        changed = given.selectExpr(
            *(f"{value if name == column else name} as {name}" for name in given.columns)
        )
        with (
            pytest.raises(DataRefused, match=f"column {column} holds .* would change"),
            unreadable_files_refused("no"),
        ):
            with_schema(changed, parse_schema(narrow)).collect()
    binary = spark.sql("select x'616263' as good, x'ff' as bad")
    assert_rows(with_schema(binary, parse_schema("good string")), [("abc",)])
    with pytest.raises(DataRefused, match="column bad holds"), unreadable_files_refused("no"):
        with_schema(binary, parse_schema("bad string")).collect()
    for type_ in ("varchar(3)", "char(3)", "array<int>"):
        with pytest.raises(WrongUse, match=r"column price is of type decimal\(4,3\), which is not read as"):
            with_schema(given, parse_schema(f"price {type_}"))


TYPED = [
    # value as SQL, declared type, value that is loaded; None: refused
    ("9223372036854775807", "double", None),
    ("9223372036854775807", "float", None),
    ("9223372036854775806", "double", None),
    ("9007199254740993", "double", None),
    ("9007199254740992", "double", 9007199254740992.0),
    ("bigint('-9223372036854775808')", "double", -(2.0**63)),
    ("2147483647", "float", None),
    ("2147483647", "double", 2147483647.0),
    ("16777217", "float", None),
    ("16777216", "float", 16777216.0),
    ("double('9223372036854775808')", "bigint", None),
    ("float('9223372036854775808')", "bigint", None),
    ("float('2147483648')", "int", None),
    ("double('NaN')", "bigint", None),
    ("double('NaN')", "decimal(10,2)", None),
    ("5.0d", "int", 5),
    ("0.1d", "float", None),
    ("0.5d", "float", 0.5),
    ("300", "tinyint", None),
    ("1709287200000", "timestamp", None),
    ("1709287200.5d", "timestamp", None),
    ("1709287200000", "date", None),
    ("timestamp '2024-03-01 10:00:00'", "bigint", None),
    ("date '2024-03-01'", "timestamp", None),
    ("date '2024-03-01'", "timestamp_ntz", None),
    ("timestamp '2024-03-01 00:00:00'", "date", dt.date(2024, 3, 1)),
    ("timestamp_ntz '2024-03-01 00:00:00'", "timestamp", "2024-03-01 00:00:00"),
    ("true", "int", None),
    ("1", "boolean", None),
    ("array(1L, null, 2147483647L)", "array<int>", [1, None, 2147483647]),
    ("array(1L, null, 2147483648L)", "array<int>", None),
    ("array('5.0', '1e2')", "array<int>", [5, 100]),
    ("array('10:00')", "array<timestamp>", None),
    ("array(array(16777217d))", "array<array<float>>", None),
    ("cast(null as bigint)", "timestamp", ...),
]


def test_a_typed_value_is_another_type_only_if_it_stays_what_it_is(
    spark: SparkSession, ansi_modes: str
) -> None:
    for value, type_, expected in TYPED:
        found = with_schema(spark.sql(f"select {value} as a"), parse_schema(f"a {type_}"))
        if expected is None:
            with (
                pytest.raises(DataRefused, match=r"column a holds .* would change"),
                unreadable_files_refused("no"),
            ):
                found.collect()
        else:
            ((held,),) = found.collect()
            wanted = None if expected is ... else expected
            assert (str(held) if isinstance(wanted, str) else held) == wanted, (value, type_)


# --- the jobs -------------------------------------------------------------------------------------------


def test_data_overwrite_reads_nested_files_and_refuses_files_without_a_record(
    spark: SparkSession, tmp_path: Path
) -> None:
    target = str(tmp_path / "table")

    def load(folder: str, **options: Any) -> None:
        source = str(tmp_path / folder)
        given = {"source": source, "target": target, "format": "json", "schema": DEVICES}
        data_overwrite.run(spark, data_overwrite.Parameters(**given | options))

    def held() -> list[tuple[Any, ...]]:
        return [tuple(row) for row in spark.read.format("delta").load(target).collect()]

    land(tmp_path / "first", {"a.json": A})
    load("first")
    land(tmp_path / "nested", {"part-2/b.json": B})
    load("nested")
    assert held() == [("b", "2")]
    land(tmp_path / "blank", {"part-2/b.json": "\n\r\n", "c.json": ""})
    with pytest.raises(DataRefused, match=r"the 2 files of .* hold no record; pass allow_empty_source"):
        load("blank")
    land(tmp_path / "glued", {"a.json": A + B})
    with pytest.raises(DataRefused, match="not one JSON object in UTF-8; nothing was overwritten"):
        load("glued", query="select 'x' as type, '1' as version from {source}")
    assert held() == [("b", "2")]
    load("blank", allow_empty_source=True)
    assert held() == []


def test_full_loader_loads_what_its_identity_holds(spark: SparkSession, tmp_path: Path) -> None:
    def load(**options: Any) -> dict[str, Any]:
        given = {"source": str(tmp_path / "devices [1]"), "target": str(tmp_path / "table"), "schema": PRICES}
        return full_loader.run(spark, full_loader.Parameters(version="2024-01-01", **given | options))

    land(
        tmp_path / "devices [1]",
        {"x=1/a.json": '{"id":1.0,"price":"1.20"}\n', "b.json": '{"id":2,"price":1.3}\n'},
    )
    land(tmp_path / "devices 1", {"c.json": '{"id":3,"price":1}\n'})
    assert load()["rows"] == 2
    assert not load()["loaded"]
    land(tmp_path / "devices [1]", {"x=2/d.json": '{"id":4,"price":1.239}\n'})
    with pytest.raises(
        DataRefused, match=r"d\.json: a value isn't of its type or would be changed by it: price; noth"
    ):
        load()
    held = spark.read.format("delta").load(str(tmp_path / "table"))
    assert_rows(held, [(1, Decimal("1.20")), (2, Decimal("1.30"))])


def wrapped(spark: SparkSession, source: str, folder: Path) -> list[str]:
    target = str(folder / "envelopes")
    given = {
        "source": source,
        "target": target,
        "job_version": "1",
        "source_format": "files",
        "batch_version": 1,
    }
    wrapper.run(spark, wrapper.Parameters(**given))
    return [json.loads(row.value)["raw_data"] for row in spark.read.format("delta").load(target).collect()]


def loaded(spark: SparkSession, source: str, folder: Path) -> list[str]:
    target = str(folder / "bronze")
    incremental_loader.run(spark, incremental_loader.Parameters(source=source, target=target))
    return [row.payload for row in spark.read.format("delta").load(target).collect()]


def replicated(spark: SparkSession, source: str, folder: Path) -> list[str]:
    (folder / "contract.yml").write_text("dataset: devices\ncolumns: [{name: type}, {name: version}]\n")
    given = {"source": source, "target": str(folder / "replica"), "contract": str(folder / "contract.yml")}
    transformation_replicator.run(spark, transformation_replicator.Parameters(**given, format="json"))
    lines = [line for file in (folder / "replica").glob("part-*") for line in file.read_text().splitlines()]
    return [line.replace(", ", ",").replace(": ", ":") for line in lines]


def typed(spark: SparkSession, source: str, folder: Path) -> list[str]:
    return [f'{{"type":"{row[0]}","version":"{row[1]}"}}' for row in rows(spark, Source(source))]


@pytest.mark.parametrize("reader", [typed, wrapped, loaded, replicated], ids=lambda reader: reader.__name__)
def test_every_reader_takes_the_same_files(spark: SparkSession, tmp_path: Path, reader: Any) -> None:
    c = '{"type":"c","version":"3"}'
    files = {
        "devices [1].json": A, "x=1/what?.json": B + "\n", "{a}/b/c.json.gz": gzip.compress(f"\ufeff{c}".encode()),
        "devices 1.json._COPYING_": "no", "_x/d.json": "no", ".e.json": "no", "empty.json": "",
    }  # fmt: skip
    folder = land(tmp_path / "data" / "run{1,2}", files)
    land(tmp_path / "data" / "run1", {"n.json": "no"})
    assert_rows([(line,) for line in reader(spark, folder, tmp_path)], [(A,), (B,), (c,)])


def test_the_audit_takes_the_same_files_and_a_pattern_only_on_demand(
    spark: SparkSession, tmp_path: Path
) -> None:
    folder = land(tmp_path / "[1]", {"a.json": A, "x=1/b.json": B, "_c.json": "no"})
    land(tmp_path / "1", {"d.json": f"{A}\n{B}\n"})
    report = audit_files.run(spark, audit_files.Parameters(folder))
    assert (report["files"], report["lines"]) == (2, 2)
    report = audit_files.run(spark, audit_files.Parameters(folder, pattern=True))
    assert (report["files"], report["lines"]) == (1, 2)
    land(tmp_path / "[1]", {"e.json": b'{"type":"\xff"}\n', "f.json": f"{A}\r{B}"})
    for form, problem in (
        (
            "json_lines",
            r"2 of 4 .*e\.json: line 1 is not one JSON object in UTF-8 .*f\.json: line 1 is not one",
        ),
        ("text", r"1 of 4 .*e\.json: line 1 is not UTF-8$"),
    ):
        with pytest.raises(DataRefused, match=problem):
            audit_files.run(spark, audit_files.Parameters(folder, form))  # type: ignore[arg-type]
