"""Restore a backup into an empty database and an adapter store, and prove that it is what was saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import psycopg
from loraplex_engine.artifact import AdapterStore
from psycopg import sql

from loraplex_platform.backup import manifest as manifests
from loraplex_platform.backup.errors import BackupError
from loraplex_platform.backup.make import read_snapshot
from loraplex_platform.backup.manifest import Manifest
from loraplex_platform.backup.postgres_tools import find_tool, read_url, run
from loraplex_platform.db import migrate
from loraplex_platform.settings import DatabaseSettings

Tell = Callable[[str], None]

# What the schema grants to. Roles belong to the server, so no dump of one database has them.
_ROLES = ("loraplex_app", "loraplex_tenant")

_ANYTHING_THERE = """
select n.nspname || '.' || c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p', 'v', 'm', 'S', 'f') and n.nspname <> 'information_schema'
    and n.nspname !~ '^pg_'
limit 1
"""


def restore_backup(
    folder: Path,
    url: str,
    store_url: str,
    *,
    secrets: Mapping[str, str],
    allow_other_secrets: bool,
    tell: Tell,
) -> Manifest:
    """Restore the backup in `folder`, compare the result with what was saved, and migrate it up.

    Args:
        url: of an empty database, by a login that may own it and make roles.
        store_url: of an adapter store; what is there already stays.
        secrets: those that the processes will have, as far as they are known.
        allow_other_secrets: restore although they are not those of the backup.

    Raises:
        BackupError: it is damaged, the database is not empty, or what came out is not what went in.
        OSError: the folder or the store cannot be used.
    """
    made = manifests.read(folder)
    tell(f"backup of {made.made_at}, schema {made.schema_revision}")
    tell(f"{manifests.check_sums(folder)} files are as they were written")
    _check_revision(made)
    _check_secrets(made, secrets, is_allowed=allow_other_secrets)
    read_url(url)  # psycopg would repeat one that it cannot read, with the password
    with psycopg.connect(url, autocommit=True) as connection:
        _check_empty(connection)
        server_major = connection.info.server_version // 10_000
        _make_roles(connection)
    tool = find_tool("pg_restore", max(server_major, made.server_major))
    tell(f"restoring the database with {tool.path} ({tool.major})")
    run(
        tool,
        [
            "--no-owner",
            "--exit-on-error",
            "--single-transaction",
            f"--dbname={read_url(url).get('dbname', 'postgres')}",
            str(folder / manifests.DUMP),
        ],
        url,
    )
    _compare(url, made)
    tell("tables, ledger and audit chains are those of the backup")
    store = AdapterStore(store_url)
    for number, digest in enumerate(made.adapters, 1):
        store.put(AdapterStore.folder_in(folder / manifests.ADAPTERS, digest), digest)
        if number % 100 == 0 or number == len(made.adapters):
            tell(f"adapters: {number} of {len(made.adapters)}")
    reached = migrate.upgrade(DatabaseSettings.model_validate({"database_url": url}))
    if reached != made.schema_revision:
        tell(f"migrated from {made.schema_revision} to {reached}")
    return made


def _check_revision(made: Manifest) -> None:
    known = {script.revision for script in migrate.scripts().walk_revisions()}
    if made.schema_revision not in known:
        raise BackupError(
            f"its schema ({made.schema_revision}) is of a newer release ({made.release}): restore it with "
            "that one"
        )


def _check_secrets(made: Manifest, secrets: Mapping[str, str], *, is_allowed: bool) -> None:
    differing = [
        name
        for name, wanted in made.secrets.items()
        if name in secrets and manifests.fingerprint(secrets[name]) != wanted
    ]
    if differing and not is_allowed:
        reasons = "; ".join(f"{name}: {manifests.NEEDED_SECRETS[name]}" for name in differing)
        raise BackupError(
            f"the secrets here are not those of the backup ({reasons}). Put its secrets in place first, or "
            "restore with --allow-other-secrets if you mean it"
        )


def _check_empty(connection: psycopg.Connection) -> None:
    row = connection.execute(_ANYTHING_THERE.encode()).fetchone()
    if row is not None:
        raise BackupError(
            f"the database is not empty (it has {row[0]}): restore into a new one, so that nothing is mixed "
            "or lost"
        )


def _make_roles(connection: psycopg.Connection) -> None:
    for role in _ROLES:
        if connection.execute("select to_regrole(%s) is null", [role]).fetchone() == (True,):
            try:
                connection.execute(sql.SQL("create role {} nologin").format(sql.Identifier(role)))
            except psycopg.errors.InsufficientPrivilege as error:
                raise BackupError(
                    f"this login may not make the role {role} ({error.diag.message_primary}): let it "
                    "(alter role ... createrole), or have an administrator make it"
                ) from error
            except psycopg.errors.DuplicateObject:
                pass  # by someone else, just now
    for role, member in (("loraplex_tenant", "loraplex_app"), ("loraplex_app", None)):
        grant = sql.SQL("grant {} to {}").format(
            sql.Identifier(role),
            sql.SQL("current_user") if member is None else sql.Identifier(member),
        )
        has = connection.execute(
            "select pg_has_role(coalesce(%s, current_user), %s, 'member')", [member, role]
        ).fetchone()
        if has == (True,):
            continue
        try:
            connection.execute(grant)
        except psycopg.errors.InsufficientPrivilege as error:
            raise BackupError(
                f"this login may not grant {role} ({error.diag.message_primary}): have an administrator "
                "do it"
            ) from error


def _compare(url: str, made: Manifest) -> None:
    with psycopg.connect(url) as connection:
        found = read_snapshot(connection)
    pairs = (
        ("rows", found.counts, made.counts),
        ("the ledger's sum", found.ledger_pico, made.ledger_pico),
        ("audit chains", found.audit_heads, made.audit_heads),
    )
    for name, now, then in pairs:
        if now != then:
            raise BackupError(f"{name} differ from the backup's: {now} instead of {then}")
