"""Bring the schema up to date, and refuse to serve on any other.

`upgrade` runs as the database's owner under a session advisory lock, so that replicas that start
together never race. `check` is what every serving process calls at its start: it only reads.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import cast

import psycopg
import structlog
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg import sql
from sqlalchemy import Connection, create_engine, exc, pool, text

from loraplex_platform.db.session import DatabaseUnavailableError
from loraplex_platform.settings import DatabaseSettings, MigrationSettings

log = structlog.get_logger(__name__)

LOCK_ID = 0x6C6F7261  # "lora"
_LOCK_POLL_S = 0.1


class SchemaState(StrEnum):
    """How the database's revision relates to the one this program was built for."""

    CURRENT = "current"
    BEHIND = "behind"
    AHEAD = "ahead"


class SchemaMismatchError(Exception):
    """The schema is not the one this program needs; the message says the remedy."""

    def __init__(self, state: SchemaState, found: str | None, expected: str) -> None:
        if state is SchemaState.BEHIND:
            remedy = "Run `loraplex migrate` with the owner's database URL, then start again."
        else:
            remedy = "A newer release migrated it: start that release, or restore a backup."
        super().__init__(
            f"The database schema is {state} (found {found or 'none'}, need {expected}). {remedy}"
        )
        self.state = state


class ServingRoleError(Exception):
    """The login meant for the serving processes is not fit for them; the message says why."""


def include_name(name: str | None, kind: str, parents: object) -> bool:
    """What `alembic check` compares: all but the partitions, which the database makes itself."""
    del parents
    if kind != "table" or name is None:
        return True
    return re.fullmatch(r".+_(default|y\d{4}m\d{2})", name) is None


def upgrade(settings: DatabaseSettings, revision: str = "head") -> str:
    """Migrate up to `revision`; returns the revision reached. Waits while another one migrates.

    Raises:
        DatabaseUnavailableError: it cannot be reached.
        SchemaMismatchError: the schema is ahead of this program.
    """
    with _owner_connection(settings) as connection, _locked(connection):
        # Re-check after the lock: whoever held it may have done the work.
        state, found = _state(connection)
        if state is SchemaState.AHEAD:
            raise SchemaMismatchError(state, found, head_revision())
        command.upgrade(_config(connection), revision)
        return _revision(connection) or "none"


def ensure_serving_role(settings: MigrationSettings) -> None:
    """The login of the serving processes: a member of the runtime role, and of nothing else.

    They set that role themselves, but whoever holds their login may reset it: what it may do then is
    what it owns and inherits, which is nothing more. Safe to repeat; the password follows the settings.

    Raises:
        DatabaseUnavailableError: it cannot be reached.
        ServingRoleError: a role of that name exists and may do more.
    """
    if settings.serve_role is None:
        return
    name = sql.Identifier(settings.serve_role)
    password = None
    if settings.serve_password is not None:
        password = settings.serve_password.get_secret_value()
    with _owner_connection(settings) as connection, _locked(connection):
        driver = cast(psycopg.Connection, connection.connection.driver_connection)
        # Scrambled here: a statement may end up in the server's log.
        scrambled = None
        if password is not None:
            scrambled = driver.pgconn.encrypt_password(
                password.encode(), settings.serve_role.encode(), b"scram-sha-256"
            ).decode()
        try:
            with driver.transaction():
                found = driver.execute(_ROLE_FACTS, [settings.serve_role]).fetchone()
                if found is not None and found[0]:
                    raise ServingRoleError(
                        f"The role {settings.serve_role} may do more than serve ({found[0]}): name "
                        "another one in LORAPLEX_SERVE_ROLE, or take that away."
                    )
                if found is None:
                    driver.execute(sql.SQL("create role {} login").format(name))
                driver.execute(sql.SQL("grant loraplex_app to {}").format(name))
                driver.execute(
                    sql.SQL("alter role {} login password {}").format(name, sql.Literal(scrambled))
                )
        except psycopg.errors.InsufficientPrivilege as error:
            reason = error.diag.message_primary
            raise ServingRoleError(
                f"The owner's login may not make the role {settings.serve_role} ({reason}). Let it "
                "(alter role ... createrole), or have an administrator make a login that is a member "
                "of loraplex_app, and give that one to the serving processes: as their "
                "LORAPLEX_DATABASE_URL, or to `loraplex up` as --serve-database-url."
            ) from error


# What a role could do beyond the runtime role's rights, or null. No row: there is no such role.
_ROLE_FACTS = """
select concat_ws(', ',
    case when rolsuper then 'superuser' end,
    case when rolcreaterole then 'createrole' end,
    case when rolcreatedb then 'createdb' end,
    case when rolbypassrls or rolreplication then 'replication or bypassrls' end,
    (select string_agg('member of ' || g.rolname, ', ') from pg_auth_members m
        join pg_roles g on g.oid = m.roleid
        where m.member = r.oid and g.rolname <> 'loraplex_app'),
    (select 'owner of ' || min(relname) from pg_class where relowner = r.oid))
from pg_roles r where rolname = %s
"""


def downgrade(settings: DatabaseSettings, revision: str) -> None:
    """Migrate down to `revision` ("base": to nothing). For tests and careful people."""
    with _owner_connection(settings) as connection, _locked(connection):
        command.downgrade(_config(connection), revision)


def check(settings: DatabaseSettings) -> None:
    """Raise unless the schema is exactly the one this program needs; warn of a login that may too much.

    Raises:
        DatabaseUnavailableError: it cannot be reached.
        SchemaMismatchError: it is behind or ahead.
    """
    with _owner_connection(settings) as connection:
        state, found = _state(connection)
        owner = connection.execute(_MAY_OWN_THE_BOOKS).scalar_one_or_none()
    if owner is not None:
        log.warning(
            "login_may_change_the_books",
            login=owner,
            remedy="Serve with another login than the owner's: see `loraplex migrate --help`.",
        )
    if state is not SchemaState.CURRENT:
        raise SchemaMismatchError(state, found, head_revision())


# The role is what a process sets for itself, and may reset; its login is what it cannot shed.
_MAY_OWN_THE_BOOKS = text("""
select session_user::text from pg_class
where oid = to_regclass('ledger') and pg_has_role(session_user, relowner, 'MEMBER')
""")


def wait_until_current(settings: DatabaseSettings, *, patience_s: float = 30.0) -> None:
    """`check` for the start of a process: a database that is still starting is waited for.

    Raises:
        DatabaseUnavailableError: not there within `patience_s`.
        SchemaMismatchError: it is behind or ahead.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return check(settings)
        except DatabaseUnavailableError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def refuse_other_schema(settings: DatabaseSettings) -> None:
    """`check` for processes that start without the database and serve 503 until it is there.

    Raises:
        SchemaMismatchError: it is there, and behind or ahead.
    """
    try:
        check(settings)
    except DatabaseUnavailableError as error:
        log.warning("schema_not_checked", reason=error.message)


def compare_with_models(settings: DatabaseSettings) -> None:
    """Raise alembic's `AutogenerateDiffsDetected` when the models and the schema differ."""
    with _owner_connection(settings) as connection:
        command.check(_config(connection))


def head_revision() -> str:
    """The newest revision this program knows."""
    head = scripts().get_current_head()
    if head is None:
        raise FileNotFoundError(f"there are no migrations in {_migrations_folder()}")
    return head


def scripts() -> ScriptDirectory:
    """All migrations that this program knows."""
    return ScriptDirectory.from_config(_config())


def _migrations_folder() -> Path:
    """Beside the package in a wheel, at the repository's root in a checkout."""
    package = Path(__file__).resolve().parents[1]
    in_wheel = package / "_migrations"
    return in_wheel if in_wheel.exists() else package.parents[1] / "migrations"


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _state(connection: Connection) -> tuple[SchemaState, str | None]:
    found = _revision(connection)
    if found == head_revision():
        return SchemaState.CURRENT, found
    known = {script.revision for script in scripts().walk_revisions()}
    is_ahead = found is not None and found not in known
    return (SchemaState.AHEAD if is_ahead else SchemaState.BEHIND), found


def _revision(connection: Connection) -> str | None:
    revision = MigrationContext.configure(connection).get_current_revision()
    connection.rollback()  # reading opened a transaction; migrations begin their own
    return revision


@contextmanager
def _owner_connection(settings: DatabaseSettings) -> Iterator[Connection]:
    """A connection with the login's own rights and no statement timeout."""
    engine = create_engine(settings.sqlalchemy_url(), poolclass=pool.NullPool)
    try:
        with engine.connect() as connection:
            yield connection
    except exc.OperationalError as error:
        if error.connection_invalidated or getattr(error.orig, "sqlstate", None) is None:
            raise DatabaseUnavailableError(
                f"The database is not available: {error.orig}"
            ) from error
        raise
    finally:
        engine.dispose()


@contextmanager
def _locked(connection: Connection) -> Iterator[None]:
    """Hold the lock for the session: one for the transaction would end with the first migration."""
    # Asked for again and again: who waits within a statement has a snapshot, which an index that is built
    # concurrently waits for, and neither would ever end.
    while not connection.execute(
        text("select pg_try_advisory_lock(:id)"), {"id": LOCK_ID}
    ).scalar():
        connection.commit()
        time.sleep(_LOCK_POLL_S)
    connection.commit()
    try:
        yield
    finally:
        connection.rollback()
        connection.execute(text("select pg_advisory_unlock(:id)"), {"id": LOCK_ID})
        connection.commit()
