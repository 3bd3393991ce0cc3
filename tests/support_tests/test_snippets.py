"""A snippet is found by the test that claims it, and only by that one."""

from pathlib import Path

import pytest

from tests.support.snippets import claimed, snippet, snippets

PAGE = """
<!-- snippet: tests/test_a.py::test_one -->
```sql
select 1
```
<!-- snippet: tests/test_a.py::test_two -->

````md
```sql
inner
```
````
```sql
unclaimed
```
<!-- snippet: tests/test_a.py::test_one -->
```yaml
a: 1
```
<!-- snippet: tests/test_a.py::test_three -->
no block
"""


@pytest.fixture
def page(tmp_path: Path) -> str:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return str(path)


def test_each_block_that_a_test_claims_is_returned_in_order(page: str) -> None:
    assert snippets(page, "tests/test_a.py::test_one") == ["select 1\n", "a: 1\n"]
    assert snippet(page, "tests/test_a.py::test_two") == "```sql\ninner\n```\n"


@pytest.mark.parametrize("name", ["test_three", "test_four"])
def test_a_claim_without_a_block_is_an_error(page: str, name: str) -> None:
    with pytest.raises(LookupError, match="has no fenced block after"):
        snippet(page, f"tests/test_a.py::{name}")


def test_every_claim_of_a_page_is_listed(page: str) -> None:
    assert [test.split("::")[1] for test in claimed(Path(page))] == [
        "test_one",
        "test_two",
        "test_one",
        "test_three",
    ]
