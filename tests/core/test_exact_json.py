"""JSON that is parsed and written again: digits stay, and what is no JSON is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from python_jobs.idempotency.transactional_writer_kafka import Reducer
from python_jobs.ingestion.data_contract import filter_line, load_contract
from python_jobs.shared.core import exact_json
from python_jobs.shared.core.failures import DataRefused


@pytest.mark.parametrize(
    "text",
    [
        "1.10",
        "0.12345678901234567890",
        "1E+2",
        "-0.0",
        "-0",
        '{"a": 1e400, "a": [true, null, "x"]}',
        '"\\ud800"',
        '"ü"',
    ],
)
def test_what_is_parsed_is_written_as_it_was(text: str) -> None:
    assert exact_json.write(exact_json.parse(text)) == text


def test_separators_hold_at_every_depth() -> None:
    compact = '{"a":[1,{"b":[2,3],"c":"ü"}]}'
    assert exact_json.write(exact_json.parse(compact), (",", ":")) == compact


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        '{"a": Infinity}',
        "[-Infinity]",
        '{"a":1}{',
        '{"a":1}, ',
        b'"\xff"',
        b'"\xed\xa0\x80"',
        '{"a": 1}'.encode("utf-16"),
        '{"a": 1}'.encode("utf-16-be"),
        "",
    ],
)
def test_what_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"no JSON|char \d|codec"):
        exact_json.parse(text)


def test_bytes_are_utf_8() -> None:
    assert exact_json.parse(b'\xef\xbb\xbf"\xc3\xbc"') == "ü"


def test_values_by_name_need_names_of_their_own() -> None:
    assert exact_json.by_name(exact_json.Object([("a", 1), ("b", 1)])) == {"a": 1, "b": 1}
    with pytest.raises(exact_json.RepeatedName, match="a JSON object has a name twice"):
        exact_json.by_name(exact_json.Object([("a", 1), ("b", 1), ("a", 1)]))


class Message:
    def __init__(self, value: bytes) -> None:
        self._value = value

    def value(self) -> bytes:
        return self._value

    def topic(self) -> str:
        return "visits"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 7


def test_a_reduced_record_keeps_its_digits() -> None:
    reducer = Reducer.__new__(Reducer)
    reducer._fields = {"total": "price", "who": "name"}
    message: Any = Message('{"price":0.12345678901234567890,"name":"ü"}'.encode())
    assert reducer.value(message) == '{"total":0.12345678901234567890,"who":"ü"}'.encode()
    for payload in (
        b'{"price":NaN,"name":"a"}',
        b'[["price",1],["name",2]]',
        b'{"price":1}',
        b'{"price":1,"name":"a","name":"b"}',
    ):
        message = Message(payload)
        with pytest.raises(DataRefused, match="visits/0 offset 7 is no JSON object with price, name"):
            reducer.value(message)


def test_a_line_that_is_no_json_does_not_leave(tmp_path: Path) -> None:
    contract = tmp_path / "users.yml"
    contract.write_text("dataset: users\ncolumns: [{name: id}, {name: price}]\n")
    kept = [
        filter_line(load_contract(str(contract)), line)[0]
        for line in ('{"id":1.10,"price":1e400}', '{"id":1,"price":NaN}', '{"id":1,"price":-Infinity}')
    ]
    assert kept == ['{"id": 1.10, "price": 1e400}', None, None]
