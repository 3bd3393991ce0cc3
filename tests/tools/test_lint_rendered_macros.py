"""sqlfluff reads what a macro renders: wrong SQL is found, right SQL and the layout of templates are not."""

from pathlib import Path

import pytest

from tools.lint_rendered_macros import NOT_OURS, Call, Statement, lint, macros_without_call, rendered


@pytest.mark.parametrize(
    ("sql", "finding"),
    [
        ("select a from t", None),
        ("select\n  a,\n        b   \n\n\n\nfrom t", None),
        ("select a FROM t", "CP01"),
        ("select a b from t", "AL02"),
        ("select a from from t", "PRS"),
        ("merge into t using s on t.a = s.a when matched then update set t.b = s.b", None),
        ("merge into t using s on t.a = s.a when matched then change t.b = s.b", "PRS"),
    ],
)
def test_statements_are_linted(sql: str, finding: str | None) -> None:
    found = list(lint([Statement("m", sql)]))
    assert (found == []) if finding is None else found[0].startswith(f"m: {finding} ")


def test_a_fragment_is_put_where_it_belongs() -> None:
    calls = [Call("m", {"x": 1}), Call("n", {"x": 2}, within="select a from t where {}")]
    assert list(rendered(calls, render=lambda macro, x: f"{macro} > {x}")) == [
        Statement("call 1 of m", "m > 1"),
        Statement("call 2 of n", "select a from t where n > 2"),
    ]


def test_a_skipped_call_is_not_rendered() -> None:
    assert list(rendered([Call("m", skip="it returns a list")], render=lambda macro: 1 / 0)) == []


@pytest.mark.parametrize(("sql", "ours"), [("/* x */\n  describe extended t", False), ("merge into t", True)])
def test_what_dbt_asks_the_catalog_is_left_out(sql: str, ours: bool) -> None:
    assert (NOT_OURS.match(sql) is None) is ours


def test_a_public_macro_without_a_call_is_found(tmp_path: Path) -> None:
    (tmp_path / "m.sql").write_text(
        "{% macro a() %}{% endmacro %}{% macro default__a() %}{% endmacro %}{% macro _b() %}{% endmacro %}"
    )
    assert list(macros_without_call(tmp_path, [])) == [
        f"{tmp_path}/m.sql:1: no call of 'a' in tests/rendered/"
    ]
    assert list(macros_without_call(tmp_path, [Call("a")])) == []
