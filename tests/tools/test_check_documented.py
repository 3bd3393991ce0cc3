"""Each finding is provoked by a fixture that is wrong in one place; the fixture without it passes."""

from pathlib import Path

import pytest

from tools.check_documented import (
    undocumented_macros,
    undocumented_models,
    undocumented_python,
    unproved_grains,
    untagged_columns,
)

MACROS = """
{# {% macro in_a_comment() %}{% endmacro %} #}
{% macro keep_latest(relation, order_by=['a', 'b, c'], ties='x') %}
    {{ return(adapter.dispatch('keep_latest', 'lakehouse_patterns')(relation, order_by, ties)) }}
{% endmacro %}
{%- macro default__keep_latest(relation, order_by, ties) -%} select 1 {%- endmacro -%}
{% macro _private() %}{% endmacro %}
{% test no_gap(model, column_name, from_column) %} select 1 {% endtest %}
{% materialization scd2, adapter='spark' %} {% endmaterialization %}
"""
MACROS_YAML = """
macros:
  - name: keep_latest
    description: One row a key.
    arguments:
      - {name: relation, description: What to read.}
      - {name: order_by, description: Newest first.}
      - {name: ties, description: What breaks ties.}
  - name: test_no_gap
    description: Intervals meet.
    arguments:
      - {name: from_column, description: Start of an interval.}
  - name: materialization_scd2_spark
    description: History of a change feed.
"""


def macro_findings(folder: Path, sql: str, yaml: str) -> list[str]:
    (folder / "f.sql").write_text(sql)
    (folder / "_f__macros.yml").write_text(yaml)
    return [line.removeprefix(f"{folder}/") for line in undocumented_macros(folder)]


def test_documented_macros_pass(tmp_path: Path) -> None:
    assert macro_findings(tmp_path, MACROS, MACROS_YAML) == []


@pytest.mark.parametrize(
    ("in_yaml", "instead", "finding"),
    [
        ("One row a key.", "''", "f.sql:3: macro 'keep_latest' has no description"),
        ("What breaks ties.", "''", "f.sql:3: argument 'ties' of 'keep_latest' has no description"),
        (
            "name: ties",
            "name: tie",
            "f.sql:3: 'keep_latest' takes ['relation', 'order_by', 'ties'], its YAML",
        ),
        ("name: from_column", "name: to_column", "its YAML describes ['to_column']"),
        (
            "History of a change feed.",
            "",
            "f.sql:9: materialization 'materialization_scd2_spark' has no description",
        ),
    ],
)
def test_each_gap_in_the_yaml_is_found(tmp_path: Path, in_yaml: str, instead: str, finding: str) -> None:
    (found,) = macro_findings(tmp_path, MACROS, MACROS_YAML.replace(in_yaml, instead))
    assert finding in found


def test_a_description_of_no_macro_is_found(tmp_path: Path) -> None:
    yaml = MACROS_YAML + "  - {name: gone, description: It was renamed.}\n"
    assert macro_findings(tmp_path, MACROS, yaml) == [
        f"{tmp_path}: the YAML describes the macro 'gone', which no file declares"
    ]


MODELS_YAML = """
models:
  - name: gold_sales
    description: Sales a day.
    columns:
      - {name: day, description: UTC day.}
sources:
  - name: bronze
    tables:
      - {name: bronze_sales, description: Raw lines., columns: [{name: payload, description: The line.}]}
"""


def model_findings(project: Path, yaml: str) -> list[str]:
    gold = project / "models" / "gold"
    gold.mkdir(parents=True)
    (gold / "gold_sales.sql").write_text("select 1 as day")
    (gold / "_gold__models.yml").write_text(yaml)
    return list(undocumented_models(project))


def test_documented_models_pass(tmp_path: Path) -> None:
    assert model_findings(tmp_path, MODELS_YAML) == []


@pytest.mark.parametrize(
    ("in_yaml", "instead", "finding"),
    [
        ("Sales a day.", "''", "'gold_sales' has no description"),
        ("UTC day.", "''", "'gold_sales': column 'day' has no description"),
        ("columns:\n      - {name: day, description: UTC day.}", "", "'gold_sales' describes no column"),
        ("name: gold_sales", "name: gold_sale", "'gold_sales' has no description"),
        ("Raw lines.", "''", "'bronze_sales' has no description"),
    ],
)
def test_each_undocumented_relation_is_found(
    tmp_path: Path, in_yaml: str, instead: str, finding: str
) -> None:
    assert model_findings(tmp_path, MODELS_YAML.replace(in_yaml, instead))[0] == finding


PYTHON = '''
"""A module."""
class Parameters:
    """What to load."""
    source: str
    """Where from."""
    def checked(self):
        """Say whether it fits."""
def run():
    """Load."""
def _private(): ...
'''.lstrip()


def python_findings(folder: Path, text: str) -> list[str]:
    (folder / "job.py").write_text(text)
    return [line.removeprefix(f"{folder}/") for line in undocumented_python(folder)]


def test_documented_python_passes(tmp_path: Path) -> None:
    assert python_findings(tmp_path, PYTHON) == []


@pytest.mark.parametrize(
    ("docstring", "finding"),
    [
        ('"""A module."""', "job.py:1: the module has no docstring"),
        ('"""What to load."""', "job.py:2: 'Parameters' has no docstring"),
        ('"""Where from."""', "job.py:4: parameter 'source' has no docstring under it"),
        ('"""Say whether it fits."""', "job.py:6: 'checked' has no docstring"),
        ('"""Load."""', "job.py:8: 'run' has no docstring"),
    ],
)
def test_each_missing_docstring_is_found(tmp_path: Path, docstring: str, finding: str) -> None:
    assert finding in python_findings(tmp_path, PYTHON.replace(docstring, "0"))


GRAINS = """
models:
  - name: gold_users
    description: >-
      Users of any
      date. One row per id, record.offset and day.
    data_tests:
      - other
      - one_row_per:
          arguments: {columns: [id, record.offset, day]}
    columns:
      - {name: email, data_type: string, description: Address., config: {tags: [pii]}}
  - name: silver_lines
    description: Lines. One row per valid line; no key.
    columns:
      - {name: page, data_type: string, description: Page.}
"""


@pytest.mark.parametrize(
    ("in_yaml", "instead", "finding"),
    [
        ("", "", None),
        ("One row per id, record.offset and day.", "All of them.", "'gold_users': its description must end"),
        (
            "One row per id,",
            "One row per user, id,",
            "'gold_users': its grain is ['user', 'id', 'record.offset'",
        ),
        ("[id, record.offset, day]", "[id, day]", "its test one_row_per has [['id', 'day']]"),
        ("- one_row_per:", "- no_row_per:", "its test one_row_per has []"),
        ("; no key", "", "'silver_lines': its grain is ['valid line'], its test one_row_per has []"),
        (", config: {tags: [pii]}", "", "'gold_users': column 'email' holds personal data"),
        ("name: page,", "name: payload,", "'silver_lines': column 'payload' holds personal data"),
    ],
)
def test_a_grain_is_stated_and_proved_and_personal_data_are_tagged(
    tmp_path: Path, in_yaml: str, instead: str, finding: str | None
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "models.yml").write_text(GRAINS.replace(in_yaml, instead) if in_yaml else GRAINS)
    found = [*unproved_grains(tmp_path), *untagged_columns(tmp_path)]
    assert len(found) == (finding is not None)
    assert finding is None or finding in found[0]
