"""`loraplex alerts`: what somebody should look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex_platform.cli.errors import CommandError
from loraplex_platform.cli.options import (
    ControlUrlOption,
    DataDirOption,
    LimitOption,
    OnlyTenantOption,
    open_admin,
)
from loraplex_platform.cli.output import JsonLinesOption, moment_of, printable

_UNITS_S = {"m": 60, "h": 3600, "d": 86_400}


def alerts(
    tenant: OnlyTenantOption = None,
    kind: Annotated[
        str | None, typer.Option(help="Only of this kind, such as limit_threshold.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only of the last 30m, 12h or 7d.")
    ] = None,
    limit: LimitOption = 50,
    as_json: JsonLinesOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show alerts, newest first: thresholds passed, pins that end, evals that changed, rollouts that gates
    hold or abort, webhooks that were switched off.

    Examples:

      loraplex alerts --tenant acme --since 7d

      loraplex alerts --kind rollout_aborted --json
    """
    from itertools import islice

    start = None if since is None else _start_of(since)
    with open_admin(data_dir, control_url) as admin:
        tenant_id = None if tenant is None else admin.tenant(tenant)["id"]
        found = admin.alerts(tenant_id=tenant_id, kind=kind, start_time=start)
        for alert in islice(found, limit):
            typer.echo(json.dumps(alert) if as_json else _line(alert))


def _start_of(since: str) -> int:
    import time

    number, unit = since[:-1], since[-1:]
    if unit not in _UNITS_S or not number.isdecimal():
        raise CommandError(f"--since {since}: write a number and m, h or d, such as 30m or 7d")
    return max(0, int(time.time()) - int(number) * _UNITS_S[unit])


def _line(alert: dict[str, Any]) -> str:
    owner = alert["tenant_id"] or "the platform"
    return printable(
        f"{moment_of(alert['at'])}  {alert['severity']:<8} {alert['kind']:<16} {owner}  {alert['summary']}"
    )
