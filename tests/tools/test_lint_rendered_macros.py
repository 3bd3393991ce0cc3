"""sqlfluff reads what a macro renders: wrong SQL is found, right SQL and the layout of templates are not."""

from pathlib import Path

import pytest

from tools.lint_rendered_macros import Call, lint, macros_without_call


@pytest.mark.parametrize(
    ("sql", "finding"),
    [
        ("select a from t", None),
        ("select\n  a,\n        b\n\n\n\nfrom t", None),
        ("select a FROM t", "CP01"),
        ("select a b from t", "AL02"),
        ("select a from from t", "PRS"),
    ],
)
def test_rendered_sql_is_linted(sql: str, finding: str | None) -> None:
    found = list(lint([Call("m", {"x": 1})], render=lambda macro, **arguments: sql))
    assert (found == []) if finding is None else found[0].startswith(f"call 1 of m: {finding} ")


def test_a_fragment_is_linted_where_it_belongs() -> None:
    call = Call("m", within="select a from t where {}")
    assert list(lint([call], render=lambda macro: "a > 1")) == []
    assert list(lint([call], render=lambda macro: "a >"))


def test_a_skipped_call_is_not_rendered() -> None:
    assert list(lint([Call("m", skip="it returns a list")], render=lambda macro: 1 / 0)) == []


def test_a_public_macro_without_a_call_is_found(tmp_path: Path) -> None:
    (tmp_path / "m.sql").write_text(
        "{% macro a() %}{% endmacro %}{% macro default__a() %}{% endmacro %}{% macro _b() %}{% endmacro %}"
    )
    assert list(macros_without_call(tmp_path, [])) == [
        f"{tmp_path}/m.sql:1: no call of 'a' in tests/rendered/"
    ]
    assert list(macros_without_call(tmp_path, [Call("a")])) == []
