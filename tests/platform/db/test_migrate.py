from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psycopg
import pytest
from loraplex_platform.db import migrate
from loraplex_platform.db.session import DatabaseUnavailableError

from tests.support.postgres import database_settings

if TYPE_CHECKING:
    from tests.support.postgres import PostgresServer


def _tables(url: str) -> set[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute("select tablename from pg_tables where schemaname = 'public'")
        return {name for (name,) in rows}


def test_up_down_up_leaves_nothing_behind_and_builds_the_same(
    postgres_server: PostgresServer,
) -> None:
    with postgres_server.empty() as url:
        settings = database_settings(url)

        assert migrate.upgrade(settings) == migrate.head_revision()
        first = _tables(url)
        migrate.downgrade(settings, "base")
        assert _tables(url) == {"alembic_version"}
        migrate.upgrade(settings)

        assert _tables(url) == first
        migrate.check(settings)


def test_models_and_schema_do_not_differ(db_url: str) -> None:
    migrate.compare_with_models(database_settings(db_url))


def test_a_changed_schema_is_noticed(db_url: str) -> None:
    with psycopg.connect(db_url) as connection:
        connection.execute("alter table tenants drop column billing_tz")

    with pytest.raises(Exception, match="billing_tz"):
        migrate.compare_with_models(database_settings(db_url))


def test_replicas_that_migrate_together_do_not_race(postgres_server: PostgresServer) -> None:
    with postgres_server.empty() as url, ThreadPoolExecutor(4) as threads:
        reached = list(threads.map(lambda _: migrate.upgrade(database_settings(url)), range(4)))

    assert reached == [migrate.head_revision()] * 4


def test_check_tells_behind_from_ahead_and_says_the_remedy(
    postgres_server: PostgresServer,
) -> None:
    with postgres_server.empty() as url:
        settings = database_settings(url)
        with pytest.raises(migrate.SchemaMismatchError, match=r"behind.*loraplex migrate"):
            migrate.check(settings)

        migrate.upgrade(settings)
        migrate.check(settings)
        with psycopg.connect(url) as connection:
            connection.execute("update alembic_version set version_num = 'f00d'")

        with pytest.raises(migrate.SchemaMismatchError, match=r"ahead.*newer release"):
            migrate.check(settings)
        with pytest.raises(migrate.SchemaMismatchError, match="ahead"):
            migrate.upgrade(settings)


def test_a_database_that_is_down_is_unavailable() -> None:
    settings = database_settings("postgresql://postgres@/loraplex?host=/nowhere")

    with pytest.raises(DatabaseUnavailableError):
        migrate.check(settings)
