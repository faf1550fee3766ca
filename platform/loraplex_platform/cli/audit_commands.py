"""`loraplex audit`: who changed what, and the proof that nothing of it is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex_platform.cli.errors import EXIT_FAILED, CommandError, CommandGroup
from loraplex_platform.cli.options import (
    ControlUrlOption,
    DataDirOption,
    LimitOption,
    OnlyTenantOption,
    open_admin,
)
from loraplex_platform.cli.output import JsonLinesOption, JsonOption, print_json, printable

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="The audit log.")


@app.command("list")
def list_entries(
    tenant: OnlyTenantOption = None,
    action: Annotated[
        str | None, typer.Option(help="Only this action; `api_key.*`: all that begin so.")
    ] = None,
    actor: Annotated[str | None, typer.Option(help="Only by this user (usr_...).")] = None,
    target: Annotated[
        str | None, typer.Option("--object", help="Only about the object with this id.")
    ] = None,
    limit: LimitOption = 50,
    as_json: JsonLinesOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show changes, newest first.

    Examples:

      loraplex audit list --tenant acme --action "api_key.*"

      loraplex audit list --limit 1000 --json > audit.jsonl
    """
    from itertools import islice

    with open_admin(data_dir, control_url) as admin:
        tenant_id = None if tenant is None else admin.tenant(tenant)["id"]
        entries = admin.audit(tenant_id=tenant_id, action=action, actor_id=actor, object_id=target)
        for entry in islice(entries, limit):
            typer.echo(json.dumps(entry) if as_json else _line(entry))


@app.command()
def heads(
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Print the newest row of every chain, as JSON lines to be kept somewhere else.

    Whoever owns the database can rewrite the log and its heads. They cannot
    rewrite what was kept elsewhere: `verify --against` compares.

    Example:

      loraplex audit heads > /mnt/other-machine/audit-heads.jsonl
    """
    with open_admin(data_dir, control_url) as admin:
        for chain in admin.audit_chains():
            typer.echo(json.dumps({name: chain[name] for name in ("id", "seq", "hash")}))


@app.command()
def verify(
    against: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="What `heads` once printed.")
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Check every link of every chain, and that they still lead through rows kept elsewhere.

    Exit code 1 if anything was changed, removed, moved or added.

    Example:

      loraplex audit verify --against /mnt/other-machine/audit-heads.jsonl
    """
    faults = []
    with open_admin(data_dir, control_url) as admin:
        check = next(c for c in admin.invariants()["checks"] if c["code"] == "I10")
        if not check["ok"]:
            faults += [check["detail"], *check["offenders"]]
        kept = [] if against is None else _read_heads(against)
        for head in kept:
            fault = _compare(admin, head)
            if fault is not None:
                faults.append(fault)
    if as_json:
        print_json({"ok": not faults, "faults": faults, "heads_compared": len(kept)})
        raise typer.Exit(EXIT_FAILED if faults else 0)
    for fault in faults:
        typer.echo(f"{typer.style('BROKEN', fg='red')}: {fault}", err=True)
    if faults:
        raise typer.Exit(EXIT_FAILED)
    also = f", and leads through all {len(kept)} rows of {against}" if against else ""
    typer.echo(f"The audit log is whole{also}.")


def _compare(admin: Any, head: dict[str, Any]) -> str | None:  # noqa: ANN401 - the client, imported late
    from loraplex_platform.admin_client import AdminApiError

    try:
        found = admin.audit_link(head["id"], head["seq"])["hash"]
    except AdminApiError as error:
        if error.status != 404:
            raise
        return f"chain {head['id']}: row {head['seq']} is not there any more"
    if found != head["hash"]:
        return f"chain {head['id']}: row {head['seq']} has hash {found}, was {head['hash']}"
    return None


def _read_heads(path: Path) -> list[dict[str, Any]]:
    heads = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            head = json.loads(line)
            heads.append({"id": str(head["id"]), "seq": int(head["seq"]), "hash": head["hash"]})
        except (ValueError, KeyError, TypeError):
            raise CommandError(
                f"{path}:{number} is no line of `loraplex audit heads`: give its output as it was"
            ) from None
    return heads


def _line(entry: dict[str, Any]) -> str:
    from datetime import UTC, datetime

    at = datetime.fromtimestamp(entry["at"], UTC)
    who = entry["actor_id"] or entry["actor_kind"]
    what = entry["object_id"] or entry["object_kind"]
    changed = ""
    if entry["before"] is not None or entry["after"] is not None:
        before, after = entry["before"] or {}, entry["after"] or {}
        changed = "  " + ", ".join(
            f"{name}: {before.get(name)!r} -> {after.get(name)!r}"
            for name in dict.fromkeys([*before, *after])
        )
    return printable(f"{at:%Y-%m-%d %H:%M:%S}  {who:<36}  {entry['action']:<24}  {what}{changed}")
