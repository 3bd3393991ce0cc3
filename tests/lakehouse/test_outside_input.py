"""Input of another project's making: the sample in tests/data, and the whole set where it lies beside the checkout."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest

from tests.support.dbt_project import REPOSITORY
from tests.support.lakehouse import Lakehouse

BLOG_VISITS = REPOSITORY.parent / "shared" / "data" / "blog_visits"

pytestmark = pytest.mark.end_to_end


@pytest.mark.skipif(not BLOG_VISITS.is_dir(), reason="blog_visits is not beside this checkout")
def test_blog_visits_gives_its_known_counts(spark, tmp_path):
    landing = tmp_path / "landing"
    shutil.copytree(BLOG_VISITS, landing, copy_function=shutil.copyfile)
    lakehouse = Lakehouse(tmp_path / "lakehouse", spark, landing)
    report = lakehouse.run()
    counts = Counter()
    for entry in report["lines"]:
        counts[entry["status"]] += entry["lines"]
    assert counts["read"] == 14_792
    assert counts["unparsable"] == 144
    assert counts["invalid"] == 576
    assert counts["filtered"] == 0
    assert counts["exact_duplicate"] + counts["superseded"] == 392
    assert counts["kept"] == 13_680 == lakehouse.table("silver_visits").count()
    assert lakehouse.table("gold_users_history").count() == 0, "there is no change feed in this input"
    users = {row.id: row for row in lakehouse.table("snapshot_users").collect()}
    assert len(users) == 100
