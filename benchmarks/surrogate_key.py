"""Surrogate key against dbt_utils' md5 of concatenated texts: what telling NULL from empty costs."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness import Comparison, Variant, Workbench
from tests.support.render import MacroRenderer

ROWS = 10_000_000
COLUMNS = ["user_id", "page", "visit_day", "visited_at"]
# What dbt_utils.generate_surrogate_key renders.
BY_DBT_UTILS = "md5(cast(concat({}) as string))".format(
    ", '-', ".join(f"coalesce(cast({name} as string), '_dbt_utils_surrogate_key_null_')" for name in COLUMNS)
)


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """Compute one key of four columns for 10 M rows, into a sink that takes every row and keeps none."""
    spark, rows = bench.spark, bench.rows(ROWS)
    render = MacroRenderer(bench.folder / "render", spark)
    path = str(bench.folder / "visits")
    spark.range(rows).selectExpr(
        "id % 100003 as user_id",
        "concat('category_', id % 20, '/article_', id % 1009) as page",
        "date_add(date'2026-01-01', cast(id % 100 as int)) as visit_day",
        "timestamp_seconds(1767225600 + id) as visited_at",
    ).write.format("delta").save(path)

    def compute(key: str) -> None:
        table = bench.table(path)
        table.selectExpr(f"{key} as visit_key").write.format("noop").mode("overwrite").save()

    def distinct(key: str) -> str:
        table = bench.table(path)
        return f"{table.selectExpr(f'{key} as visit_key').distinct().count():,} distinct keys"

    keys = {
        "surrogate_key": render("surrogate_key", columns=COLUMNS),
        "surrogate_key, nullable columns": render("surrogate_key", columns=COLUMNS, nullable=COLUMNS),
        "md5 of concatenated texts (dbt_utils)": BY_DBT_UTILS,
        "sha2 of concatenated texts": BY_DBT_UTILS.replace("md5(", "sha2(", 1)[:-1] + ", 256)",
        "the columns alone": "struct({})".format(", ".join(COLUMNS)),
    }
    yield Comparison(
        title="A key of four columns",
        rows=rows,
        note=(
            "bigint, text, date and timestamp, read from one Delta table. The keys differ on purpose: those of "
            "concatenated texts are the same for a-b with c as for a with b-c, and change with the session's time zone."
        ),
        variants=[Variant(name, lambda key=key: compute(key), None) for name, key in keys.items()],
        repetitions=5,
        facts=lambda: {name: distinct(key) for name, key in keys.items()},
    )
