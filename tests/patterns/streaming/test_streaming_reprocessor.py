"""Streaming Reprocessor: a query continues from an earlier batch, with its state, as if the bad one had not been."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from confluent_kafka import TopicPartition
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.data_value import stateful_sessionizer
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.delta.checkpoints import Restored, claim, write_restored
from python_jobs.shared.delta.state_stores import STATE_STORE
from python_jobs.shared.delta.streams import BatchFunction, append, await_end, batch_options, start_query
from python_jobs.shared.kafka.settings import consumer_settings
from python_jobs.shared.kafka.topics import read_topics
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.shared.spark.session import settings
from python_jobs.streaming import streaming_reprocessor as job
from services.kafka import Broker, Record
from tests.support.page_commands import command_words
from tests.support.rows import assert_rows
from tests.support.session_streams import SessionStream, at
from tests.support.snippets import snippet, snippets
from tests.support.waiting import eventually

PAGE = "docs/streaming.md"
HERE = "tests/patterns/streaming/test_streaming_reprocessor.py"
COMMANDS = snippets(PAGE, f"{HERE}::test_the_sink_equals_a_run_without_the_bug")


def reprocess(spark: SparkSession, words: list[str], **changes: str) -> dict[str, Any]:
    for name, value in changes.items():
        words = [*words, f"--{name}", value]
    return job.run(spark, parse_parameters(job.Parameters, words)[0])


# --- sessions: RocksDB, a Delta table as source and one as sink ----------------------------------------------

# Of a visit, a time and a page. The bad release knows the first letter of a visit alone.
GOOD: list[list[tuple[Any, str, str]]] = [
    [("early", "10:00", "a")],
    [("early", "10:05", "b")],
    [("span", "10:20", "a")],
    [("span", "10:24", "b")],
    [("span", "10:28", "c"), ("x1", "10:28", "a")],
]
BAD: list[list[tuple[Any, str, str]]] = [
    [("span", "10:33", "d"), ("x1", "10:34", "b"), ("x2", "10:34", "a"), (None, "10:34", "nobody's")],
    [("y", "10:40", "a"), ("z", "10:40", "a")],
    [("last", "12:00", "a")],
]


class Releases(SessionStream):
    """A stream of sessions, and the page's commands on it."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        super().__init__(spark, folder, stateful_sessionizer, COMMANDS[2])
        self.checkpoint = str(folder / "checkpoints/live_sessions")

    def add(self, batches: list[list[tuple[Any, str, str]]]) -> None:
        for batch in batches:
            self.append(*((visit, at(clock), page) for visit, clock, page in batch))

    def command(self, number: int, **changes: str) -> dict[str, Any]:
        """Run one of the page's commands of this job."""
        words = command_words(COMMANDS[number], self.folder)
        return reprocess(self.spark, words, **({"quiet_seconds": "0"} | changes))

    def restore(self, to: str) -> dict[str, Any]:
        return self.command(1, to=str(self.folder / to))

    def sessions(self) -> list[tuple[Any, ...]]:
        rows = self.table("live_sessions").orderBy("started_at", "visit_id").collect()
        return [(row.visit_id, "".join(row["values"]), row.release) for row in rows]


@pytest.fixture(scope="module")
def stream(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Releases:
    return Releases(spark, tmp_path_factory.mktemp("releases [1], {a} b"))


@dataclass(frozen=True)
class Bad:
    """What release 2 has left."""

    before: list[tuple[Any, ...]]
    sessions: list[tuple[Any, ...]]
    rows: DataFrame
    record: dict[str, Any]


@pytest.fixture(scope="module")
def bad(stream: Releases) -> Bad:
    """Run release 1 for the batches 0 to 4, record it, and run the bad release 2 for three more files."""
    stream.add(GOOD)
    with settings(stream.spark, {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}):
        stream.run(checkpoint=stream.checkpoint, release="1", origin="real_time", max_files_per_trigger="1")
    before, record = stream.sessions(), stream.command(0)
    stream.add(BAD)
    sessions = stateful_sessionizer.sessions

    def with_the_bug(records: DataFrame, params: Any) -> DataFrame:
        return sessions(records.selectExpr("substr(visit, 1, 1) as visit", "at", "page", "position"), params)

    with patch.object(stateful_sessionizer, "sessions", with_the_bug):
        stream.run(checkpoint=stream.checkpoint, release="2", origin="real_time", max_files_per_trigger="1")
    return Bad(before, stream.sessions(), stream.rows_now("live_sessions"), record)


@pytest.fixture(scope="module")
def tenant(stream: Releases, bad: Bad) -> DataFrame:
    """Correct the visit x1 alone, and return the rows."""
    stream.restore("checkpoints/tenant")
    report = stream.run(checkpoint=str(stream.folder / "checkpoints/tenant"), only="visit_id = 'x1'")
    assert (report["sessions_written"], report["dead"]) == (1, 0)
    assert stream.table("visits_without_session").count() == 1
    return stream.rows_now("live_sessions")


@pytest.fixture(scope="module")
def corrected(stream: Releases, tenant: DataFrame) -> list[tuple[Any, ...]]:
    """Run the page's commands up to the corrected release; return the sessions that it leaves."""
    dry = stream.command(1, publish="false")
    assert not (stream.folder / "checkpoints/live_sessions_v3").exists()
    assert stream.command(1)["copies"] == dry["copies"]
    with pytest.raises(NotReady, match=r"is at .* in source 0, the bad release was at .*: wait until"):
        stream.command(3)
    with pytest.raises(
        WrongUse, match=r"was restored to batch 4, .* would append their rows again; allow that"
    ):
        stream.run(start_over="false")
    stream.run()
    assert stream.table("visits_without_session").count() == 2, "one of each lineage: none is skipped"
    return stream.sessions()


@pytest.fixture(scope="module")
def repaired(stream: Releases, corrected: list[tuple[Any, ...]]) -> dict[str, Any]:
    assert stream.command(3, publish="false")["rows"] == 2
    assert stream.sessions() == corrected, "nothing was written"
    return stream.command(3)


EXPECTED = [
    ("early", "ab", 1),
    ("span", "abcd", 3),
    ("x1", "ab", 3),
    ("x2", "a", 3),
    ("y", "a", 3),
    ("z", "a", 3),
]


def test_the_bad_release_publishes_other_sessions(bad: Bad) -> None:
    assert bad.before == [("early", "ab", 1)]
    assert bad.sessions == [
        ("early", "ab", 1),
        ("span", "abc", 2),
        ("x1", "a", 2),
        ("s", "d", 2),
        ("x", "ba", 2),
        ("y", "a", 2),
        ("z", "a", 2),
    ]


def test_the_sink_equals_a_run_without_the_bug(stream: Releases, repaired: dict[str, Any]) -> None:
    stream.run(
        target=str(stream.folder / "control"),
        dead_letter=str(stream.folder / "control_dead"),
        checkpoint=str(stream.folder / "checkpoints/control"),
        variant="session_window",
    )
    told = ("release", "origin", "written_at")
    assert stream.sessions() == EXPECTED
    assert_rows(stream.table("live_sessions").drop(*told), stream.table("control").drop(*told))


def test_sessions_that_only_the_bad_release_found_are_deleted(
    corrected: list[tuple[Any, ...]], repaired: dict[str, Any]
) -> None:
    assert set(corrected) - set(EXPECTED) == {("s", "d", 2), ("x", "ba", 2)}
    assert (repaired["rows"], repaired["published"]) == (2, True)


def test_one_tenant_is_corrected_alone(stream: Releases, bad: Bad, tenant: DataFrame) -> None:
    assert_rows(tenant.where("visit_id = 'x1'").select("values", "release"), [(["a", "b"], 3)])
    # written_at included
    assert_rows(tenant.where("visit_id <> 'x1'"), bad.rows.where("visit_id <> 'x1'"))


def test_a_second_reprocessing_changes_no_row(stream: Releases, repaired: dict[str, Any]) -> None:
    before = stream.rows_now("live_sessions")
    assert stream.command(1)["was_restored"], "the same restore does nothing"
    stream.restore("checkpoints/again")
    stream.run(checkpoint=str(stream.folder / "checkpoints/again"), now=at("15:00"))
    assert stream.command(3)["rows"] == 0
    assert_rows(stream.table("live_sessions"), before)  # written_at included


def test_a_restored_checkpoint_is_another_lineage(stream: Releases, corrected: list[tuple[Any, ...]]) -> None:
    def read(checkpoint: str, name: str) -> Any:
        return json.loads((stream.folder / "checkpoints" / checkpoint / name).read_text())

    old, new = (read(name, "owner.json") for name in ("live_sessions", "live_sessions_v3"))
    assert {role for role in old if old[role] != new[role]} == {"writer_id"}


def test_the_state_s_schema_is_that_of_the_new_folder(
    stream: Releases, corrected: list[tuple[Any, ...]]
) -> None:
    """Spark writes absolute paths; with the old ones the query would need the old checkpoint."""
    old, new = (stream.folder / "checkpoints" / name for name in ("live_sessions", "live_sessions_v3"))
    texts = [path.read_text() for path in (new / "state").glob("*/_metadata/v2/[0-9]*")]
    assert texts
    assert all(f"{new}/state/0/_stateSchema/" in text and f"{old}/" not in text for text in texts)


def test_a_release_is_recorded_once(stream: Releases, bad: Bad) -> None:
    assert bad.record["batch_id"] == 4
    assert stream.command(0, batch="4")["batch_id"] == 4
    with pytest.raises(WrongUse, match=r"'v1' is recorded as batch 4 of .*, not 5"):
        stream.command(0, batch="5")
    with pytest.raises(WrongUse, match=r"no release 'v9' is recorded in .*, which has v1"):
        stream.command(1, name="v9")


def test_rows_are_deleted_only_beside_corrected_ones(stream: Releases, repaired: dict[str, Any]) -> None:
    for changes, error, sentence in [
        (
            {"corrected_rows": "release = 9"},
            NotReady,
            "has no row with release = 9: run the corrected release",
        ),
        ({"bad_rows": "realise = 2"}, WrongUse, "a condition can't be resolved: .*realise"),
        ({"bad_rows": "release ="}, WrongUse, "a condition can't be resolved"),
        ({"checkpoint": stream.checkpoint}, WrongUse, "isn't a restored checkpoint"),
        ({"target": str(stream.folder / "absent")}, NotReady, "there is no Delta table"),
    ]:
        with pytest.raises(error, match=sentence):
            stream.command(3, **changes)
    with pytest.raises(WrongUse, match=r"only can't be resolved: .*tenant"):
        stream.run(only="tenant = 'a'")


def test_rows_that_a_restored_query_would_append_again_are_noticed(
    spark: SparkSession, tmp_path: Path
) -> None:
    table, contract = str(tmp_path / "table"), {"job": "words"}
    writer = claim(spark, str(tmp_path / "old"), contract, [table])
    append(spark.range(1).coalesce(1), table, batch_options(writer, 5))
    for batch in (4, 5):
        folder = HadoopFolder(spark, str(tmp_path / f"restored_to_{batch}"))
        write_restored(folder, Restored("old", batch, at("12:00"), contract, []))
    with pytest.raises(WrongUse, match=r"was restored to batch 4, and this query has appended later batches"):
        claim(spark, str(tmp_path / "restored_to_4"), contract, [table])
    assert claim(spark, str(tmp_path / "restored_to_4"), contract, [table], start_over=True) != writer
    assert claim(spark, str(tmp_path / "restored_to_5"), contract, [table]) != writer
    with pytest.raises(WrongUse, match="was made for another job"):
        claim(spark, str(tmp_path / "restored_to_5"), {"job": "lines"})


TABLE = {"reservoirId": "a", "reservoirVersion": 8, "index": 2}


@pytest.mark.parametrize(
    ("position", "goal", "reached"),
    [
        (None, None, True),
        (None, TABLE, False),
        (TABLE, None, True),
        (TABLE, TABLE, True),
        (TABLE | {"index": 1}, TABLE, False),
        (TABLE | {"reservoirVersion": 9, "index": -1}, TABLE, True),
        (TABLE | {"reservoirVersion": 7, "index": 5}, TABLE, False),
        (TABLE | {"reservoirId": "b", "reservoirVersion": 9}, TABLE, False),
        ({"t": {"0": 5, "1": 3}}, {"t": {"0": 5, "1": 2}}, True),
        ({"t": {"0": 6, "1": 1}}, {"t": {"0": 5, "1": 2}}, False),
        ({"t": {"0": 6}}, {"t": {"0": 5, "1": 0}}, False),
        ({"logOffset": 3}, {"logOffset": 3}, True),
        ({"logOffset": 4}, {"logOffset": 3}, False),  # numbers of another lineage
    ],
)
def test_a_position_is_compared_where_positions_have_an_order(
    position: Any, goal: Any, reached: bool
) -> None:
    assert job.is_reached(position, goal) is reached


# --- a counter: the HDFS provider, two operators, two partitions, a source of files ---------------------------

# The words of each file, with ids: a word of an id that was there isn't counted.
FILES = [[("a", 1)], [("a", 2), ("b", 3)], [("a", 4), ("a", 1)], [("b", 5)], [("a", 6)]]
COUNTS = [{"a": 1}, {"a": 2, "b": 1}, {"a": 3}, {"b": 2}, {"a": 4}]


class Counts(BatchFunction):
    """The counts that each batch passes on."""

    def __init__(self) -> None:
        self.batches: dict[int, dict[str, int]] = {}

    def write(self, rows: DataFrame, batch_id: int) -> None:
        self.batches[batch_id] = {row[0]: row[1] for row in rows.collect()}


class WordCount:
    """A folder of files, and a query that counts their words."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder, self.checkpoint = spark, folder, folder / "checkpoint [1], {a} b"
        (folder / "words").mkdir()

    def add(self, number: int) -> None:
        path = self.folder / "words" / f"{number}.json"
        path.write_text("\n".join(json.dumps({"word": word, "id": n}) for word, n in FILES[number]))
        os.utime(path, (1_700_000_000 + number,) * 2)  # Spark reads files in the order of their times

    def start(
        self, checkpoint: Path, files: int | None = None, trigger: str | None = None
    ) -> tuple[StreamingQuery, Counts]:
        reader, counts = self.spark.readStream.schema("word string, id int"), Counts()
        if files is not None:
            reader = reader.option("maxFilesPerTrigger", files)
        words = reader.json(str(self.folder / "words")).dropDuplicates(["id"]).groupBy("word").count()
        return start_query(words, counts, str(checkpoint), trigger, "update"), counts

    def reprocess(self, **changes: str) -> dict[str, Any]:
        words = ["--action", "restore", "--checkpoint", str(self.checkpoint), "--quiet_seconds", "0"]
        return reprocess(self.spark, words, **changes)

    def lineage(self, checkpoint: Path) -> dict[str, bytes]:
        """Return the files of Spark's own, but for the query's id."""
        files = {str(path.relative_to(checkpoint)): path for path in checkpoint.rglob("*") if path.is_file()}
        return {
            name: path.read_bytes()
            for name, path in files.items()
            if name.split("/")[0] in ("offsets", "commits", "sources", "state")
        }


@contextmanager
def failing(method: str, call: int) -> Iterator[None]:
    """Fail at a call of one method of the checkpoint's folder."""
    original, calls = getattr(HadoopFolder, method), Counter[str]()

    def counted(folder: HadoopFolder, *arguments: Any) -> Any:
        calls[method] += 1
        if calls[method] == call:
            raise ConnectionResetError
        return original(folder, *arguments)

    with patch.object(HadoopFolder, method, counted), pytest.raises(ConnectionResetError):
        yield


@pytest.fixture(scope="module")
def words(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> WordCount:
    """Count five files in five batches, of which Spark keeps the last three and the one before."""
    words = WordCount(spark, tmp_path_factory.mktemp("words"))
    for number in range(len(FILES)):
        words.add(number)
    with settings(
        spark,
        {
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.streaming.minBatchesToRetain": "3",
            "spark.sql.streaming.asyncLogPurge.enabled": "false",
        },
    ):
        query, counts = words.start(words.checkpoint, files=1)
        await_end(query, counts, "words")
    assert counts.batches == dict(enumerate(COUNTS))
    return words


@pytest.fixture(scope="module")
def in_new_folder(words: WordCount) -> dict[str, bytes]:
    words.reprocess(batch="2", to=str(words.folder / "new"), publish="true")
    return words.lineage(words.folder / "new")


def test_only_the_files_of_the_batch_are_copied(words: WordCount, in_new_folder: dict[str, bytes]) -> None:
    assert {name for name in in_new_folder if name.startswith(("offsets/", "commits/", "sources/"))} == {
        *(
            f"{log}/{prefix}{batch}{end}"
            for log in ("offsets", "commits")
            for batch in (1, 2)
            for prefix, end in CRC
        ),
        *(f"sources/0/{prefix}{number}{end}" for number in (0, 1, 2) for prefix, end in CRC),
    }
    stores = {name.rpartition("/")[0] for name in in_new_folder if name.endswith(".delta")}
    assert stores == {"state/0/0", "state/0/1", "state/1/0", "state/1/1"}, "all operators and partitions"
    for store in stores:
        versions = {name for name in in_new_folder if name.startswith(f"{store}/") and ".delta" in name}
        assert versions == {f"{store}/{prefix}{v}.delta{end}" for v in (1, 2, 3) for prefix, end in CRC}
    old = words.lineage(words.checkpoint)
    assert {name: old[name] for name in in_new_folder} == in_new_folder


CRC = [("", ""), (".", ".crc")]


def test_a_restored_query_has_another_id(words: WordCount, in_new_folder: dict[str, bytes]) -> None:
    """Delta's streaming sink recognizes a batch by the query's id and its number, and would skip the corrected one."""
    old, new = ((folder / "metadata").read_text() for folder in (words.checkpoint, words.folder / "new"))
    assert set(json.loads(old)) == set(json.loads(new)) == {"id"}
    assert old != new


def test_a_failed_copy_leaves_nothing_behind(words: WordCount, in_new_folder: dict[str, bytes]) -> None:
    before, names = words.lineage(words.checkpoint), sorted(path.name for path in words.folder.iterdir())
    with failing("copy_file", 4):
        words.reprocess(batch="2", to=str(words.folder / "half"), publish="true")
    assert sorted(path.name for path in words.folder.iterdir()) == names
    assert words.lineage(words.checkpoint) == before


def test_a_batch_that_is_not_there_is_refused(words: WordCount, spark: SparkSession) -> None:
    to = {"to": str(words.folder / "never")}
    for batch, sentence in [
        ("5", "batch 5 is newer than the last completed batch of .*, 4"),
        (
            "0",
            "batch 0 isn't in .* any more, which has the batches 1 to 4: restore a copy .*Batch Reprocessor",
        ),
        ("1", "batch 1 isn't in .* any more"),  # Spark needs the offsets of the batch before
    ]:
        with pytest.raises(WrongUse, match=sentence):
            words.reprocess(batch=batch, publish="true", **to)
    listed = reprocess(spark, ["--checkpoint", str(words.checkpoint)])["batches"]
    assert [(batch["batch_id"], batch["can_be_restored"]) for batch in listed] == [
        (1, False),
        (2, True),
        (3, True),
        (4, True),
    ]
    assert [batch["sources"] for batch in listed[1:]] == [[{"logOffset": n}] for n in (2, 3, 4)]
    with pytest.raises(NotReady, match="there is no checkpoint of a query"):
        reprocess(spark, ["--checkpoint", str(words.folder / "absent")])
    for changes, sentence in [
        ({"batch": "2"}, "takes either to, a new folder, or backup"),
        ({"batch": "2", "name": "v1", **to}, "takes either batch or name"),
        ({"batch": "2", "to": str(words.folder / "words")}, "exists already"),
        ({"batch": "2", "to": str(words.checkpoint / "old")}, "lies in the checkpoint itself"),
        ({"batch": "2", "backup": str(words.checkpoint / "old")}, "lies in the checkpoint itself"),
        ({"name": "../v1", **to}, "name must be letters"),
    ]:
        with pytest.raises(WrongUse, match=sentence):
            words.reprocess(publish="true", **changes)


@pytest.mark.parametrize("lost", ["sources/0/1", "state/0/1/2.delta", "state/1/0/3.delta", "state/1/1"])
def test_a_batch_of_which_a_file_is_gone_is_refused(
    words: WordCount, spark: SparkSession, tmp_path: Path, lost: str
) -> None:
    shutil.copytree(words.checkpoint, tmp_path / "copy")
    path = tmp_path / "copy" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(JobFailed, match=rf"{lost.rpartition('/')[0]}.* has no .*Batch Reprocessor"):
        words.reprocess(checkpoint=str(tmp_path / "copy"), batch="2", to=str(tmp_path / "to"))


def test_a_checkpoint_that_changes_is_refused(words: WordCount) -> None:
    to = {"batch": "2", "publish": "true", "to": str(words.folder / "never")}
    with pytest.raises(
        NotReady, match=r"has a file of \d+ seconds ago, .*: stop its query and wait 600 seconds"
    ):
        words.reprocess(quiet_seconds="600", **to)
    copy, begun = HadoopFolder.copy_file, words.checkpoint / "offsets/5"

    def begin_a_batch(folder: HadoopFolder, *arguments: Any) -> None:
        begun.write_text("v1")
        copy(folder, *arguments)

    with (
        patch.object(HadoopFolder, "copy_file", begin_a_batch),
        pytest.raises(NotReady, match="has gone on meanwhile: stop it first"),
    ):
        words.reprocess(**to)
    begun.unlink()
    assert not (words.folder / "never").exists()


@pytest.fixture(scope="module")
def in_place(words: WordCount, in_new_folder: dict[str, bytes], spark: SparkSession) -> WordCount:
    """Clean a copy of the checkpoint in place; the first try fails when it has deleted two files."""
    before, cleaned = words.lineage(words.checkpoint), words.folder / "cleaned"
    shutil.copytree(words.checkpoint, cleaned)
    arguments = {"checkpoint": str(cleaned), "batch": "2", "backup": str(words.folder / "backup")}
    dry = words.reprocess(**arguments)
    assert words.lineage(cleaned) == before
    assert not (words.folder / "backup").exists()
    with failing("delete", 4):  # the back-up's staging folder, then files
        words.reprocess(publish="true", **arguments)
    assert words.lineage(words.folder / "backup") == before
    assert set(words.lineage(cleaned)) < set(before), "files are gone"
    with pytest.raises(NotReady, match="its restore was interrupted: run the restore again"):
        claim(spark, str(cleaned), {"job": "words"})
    with pytest.raises(WrongUse, match=r"to batch 2 with the back-up .* was interrupted"):
        words.reprocess(publish="true", **arguments | {"batch": "3", "backup": str(words.folder / "b")})
    words.reprocess(publish="true", **arguments)
    assert words.reprocess(publish="true", **arguments)["was_restored"], "the same restore does nothing"
    deleted = set(before) - set(words.lineage(cleaned))
    assert {name for name in deleted if not name.endswith(".crc")} == set(dry["deletes"])
    return words


def test_a_checkpoint_cleaned_in_place_has_the_files_of_a_new_one(
    words: WordCount, in_new_folder: dict[str, bytes], in_place: WordCount
) -> None:
    assert words.lineage(words.folder / "cleaned") == in_new_folder


def test_a_back_up_can_be_restored_again(in_place: WordCount, in_new_folder: dict[str, bytes]) -> None:
    folder = in_place.folder
    in_place.reprocess(checkpoint=str(folder / "backup"), batch="2", to=str(folder / "from"), publish="true")
    assert in_place.lineage(folder / "from") == in_new_folder


def test_counts_continue_and_the_batches_have_other_numbers(in_place: WordCount) -> None:
    """The file source would skip the files that its lists have, so these are restored as well."""
    query, counts = in_place.start(in_place.folder / "new")
    await_end(query, counts, "words")
    assert counts.batches == {3: {"a": 4, "b": 2}}, "one batch, where there were two"


def test_a_running_query_is_refused(in_place: WordCount) -> None:
    query, counts = in_place.start(in_place.folder / "cleaned", trigger="1 hour")
    try:
        eventually(lambda: bool(counts.batches))
        with pytest.raises(NotReady, match=r"the query of .* is running: stop it first"):
            in_place.reprocess(
                checkpoint=str(in_place.folder / "cleaned"), batch="2", to=str(in_place.folder / "n")
            )
    finally:
        query.stop()


# --- a topic: RocksDB with checkpoint format 2 ---------------------------------------------------------------

# Words by partition, each with the minute of its record; partition 2 is empty.
TOPIC = {0: [("a", 0), ("a", 5), ("b", 10), ("a", 15)], 1: [("c", 0), ("c", 20)]}
SINCE = {0: 2, 1: 1, 2: 0}


class Topic:
    """A topic of words, and a query that counts them, or passes them on."""

    def __init__(self, spark: SparkSession, broker: Broker, folder: Path, name: str) -> None:
        self.spark, self.broker, self.folder, self.name = spark, broker, folder, name
        broker.create_topic(name, 3, {"retention.ms": "-1"})
        broker.produce(
            name,
            [
                Record(word.encode(), partition=partition, timestamp=1_704_103_200_000 + minute * 60_000)
                for partition, records in TOPIC.items()
                for word, minute in records
            ],
        )

    def start_at(self, **changes: str) -> dict[str, Any]:
        text = snippet(PAGE, f"{HERE}::test_the_start_of_a_time_is_found_in_each_partition")
        text = text.replace("localhost:9092", self.broker.bootstrap_servers)
        words = command_words(text, self.folder)
        return reprocess(self.spark, words, **({"topic": self.name} | changes))

    def run(
        self,
        checkpoint: str,
        offsets: Mapping[int, int] | None,
        *,
        counts: bool = True,
        records: int | None = None,
    ) -> dict[int, dict[str, int]]:
        """Run the query to the topic's end; return what its batches passed on."""
        client = consumer_settings(self.broker.bootstrap_servers, {})
        starting = {(self.name, partition): offset for partition, offset in (offsets or {}).items()}
        rows = read_topics(self.spark, [self.name], client, starting or None, records)
        words = rows.selectExpr("cast(value as string) as word", "offset")
        found = Counts()
        with settings(
            self.spark, STATE_STORE | {"spark.sql.streaming.stateStore.checkpointFormatVersion": "2"}
        ):
            query = start_query(
                words.groupBy("word").count() if counts else words.selectExpr("word || offset", "1"),
                found,
                str(self.folder / checkpoint),
                None,
                "update" if counts else "append",
            )
            await_end(query, found, self.name)
        return found.batches

    def restore(self, to: str) -> dict[str, Any]:
        words = ["--action", "restore", "--checkpoint", str(self.folder / "all"), "--quiet_seconds", "0"]
        words += ["--bootstrap_servers", self.broker.bootstrap_servers, "--batch", "0", "--publish", "true"]
        return reprocess(self.spark, [*words, "--to", str(self.folder / to)])


@pytest.fixture(scope="module")
def topic_of_words(spark: SparkSession, broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Topic:
    return Topic(spark, broker, tmp_path_factory.mktemp("topic"), "reprocessed_words")


@pytest.fixture(scope="module")
def counted(topic_of_words: Topic) -> dict[int, dict[str, int]]:
    """Count all words from the beginning, some at a time."""
    return topic_of_words.run("all", {0: -2, 1: -2, 2: -2}, records=3)


@pytest.mark.kafka
def test_the_start_of_a_time_is_found_in_each_partition(topic_of_words: Topic) -> None:
    report = topic_of_words.start_at()
    assert report["offsets"] == SINCE, "the end of partition 2, which has no record"
    assert report["records"] == {0: 2, 1: 1, 2: 0}
    assert topic_of_words.start_at(since="2024-01-01T10:16:00Z")["offsets"] == {0: 4, 1: 1, 2: 0}
    assert json.loads(report["starting_offsets"]) == {topic_of_words.name: {"0": 2, "1": 1, "2": 0}}


@pytest.mark.kafka
def test_a_restored_query_keeps_its_counts_and_ignores_starting_offsets(
    topic_of_words: Topic, counted: dict[int, dict[str, int]]
) -> None:
    assert len(counted) > 1
    expected: dict[str, int] = {}
    for batch in sorted(counted):
        expected |= counted[batch]
    assert expected == {"a": 3, "b": 1, "c": 2}
    topic_of_words.restore("restored")
    state = topic_of_words.folder / "restored/state/0/0"
    assert all("_" in path.name for path in state.glob("[0-9]*")), "checkpoint format 2"
    # With these offsets alone nothing would be read.
    (found,) = topic_of_words.run("restored", {0: 4, 1: 2, 2: 0}).values()
    assert counted[0] | found == expected
    with pytest.raises(WrongUse, match="has progress, with which Spark ignores starting offsets"):
        topic_of_words.start_at(checkpoint=str(topic_of_words.folder / "restored"))


@pytest.mark.kafka
def test_a_new_checkpoint_loses_the_state_of_a_query_that_has_one(
    topic_of_words: Topic, counted: dict[int, dict[str, int]]
) -> None:
    (stateful,) = topic_of_words.run("fresh", SINCE).values()
    assert stateful == {"a": 1, "b": 1, "c": 1}, "a is 3, and c is 2, since the beginning"
    (stateless,) = topic_of_words.run("stateless", SINCE, counts=False).values()
    assert set(stateless) == {"b2", "a3", "c1"}


@pytest.mark.kafka
def test_a_start_before_the_retention_is_refused(
    topic_of_words: Topic, counted: dict[int, dict[str, int]]
) -> None:
    """The last test of the topic: it deletes the records before offset 3."""
    expired = TopicPartition(topic_of_words.name, 0, 3)
    topic_of_words.broker.admin.delete_records([expired])[expired].result(30)
    with pytest.raises(DataRefused, match=r"/0 has no records before offset 3 any more, .*Batch Reprocessor"):
        topic_of_words.start_at()
    assert topic_of_words.start_at(since="2024-01-01T10:16:00Z")["offsets"] == {0: 4, 1: 1, 2: 0}
    with pytest.raises(
        DataRefused, match=r"the batch ends at offset \d of .*/0, which has the offsets 3 to 4: "
    ):
        topic_of_words.restore("expired")
    assert not (topic_of_words.folder / "expired").exists()
