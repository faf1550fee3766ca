"""`loraplex retention`: what is kept for how long, and what is due."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraplex_platform.cli.errors import CommandError
from loraplex_platform.cli.options import ControlUrlOption, DataDirOption, open_admin
from loraplex_platform.cli.output import JsonOption, print_json

FOR_EVER = "forever"


def retention(
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run/--apply", help="Show what is due, or delete it now."),
    ] = True,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=DAYS", help="Keep NAME so long (or =forever)."),
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show how long everything is kept and what is due; set it; delete what is due.

    The worker deletes what is due every hour. Ledger, invoices and prices
    are never deleted. Requests go by whole months, once their usage is
    rolled up.

    Examples:

      loraplex retention --dry-run

      loraplex retention --set requests=400 --set audit_log=forever

      loraplex retention --apply
    """
    wanted = [_parse(change) for change in changes or ()]
    with open_admin(data_dir, control_url) as admin:
        for name, days in wanted:
            admin.set_retention(name, days)
        if not dry_run:
            deleted = admin.apply_retention()["deleted"]
            if as_json:
                print_json({"deleted": deleted})
            else:
                told = ", ".join(f"{name}: {count}" for name, count in deleted.items())
                typer.echo(f"deleted {told}" if told else "nothing was due")
            return
        rules = admin.retention()
    if as_json:
        print_json(rules)
        return
    for rule in rules:
        kept = "for ever" if rule["keep_days"] is None else f"{rule['keep_days']} days"
        due = f"{rule['rows_due']} rows due"
        if rule["months_due"]:
            due += f" in {', '.join(rule['months_due'])}"
        typer.echo(f"{rule['id']:<20} {kept:<12} (at least {rule['least_days']} days)  {due}")
        for reason in rule["blocked"]:
            typer.echo(f"{'':<20} stays for now: {reason}")


def _parse(change: str) -> tuple[str, int | None]:
    name, _, days = change.partition("=")
    if days == FOR_EVER:
        return name, None
    if not name or not days.isdigit():
        raise CommandError(f"--set {change}: write NAME=DAYS, such as requests=400, or =forever")
    return name, int(days)
