"""Tables and views of the catalog that a job owns: a table property says so, and no other relation is replaced."""

from __future__ import annotations

from pyspark.sql import SparkSession

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.spark.sql_text import identifier, properties_list, string_literal


def quoted_relation(name: str) -> str:
    """Return the name of a relation, such as ``schema.name``, with each part quoted for SQL."""
    return ".".join(identifier(part) for part in name.split("."))


def is_own(spark: SparkSession, relation: str, mark: str, owner: str) -> bool:
    """Return whether the table property ``mark`` of an existing relation names ``owner``, in any case of letters."""
    found = spark.sql(f"show tblproperties {quoted_relation(relation)} ({string_literal(mark)})").collect()
    return found[0]["value"].lower() == owner.lower()


def require_own(spark: SparkSession, view: str, mark: str, owner: str) -> None:
    """Refuse a view that exists and has another owner.

    Raises:
        WrongUse: it does.
    """
    if spark.catalog.tableExists(quoted_relation(view)) and not is_own(spark, view, mark, owner):
        raise WrongUse(
            f"{view} exists and was not created by this job: rename or drop it, or name another view"
        )


def replace_view(spark: SparkSession, view: str, mark: str, owner: str, query: str) -> None:
    """Create or replace a view, after :func:`require_own`; ``mark`` is the table property that names the owner."""
    own = properties_list({mark: owner})
    spark.sql(f"create or replace view {quoted_relation(view)} tblproperties {own} as {query}")
