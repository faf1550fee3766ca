"""Flags that several commands share, and how a command finds the control API."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from loraplex_engine.urls import http_fault

from loraplex_platform.cli.errors import CommandError

if TYPE_CHECKING:
    from loraplex_platform.admin_client import AdminClient
    from loraplex_platform.settings import DatabaseSettings

# As `settings.ToolFormatName`, which `--help` does not wait for.
ToolFormat = Literal["auto", "hermes", "llama", "mistral"]


def sound_url(fault_of: Callable[[str], str | None]) -> Callable[[str | None], str | None]:
    """A flag's callback: refuses a URL that cannot be used, in words that have nothing of it."""

    def check(url: str | None) -> str | None:
        fault = None if url is None else fault_of(url)
        if fault is not None:
            raise typer.BadParameter(fault)
        return url

    return check


DataDirOption = Annotated[
    Path,
    typer.Option(envvar="LORAPLEX_DATA_DIR", help="Data, secrets and logs of a local fleet."),
]
ControlUrlOption = Annotated[
    str | None,
    typer.Option(
        envvar="LORAPLEX_CONTROL_URL",
        callback=sound_url(http_fault),
        show_default="that of the running local fleet",
        help="Address of the control API.",
    ),
]
TenantOption = Annotated[str, typer.Option("--tenant", "-t", help="Slug or id of the tenant.")]
AnyTenantOption = Annotated[
    str | None, typer.Option("--tenant", "-t", help="Slug or id.", show_default="all")
]
OnlyTenantOption = Annotated[
    str | None, typer.Option("--tenant", "-t", help="Only of this tenant (slug or id).")
]
LimitOption = Annotated[int, typer.Option(min=1, help="How many, newest first.")]
ForPeopleOption = Annotated[str | None, typer.Option(show_default="as it is", help="For people.")]
WhyOption = Annotated[str, typer.Option(help="Why: for whoever finds it later.")]


def open_admin(data_dir: Path, control_url: str | None) -> AdminClient:
    """A client of the control API: by URL and LORAPLEX_ADMIN_KEY, or of the local fleet.

    The admin key is never a flag: command lines are everybody's to read.

    Raises:
        CommandError: neither is known.
    """
    from loraplex_platform.admin_client import AdminClient
    from loraplex_platform.local.data_dir import DataDir, read_json
    from loraplex_platform.local.demo_file import read_state
    from loraplex_platform.variables import read_variable

    folder = DataDir(data_dir.expanduser().resolve())
    admin_key = read_variable("LORAPLEX_ADMIN_KEY")
    if control_url is None:
        state = read_state(folder)
        if state is None:
            raise CommandError(
                f"no fleet runs on {data_dir}: start one with `loraplex up`, name its --data-dir, or give "
                "--control-url (and LORAPLEX_ADMIN_KEY)"
            )
        control_url = str(state["control_url"])
        secrets = read_json(folder.secrets_file) or {}
        admin_key = secrets.get("admin_key", admin_key)
    if not admin_key:
        raise CommandError("set LORAPLEX_ADMIN_KEY to an admin key of that control API")
    return AdminClient(control_url, admin_key)


def find_database(data_dir: Path, *, as_owner: bool = False) -> DatabaseSettings:
    """The database that LORAPLEX_DATABASE_URL names, or the embedded one of the running local fleet.

    The URL is never a flag: it may hold a password, and command lines are everybody's to read.

    Args:
        as_owner: with the owner's login, where it is the local fleet's.

    Raises:
        CommandError: neither is known.
    """
    from loraplex_platform.local.data_dir import DataDir, read_json
    from loraplex_platform.settings import DatabaseSettings
    from loraplex_platform.variables import read_variable, with_login

    if read_variable("LORAPLEX_DATABASE_URL"):
        return DatabaseSettings()  # type: ignore[call-arg] # filled from the environment
    folder = DataDir(data_dir.expanduser().resolve())
    embedded = read_json(folder.run / "postgres.json")
    secrets = read_json(folder.secrets_file) or {}
    if embedded is None or "serve_role" not in secrets:
        raise CommandError(
            f"no embedded Postgres runs on {data_dir}: start it with `loraplex up`, name its --data-dir, or "
            "set LORAPLEX_DATABASE_URL"
        )
    url = str(embedded["url"])
    if not as_owner:
        url = with_login(url, str(secrets["serve_role"]), str(secrets["serve_password"]))
    return DatabaseSettings.model_validate({"database_url": url})
