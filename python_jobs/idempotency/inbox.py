"""Idempotent Operations, transactional inbox: an effect in PostgreSQL happens once for each message.

Problem: look up, process, mark as processed: a crash before the mark repeats the effect, and two workers that look up
at once both have it.

Guarantee: the message's id and the effect are one transaction, the id first. Whatever fails, neither is there; of two
workers with one id the second waits for the first and then has nothing to do. An id is known for the horizon; a
duplicate that comes later is a new message.

    with connect_by_environment() as connection:
        inbox = Inbox(connection, "processed_messages")
        inbox.once("visit-1", lambda: connection.execute("insert into …"), now)

The effect uses the same connection and opens no transaction of its own. Cost: one insert into a unique index a
message, and the index: :meth:`Inbox.forget` keeps it as small as the horizon.

Source: the guide's ``pat-idempotent`` and ``pat-exactly-once`` (route 3).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

from psycopg import sql

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.postgres.clients import table_name
from python_jobs.shared.postgres.relations import Connection, execute

_FOR_EVER = dt.datetime.min.replace(tzinfo=dt.UTC)


class Inbox:
    """The table of processed messages, made if absent."""

    def __init__(self, connection: Connection, table: str, horizon: dt.timedelta | None = None) -> None:
        """Take the table as it is, or make it.

        Args:
            connection: in autocommit mode; its transactions are the inbox's.
            table: name or schema.name.
            horizon: for how long ids are known; None: for ever.

        Raises:
            WrongUse: the connection holds a transaction open, into which effects would go.
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
        """Have the effect and the id in one transaction; return whether it happened now (False: it had before).

        Raises:
            Exception: what the effect raised; neither is there.
        """
        oldest = _FOR_EVER if self._horizon is None else now - self._horizon
        with self._connection.transaction():
            claimed = self._connection.execute(
                sql.SQL(
                    "insert into {0} as known (message_id, processed_at) values (%s, %s) "
                    # A failed insert would end the transaction; this one waits for who inserts the same id.
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
        """Delete ids beyond the horizon; return their number."""
        if self._horizon is None:
            return 0
        statement = sql.SQL("delete from {} where processed_at < %s").format(self._table)
        return self._connection.execute(statement, [now - self._horizon]).rowcount
