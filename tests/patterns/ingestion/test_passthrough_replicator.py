"""Passthrough Replicator for files: the target is the source, byte for byte, or what is there of it is whole."""

from __future__ import annotations

import errno
import gzip
import os
import shlex
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from delta.tables import DeltaTable
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from python_jobs.ingestion import replica_folders
from python_jobs.ingestion.passthrough_replicator import Parameters, run
from python_jobs.ingestion.replica_folders import Folder, LocalFolder
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, WrongUse
from python_jobs.shared.spark.job import job_outcome
from tests.support.killer import TableState, run_and_kill
from tests.support.pytest_ids import REPOSITORY
from tests.support.rows import assert_rows
from tests.support.snippets import snippets

JOB = REPOSITORY / "python_jobs" / "ingestion" / "passthrough_replicator.py"
PAGE = "docs/ingestion.md"
THIS = "tests/patterns/ingestion/test_passthrough_replicator.py::"
DAY_1, DAY_2 = "date=2024-03-01", "date=2024-03-02"

# 1.10, odd spacing, a key twice, a day without a time zone, an empty line, a broken line, CRLF, no end of line.
ODD = b'{"version" :  1.10}\r\n{"a":1,"a":2}\n{"at":"01/02/2023"}\n\n{"broken\n\xff\xfe\x00 last'
FILES = {
    f"{DAY_1}/odd.json": ODD,
    f"{DAY_1}/packed.json.gz": gzip.compress(b"a\nb\n"),
    f"{DAY_1}/empty.json": b"",
    f"{DAY_1}/_SUCCESS": b"",
    f"{DAY_1}/.hidden": b"h",
    f"{DAY_1}/_underscore/deep/x": b"u",
    f"{DAY_1}/.odd.json.crc": b"no checksum of anything",
    f"{DAY_1}/ü v%20+#?{{1}}[2]*.json": b"name",
    f"{DAY_1}/12:00.json": b"noon",
    f"{DAY_2}/other.csv": b"1;01/02/2023 10:00\n",
}


@dataclass
class Environments:
    """A production and a staging folder."""

    spark: SparkSession
    root: Path
    is_local: bool = True
    """False reaches both folders by Hadoop, as mounts of a ViewFS."""

    @property
    def production(self) -> Path:
        return self.root / "production" / "devices"

    @property
    def staging(self) -> Path:
        return self.root / "staging" / "devices"

    def put(self, name: str, content: bytes, modified_at: int = 1_709_290_800) -> None:
        put(self.production / name, content, modified_at)

    def replicate(self, **parameters: Any) -> dict[str, Any]:
        """Replicate the whole folder; return the report of this one target."""
        paths = {"source": str(self.production), "target": str(self.staging)}
        if not self.is_local:
            paths = self.mounted()
        (report,) = run(self.spark, Parameters(**(paths | parameters)))["replicated"]
        return report

    def mounted(self) -> dict[str, str]:
        """Return URIs of both folders in a ViewFS, whose renames refuse a file that is in the way."""
        configuration = self.spark._jsc.hadoopConfiguration()
        uris = {}
        for role, folder in (("source", self.production.parent), ("target", self.staging.parent)):
            folder.mkdir(parents=True, exist_ok=True)
            mount = f"m{uuid.uuid4().hex}"  # Hadoop keeps the file system of a name that it has seen
            configuration.set(f"fs.viewfs.mounttable.{mount}.link./data", f"file://{folder}")
            uris[role] = f"viewfs://{mount}/data/devices"
        return uris


def put(path: Path, content: bytes, modified_at: int = 1_709_290_800) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (modified_at, modified_at))


def tree(folder: Path) -> dict[str, tuple[bytes, int] | None]:
    """Return bytes and modification time of each file below a folder, None for each folder."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns // 1_000_000)
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


def inodes(folder: Path) -> dict[str, tuple[int, int]]:
    """Return what changes with any write to a file or folder: its inode and the time of its last change."""
    return {str(p): (p.stat().st_ino, p.stat().st_ctime_ns) for p in (folder, *folder.rglob("*"))}


@pytest.fixture
def environments(spark: SparkSession, tmp_path: Path) -> Environments:
    return Environments(spark, tmp_path)


@pytest.fixture(params=[True, False], ids=["local", "viewfs"])
def everywhere(spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest) -> Environments:
    return Environments(spark, tmp_path, request.param)


@pytest.fixture
def filled(environments: Environments) -> Environments:
    """Fill the production folder with odd files and one folder without files."""
    for name, content in FILES.items():
        environments.put(name, content)
    (environments.production / DAY_1 / "no files yet").mkdir()
    return environments


def test_names_bytes_and_times_are_the_source_s(filled: Environments) -> None:
    report = filled.replicate()
    staging = tree(filled.staging)
    assert staging == tree(filled.production)
    assert {name: entry[0] for name, entry in staging.items() if entry} == FILES
    assert staging[f"{DAY_1}/no files yet"] is None
    assert report["files"] == report["files_copied"] == 10
    assert report["bytes_copied"] == sum(map(len, FILES.values()))


def test_lines_are_byte_identical_where_a_json_reader_changes_them(
    filled: Environments, spark: SparkSession
) -> None:
    filled.replicate()
    assert filled.staging.joinpath(DAY_1, "odd.json").read_bytes() == ODD
    control = filled.root / "control"
    lines = filled.root / "lines.json"
    lines.write_bytes(b'{"version" :  1.10}\r\n{"a":1,"a":2}\n')
    read = spark.read.schema("version string, a string").json(str(lines))
    read.write.json(str(control))
    written = b"".join(path.read_bytes() for path in control.glob("part-*"))
    assert written != lines.read_bytes()
    assert b'"version" :  1.10' not in written


def test_a_second_run_copies_nothing(filled: Environments) -> None:
    filled.replicate()
    before = {path: inode for path, (inode, _) in inodes(filled.staging).items()}
    report = filled.replicate()
    assert (report["files_copied"], report["files_skipped"]) == (0, 10)
    assert {path: inode for path, (inode, _) in inodes(filled.staging).items()} == before


def test_after_changes_the_target_equals_the_source_and_other_days_are_untouched(
    filled: Environments,
) -> None:
    filled.replicate()
    day_2 = tree(filled.staging / DAY_2)
    (filled.production / DAY_1 / "empty.json").unlink()
    (filled.production / DAY_1 / "no files yet").rmdir()
    filled.put(f"{DAY_1}/odd.json", ODD + b"!", 1_709_294_400)
    filled.put(f"{DAY_1}/new.json", b"new")
    filled.put(f"{DAY_2}/other.csv", b"2;changed in production\n")

    report = filled.replicate(source=str(filled.production / DAY_1), target=str(filled.staging / DAY_1))
    assert tree(filled.staging / DAY_1) == tree(filled.production / DAY_1)
    assert not (filled.staging / DAY_1 / "empty.json").exists()
    assert report["files_deleted"] == 1
    assert report["files_copied"] == 3, "odd.json, new.json and _SUCCESS"
    assert tree(filled.staging / DAY_2) == day_2


def test_the_source_is_only_read(filled: Environments) -> None:
    """Not even a time of a file or folder of the source changes: read rights are enough there."""
    before = inodes(filled.production)
    filled.replicate()
    assert inodes(filled.production) == before


def test_content_is_compared_where_size_and_time_deceive(environments: Environments) -> None:
    environments.put("a.json", b"one")
    environments.replicate()
    environments.put("a.json", b"two")
    assert environments.replicate()["files_copied"] == 0
    assert environments.replicate(compare="content")["files_copied"] == 1
    assert (environments.staging / "a.json").read_bytes() == b"two"


def test_where_times_are_not_kept_a_newer_source_is_copied(
    environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_folders, "_KEEP_TIMES", frozenset())
    environments.put("a.json", b"one")
    environments.replicate()
    assert environments.replicate()["files_copied"] == 0
    environments.put("a.json", b"two", modified_at=4_102_444_800)
    assert environments.replicate()["files_copied"] == 1


def test_folders_of_any_hadoop_file_system(environments: Environments) -> None:
    """Mounts of a ViewFS stand for production and staging; its renames refuse a file that is in the way."""
    environments.put(f"{DAY_1}/a.json", b"a")
    uris = environments.mounted()
    environments.replicate(**uris)
    environments.put(f"{DAY_1}/a.json", b"changed")
    assert environments.replicate(**uris)["files_copied"] == 1
    # Hadoop's own checksum files belong to the local folder that is mounted.
    assert without_checksums(environments.staging) == tree(environments.production)
    uris = {"source": f"file://{environments.production}", "target": f"file://{environments.staging}"}
    environments.replicate(**uris)
    assert tree(environments.staging) == tree(environments.production)
    environments.put(f"{DAY_1}/a.json", b"from here to there")
    environments.replicate(source=str(environments.production), target=environments.mounted()["target"])
    assert without_checksums(environments.staging) == tree(environments.production)


def without_checksums(folder: Path) -> dict[str, tuple[bytes, int] | None]:
    return {name: entry for name, entry in tree(folder).items() if not name.endswith(".crc")}


def when_copied(
    monkeypatch: pytest.MonkeyPatch, environments: Environments, do: Callable[[str], None]
) -> None:
    """Call ``do`` with the path of each file between its copy and its name's change."""
    kind = LocalFolder if environments.is_local else Folder
    take = kind.take

    def watched(folder: Any, source: Folder, path: str, staged: str) -> tuple[int, bool]:
        taken = take(folder, source, path, staged)
        do(path)
        return taken

    monkeypatch.setattr(kind, "take", watched)


def test_a_file_is_whole_or_absent_and_success_comes_last(
    everywhere: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.json", "b.json", "_SUCCESS"):
        everywhere.put(name, name.encode())
    everywhere.replicate()
    everywhere.put("b.json", b"b of the next day", 1_709_294_400)
    seen: list[set[str]] = []

    def look(_: str) -> None:
        seen.append({f"{p.name}:{p.read_bytes().decode()}" for p in everywhere.staging.glob("[!.]*")})

    when_copied(monkeypatch, everywhere, look)
    everywhere.replicate(threads=1)
    assert seen == [
        {"a.json:a.json", "b.json:b.json"},
        {"a.json:a.json", "b.json:b of the next day"},
    ]
    assert without_checksums(everywhere.staging) == tree(everywhere.production)


def test_a_copy_with_other_bytes_is_not_published(
    everywhere: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere.put("a.json", b"right")
    monkeypatch.setattr(replica_folders, "copy_bytes", lambda _, target: target.write(b"wrong"))
    monkeypatch.setattr(Folder, "_checksum", lambda *_: (5, 0))
    with pytest.raises(JobFailed, match=r"the copy of a\.json .* has other bytes"):
        everywhere.replicate()
    assert not (everywhere.staging / "a.json").exists()


@pytest.mark.parametrize("kernel", ["copies", "copies half", "refuses", "is another"])
def test_bytes_are_copied_whatever_the_kernel_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    content = os.urandom(3_000_001)
    put(tmp_path / "source", content)
    copy_file_range = os.copy_file_range
    calls: list[int] = []

    def limited(source: int, target: int, _: int) -> int:
        calls.append(source)
        if kernel == "refuses" or (kernel == "copies half" and len(calls) > 1):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return copy_file_range(source, target, 1_500_000)

    if kernel == "is another":
        monkeypatch.delattr(os, "copy_file_range")
    else:
        monkeypatch.setattr(os, "copy_file_range", limited)
    with (tmp_path / "source").open("rb", 0) as source, (tmp_path / "target").open("w+b", 0) as target:
        replica_folders.copy_bytes(source, target)
        assert replica_folders.same_bytes(source, target)
        assert (tmp_path / "target").read_bytes() == content
        for other in (content[:-1], content + b"!", content[:-1] + bytes([content[-1] ^ 1])):
            put(tmp_path / "other", other)
            with (tmp_path / "other").open("rb", 0) as another:
                assert not replica_folders.same_bytes(source, another)
    assert len(calls) == {"copies": 4, "copies half": 2, "refuses": 1, "is another": 0}[kernel]


@pytest.mark.parametrize("stays", [True, False], ids=["changes", "goes away"])
def test_a_source_that_moves_while_it_is_copied(
    everywhere: Environments, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    everywhere.put("a.json", b"one")
    copied: list[str] = []

    def move(path: str) -> None:
        if not copied:
            everywhere.put("a.json", b"two!", 1_709_294_400)
        if not stays:
            (everywhere.production / "a.json").unlink()
        copied.append(path)

    when_copied(monkeypatch, everywhere, move)
    if stays:
        everywhere.replicate()
        assert without_checksums(everywhere.staging) == tree(everywhere.production)
    else:
        with pytest.raises(JobFailed, match="was deleted from"):
            everywhere.replicate()
        assert {path.name for path in everywhere.staging.iterdir()} == {".passthrough_replicator"}


def test_a_link_is_copied_as_its_target(environments: Environments) -> None:
    environments.put("a.json", b"a")
    elsewhere = environments.root / "elsewhere"
    put(elsewhere / "b.json", b"b")
    for name, target in (
        ("file", elsewhere / "b.json"),
        ("folder", elsewhere),
        ("nowhere", Path("/no/file")),
    ):
        (environments.production / name).symlink_to(target)
    environments.replicate()
    assert {name: entry and entry[0] for name, entry in tree(environments.staging).items()} == {
        "a.json": b"a", "file": b"b", "folder": None, "folder/b.json": b"b"
    }  # fmt: skip
    assert not any(path.is_symlink() for path in environments.staging.iterdir())
    assert environments.replicate()["files_copied"] == 0


def test_a_folder_that_a_link_places_in_itself_is_refused(environments: Environments) -> None:
    environments.put("day/a.json", b"a")
    environments.replicate()
    for link, target in (("again", "."), ("day/up", ".."), ("day/deeper/up", "../..")):
        path = environments.production / link
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(target)
        with pytest.raises(WrongUse, match=rf"{link} is a link to .*, in which it lies: .*; remove the link"):
            environments.replicate()
        path.unlink()
    (environments.production / "twin").symlink_to("day")
    environments.replicate()
    assert {name for name, entry in tree(environments.staging).items() if entry} == {
        "day/a.json",
        "twin/a.json",
    }


def test_a_name_that_is_no_text_is_kept(environments: Environments) -> None:
    name = os.fsdecode(b"latin-\xe9.json")
    environments.put(name, b"a")
    environments.replicate()
    assert [os.fsencode(path.name) for path in environments.staging.iterdir()] == [b"latin-\xe9.json"]
    (environments.production / name).unlink()
    environments.put("b.json", b"b")
    environments.replicate()
    assert [path.name for path in environments.staging.iterdir()] == ["b.json"]


def test_a_folder_that_may_not_be_written_is_one_sentence(environments: Environments) -> None:
    def refused(_: SparkSession, parameters: Parameters) -> dict[str, Any]:
        raise PermissionError(errno.EACCES, "Permission denied", parameters.target)

    outcome = job_outcome(
        lambda: environments.spark, Parameters, refused, ["--source", "/a", "--target", "/no/rights"]
    )
    assert outcome == (1, None)


def test_an_empty_source_empties_nothing_unless_it_may(environments: Environments) -> None:
    environments.put("a.json", b"a")
    environments.replicate()
    (environments.production / "a.json").unlink()
    with pytest.raises(DataRefused, match="has no file"):
        environments.replicate()
    assert (environments.staging / "a.json").exists()
    assert environments.replicate(allow_empty=True)["files_deleted"] == 1
    assert tree(environments.staging) == {}


def test_a_file_and_a_folder_change_places(everywhere: Environments) -> None:
    everywhere.put("a", b"file")
    everywhere.put("b/c", b"in a folder")
    everywhere.replicate()
    (everywhere.production / "a").unlink()
    (everywhere.production / "b" / "c").unlink()
    (everywhere.production / "b").rmdir()
    everywhere.put("a/x", b"in a folder")
    everywhere.put("b", b"file")
    everywhere.replicate()
    assert without_checksums(everywhere.staging) == tree(everywhere.production)


def test_a_delta_table_keeps_its_history(environments: Environments, spark: SparkSession) -> None:
    production, staging = str(environments.production), str(environments.staging)
    for number in range(4):
        rows = spark.sql(f"select {number} as id, {number % 2} as day")
        writer = rows.write.format("delta").option("delta.checkpointInterval", "2")
        writer.mode("append").partitionBy("day").save(production)
    with pytest.raises(DataRefused, match="a copy without _delta_log could not be read"):
        environments.replicate(source=f"{production}/day=0", target=f"{staging}/day=0")
    environments.replicate()

    histories = [
        DeltaTable.forPath(spark, path).history().drop("userId", "userName") for path in (staging, production)
    ]
    assert histories[0].count() == 4
    assert_rows(*histories)
    assert_rows(spark.read.format("delta").load(staging), [(n, n % 2) for n in range(4)])
    assert_rows(spark.read.format("delta").load(f"{staging}@v1"), [(0, 0), (1, 1)])

    (environments.staging / "_delta_log").rename(environments.root / "log")
    with pytest.raises(AnalysisException, match="DELTA"):
        spark.read.format("delta").load(staging)


@pytest.mark.parametrize("commit_comes", ["before the log is listed", "after the log is listed"])
def test_a_delta_table_is_copied_as_a_version_it_had(
    environments: Environments, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, commit_comes: str
) -> None:
    """A commit that comes while the folder is listed is whole in this copy or in the next run's, never half."""
    production, staging = str(environments.production), str(environments.staging)
    spark.range(1).write.format("delta").save(production)
    walk, commits = Folder._walk, []

    def committing(folder: Folder, path: str, above: frozenset[str]) -> Any:
        entries = walk(folder, path, above)
        if path == "_delta_log" and folder.given == production and not commits:
            if commit_comes == "after the log is listed":
                entries = iter(list(entries))
            commits.append(1)
            spark.range(1, 2).write.format("delta").mode("append").save(production)
        yield from entries

    monkeypatch.setattr(Folder, "_walk", committing)
    environments.replicate()
    assert commits
    is_in = commit_comes == "before the log is listed"
    assert_rows(spark.read.format("delta").load(staging), [(0,), (1,)] if is_in else [(0,)])
    environments.replicate()
    assert_rows(spark.read.format("delta").load(staging), [(0,), (1,)])


def test_a_shallow_clone_is_refused(environments: Environments, spark: SparkSession) -> None:
    original = environments.root / "original"
    spark.range(1).write.format("delta").save(str(original))
    spark.sql(f"create table delta.`{environments.production}` shallow clone delta.`{original}`")
    with pytest.raises(DataRefused, match="1 files outside its folder"):
        environments.replicate()


POLICY = """
datasets:
  - name: devices
    source: {root}/production/devices
    targets: [{root}/staging/devices, {root}/development/devices]
    tags: [reference]
  - name: users
    source: {root}/production/users
    targets: [{root}/staging/users]
    tags: [PII]
"""


def test_all_environments_get_what_one_call_of_the_api_gave(
    environments: Environments, tmp_path: Path
) -> None:
    """Two calls differ, so that loading twice would give two datasets; replicas of one load are equal."""
    calls = iter([b"answer of 10:00", b"answer of 10:05"])
    environments.put("devices.json", next(calls))
    put(environments.production.parent / "users" / "users.json", b"ann@example.org")
    policy = tmp_path / "replication.yml"
    policy.write_text(POLICY.format(root=tmp_path), encoding="utf-8")
    reports = run(environments.spark, Parameters(policy=str(policy), dataset="devices"))["replicated"]
    assert [report["target"] for report in reports] == [
        f"{tmp_path}/staging/devices", f"{tmp_path}/development/devices"
    ]  # fmt: skip
    assert tree(tmp_path / "development" / "devices") == tree(environments.staging)
    assert tree(environments.staging) == tree(environments.production)
    assert next(calls) != (environments.staging / "devices.json").read_bytes()

    with pytest.raises(DataRefused, match=r"dataset users is tagged pii: .* Transformation Replicator"):
        run(environments.spark, Parameters(policy=str(policy)))
    assert not (tmp_path / "staging" / "users").exists()
    policy.write_text(POLICY.format(root=tmp_path).replace("PII", "internal"), encoding="utf-8")
    run(environments.spark, Parameters(policy=str(policy)))
    assert tree(tmp_path / "staging" / "users") == tree(tmp_path / "production" / "users")


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ("datasets: []", "must hold a list 'datasets'"),
        ("[", "is no YAML"),
        ("datasets: [{name: a, source: /a}]", "needs name, source, a list of targets"),
        ("datasets: [{name: a, source: /a, targets: [/b], pii: true}]", "needs name, source"),
        ("datasets: [{name: a, source: /a, targets: /b}]", "needs name, source"),
        (
            "datasets: [{name: a, source: /a, targets: [/b]}, {name: a, source: /c, targets: [/d]}]",
            "twice: a",
        ),
        ("datasets: [{name: a, source: /a, targets: [/b]}]", "has no dataset devices; it has a"),
    ],
)
def test_a_wrong_policy_is_one_sentence(tmp_path: Path, document: str, sentence: str) -> None:
    policy = tmp_path / "policy.yml"
    policy.write_text(document, encoding="utf-8")
    with pytest.raises(WrongUse, match=sentence):
        Parameters(policy=str(policy), dataset="devices").datasets()


def test_wrong_parameters_are_refused(environments: Environments) -> None:
    for wrong, sentence in [
        ({}, "give either source and target, or a policy"),
        ({"source": "/a"}, "give either"),
        ({"source": "/a", "policy": "p.yml"}, "leave source and target out"),
        ({"source": "/a", "target": "/b", "dataset": "d"}, "dataset d needs a policy, got none"),
        ({"source": "/a", "target": "/b", "threads": 0}, "threads must be 1 or more"),
    ]:
        with pytest.raises(WrongUse, match=sentence):
            Parameters(**wrong)
    with pytest.raises(WrongUse, match="there is no source folder"):
        environments.replicate()
    environments.put("a", b"")
    with pytest.raises(WrongUse, match="is a file; pass the folder in which it lies"):
        environments.replicate(source=f"{environments.production}/a")
    with pytest.raises(WrongUse, match="must not lie in one another"):
        environments.replicate(target=f"{environments.production}/copy")
    assert not (environments.root / "staging").exists()


@pytest.mark.kill
def test_a_killed_run_is_completed_by_the_next(environments: Environments) -> None:
    """Killed while it writes the large file: the small one is there, of the large one nothing can be seen."""
    environments.put("a_small.json", b"small")
    large = environments.production / "b_large.bin"
    with large.open("wb") as file:
        file.truncate(700_000_000)
    argv = [
        sys.executable, str(JOB), "--source", str(environments.production),
        "--target", str(environments.staging), "--threads", "1",
    ]  # fmt: skip
    run_and_kill(argv, environments.staging, at=TableState.DATA_WITHOUT_LOG)
    staging = list((environments.staging / ".passthrough_replicator").iterdir())
    assert [path.name for path in environments.staging.glob("[!.]*")] == ["a_small.json"]
    assert all(path.stat().st_size < 700_000_000 for path in staging)

    report = environments.replicate()
    assert (report["files_copied"], report["files_skipped"]) == (1, 1)
    assert sorted(path.name for path in environments.staging.iterdir()) == ["a_small.json", "b_large.bin"]
    assert (environments.staging / "b_large.bin").stat().st_size == 700_000_000
    for path in (large, environments.staging / "b_large.bin"):
        path.unlink()


def test_the_command_of_the_page(environments: Environments, tmp_path: Path) -> None:
    environments.put("devices.json", ODD)
    policy, command = snippets(PAGE, f"{THIS}test_the_command_of_the_page")
    for uri, folder in {
        "s3a://production": "production",
        "s3a://staging": "staging",
        "s3a://development": "dev",
    }.items():
        policy = policy.replace(uri, str(tmp_path / folder))
    (tmp_path / "replication.yml").write_text(policy, encoding="utf-8")
    words = shlex.split(command.replace("replication.yml", str(tmp_path / "replication.yml")))
    assert words[:2] == ["spark-submit", "python_jobs/ingestion/passthrough_replicator.py"]
    parameters, _ = parse_parameters(Parameters, words[2:])
    run(environments.spark, parameters)
    assert tree(environments.staging) == tree(environments.production)
    assert tree(tmp_path / "dev" / "devices") == tree(environments.production)
