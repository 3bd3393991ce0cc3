"""Idempotent Operations, transactional inbox: an effect in PostgreSQL happens once for each message.

Problem: a worker looks up a message's id, processes the message and marks it as processed. A crash before the mark
repeats the effect, and two workers that look up at once both apply it.

Guarantee: the message's id and the effect are one transaction, and the id is written first. If anything fails, neither
is stored. If two workers have one id, the second waits for the first and then does nothing. An id is known for the
horizon; a duplicate that comes later is a new message.

    with connect_by_environment() as connection:
        inbox = Inbox(connection, "processed_messages")
        inbox.once("visit-1", lambda: connection.execute("insert into …"), now)

The effect must use the same connection and must not open another transaction. Cost: one insert into a unique index for
each message, and the index; :meth:`Inbox.forget` limits the index to the horizon.

Source: the guide's ``pat-idempotent`` and ``pat-exactly-once`` (route 3).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

from psycopg import sql

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.intervals import moved
from python_jobs.shared.postgres.clients import table_name
from python_jobs.shared.postgres.relations import Connection, execute

_FOR_EVER = dt.datetime.min.replace(tzinfo=dt.UTC)


class Inbox:
    """The table of processed messages; it is created if it doesn't exist."""

    def __init__(self, connection: Connection, table: str, horizon: dt.timedelta | None = None) -> None:
        """Use the table, or create it if it doesn't exist.

        Args:
            connection: connection in autocommit mode; the inbox opens its transactions.
            table: name or schema.name of the table.
            horizon: time for which ids are known; default: for ever.

        Raises:
            WrongUse: the connection isn't in autocommit mode, so effects would join the caller's transaction.
        """
        if not connection.autocommit:
            raise WrongUse("an inbox needs a connection in autocommit mode: it makes the transactions itself")
        self._connection, self._horizon = connection, horizon
        self._table = table_name(table)
        with connection.transaction():  # create if not exists isn't atomic among sessions
            connection.execute("select pg_advisory_xact_lock(hashtext(%s))", [table])
            execute(
                connection,
                "create table if not exists {} (message_id text primary key, processed_at timestamptz not null)",
                self._table,
            )

    def once(self, message_id: str, effect: Callable[[], object], now: dt.datetime) -> bool:
        """Apply the effect and store the id in one transaction; return False if the id was stored before.

        Raises:
            Exception: the effect's own error; neither the effect nor the id is stored.
        """
        oldest = _FOR_EVER if self._horizon is None else moved(now, -self._horizon)
        with self._connection.transaction():
            claimed = self._connection.execute(
                sql.SQL(
                    "insert into {0} as known (message_id, processed_at) values (%s, %s) "
                    # A failed insert would end the transaction; this one waits for another insert of the same id.
                    "on conflict (message_id) do update set processed_at = excluded.processed_at "
                    "where known.processed_at < %s"
                ).format(self._table),
                [message_id, now, oldest],
            )
            if claimed.rowcount == 0:
                return False
            effect()
        return True

    def forget(self, now: dt.datetime) -> int:
        """Delete the ids that are older than the horizon and return their number."""
        if self._horizon is None:
            return 0
        statement = sql.SQL("delete from {} where processed_at < %s").format(self._table)
        return self._connection.execute(statement, [moved(now, -self._horizon)]).rowcount
