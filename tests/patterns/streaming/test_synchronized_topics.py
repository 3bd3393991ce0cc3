"""Configuration of the Zero-ETL Synchronizer: what an entry may say, and which offsets a run copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from python_jobs.shared.core.failures import WrongUse
from python_jobs.streaming.synchronized_topics import SynchronizedTopic, load_topics

VISITS: dict[str, Any] = {"topic": "visits", "table": "raw.visits", "location": "raw/visits"}


def load(folder: Path, *entries: Any, **others: Any) -> list[SynchronizedTopic]:
    file = folder / "topics.yml"
    file.write_text(yaml.safe_dump({"topics": list(entries), **others}))
    return load_topics(str(file))


@pytest.mark.parametrize("key", ["filter", "where", "select", "columns", "derive", "drop", "rename"])
def test_an_entry_that_asks_for_a_transformation_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(
        WrongUse,
        match=f"topic visits in .* unknown key {key}; allowed are .*; this job copies records unchanged: .* "
        "Transformation Replicator",
    ):
        load(tmp_path, VISITS | {key: "amount > 0"})


def test_wrong_entries_are_refused_in_one_sentence(tmp_path: Path) -> None:
    refused: list[tuple[list[Any], str]] = [
        ([], "names no topic"),
        (["visits"], "each entry of the configuration .* must be a map with a topic, got 'visits'"),
        ([VISITS | {"tabel": "x"}], "unknown key tabel; allowed are compaction, location, records_per_run"),
        ([VISITS | {"table": ""}], "visits in .* has no table"),
        (
            [VISITS | {"table": "raw/visits"}],
            "table must be a name in the catalog, got the path 'raw/visits'",
        ),
        ([VISITS | {"location": 5}], "location must be a text, got 5"),
        ([VISITS | {"segment_records": "many"}], "segment_records must be a whole number, got 'many'"),
        ([VISITS | {"segment_records": True}], "segment_records must be a whole number, got True"),
        ([VISITS | {"segment_records": None}], "segment_records must be a whole number, got None"),
        ([VISITS | {"segment_records": 0}], "visits in .*: segment_records must be 1 or more, got 0"),
        (
            [VISITS | {"segment_records": 5, "records_per_run": 4}],
            "records_per_run is 4 and segment_records 5",
        ),
        ([VISITS | {"segment_age": "soon"}], "visits in .*: 'soon' is no duration"),
        ([VISITS | {"compaction": 5}], "compaction must be a map, got 5"),
        ([VISITS | {"compaction": {"where": "x"}}], "compaction has the unknown key where"),
        ([VISITS | {"compaction": {"target_file_mb": "big"}}], "target_file_mb must be a number, got 'big'"),
        ([VISITS | {"compaction": {"min_small_files": 1}}], "min_small_files is 1; merging takes at least 2"),
        ([VISITS, VISITS | {"table": "raw.b", "location": "raw/b"}], "two entries .* have the topic visits"),
        ([VISITS, VISITS | {"topic": "b", "location": "raw/b"}], "two entries .* have the table raw.visits"),
        (
            [VISITS, VISITS | {"topic": "b", "table": "Raw.B", "location": "raw/visits/"}],
            "the location raw/visits",
        ),
    ]
    for entries, sentence in refused:
        with pytest.raises(WrongUse, match=sentence):
            load(tmp_path, *entries)
    with pytest.raises(WrongUse, match="unknown key where; allowed are topics; this job copies"):
        load(tmp_path, VISITS, where="x")
    (tmp_path / "empty.yml").write_text("")
    with pytest.raises(WrongUse, match="must hold a list 'topics'"):
        load_topics(str(tmp_path / "empty.yml"))


def test_a_segment_is_closed_when_it_is_full_or_old() -> None:
    """Segments of 5 offsets begin at multiples of 5, wherever a run begins."""
    visits = SynchronizedTopic(**VISITS, segment_records=5)
    for start, end, old_until, stop in [
        (0, 4, 0, 0),  # the first segment is open
        (0, 5, 0, 5),  # its last offset closes it
        (3, 11, 0, 10),  # a run that begins within a segment ends at the same boundaries
        (0, 7, 6, 6),  # the records before offset 6 are old
        (0, 12, 6, 10),  # full segments reach further than old records
        (6, 7, 6, 6),  # nothing new
        (10, 10, 4, 10),  # a partition that is copied to its end stays there
        (0, 7, 9, 7),  # more records are old by now than there were when the end was asked for
    ]:
        assert visits.end_of_run(start, end, old_until) == stop, (start, end, old_until)


def test_a_run_copies_at_most_so_many_offsets_in_whole_segments() -> None:
    visits = SynchronizedTopic(**VISITS, segment_records=5, records_per_run=12)
    for start, end, old_until, stop in [
        (0, 12, 0, 10),
        (0, 100, 0, 10),
        (3, 100, 0, 15),
        (90, 102, 102, 102),  # no more than 12 are left
        (90, 103, 103, 100),
    ]:
        assert visits.end_of_run(start, end, old_until) == stop, (start, end, old_until)
