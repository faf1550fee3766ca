"""`loraplex users`: people who log in to the console."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from loraplex_platform.cli.errors import CommandGroup
from loraplex_platform.cli.options import ControlUrlOption, DataDirOption, open_admin

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="People who use the console.")


class Role(StrEnum):
    """What a user may do."""

    ADMIN = "admin"
    VIEWER = "viewer"


@app.callback()
def _group() -> None:
    """People who use the console."""  # with a callback, one command stays a subcommand


@app.command()
def create(
    email: Annotated[str, typer.Argument(help="What they log in with.")],
    role: Annotated[Role, typer.Option(help="A viewer may only read.")] = Role.ADMIN,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Make a user and print their id.

    The password is asked for; without a terminal it is the first line of
    standard input. It is never a flag: command lines are everybody's to read.

    Example:

      loraplex users create ada@example.com --role viewer
    """
    import sys

    if sys.stdin.isatty():
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    with open_admin(data_dir, control_url) as admin:
        user = admin.create_user(email, password, role.value)
    typer.echo(user["id"])
