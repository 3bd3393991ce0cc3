"""Paths and names of tables, as parameters give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from python_jobs.shared.core.paths import absolute, is_path, is_uri


@pytest.mark.parametrize(
    "path",
    [
        "s3a://bucket/a:b", "S3://bucket", "file:///a", "file:/a", "hdfs:/a", "dbfs:/mnt/a", "abfss://c@a.net/d",
        "wasb+ssl://a", "memory://",
    ],
)  # fmt: skip
def test_a_scheme_makes_a_uri_which_stays_as_it_is(path: str) -> None:
    assert is_uri(path)
    assert absolute(path) == path


@pytest.mark.parametrize(
    "path",
    ["a:b/c", "10:30/part.json", "date=2024-03-01 10:00:00/x", "a:b", "a:/b", "file:b", "visits:/b", "1a://b",
     "x/s3://b", ":/a", "://a"],
)  # fmt: skip
def test_a_colon_alone_makes_a_local_path(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_uri(path)
    assert absolute(path) == str(tmp_path / Path(path))
    assert is_path(path)


def test_an_absolute_path_and_a_name_keep_their_meaning() -> None:
    assert absolute("/data/10:30/a") == "/data/10:30/a"
    assert not is_path("bronze.visits")
    assert is_path("bronze/visits")
