"""`loraplex backup` and `loraplex restore`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from loraplex_platform.cli.errors import CommandError
from loraplex_platform.cli.options import DataDirOption, find_database

StoreOption = Annotated[
    str | None,
    typer.Option(
        envvar="LORAPLEX_STORE_URL",
        show_default="that of the local fleet",
        help="Address of the adapter store.",
    ),
]


def backup(
    to: Annotated[Path, typer.Option(help="A new or empty folder.")],
    include_secrets: Annotated[
        bool,
        typer.Option(
            "--include-secrets",
            help="Also the local fleet's secrets, in clear: guard it like them.",
        ),
    ] = False,
    store_url: StoreOption = None,
    data_dir: DataDirOption = Path(".loraplex"),
) -> None:
    """Save database and adapters as one consistent state, while everything goes on serving.

    Needs LORAPLEX_DATABASE_URL with the owner's login, or a running
    `loraplex up`; and pg_dump of the server's version or newer. Secrets are
    not in it unless asked for: without the pepper no API key works after a
    restore, so keep LORAPLEX_KEY_PEPPER and the others elsewhere. Redis
    holds nothing that must be saved.

    Examples:

      loraplex backup --to /backups/2026-11-30

      (cd /backups/2026-11-30 && sha256sum -c SHA256SUMS)
    """
    from loraplex_platform.backup.make import make_backup

    secrets_file = data_dir.expanduser() / "secrets.json"
    if include_secrets and not secrets_file.is_file():
        raise CommandError(
            f"--include-secrets: there is no {secrets_file}; outside a local fleet save the LORAPLEX_* "
            "secrets of your deployment yourself"
        )
    made = make_backup(
        find_database(data_dir, as_owner=True).database_url.get_secret_value(),
        store_url or _local_store(data_dir),
        to.expanduser(),
        secrets=_known_secrets(data_dir),
        secrets_file=secrets_file if include_secrets else None,
        tell=_tell,
    )
    for digest in made.missing_adapters:
        _tell(f"not saved, since the store does not have it: {digest}")
    typer.echo(
        f"saved {made.counts['tenants']} tenants, {made.counts['ledger']} ledger entries and "
        f"{len(made.adapters)} adapters to {to}"
    )


def restore(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="A backup.")
    ],
    allow_other_secrets: Annotated[
        bool,
        typer.Option(
            "--allow-other-secrets", help="Although the secrets here are not those of the backup."
        ),
    ] = False,
    store_url: StoreOption = None,
    data_dir: DataDirOption = Path(".loraplex"),
) -> None:
    """Restore a backup into an empty database and check that it is what was saved.

    With LORAPLEX_DATABASE_URL (of a login that may own the database) and
    --store-url into those; otherwise into a new data directory, which
    `loraplex up` can then be started on. Refuses a database that has
    anything in it. Everything else may then start on an empty Redis.

    Examples:

      loraplex restore /backups/2026-11-30 --data-dir ./restored

      LORAPLEX_DATABASE_URL=postgresql://me@db/new loraplex restore \\
        /backups/2026-11-30 --store-url s3://bucket/adapters
    """
    from loraplex_platform.backup.restore import restore_backup
    from loraplex_platform.variables import read_variable

    with ExitStack() as stack:
        if read_variable("LORAPLEX_DATABASE_URL"):
            url = find_database(data_dir).database_url.get_secret_value()
            if store_url is None:
                raise CommandError("--store-url: say where the adapters go, as file:/// or s3://")
        else:
            url = stack.enter_context(_new_local_database(folder, data_dir))
            store_url = store_url or _local_store(data_dir)
        made = restore_backup(
            folder,
            url,
            store_url,
            secrets=_known_secrets(data_dir),
            allow_other_secrets=allow_other_secrets,
            tell=_tell,
        )
    typer.echo(
        f"restored {made.counts['tenants']} tenants, {made.counts['ledger']} ledger entries and "
        f"{len(made.adapters)} adapters of {made.made_at}"
    )
    unknown = [name for name in made.secrets if name not in _known_secrets(data_dir)]
    if unknown:
        names = ", ".join(f"LORAPLEX_{name.upper()}" for name in unknown)
        typer.echo(f"its processes need the secrets that it was made with: {names}")
    typer.echo("then `loraplex migrate`, start everything, and `loraplex reconcile`")


@contextmanager
def _new_local_database(folder: Path, data_dir: Path) -> Iterator[str]:
    """An embedded Postgres in a data directory without one, for as long as the block lasts."""
    from loraplex_platform.backup import manifest
    from loraplex_platform.local.data_dir import DataDir
    from loraplex_platform.local.embedded import start_postgres

    place = DataDir.create(data_dir)
    with place.lock():
        if (place.root / "postgres").exists():
            raise CommandError(
                f"{data_dir} has a database already: give a new --data-dir, or set LORAPLEX_DATABASE_URL"
            )
        if not place.secrets_file.exists():
            if not manifest.read(folder).has_secrets:
                raise CommandError(
                    f"the backup has no secrets, and without its pepper no API key would work: put the "
                    f"secrets.json of that fleet into {place.root} first"
                )
            manifest.write_durably(place.secrets_file, (folder / manifest.SECRETS).read_bytes())
        server = start_postgres(place.root / "postgres")
        try:
            yield server.url
        finally:
            server.stop()


def _known_secrets(data_dir: Path) -> dict[str, str]:
    """Those of the environment, else of the local fleet."""
    from loraplex_platform.backup.manifest import NEEDED_SECRETS
    from loraplex_platform.local.data_dir import read_json
    from loraplex_platform.variables import read_variable

    stored = read_json(data_dir.expanduser() / "secrets.json") or {}
    found = {name: read_variable(f"LORAPLEX_{name.upper()}") for name in NEEDED_SECRETS}
    return {
        name: str(value)
        for name, value in ((name, found[name] or stored.get(name)) for name in found)
        if value
    }


def _local_store(data_dir: Path) -> str:
    return (data_dir.expanduser().resolve() / "store").as_uri()


def _tell(text: str) -> None:
    typer.echo(text, err=True)
