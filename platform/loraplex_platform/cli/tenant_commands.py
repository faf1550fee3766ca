"""`loraplex tenants`: who is served and billed; `loraplex projects`: the parts of one."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex_platform.cli.errors import CommandError, CommandGroup
from loraplex_platform.cli.key_commands import project_id_of
from loraplex_platform.cli.options import (
    ControlUrlOption,
    DataDirOption,
    ForPeopleOption,
    TenantOption,
    open_admin,
)
from loraplex_platform.cli.output import JsonOption, print_json, print_rows

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Tenants.")
projects = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Projects of tenants.")

_SCHEDULING = ("priority", "weight", "memory_weight", "max_adapters")

TenantArgument = Annotated[str, typer.Argument(help="Slug or id of the tenant.")]
ProjectArgument = Annotated[str, typer.Argument(help="Name or id (prj_...) of the project.")]


@app.command()
def create(
    slug: Annotated[str, typer.Argument(help="Lower-case letters, digits and '-'.")],
    name: Annotated[str | None, typer.Option(show_default="the slug", help="For people.")] = None,
    billing_tz: Annotated[
        str, typer.Option(help="IANA zone whose days and months limits and invoices follow.")
    ] = "UTC",
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Make a tenant and print its id.

    Example:

      loraplex tenants create acme --name "Acme Inc." --billing-tz Europe/Berlin
    """
    body = {"slug": slug, "name": name or slug, "billing_tz": billing_tz}
    with open_admin(data_dir, control_url) as admin:
        tenant = admin.call("POST", "/tenants", body)
    if as_json:
        print_json(tenant)
    else:
        typer.echo(tenant["id"])


@app.command("list")
def list_tenants(
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List tenants, newest first.

    Example:

      loraplex tenants list
    """
    with open_admin(data_dir, control_url) as admin:
        tenants = list(admin.pages("/tenants"))
    if as_json:
        print_json(tenants)
        return
    rows = [(t["id"], t["slug"], t["status"], t["billing_tz"], t["name"]) for t in tenants]
    print_rows([("ID", "SLUG", "STATUS", "ZONE", "NAME"), *rows])


@app.command()
def show(
    tenant: TenantArgument,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show a tenant, and what is its own at the engines.

    Example:

      loraplex tenants show acme
    """
    with open_admin(data_dir, control_url) as admin:
        path = f"/tenants/{admin.tenant(tenant)['id']}"
        found = admin.call("GET", path)
        scheduling = admin.call("GET", f"{path}/scheduling")
    if as_json:
        print_json(found | {"scheduling": scheduling})
        return
    print_rows(
        [
            *((field, found[field]) for field in ("id", "slug", "name", "status", "billing_tz")),
            ("keeps answers for a day", "yes" if found["replays_answers"] else "no"),
            *((field.replace("_", " "), scheduling[field]) for field in _SCHEDULING),
        ]
    )


@app.command()
def update(
    tenant: TenantArgument,
    name: ForPeopleOption = None,
    billing_tz: Annotated[
        str | None,
        typer.Option(
            show_default="as it is",
            help="IANA zone whose days and months limits and invoices follow.",
        ),
    ] = None,
    replays_answers: Annotated[
        bool | None,
        typer.Option(
            show_default="as it is",
            help="Keep answers to requests with an Idempotency-Key for a day, encrypted, so that a"
            " retry gets the answer again. Turned off, what is kept is deleted.",
        ),
    ] = None,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Change a tenant.

    Example:

      loraplex tenants update acme --replays-answers
    """
    given = {"name": name, "billing_tz": billing_tz, "replays_answers": replays_answers}
    changes = {field: value for field, value in given.items() if value is not None}
    if not changes:
        raise CommandError("nothing to change: give --name, --billing-tz or --replays-answers")
    with open_admin(data_dir, control_url) as admin:
        found = admin.tenant(tenant)
        admin.call("PATCH", f"/tenants/{found['id']}", changes)
    typer.echo(f"updated {found['slug']}")


@app.command()
def schedule(
    tenant: TenantArgument,
    priority: Annotated[
        int | None, typer.Option(show_default="as it is", help="Of a larger one goes first.")
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option(show_default="as it is", help="Its share of what its priority gets."),
    ] = None,
    memory_weight: Annotated[
        str | None,
        typer.Option(
            show_default="as it is",
            help="Its share of the KV cache beside other tenants'; 'none': its weight.",
        ),
    ] = None,
    max_adapters: Annotated[
        str | None,
        typer.Option(
            show_default="as it is",
            help="How many of its adapters may be in use on an engine at a time; 'none': any number.",
        ),
    ] = None,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Say how urgent a tenant's requests are at the engines, and what memory is theirs there.

    Examples:

      loraplex tenants schedule acme --weight 2 --memory-weight 4

      loraplex tenants schedule acme --max-adapters 2

      loraplex tenants schedule acme --max-adapters none
    """
    changes: dict[str, Any] = {"priority": priority, "weight": weight}
    changes = {field: value for field, value in changes.items() if value is not None}
    if weight is not None and not math.isfinite(weight):
        raise CommandError("--weight: give a number")
    if memory_weight is not None:
        changes["memory_weight"] = _number_or_none("--memory-weight", memory_weight, float)
    if max_adapters is not None:
        changes["max_adapters"] = _number_or_none("--max-adapters", max_adapters, int)
    if not changes:
        raise CommandError(
            "nothing to change: give --priority, --weight, --memory-weight or --max-adapters"
        )
    with open_admin(data_dir, control_url) as admin:
        found = admin.tenant(tenant)
        shown = admin.call("PATCH", f"/tenants/{found['id']}/scheduling", changes)
    settings = ", ".join(
        f"{name} {'none' if shown[name] is None else shown[name]}" for name in _SCHEDULING
    )
    typer.echo(f"{found['slug']}: {settings}")


def _number_or_none(option: str, text: str, kind: type[float | int]) -> float | int | None:
    if text == "none":
        return None
    with contextlib.suppress(ValueError):
        number = kind(text)
        if isinstance(number, int) or math.isfinite(number):  # JSON knows no others
            return number
    raise CommandError(f"{option}: give a number, or 'none'")


@app.command()
def suspend(
    tenant: TenantArgument,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Refuse a tenant's requests, from the next one on; nothing else of it changes.

    Example:

      loraplex tenants suspend acme
    """
    with open_admin(data_dir, control_url) as admin:
        found = admin.tenant(tenant)
        admin.call("POST", f"/tenants/{found['id']}/suspend")
    typer.echo(f"suspended {found['slug']}")


@app.command()
def activate(
    tenant: TenantArgument,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Serve a suspended tenant again.

    Example:

      loraplex tenants activate acme
    """
    with open_admin(data_dir, control_url) as admin:
        found = admin.tenant(tenant)
        admin.call("POST", f"/tenants/{found['id']}/activate")
    typer.echo(f"activated {found['slug']}")


@app.command()
def delete(
    tenant: TenantArgument,
    confirm: Annotated[
        str | None,
        typer.Option(show_default="asked for", help="The tenant's slug, to mean it."),
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Delete a tenant and everything that is its own, for good.

    Keys, people, names, webhooks, stored answers and adapter files go.
    Ledger, invoices and audit log stay, as law wants them.

    Example:

      loraplex tenants delete acme --confirm acme
    """
    with open_admin(data_dir, control_url) as admin:
        found = admin.tenant(tenant)
        if confirm is None:
            confirm = typer.prompt(f"Type {found['slug']} to delete it for good", err=True)
        report = admin.delete_tenant(found["id"], confirm)
    if as_json:
        print_json(report)
        return
    for kind, count in report["removed"].items():
        typer.echo(f"removed  {count} {kind}")
    typer.echo(f"removed  {report['adapter_files']} adapter_files")
    for reason in report["kept"]:
        typer.echo(f"kept     {reason}")


# ---------------------------------------------------------------------------- projects


@projects.command("create")
def create_project(
    name: Annotated[str, typer.Argument(help="Unique in the tenant, whatever its capitals.")],
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Make a project and print its id.

    Example:

      loraplex projects create "chat assistant" --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        project = admin.call("POST", f"/tenants/{tenant_id}/projects", {"name": name})
    typer.echo(project["id"])


@projects.command("list")
def list_projects(
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List a tenant's projects, newest first.

    Example:

      loraplex projects list --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        found = list(admin.pages(f"/tenants/{tenant_id}/projects"))
    if as_json:
        print_json(found)
        return
    print_rows([("ID", "NAME"), *((project["id"], project["name"]) for project in found)])


@projects.command("rename")
def rename_project(
    project: ProjectArgument,
    name: Annotated[str, typer.Argument(help="The new one.")],
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Give a project another name.

    Example:

      loraplex projects rename "chat assistant" assistant --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        project_id = project_id_of(admin, tenant_id, project)
        path = f"/tenants/{tenant_id}/projects/{project_id}"
        changed = admin.call("PATCH", path, {"name": name})
    typer.echo(f"{project_id} is {changed['name']}")


@projects.command("archive")
def archive_project(
    project: ProjectArgument,
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Take a project without live keys out of use. Its usage and bills stay.

    Example:

      loraplex projects archive "chat assistant" --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = admin.tenant(tenant)["id"]
        project_id = project_id_of(admin, tenant_id, project)
        admin.call("DELETE", f"/tenants/{tenant_id}/projects/{project_id}")
    typer.echo(f"archived {project_id} ({project})")
