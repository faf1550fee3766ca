"""`loraplex eval`: suites of golden prompts, runs against a revision, comparison, schedules, traces.

Exit status of `run`: 0 passed, 1 failed its threshold, 2 it could not be decided (error, timeout, cancelled).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from loraplex_platform.cli.errors import CommandError, CommandGroup
from loraplex_platform.cli.options import (
    ControlUrlOption,
    DataDirOption,
    LimitOption,
    TenantOption,
    open_admin,
)
from loraplex_platform.cli.output import JsonOption, moment_of, print_json, print_rows

if TYPE_CHECKING:
    from loraplex_platform.admin_client import AdminClient

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Golden prompts, judged on a revision."
)
schedule = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Runs by themselves.")
app.add_typer(schedule, name="schedule")

_POLL_S = 0.5
_EXIT_OF = {"passed": 0, "failed": 1}
_ACTIVE = ("queued", "running")

OwnerOption = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        "-t",
        show_default="the platform's own, which every tenant may run",
        help="Slug or id of the tenant whose suite is meant.",
    ),
]
SuiteArgument = Annotated[str, typer.Argument(help="The suite's name or id, evs_...")]
RunArgument = Annotated[str, typer.Argument(help="The run's id, evr_...")]
ScheduleArgument = Annotated[str, typer.Argument(metavar="SCHEDULE", help="Its id, evd_...")]
VersionOption = Annotated[
    int | None, typer.Option("--version", min=1, show_default="the newest", help="Of the suite.")
]
DeploymentOption = Annotated[
    str | None, typer.Option("--deployment", "-d", help="A model id: its current revision.")
]
RevisionOption = Annotated[str | None, typer.Option("--revision", help="A revision, rev_...")]
BaselineOption = Annotated[
    str | None, typer.Option("--baseline", help="The revision to compare with, rev_...")
]
ConcurrencyOption = Annotated[int, typer.Option(min=1, max=64, help="Cases at a time.")]
CaseTimeoutOption = Annotated[float, typer.Option(min=1, max=600, help="Seconds for a case.")]
RunTimeoutOption = Annotated[
    float, typer.Option("--timeout-s", min=1, max=86_400, help="Seconds for the whole run.")
]


# ---------------------------------------------------------------------------- suites


@app.command("import")
def import_suite(
    name: Annotated[str, typer.Argument(help="The suite; an existing one gets a version.")],
    file: Annotated[Path, typer.Argument(help="JSONL, one case (or request) a line.")],
    tenant: OwnerOption = None,
    kind: Annotated[Literal["checks", "performance"], typer.Option(help="What it is.")] = "checks",
    threshold: Annotated[
        float | None,
        typer.Option(min=0, max=1, show_default="1", help="Share of the weights that must pass."),
    ] = None,
    pace: Annotated[
        Literal["recorded", "none"] | None,
        typer.Option(
            help="Of a trace: as it was recorded (default), or as fast as places are free."
        ),
    ] = None,
    ttft_p95_ms: Annotated[float | None, typer.Option(min=0, help="A trace passes below.")] = None,
    itl_p95_ms: Annotated[float | None, typer.Option(min=0, help="A trace passes below.")] = None,
    output_tokens_per_s: Annotated[
        float | None, typer.Option(min=0, help="A trace passes above.")
    ] = None,
    abort_rate: Annotated[
        float | None, typer.Option(min=0, max=1, help="A trace passes below.")
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Add a suite, or the next version of one, from a file.

    The same lines are the same version. An error names line and field.

    Example:

      loraplex eval import capitals golden.jsonl -t acme --threshold 0.9
    """
    from loraplex_platform.errors import PlatformError
    from loraplex_platform.evals.suites import parse_jsonl

    try:
        lines = parse_jsonl(file.read_bytes())
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}") from None
    except PlatformError as error:
        raise CommandError(f"{file}: {error.message}") from None
    body: dict[str, Any] = {"name": name, "kind": kind, "lines": lines}
    if threshold is not None:
        body["threshold"] = {"share": threshold}
    limits = {
        "ttft_p95_ms": ttft_p95_ms,
        "itl_p95_ms": itl_p95_ms,
        "output_tokens_per_s": output_tokens_per_s,
        "abort_rate": abort_rate,
    }
    given = {field: value for field, value in limits.items() if value is not None}
    if given:
        body["performance"] = given
    if pace is not None:
        body["pace"] = pace
    with open_admin(data_dir, control_url) as admin:
        made = admin.call("POST", _suites_path(admin, tenant), body)
    if as_json:
        print_json(made)
    else:
        typer.echo(
            f"{made['id']}  {made['name']} version {made['version']}, {made['num_cases']} cases"
        )


@app.command("export")
def export_suite(
    suite: SuiteArgument,
    tenant: OwnerOption = None,
    version: VersionOption = None,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Write a suite's version as JSONL to standard output; importing it makes the same version.

    Example:

      loraplex eval export support -t acme > support.jsonl
    """
    import json

    with open_admin(data_dir, control_url) as admin:
        path = _suites_path(admin, tenant)
        found = _find_suite(admin, path, suite)
        number = version or found["version"]
        for line in admin.call("GET", f"{path}/{found['id']}/versions/{number}")["lines"]:
            typer.echo(json.dumps(line, ensure_ascii=False, sort_keys=True))


@app.command("list")
def list_things(
    what: Annotated[
        Literal["suites", "runs", "schedules"], typer.Argument(help="Of what.")
    ] = "suites",
    tenant: OwnerOption = None,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show suites, or a tenant's runs or schedules, newest first.

    Example:

      loraplex eval list --json
    """
    from itertools import islice

    with open_admin(data_dir, control_url) as admin:
        if what == "suites":
            path = _suites_path(admin, tenant)
        elif tenant is None:
            raise CommandError(f"--tenant: say whose {what}")
        else:
            path = f"{_tenant_path(admin, tenant)}/eval-{what}"
        found = list(islice(admin.pages(path), limit))
    if as_json:
        print_json(found)
    elif found:
        print_rows(map({"suites": _suite_row, "runs": _run_row}.get(what, _schedule_row), found))


# ---------------------------------------------------------------------------- runs


@app.command()
def run(
    suite: SuiteArgument,
    tenant: TenantOption,
    deployment: DeploymentOption = None,
    revision: RevisionOption = None,
    baseline: BaselineOption = None,
    version: VersionOption = None,
    concurrency: ConcurrencyOption = 4,
    case_timeout_s: CaseTimeoutOption = 60.0,
    timeout_s: RunTimeoutOption = 1800.0,
    detach: Annotated[bool, typer.Option("--detach", help="Only queue it.")] = False,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Ask a suite of a revision, and wait: exit status 1 when it fails its threshold.

    Ctrl-C leaves the run going on; `loraplex eval cancel` ends it.

    Example:

      loraplex eval run capitals -t acme -d capitals
    """
    with open_admin(data_dir, control_url) as admin:
        path = _tenant_path(admin, tenant)
        body = _aim(admin, path, suite, version, deployment, revision, baseline) | _options(
            concurrency, case_timeout_s, timeout_s
        )
        made = admin.call("POST", f"{path}/eval-runs", body)
        ended = made if detach else _wait(admin, f"{path}/eval-runs/{made['id']}", made)
    if as_json:
        print_json(ended)
    else:
        _say(ended)
    if not detach:
        raise typer.Exit(_EXIT_OF.get(ended["state"], 2))


@app.command()
def show(
    run: RunArgument,
    tenant: TenantOption,
    failed: Annotated[bool, typer.Option("--failed", help="Only cases that did not pass.")] = False,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show a run and what became of each of its cases.

    Example:

      loraplex eval show evr_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f -t acme --failed
    """
    with open_admin(data_dir, control_url) as admin:
        path = f"{_tenant_path(admin, tenant)}/eval-runs/{run}"
        found = admin.call("GET", path)
        results = sorted(admin.pages(f"{path}/results"), key=lambda row: row["case_index"])
    if failed:
        results = [row for row in results if row["status"] != "pass"]
    if as_json:
        print_json({"run": found, "results": results})
        return
    _say(found)
    if results:
        print_rows([(row["status"], row["case_id"], row["reason"]) for row in results])


@app.command()
def cancel(
    run: RunArgument,
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """End a run; its results so far are kept.

    Example:

      loraplex eval cancel evr_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f -t acme
    """
    with open_admin(data_dir, control_url) as admin:
        admin.call("POST", f"{_tenant_path(admin, tenant)}/eval-runs/{run}/cancel")
    typer.echo(f"{run} ends")


@app.command()
def compare(
    first: RunArgument,
    second: RunArgument,
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show what differs between two runs of one suite: flips with both answers, p, log-probability.

    Example:

      loraplex eval compare evr_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f evr_0197c5d3b2c38d4e9f5a6b7c8d9e0f1a -t acme
    """
    with open_admin(data_dir, control_url) as admin:
        path = f"{_tenant_path(admin, tenant)}/eval-runs/{first}/compare"
        found = admin.call("GET", path, None, **{"with": second})
    if as_json:
        print_json(found)
        return
    typer.echo(
        f"{found['num_shared']} cases in both, {found['same_output']} with the same answer; "
        f"McNemar p = {found['mcnemar_p']:.4g}"
    )
    difference = found["logprob_difference"]
    if difference is not None:
        ends = (
            ""
            if difference["low"] is None
            else f" (95 %: {difference['low']:+.4f} to {difference['high']:+.4f})"
        )
        typer.echo(f"mean log-probability {difference['mean']:+.4f} nats a token{ends}")
    for label, name in (("no longer passes", "broken"), ("passes now", "mended")):
        for flip in found[name]:
            typer.echo(f"{flip['case_id']} {label}: {flip['second_reason']}")
            typer.echo(f"  first:  {flip['first_output']!r}")
            typer.echo(f"  second: {flip['second_output']!r}")


@app.command()
def series(
    suite: SuiteArgument,
    tenant: TenantOption,
    limit: Annotated[int, typer.Option(min=1, max=500, help="The newest so many runs.")] = 100,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show a suite's finished runs over time, oldest first.

    Example:

      loraplex eval series capitals -t acme --limit 20
    """
    with open_admin(data_dir, control_url) as admin:
        suite_id = _find_suite(admin, _suites_path(admin, tenant), suite)["id"]
        path = f"{_tenant_path(admin, tenant)}/eval-series"
        found = admin.call("GET", path, None, suite_id=suite_id, limit=str(limit))
    if as_json:
        print_json(found)
        return
    print_rows(
        [
            ("ENDED", "RUN", "VERSION", "REVISION", "STATE", "SCORE", "CASES"),
            *(_point_row(point) for point in found["data"]),
        ]
    )


@app.command("delete")
def delete_suite(
    suite: SuiteArgument,
    tenant: OwnerOption = None,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Delete a suite that no schedule and no rollout names; its runs stay.

    Example:

      loraplex eval delete capitals -t acme
    """
    with open_admin(data_dir, control_url) as admin:
        path = _suites_path(admin, tenant)
        found = _find_suite(admin, path, suite)
        admin.call("DELETE", f"{path}/{found['id']}")
    typer.echo(f"deleted {found['name']} ({found['id']})")


@app.command()
def record(
    file: Annotated[Path, typer.Argument(help="Where to write the trace (JSONL).")],
    tenant: TenantOption,
    minutes: Annotated[float, typer.Option(min=1, max=1440, help="The last so many.")] = 60,
    keep_models: Annotated[
        bool, typer.Option("--keep-models", help="Each asks its own deployment again.")
    ] = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Write a tenant's recent requests as a trace: when and how long, no text.

    `loraplex eval import NAME FILE --kind performance` makes a suite of it.

    Example:

      loraplex eval record trace.jsonl -t acme --minutes 30
    """
    import json

    now = int(time.time()) + 1
    with open_admin(data_dir, control_url) as admin:
        found = admin.call(
            "GET",
            f"{_tenant_path(admin, tenant)}/eval-trace",
            None,
            start_time=str(now - round(minutes * 60)),
            end_time=str(now),
            keep_models=str(keep_models).lower(),
        )
    if not found["lines"]:
        raise CommandError(f"{tenant} has no finished request of that time")
    text = "".join(json.dumps(line) + "\n" for line in found["lines"])
    file.write_text(text, encoding="utf-8")
    cut = " (there were more)" if found["is_cut"] else ""
    typer.echo(f"{file}: {len(found['lines'])} requests{cut}")


# ---------------------------------------------------------------------------- schedules


@schedule.command("create")
def create_schedule(
    name: Annotated[str, typer.Argument(help="For people.")],
    suite: SuiteArgument,
    tenant: TenantOption,
    deployment: DeploymentOption = None,
    revision: RevisionOption = None,
    baseline: BaselineOption = None,
    version: VersionOption = None,
    cron: Annotated[str | None, typer.Option(help='As "0 6 * * 1".')] = None,
    every_hours: Annotated[
        int | None, typer.Option(min=1, max=8784, help="Instead of --cron.")
    ] = None,
    zone: Annotated[
        str | None, typer.Option(show_default="the tenant's", help="As Europe/Berlin.")
    ] = None,
    concurrency: ConcurrencyOption = 4,
    case_timeout_s: CaseTimeoutOption = 60.0,
    timeout_s: RunTimeoutOption = 1800.0,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Run a suite by itself; an alert tells when the result of an unchanged revision changes.

    Example:

      loraplex eval schedule create nightly support -t acme -d support-bot --cron "0 6 * * *"
    """
    with open_admin(data_dir, control_url) as admin:
        path = _tenant_path(admin, tenant)
        body = _aim(admin, path, suite, version, deployment, revision, baseline)
        body |= _options(concurrency, case_timeout_s, timeout_s)
        body |= {"name": name, "cron": cron, "every_hours": every_hours, "zone": zone}
        made = admin.call("POST", f"{path}/eval-schedules", body)
    if as_json:
        print_json(made)
    else:
        print_rows([_schedule_row(made)])


@schedule.command()
def switch(
    schedule_id: ScheduleArgument,
    state: Annotated[Literal["on", "off"], typer.Argument(help="on or off.")],
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Switch a schedule on or off.

    Example:

      loraplex eval schedule switch evd_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f off -t acme
    """
    with open_admin(data_dir, control_url) as admin:
        path = f"{_tenant_path(admin, tenant)}/eval-schedules/{schedule_id}"
        admin.call("PATCH", path, {"is_enabled": state == "on"})
    typer.echo(f"{schedule_id} is {state}")


@schedule.command("delete")
def delete_schedule(
    schedule_id: ScheduleArgument,
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Delete a schedule; its runs stay.

    Example:

      loraplex eval schedule delete evd_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f -t acme
    """
    with open_admin(data_dir, control_url) as admin:
        admin.call("DELETE", f"{_tenant_path(admin, tenant)}/eval-schedules/{schedule_id}")
    typer.echo(f"deleted {schedule_id}")


# ---------------------------------------------------------------------------- insides


def _tenant_path(admin: AdminClient, tenant: str) -> str:
    return f"/tenants/{admin.tenant(tenant)['id']}"


def _suites_path(admin: AdminClient, tenant: str | None) -> str:
    return "/eval-suites" if tenant is None else f"{_tenant_path(admin, tenant)}/eval-suites"


def _find_suite(admin: AdminClient, path: str, suite: str) -> dict[str, Any]:
    found = [row for row in admin.pages(path) if suite in (row["id"], row["name"])]
    # A tenant's own suite before the platform's of the same name.
    found.sort(key=lambda row: row["owner"] == "platform")
    if not found:
        raise CommandError(f"there is no eval suite {suite}")
    return found[0]


def _aim(
    admin: AdminClient,
    path: str,
    suite: str,
    version: int | None,
    deployment: str | None,
    revision: str | None,
    baseline: str | None,
) -> dict[str, Any]:
    if (deployment is None) == (revision is None):
        raise CommandError("name what is asked: --deployment or --revision, one of them")
    return {
        "suite_id": _find_suite(admin, f"{path}/eval-suites", suite)["id"],
        "suite_version": version,
        "deployment": deployment,
        "revision_id": revision,
        "baseline_revision_id": baseline,
    }


def _options(concurrency: int, case_timeout_s: float, timeout_s: float) -> dict[str, Any]:
    return {
        "concurrency": concurrency,
        "case_timeout_s": case_timeout_s,
        "run_timeout_s": timeout_s,
    }


def _wait(admin: AdminClient, path: str, run: dict[str, Any]) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        row = progress.add_task("queued", total=run["num_cases"])
        while run["state"] in _ACTIVE:
            time.sleep(_POLL_S)
            run = admin.call("GET", path)
            progress.update(row, description=run["state"], completed=sum(run["counts"].values()))
    return run


def _say(run: dict[str, Any]) -> None:
    counts = ", ".join(f"{count} {status}" for status, count in sorted(run["counts"].items()))
    score = "" if run["score"] is None else f", score {run['score']:.4f}"
    typer.echo(f"{run['id']}  {run['suite']} version {run['suite_version']}: {run['state']}{score}")
    typer.echo(f"{counts or 'no case yet'} of {run['num_cases']} cases")
    if run["error"]:
        typer.echo(run["error"])
    for missed in run["summary"].get("missed", []):
        typer.echo(missed)
    figures = run["summary"].get("figures")
    if figures is not None:
        print_rows([(name, _figure(value)) for name, value in figures.items()])
    if run["has_mixed_engines"]:
        typer.echo(f"answered by {len(run['fingerprints'])} different engine builds")
    for change in run["summary"].get("changed", []):
        typer.echo(f"changed since the last run ({change['kind']}): {', '.join(change['cases'])}")


def _figure(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _suite_row(row: dict[str, Any]) -> tuple[object, ...]:
    return row["id"], row["name"], row["kind"], row["owner"], row["version"], row["num_cases"]


def _run_row(row: dict[str, Any]) -> tuple[object, ...]:
    score = None if row["score"] is None else f"{row['score']:.4f}"
    return row["id"], row["suite"], row["suite_version"], row["state"], score


def _point_row(point: dict[str, Any]) -> tuple[object, ...]:
    figures = point["figures"] or point["counts"]
    told = ", ".join(
        f"{name} {_figure(value) if isinstance(value, float) else value}"
        for name, value in figures.items()
        if value
    )
    score = None if point["score"] is None else f"{point['score']:.4f}"
    return (
        moment_of(point["ended_at"]),
        point["run_id"],
        point["suite_version"],
        point["revision_id"],
        point["state"],
        score,
        told or None,
    )


def _schedule_row(row: dict[str, Any]) -> tuple[object, ...]:
    from datetime import UTC, datetime

    rule = row["cron"] or f"every {row['every_hours']} h"
    due = f"{datetime.fromtimestamp(row['next_at'], UTC):%Y-%m-%d %H:%M} UTC"
    state = "on" if row["is_enabled"] else "off"
    return row["id"], row["name"], rule, row["zone"], state, due, row["last_error"]
