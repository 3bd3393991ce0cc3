"""Ids of topics: a position of a topic that was deleted and recreated is refused."""

from __future__ import annotations

import re

import pytest

from python_jobs.shared.core.failures import DataRefused
from python_jobs.shared.kafka.topic_ids import known_ids, require_same_topic, with_topic_ids


def test_a_position_of_an_older_topic_is_refused_in_one_sentence() -> None:
    sentence = (
        "the topic visits was deleted and recreated: the position belongs to the topic with id a1, b2, and today's has "
        "id c3; what was not yet read of the old topic is gone; name another group"
    )
    with pytest.raises(DataRefused, match=f"^{re.escape(sentence)}$"):
        require_same_topic("visits", {"b2", "a1"}, "c3", "name another group")
    for known in ([], ["c3"], ["a1", "c3"]):
        require_same_topic("visits", known, "c3", "name another group")


def test_the_ids_are_part_of_the_writer_s_name() -> None:
    writer = with_topic_ids("job/1", {"visits": "a-_1", "public.users": "b2"})
    assert writer == "job/1/topics:public.users=b2 visits=a-_1"
    others = [
        "job/1",
        "compactor",
        with_topic_ids("job/2/topics:visits=x", {"visits": "c3", "my_visits": "d4"}),
    ]
    assert known_ids([writer, *others], "visits") == {"a-_1", "c3"}
    assert known_ids([writer, *others], "visits", "job/2") == {"c3"}
    assert known_ids([writer, *others], "public.users") == {"b2"}
    assert known_ids([writer, *others], "users") == set()
