"""YAML files that a parameter names."""

from __future__ import annotations

from pathlib import Path

import pytest

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.yaml_files import read_yaml


def test_yaml_and_json_are_read_in_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "contract.yml"
    file.write_text("name: Größe\ncolumns: [a, b]\n", encoding="utf-8")
    assert read_yaml(str(file), "contract") == {"name": "Größe", "columns": ["a", "b"]}
    file.write_text('{"a": [1, null]}', encoding="utf-8")
    assert read_yaml(str(file), "contract") == {"a": [1, None]}


def test_a_file_that_is_missing_or_no_yaml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "contract.yml"
    for path in (str(file), str(tmp_path)):
        with pytest.raises(WrongUse, match=rf"^the contract '{path}' doesn't exist$"):
            read_yaml(path, "contract")
    file.write_text("a: [", encoding="utf-8")
    with pytest.raises(WrongUse, match=rf"^the contract '{file}' is no YAML$"):
        read_yaml(str(file), "contract")
    file.write_bytes("name: Größe".encode("latin-1"))
    with pytest.raises(WrongUse, match=rf"^the contract '{file}' is no YAML$"):
        read_yaml(str(file), "contract")
    file.write_text("a: !!python/object/apply:os.getcwd []", encoding="utf-8")
    with pytest.raises(WrongUse, match="is no YAML"):
        read_yaml(str(file), "contract")
