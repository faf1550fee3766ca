"""`loraplex secrets`: the secrets of a deployment, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraplex_platform.cli.errors import CommandError, CommandGroup
from loraplex_platform.cli.output import JsonOption, print_json

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Secrets of a deployment, as files.")


@app.command()
def make(
    folder: Annotated[Path, typer.Argument(help="Where they go; made if it is not there.")] = Path(
        "secrets"
    ),
    postgres: Annotated[
        str, typer.Option(help="Where Postgres will answer, host:port.")
    ] = "postgres:5432",
    redis: Annotated[str, typer.Option(help="Where Redis will answer, host:port.")] = "redis:6379",
    as_json: JsonOption = False,
) -> None:
    """Make the secrets that are missing in a folder, one file each; never change one that is there.

    compose.yaml mounts each where it is needed; any other deployment sets
    LORAPLEX_SECRETS_DIR. Keep a copy where you keep secrets: without
    loraplex_key_pepper no API key works any more.

    Examples:

      loraplex secrets make

      docker run --rm --user "$(id -u)" -v "$PWD:/here" loraplex-platform secrets make /here/secrets
    """
    from loraplex_platform.deployment_secrets import SecretsFolderError, make_secret_files

    try:
        done = make_secret_files(folder.expanduser(), postgres=postgres, redis=redis)
    except SecretsFolderError as error:
        raise CommandError(str(error)) from None
    if as_json:
        print_json({"folder": str(folder), "made": done.made, "kept": done.kept})
        return
    typer.echo(f"{len(done.made)} made and {len(done.kept)} kept in {folder}.")
    if "loraplex_admin_password" in done.made:
        typer.echo(f"The first login's password is in {folder / 'loraplex_admin_password'}.")
