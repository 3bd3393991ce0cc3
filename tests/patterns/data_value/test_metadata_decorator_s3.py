"""Metadata Decorator in an S3 store: tags of a load's files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import boto3
import pytest

from python_jobs.data_value.metadata_decorator_s3 import Parameters, run
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from services.object_store import ObjectStore
from tests.support.http_server import QuietHandler, serving
from tests.support.snippets import snippet

HERE = "tests/patterns/data_value/test_metadata_decorator_s3.py"
LOAD, OTHER = "visits/date=2024-03-01", "visits/date=2024-03-010"
FILES = {
    f"{LOAD}/a.parquet": b"PAR1 a",
    f"{LOAD}/hour=10/b.parquet": b"PAR1 b",
    f"{LOAD}/_SUCCESS": b"",
    f"{LOAD}/_delta_log/0.json": b"{}",
    f"{OTHER}/c.parquet": b"PAR1 c",
}


class Lake:
    def __init__(self, store: ObjectStore, bucket: str) -> None:
        self.client, self.bucket = store.client, store.create_bucket(bucket)
        for key, body in FILES.items():
            self.client.put_object(Bucket=bucket, Key=key, Body=body)

    def tag(self, **others: Any) -> dict[str, Any]:
        given: dict[str, Any] = {
            "bucket": self.bucket,
            "prefix": LOAD,
            "job_version": "v1",
            "batch_version": 7,
        }
        return run(Parameters(**given | others), lambda: self.client)

    def tags(self, key: str) -> dict[str, str]:
        found = self.client.get_object_tagging(Bucket=self.bucket, Key=key)["TagSet"]
        return {tag["Key"]: tag["Value"] for tag in found}

    def add_tags(self, key: str, tags: dict[str, str]) -> None:
        tag_set = [{"Key": name, "Value": value} for name, value in tags.items()]
        self.client.put_object_tagging(Bucket=self.bucket, Key=key, Tagging={"TagSet": tag_set})

    def objects(self) -> dict[str, tuple[Any, ...]]:
        """Return bytes, ETag and time of change of each object."""
        found = {}
        for key in FILES:
            answer = self.client.get_object(Bucket=self.bucket, Key=key)
            found[key] = (answer["Body"].read(), answer["ETag"], answer["LastModified"])
        return found


@pytest.fixture
def lake(object_store: ObjectStore, request: pytest.FixtureRequest) -> Lake:
    return Lake(object_store, request.node.name.replace("_", "-")[:60].strip("-"))


@pytest.mark.s3
def test_each_data_file_of_the_load_has_the_version_and_nothing_else_has(lake: Lake) -> None:
    assert lake.tag(metadata={"environment": "test"}) == {
        "bucket": lake.bucket, "prefix": LOAD, "files": 2, "tagged": 2,
    }  # fmt: skip
    wanted = {"job_version": "v1", "batch_version": "7", "environment": "test"}
    assert {key: lake.tags(key) for key in FILES} == {
        key: wanted if key.startswith(f"{LOAD}/") and key.endswith(".parquet") else {} for key in FILES
    }


@pytest.mark.s3
def test_other_tags_and_bytes_and_times_do_not_change_by_tagging_again(lake: Lake) -> None:
    first = f"{LOAD}/a.parquet"
    lake.add_tags(first, {"team": "web"})
    before = lake.objects()
    lake.tag()
    assert lake.tag()["tagged"] == 0
    assert lake.tag(job_version="v2", batch_version=8)["tagged"] == 2
    assert lake.tags(first) == {"team": "web", "job_version": "v2", "batch_version": "8"}
    assert lake.objects() == before
    assert {key: content for key, (content, *_) in before.items()} == FILES


@pytest.mark.s3
def test_a_load_with_an_object_that_can_not_take_the_tags_is_refused_as_a_whole(lake: Lake) -> None:
    full = f"{LOAD}/hour=10/b.parquet"
    lake.add_tags(full, {f"team{n}": "web" for n in range(9)})
    with pytest.raises(
        DataRefused, match=r"hour=10/b\.parquet would have 11 tags, and S3 allows 10; no file"
    ):
        lake.tag()
    assert lake.tags(f"{LOAD}/a.parquet") == {}
    lake.add_tags(full, {f"team{n}": "web" for n in range(8)})
    assert lake.tag()["tagged"] == 2


@pytest.mark.s3
def test_a_load_without_files_and_a_store_that_refuses_are_one_sentence(lake: Lake) -> None:
    with pytest.raises(NotReady, match="has no data file below visits/date=2023/; nothing was tagged"):
        lake.tag(prefix="visits/date=2023")
    with pytest.raises(DataRefused, match="the store refuses it: NoSuchBucket"):
        lake.tag(bucket="nowhere")


def test_a_store_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    client = boto3.client(
        "s3", endpoint_url="http://127.0.0.1:1", region_name="us-east-1", aws_access_key_id="local",
        aws_secret_access_key="local",
    )  # fmt: skip
    with pytest.raises(JobFailed, match="the store can't be reached"):
        run(Parameters("lake", LOAD, "v1", 7), lambda: client)


@pytest.mark.parametrize(
    ("status", "code", "expected", "sentence"),
    [
        (500, "InternalError", JobFailed, "the store can't do it now: InternalError, why; run again"),
        (503, "SlowDown", JobFailed, "the store can't do it now: SlowDown, why; run again"),
        (400, "RequestTimeout", JobFailed, "the store can't do it now: RequestTimeout, why; run again"),
        (403, "AccessDenied", DataRefused, "the store refuses it: AccessDenied, why"),
    ],
)
def test_a_store_that_may_take_the_same_request_later_refuses_no_data(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str, expected: type[Exception], sentence: str
) -> None:
    class Store(QuietHandler):
        def get(self) -> None:
            body = f"<Error><Code>{code}</Code><Message>why</Message></Error>"
            self.answer(status, body.encode())

    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with serving(Store) as url:
        client = boto3.client(
            "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="local",
            aws_secret_access_key="local",
        )  # fmt: skip
        with pytest.raises(JobFailed) as failure:
            run(Parameters("lake", LOAD, "v1", 7), lambda: client)
    assert (type(failure.value), str(failure.value)) == (expected, sentence)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"metadata": {"shipping_address": "x"}}, "metadata has no key 'shipping_address'"),
        ({"job_version": "v" * 16}, "job_version must be a text of 1 to 15 characters"),
        ({"metadata": {"run_id": "x" * 257}}, "the tag run_id must have at most 256 letters"),
        ({"job_version": "v1,v2"}, "the tag job_version must have at most 256 letters"),
        ({"batch_version": -1}, "batch_version must be 0 or more, got -1"),
        ({"prefix": "visits/"}, "prefix is that of a load, such as visits/date=2024-03-01, got 'visits/'"),
        ({"prefix": ""}, "prefix is that of a load"),
    ],
)
def test_what_s3_or_the_pattern_does_not_allow_is_refused(given: dict[str, Any], sentence: str) -> None:
    good: dict[str, Any] = {"bucket": "lake", "prefix": LOAD, "job_version": "v1", "batch_version": 7}
    assert Parameters(**good | {"metadata": {"run_id": "x" * 256}}).tags()["batch_version"] == "7"
    with pytest.raises(WrongUse) as refusal:
        Parameters(**good | given)
    assert str(refusal.value).startswith(sentence)


@pytest.mark.s3
def test_the_command_of_the_page(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(object_store, "lake")
    for name, value in object_store.environment(tmp_path / "credentials").items():
        monkeypatch.setenv(name, value)
    command = shlex.split(
        snippet("docs/data_value.md", f"{HERE}::test_the_command_of_the_page").replace("\\\n", "")
    )
    run(parse_parameters(Parameters, command[4:])[0])
    assert lake.tags(f"{LOAD}/a.parquet") == {"job_version": "v2.5.1", "batch_version": "17"}
