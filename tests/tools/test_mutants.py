"""What mutmut reports is counted by module."""

from tools.mutants import shares, survivors

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
