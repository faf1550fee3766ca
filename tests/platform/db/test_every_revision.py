"""Migrating from every revision there was, and what a migration that fails leaves: nothing."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from loraplex_platform.db import migrate
from loraplex_platform.db.migrate import SchemaMismatchError

from tests.support.postgres import database_settings

if TYPE_CHECKING:
    from tests.support.postgres import PostgresServer

ALL = [script.revision for script in reversed(list(migrate.scripts().walk_revisions()))]
# Each, with the slow tests; always the first and the newest, which no other has tried yet.
REVISIONS = [
    pytest.param(one, marks=() if one in (ALL[0], *ALL[-5:]) else pytest.mark.slow) for one in ALL
]

_FACTS = """
select 'column', table_name, column_name, data_type, is_nullable, column_default
from information_schema.columns where table_schema = 'public'
union all
select 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid), null, null
from pg_constraint where connamespace = 'public'::regnamespace
union all
select 'index', tablename, indexname, indexdef, null, null from pg_indexes where schemaname = 'public'
union all
select 'function', proname, pg_get_function_identity_arguments(oid), md5(prosrc), null, null
from pg_proc where pronamespace = 'public'::regnamespace
union all
select 'trigger', tgrelid::regclass::text, tgname, pg_get_triggerdef(oid), null, null
from pg_trigger where not tgisinternal
union all
select 'policy', tablename, policyname, roles::text, qual, with_check
from pg_policies where schemaname = 'public'
union all
select 'grant', table_name, grantee, privilege_type, null, null
from information_schema.role_table_grants where table_schema = 'public' and grantee like 'loraplex%'
order by 1, 2, 3, 4
"""


def facts(url: str) -> set[tuple[object, ...]]:
    """All that a schema is: columns, constraints, indexes, functions, triggers, policies, rights."""
    with psycopg.connect(url) as connection:
        return set(connection.execute(_FACTS).fetchall())


@pytest.mark.parametrize("revision", REVISIONS)
def test_from_every_revision_the_same_schema_is_reached(
    postgres_server: PostgresServer, revision: str
) -> None:
    with postgres_server.clone() as fresh:
        expected = facts(fresh)
    with postgres_server.empty() as url:
        settings = database_settings(url)
        assert migrate.upgrade(settings, revision) == revision
        if revision != ALL[-1]:
            with pytest.raises(SchemaMismatchError, match="behind"):
                migrate.check(settings)

        assert migrate.upgrade(settings) == ALL[-1]

        assert facts(url) ^ expected == set()
        migrate.compare_with_models(settings)


@pytest.mark.parametrize("revision", REVISIONS)
def test_down_to_every_revision_and_up_again_builds_the_same(
    postgres_server: PostgresServer, revision: str
) -> None:
    with postgres_server.clone() as url:
        before = facts(url)
        settings = database_settings(url)
        migrate.downgrade(settings, revision)
        with psycopg.connect(url) as connection:
            found = connection.execute("select version_num from alembic_version").fetchone()
        assert found == (revision,)

        migrate.upgrade(settings)

        assert facts(url) ^ before == set()


def test_rows_of_the_first_release_outlive_all_migrations(postgres_server: PostgresServer) -> None:
    with postgres_server.empty() as url:
        settings = database_settings(url)
        migrate.upgrade(settings, "0001")
        with psycopg.connect(url) as connection:
            connection.execute(
                """
                insert into tenants (id, slug, name) values
                    ('00000000-0000-7000-8000-000000000011', 'acme', 'Acme');
                insert into audit_log (id, actor_kind, action, object_kind, tenant_id, detail)
                    select ('00000000-0000-7000-8000-00000000000' || n)::uuid, 'system', 'a' || n,
                        'x', case when n % 2 = 0
                            then '00000000-0000-7000-8000-000000000011'::uuid end, '{}'
                    from generate_series(1, 4) n;
                insert into attempts (request_id, attempt, tenant_id, outcome, source,
                    prompt_tokens, cached_tokens, generated, billed, absorbed,
                    discarded_past_stop, discarded_past_abort)
                    values (gen_random_uuid(), 1, '00000000-0000-7000-8000-000000000011',
                        'completed', 'terminal', 1, 0, 2, 2, 0, 0, 0);
                """
            )

        migrate.upgrade(settings)

        with psycopg.connect(url) as connection:
            chained = connection.execute(
                "select action, seq, hash = loraplex_audit_digest(a) from audit_log a"
                " order by chain, seq"
            ).fetchall()
            attempts = connection.execute("select billed from attempts").fetchall()
    assert chained == [("a1", 1, True), ("a3", 2, True), ("a2", 1, True), ("a4", 2, True)]
    assert attempts == [(2,)]


_BROKEN = """
from loraplex_platform.db.migration_sql import run_sql

revision = "9999"
down_revision = "{last}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    run_sql("create table half_done (id int); insert into half_done values (1);")
    run_sql("drop table {dropped} cascade")
    run_sql("select no_such_function()")
"""


def test_a_migration_that_fails_leaves_nothing_half_done(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "migrations"
    shutil.copytree(migrate._migrations_folder(), folder)
    text = _BROKEN.format(last=ALL[-1], dropped="ledger")
    (folder / "versions" / "9999_broken.py").write_text(text)
    with postgres_server.clone() as fresh:
        expected = facts(fresh)
    with postgres_server.empty() as url:
        settings = database_settings(url)
        migrate.upgrade(settings, ALL[-2])
        with monkeypatch.context() as patch:
            patch.setattr(migrate, "_migrations_folder", lambda: folder)
            with pytest.raises(Exception, match="no_such_function"):
                migrate.upgrade(settings)

            # The one before it is done, and it is as if it had never begun.
            assert facts(url) ^ expected == set()
            with psycopg.connect(url) as connection:
                row = connection.execute("select version_num from alembic_version").fetchone()
            assert row == (ALL[-1],)
            with pytest.raises(SchemaMismatchError, match="behind"):
                migrate.check(settings)
        # And nobody holds the lock: a program without it finds what it needs.
        assert migrate.upgrade(settings) == ALL[-1]
        migrate.check(settings)


def test_two_migrators_at_once_do_the_work_once(postgres_server: PostgresServer) -> None:
    with postgres_server.empty() as url:
        settings = database_settings(url)
        migrate.upgrade(settings, ALL[2])
        reached: list[str] = []
        threads = [
            threading.Thread(target=lambda: reached.append(migrate.upgrade(settings)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)

        assert reached == [ALL[-1]] * 2, threads
        migrate.compare_with_models(settings)


def test_old_rows_are_checked_while_everybody_works(postgres_server: PostgresServer) -> None:
    """What reads every partition needs no lock that a request would wait for, nor waits for one of theirs."""
    with postgres_server.empty() as url:
        settings = database_settings(url)
        migrate.upgrade(settings, "0019")
        with psycopg.connect(url) as connection:
            connection.execute("lock table requests in row exclusive mode")
            upgrading = threading.Thread(
                target=migrate.upgrade, args=(settings, "0020"), daemon=True
            )
            upgrading.start()
            upgrading.join(timeout=60)
            assert not upgrading.is_alive(), "it waits for what writes"
        with psycopg.connect(url) as connection:
            [unchecked] = connection.execute(
                "select count(*) from pg_constraint where not convalidated"
            ).fetchone() or [None]
        assert unchecked == 0
