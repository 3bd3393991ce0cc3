"""Columns that several sources have in common: each source computes them by its own expressions.

What follows a union then knows no source. A CASE on the source in every column is the alternative, and grows with each
source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.origins import ORIGIN, Origin
from python_jobs.shared.spark.expressions import resolved


def harmonised(
    records: DataFrame, columns: Mapping[str, str], origin: Origin, own: Sequence[Column] = ()
) -> DataFrame:
    """Return a source's records as rows of the common columns, behind the columns ``own`` and before their origin.

    Raises:
        WrongUse: an expression can't be resolved.
    """
    with resolved():
        return records.select(
            *own,
            *(F.expr(expression).alias(name) for name, expression in columns.items()),
            F.lit(origin).alias(ORIGIN),
        )


def require_same_types(sources: Mapping[str, DataFrame]) -> None:
    """Refuse sources whose columns of one name have different types; ``sources`` are their rows by a name for messages.

    Raises:
        WrongUse: there is such a column.
    """
    (first, rows), *others = sources.items()
    types = dict(rows.dtypes)
    for other, other_rows in others:
        for name, type_ in other_rows.dtypes:
            if types[name] != type_:
                raise WrongUse(
                    f"the column '{name}' is {types[name]} in {first} and {type_} in {other}; cast one of them"
                )
