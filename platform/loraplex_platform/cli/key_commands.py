"""`loraplex keys`: API keys of a tenant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraplex_platform.cli.errors import CommandError, CommandGroup
from loraplex_platform.cli.options import (
    ControlUrlOption,
    DataDirOption,
    TenantOption,
    open_admin,
)

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="API keys of tenants.")

SECONDS_PER_DAY = 86_400


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    tenant: TenantOption,
    days: Annotated[
        int | None, typer.Option(min=1, show_default="never", help="Expires after so many days.")
    ] = None,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Make a key and print its secret, which is shown this once.

    Only the secret goes to standard output, so it can be captured.

    Example:

      KEY=$(loraplex keys create laptop --tenant acme)
    """
    import time

    expires_at = None if days is None else int(time.time()) + days * SECONDS_PER_DAY
    with open_admin(data_dir, control_url) as admin:
        key = admin.create_key(admin.tenant(tenant)["id"], name, expires_at)
    typer.echo(f"{key['id']} for {tenant}; its secret is shown this once:", err=True)
    typer.echo(key["secret"])


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="The key's id (key_...), public id or name.")],
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Revoke a key; it stops working at its next request.

    Example:

      loraplex keys revoke laptop --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        found = [
            item
            for item in admin.keys(tenant_id)
            if item["status"] != "revoked" and key in {item["id"], item["public_id"], item["name"]}
        ]
        if not found:
            raise CommandError(f"{tenant} has no live key {key}")
        if len(found) > 1:
            ids = ", ".join(item["id"] for item in found)
            raise CommandError(f"{tenant} has {len(found)} keys {key}; name one by its id: {ids}")
        admin.revoke_key(tenant_id, found[0]["id"])
    typer.echo(f"revoked {found[0]['id']} ({found[0]['name']})")


@app.command("mint-admin")
def mint_admin() -> None:
    """Make an admin key for LORAPLEX_ADMIN_KEY and print it; nothing is stored.

    Local mode makes its own; compose and clusters need one before they start.

    Example:

      echo "LORAPLEX_ADMIN_KEY=$(loraplex keys mint-admin)" >> .env
    """
    from loraplex_platform.tenancy.keys import mint

    typer.echo(mint("ak").secret)
