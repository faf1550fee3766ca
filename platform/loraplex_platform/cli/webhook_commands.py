"""`loraplex webhooks`: addresses that are told of alerts and invoices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex_platform.cli.errors import CommandError, CommandGroup
from loraplex_platform.cli.options import (
    ControlUrlOption,
    DataDirOption,
    ForPeopleOption,
    LimitOption,
    open_admin,
)
from loraplex_platform.cli.output import JsonOption, SearchOption, print_json, searched

if TYPE_CHECKING:
    from loraplex_platform.admin_client import AdminClient

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Addresses told of alerts and invoices."
)

OwnerOption = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        "-t",
        show_default="the operator's own, told of all tenants",
        help="Slug or id of the tenant whose webhooks are meant.",
    ),
]
WebhookArgument = Annotated[str, typer.Argument(help="The webhook's id, whk_...")]


@app.command()
def create(
    url: Annotated[str, typer.Argument(help="https://... on the public internet.")],
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            show_default="alert and invoice",
            help="alert, invoice or rollout; may be repeated.",
        ),
    ] = None,
    description: Annotated[str, typer.Option(help="For people.")] = "",
    tenant: OwnerOption = None,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Add an address and print its signing secret, which is shown this once.

    Only the secret goes to standard output, so it can be captured. Receivers
    check signatures with any library of Standard Webhooks.

    Example:

      SECRET=$(loraplex webhooks create https://example.com/hooks -t acme)
    """
    with open_admin(data_dir, control_url) as admin:
        made = admin.create_webhook(
            _owner(admin, tenant),
            {"url": url, "topics": topic or ["alert", "invoice"], "description": description},
        )
    typer.echo(f"{made['id']}; its secret is shown this once:", err=True)
    typer.echo(made["secret"])


@app.command("list")
def list_webhooks(
    tenant: OwnerOption = None,
    search: SearchOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show the addresses and whether they answer.

    They are searched by address and by what they are for.

    Example:

      loraplex webhooks list -t acme
    """
    with open_admin(data_dir, control_url) as admin:
        found = admin.webhooks(_owner(admin, tenant), **searched(search))
    if as_json:
        print_json(found)
        return
    for webhook in found:
        state = webhook["status"]
        if state == "enabled" and webhook["failing_since"] is not None:
            state = "failing"
        typer.echo(
            f"{webhook['id']}  {state:<9} {','.join(webhook['topics']):<14} {webhook['url']}"
        )


@app.command()
def deliveries(
    webhook: WebhookArgument,
    tenant: OwnerOption = None,
    limit: LimitOption = 20,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show what an address was told, and how that went.

    Example:

      loraplex webhooks deliveries whk_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f --limit 5
    """
    from itertools import islice

    with open_admin(data_dir, control_url) as admin:
        found = list(islice(admin.webhook_deliveries(_owner(admin, tenant), webhook), limit))
    if as_json:
        print_json(found)
        return
    for delivery in found:
        typer.echo(_line(delivery))


@app.command("test")
def send_test(
    webhook: WebhookArgument,
    tenant: OwnerOption = None,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Have a test message delivered; `deliveries` shows what came of it.

    Example:

      loraplex webhooks test whk_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f
    """
    with open_admin(data_dir, control_url) as admin:
        typer.echo(admin.act_on_webhook(_owner(admin, tenant), webhook, "test")["id"])


@app.command()
def replay(
    webhook: WebhookArgument,
    delivery: Annotated[str, typer.Argument(help="The delivery's id, dlv_...")],
    tenant: OwnerOption = None,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Have a message delivered once more, whatever became of it.

    Example:

      loraplex webhooks replay whk_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f dlv_0197c5d3b2c38d4e9f5a6b7c8d9e0f1a
    """
    with open_admin(data_dir, control_url) as admin:
        owner = _owner(admin, tenant)
        typer.echo(admin.act_on_webhook(owner, webhook, f"deliveries/{delivery}/replay")["id"])


@app.command("rotate-secret")
def rotate_secret(
    webhook: WebhookArgument,
    grace_s: Annotated[
        int, typer.Option(min=0, help="For so many seconds the old secret signs too.")
    ] = 86_400,
    tenant: OwnerOption = None,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Give an address a new secret and print it; it is shown this once.

    Example:

      SECRET=$(loraplex webhooks rotate-secret whk_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f)
    """
    with open_admin(data_dir, control_url) as admin:
        owner = _owner(admin, tenant)
        made = admin.act_on_webhook(owner, webhook, "rotate", {"grace_s": grace_s})
    typer.echo(made["secret"])


@app.command()
def update(
    webhook: WebhookArgument,
    url: Annotated[
        str | None,
        typer.Option(show_default="as it is", help="https://... on the public internet."),
    ] = None,
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "--topic", show_default="as they are", help="Told of these alone; may be repeated."
        ),
    ] = None,
    description: ForPeopleOption = None,
    tenant: OwnerOption = None,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Change an address, or what it is told of; its secret and what is under way stay.

    Example:

      loraplex webhooks update whk_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f --topic alert -t acme
    """
    given = {"url": url, "topics": topic, "description": description}
    changes = {field: value for field, value in given.items() if value is not None}
    if not changes:
        raise CommandError("nothing to change: give --url, --topic or --description")
    with open_admin(data_dir, control_url) as admin:
        changed = admin.change_webhook(_owner(admin, tenant), webhook, changes)
    typer.echo(f"{changed['id']}  {','.join(changed['topics'])}  {changed['url']}")


@app.command()
def switch(
    webhook: WebhookArgument,
    state: Annotated[str, typer.Argument(metavar="on|off", help="on or off.")],
    tenant: OwnerOption = None,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Switch an address on or off; one that failed for three days was switched off by itself.

    Example:

      loraplex webhooks switch whk_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f on
    """
    if state not in {"on", "off"}:
        raise typer.BadParameter("write on or off", param_hint="STATE")
    with open_admin(data_dir, control_url) as admin:
        status = "enabled" if state == "on" else "disabled"
        admin.change_webhook(_owner(admin, tenant), webhook, {"status": status})
    typer.echo(f"{webhook} is {state}")


@app.command()
def delete(
    webhook: WebhookArgument,
    tenant: OwnerOption = None,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Delete an address with what it was told.

    Example:

      loraplex webhooks delete whk_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f -t acme
    """
    with open_admin(data_dir, control_url) as admin:
        admin.delete_webhook(_owner(admin, tenant), webhook)
    typer.echo(f"deleted {webhook}")


def _owner(admin: AdminClient, tenant: str | None) -> str | None:
    return None if tenant is None else str(admin.tenant(tenant)["id"])


def _line(delivery: dict[str, Any]) -> str:
    from datetime import UTC, datetime

    at = datetime.fromtimestamp(delivery["occurred_at"], UTC)
    told = delivery["last_error"] or (
        f"HTTP {delivery['last_status']}" if delivery["last_status"] else ""
    )
    return (
        f"{delivery['id']}  {at:%Y-%m-%d %H:%M:%S}  {delivery['topic']:<8} {delivery['status']:<10}"
        f" tries: {delivery['tries']}  {told}"
    ).rstrip()
