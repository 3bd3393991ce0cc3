"""The README's table says what the catalog says."""

from dataclasses import replace
from pathlib import PurePosixPath

import pytest

from tools.catalog import pattern_of
from tools.pattern_table import BEGIN, END, labelled, table, with_table

MERGER = pattern_of(
    "idempotency",
    {
        "id": "merger",
        "name": "Merger",
        "names": {"book": "Merger", "guide": None},
        "sections": {
            "book": {"spec": "04.md#merger", "bullets": 2},
            "pat-upsert": {"spec": "20.md#pat-upsert", "bullets": 1},
        },
        "forms": [{"macro": "macros/m.sql"}, {"job": "python_jobs/m.py"}],
        "files": ["macros/m.sql"],
        "page": "docs/idempotency.md#merger",
        "behaviours": [
            {"id": "a", "bullet": 1, "sentence": "Inserts.", "test": "tests/test_m.py::test_a"},
            {
                "id": "b",
                "bullet": [2, "pat-upsert 1"],
                "sentence": "Costs little.",
                "reason": "A matter of price lists.",
            },
        ],
    },
)
README = PurePosixPath("README.md")


def test_a_row_links_the_page_and_the_files_and_counts_what_is_proved() -> None:
    assert table([MERGER], README.parent).splitlines()[2:] == [
        "| [Merger](docs/idempotency.md#merger) | idempotency "
        "| [macro](macros/m.sql), [job](python_jobs/m.py) | 1 of 2 |"
    ]
    assert table([MERGER], PurePosixPath("docs")).splitlines()[2:] == [
        "| [Merger](idempotency.md#merger) | idempotency "
        "| [macro](../macros/m.sql), [job](../python_jobs/m.py) | 1 of 2 |"
    ]


def test_several_forms_of_a_kind_bear_their_names() -> None:
    forms = [{"job": "python_jobs/a.py"}, {"macro": "macros/m.sql"}, {"job": "python_jobs/b.py"}]
    assert labelled(replace(MERGER, forms=forms)) == {
        "job a": "python_jobs/a.py",
        "macro": "macros/m.sql",
        "job b": "python_jobs/b.py",
    }


def test_only_the_text_between_the_markers_changes() -> None:
    text = f"# Title\n{BEGIN}\nold\n{END}\nrest\n"
    assert with_table(text, "new", README) == f"# Title\n{BEGIN}\nnew\n{END}\nrest\n"
    assert with_table(with_table(text, "new", README), "new", README) == with_table(text, "new", README)


@pytest.mark.parametrize("text", ["no markers", f"{BEGIN} only", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_readme_without_its_markers_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match=r"README\.md must hold one"):
        with_table(text, "new", README)


def test_a_bullet_is_one_of_the_first_section_unless_it_names_another() -> None:
    assert [behaviour.bullets for behaviour in MERGER.behaviours] == [
        (("04.md#merger", 1),),
        (("04.md#merger", 2), ("20.md#pat-upsert", 1)),
    ]


def test_a_section_that_the_entry_does_not_name_is_refused() -> None:
    section = {"spec": "04.md#merger", "bullets": 2}
    with pytest.raises(KeyError, match="pat-dlq"):
        pattern_of(
            "idempotency",
            {
                "id": "x",
                "sections": {"book": section},
                "behaviours": [{"id": "a", "bullet": "pat-dlq 1", "sentence": "Inserts."}],
            },
        )


def test_a_field_the_catalog_does_not_know_is_refused() -> None:
    with pytest.raises(TypeError, match="owner"):
        pattern_of("idempotency", {"id": "x", "sections": {}, "behaviours": [], "owner": "me"})
