"""`loraplex members`: who belongs to a tenant, and as what."""

from __future__ import annotations

from enum import StrEnum
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

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Members of tenants.")


class Role(StrEnum):
    """What a member may do."""

    OWNER = "owner"
    ADMIN = "admin"
    DEVELOPER = "developer"
    BILLING = "billing"
    VIEWER = "viewer"


MemberArgument = Annotated[str, typer.Argument(help="E-mail or user id (usr_...) of the member.")]
RoleArgument = Annotated[Role, typer.Argument(help="What they may do.")]


@app.command()
def invite(
    email: Annotated[str, typer.Argument(help="Whom to let in.")],
    role: RoleArgument,
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Invite somebody and print the token, which is shown this once.

    Hand it to that person. They enter it at /join of the control API,
    with the password of their account or one for a new account.

    Example:

      loraplex members invite ada@example.com developer --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        body = {"email": email, "role": role.value}
        made = admin.call("POST", f"/tenants/{tenant_id}/invitations", body)
    if as_json:
        print_json(made)
        return
    until = day_of(made["expires_at"])
    typer.echo(
        f"{made['email']} may join {tenant} until {until}, at /join with this token:", err=True
    )
    typer.echo(made["token"])


@app.command()
def invitations(
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List who was invited, newest first, and what became of it.

    Example:

      loraplex members invitations --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        found = list(admin.pages(f"/tenants/{tenant_id}/invitations"))
    if as_json:
        print_json(found)
        return
    rows = [(i["id"], i["email"], i["role"], i["status"], day_of(i["expires_at"])) for i in found]
    print_rows([("ID", "E-MAIL", "ROLE", "STATUS", "UNTIL"), *rows])


@app.command()
def withdraw(
    invitation: Annotated[str, typer.Argument(help="Its id (ivt_...), or the e-mail.")],
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Take an invitation back: its token lets nobody in any more.

    Example:

      loraplex members withdraw ada@example.com --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        path = f"/tenants/{admin.tenant(tenant)['id']}/invitations"
        for found in admin.pages(path):
            is_meant = found["email"] == invitation.lower() and found["status"] == "pending"
            if found["id"] == invitation or is_meant:
                admin.call("DELETE", f"{path}/{found['id']}")
                typer.echo(f"withdrawn: {found['email']}, {found['role']}")
                return
    raise CommandError(f"{tenant} has no open invitation {invitation}")


@app.command("list")
def list_members(
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List who belongs to a tenant.

    Example:

      loraplex members list --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        members = list(admin.pages(f"/tenants/{tenant_id}/members"))
    if as_json:
        print_json(members)
        return
    rows = [(m["id"], m["email"], m["role"], day_of(m["created_at"])) for m in members]
    print_rows([("ID", "E-MAIL", "ROLE", "SINCE"), *rows])


@app.command("set-role")
def set_role(
    member: MemberArgument,
    role: RoleArgument,
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Give a member another role, from their next request on.

    Example:

      loraplex members set-role ada@example.com admin --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        found = _find(admin, tenant_id, tenant, member)
        path = f"/tenants/{tenant_id}/members/{found['id']}"
        admin.call("PATCH", path, {"role": role.value})
    typer.echo(f"{found['email']} is now {role.value} of {tenant}")


@app.command()
def remove(
    member: MemberArgument,
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """End a membership at once, and revoke the keys that are this person's own.

    Example:

      loraplex members remove ada@example.com --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        found = _find(admin, tenant_id, tenant, member)
        admin.call("DELETE", f"/tenants/{tenant_id}/members/{found['id']}")
    typer.echo(f"removed {found['email']} from {tenant}")


def _find(admin: AdminClient, tenant_id: str, tenant: str, member: str) -> dict[str, Any]:
    for found in admin.pages(f"/tenants/{tenant_id}/members"):
        if member.lower() in {found["id"], found["email"]}:
            return found
    raise CommandError(f"{tenant} has no member {member}")
