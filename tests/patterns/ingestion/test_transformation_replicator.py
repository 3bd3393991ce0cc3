"""Transformation Replicator: only what the contract lists leaves, and nothing of the rest can be found anywhere."""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import hmac
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from python_jobs.ingestion import transformation_replicator
from python_jobs.ingestion.data_contract import filter_line, load_contract
from python_jobs.ingestion.transformation_replicator import Parameters, run
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.spark.job import run_job
from services.postgres import Database
from tests.support.killer import TableState, run_and_kill
from tests.support.pytest_ids import REPOSITORY
from tests.support.rows import assert_rows
from tests.support.snippets import snippets

# Set while the tests are collected: the JVM that reads it starts later.
KEY_NAME, KEY = "LAKEHOUSE_TEST_PSEUDONYM_KEY", "a key of nobody"
os.environ[KEY_NAME] = KEY

JOB = REPOSITORY / "python_jobs" / "ingestion" / "transformation_replicator.py"
PAGE = "docs/ingestion.md"
THIS = "tests/patterns/ingestion/test_transformation_replicator.py::"

# Personal data as it must not be found anywhere: texts, and what numbers look like when they are printed.
PLANTED = ("ann.planted@example.org", "203.0.113.77", "48.8566", "2.3522", "Planted Street", "+33 600 000")
USERS = (
    "id string, login string, plan string, email string, ip string, latitude double, longitude double, "
    "address struct<city: string, street: string>, "
    "devices array<struct<type: string, serial: string>>, settings map<string, string>, changed_at string"
)
ROWS = [
    ("u1", "ann", "free", PLANTED[0], PLANTED[1], 48.8566, 2.3522, ("Paris", PLANTED[4]),
     [("lg", PLANTED[5]), None], {"theme": "dark", "recovery": PLANTED[0]}, "01/02/2023 10:00"),
    ("u2", None, "", "b@example.org", None, None, None, None, None, None, "yesterday"),
    ("u1", "ann", "free", PLANTED[0], PLANTED[1], 48.8566, 2.3522, ("Paris", PLANTED[4]),
     [], {}, "01/02/2023 10:00"),
]  # fmt: skip
CONTRACT = f"""
dataset: users
columns:
  - {{name: id, tags: [pii], transform: {{keyed_hash: {KEY_NAME}}}}}
  - {{name: Login}}
  - {{name: plan}}
  - {{name: email, tags: [PII]}}
  - {{name: ip, tags: [pii]}}
  - {{name: latitude, tags: [pii]}}
  - {{name: longitude, tags: [pii]}}
  - {{name: address.city}}
  - {{name: address.street, tags: [pii]}}
  - {{name: devices.element.type}}
  - {{name: devices.element.serial, tags: [pii]}}
  - {{name: settings, keys: [theme]}}
  - {{name: changed_at}}
"""


def pseudonym(text: str) -> str:
    return hmac.new(KEY.encode(), text.encode(), hashlib.sha256).hexdigest()


def bytes_under(*folders: Path) -> bytes:
    """Return the bytes of every file, names included, with Parquet columns and gzip unpacked."""
    found = []
    for path in (path for folder in folders for path in folder.rglob("*")):
        found.append(str(path).encode())
        if path.is_file():
            content = path.read_bytes()
            found.append(content)
            if path.suffix == ".parquet":
                file = pq.ParquetFile(path)
                found += [str(file.read().to_pylist()).encode(), str(file.metadata.to_dict()).encode()]
            elif content[:2] == b"\x1f\x8b":
                found.append(gzip.decompress(content))
    return b"\n".join(found)


def planted_in(*folders: Path, planted: tuple[str, ...] = PLANTED) -> list[str]:
    content = bytes_under(*folders)
    return [text for text in planted if text.encode() in content]


class Replica:
    """A source table, a contract and a target."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark, self.root = spark, root
        self.source, self.target = root / "production" / "users", root / "staging" / "users"
        self.contract(CONTRACT)

    def contract(self, text: str) -> None:
        (self.root / "users.yml").write_text(text, encoding="utf-8")

    def write(self, rows: DataFrame | None = None) -> DataFrame:
        rows = self.spark.createDataFrame(ROWS, USERS) if rows is None else rows
        rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(str(self.source))
        return rows

    def parameters(self, **changes: Any) -> Parameters:
        paths = {"source": self.source, "target": self.target, "contract": self.root / "users.yml"}
        return Parameters(**({name: str(path) for name, path in paths.items()} | changes))

    def replicate(self, **changes: Any) -> dict[str, Any]:
        return run(self.spark, self.parameters(**changes))

    def rows(self) -> DataFrame:
        return self.spark.read.format("delta").load(str(self.target))

    def lines(self) -> list[str]:
        files = sorted(self.target.glob("part-*"))
        return [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def replica(spark: SparkSession, tmp_path: Path) -> Replica:
    return Replica(spark, tmp_path)


EXPECTED = [
    (pseudonym("u1"), "ann", "free", ("Paris",), [("lg",), None], {"theme": "dark"}, "01/02/2023 10:00"),
    (pseudonym("u2"), None, "", None, None, None, "yesterday"),
    (pseudonym("u1"), "ann", "free", ("Paris",), [], {}, "01/02/2023 10:00"),
]


def test_only_what_the_contract_lists_leaves_and_nothing_of_the_rest_is_found(
    replica: Replica, capfd: pytest.CaptureFixture[str]
) -> None:
    replica.write()
    report = replica.replicate()
    rows = replica.rows()
    assert rows.columns == ["id", "Login", "plan", "address", "devices", "settings", "changed_at"]
    assert_rows(rows, EXPECTED)
    assert report["rows_written"] == 3
    assert report["withheld"] == [
        "address.street",
        "devices.element.serial",
        "email",
        "ip",
        "latitude",
        "longitude",
    ]
    assert planted_in(replica.source) == list(PLANTED), "the scan finds what is there"
    assert planted_in(replica.target) == []
    printed = (
        "".join(capfd.readouterr()) + json.dumps(report) + replica.rows()._jdf.queryExecution().toString()
    )
    assert [text for text in (*PLANTED, KEY) if text in printed] == []


def test_a_rerun_leaves_the_same_rows(replica: Replica) -> None:
    replica.write()
    replica.replicate()
    again = replica.replicate()
    assert_rows(replica.rows(), EXPECTED)
    assert (again["table_version"], again["purged"]) == (1, False)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ("select *, '1' as phone from users", r"doesn't list phone: "),
        ("select * except (email), email as mail from users", "the contract names email, which the source doesn't"),
        ("select * except (address), named_struct('city', '', 'street', '', 'floor', 1) as address from users",
         r"doesn't list address\.floor"),
        ("select * except (address), named_struct('town', '') as address from users",
         r"names address\.city, which the source doesn't have; it has address\.town"),
        ("select * except (plan), named_struct('a', 1) as plan from users", r"plan is a struct: .* such as plan\.name"),
        ("select * except (plan), map('a', 1) as plan from users", "plan is a map: the contract must list the keys"),
        ("select * except (plan), array(named_struct('a', 1)) as plan from users", r"plan is an array: .*\.element"),
        ("select * except (plan), parse_json('1') as plan from users", "plan is a variant"),
        ("select * except (id), array(id) as id from users", "id is a array<string>: the contract can only transform"),
        ("select * except (settings), 'x' as settings from users", "settings is a string: it has no fields"),
    ],
)  # fmt: skip
def test_a_source_that_does_not_fit_the_contract_is_refused(
    replica: Replica, rows: str, sentence: str
) -> None:
    replica.spark.createDataFrame(ROWS, USERS).createOrReplaceTempView("users")
    contract = load_contract(str(replica.root / "users.yml"))
    with pytest.raises(DataRefused, match=sentence):
        transformation_replicator.permitted(replica.spark.sql(rows), contract)


def test_what_is_not_listed_can_be_withheld_with_a_report(replica: Replica) -> None:
    replica.write(
        replica.spark.createDataFrame(ROWS, USERS)
        .withColumn("phone", F.lit(PLANTED[5]))
        .withColumn("address", F.col("address").withField("floor", F.lit(PLANTED[4])))
    )
    with pytest.raises(DataRefused, match=r"doesn't list address\.floor, phone"):
        replica.replicate()
    assert not replica.target.exists()
    assert replica.replicate(on_unknown="drop")["unknown_withheld"] == ["address.floor", "phone"]
    assert_rows(replica.rows(), EXPECTED)
    assert planted_in(replica.target) == []


def test_names_that_differ_in_case_alone_are_no_way_out(replica: Replica, spark: SparkSession) -> None:
    """The source's EMAIL is the contract's email; two columns that differ in case alone can't be told apart."""
    replica.write(spark.createDataFrame(ROWS, USERS).withColumnRenamed("email", "EMAIL"))
    replica.replicate()
    assert planted_in(replica.target) == []
    contract = load_contract(str(replica.root / "users.yml"))
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        both = spark.createDataFrame(ROWS, USERS).withColumn("Email", F.col("email"))
        with pytest.raises(DataRefused, match="there twice"):
            transformation_replicator.permitted(both, contract)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_a_reclassified_column_leaves_no_trace_in_older_versions(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends between the new version and the purge leaves the purge to the next run."""
    replica.write()
    open_contract = CONTRACT.replace("{name: email, tags: [PII]}", "{name: email}")
    replica.contract(open_contract)
    replica.replicate()
    assert planted_in(replica.target) == [PLANTED[0]]

    replica.contract(CONTRACT)
    with monkeypatch.context() as dying, contextlib.suppress(KeyboardInterrupt):
        dying.setattr(transformation_replicator, "_purge", _die)
        replica.replicate()
    assert "email" not in replica.rows().columns
    assert planted_in(replica.target) == [PLANTED[0]], "an old version still holds it"

    assert replica.replicate()["purged"] is True
    assert planted_in(replica.target) == []
    assert_rows(replica.rows(), EXPECTED)
    assert replica.replicate()["purged"] is False


def _die(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_target_with_statistics_is_refused(replica: Replica) -> None:
    replica.write().limit(0).write.format("delta").save(str(replica.target))
    with pytest.raises(WrongUse, match="exists and isn't a replica"):
        replica.replicate()


@pytest.mark.kill
def test_a_killed_run_leaves_the_old_replica_and_no_plain_text(replica: Replica, tmp_path: Path) -> None:
    replica.write()
    replica.replicate()
    replica.write(replica.spark.createDataFrame(ROWS[:1] * 5, USERS))
    scratch = tmp_path / "scratch"
    argv = [
        "spark-submit", "--conf", f"spark.local.dir={scratch}", *snippet_settings(), str(JOB),
        "--source", str(replica.source),
        "--target", str(replica.target), "--contract", str(replica.root / "users.yml"),
    ]  # fmt: skip
    state = run_and_kill(
        argv, replica.target, at=TableState.DATA_WITHOUT_LOG, env={"TMPDIR": str(_made(scratch))}
    )
    assert state is TableState.DATA_WITHOUT_LOG
    assert_rows(replica.rows(), EXPECTED)
    assert planted_in(replica.target, scratch) == []
    replica.replicate()
    assert replica.rows().count() == 5


def snippet_settings() -> list[str]:
    """Return the Spark settings of the page's command."""
    _, command = snippets(PAGE, f"{THIS}test_the_contract_and_the_command_of_the_page")
    return re.findall(r"--conf|spark\.[\w.]+=\S+", command)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


# --- transformations --------------------------------------------------------------------------------------

DEVICES = "type string, full_name string, version string"


def shorten_old_versions(row: Row) -> dict[str, Any]:
    """The rule of the book's example, for rows of every quality."""
    if row.version is not None and row.version.startswith("1."):
        return row.asDict() | {"full_name": (row.full_name or "")[1:] or row.full_name, "version": "invalid"}
    return row.asDict()


def leak(row: Row) -> dict[str, Any]:
    raise ValueError(f"bad row {row.full_name}")


def test_a_row_function_sees_and_returns_what_may_leave(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [
        ("galaxy", "Galaxy", "1.5"), ("lg", "G2x", "Android 14"), ("mac", "MacBook", "11.2"),
        ("htc", "", "1.0"), ("x", None, "1.1"), (None, "PlantedName", None),
    ]  # fmt: skip
    replica.write(replica.spark.createDataFrame(rows, DEVICES).withColumn("owner", F.lit(PLANTED[0])))
    replica.contract(
        "dataset: devices\ncolumns: [{name: type}, {name: full_name}, {name: version}, {name: owner, tags: [pii]}]"
    )
    module = __name__
    report = replica.replicate(row_function=f"{module}:shorten_old_versions")
    assert_rows(
        replica.rows(),
        [
            ("galaxy", "alaxy", "invalid"), ("lg", "G2x", "Android 14"), ("mac", "MacBook", "11.2"),
            ("htc", "", "invalid"), ("x", None, "invalid"), (None, "PlantedName", None),
        ],
    )  # fmt: skip
    assert report["rows_written"] == 6
    capfd.readouterr()
    with pytest.raises(JobFailed, match=r"row function .*:leak failed with ValueError"):
        replica.replicate(row_function=f"{module}:leak")
    assert "bad row" not in "".join(capfd.readouterr())
    with pytest.raises(WrongUse, match="there is no function"):
        replica.replicate(row_function=f"{module}:absent")


def test_column_transformations(replica: Replica) -> None:
    replica.write(
        replica.spark.createDataFrame([("Galaxy Nexus", "x", 5), ("", "", None), (None, None, 7)],
                                      "full_name string, version string, user_id int")
    )  # fmt: skip
    replica.contract(
        f"""
dataset: devices
columns:
  - {{name: full_name, transform: {{substring: 2}}}}
  - {{name: version, transform: {{constant: "it's"}}}}
  - {{name: user_id, tags: [pii], transform: {{keyed_hash: {KEY_NAME}}}}}
"""
    )
    replica.replicate()
    assert_rows(
        replica.rows(),
        [("alaxy Nexus", "it's", pseudonym("5")), ("", "it's", None), (None, None, pseudonym("7"))],
    )


def test_pseudonyms_are_the_same_in_every_table_form_and_run(replica: Replica) -> None:
    """A join over two replicas, one a table and one JSON lines, finds what a join over the sources finds."""
    replica.write()
    replica.replicate()
    visits = replica.root / "production" / "visits.json"
    visits.write_text('{"visit": 1, "user_id": "u1"}\n{"visit": 2, "user_id": "u3"}\n', encoding="utf-8")
    contract = replica.root / "visits.yml"
    contract.write_text(
        "dataset: visits\ncolumns: [{name: visit}, {name: user_id, tags: [pii], "
        f"transform: {{keyed_hash: {KEY_NAME}}}}}]",
        encoding="utf-8",
    )
    target = replica.root / "staging" / "visits"
    replica.replicate(format="json", source=str(visits), target=str(target), contract=str(contract))
    joined = replica.spark.read.json(str(target)).join(
        replica.rows().select("id").distinct(), F.col("user_id") == F.col("id")
    )
    assert {row.visit for row in joined.collect()} == {1}


def test_a_key_that_is_not_set_stops_the_run(replica: Replica) -> None:
    replica.write()
    replica.contract(CONTRACT.replace(KEY_NAME, "A_KEY_THAT_NOBODY_SET"))
    with pytest.raises(
        JobFailed, match=r"the environment variable A_KEY_THAT_NOBODY_SET, .* is not set; nothing"
    ):
        replica.replicate()


# --- text formats -----------------------------------------------------------------------------------------

JSON_LINES = [
    '{"id": "u1", "Login": "ann", "plan": 1.10, "email": "ann.planted@example.org", "changed_at": "01/02/2023 10:00"}',
    '{"changed_at":"yesterday","id":5,"id":5,"login":null,"plan":[1e3, true]}',
    '{"id": "ü\\ud800", "address": {"city": "Paris", "street": "Planted Street"}, "settings": {"theme": 1, "k": 2}}',
    '{"devices": [{"type": "lg", "serial": "+33 600 000"}, null, "+33 600 000"], "ip": {"any": "203.0.113.77"}}',
    "",
]
KEPT_LINES = [
    f'{{"id": "{pseudonym("u1")}", "Login": "ann", "plan": 1.10, "changed_at": "01/02/2023 10:00"}}',
    f'{{"changed_at": "yesterday", "id": "{pseudonym("5")}", "id": "{pseudonym("5")}", "login": null, '
    '"plan": [1e3, true]}',
    '{"address": {"city": "Paris"}, "settings": {"theme": 1}}',
    '{"devices": [{"type": "lg"}, null]}',
    "",
]


def test_a_folder_with_other_files_is_never_replaced(replica: Replica) -> None:
    """The replica replaces its folder as a whole: a target that was mistyped would lose all that is in it."""
    source = replica.root / "production" / "users.json"
    source.parent.mkdir()
    source.write_text('{"id": "u1"}\n', encoding="utf-8")
    replica.contract(CONTRACT)
    mine = replica.target / "reports" / "2024.xlsx"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine", encoding="utf-8")
    with pytest.raises(WrongUse, match=r"has reports, which is no file of a replica and would be deleted"):
        replica.replicate(format="json", source=str(source))
    assert mine.read_text(encoding="utf-8") == "mine"
    shutil.rmtree(replica.target)
    for _ in range(2):
        replica.replicate(format="json", source=str(source))
        assert replica.lines() == [f'{{"id": "{pseudonym("u1")}"}}']


def test_json_lines_keep_the_text_of_what_leaves(replica: Replica) -> None:
    replica.contract(CONTRACT)
    contract = load_contract(str(replica.root / "users.yml"))
    lines = [*JSON_LINES[:2], JSON_LINES[2].replace("ü\\ud800", "ü"), *JSON_LINES[3:]]
    kept = [filter_line(contract, line) for line in lines]
    expected = [*KEPT_LINES]
    expected[2] = f'{{"id": "{pseudonym("ü")}", "address": {{"city": "Paris"}}, "settings": {{"theme": 1}}}}'
    assert [line for line, _ in kept] == expected
    assert [unknown for _, unknown in kept] == [[], [], [], ["devices.element"], []]


def test_json_lines_that_can_not_be_searched_do_not_leave(replica: Replica) -> None:
    source = replica.root / "production" / "users.json"
    source.parent.mkdir()
    source.write_text(
        "\n".join(
            [JSON_LINES[0], JSON_LINES[1], '{"id": "u9", "email": "ann.planted@example.org', "[1]", ""]
        ),
        encoding="utf-8",
    )
    json_form = {"format": "json", "source": str(source)}
    with pytest.raises(DataRefused, match=r"2 lines of .* can't be read"):
        replica.replicate(**json_form)
    assert not replica.target.exists()
    report = replica.replicate(**json_form, on_malformed="drop")
    assert report["malformed_left_out"] == 2
    assert sorted(replica.lines()) == sorted(KEPT_LINES[:2])
    source.write_text('{"plan": "x", "phone": "1", "ann.planted@example.org": 1}\n', encoding="utf-8")
    with pytest.raises(DataRefused, match=r"doesn't list \(no name\), phone: ") as refused:
        replica.replicate(**json_form)
    assert PLANTED[0] not in str(refused.value)
    replica.replicate(**json_form, on_unknown="drop")
    assert replica.lines() == ['{"plan": "x"}']
    assert planted_in(replica.target.parent) == []


CSV = (
    'id;login;changed_at;email\nu1; ann ;"01/02/2023 10:00";ann.planted@example.org\n'
    'u1; ann ;"01/02/2023 10:00";ann.planted@example.org\n1.10;"a ""quoted"" one";;\n"";16" TV;31.12.;x\n'
    '#é;";";"A\rl";y\r\n;;;\n'
)


def test_csv_values_stay_the_texts_that_they_are(replica: Replica) -> None:
    source = replica.root / "production" / "users.csv"
    source.parent.mkdir()
    source.write_bytes(CSV.encode())
    replica.contract(
        "dataset: users\ncolumns: [{name: id}, {name: login}, {name: changed_at}, {name: email, tags: [pii]}]"
    )
    csv_form = {"format": "csv", "source": str(source), "separator": ";"}
    replica.replicate(**csv_form)
    (file,) = replica.target.glob("part-*")
    written = file.read_bytes().decode()
    assert list(csv.reader(io.StringIO(written, newline=""), delimiter=";")) == [
        ["id", "login", "changed_at"],
        ["u1", " ann ", "01/02/2023 10:00"],
        ["u1", " ann ", "01/02/2023 10:00"],
        ["1.10", 'a "quoted" one', ""],
        ["", '16" TV', "31.12."],
        ["#é", ";", "A\rl"],
        ["", "", ""],
    ]
    assert '\n"";"16"" TV";31.12.\n' in written, "an empty text is not NULL"
    assert written.endswith("\n;;\n"), "NULL is no empty text"
    # A separator too many would let the mail address leave as changed_at.
    source.write_text(
        "id;login;changed_at;email\nu1;a;nn;ann.planted@example.org;x\nu2;b;c;d\n", encoding="utf-8"
    )
    with pytest.raises(DataRefused, match="1 lines"):
        replica.replicate(**csv_form)
    assert replica.replicate(**csv_form, on_malformed="drop")["malformed_left_out"] == 1
    assert planted_in(replica.target.parent) == []
    source.write_text("id;login;changed_at;email;phone\n1;2;3;4;5\n", encoding="utf-8")
    with pytest.raises(DataRefused, match="doesn't list phone"):
        replica.replicate(**csv_form)


@pytest.mark.parametrize(
    ("form", "full", "empty"), [("json", '{"id": 1}\n', "\n"), ("csv", "id\n1\n", "id\n")]
)
def test_files_without_a_record_do_not_empty_a_replica(
    replica: Replica, form: str, full: str, empty: str
) -> None:
    replica.contract("dataset: users\ncolumns: [{name: id}]")
    source = replica.root / f"users.{form}"
    source.write_text(full, encoding="utf-8")
    replica.replicate(format=form, source=str(source))
    before = replica.lines()
    assert before == full.splitlines()
    source.write_text(empty, encoding="utf-8")
    with pytest.raises(
        DataRefused, match="hold no record that could be replicated; nothing was replicated: pass"
    ):
        replica.replicate(format=form, source=str(source))
    assert replica.lines() == before
    replica.replicate(format=form, source=str(source), allow_empty=True)
    assert replica.lines() == empty.splitlines()


MAIL = "{name: id}, {name: email, tags: [pii]}, {name: name}"


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ('id,email,name\n1,x,"Al\n2,ann.planted@example.org,Bo\n3,c@x,Cy\n', 1),
        ('id,email,name\n1,x,"Al\n2,ann.planted@example.org,Bo\n3,c@x,Cy"\n4,d@x,Di\n', 1),
        ('id,name,email\n1,"Al,ann.planted@example.org\n2,Bo,b@x\n3,"Cy",c@x\n', 1),
        ('id,name,email\n1,"Al"x,y",ann.planted@example.org\n2,Bo,b@x\n', 1),
        ('id,name,email\n1,Al,"Planted Street\nParis,ann.planted@example.org,x\n"\n', 2),
        ('id,name,email\n1,Al,"\n"Planted Street,ann.planted@example.org,x\n', 2),
        (b'id,name,email\n1,Al,"\xff\n203.0.113.77,ann.planted@example.org,x\n', 1),
    ],
    ids=["never closed", "closed later", "moves a column", "text behind", "line break", "opened twice", "no UTF-8"],
)  # fmt: skip
def test_a_quote_that_is_not_closed_lets_no_withheld_value_leave(
    replica: Replica, lines: str | bytes, number: int
) -> None:
    """The lines behind such a quote may be a part of a withheld value: dropping one line is not enough."""
    source = replica.root / "users.csv"
    source.write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    replica.contract(f"dataset: users\ncolumns: [{MAIL}]")
    for on_malformed in ("fail", "drop"):
        with pytest.raises(DataRefused, match=rf"^{number} lines of .* have a quote that isn't closed") as no:
            replica.replicate(format="csv", source=str(source), on_malformed=on_malformed)
        assert not replica.target.exists()
        assert not [text for text in PLANTED if text in str(no.value)]


def test_csv_rows_without_a_value_and_a_replica_of_one_column(replica: Replica) -> None:
    source = replica.root / "users.csv"
    replica.contract(f"dataset: users\ncolumns: [{MAIL}]")
    source.write_text("id\temail\tname\n1\ta@x\tAl\n\n\t\t\n\0\tb@x\t\x01\n", encoding="utf-8")
    replica.replicate(format="csv", source=str(source), separator="\\t")
    rows = [line for line in replica.lines() if line != "id\tname"]  # the header of each file
    assert sorted(rows) == sorted(["1\tAl", "\t", "\0\t\x01"])
    source.write_text("id,email\n,a@x\n1,b@x\n", encoding="utf-8")
    replica.contract("dataset: users\ncolumns: [{name: id}, {name: email, tags: [pii]}]")
    replica.replicate(format="csv", source=str(source))
    assert replica.lines() == ["id", '""', "1"]


def test_headers_of_csv(replica: Replica) -> None:
    source = replica.root / "production"
    source.mkdir()
    replica.contract("dataset: users\ncolumns: [{name: id}, {name: login}]")
    csv_form = {"format": "csv", "source": str(source)}
    for header in ("id,login", '"id","login"', "\r\nid,login"):
        (source / "a.csv").write_bytes(f"\ufeff{header}\r\n1,é\r\n".encode())
        replica.replicate(**csv_form)
        assert replica.lines() == ["id,login", "1,é"]
    (source / "b.csv").write_text('"id",login\n2,x\n', encoding="utf-8")
    replica.replicate(**csv_form)
    assert set(replica.lines()) == {"1,é", "2,x", "id,login"}
    (source / "b.csv").unlink()
    replica.replicate(**csv_form)
    for other in ("login,id\nann,1\n", "203.0.113.77,Planted Street\n"):
        (source / "b.csv").write_text(other, encoding="utf-8")
        with pytest.raises(
            DataRefused, match=r"cannot read .*/b\.csv: its header isn't that of .*/a\.csv"
        ) as no:
            replica.replicate(**csv_form)
        assert not [text for text in PLANTED if text in str(no.value)]
    (source / "b.csv").unlink()
    assert replica.lines() == ["id,login", "1,é"]
    for header, problem in [
        ("ann.planted@example.org,203.0.113.77", "names id, login, which the header of .* lacks"),
        ('id,"ann.planted@example.org', "its header is not one CSV record in UTF-8"),
        (b"id,login,\xff", "its header is not one CSV record in UTF-8"),
        ("id,login,ID", "ID is there twice"),
        ("id,login,", "doesn't list _c2: "),
    ]:
        (source / "a.csv").write_bytes(header if isinstance(header, bytes) else header.encode())
        with pytest.raises(DataRefused, match=problem) as no:
            replica.replicate(**csv_form)
        assert not [text for text in PLANTED if text in str(no.value)]
    (source / "a.csv").write_text("\n")
    with pytest.raises(NotReady, match="hold no header"):
        replica.replicate(**csv_form)
    with pytest.raises(WrongUse, match="characters other than quotes and line ends, got ''"):
        replica.replicate(**csv_form, separator="")


# --- contracts and parameters -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ("[{name: a}, {name: A}]", "lists A twice"),
        ("[{name: a, tag: pii}]", "unknown key: tag"),
        ("[a]", "needs a name"),
        ("[{name: a, tags: [pii]}]", "nothing may leave"),
        ("[{name: a, transform: {md5: x}}]", "must be one of keyed_hash, substring, constant"),
        (
            "[{name: a, transform: {keyed_hash: 'the key itself'}}]",
            "takes the name of the environment variable",
        ),
        ("[{name: a, transform: {substring: 0}}]", "from 1"),
        ("[{name: a, transform: {constant: 1}}]", "takes a text"),
        ("[{name: a}, {name: a.b}]", "lists a and fields of it"),
        ("[{name: a, keys: [x], tags: [pii]}, {name: a.value.b}]", "tag these"),
        ("[{name: a, keys: [x], transform: {substring: 2}}]", "transform these"),
    ],
)
def test_a_wrong_contract_is_one_sentence(tmp_path: Path, columns: str, sentence: str) -> None:
    contract = tmp_path / "contract.yml"
    contract.write_text(f"dataset: d\ncolumns: {columns}", encoding="utf-8")
    with pytest.raises(WrongUse, match=sentence):
        load_contract(str(contract))


def test_wrong_parameters_are_refused(tmp_path: Path) -> None:
    for wrong, sentence in [
        ({"target": "/a/b"}, "must not lie in one another"),
        ({"format": "json", "target": "users"}, "the target of json is a folder"),
        ({"format": "json", "row_function": "a:b"}, "row_function needs rows"),
        ({"row_function": "a.b"}, "must be module:function"),
    ]:
        with pytest.raises(WrongUse, match=sentence):
            Parameters(**({"source": "/a", "target": "/b", "contract": "c.yml"} | wrong))
    for text, sentence in [(None, "doesn't exist"), ("[", "is no YAML"), ("dataset: a", "must hold")]:
        if text is not None:
            (tmp_path / "c.yml").write_text(text, encoding="utf-8")
        with pytest.raises(WrongUse, match=sentence):
            load_contract(str(tmp_path / "c.yml"))


def test_the_contract_and_the_command_of_the_page(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contract, command = snippets(PAGE, f"{THIS}test_the_contract_and_the_command_of_the_page")
    replica.write(replica.spark.createDataFrame(ROWS, USERS))
    monkeypatch.chdir(tmp_path)
    replica.contract(contract.replace("USERS_PSEUDONYM_KEY", KEY_NAME))
    monkeypatch.setenv("LAKEHOUSE_ROOT", str(tmp_path / "lakehouse"))
    replica.source.rename(_made_parents(tmp_path / "lakehouse" / "silver" / "silver_users"))
    words = os.path.expandvars(command[command.index("--source") :].replace("\\\n", " ")).split()
    monkeypatch.setattr(sys, "argv", [str(JOB), *words])
    with pytest.raises(SystemExit) as end:
        run_job(Parameters, run, [word.replace("/staging/users", str(replica.target)) for word in words])
    assert end.value.code == 0
    assert replica.rows().columns == ["id", "plan", "address", "devices", "settings"]
    assert planted_in(replica.target) == []


def _made_parents(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    return path


# --- the database's own protection ------------------------------------------------------------------------


@pytest.mark.postgres
def test_the_grants_of_the_page_let_a_user_read_three_columns(database: Database) -> None:
    (grants,) = snippets(PAGE, f"{THIS}test_the_grants_of_the_page_let_a_user_read_three_columns")
    with psycopg.connect(database.dsn(), autocommit=True) as owner:
        owner.execute("create table visits (visit_id text, event_time timestamp, user_id text, ip inet)")
        owner.execute("insert into visits values ('v1', '2024-03-01', 'u1', '203.0.113.77')")
        owner.execute(grants)
        try:
            owner.execute("set role replicator")
            assert owner.execute("select visit_id, event_time::text, user_id from visits").fetchall() == [
                ("v1", "2024-03-01 00:00:00", "u1")
            ]
            for query in ("select ip from visits", "select * from visits", "table visits"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    owner.execute(query)
        finally:
            owner.execute("reset role")
            owner.execute("drop owned by replicator")
            owner.execute("drop role replicator")
