"""Ids of topics: a topic that was deleted and recreated under its name has another id.

The offsets of the new topic begin at 0 again, so an offset of the old topic is no position in the new one. If the new
topic has fewer records, Kafka reports the offset as out of range. If it has more, a reader that knows only the offset
skips the new topic's first records silently. So each position that this project keeps is kept with the topic's
id: in the metadata of a group's offset, in the contract of a checkpoint, and in the ``txnAppId`` of a table's commits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from python_jobs.shared.core.failures import DataRefused

_MARK = "/topics:"


def require_same_topic(topic: str, known: Collection[str], found: str, way_out: str) -> None:
    """Refuse a position that belongs to an older topic of the same name.

    Args:
        topic: name of the topic.
        known: ids with which the position is kept; none if its topic isn't known.
        found: id of the topic today.
        way_out: what the user can do, the end of the sentence.

    Raises:
        DataRefused: the position belongs to another topic.
    """
    if known and found not in known:
        raise DataRefused(
            f"the topic {topic} was deleted and recreated: the position belongs to the topic with id "
            f"{', '.join(sorted(known))}, and today's has id {found}; what was not yet read of the old topic is gone; "
            f"{way_out}"
        )


def with_topic_ids(writer: str, ids: Mapping[str, str]) -> str:
    """Return the ``txnAppId`` of a writer whose ``txnVersion`` is a position in topics."""
    return f"{writer}{_MARK}{' '.join(f'{topic}={topic_id}' for topic, topic_id in sorted(ids.items()))}"


def known_ids(app_ids: Iterable[str], topic: str, writer: str = "") -> set[str]:
    """Return the ids of a topic in those ``txnAppId`` of :func:`with_topic_ids` that begin with ``writer``."""
    found = set()
    for app_id in app_ids:
        before, mark, topics = app_id.rpartition(_MARK)
        if mark and before.startswith(writer):
            found |= {match[2] for match in re.finditer(r"(\S+)=(\S+)", topics) if match[1] == topic}
    return found
