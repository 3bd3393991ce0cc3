"""A job that ends at the write of one of its tables, as a crash or a full disk would end it there."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest


@contextmanager
def failing_at(table: str, job: ModuleType, write: str, failure: BaseException) -> Iterator[None]:
    """Let the block's write of ``table`` raise ``failure``, which the block must not catch.

    Args:
        table: path or name of the table; the job writes all others.
        job: module of the job, which imports the function that writes.
        write: name of that function, such as ``append`` or ``write_once``; it has a parameter ``table``.
        failure: exception to raise.
    """
    original = getattr(job, write)
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def fails(*arguments: Any, **named: Any) -> Any:
        if parameters.bind(*arguments, **named).arguments["table"] == table:
            raise failure
        return original(*arguments, **named)

    with patch.object(job, write, fails), pytest.raises(type(failure), match=re.escape(str(failure)) or None):
        yield
