"""`loraplex outbox`: what is still to be told to others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraplex_platform.cli.errors import CommandError
from loraplex_platform.cli.options import DataDirOption, find_database
from loraplex_platform.cli.output import JsonOption, print_json, print_rows

if TYPE_CHECKING:
    from loraplex_platform.outbox.queries import Backlog
    from loraplex_platform.settings import DatabaseSettings


def outbox(
    revive: Annotated[
        str | None,
        typer.Option(metavar="TOPIC", help="Try again what was given up of this topic."),
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
) -> None:
    """Show what waits to be delivered, and what was given up after many tries.

    Needs LORAPLEX_DATABASE_URL, or a running `loraplex up`. The worker delivers.

    Examples:

      loraplex outbox

      loraplex outbox --revive alert
    """
    import asyncio

    from loraplex_platform.errors import UnavailableError

    try:
        revived, backlog = asyncio.run(_look(find_database(data_dir), revive))
    except UnavailableError as error:
        raise CommandError(error.message) from None
    if as_json:
        topics = [
            {"topic": x.topic, "waiting": x.waiting, "dead": x.dead, "oldest_s": round(x.oldest_s)}
            for x in backlog
        ]
        print_json({"revived": revived, "topics": topics})
        return
    if revive is not None:
        typer.echo(f"{revived} of {revive} will be tried again.")
    if not backlog:
        typer.echo("Everything has been delivered.")
        return
    header = ("TOPIC", "WAITING", "GIVEN UP", "OLDEST")
    print_rows([header, *((x.topic, x.waiting, x.dead, f"{round(x.oldest_s)} s") for x in backlog)])


async def _look(settings: DatabaseSettings, revive: str | None) -> tuple[int, list[Backlog]]:
    from loraplex_platform.db.session import open_database
    from loraplex_platform.outbox import queries

    async with open_database(settings) as database, database.sessions.begin() as session:
        revived = 0 if revive is None else await queries.revive(session, revive)
        return revived, await queries.backlog(session)
