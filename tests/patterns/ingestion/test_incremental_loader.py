"""Incremental Loader for files: what landed, every line of it, once."""

from __future__ import annotations

import contextlib
import datetime as dt
import gzip
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.ingestion import incremental_loader
from python_jobs.ingestion.incremental_loader import LandingFile, Parameters, assign_load_ids, run
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.spark.hadoop_files import Entry, HadoopFolder
from python_jobs.shared.spark.job import run_job
from tests.support.failing_write import failing_at
from tests.support.killer import TableState, run_and_kill
from tests.support.pytest_ids import REPOSITORY
from tests.support.rows import assert_rows
from tests.support.session import process_environment, small_configuration
from tests.support.snippets import snippet

JOB = REPOSITORY / "python_jobs" / "ingestion" / "incremental_loader.py"
THIS = "tests/patterns/ingestion/test_incremental_loader.py::"
HOUR_9, HOUR_10, HOUR_11 = (f"date=2024-03-01/hour={hour}" for hour in ("09", "10", "11"))
WINDOW_10 = {"from_": "2024-03-01T10", "to": "2024-03-01T11"}
WINDOW_11 = {"from_": "2024-03-01T11", "to": "2024-03-01T12"}


@dataclass
class Feed:
    """A landing folder and the bronze table that is loaded from it."""

    spark: SparkSession
    folder: Path
    target: str

    def land(self, name: str, content: bytes | str, modified_at: int = 1_709_290_800) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        os.utime(path, (modified_at, modified_at))

    def load(self, **parameters: Any) -> dict[str, Any]:
        return run(self.spark, Parameters(source=str(self.folder), target=self.target, **parameters))

    def exit_code(self, *arguments: str) -> int:
        """Call the job as its command line does, in this process."""
        with pytest.raises(SystemExit) as end:
            run_job(Parameters, run, ["--source", str(self.folder), "--target", self.target, *arguments])
        return int(end.value.code or 0)

    def bronze(self) -> DataFrame:
        return self.spark.read.format("delta").load(self.target)

    def ledger(self) -> DataFrame:
        return self.spark.read.format("delta").load(f"{self.target}_files")

    def holds(self, payloads: dict[str, str]) -> None:
        """Assert that bronze holds one line of each of these files, and the ledger the files."""
        assert_rows(self.bronze().select("payload"), [(payload,) for payload in payloads.values()])
        assert_rows(self.ledger().select("file_path"), [(file,) for file in payloads])

    def versions(self) -> int:
        return len(list(Path(self.target, "_delta_log").glob("*.json")))

    def data_files(self, partition: str = "") -> set[Path]:
        return set(Path(self.target, partition).rglob("*.parquet"))


@pytest.fixture
def feed(spark: SparkSession, tmp_path: Path) -> Feed:
    return Feed(spark, tmp_path / "landing" / "visits", str(tmp_path / "bronze" / "bronze_visits"))


@pytest.fixture
def half_loaded(feed: Feed) -> Feed:
    """Return a feed of two files, of which the first is loaded."""
    feed.land(f"{HOUR_9}/a.json", "a\n")
    feed.load()
    feed.land(f"{HOUR_10}/b.json", "b\n")
    return feed


# Odd on purpose: a carriage return before the end of line, an empty line, bytes that are no UTF-8, a NUL byte,
# quotes and emoji, no end of line at the end of the file. The name needs escaping in URLs and in globs.
ODD_NAME = "ü v%20+#?{1}[2].json"
ODD_LINES = [b'{"visit_id": "v1"}\r', b"", b"\xff\xfe\x00", '"quoted" \\ 🦆'.encode(), b"{........"]


class Loads(Feed):
    """Loads of one feed, hour by hour, with what each reported; see `loads`."""

    reports: dict[str, Any]


@pytest.fixture(scope="module")
def loads(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Loads:
    root = tmp_path_factory.mktemp("loads")
    feed = Loads(spark, root / "landing" / "visits", str(root / "bronze" / "bronze_visits"))
    feed.reports = reports = {}
    at_11 = ("--execution_time", "2024-03-01T11:05", "--require_next_partition", "true")

    feed.land(f"{HOUR_9}/cut.json.gz", gzip.compress(os.urandom(5000))[:2000])
    feed.land(f"{HOUR_10}/{ODD_NAME}", b"\n".join(ODD_LINES))
    feed.land(f"{HOUR_10}/packed.json.gz", gzip.compress(b"p1\np2\n"))
    feed.land(f"{HOUR_10}/empty.json", b"")
    for hidden in (".part.json", "_SUCCESS", "_temporary/0/part.json", "big.json._COPYING_"):
        feed.land(f"{HOUR_10}/{hidden}", b"not yet\n")
    reports["not ready"] = feed.exit_code(*at_11)
    reports["nothing written"] = not Path(feed.target).exists()

    feed.land(f"{HOUR_11}/visits.json", b"e1\ne2\n")
    with _listed_folders() as reports["folders listed"]:
        reports["first"] = feed.load(
            execution_time="2024-03-01T11:05", require_next_partition=True, now="2024-03-01T11:06"
        )
    reports["hour 10 read"] = [
        bytes(row[0]) for row in feed.bronze().select(F.col("payload").cast("binary")).collect()
    ]
    reports["first ledger"] = feed.ledger().collect()
    reports["again"] = feed.load(**WINDOW_10)

    feed.land(f"{HOUR_10}/packed.json.gz", gzip.compress(b"p1\np2 corrected\n"), modified_at=1_709_294_400)
    feed.land(f"{HOUR_10}/more.json", b"m1\n")
    reports["changed"] = feed.load(**WINDOW_10, now="2024-03-01T11:00")  # a clock that went back
    reports["hour 10 files"] = feed.data_files(HOUR_10)
    reports["hour 11"] = feed.load(**WINDOW_11)
    with pytest.raises(JobFailed) as failure:
        feed.load()
    reports["unreadable"] = str(failure.value)
    return feed


@contextlib.contextmanager
def _listed_folders() -> Iterator[list[str]]:
    """Collect the folders whose files the loader lists meanwhile."""
    listed: list[str] = []
    files = HadoopFolder.files

    def recording(folder: Any, relative: str, is_skipped: Any) -> Iterator[tuple[str, Entry]]:
        listed.append(relative)
        return files(folder, relative, is_skipped)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HadoopFolder, "files", recording)
        yield listed


def test_a_partition_is_not_ready_until_the_next_one_exists(loads: Loads) -> None:
    assert loads.reports["not ready"] == 4
    assert loads.reports["nothing written"]
    assert loads.reports["first"]["lines_written"] == 7


def test_the_execution_time_takes_the_hour_before_and_reads_nothing_else(loads: Loads) -> None:
    # hour=09 holds a file that can't be read: see the last load of the scenario.
    assert loads.reports["folders listed"] == [HOUR_10]
    assert {row.hour for row in loads.reports["first ledger"]} == {10}


def test_each_line_is_kept_byte_by_byte(loads: Loads) -> None:
    assert sorted(loads.reports["hour 10 read"]) == sorted([*ODD_LINES, b"p1", b"p2"])


def test_each_line_knows_its_file_and_its_load(loads: Loads) -> None:
    at = dt.datetime(2024, 3, 1, 11, tzinfo=dt.UTC)
    assert_rows(
        loads.bronze().where("load_id = 2024030110001 and payload = ''"),
        [
            {
                "payload": "",
                "file_path": f"{HOUR_10}/{ODD_NAME}",
                "file_modified_at": at,
                "file_size": len(b"\n".join(ODD_LINES)),
                "load_id": 2024030110001,
                "ingested_at": at + dt.timedelta(minutes=6),
                "date": dt.date(2024, 3, 1),
                "hour": 10,
            }
        ],
    )


def test_the_ledger_holds_every_file_and_no_hidden_one(loads: Loads) -> None:
    names = [ODD_NAME, "packed.json.gz", "empty.json"]
    got = [(row.file_path, row.load_id, row.format_version) for row in loads.reports["first ledger"]]
    assert sorted(got) == sorted((f"{HOUR_10}/{name}", 2024030110001, 1) for name in names)


def test_an_unchanged_file_is_skipped(loads: Loads) -> None:
    again = loads.reports["again"]
    assert (again["files_skipped"], again["lines_written"]) == (3, 0)
    assert again["table_version"] == loads.reports["first"]["table_version"]


def test_a_changed_file_is_appended_under_a_higher_load_id(loads: Loads) -> None:
    changed = loads.reports["changed"]
    assert (changed["files_new"], changed["files_changed"], changed["files_skipped"]) == (1, 1, 2)
    assert_rows(
        loads.bronze().where(f"file_path = '{HOUR_10}/packed.json.gz'").select("payload", "load_id"),
        [
            ("p1", 2024030110001),
            ("p2", 2024030110001),
            ("p1", 2024030110002),
            ("p2 corrected", 2024030110002),
        ],
    )


def test_readers_take_the_newest_version_of_each_file(loads: Loads) -> None:
    loads.bronze().createOrReplaceTempView("bronze_visits")
    loads.ledger().createOrReplaceTempView("bronze_visits_files")
    query = snippet("docs/ingestion.md", f"{THIS}test_readers_take_the_newest_version_of_each_file")
    newest = loads.spark.sql(query).where(~F.col("file_path").contains(ODD_NAME)).select("payload")
    assert_rows(newest, [("p1",), ("p2 corrected",), ("m1",), ("e1",), ("e2",)])


def test_ingested_at_rises_with_every_load_even_if_the_clock_goes_back(loads: Loads) -> None:
    first, second = (
        loads.bronze().where(f"load_id = {n}").agg(F.min("ingested_at"), F.max("ingested_at")).collect()[0]
        for n in (2024030110001, 2024030110002)
    )
    assert first[0] == first[1] < second[0] == second[1]


def test_the_output_keeps_the_partitions_and_leaves_other_hours_alone(loads: Loads) -> None:
    assert loads.reports["hour 11"]["lines_written"] == 2
    assert loads.data_files(HOUR_11)
    assert loads.data_files(HOUR_10) == loads.reports["hour 10 files"]


def test_an_unreadable_file_is_named_and_nothing_is_written(loads: Loads) -> None:
    assert f"{HOUR_9}/cut.json.gz" in loads.reports["unreadable"]
    assert "\n" not in loads.reports["unreadable"]
    assert loads.versions() == 3
    assert loads.bronze().where("hour = 9").isEmpty()


def test_a_load_is_one_commit(loads: Loads) -> None:
    versions = [loads.reports[name]["table_version"] for name in ("first", "changed", "hour 11")]
    assert versions == [0, 1, 2]


# --- load_id ---------------------------------------------------------------------------------------------


def _file(name: str) -> LandingFile:
    return LandingFile(file_path=name, path=name, size=1, modified_at=1)


def test_load_ids_do_not_depend_on_the_order_in_which_hours_are_loaded() -> None:
    ten, eleven = _file(f"{HOUR_10}/a.json"), _file(f"{HOUR_11}/a.json")
    late_hour_first = assign_load_ids([eleven], {}) | assign_load_ids([ten], {2024030111: 2024030111001})
    assert late_hour_first == {ten: 2024030110001, eleven: 2024030111001}
    assert late_hour_first == assign_load_ids([ten, eleven], {})


@pytest.mark.parametrize(
    ("name", "load_id"),
    [("date=2024-03-01/a.json", 2024030100008), ("dataset.json", 8), ("eu/dataset.json", 8)],
)
def test_load_ids_of_days_and_of_folders_without_partitions(name: str, load_id: int) -> None:
    file = _file(name)
    assert assign_load_ids([file], {file.ordinal: load_id - 1}) == {file: load_id}


def test_a_partition_takes_a_million_loads_less_one() -> None:
    file, other = _file(f"{HOUR_10}/a.json"), _file(f"{HOUR_11}/a.json")
    numbers = [2024030110998, 2024030110999, 2024030110001000, 2024030110999998]
    found = [assign_load_ids([file], {file.ordinal: number})[file] for number in numbers]
    assert found == [2024030110999, 2024030110001000, 2024030110001001, 2024030110999999]
    assert assign_load_ids([file, other], {file.ordinal: 2024030110999999}) == {other: 2024030111001}


def test_a_partition_with_999_loads_by_the_first_numbers_takes_more(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table whose partition is full by the numbers of three digits, as a load a minute fills it by 16:39."""
    feed.land(f"{HOUR_10}/a.json", "a\n")
    feed.land(f"{HOUR_10}/b.json", "b\n")
    feed.land(f"{HOUR_11}/c.json", "c\n")
    with monkeypatch.context() as first:
        numbers = {10: 2024030110999, 11: 2024030111001}
        first.setattr(
            incremental_loader,
            "assign_load_ids",
            lambda files, _: {f: numbers[f.partition["hour"]] for f in files},
        )
        feed.load()
    for content in ("a corrected\n", "a corrected again\n"):
        feed.land(f"{HOUR_10}/a.json", content)
        assert feed.load(**WINDOW_10)["files_changed"] == 1
    assert feed.load(**WINDOW_10)["files_skipped"] == 2
    assert feed.load()["files_skipped"] == 3
    assert_rows(
        feed.bronze().select("payload", "load_id"),
        [
            ("a", 2024030110999),
            ("b", 2024030110999),
            ("a corrected", 2024030110001000),
            ("a corrected again", 2024030110001001),
            ("c", 2024030111001),
        ],
    )


def test_a_run_collects_what_is_new_and_not_the_ledger(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"date=2024-03-{day:02d}/hour=10/{number}.json" for day in range(1, 11) for number in range(5)]
    for name in names:
        feed.land(name, f"{name}\n")
    feed.load()
    collected: list[int] = []
    frame: Any = type(feed.bronze())
    collect = frame.collect

    def counting(rows: DataFrame) -> Any:
        found = collect(rows)
        collected.append(len(found))
        return found

    monkeypatch.setattr(frame, "collect", counting)
    feed.land(f"{HOUR_10}/new.json", "new\n")
    feed.land(names[0], "changed!\n")
    report = feed.load()
    assert (report["files_new"], report["files_changed"], report["files_skipped"]) == (1, 1, 49)
    assert max(collected) <= 2, "the files that are new, the partitions that they are in and the other ones"
    for name in names[:20]:
        feed.land(name, "changed again\n")
    assert feed.load()["files_changed"] == 20
    assert max(collected) == 20


def test_a_partition_without_numbers_left_is_refused_alone(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_ten(files: list[LandingFile], before: dict[int, int]) -> dict[LandingFile, int]:
        return {f: i for f, i in assign_load_ids(files, before).items() if HOUR_10 not in f.file_path}

    monkeypatch.setattr(incremental_loader, "assign_load_ids", without_ten)
    feed.land(f"{HOUR_10}/b.json", "4\n")
    feed.land(f"{HOUR_11}/a.json", "5\n")
    with pytest.raises(JobFailed, match=r"date=2024-03-01/hour=10 of .* was left out; all else was loaded"):
        feed.load()
    assert feed.bronze().where("payload = '5'").count() == 1
    assert feed.bronze().where("payload = '4'").count() == 0


def test_an_hour_is_a_number_not_a_text(feed: Feed) -> None:
    feed.land("date=2024-03-01/hour=9/a.json", "nine\n")
    feed.land("date=2024-03-01/hour=10/a.json", "ten\n")
    window = {"from_": "2024-03-01T09", "to": "2024-03-01T10", "require_next_partition": True}
    assert feed.load(**window)["lines_written"] == 1
    feed.land("date=2024-03-01/hour=09/b.json", "nine too\n")
    assert feed.load(**window)["lines_written"] == 1
    with pytest.raises(NotReady, match="partition date=2024-03-01/hour=08 of"):
        feed.load(from_="2024-03-01T08", to="2024-03-01T10")
    assert_rows(feed.bronze().select("payload", "hour"), [("nine", 9), ("nine too", 9)])


@pytest.mark.parametrize("stray", ["late.json", "hour=010/late.json", "hour=24/late.json", "eu/late.json"])
def test_a_file_that_no_hour_has_refuses_a_window_of_its_day(feed: Feed, stray: str) -> None:
    feed.land(f"{HOUR_10}/a.json", "a\n")
    feed.land(f"date=2024-03-01/{stray}", "late\n")
    with pytest.raises(
        DataRefused, match=f"date=2024-03-01/{stray.split('/')[0]} lies in no hour of its day"
    ):
        feed.load(**WINDOW_10)
    assert not Path(feed.target).exists()
    Path(feed.folder, "date=2024-03-01", stray).rename(feed.folder / HOUR_10 / "late.json")
    feed.land("date=2024-03-01/_notes.txt", "hidden\n")
    feed.load(**WINDOW_10)
    assert_rows(feed.bronze().select("payload", "hour"), [("a", 10), ("late", 10)])


# --- other layouts ---------------------------------------------------------------------------------------


def test_a_folder_without_partitions_loads_into_a_table_of_the_catalog(feed: Feed) -> None:
    feed.target = "bronze_users_of_the_test"
    feed.land("dataset.json", "u1\nu2\n")
    assert feed.load()["lines_written"] == 2
    assert feed.load()["lines_written"] == 0
    feed.land("dataset.json", "u1\nu2 changed\n")
    feed.load()
    assert_rows(
        feed.spark.table(feed.target).select("payload", "load_id"),
        [("u1", 1), ("u2", 1), ("u1", 2), ("u2 changed", 2)],
    )
    assert "date" not in feed.spark.table(feed.target).columns
    assert feed.spark.table(f"{feed.target}_files").where("date is null and hour is null").count() == 2


def test_a_day_is_loaded_whole_from_and_to_uris(feed: Feed) -> None:
    feed.land("date=2024-03-01/devices.json", "d1\n")
    feed.land("date=2024-03-02/devices.json", "d2\n")
    day = {"from_": "2024-03-01", "to": "2024-03-02", "grain": "day"}
    run(feed.spark, Parameters(source=f"file://{feed.folder}", target=f"file://{feed.target}", **day))
    assert_rows(
        feed.bronze().select("payload", "load_id", "date"), [("d1", 2024030100001, dt.date(2024, 3, 1))]
    )
    assert_rows(feed.ledger().select("file_path"), [("date=2024-03-01/devices.json",)])


def test_an_empty_hour_is_a_success_that_makes_the_table(feed: Feed) -> None:
    feed.land(f"{HOUR_10}/_SUCCESS", "")
    assert feed.exit_code("--from", "2024-03-01T10", "--to", "2024-03-01T11") == 0
    assert feed.bronze().isEmpty()
    assert feed.bronze().columns[-2:] == ["date", "hour"]
    feed.land(f"{HOUR_10}/empty.json", "")
    assert feed.load(**WINDOW_10)["files_new"] == 1
    assert feed.load(**WINDOW_10)["files_skipped"] == 1


def test_gzip_under_another_name_and_a_byte_order_mark(feed: Feed) -> None:
    packed = gzip.compress(b'{"a": 1}\n', mtime=0)
    feed.land("packed.json", packed)
    feed.land("marked.json", b'\xef\xbb\xbf{"b": 2}\n')
    feed.load()
    payloads = [bytes(row[0]) for row in feed.bronze().select(F.col("payload").cast("binary")).collect()]
    assert sorted(payloads) == sorted([*packed.removesuffix(b"\n").split(b"\n"), b'{"b": 2}'])


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"from_": "2024-03-01T11", "to": "2024-03-01T10"}, "from must be before to"),
        ({"from_": "2024-03-01T11", "to": "2024-03-01T11"}, "from must be before to"),
        ({"from_": "2024-03-01T11"}, "needs both from and to"),
        ({"from_": "yesterday", "to": "2024-03-01"}, "'yesterday' is not a time"),
        ({"from_": "2024-03-01T10:30", "to": "2024-03-01T11"}, "inside a partition"),
        ({"from_": "2024-03-01T10", "to": "2024-03-02", "grain": "day"}, "takes each day whole"),
        ({**WINDOW_10, "execution_time": "2024-03-01T11"}, "not both"),
        ({"mode": "replace_window"}, "needs a window"),
        ({"require_next_partition": True}, "needs a window"),
        ({"target": "landing/visits/bronze"}, "must not lie in one another"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_read(
    parameters: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(WrongUse, match=sentence):
        Parameters(**{"source": "landing/visits", "target": "bronze/visits", **parameters})


def test_a_folder_that_is_not_there(feed: Feed) -> None:
    assert feed.exit_code() == 2
    feed.land(f"{HOUR_10}/a.json", "a\n")
    assert feed.exit_code("--from", "2024-03-01T09", "--to", "2024-03-01T11") == 4
    assert not Path(feed.target).exists()


@pytest.mark.parametrize(
    ("stray", "sentence"),
    [
        ("README.md", "mixes layouts"),
        ("date=2024-13-01/hour=10/a.json", "no date="),
        ("date=2024-03-01/hour=24/a", "no date="),
        ("date=20240301/hour=10/b.json", "no date="),
        ("date=2024-W09-5/hour=10/b.json", "no date="),
        ("date=2024-03-01/hour=010/b.json", "no date="),
        ("eu/date=2024-03-01/hour=10/b.json", "no date="),
        ("date=2024-03-01/eu/hour=10/b.json", "no date="),
    ],
)
def test_a_file_in_the_wrong_place_is_named(feed: Feed, stray: str, sentence: str) -> None:
    feed.land(f"{HOUR_10}/a.json", "a\n")
    feed.land(stray, "stray\n")
    with pytest.raises(DataRefused, match=sentence) as refusal:
        feed.load()
    assert stray.split("/")[-1] in str(refusal.value)


def test_a_target_of_another_schema_is_left_alone(feed: Feed) -> None:
    feed.land(f"{HOUR_10}/a.json", "a\n")
    feed.spark.range(3).write.format("delta").save(feed.target)
    with pytest.raises(WrongUse, match="another schema: it has id bigint; a load needs payload string"):
        feed.load()
    assert feed.versions() == 1


def test_a_target_that_may_not_be_written_is_one_sentence(feed: Feed, tmp_path: Path) -> None:
    feed.land(f"{HOUR_10}/a.json", "a\n")
    read_only = tmp_path / "bronze"
    read_only.mkdir(mode=0o555)
    command = _command(feed)
    if os.getuid() == 0:  # root without its right to pass over permissions is a user like any other
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    end = subprocess.run(command, env=_environment(tmp_path), capture_output=True, text=True, check=False)
    assert end.returncode == 1
    assert "permission denied" in end.stderr.splitlines()[-1]
    assert "Traceback" not in end.stderr
    assert list(read_only.iterdir()) == []


def test_a_full_disk_is_one_sentence(feed: Feed, tmp_path: Path) -> None:
    """The target is a file system of one megabyte, which ends with the process that mounts it."""
    feed.land(f"{HOUR_10}/a.json", "".join(f"{secrets.token_hex(500)}\n" for _ in range(4000)))
    Path(feed.target).mkdir(parents=True)
    mount = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, feed.target, *_command(feed)]
    variables = os.environ | {"SPARK_CONF_DIR": str(small_configuration(tmp_path / "conf"))}
    end = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert end.returncode == 1
    printed = [
        line
        for line in end.stderr.splitlines()
        if line != "WARNING: Using incubator modules: jdk.incubator.vector"
    ]
    assert printed[0].startswith("JobFailed: no space left on the device (")
    assert printed[1:] == []


# --- micro-batches of files -------------------------------------------------------------------------------

AT_10 = dt.datetime.fromtimestamp(1_709_290_800, dt.UTC)  # when Feed.land says that a file was written
LIMITS = {"min_files": 50, "min_bytes": 1000, "max_wait": "15 minutes"}


def test_files_wait_until_they_are_enough(feed: Feed) -> None:
    def load(minutes: float, **limits: Any) -> dict[str, Any]:
        now = (AT_10 + dt.timedelta(minutes=minutes)).isoformat()
        return feed.load(now=now, **(limits or LIMITS))

    for number in range(49):
        feed.land(f"{HOUR_10}/{number}.json", "a\n")
    with pytest.raises(
        NotReady,
        match="49 files of 98 bytes wait, the oldest for 60 seconds; a load takes 50 files or 1000 bytes or a file "
        "that is 15 minutes old; nothing was loaded",
    ):
        load(1)
    assert not Path(feed.target).exists()
    feed.land(f"{HOUR_10}/49.json", "a\n")
    assert load(1)["files_new"] == 50
    assert load(1)["files_new"] == 0

    feed.land(f"{HOUR_10}/alone.json", "a\n")
    with pytest.raises(NotReady, match="1 files of 2 bytes wait, the oldest for 899 seconds"):
        load(14.99)
    with pytest.raises(NotReady, match="a load takes 50 files; nothing"):
        load(1000, min_files=50)
    assert load(15)["files_new"] == 1

    feed.land(f"{HOUR_11}/big.json", "b" * 998 + "\n")
    with pytest.raises(NotReady, match="1 files of 999 bytes wait"):
        load(0)
    feed.land(f"{HOUR_11}/small.json", "b")
    assert load(0)["files_new"] == 2
    assert feed.bronze().count() == 53


def test_a_corrupt_file_of_five_is_set_aside_until_it_is_repaired(feed: Feed) -> None:
    for name in "abcd":
        feed.land(f"{HOUR_10}/{name}.json.gz", gzip.compress(f"{name}\n".encode()))
    feed.land(f"{HOUR_10}/corrupt.json.gz", gzip.compress(os.urandom(5000))[:2000])
    with pytest.raises(JobFailed, match=r"corrupt\.json\.gz.*; nothing was written"):
        feed.load()
    reports = [feed.load(unreadable_files="set_aside", min_files=5), feed.load(unreadable_files="set_aside")]
    assert [(r["lines_written"], r["files_unreadable"], r["files_gone"]) for r in reports] == [
        (4, 1, []),
        (0, 1, []),
    ]
    assert_rows(feed.bronze().select("payload"), [("a",), ("b",), ("c",), ("d",)])
    unreadable = feed.spark.read.format("delta").load(f"{feed.target}_unreadable")
    assert_rows(unreadable.select("file_path", "file_size"), [(f"{HOUR_10}/corrupt.json.gz", 2000)])
    assert "Unexpected end of input stream" in unreadable.first().reason

    feed.land(f"{HOUR_10}/corrupt.json.gz", gzip.compress(b"e\n"), modified_at=1_709_290_900)
    report = feed.load(unreadable_files="set_aside")
    assert (report["lines_written"], report["files_unreadable"]) == (1, 0)


def test_a_file_that_is_gone_when_it_is_read_is_reported(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    read_lines = incremental_loader.read_lines

    def reading(spark: SparkSession, files: Any) -> DataFrame:
        """Between the listing and the read, somebody deletes b."""
        lines = read_lines(spark, files)
        (feed.folder / HOUR_10 / "b.json").unlink(missing_ok=True)
        return lines

    monkeypatch.setattr(incremental_loader, "read_lines", reading)
    for name in "abc":
        feed.land(f"{HOUR_10}/{name}.json", f"{name}\n")
    with pytest.raises(JobFailed, match=r"b\.json"):
        feed.load()
    feed.land(f"{HOUR_10}/b.json", "b\n")
    report = feed.load(unreadable_files="set_aside")
    assert (report["lines_written"], report["files_gone"], report["files_unreadable"]) == (
        2,
        [f"{HOUR_10}/b.json"],
        0,
    )
    assert_rows(feed.bronze().select("payload"), [("a",), ("c",)])
    assert not Path(f"{feed.target}_unreadable").exists()
    feed.land(f"{HOUR_10}/b.json", "b\n")
    monkeypatch.undo()
    assert feed.load(unreadable_files="set_aside")["lines_written"] == 1


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"min_files": 0}, "min_files must be 1 or more, got 0"),
        ({"min_bytes": -1}, "min_bytes must be 1 or more, got -1"),
        ({"max_wait": "soon"}, "'soon' is no duration"),
        ({"min_files": 2, "mode": "replace_window", **WINDOW_10}, "replace_window takes its window whole"),
        ({"unreadable_files": "set_aside", "mode": "replace_window", **WINDOW_10}, "takes its window whole"),
    ],
)
def test_wrong_limits_are_refused(parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WrongUse, match=sentence):
        Parameters(source="landing", target="bronze", **parameters)


# --- two runs at once, and runs that are killed ----------------------------------------------------------


def _command(feed: Feed, *arguments: str) -> list[str]:
    return [sys.executable, str(JOB), "--source", str(feed.folder), "--target", feed.target, *arguments]


def _environment(folder: Path) -> dict[str, str]:
    """A quick small JVM with its temporary files under `folder`."""
    local = f"spark.local.dir={folder}/spark-{os.getuid()}"
    return {**os.environ, **process_environment("--driver-memory", "512m", "--conf", local)}


def test_a_run_that_is_overtaken_loads_only_what_is_left(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    feed.land(f"{HOUR_10}/a.json", "a\n")
    feed.load()
    feed.land(f"{HOUR_10}/b.json", "b\n")
    write_once = incremental_loader.write_once

    def overtaken(*arguments: Any, **options: Any) -> str:
        """Between this run's look at the table and its commit, another run loads b and c arrives."""
        monkeypatch.setattr(incremental_loader, "write_once", write_once)
        assert feed.load()["lines_written"] == 1
        feed.land(f"{HOUR_10}/c.json", "c\n")
        return write_once(*arguments, **options)

    monkeypatch.setattr(incremental_loader, "write_once", overtaken)
    assert feed.load()["lines_written"] == 1
    assert_rows(
        feed.bronze().select("payload", "load_id"),
        [("a", 2024030110001), ("b", 2024030110002), ("c", 2024030110003)],
    )
    assert feed.ledger().count() == 3


def test_the_ledger_knows_the_runs_of_a_target_that_was_dropped_and_loaded_again(feed: Feed) -> None:
    for name in ("a", "b", "c"):
        feed.land(f"{HOUR_10}/{name}.json", f"{name}\n")
        feed.load()
    shutil.rmtree(feed.target)
    feed.load()
    assert feed.load()["files_skipped"] == 3
    assert feed.ledger().count() == 6, "its own runs, of which there are fewer, and those of the table before"


def test_two_processes_at_once_load_each_file_once(feed: Feed, tmp_path: Path) -> None:
    for number in range(4):
        feed.land(f"{HOUR_10}/{number}.json", f"{number}\n")
    processes = [
        subprocess.Popen(_command(feed), env=_environment(tmp_path), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    reports = [json.loads(p.communicate(timeout=180)[0].splitlines()[-1]) for p in processes]
    assert [p.returncode for p in processes] == [0, 0]
    assert sorted(report["lines_written"] for report in reports) == [0, 4]
    assert_rows(feed.bronze().select("payload"), [("0",), ("1",), ("2",), ("3",)])
    assert feed.ledger().count() == 4


@pytest.mark.kill
def test_a_killed_run_is_completed_by_the_next(half_loaded: Feed, tmp_path: Path) -> None:
    feed = half_loaded
    state = run_and_kill(_command(feed), feed.target, TableState.DATA_WITHOUT_LOG, env=_environment(tmp_path))
    assert state is TableState.DATA_WITHOUT_LOG
    assert_rows(feed.bronze().select("payload"), [("a",)])
    assert feed.load()["lines_written"] == 1
    feed.holds({f"{HOUR_9}/a.json": "a", f"{HOUR_10}/b.json": "b"})


def test_a_run_that_ends_before_its_ledger_is_completed_by_the_next(half_loaded: Feed) -> None:
    feed = half_loaded
    with failing_at(f"{feed.target}_files", incremental_loader, "write_once", KeyboardInterrupt()):
        feed.load()
    assert_rows(feed.ledger().select("file_path"), [(f"{HOUR_9}/a.json",)])
    assert feed.load()["lines_written"] == 0
    feed.holds({f"{HOUR_9}/a.json": "a", f"{HOUR_10}/b.json": "b"})


def test_a_lost_ledger_is_rebuilt_from_bronze(feed: Feed) -> None:
    feed.land(f"{HOUR_10}/a.json", "a\n")
    feed.load()
    feed.land(f"{HOUR_10}/a.json", "a corrected\n")
    feed.load()
    before = feed.ledger().collect()
    shutil.rmtree(f"{feed.target}_files")
    assert feed.load()["files_skipped"] == 1
    assert_rows(feed.ledger(), before)
    assert feed.bronze().count() == 2


# --- replace_window --------------------------------------------------------------------------------------


def _stream(feed: Feed, checkpoint: Path) -> list[str]:
    """Read what is new in the bronze table as a stream; return its payloads."""
    seen: list[str] = []
    query = (
        feed.spark.readStream.format("delta")
        .load(feed.target)
        .writeStream.foreachBatch(lambda rows, _: seen.extend(row.payload for row in rows.collect()))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return seen


def test_a_stream_reads_on_after_an_appended_correction(feed: Feed, tmp_path: Path) -> None:
    feed.land(f"{HOUR_10}/a.json", "a\n")
    feed.load(**WINDOW_10)
    assert _stream(feed, tmp_path / "checkpoint") == ["a"]
    feed.land(f"{HOUR_10}/a.json", "a corrected\n")
    feed.load(**WINDOW_10)
    assert _stream(feed, tmp_path / "checkpoint") == ["a corrected"]
    feed.land(f"{HOUR_10}/a.json", "a corrected again\n")
    with pytest.raises(WrongUse, match="only appends"):
        feed.load(**WINDOW_10, mode="replace_window")


def test_a_replaced_window_holds_what_landed_and_ends_a_stream(feed: Feed, tmp_path: Path) -> None:
    feed.land(f"{HOUR_10}/a.json", "a\n")
    feed.land(f"{HOUR_10}/gone.json", "gone\n")
    feed.land(f"{HOUR_11}/b.json", "b\n")
    for window in (WINDOW_10, WINDOW_11):
        feed.load(**window, mode="replace_window")
    assert sorted(_stream(feed, tmp_path / "checkpoint")) == ["a", "b", "gone"]
    other_hour = feed.data_files(HOUR_11)

    feed.land(f"{HOUR_10}/a.json", "a corrected\n")
    (feed.folder / HOUR_10 / "gone.json").unlink()
    assert [feed.load(**WINDOW_10, mode="replace_window")["lines_written"] for _ in range(2)] == [1, 0]
    feed.holds({f"{HOUR_10}/a.json": "a corrected", f"{HOUR_11}/b.json": "b"})
    assert feed.data_files(HOUR_11) == other_hour
    with pytest.raises(StreamingQueryException, match="DELTA_SOURCE_TABLE_IGNORE_CHANGES"):
        _stream(feed, tmp_path / "checkpoint")

    (feed.folder / HOUR_10 / "a.json").unlink()
    feed.load(**WINDOW_10, mode="replace_window")
    assert_rows(feed.bronze().select("payload"), [("b",)])


# --- the page --------------------------------------------------------------------------------------------


def test_the_command_of_the_page(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    command = snippet("docs/ingestion.md", f"{THIS}test_the_command_of_the_page")
    words = command.replace("\\\n", " ").split()
    assert words[:2] == ["spark-submit", str(JOB.relative_to(REPOSITORY))]
    paths = {"landing/visits": str(feed.folder), "$LAKEHOUSE_ROOT/bronze/bronze_visits": feed.target}
    feed.land(f"{HOUR_10}/a.json", "a\n")
    feed.land(f"{HOUR_11}/b.json", "b\n")
    with pytest.raises(SystemExit) as end:
        run_job(Parameters, run, [paths.get(word, word) for word in words[2:]])
    assert end.value.code == 0
    assert_rows(feed.bronze().select("payload"), [("a",)])
