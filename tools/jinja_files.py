"""Reads the declarations of a dbt macro file from its text, without dbt and Spark, in milliseconds."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
BLOCK = re.compile(
    r"\{%-?\s*(?P<kind>macro|test|materialization)\s+(?P<name>\w+)\s*(?P<rest>.*?)-?%\}"
    r"(?P<body>.*?)\{%-?\s*end(?P=kind)\s*-?%\}",
    re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A macro, generic test or materialization: dbt's name for it, its argument names in order, its body."""

    kind: str
    name: str
    arguments: tuple[str, ...]
    body: str
    path: Path
    line: int

    @property
    def public(self) -> bool:
        """Whether users call the macro: it is neither private (`_name`) nor a dispatched variant (`default__name`)."""
        return not self.name.startswith("_") and "__" not in self.name


def blocks(root: Path) -> Iterator[Block]:
    """Yield the blocks of every SQL file under `root`, in file order."""
    for path in sorted(root.rglob("*.sql")):
        text = without_comments(path.read_text(encoding="utf-8"))
        for match in BLOCK.finditer(text):
            yield Block(
                kind=match["kind"],
                name=_dbt_name(match["kind"], match["name"], match["rest"]),
                arguments=_arguments(match["rest"]) if match["kind"] != "materialization" else (),
                body=match["body"],
                path=path,
                line=text.count("\n", 0, match.start()) + 1,
            )


def without_comments(text: str) -> str:
    """Return the text with blanks in place of Jinja comments; every line keeps its number."""
    return COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)


def _dbt_name(kind: str, name: str, rest: str) -> str:
    if kind == "test":
        return f"test_{name}"
    if kind == "materialization":
        adapter = re.search(r"adapter\s*=\s*['\"](\w+)['\"]", rest)
        return f"materialization_{name}_{adapter[1] if adapter else 'default'}"
    return name


def _arguments(signature: str) -> tuple[str, ...]:
    """Return the names in `(a, b='x, y', c=[1, 2])`: commas inside of brackets and quotes don't separate names."""
    inside = signature.strip()[1:].rsplit(")", 1)[0]
    names, depth, quote, start = [], 0, "", 0
    for position, char in enumerate(inside + ","):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            names.append(inside[start:position].split("=")[0].strip())
            start = position + 1
    return tuple(name for name in names if name)
