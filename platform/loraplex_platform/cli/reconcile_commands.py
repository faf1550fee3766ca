"""`loraplex reconcile`: do the books add up?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex_platform.cli.errors import CommandError
from loraplex_platform.cli.options import DataDirOption, find_database
from loraplex_platform.cli.output import OneJsonOption

if TYPE_CHECKING:
    from loraplex_platform.metering.invariants import InvariantReport
    from loraplex_platform.settings import DatabaseSettings

EXIT_BROKEN = 1
EXIT_CANNOT_TELL = 2


def reconcile(
    since_days: Annotated[
        float | None,
        typer.Option(
            min=0, show_default="all of the books", help="Only requests so many days old."
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Keep the result, for the console to show.")
    ] = True,
    as_json: OneJsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
) -> None:
    """Check all invariants and the token identity, on one snapshot of the database.

    Exit code 0: all of them hold; 1: one is broken, and the table says
    which and where; 2: that could not be found out. Needs
    LORAPLEX_DATABASE_URL, or a running `loraplex up`; nothing else has to
    run. With LORAPLEX_REDIS_URL what Redis counts as running is compared too.

    Examples:

      loraplex reconcile

      loraplex reconcile --since-days 2 --json | jq .ok
    """
    import asyncio
    import json

    import psycopg
    from pydantic import ValidationError
    from sqlalchemy.exc import SQLAlchemyError

    from loraplex_platform.db.migrate import SchemaMismatchError
    from loraplex_platform.errors import UnavailableError
    from loraplex_platform.logs import configure_logging

    configure_logging("error", "console")  # nothing but the answer on standard output
    try:
        report = asyncio.run(_check(find_database(data_dir), since_days, is_kept=keep))
    except (
        CommandError,
        OSError,
        SchemaMismatchError,
        SQLAlchemyError,
        UnavailableError,
        ValidationError,
        psycopg.Error,
    ) as error:
        reason = str(error).strip().splitlines()[0]
        if as_json:
            typer.echo(json.dumps({"ok": None, "error": reason}))
        else:
            typer.echo(f"{typer.style('Cannot tell', fg='yellow')}: {reason}", err=True)
        raise typer.Exit(EXIT_CANNOT_TELL) from None
    if as_json:
        typer.echo(json.dumps(_as_json(report), indent=2))
    else:
        _print(report)
    raise typer.Exit(0 if report.ok else EXIT_BROKEN)


async def _check(
    settings: DatabaseSettings, since_days: float | None, *, is_kept: bool
) -> InvariantReport:
    import asyncio
    from datetime import UTC, datetime, timedelta

    from loraplex_platform.db.migrate import check
    from loraplex_platform.db.session import open_database
    from loraplex_platform.metering.invariant_runs import check_and_keep
    from loraplex_platform.metering.invariants import check_invariants
    from loraplex_platform.rates.invariant import checks_of_redis
    from loraplex_platform.settings import RedisSettings

    await asyncio.to_thread(check, settings)
    since = None if since_days is None else datetime.now(UTC) - timedelta(days=since_days)
    # Long books take long, and nobody waits for this one but who asked.
    extra = checks_of_redis(RedisSettings().redis_url)
    async with open_database(settings, statement_timeout_s=None) as database:
        # Whoever asks may own the database: it is those who serve that must not.
        if not is_kept:
            return await check_invariants(
                database.sessions, since=since, is_serving=False, extra=extra
            )
        return await check_and_keep(
            database.sessions, "reconcile", since=since, is_serving=False, extra=extra
        )


def _as_json(report: InvariantReport) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "ok": report.ok,
        "checked_at": report.checked_at.isoformat(),
        "identity": asdict(report.identity) | {"difference": report.identity.difference},
        "checks": [asdict(check) for check in report.checks],
    }


def _print(report: InvariantReport) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("", "", "what must hold", "what was found"):
        table.add_column(name, overflow="fold")
    for check in report.checks:
        style = "green" if check.ok else "bold red"
        # Text, not markup: ids and names of tenants are in it.
        found = Text(check.detail)
        if check.offenders:
            found.append("\n" + "\n".join(check.offenders), style="dim")
        table.add_row(
            Text("holds" if check.ok else "BROKEN", style=style),
            Text(check.code),
            Text(check.title),
            found,
        )
    console = Console(highlight=False, file=sys.stdout)
    console.print(table)
    broken = [check.name for check in report.checks if not check.ok]
    if broken:
        console.print(Text(f"{len(broken)} broken: {', '.join(broken)}", style="bold red"))
    else:
        console.print(Text(f"All {len(report.checks)} hold.", style="green"))
