"""`loraplex tenants`: who is served and billed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraplex_platform.cli.errors import CommandGroup
from loraplex_platform.cli.options import ControlUrlOption, DataDirOption, open_admin

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Tenants.")


@app.callback()
def _group() -> None:
    """Tenants: who is served and billed."""  # with a callback, one command stays a subcommand


@app.command()
def create(
    slug: Annotated[str, typer.Argument(help="Lower-case letters, digits and '-'.")],
    name: Annotated[str | None, typer.Option(show_default="the slug", help="For people.")] = None,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Make a tenant and print its id.

    Example:

      loraplex tenants create acme --name "Acme Inc."
    """
    with open_admin(data_dir, control_url) as admin:
        tenant = admin.create_tenant(slug, name or slug)
    typer.echo(tenant["id"])
