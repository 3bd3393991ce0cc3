"""Static Joiner as a stream: each micro-batch with the newest version of a Delta reference."""

from __future__ import annotations

import datetime as dt
import shlex
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from python_jobs.data_value import static_joiner as job
from python_jobs.data_value.static_joiner import JoinedWriter, Parameters
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, NotReady, WrongUse
from python_jobs.shared.delta.commits import latest_commit, latest_version
from tests.support.rows import assert_rows
from tests.support.snippets import snippet

HERE = "tests/patterns/data_value/test_static_joiner_stream.py"
VISITS = "visit string, dev_type string, dev_version string"
DEVICES = "type string, version string, full_name string"


class Stream:
    """A source, a reference, the target and the checkpoint of one query."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def write(self, table: str, rows: list[Any], schema: str, mode: str = "append") -> None:
        frame = self.spark.createDataFrame(rows, schema).coalesce(1)
        frame.write.format("delta").mode(mode).option("overwriteSchema", mode == "overwrite").save(
            self.path(table)
        )

    def visits(self, *visits: tuple[str, str | None, str | None]) -> None:
        self.write("source", list(visits), VISITS)

    def devices(self, *devices: tuple[str | None, str, str], mode: str = "append") -> None:
        self.write("reference", list(devices), DEVICES, mode)

    def parameters(self, **changes: Any) -> Parameters:
        given = {name: self.path(name) for name in ("source", "reference", "target", "checkpoint")}
        names = {"keys": {"dev_type": "type", "dev_version": "version"}, "columns": {"device": "full_name"}}
        return Parameters(**(given | names | {"max_files_per_trigger": 1} | changes))

    def run(self, **changes: Any) -> dict[str, Any]:
        return job.run(self.spark, self.parameters(**changes))

    def devices_of_visits(self, table: str = "target") -> dict[str, str | None]:
        found = self.spark.read.format("delta").load(self.path(table)).select("visit", "device").collect()
        assert len(found) == len({row.visit for row in found})
        return {row.visit: row.device for row in found}


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> Stream:
    return Stream(spark, tmp_path)


def test_each_batch_has_the_newest_version_and_a_reference_on_its_way_ends_the_run(stream: Stream) -> None:
    stream.visits(("v1", "phone", "1"))
    stream.visits(("v2", "phone", "2"), ("no key", "phone", None))
    with pytest.raises(NotReady, match=r"there is no Delta table '.*reference'"):
        stream.run()
    stream.devices(("phone", "1", "A"), (None, "2", "?"), (None, "2", "?"))
    report = stream.run()
    assert stream.devices_of_visits() == {"v1": "A", "v2": None, "no key": None}
    assert (report["batches"], report["rows"], report["unmatched"]) == (2, 3, 2)
    assert report["reference"]["version"] == 0

    # Unknown in one batch, there in the next: without a restart, because a batch resolves the newest version.
    parameters = stream.parameters()
    writer = JoinedWriter(parameters, job.Join(stream.spark, parameters), "one query")
    batch = stream.spark.createDataFrame([("v3", "phone", "2")], VISITS)
    writer.write(batch, 0)
    stream.devices(("phone", "2", "B"))
    writer.write(batch.selectExpr("'v4' as visit", "dev_type", "dev_version"), 1)
    found = stream.devices_of_visits()
    assert (found["v3"], found["v4"]) == (None, "B")
    # A batch that runs again adds nothing, whatever the reference has become.
    version = latest_version(stream.spark, stream.path("target"))
    stream.devices(("phone", "2", "C"), mode="overwrite")
    JoinedWriter(parameters, job.Join(stream.spark, parameters), "one query").write(batch, 1)
    assert latest_version(stream.spark, stream.path("target")) == version
    assert '"reference_version": 1' in latest_commit(stream.spark, stream.path("target"))["userMetadata"]
    assert stream.run()["batches"] == 0

    # Overwritten: the version before or after. Emptied first and filled in a second commit: the batch waits.
    stream.visits(("v5", "phone", "2"))
    stream.devices(mode="overwrite")
    with pytest.raises(NotReady, match=r"fewer rows than min_reference_rows, 1: load it, then run again"):
        stream.run()
    assert "v5" not in stream.devices_of_visits()
    stream.devices(("phone", "2", "D"))
    stream.run()
    assert stream.devices_of_visits()["v5"] == "D"
    stream.visits(("v6", "phone", "2"))
    stream.devices(mode="overwrite")
    stream.run(min_reference_rows=0)
    assert stream.devices_of_visits()["v6"] is None

    # A key that is there twice is refused before it multiplies a visit; the next run repeats the batch.
    stream.visits(("v7", "phone", "2"))
    stream.devices(("phone", "2", "E"), ("phone", "2", "E"))
    with pytest.raises(DataRefused, match="several rows for the key phone, 2: rows of the source would be"):
        stream.run()
    assert "v7" not in stream.devices_of_visits()
    stream.devices(("phone", "2", "E"), mode="overwrite")
    stream.run()
    assert stream.devices_of_visits()["v7"] == "E"

    # A reference whose column has another type now.
    stream.visits(("v8", "phone", "2"))
    stream.write("reference", [("phone", "2", 7)], "type string, version string, full_name int", "overwrite")
    with pytest.raises(
        WrongUse, match="has another schema: it has device string, but this job writes device int"
    ):
        stream.run()


def test_a_visit_takes_the_version_of_its_time(stream: Stream, spark: SparkSession) -> None:
    users = "id string, email string, effective_from timestamp, effective_to timestamp"
    days = [dt.datetime(2024, 6, day, tzinfo=dt.UTC) for day in (1, 21)]
    stream.write("reference", [("u1", "a@", days[0], days[1]), ("u1", "b@", days[1], None)], users)
    visits = [("v1", "u1", "2024-06-20T23:59"), ("v2", "u1", "2024-06-21T00:00"), ("v3", "u1", "today")]
    stream.write("source", visits, "visit string, user_id string, event_time string")
    settings: dict[str, Any] = {
        "keys": {"user_id": "id"}, "columns": {"email": "email"}, "as_of": "event_time", "partition_by": ["email"],
    }  # fmt: skip
    stream.run(**settings)
    target = spark.read.format("delta").load(stream.path("target")).select("visit", "email")
    assert_rows(target, [("v1", "a@"), ("v2", "b@"), ("v3", None)])
    inner = {
        **settings,
        "join_type": "inner",
        "target": stream.path("inner"),
        "checkpoint": stream.path("other"),
    }
    stream.run(**inner)
    target = spark.read.format("delta").load(stream.path("inner")).select("visit", "email")
    assert_rows(target, [("v1", "a@"), ("v2", "b@")])
    stream.write("reference", [("u1", "c@", days[0], None)], users)
    stream.write("source", visits[:1], "visit string, user_id string, event_time string")
    with pytest.raises(DataRefused, match="several rows for the key u1, or its versions overlap"):
        stream.run(**settings)


def test_wrong_use_is_refused_in_a_sentence(stream: Stream) -> None:
    with pytest.raises(NotReady, match=r"there is no Delta table '.*source'"):
        stream.run()
    stream.visits(("v1", "phone", "1"))
    stream.devices(("phone", "1", "A"))
    for changes, sentence in (
        ({"keys": {}}, "static_joiner needs keys"),
        ({"columns": {}}, "static_joiner needs columns"),
        ({"keys": {"device": "type"}}, "source and reference can't be joined .*UNRESOLVED_COLUMN.*device"),
        ({"as_of": "visit"}, "source and reference can't be joined .*effective_from"),
        ({"as_of": "of of"}, "source and reference can't be joined .*PARSE_SYNTAX_ERROR"),
        ({"columns": {"VISIT": "full_name"}}, "the source has columns that this job writes itself: visit"),
        ({"min_reference_rows": -1}, "min_reference_rows must be 0 or more, got -1"),
        ({"target": stream.path("source")}, "source, reference and target must be three tables"),
    ):
        with pytest.raises(WrongUse, match=sentence):
            stream.run(**changes)


def test_command_of_the_page() -> None:
    command = (
        snippet("docs/data_value.md", f"{HERE}::test_command_of_the_page")
        .replace("\\\n", "")
        .split("static_joiner.py ")[1]
    )
    parameters, _ = parse_parameters(Parameters, shlex.split(command))
    assert parameters.keys == {"dev_type": "type", "dev_version": "version"}
    assert parameters.columns == {"device": "full_name"}
