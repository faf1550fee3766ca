"""A Postgres for tests: one embedded server, migrated once; a fresh database in milliseconds.

Code under test commits and uses several connections, so nothing is rolled back: each test gets a
database of its own, cloned from the migrated template.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from loraplex_platform.db import migrate
from loraplex_platform.local.embedded import EmbeddedServer, start_postgres
from loraplex_platform.settings import DatabaseSettings
from psycopg import sql

_TEMPLATE = "loraplex_template"


def database_settings(url: str, **overrides: object) -> DatabaseSettings:
    """Settings for `url`, independent of the environment."""
    return DatabaseSettings.model_validate({"database_url": url, **overrides})


class PostgresServer:
    """A throw-away server. `clone()` lends a migrated, empty database; `empty()` one without schema."""

    def __init__(self, folder: Path) -> None:
        self.server: EmbeddedServer = start_postgres(folder, is_durable=False)
        self._numbers = itertools.count(1)
        try:
            self._create(_TEMPLATE)
            migrate.upgrade(database_settings(self.url_of(_TEMPLATE)))
        except BaseException:
            self.stop()
            raise

    def url_of(self, database: str) -> str:
        """The owner's URL of one of this server's databases."""
        return self.server.url.replace("/loraplex?", f"/{database}?", 1)

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
        name = f"test_{next(self._numbers)}"
        self._create(name, template)
        try:
            yield self.url_of(name)
        finally:
            self._run(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))

    def _create(self, name: str, template: str = "template1") -> None:
        self._run(
            sql.SQL("create database {} template {} strategy file_copy").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )

    def _run(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.url_of("postgres"), autocommit=True) as connection:
            connection.execute(statement)

    def stop(self) -> None:
        """End the server."""
        self.server.stop()
