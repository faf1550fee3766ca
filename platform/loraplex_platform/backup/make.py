"""Make a backup: one snapshot of the database, and every adapter that it names.

The dump and what is read beside it come from one exported snapshot, while everything goes on serving.
Adapters are named by their content and never change, so copying them after the dump is consistent with
it. One that is deleted in between, because its tenant is, is told of in the manifest.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psycopg
from loraplex_engine.artifact import ADAPTER_FILES, AdapterNotStoredError, AdapterStore

from loraplex_platform.backup import manifest as manifests
from loraplex_platform.backup.errors import BackupError
from loraplex_platform.backup.manifest import Manifest
from loraplex_platform.backup.postgres_tools import find_tool, read_url, run

Tell = Callable[[str], None]

COUNTED = ("tenants", "api_keys", "adapter_versions", "requests", "ledger", "invoices", "audit_log")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the database says of itself in the transaction that the dump is made in."""

    schema_revision: str
    server_major: int
    counts: dict[str, int]
    ledger_pico: str
    audit_heads: dict[str, str]
    digests: list[str]


def make_backup(
    url: str,
    store_url: str,
    to: Path,
    *,
    secrets: Mapping[str, str],
    secrets_file: Path | None,
    tell: Tell,
) -> Manifest:
    """Write a backup into the folder `to`, which must be new or empty.

    Args:
        url: of the database, by a login that may read all of it: its owner's.
        store_url: of the adapter store.
        secrets: those that are known; only their fingerprints are written.
        secrets_file: to be put into the backup as it is; None: no secret goes in.
        tell: hears of progress.

    Raises:
        BackupError: something is in the way; what was written is no backup yet and may be deleted.
        OSError: the folder or the store cannot be used.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise BackupError(f"{to} is not empty: name a new folder, so that no backup is overwritten")
    to.mkdir(parents=True, exist_ok=True)
    to.chmod(0o700)
    read_url(url)  # psycopg would repeat one that it cannot read, with the password
    with psycopg.connect(url, application_name="loraplex backup") as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        _check_owner(connection)
        snapshot = read_snapshot(connection)
        row = connection.execute("select pg_export_snapshot()").fetchone()
        assert row is not None  # noqa: S101 # a function has a value
        tool = find_tool("pg_dump", snapshot.server_major)
        tell(f"dumping the database with {tool.path} ({tool.major})")
        dump = to / manifests.DUMP
        run(
            tool,
            ["--format=custom", "--no-owner", f"--snapshot={row[0]}", f"--file={dump}"],
            url,
        )
    dump.chmod(0o600)
    manifests.sync(dump)
    tell(f"the database is {dump.stat().st_size / 1e6:.1f} MB")
    copied, missing = _copy_adapters(store_url, snapshot.digests, to, tell)
    if secrets_file is not None:
        manifests.write_durably(to / manifests.SECRETS, secrets_file.read_bytes())
        tell("the secrets are in it: keep it as you keep them")
    made = Manifest(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        release=_release(),
        schema_revision=snapshot.schema_revision,
        server_major=snapshot.server_major,
        counts=snapshot.counts,
        ledger_pico=snapshot.ledger_pico,
        audit_heads=snapshot.audit_heads,
        adapters=copied,
        missing_adapters=missing,
        secrets={
            name: manifests.fingerprint(secrets[name])
            for name in manifests.NEEDED_SECRETS
            if name in secrets
        },
        has_secrets=secrets_file is not None,
    )
    made.write(to)
    tell("computing checksums")
    manifests.write_sums(to)
    manifests.sync(to)
    return made


def _check_owner(connection: psycopg.Connection) -> None:
    row = connection.execute(
        "select c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname = current_schema() and c.relkind in ('r', 'p')"
        " and not pg_has_role(c.relowner, 'USAGE') limit 1"
    ).fetchone()
    if row is not None:
        raise BackupError(
            f"this login does not own {row[0]}, and so may not see all of it: give the owner's in "
            "LORAPLEX_DATABASE_URL"
        )


def read_snapshot(connection: psycopg.Connection) -> Snapshot:
    """Read what a backup says of its database, also to compare a restored one with it.

    Raises:
        BackupError: this is no database of ours.
    """

    def one(statement: str) -> object:
        row = connection.execute(statement.encode()).fetchone()
        assert row is not None  # noqa: S101 # each selects one row
        return row[0]

    try:
        revision = str(one("select version_num from alembic_version"))
        heads = connection.execute(
            "select chain::text, seq || ':' || encode(hash, 'hex') from audit_heads order by 1"
        ).fetchall()
        digests = connection.execute(
            "select distinct digest from adapter_versions v join tenants t on t.id = v.tenant_id"
            " where t.erased_at is null order by 1"
        ).fetchall()
        return Snapshot(
            schema_revision=revision,
            server_major=connection.info.server_version // 10_000,
            counts={name: int(str(one(f"select count(*) from {name}"))) for name in COUNTED},  # noqa: S608 # our own
            ledger_pico=str(one("select coalesce(sum(amount_pico), 0)::text from ledger")),
            audit_heads=dict(heads),
            digests=[str(digest) for (digest,) in digests],
        )
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
        raise BackupError(
            f"this is no up-to-date database of Loraplex ({error.diag.message_primary}): run "
            "`loraplex migrate` first"
        ) from error


def _copy_adapters(
    store_url: str, digests: list[str], to: Path, tell: Tell
) -> tuple[list[str], list[str]]:
    store = AdapterStore(store_url)
    root = to / manifests.ADAPTERS
    copied, missing = [], []
    for number, digest in enumerate(digests, 1):
        target = AdapterStore.folder_in(root, digest)
        try:
            # A store elsewhere is copied straight to its place; one of this machine is read where it is.
            source = store.fetch(digest, root)
            if source != target:
                target.mkdir(parents=True)
                for name in ADAPTER_FILES:
                    shutil.copyfile(source / name, target / name)
        except (AdapterNotStoredError, FileNotFoundError):
            shutil.rmtree(target, ignore_errors=True)
            missing.append(digest)
            tell(f"{digest} is not in the store")
            continue
        for name in ADAPTER_FILES:
            (target / name).chmod(0o600)
            manifests.sync(target / name)
        copied.append(digest)
        if number % 100 == 0 or number == len(digests):
            tell(f"adapters: {number} of {len(digests)}")
    return copied, missing


def _release() -> str:
    try:
        return version("loraplex")
    except PackageNotFoundError:
        return "0"
