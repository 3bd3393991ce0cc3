"""Proxy in an S3 store: locked objects, and a manifest that names object versions."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from python_jobs.idempotency import proxy_s3
from python_jobs.idempotency.proxy_s3 import Parameters, resolve, run
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.files.manifests import ListedFile, Manifest
from services.object_store import ObjectStore
from tests.support.snippets import snippets

pytestmark = pytest.mark.s3
HERE = "tests/patterns/idempotency/test_proxy_s3.py"

FIRST, SECOND = "2026-01-01T10:15:00", "2026-01-01T11:00:00"
OLD = "devices/_versions/20260101_101500/a/part.json"


class Devices:
    def __init__(self, store: ObjectStore, folder: Path, bucket: str) -> None:
        self.client, self.folder, self.bucket = store.client, folder, bucket

    def load(self, started_at: str, files: dict[str, str], **others: Any) -> dict[str, Any]:
        folder = self.folder / started_at[11:13]
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return self.run(source=str(folder), started_at=started_at, **others)

    def run(self, **others: Any) -> dict[str, Any]:
        return run(self.parameters(**others), lambda: self.client)

    def parameters(self, **others: Any) -> Parameters:
        given: dict[str, Any] = {"bucket": self.bucket, "dataset": "devices"}
        return Parameters(**given | others)

    def read(self) -> dict[str, str]:
        """Return what readers get: each listed file's content."""
        return {
            key: self.client.get_object(Bucket=self.bucket, Key=key, VersionId=version)["Body"]
            .read()
            .decode()
            for key, version in resolve(self.client, self.parameters(step="expose"))
        }


@pytest.fixture
def devices(object_store: ObjectStore, tmp_path: Path, request: pytest.FixtureRequest) -> Devices:
    bucket = request.node.name.replace("_", "-")[:60].strip("-")
    object_store.client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    return Devices(object_store, tmp_path, bucket)


def test_readers_find_the_newest_version_and_the_way_back(devices: Devices) -> None:
    assert devices.load(FIRST, {"a/part.json": "first", "_SUCCESS": ""}) == {
        "bucket": devices.bucket, "dataset": "devices", "version": "20260101_101500", "files": 1,
        "exposed_version": "20260101_101500",
    }  # fmt: skip
    assert devices.read() == {OLD: "first"}
    devices.load(SECOND, {"a/part.json": "second", "b/part.json": "more"})
    assert sorted(devices.read().values()) == ["more", "second"]
    assert devices.run(step="expose", version="20260101_101500")["exposed_version"] == "20260101_101500"
    assert devices.read() == {OLD: "first"}
    assert devices.run(step="expose")["exposed_version"] == "20260101_110000"


def test_the_commands_of_the_page(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    object_store.client.create_bucket(Bucket="archive", ObjectLockEnabledForBucket=True)
    for name, value in object_store.environment(tmp_path / "credentials").items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    part = tmp_path / "out" / "devices" / "part.json"
    part.parent.mkdir(parents=True)
    commands, reader = snippets("docs/idempotency.md", f"{HERE}::test_the_commands_of_the_page")
    load, back = map(shlex.split, commands.splitlines())
    for started_at, content in (("2024-01-01T10:15:00", "first"), ("2024-01-01T11:00:00", "second")):
        part.write_text(content)
        run(parse_parameters(Parameters, [*load[3:], "--started_at", started_at])[0])
    names: dict[str, Any] = {}
    exec(reader, names)
    assert names["contents"] == [b"second"]
    run(parse_parameters(Parameters, back[3:])[0])
    exec(reader, names)
    assert names["contents"] == [b"first"]


def test_a_locked_version_can_not_be_deleted(devices: Devices) -> None:
    devices.load(FIRST, {"a/part.json": "first"})
    ((key, version),) = resolve(devices.client, devices.parameters(step="expose"))
    with pytest.raises(ClientError, match="AccessDenied"):
        devices.client.delete_object(Bucket=devices.bucket, Key=key, VersionId=version)
    # Deleting without a version only adds a marker; another object under the key is another version.
    devices.client.delete_object(Bucket=devices.bucket, Key=key)
    assert devices.read() == {OLD: "first"}
    devices.client.put_object(Bucket=devices.bucket, Key=key, Body=b"forged")
    assert devices.read() == {OLD: "first"}


def test_a_version_is_written_once(devices: Devices) -> None:
    devices.load(FIRST, {"a/part.json": "first"})
    with pytest.raises(JobFailed, match="there is a version 20260101_101500 of devices already"):
        devices.load(FIRST, {"a/part.json": "other"})
    assert devices.read() == {OLD: "first"}


def test_a_large_file_is_sent_in_parts_and_locked_like_any_other(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_s3, "PART_BYTES", 5 << 20)  # S3's least
    content = "0123456789abcdef" * (12 << 16)
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read at once"))
    devices.load(FIRST, {"a/part.json": content, "small.json": "small", "edge.json": "e" * (5 << 20)})
    monkeypatch.setattr(Path, "read_bytes", read)
    assert devices.read() == {
        OLD: content,
        "devices/_versions/20260101_101500/edge.json": "e" * (5 << 20),
        "devices/_versions/20260101_101500/small.json": "small",
    }
    found = devices.client.head_object(Bucket=devices.bucket, Key=OLD)
    assert (found["ContentLength"], found["ObjectLockMode"]) == (12 << 20, "COMPLIANCE")
    assert str(found["ObjectLockRetainUntilDate"])[:10] == "2035-12-30"
    assert found["ETag"].endswith('-3"')  # three parts
    ((_, version),) = [entry for entry in resolve_all(devices) if entry[0] == OLD]
    with pytest.raises(ClientError, match="AccessDenied"):
        devices.client.delete_object(Bucket=devices.bucket, Key=OLD, VersionId=version)


def test_of_two_loads_of_one_version_the_second_overwrites_nothing(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second looked before the first had written anything; in parts and in one request."""
    for started_at, part_bytes in ((FIRST, 5 << 20), (SECOND, 64 << 20)):
        with monkeypatch.context() as patch:
            patch.setattr(proxy_s3, "PART_BYTES", part_bytes)
            devices.load(started_at, {"a/part.json": "1" * (6 << 20)})
            patch.setattr(proxy_s3, "keys_below", lambda *_: [])
            with pytest.raises(JobFailed, match=r"there is a version 20260101_1\d+00 of devices already"):
                devices.load(started_at, {"a/part.json": "2" * (6 << 20)})
        assert list(devices.read().values()) == ["1" * (6 << 20)]
    found = devices.client.list_object_versions(Bucket=devices.bucket, Prefix="devices/_versions/")[
        "Versions"
    ]
    assert len(found) == 2
    assert "Uploads" not in devices.client.list_multipart_uploads(Bucket=devices.bucket)


def test_a_part_that_fails_leaves_no_object_and_no_parts(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_s3, "PART_BYTES", 5 << 20)
    sent = devices.client.upload_part

    def fails(**arguments: Any) -> Any:
        if arguments["PartNumber"] == 2:
            raise ClientError({"Error": {"Code": "SlowDown", "Message": "busy"}}, "UploadPart")
        return sent(**arguments)

    monkeypatch.setattr(devices.client, "upload_part", fails)
    with pytest.raises(JobFailed, match="the store can't do it now: SlowDown, busy; run again"):
        devices.load(FIRST, {"a/part.json": "1" * (6 << 20)})
    assert "Uploads" not in devices.client.list_multipart_uploads(Bucket=devices.bucket)
    assert "Contents" not in devices.client.list_objects_v2(Bucket=devices.bucket)


def test_a_file_that_changes_while_it_is_sent_is_refused(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = devices.client.put_object

    def grows(**arguments: Any) -> Any:
        answer = put(**arguments)
        with (devices.folder / "10" / "a" / "part.json").open("a") as file:
            file.write("more")
        return answer

    monkeypatch.setattr(devices.client, "put_object", grows)
    with pytest.raises(JobFailed, match="changed while it was sent"):
        devices.load(FIRST, {"a/part.json": "first"})
    with pytest.raises(NotReady):
        devices.read()


def resolve_all(devices: Devices) -> list[tuple[str, str]]:
    return resolve(devices.client, devices.parameters(step="expose"))


def test_a_load_that_died_is_no_version(devices: Devices) -> None:
    devices.load(FIRST, {"a/part.json": "first"})
    devices.client.put_object(
        Bucket=devices.bucket, Key="devices/_versions/20260101_110000/a/part.json", Body=b"half"
    )
    assert devices.run(step="expose")["exposed_version"] == "20260101_101500"
    with pytest.raises(
        WrongUse, match="there is no version 20260101_110000 of devices; there are 20260101_10"
    ):
        devices.run(step="expose", version="20260101_110000")


def test_a_pointer_to_what_is_not_there(devices: Devices) -> None:
    with pytest.raises(NotReady, match="nothing was exposed yet"):
        devices.read()
    with pytest.raises(WrongUse, match="there is no version to expose of devices; there are none"):
        devices.run(step="expose")
    devices.load(FIRST, {"a/part.json": "first"})
    missing = Manifest("20260101_101500", (ListedFile("a/part.json", 5, "gone"),)).to_json()
    devices.client.put_object(Bucket=devices.bucket, Key="devices/_current.json", Body=missing.encode())
    with pytest.raises(
        JobFailed, match=r"is incomplete: .* lacks 1 of 1 listed files .* such as a/part.json"
    ):
        devices.read()


def test_a_bucket_without_lock_is_refused_and_nothing_is_exposed(
    object_store: ObjectStore, tmp_path: Path
) -> None:
    devices = Devices(object_store, tmp_path, object_store.create_bucket("without-lock"))
    with pytest.raises(DataRefused, match="the store refuses it: Invalid"):
        devices.load(FIRST, {"a/part.json": "first"})
    with pytest.raises(NotReady):
        devices.read()


def test_what_makes_no_sense(tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="holds no file"):
        run(Parameters("b", "devices", str(tmp_path)), lambda: None)
    for wrong in (
        {"retain_days": 0},
        {"dataset": "devices/"},
        {"source": None},
        {"version": "20260101_101500"},
        {"step": "expose", "source": None, "version": "today"},
    ):
        with pytest.raises(WrongUse):
            Parameters(**{"bucket": "b", "dataset": "devices", "source": "out"} | wrong)  # type: ignore[arg-type]
