"""`loraplex limits` and `loraplex explain`: what may be used, what is, and why a request was blocked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex_platform.cli.errors import CommandError, CommandGroup
from loraplex_platform.cli.options import ControlUrlOption, DataDirOption, open_admin
from loraplex_platform.cli.output import JsonOption, day_of, moment_of, print_json, print_rows

if TYPE_CHECKING:
    from loraplex_platform.admin_client import AdminClient

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Limits: rates and quotas of tokens and money."
)

_RATES = ("rpm", "tpm_in", "tpm_out", "tpm_total", "concurrency")
_PREFIXES = {"prj_": "project", "key_": "key", "adp_": "adapter", "dep_": "deployment"}

_TenantFilter = Annotated[
    str | None, typer.Option("--tenant", "-t", help="Slug or id of the tenant.")
]


@app.command("list")
def list_limits(
    tenant: _TenantFilter = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show limits and what is used of them now.

    Example:

      loraplex limits list --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = None if tenant is None else admin.tenant(tenant)["id"]
        limits = list(admin.limits(tenant_id))
    if as_json:
        print_json(limits)
        return
    header = ("ID", "SCOPE", "LIMIT", "VALUE", "USED", "HELD", "RESETS", "KIND")
    print_rows([header, *(_row(limit) for limit in limits)])


@app.command("set")
def set_limit(
    metric: Annotated[
        str,
        typer.Argument(
            help="Rates: rpm, tpm_in, tpm_out, tpm_total, concurrency. Quotas: requests, tokens_in, "
            "tokens_out, tokens_total, cost."
        ),
    ],
    value: Annotated[str, typer.Argument(help="Requests, tokens, or dollars of cost.")],
    scope: Annotated[
        str,
        typer.Option(
            "--of",
            help="Whose: a tenant's slug or id, the id of a project, key, adapter or deployment, or "
            "'platform'.",
        ),
    ],
    per: Annotated[
        str | None,
        typer.Option(help="Of a quota: day, month, total, or hours such as 24h or 720h."),
    ] = None,
    soft: Annotated[bool, typer.Option("--soft", help="Only alert, refuse nothing.")] = False,
    burst: Annotated[
        int | None, typer.Option(min=1, help="Of a rate: how much may come at once.")
    ] = None,
    fail_mode: Annotated[
        str | None, typer.Option(help="Of a rate, while Redis is away: open, closed or local.")
    ] = None,
    alert: Annotated[
        list[int] | None, typer.Option(min=1, max=100, help="Of a quota: alert at this percentage.")
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Set a limit, or change the one that there is.

    Examples:

      loraplex limits set cost 100 --of acme --per month --alert 80

      loraplex limits set rpm 60 --of key_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f
    """
    period, window_hours = _parse_period(metric, per)
    changes: dict[str, Any] = {"value": value}
    changes |= {} if burst is None else {"burst": burst}
    changes |= {} if fail_mode is None else {"fail_mode": fail_mode}
    changes |= {} if alert is None else {"alert_pct": alert}
    with open_admin(data_dir, control_url) as admin:
        kind, scope_id = _find_scope(admin, scope)
        wanted = {
            "scope_kind": kind,
            "scope_id": scope_id,
            "metric": metric,
            "period": period,
            "window_hours": window_hours,
            "hard": not soft,
        }
        found = _find(admin, wanted)
        if found is None:
            limit = admin.create_limit({k: v for k, v in wanted.items() if v is not None} | changes)
        else:
            limit = admin.update_limit(found["id"], changes)
    if as_json:
        print_json(limit)
    else:
        typer.echo(f"{limit['id']}: {_what(limit)} of {_scope(limit)} is {limit['value']}")


@app.command()
def effective(
    key: Annotated[str, typer.Option(help="The caller's key, key_...")],
    deployment: Annotated[
        str | None,
        typer.Option(help="Also the limits of this deployment, dep_..., and of its adapter."),
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show all limits that bind a caller now: platform, tenant, project, key, model.

    Example:

      loraplex limits effective --key key_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f
    """
    with open_admin(data_dir, control_url) as admin:
        limits = admin.effective_limits(key, deployment)
    if as_json:
        print_json(limits)
        return
    header = ("ID", "SCOPE", "LIMIT", "VALUE", "USED", "HELD", "LEFT", "RESETS", "KIND")
    print_rows([header, *(_standing_row(limit) for limit in limits)])


@app.command()
def remove(
    limit: Annotated[str, typer.Argument(help="The limit's id, lim_...")],
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Remove a limit. Set again within its period, it finds what was used.

    Example:

      loraplex limits remove lim_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f
    """
    with open_admin(data_dir, control_url) as admin:
        admin.delete_limit(limit)
    typer.echo(f"removed {limit}")


def explain(
    request: Annotated[str, typer.Argument(help="x-request-id of an answer, req_...")],
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Say in words why a request was blocked, cut short or failed; and of one that was admitted what
    exactly answered it (revision, digests, engine build, sampling), why that, and what it cost.

    Example:

      loraplex explain req_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f
    """
    with open_admin(data_dir, control_url) as admin:
        found = admin.explain(request)
    if as_json:
        print_json(found)
        return
    typer.echo(f"{found['outcome']}: {found['summary']}")
    answered = found["answered_by"] or {"words": []}
    for line in found["details"] + answered["words"]:
        typer.echo(f"  {line}")


def _parse_period(metric: str, per: str | None) -> tuple[str | None, int | None]:
    if metric in _RATES:
        if per is not None:
            raise CommandError(
                f"--per: {metric} is per minute (concurrency: at a time), leave it out"
            )
        return None, None
    if per is None:
        raise CommandError("--per: say day, month, total, or hours such as 24h")
    if per.endswith("h") and per[:-1].isdigit():
        return "rolling", int(per[:-1])
    return per, None


def _find_scope(admin: AdminClient, scope: str) -> tuple[str, str | None]:
    if scope == "platform":
        return "platform", None
    for prefix, kind in _PREFIXES.items():
        if scope.startswith(prefix):
            return kind, scope
    return "tenant", str(admin.tenant(scope)["id"])


def _find(admin: AdminClient, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The limit of that scope, metric and period that always holds."""
    is_rate = wanted["metric"] in _RATES
    for limit in admin.limits(None):
        same = all(limit[field] == value for field, value in wanted.items() if field != "period")
        if (
            same
            and (is_rate or limit["period"] == wanted["period"])
            and limit["valid_from"] is None
        ):
            return limit
    return None


def _row(limit: dict[str, Any]) -> tuple[object, ...]:
    use = limit["use"] or {}
    return (
        limit["id"],
        _scope(limit),
        _what(limit),
        limit["value"],
        use.get("used"),
        use.get("held"),
        day_of(use.get("period_end")),
        "hard" if limit["hard"] else "soft",
    )


def _standing_row(limit: dict[str, Any]) -> tuple[object, ...]:
    return (
        limit["id"],
        _scope(limit),
        _what(limit),
        limit["value"],
        limit["used"],
        limit["held"],
        limit["remaining"],
        moment_of(limit["resets_at"]),
        "hard" if limit["hard"] else "soft",
    )


def _scope(limit: dict[str, Any]) -> str:
    return str(limit["scope_id"] or "platform")


def _what(limit: dict[str, Any]) -> str:
    if limit["window_hours"] is not None:
        return f"{limit['metric']} in {limit['window_hours']} h"
    if limit["period"] in (None, "minute"):
        return str(limit["metric"])
    return f"{limit['metric']} per {limit['period']}"
