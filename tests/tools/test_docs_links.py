"""In the site, a link out of docs/ is text if its file exists; anything else is MkDocs' to judge."""

import pytest

from tools.docs_links import on_page_markdown


@pytest.mark.parametrize(
    ("markdown", "in_the_site"),
    [
        ("see [the licence](../LICENSE) and [it](../LICENSE#top)", "see the licence and it"),
        ("see [a page](benchmarks.md)", "see [a page](benchmarks.md)"),
        ("see [nothing](../macros/gone.sql)", "see [nothing](../macros/gone.sql)"),
    ],
)
def test_links_out_of_docs(markdown: str, in_the_site: str) -> None:
    assert on_page_markdown(markdown, page=None) == in_the_site
