"""A Postgres for tests: one embedded server, migrated once, and databases that look brand new.

Code under test commits and uses several connections, so nothing is rolled back: a test borrows a
migrated database that is emptied afterwards, which is much faster than cloning one. Tests that change
the schema itself take a clone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from loraplex_platform.db import migrate
from loraplex_platform.local.embedded import start_postgres
from loraplex_platform.local.server_process import EmbeddedServer
from loraplex_platform.settings import DatabaseSettings, MigrationSettings
from loraplex_platform.variables import with_login
from psycopg import sql

_TEMPLATE = "loraplex_template"
SERVE_ROLE = "loraplex_serve"


def serving_url(owner_url: str) -> str:
    """What a serving process gets: the same database through the login that `migrate` made."""
    return with_login(owner_url, SERVE_ROLE)


def database_settings(url: str, **overrides: object) -> DatabaseSettings:
    """Settings for `url`, independent of the environment."""
    return DatabaseSettings.model_validate({"database_url": url, **overrides})


async def until_in_statement(
    owner_url: str, part: str = "", *, waits_for: str | None = None
) -> None:
    """Until another connection runs a statement with `part` in it, of the same database.

    Args:
        waits_for: and waits there: a `wait_event_type` of pg_stat_activity, such as "Lock".
    """
    async with await psycopg.AsyncConnection.connect(owner_url, autocommit=True) as connection:
        for _ in range(1000):
            found = await connection.execute(
                "select from pg_stat_activity where state = 'active' and pid <> pg_backend_pid()"
                " and datname = current_database() and position(%(part)s in query) > 0"
                " and (%(kind)s::text is null or wait_event_type = %(kind)s)",
                {"part": part, "kind": waits_for},
            )
            if found.rowcount:
                return
            await asyncio.sleep(0.01)
    raise AssertionError(f"no connection came to {part!r} within ten seconds")


# All rows but the prices, which the migration makes. Without foreign keys' order, as superuser.
_EMPTY = """
select pg_terminate_backend(pid) from pg_stat_activity
    where datname = current_database() and pid <> pg_backend_pid();
set session_replication_role = replica;
do $$
declare
    name text;
begin
    for name in
        select c.oid::regclass from pg_class c
        where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p')
            and not c.relispartition
            and c.relname not in ('alembic_version', 'price_books', 'price_items')
    loop
        execute 'delete from ' || name;
    end loop;
end
$$;
"""
_PRICES = """
select (select string_agg(b::text, ';' order by id) from price_books b),
    (select string_agg(i::text, ';' order by i::text) from price_items i)
"""


class PostgresServer:
    """A throw-away server.

    `borrow()` lends a migrated, empty database that others used before; `clone()` one of its own, to
    do anything with; `empty()` one without a schema.
    """

    def __init__(self, folder: Path) -> None:
        self.server: EmbeddedServer = start_postgres(folder, is_durable=False)
        self._numbers = itertools.count(1)
        self._clean: list[str] = []  # URLs of emptied databases
        try:
            self._create(_TEMPLATE)
            migrate.upgrade(database_settings(self.url_of(_TEMPLATE)))
            migrate.ensure_serving_role(
                MigrationSettings.model_validate(
                    {"database_url": self.url_of(_TEMPLATE), "serve_role": SERVE_ROLE}
                )
            )
        except BaseException:
            self.stop()
            raise

    def url_of(self, database: str) -> str:
        """The owner's URL of one of this server's databases."""
        return self.server.url.replace("/loraplex?", f"/{database}?", 1)

    @contextmanager
    def borrow(self) -> Iterator[str]:
        """The URL of a migrated, empty database, emptied again afterwards."""
        url = self._clean.pop() if self._clean else self._make(_TEMPLATE)
        with psycopg.connect(url) as connection:
            prices = connection.execute(_PRICES).fetchall()
        yield url
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(_EMPTY)
            if connection.execute(_PRICES).fetchall() == prices:
                self._clean.append(url)

    @contextmanager
    def clone(self) -> Iterator[str]:
        """The URL of a migrated database that is dropped afterwards."""
        with self._lend(_TEMPLATE) as url:
            yield url

    @contextmanager
    def empty(self) -> Iterator[str]:
        """The URL of a database without any table."""
        with self._lend("template1") as url:
            yield url

    @contextmanager
    def _lend(self, template: str) -> Iterator[str]:
        url = self._make(template)
        name = url.partition("?")[0].rpartition("/")[2]
        try:
            yield url
        finally:
            self._run(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))

    def _make(self, template: str) -> str:
        name = f"test_{next(self._numbers)}"
        self._create(name, template)
        return self.url_of(name)

    def _create(self, name: str, template: str = "template1") -> None:
        self._run(
            sql.SQL("create database {} template {}").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )

    def _run(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.url_of("postgres"), autocommit=True) as connection:
            connection.execute(statement)

    def stop(self) -> None:
        """End the server."""
        self.server.stop()
