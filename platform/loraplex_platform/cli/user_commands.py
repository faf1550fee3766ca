"""`loraplex users`: people who log in to the console."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex_platform.cli.errors import CommandError, CommandGroup
from loraplex_platform.cli.options import ControlUrlOption, DataDirOption, open_admin
from loraplex_platform.cli.output import JsonOption, day_of, print_json, print_rows, searched

if TYPE_CHECKING:
    from loraplex_platform.admin_client import AdminClient

UserArgument = Annotated[str, typer.Argument(help="E-mail or user id (usr_...).")]

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
    password = _read_password()
    with open_admin(data_dir, control_url) as admin:
        user = admin.create_user(email, password, role.value)
    typer.echo(user["id"])


@app.command("list")
def list_users(
    search: Annotated[
        str | None, typer.Option(show_default="all", help="Part of the address.")
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List the people who can log in, newest first.

    Example:

      loraplex users list --search ada
    """
    with open_admin(data_dir, control_url) as admin:
        found = list(admin.pages("/users", **searched(search)))
    if as_json:
        print_json(found)
        return
    rows = [
        (u["id"], u["email"], u["role"], day_of(u["created_at"]), day_of(u["disabled_at"]))
        for u in found
    ]
    print_rows([("ID", "E-MAIL", "PLATFORM", "SINCE", "OFF SINCE"), *rows])


@app.command()
def disable(
    user: UserArgument,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Refuse somebody's logins and end their sessions at once.

    Example:

      loraplex users disable ada@example.com
    """
    with open_admin(data_dir, control_url) as admin:
        found = _find(admin, user)
        admin.call("POST", f"/users/{found['id']}/disable")
    typer.echo(f"disabled {found['email']}")


@app.command()
def enable(
    user: UserArgument,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Let somebody log in again.

    Example:

      loraplex users enable ada@example.com
    """
    with open_admin(data_dir, control_url) as admin:
        found = _find(admin, user)
        admin.call("POST", f"/users/{found['id']}/enable")
    typer.echo(f"enabled {found['email']}")


@app.command("remove-role")
def remove_role(
    user: UserArgument,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Take somebody's role on the platform away; what they are in tenants stays.

    Example:

      loraplex users remove-role ada@example.com
    """
    with open_admin(data_dir, control_url) as admin:
        found = _find(admin, user)
        admin.call("DELETE", f"/users/{found['id']}/role")
    typer.echo(f"{found['email']} has no role on the platform")


@app.command("reset-password")
def reset_password(
    user: UserArgument,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Give somebody another password.

    All their sessions end at once, and an identity at a login provider that was
    theirs is theirs no more. Their role, their memberships and the API keys that
    are their own stay: to take those from somebody, remove them from their
    tenants (`loraplex members remove`) or switch the account off
    (`loraplex users disable`). The password is asked for as `loraplex users
    create` does.

    Example:

      loraplex users reset-password ada@example.com
    """
    password = _read_password()
    with open_admin(data_dir, control_url) as admin:
        found = _find(admin, user)
        admin.call("POST", f"/users/{found['id']}/password", {"password": password})
    typer.echo(f"{found['email']} has another password")


@app.command()
def logout(
    user: UserArgument,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """End all of somebody's sessions.

    Example:

      loraplex users logout ada@example.com
    """
    with open_admin(data_dir, control_url) as admin:
        found = _find(admin, user)
        admin.call("POST", f"/users/{found['id']}/logout")
    typer.echo(f"logged out {found['email']}")


def _read_password() -> str:
    import sys

    if sys.stdin.isatty():
        asked = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
        return str(asked)
    return sys.stdin.readline().rstrip("\r\n")


def _find(admin: AdminClient, user: str) -> dict[str, Any]:
    for found in admin.pages("/users"):
        if user.lower() in (found["id"], found["email"]):
            return found
    raise CommandError(f"there is no user {user}")
