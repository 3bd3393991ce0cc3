"""A run's time: the one it is given, or the clock's."""

from __future__ import annotations

import datetime as dt

import pytest

from python_jobs.shared.core.clock import ProcessingTimeParameters, utc_now
from python_jobs.shared.core.failures import WrongUse


def test_a_run_has_the_time_that_it_is_given_in_utc() -> None:
    noon = dt.datetime(2024, 3, 1, 12, tzinfo=dt.UTC)
    assert ProcessingTimeParameters(now="2024-03-01T12").processing_time() == noon
    assert (
        ProcessingTimeParameters(now="2024-03-01T14:00:00+02:00").processing_time().isoformat()
        == noon.isoformat()
    )


def test_by_default_each_question_is_answered_by_the_clock() -> None:
    run, before = ProcessingTimeParameters(), utc_now()
    first, second = run.processing_time(), run.processing_time()
    assert before <= first <= second <= utc_now()
    assert first.tzinfo is dt.UTC


def test_another_text_is_refused_before_the_run() -> None:
    with pytest.raises(WrongUse, match="'yesterday' is not a time"):
        ProcessingTimeParameters(now="yesterday")
