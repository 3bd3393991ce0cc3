"""Manifests and versions: what is written, and the sentence of each version that can't be used."""

from __future__ import annotations

import datetime as dt

import pytest

from python_jobs.shared.core.failures import JobFailed, WrongUse
from python_jobs.shared.files import manifests
from python_jobs.shared.files.manifests import (
    ListedFile,
    Manifest,
    newest_or,
    require_version,
    taken,
    version_of,
)

MANIFEST = Manifest("20240101_101500", (ListedFile("a", 1), ListedFile("b", 2, "v1")))
TEXT = """{
 "format_version": 1,
 "version": "20240101_101500",
 "files": [
  {
   "path": "a",
   "size": 1
  },
  {
   "path": "b",
   "size": 2,
   "object_version": "v1"
  }
 ]
}"""


def test_a_manifest_is_written_and_read() -> None:
    assert MANIFEST.to_json() == TEXT
    assert Manifest.from_json(TEXT, "m") == MANIFEST


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"format_version": 2}', "m has format 2, known is 1"),
        ("{}", "m is no manifest: KeyError 'format_version'"),
        ("[]", "m is no manifest: TypeError list indices must be integers or slices, not str"),
        ("", "m is no manifest: JSONDecodeError Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_another_text_is_no_manifest(text: str, sentence: str) -> None:
    with pytest.raises(WrongUse) as refused:
        Manifest.from_json(text, "m")
    assert str(refused.value) == sentence


def test_a_version_is_complete_if_each_listed_file_has_its_size() -> None:
    MANIFEST.require_complete({"a": 1, "b": 2, "c": 3}, "/data")
    with pytest.raises(JobFailed) as failed:
        MANIFEST.require_complete({"a": 2}, "/data")
    assert str(failed.value) == (
        "version 20240101_101500 is incomplete: /data lacks 2 of 2 listed files or has them with another size, "
        "such as a"
    )


def test_a_version_is_named_after_the_run_s_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "utc_now", lambda: dt.datetime(2024, 3, 1, 9, 8, 7, tzinfo=dt.UTC))
    assert version_of("2024-01-01T10:15") == "20240101_101500"
    assert version_of(None) == "20240301_090807"


def test_a_version_is_asked_for_by_its_name_in_the_step_expose_alone() -> None:
    require_version(None, "load")
    require_version("20240101_101500", "expose")
    with pytest.raises(
        WrongUse, match=r"^a version is a run's start such as 20240101_101500, got '2024-01-01'$"
    ):
        require_version("2024-01-01", "expose")
    with pytest.raises(WrongUse, match=r"^version belongs to step expose, got step load$"):
        require_version("20240101_101500", "load")


def test_the_newest_version_is_exposed_unless_another_is_named() -> None:
    there = ["20240102_000000", "20240103_000000", "20240101_000000"]
    assert newest_or(None, there, "t") == "20240103_000000"
    assert newest_or("20240101_000000", there, "t") == "20240101_000000"
    for wanted, versions, sentence in [
        ("20250101_000000", there[:2], "there is no version 20250101_000000 of t; there are 20240102_000000, "
         "20240103_000000"),
        (None, [], "there is no version to expose of t; there are none"),
    ]:  # fmt: skip
        with pytest.raises(WrongUse) as refused:
            newest_or(wanted, versions, "t")
        assert str(refused.value) == sentence


def test_a_version_that_is_there_stays() -> None:
    assert str(taken("20240101_101500", "t")) == (
        "there is a version 20240101_101500 of t already, by a run of the same second; it stays as it is, run again"
    )
