"""A foreign dbt project installs the package: it gets our macros and nothing else of ours.

Its twin is the same project without the package: models that use none of our options must send the same SQL.
"""

import datetime as dt
import re
from decimal import Decimal

import pytest
from pyspark.sql import SparkSession

from tests.support.consumer_project import FILES, consumer_project, statements
from tests.support.dbt_project import REPOSITORY, DbtProject
from tests.support.rows import assert_rows

STATEFUL = {"plain_append", "plain_merge", "plain_merge_some_columns", "plain_overwrite", "plain_check"}


@pytest.fixture(scope="module")
def consumer(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DbtProject:
    """The project as it stands in tests/consumer_project."""
    return consumer_project(tmp_path_factory.mktemp("consumer"), spark)


@pytest.fixture(scope="module")
def twin(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DbtProject:
    """The same project as if the package did not exist: plain models only."""
    files = {
        name: text for name, text in FILES.items() if "/patterns/" not in name and name != "packages.yml"
    }
    files["dbt_project.yml"] = re.sub(r"dispatch:\n(  .*\n)+", "", files["dbt_project.yml"])
    assert "search_order" not in files["dbt_project.yml"]
    return DbtProject(tmp_path_factory.mktemp("twin") / "shop_alone", spark, files, with_package=False)


def test_deps_needs_no_network_and_installs_macros_only(consumer: DbtProject) -> None:
    package = consumer.root / "dbt_packages" / "lakehouse_patterns"
    assert (package / "dbt_project.yml").read_text() == (
        REPOSITORY / "macros" / "dbt_project.yml"
    ).read_text()
    manifest = consumer.manifest()
    nodes = [*manifest.nodes.values(), *manifest.sources.values(), *manifest.exposures.values()]
    # The check that runs before everything (an operation) is all that the package brings; dbt lists none.
    assert {node.package_name for node in nodes if node.resource_type != "operation"} == {"shop"}
    assert manifest.nodes["model.shop.customers"].path == "patterns/customers.sql"


def test_models_without_our_options_are_what_dbt_spark_alone_makes(
    consumer: DbtProject, twin: DbtProject
) -> None:
    for command in (
        ("build", "--select", "path:models/plain", "path:snapshots"),
        ("run", "--select", *STATEFUL),
        ("snapshot", "--select", *STATEFUL),
    ):
        ours, alone = statements(consumer, *command), statements(twin, *command)
        assert ours.keys() == alone.keys()
        assert STATEFUL & ours.keys()
        for node in alone:
            assert ours[node] == alone[node], node


def test_each_pattern_works_by_configuration_alone(consumer: DbtProject) -> None:
    consumer.run("build", "--select", "path:models/patterns")

    expected = {
        "customers": ("customer_id, email, revision", [(1, "ada@example.com", 2)]),
        "customers_history": (
            "customer_id, email, day(effective_from), day(effective_to), closed_by_delete",
            [
                (1, "ada@example.org", 1, 2, False),
                (1, "ada@example.com", 2, None, False),
                (2, "bob@example.org", 1, 3, True),
            ],
        ),
        "payments_dead": ("payment_id, error_class", [(2, "NULL_RESULT")]),
        "payments": ("payment_id, amount", [(1, Decimal("10.50"))]),
        "payments_rejections": (
            "condition_name, rejected_rows, input_rows",
            [("amount_missing", 1, 3), ("too_small", 1, 3)],
        ),
        "visits_wrapped": ("is_home, raw.visit_id", [(False, "v2")]),
        "revenue": ("day, amount", [(dt.date(2026, 1, 1), Decimal("10.50"))]),
    }
    for table, (columns, rows) in expected.items():
        assert_rows(consumer.table(table).selectExpr(*columns.split(", ")), rows)
