"""What mutmut reports is counted by module, and a change that survives is looked up in the list."""

from pathlib import Path

from tools.findings import ROOT
from tools.mutants import LISTED, Survivor, listed_survivors, of_modules, shares, survivor_of, survivors

RESULTS = """
    python_jobs.shared.core.retry.x_classify__mutmut_1: killed
    python_jobs.shared.core.retry.xǁRetrierǁcall__mutmut_2: survived
    python_jobs.shared.core.retry.xǁRetrierǁcall__mutmut_3: timeout
    python_jobs.shared.core.clock.x_utc_now__mutmut_1: no tests
    python_jobs.shared.core.clock.x_utc_now__mutmut_2: not checked
"""


def test_noticed_mutants_are_counted_by_module() -> None:
    assert shares(RESULTS) == {
        "python_jobs.shared.core.clock": (0, 2),
        "python_jobs.shared.core.retry": (2, 3),
    }
    assert survivors(RESULTS) == [
        "python_jobs.shared.core.retry.xǁRetrierǁcall__mutmut_2",
        "python_jobs.shared.core.clock.x_utc_now__mutmut_1",
        "python_jobs.shared.core.clock.x_utc_now__mutmut_2",
    ]
    assert shares("") == {}
    assert shares(RESULTS, {"python_jobs.shared.core.retry.xǁRetrierǁcall__mutmut_2"}) == {
        "python_jobs.shared.core.clock": (0, 2),
        "python_jobs.shared.core.retry": (2, 2),
    }


def test_of_a_run_of_some_modules_the_others_do_not_count() -> None:
    retry, clock = "python_jobs.shared.core.retry", "python_jobs.shared.core.clock"
    assert shares(of_modules(RESULTS, [retry])) == {retry: (2, 3)}
    assert shares(of_modules(RESULTS, [])) == {clock: (0, 2), retry: (2, 3)}


SHOWN = """# python_jobs.shared.core.retry.x_classify__mutmut_1: survived
--- python_jobs/shared/core/retry.py
+++ python_jobs/shared/core/retry.py
@@ -1,5 +1,5 @@
 def classify(status):
-    return status < 500
+    return status <= 500
"""
LIST = """
not_mutated: {}
survivors:
  - module: python_jobs.shared.core.retry
    reason: 500 is handled before
    changes:
      - |
        - return status < 500
        + return status <= 500
"""


def test_a_listed_change_is_known_and_another_one_is_new(tmp_path: Path) -> None:
    file = tmp_path / "mutants.yml"
    file.write_text(LIST)
    shown = survivor_of("python_jobs.shared.core.retry.x_classify__mutmut_1", SHOWN)
    change = ("- return status < 500", "+ return status <= 500")
    assert shown == Survivor("python_jobs.shared.core.retry", change)
    assert listed_survivors(file) == {shown}
    assert survivor_of("python_jobs.shared.core.clock.x_now__mutmut_1", SHOWN) not in listed_survivors(file)
    assert (
        survivor_of("python_jobs.shared.core.retry.x_classify__mutmut_2", SHOWN.replace("<=", ">")) != shown
    )
    file.write_text(str(shown).replace("  changes", "  reason: x\n  changes").join(["survivors:\n", "\n"]))
    assert listed_survivors(file) == {shown}, "what the tool prints can be copied into the list"


def test_a_change_without_a_reason_is_not_listed(tmp_path: Path) -> None:
    file = tmp_path / "mutants.yml"
    file.write_text(LIST.replace("500 is handled before", '""'))
    assert listed_survivors(file) == set()
    assert listed_survivors(ROOT / LISTED)
