"""SQL for jobs, rendered from the package's dbt macros: a rule for dbt and for jobs is written once, as a macro.

dbt renders macros with Jinja and gives them an adapter, a model's configuration and a connection. This module gives
them Spark instead::

    macros = Macros(spark, ["idempotency/merger/merge.sql", "shared/literals.sql", …], {"unique_key": ["id"]})
    spark.sql(macros.call("_merger_latest", merger, "changes"))

A job can call macros that render SQL or return values. Macros that run statements need dbt.
"""

from __future__ import annotations

import datetime
import importlib.resources
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import jinja2
from pyspark.sql import SparkSession

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.spark.sql_text import identifier

# A symbolic link in the repository; files in the wheel, which Python may import as an archive.
_MACROS: Any = importlib.resources.files("python_jobs") / "macros"

_REFUSED = re.compile(r"lakehouse_patterns: ([^;\n]+)")


def refusal_of_macro(failure: Exception) -> str | None:
    """Return the sentence with which SQL of a macro refused a row; None if the failure has another cause."""
    refused = _REFUSED.search(str(failure))
    return refused[1] if refused else None


class Macros:
    """Macros of some files, which a job can call as dbt calls them."""

    def __init__(
        self, spark: SparkSession, files: Sequence[str], configuration: Mapping[str, Any] | None = None
    ) -> None:
        """Load the files.

        Args:
            spark: session that runs the queries of a macro.
            files: paths below ``macros/``; a macro can call the macros of all files.
            configuration: values that ``config.get`` returns to a macro, as a model would set them; default none.
        """
        environment = jinja2.Environment(extensions=["jinja2.ext.do"], autoescape=False)
        environment.globals |= {
            "return": _hand_back,
            "lakehouse_patterns": _Namespace(self),
            "adapter": SimpleNamespace(quote=identifier, dispatch=self._dispatch),
            "config": configuration or {},
            "exceptions": SimpleNamespace(raise_compiler_error=_refuse),
            "modules": SimpleNamespace(datetime=datetime, re=re),
            "run_query": lambda query: SimpleNamespace(rows=spark.sql(query).collect()),
        }
        self._macros: dict[str, Any] = {}
        for file in files:
            template = environment.from_string((_MACROS / file).read_text(encoding="utf-8"))
            context = template.new_context()
            for _ in template.root_render_func(context):  # defines the macros, private ones included
                pass
            self._macros |= context.vars

    def _dispatch(self, name: str, _package: str) -> Callable[..., Any]:
        """Return the macro that a public macro stands for on Spark."""
        return lambda *arguments, **keywords: self.call(f"default__{name}", *arguments, **keywords)

    def call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """Return the value that a macro passes to ``return``; for a macro without ``return``, its text.

        Raises:
            WrongUse: the macro refuses its arguments; the message is the macro's sentence.
        """
        try:
            return self._macros[name](*arguments, **keywords)
        except _Return as returned:
            return returned.value


class _Namespace:
    """``lakehouse_patterns.<macro>`` inside a template."""

    def __init__(self, macros: Macros) -> None:
        self._call = macros.call

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **keywords: self._call(name, *arguments, **keywords)


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


def _hand_back(value: Any = None) -> NoReturn:
    raise _Return(value)


def _refuse(sentence: str) -> NoReturn:
    raise WrongUse(sentence.removeprefix("lakehouse_patterns: "))
