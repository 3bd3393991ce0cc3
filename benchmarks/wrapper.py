"""Wrapper: what wrapping costs on writing, and that computed values are read without the record."""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql import DataFrame

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.shared.spark.jvm import executed_plan
from tests.support.render import MacroRenderer

ROWS = 4_000_000
COMPUTED = {
    "is_connected": "context.connected_since is not null",
    "page_referral_key": "concat_ws('-', page, context.referral)",
}
COLUMN = {
    "computed_struct": "decorated.page_referral_key",
    "raw_struct": "page_referral_key",
    "flat": "computed_page_referral_key",
}


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """Write 1 M visits plain and in three layouts; then aggregate a computed column of each."""
    spark, rows = bench.spark, bench.rows(ROWS)
    render = MacroRenderer(bench.folder / "render", spark)
    spark.range(rows).selectExpr(
        "md5(cast(id as string)) as visit_id",
        "concat('article_', id % 1009) as page",
        "sha2(cast(id as string), 512) as user_agent",
        "named_struct('referral', if(id % 3 = 0, 'search', null), 'connected_since', nullif(id % 2, 0)) as context",
    ).write.format("delta").save(str(bench.folder / "visits"))
    visits = f"delta.`{bench.folder / 'visits'}`"
    queries = {
        layout: render("wrapper", relation=visits, computed=COMPUTED, layout=layout) for layout in COLUMN
    }
    queries["original"] = f"select * from {visits}"
    queries["computed alone"] = render(
        "wrapper", relation=visits, computed=COMPUTED, layout="two_tables", key="visit_id", part="computed"
    )

    def table(name: str) -> DataFrame:
        return bench.table(bench.folder / f"wrapped {name}")

    def write(name: str) -> None:
        path = str(bench.folder / f"wrapped {name}")
        spark.sql(queries[name]).write.format("delta").mode("overwrite").save(path)

    def original(name: str) -> DataFrame:
        if name == "original":
            return table(name)
        table(name).createOrReplaceTempView("wrapped")
        return spark.sql(render("unwrap", relation="wrapped", layout=name, computed=list(COMPUTED)))

    yield Comparison(
        "Writing",
        rows,
        [
            Variant(name, lambda name=name: write(name), lambda name=name: original(name))
            for name in ("original", *COLUMN)
        ],
        [Aim("computed_struct", "original", at_most=1.3)],
        repetitions=3,
        note="Equal results: unwrapping each layout gives the original rows.",
    )

    write("computed alone")
    columns = COLUMN | {"computed alone": "page_referral_key"}

    def values(name: str) -> DataFrame:
        return table(name).selectExpr(f"{columns[name]} as key").groupBy("key").count()

    def read_schema(name: str) -> str:
        plan = executed_plan(values(name)).toString()
        return plan.split("ReadSchema: ")[1].split("\n")[0]

    yield Comparison(
        "Reading a computed value",
        rows,
        [
            Variant(
                name,
                lambda name=name: values(name).write.format("noop").mode("overwrite").save(),
                lambda name=name: values(name),
            )
            for name in ("computed alone", *COLUMN)
        ],
        [Aim(name, "computed alone", at_most=1.2) for name in COLUMN],
        note="Against a table that holds nothing but the computed values.",
        facts=lambda: {f"ReadSchema of {name}": f"`{read_schema(name)}`" for name in columns},
    )
