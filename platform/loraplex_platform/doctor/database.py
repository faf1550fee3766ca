"""Checks of Postgres: reachable, its version, whose login, which schema, its clock, its time zones."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from loraplex_platform.doctor.findings import (
    BadUrlError,
    Catalogue,
    Finding,
    NotLookedAtError,
    fail,
    ok,
    warn,
)
from loraplex_platform.doctor.look import CONNECT_TIMEOUT_S, Look

catalogue = Catalogue()

OLDEST_VERSION: Final = 14
# Leases and rates compare times of one clock, Postgres's; what people read is of both.
SKEW_WARN_S: Final = 2.0
SKEW_FAIL_S: Final = 60.0


async def _ask(look: Look, statement: str, *parameters: object) -> Any:  # noqa: ANN401 - a row, or None
    """One row, through the login's own rights: the runtime role may not be there yet.

    Raises:
        NotLookedAtError: no database is configured, or it cannot be reached.
    """
    import psycopg

    url = look.database_settings().database_url.get_secret_value()
    if look.database_error is not None:
        raise NotLookedAtError(look.database_error)
    try:
        async with await psycopg.AsyncConnection.connect(
            url, connect_timeout=CONNECT_TIMEOUT_S, autocommit=True
        ) as connection:
            found = await connection.execute(statement, parameters)
            return await found.fetchone()
    except psycopg.OperationalError as error:
        # Not asked again and again: each time could take seconds.
        look.database_error = f"{_first_line(error)}: see database.reachable"
        raise NotLookedAtError(look.database_error) from error
    except psycopg.Error as error:
        raise NotLookedAtError(f"{_first_line(error)}: see database.reachable") from error


@catalogue.check("database.reachable", "Postgres answers")
async def reachable(look: Look) -> Finding:
    import psycopg

    look.needed("LORAPLEX_DATABASE_URL")
    try:
        url = look.database_settings().database_url.get_secret_value()
    except BadUrlError as error:
        return fail(
            str(error), "LORAPLEX_DATABASE_URL=postgresql://user:password@host:5432/database"
        )
    began_s = time.monotonic()
    try:
        async with await psycopg.AsyncConnection.connect(
            url, connect_timeout=CONNECT_TIMEOUT_S, autocommit=True
        ) as connection:
            await connection.execute("select 1")
            info = connection.info
            where = f"{info.host} port {info.port} database {info.dbname} as {info.user}"
    except (psycopg.Error, OSError) as error:
        return fail(
            _first_line(error),
            "start Postgres, or mend LORAPLEX_DATABASE_URL (postgresql://user:password@host:5432/database)",
        )
    return ok(f"{where}, {1000 * (time.monotonic() - began_s):.0f} ms")


@catalogue.check("database.version", "Postgres is new enough")
async def version(look: Look) -> Finding:
    row = await _ask(look, "select current_setting('server_version_num')::int")
    return judge_version(int(row[0]))


def judge_version(number: int) -> Finding:
    """Whether our schema runs there; `number` is server_version_num."""
    major, minor = divmod(number, 10_000)
    if major < OLDEST_VERSION:
        return fail(
            f"{major}.{minor}", f"pg_upgrade to {OLDEST_VERSION} or newer; compose.yaml has 18"
        )
    return ok(f"{major}.{minor}")


@catalogue.check("database.login", "the serving login may serve, and change nothing in the books")
async def login(look: Look) -> Finding:
    row = await _ask(look, _LOGIN)
    user, may_serve, is_super, owns = row
    if may_serve is None:
        return fail(
            "there is no role loraplex_app: the schema is not there",
            "LORAPLEX_DATABASE_URL=<the owner's> loraplex migrate",
        )
    if not may_serve:
        return fail(
            f"{user} is no member of loraplex_app",
            f"as the owner: psql -c 'grant loraplex_app to \"{user}\"'",
        )
    if is_super or owns:
        what = "a superuser" if is_super else "the owner of the books"
        return warn(
            f"{user} is {what}: whoever serves with it can rewrite ledger and audit log",
            "LORAPLEX_SERVE_ROLE=loraplex_serve LORAPLEX_SERVE_PASSWORD=<32 characters> loraplex migrate, then"
            " give that login to gateway, control and worker",
        )
    return ok(f"{user}, a member of loraplex_app that owns nothing")


_LOGIN: Final = """
select session_user::text,
    (select pg_has_role(session_user, oid, 'MEMBER') from pg_roles where rolname = 'loraplex_app'),
    (select rolsuper from pg_roles where rolname = session_user),
    coalesce((select pg_has_role(session_user, relowner, 'MEMBER') from pg_class
        where oid = to_regclass('ledger')), false)
"""


@catalogue.check("database.schema", "the schema is the one that this release needs")
async def schema(look: Look) -> Finding:
    from loraplex_platform.db.migrate import (
        SchemaMismatchError,
        SchemaState,
        check,
        head_revision,
    )
    from loraplex_platform.db.session import DatabaseUnavailableError

    settings = look.database_settings()
    try:
        await asyncio.to_thread(check, settings)
    except DatabaseUnavailableError:
        raise NotLookedAtError("the database does not answer: see database.reachable") from None
    except SchemaMismatchError as error:
        if error.state is SchemaState.BEHIND:
            return fail(str(error), "LORAPLEX_DATABASE_URL=<the owner's> loraplex migrate")
        return fail(
            str(error), "install the release that migrated it, or loraplex restore <backup>"
        )
    return ok(f"revision {head_revision()}")


@catalogue.check("database.clock", "this machine's clock and the database's agree")
async def clock(look: Look) -> Finding:
    before_s = time.time()
    row = await _ask(look, "select extract(epoch from clock_timestamp())::float8")
    after_s = time.time()
    # Its answer was made in between: what is outside of that is skew.
    skew_s = max(before_s - row[0], row[0] - after_s, 0.0)
    text = f"{skew_s:.1f} s apart" if skew_s else "agree"
    if skew_s > SKEW_WARN_S:
        side = "behind" if row[0] > after_s else "ahead of"
        remedy = (
            "timedatectl set-ntp true, here and on the database's machine; then chronyc tracking"
        )
        found = f"this machine is {skew_s:.0f} s {side} the database"
        return fail(found, remedy) if skew_s > SKEW_FAIL_S else warn(found, remedy)
    return ok(text)


@catalogue.check(
    "database.time_zones", "the tenants' time zones are known to Postgres and to Python"
)
async def time_zones(look: Look) -> Finding:
    from zoneinfo import available_timezones

    from sqlalchemy import text

    async with look.database() as database, database.sessions() as session:
        known = {str(row[0]) for row in await session.execute(text(_ZONES))}
        used = {str(row[0]) for row in await session.execute(text(_TENANT_ZONES))}
    here = available_timezones()
    if len(known) < FEW_ZONES:
        return fail(
            f"Postgres knows {len(known)} time zones: months of invoices cannot be cut",
            "install the time zone data where Postgres runs: apt-get install tzdata, and restart it",
        )
    if len(here) < FEW_ZONES:
        return fail(f"Python knows {len(here)} time zones", "pip install tzdata")
    missing = sorted((used - known) | (used - here))
    if missing:
        return fail(
            f"tenants use {', '.join(missing[:5])}, which is not known",
            "apt-get install tzdata (Postgres) and pip install -U tzdata (here), or loraplex tenants update"
            " TENANT --billing-tz Europe/Berlin",
        )
    return ok(f"{len(known)} in Postgres, {len(here)} here, {len(used)} in use")


FEW_ZONES: Final = 100
_ZONES: Final = "select name from pg_timezone_names"
_TENANT_ZONES: Final = "select distinct billing_tz from tenants"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
