"""`loraplex keys`: API keys of a tenant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex_platform.cli.errors import CommandError, CommandGroup
from loraplex_platform.cli.options import (
    ControlUrlOption,
    DataDirOption,
    TenantOption,
    open_admin,
)
from loraplex_platform.cli.output import JsonOption, day_of, print_json, print_rows

if TYPE_CHECKING:
    from loraplex_platform.admin_client import AdminClient

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="API keys of tenants.")

SECONDS_PER_DAY = 86_400

KeyArgument = Annotated[str, typer.Argument(help="The key's id (key_...), public id or name.")]
ProjectOption = Annotated[str | None, typer.Option(help="Name or id (prj_...) of a project.")]
ScopeOption = Annotated[
    list[str] | None, typer.Option("--scope", help="inference or models.read; repeat for both.")
]
NetworkOption = Annotated[
    list[str] | None,
    typer.Option("--allow-ip", help="Network or address it may be used from; repeat for several."),
]
GrantOption = Annotated[
    list[str] | None,
    typer.Option(
        "--grant",
        help="Id of a deployment (dep_...), adapter (adp_...) or base model (bas_...) it may call; "
        "repeat for several.",
    ),
]
_GRANT_KINDS = {"dep": "deployment", "adp": "adapter", "bas": "base"}


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    tenant: TenantOption,
    days: Annotated[
        int | None, typer.Option(min=1, show_default="never", help="Expires after so many days.")
    ] = None,
    project: ProjectOption = None,
    scope: ScopeOption = None,
    allow_ip: NetworkOption = None,
    grant: GrantOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Make a key and print its secret, which is shown this once.

    Only the secret goes to standard output, so it can be captured.

    Examples:

      KEY=$(loraplex keys create laptop --tenant acme)

      loraplex keys create batch --tenant acme --scope inference --allow-ip 203.0.113.0/24
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        body: dict[str, Any] = {"name": name, **_limits(scope, allow_ip, grant)}
        if days is not None:
            body["expires_at"] = _in_days(days)
        if project is not None:
            body["project_id"] = project_id_of(admin, tenant_id, project)
        key = admin.call("POST", f"/tenants/{tenant_id}/keys", body)
    _print_secret(key, tenant, as_json=as_json)


@app.command("list")
def list_keys(
    tenant: TenantOption,
    live: Annotated[bool, typer.Option("--live", help="Only those that can be used.")] = False,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List a tenant's keys, newest first.

    Example:

      loraplex keys list --tenant acme --live
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        filters = {"status": "active"} if live else {}
        keys = list(admin.pages(f"/tenants/{tenant_id}/keys", **filters))
    if live:
        keys = [key for key in keys if key["status"] == "active"]
    if as_json:
        print_json(keys)
        return
    rows = [
        (
            key["id"],
            key["name"],
            key["status"],
            day_of(key["expires_at"]),
            day_of(key["last_used_at"]),
        )
        for key in keys
    ]
    print_rows([("ID", "NAME", "STATUS", "EXPIRES", "LAST USED"), *rows])


@app.command()
def update(
    key: KeyArgument,
    tenant: TenantOption,
    name: Annotated[str | None, typer.Option(help="Another name.")] = None,
    days: Annotated[
        int | None, typer.Option(min=1, help="Expires after so many days from now.")
    ] = None,
    disable: Annotated[
        bool | None, typer.Option("--disable/--enable", help="Switch it off, or on again.")
    ] = None,
    project: ProjectOption = None,
    scope: ScopeOption = None,
    allow_ip: NetworkOption = None,
    grant: GrantOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Change a key, from its next request on. What is not named stays.

    Example:

      loraplex keys update laptop --tenant acme --disable
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        found = _find(admin, tenant_id, tenant, key)
        body = _limits(scope, allow_ip, grant)
        if name is not None:
            body["name"] = name
        if days is not None:
            body["expires_at"] = _in_days(days)
        if disable is not None:
            body["status"] = "disabled" if disable else "active"
        if project is not None:
            body["project_id"] = project_id_of(admin, tenant_id, project)
        if not body:
            raise CommandError("nothing to change: see `loraplex keys update --help`")
        changed = admin.call("PATCH", f"/tenants/{tenant_id}/keys/{found['id']}", body)
    if as_json:
        print_json(changed)
    else:
        typer.echo(f"{changed['id']} ({changed['name']}) is {changed['status']}")


@app.command()
def rotate(
    key: KeyArgument,
    tenant: TenantOption,
    grace_s: Annotated[
        int, typer.Option(min=0, help="Seconds for which the secret of before still works.")
    ] = SECONDS_PER_DAY,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Give a key a new secret and print it, which is shown this once.

    The key keeps its id, its limits and its usage.

    Example:

      KEY=$(loraplex keys rotate production --tenant acme --grace-s 3600)
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        found = _find(admin, tenant_id, tenant, key)
        path = f"/tenants/{tenant_id}/keys/{found['id']}/rotate"
        rotated = admin.call("POST", path, {"grace_s": grace_s})
    _print_secret(rotated, tenant, as_json=as_json)


@app.command()
def revoke(
    key: KeyArgument,
    tenant: TenantOption,
    reason: Annotated[str | None, typer.Option(help="Kept with the key, for people.")] = None,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Revoke a key; it stops working at its next request.

    Example:

      loraplex keys revoke laptop --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        found = _find(admin, tenant_id, tenant, key)
        why = {} if reason is None else {"reason": reason}
        admin.call("DELETE", f"/tenants/{tenant_id}/keys/{found['id']}", None, **why)
    typer.echo(f"revoked {found['id']} ({found['name']})")


@app.command("mint-admin")
def mint_admin() -> None:
    """Make an admin key for LORAPLEX_ADMIN_KEY and print it; nothing is stored.

    Local mode makes its own; compose and clusters need one before they start.

    Example:

      echo "LORAPLEX_ADMIN_KEY=$(loraplex keys mint-admin)" >> .env
    """
    from loraplex_platform.tenancy.keys import mint

    typer.echo(mint("ak").secret)


def project_id_of(admin: AdminClient, tenant_id: str, project: str) -> str:
    """The id of a live project by name or id.

    Raises:
        CommandError: the tenant has none.
    """
    for found in admin.pages(f"/tenants/{tenant_id}/projects"):
        if project == found["id"] or project.lower() == found["name"].lower():
            return str(found["id"])
    raise CommandError(f"the tenant has no project {project}")


def _find(admin: AdminClient, tenant_id: str, tenant: str, key: str) -> dict[str, Any]:
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
    return found[0]


def _limits(
    scope: list[str] | None, allow_ip: list[str] | None, grant: list[str] | None
) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if scope:
        body["scopes"] = scope
    if allow_ip:
        body["ip_allow"] = allow_ip
    if grant:
        body["grants"] = [_grant(text) for text in grant]
    return body


def _grant(text: str) -> dict[str, str]:
    kind = _GRANT_KINDS.get(text.partition("_")[0])
    if kind is None:
        raise CommandError(
            f"--grant {text}: give the id of a deployment, an adapter or a base model"
        )
    return {"kind": kind, "id": text}


def _in_days(days: int) -> int:
    import time

    return int(time.time()) + days * SECONDS_PER_DAY


def _print_secret(key: dict[str, Any], tenant: str, *, as_json: bool) -> None:
    if as_json:
        print_json(key)
        return
    typer.echo(f"{key['id']} for {tenant}; its secret is shown this once:", err=True)
    typer.echo(key["secret"])
