"""`loraplex usage|requests|overview`: what was used and by whom, and how things stand now."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from loraplex_platform.cli.errors import CommandError
from loraplex_platform.cli.options import (
    AnyTenantOption,
    ControlUrlOption,
    DataDirOption,
    LimitOption,
    open_admin,
)
from loraplex_platform.cli.output import JsonOption, moment_of, print_json, print_rows

if TYPE_CHECKING:
    from loraplex_platform.admin_client import AdminClient, Json

# As `metering.schemas`; the control API refuses what it does not know.
Group = Literal[
    "tenant_id",
    "project_id",
    "key_id",
    "model",
    "deployment_id",
    "adapter_version_id",
    "price_book_id",
    "revision_id",
]
# As `metering.records.Arm`; a test compares them.
ArmName = Literal["stable", "canary", "shadow", "pinned", "named"]
_USAGE_PAGE = 100


def usage(
    tenant: AnyTenantOption = None,
    start: Annotated[
        str | None, typer.Option(show_default="30 days ago", help="YYYY-MM-DD, in UTC.")
    ] = None,
    end: Annotated[
        str | None, typer.Option(show_default="now", help="YYYY-MM-DD, in UTC; not included.")
    ] = None,
    width: Annotated[
        Literal["1m", "1h", "1d", "1mo"], typer.Option(help="How long a row's time is.")
    ] = "1d",
    by: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A row for each, may be repeated: {', '.join(get_args(Group))}.",
            show_default="tenant_id",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only this model id.")] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="All of it as CSV, for a spreadsheet.")
    ] = False,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show what was used and what it cost, by time and group.

    Examples:

      loraplex usage --tenant acme --by model --start 2026-11-01

      loraplex usage --width 1mo --csv > november.csv
    """
    if as_csv and as_json:
        raise CommandError("give --csv or --json, not both")
    groups = by or ["tenant_id"]
    unknown = sorted(set(groups) - set(get_args(Group)))
    if unknown:
        raise CommandError(f"--by {unknown[0]}: say one of {', '.join(get_args(Group))}")
    params: dict[str, Any] = {
        "start_time": _day("--start", start, datetime.now(UTC) - timedelta(days=30)),
        "bucket_width": width,
        "group_by[]": groups,
    }
    if end is not None:
        params["end_time"] = _day("--end", end, datetime.now(UTC))
    if model is not None:
        params["model"] = model
    with open_admin(data_dir, control_url) as admin:
        if tenant is not None:
            params["tenant_id"] = admin.tenant(tenant)["id"]
        if as_csv:
            typer.echo(admin.text("/usage", **params, format="csv"), nl=False)
            return
        rows = list(_usage_rows(admin, params))
    if as_json:
        print_json(rows)
        return
    header = (*(group.removesuffix("_id").upper() for group in groups), "FROM", "REQUESTS")
    print_rows(
        [
            (*header, "PROMPT", "CACHED", "COMPLETION", "USD"),
            *(
                (
                    *(_name(row, group) for group in groups),
                    moment_of(row["start_time"]),
                    row["requests"],
                    row["prompt_tokens"],
                    row["cached_tokens"],
                    row["completion_tokens"],
                    row["cost_usd"],
                )
                for row in rows
            ),
        ]
    )


def _usage_rows(admin: AdminClient, params: dict[str, Any]) -> list[Json]:
    rows: list[Json] = []
    asked = params | {"limit": _USAGE_PAGE}
    while True:
        answer = admin.call("GET", "/usage", **asked)
        rows += answer["data"]
        if answer["next_page"] is None:
            return rows
        asked["page"] = answer["next_page"]


def _name(row: Json, group: str) -> object:
    # A tenant is known by its slug, where the answer has it.
    return row.get("tenant") or row.get(group) if group == "tenant_id" else row.get(group)


def _day(flag: str, text: str | None, default: datetime) -> int:
    if text is None:
        return int(default.timestamp())
    try:
        return int(datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp())
    except ValueError:
        raise CommandError(f"{flag} {text}: write YYYY-MM-DD, such as 2026-11-01") from None


def requests(
    tenant: AnyTenantOption = None,
    revision: Annotated[
        str | None, typer.Option(help="Only those that this one answered, rev_...")
    ] = None,
    rollout: Annotated[
        str | None, typer.Option(help="Only those that it had a part in, rol_...")
    ] = None,
    arm: Annotated[
        ArmName | None,
        typer.Option(help="Only those of one side of a rollout, or of no rollout: pinned, named."),
    ] = None,
    limit: LimitOption = 20,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show requests, newest first: what was asked, of what, and how it ended. No text is kept.

    Example:

      loraplex requests --tenant acme --limit 50
    """
    given = {"revision_id": revision, "rollout_id": rollout, "arm": arm}
    filters = {name: value for name, value in given.items() if value is not None}
    with open_admin(data_dir, control_url) as admin:
        if tenant is not None:
            filters["tenant_id"] = str(admin.tenant(tenant)["id"])
        found = list(islice(admin.pages("/requests", **filters), limit))
    if as_json:
        print_json(found)
        return
    header = ("REQUEST", "AT", "MODEL", "STATE", "END", "PROMPT", "COMPLETION", "FIRST TOKEN ms")
    rows = [
        (
            item["id"],
            moment_of(item["created_at"]),
            item["model"],
            item["state"],
            item["error_code"] or item["finish_reason"],
            item["prompt_tokens"],
            item["completion_tokens"],
            item["ttft_ms"],
        )
        for item in found
    ]
    print_rows([header, *rows])


def overview(
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show how everything stands now: traffic, queue, memory, and what today has cost so far.

    Example:

      loraplex overview
    """
    with open_admin(data_dir, control_url) as admin:
        found = admin.call("GET", "/overview")
    if as_json:
        print_json(found)
        return
    print_rows(
        [
            ("requests a second", f"{found['requests_per_s']:.2f}"),
            ("output tokens a second", f"{found['tokens_per_s']:.1f}"),
            ("running, waiting", f"{found['running']}, {found['waiting']}"),
            (
                "failed in the last five minutes",
                f"{found['recent_failed']} of {found['recent_requests']}",
            ),
            ("KV cache in use", f"{found['kv_usage']:.0%}"),
            ("adapters in memory", found["resident_adapters"]),
            ("tenants, keys", f"{found['tenants']}, {found['keys']}"),
            ("adapters, deployments", f"{found['adapters']}, {found['deployments']}"),
            ("cost today, USD", found["cost_today_usd"]),
        ]
    )
