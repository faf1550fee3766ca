"""`loraplex rollouts`: a new revision on its way to answer everybody, watched, ended, undone.

Exit status of `watch`: 0 promoted, 3 aborted, 4 rolled back, 5 still under way after `--timeout-s`.
Of all commands: 1 an error, 2 a wrong flag.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from loraplex_platform.cli.errors import CommandError, CommandGroup
from loraplex_platform.cli.options import ControlUrlOption, DataDirOption, LimitOption, open_admin
from loraplex_platform.cli.output import JsonOption, moment_of, print_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from loraplex_platform.admin_client import AdminClient

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="A new revision on its way to answer everybody, step by step.",
)

PROMOTED, ABORTED, ROLLED_BACK, UNDER_WAY = 0, 3, 4, 5
_EXIT_OF = {"promoted": PROMOTED, "aborted": ABORTED, "rolled_back": ROLLED_BACK}
_ACTIVE = ("evaluating", "shadow", "canary")
_SHOWN_EVENTS = 8

OwnerOption = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        "-t",
        show_default="the platform's own deployments",
        help="Slug or id of the tenant whose deployment is meant.",
    ),
]
RolloutArgument = Annotated[str, typer.Argument(metavar="ROLLOUT", help="Its id, rol_...")]
ReasonOption = Annotated[str, typer.Option(help="Why, for the history.")]
CanaryOption = Annotated[
    str | None,
    typer.Option(show_default="the newest", help="Number or id of the revision to try."),
]
StableOption = Annotated[
    str | None,
    typer.Option(show_default="what answers now", help="Number or id of the one to keep."),
]
ShadowOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=100,
        show_default="10",
        help="Begin with this percentage of the requests in the shadow, also with --weights; 0: with no shadow step.",
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(show_default="1,5,25,50", help="Percentages of the subjects, comma-separated."),
]
HoldOption = Annotated[
    int | None,
    typer.Option(min=0, show_default="600", help="Seconds that each step lasts at least."),
]
StickyByOption = Annotated[
    Literal["tenant", "key", "user", "conversation"] | None,
    typer.Option(
        show_default="user",
        help="Who stays with one side. A request that names no user or conversation goes by its key. Under about 30 "
        "keys (or tenants) the gates cannot compare: then user or conversation.",
    ),
]
GateOption = Annotated[
    Path | None, typer.Option(help="JSON file with gates, as the API's `gate` takes them.")
]
OfflineOption = Annotated[
    str | None, typer.Option(help="Name or id of an eval suite that the canary must pass first.")
]
GoldenOption = Annotated[
    str | None, typer.Option(help="Name or id of a suite that is asked again and again.")
]
VersionOption = Annotated[
    int | None,
    typer.Option("--if-version", min=1, help="Only if it is at this version, as `show` says it."),
]


@app.command()
def create(
    deployment: Annotated[str, typer.Argument(help="The model id.")],
    tenant: OwnerOption = None,
    canary: CanaryOption = None,
    stable: StableOption = None,
    shadow: ShadowOption = None,
    weights: WeightsOption = None,
    hold_s: HoldOption = None,
    sticky_by: StickyByOption = None,
    approval: Annotated[
        bool, typer.Option("--approval", help="After the last step wait for `promote`.")
    ] = False,
    gate: GateOption = None,
    offline: OfflineOption = None,
    golden: GoldenOption = None,
    start_now: Annotated[bool, typer.Option("--start", help="Start it at once.")] = False,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Make a rollout of two revisions of one deployment: a draft, unless --start is given.

    Example:

      loraplex rollouts create capitals -t acme --canary 4 --weights 5,25 --start
    """
    with open_admin(data_dir, control_url) as admin:
        body: dict[str, Any] = {
            "deployment": deployment,
            "canary": canary,
            "stable": stable,
            "sticky_by": sticky_by,
            "promotion": "approval" if approval else "automatic",
            "gate": _gates(admin, tenant, _read_gate(gate), offline, golden),
        }
        if (shadow, weights, hold_s) != (None, None, None):
            from loraplex_platform.rollouts.schemas import default_steps

            steps = [step.model_dump() for step in default_steps()]
            body["steps"] = _steps(steps, shadow, weights, hold_s)
        # What is not given is the API's default.
        body = {name: value for name, value in body.items() if value is not None}
        path = _path(admin, tenant)
        made = admin.call("POST", path, body)
        if start_now:
            made = admin.call("POST", f"{path}/{made['id']}/start")
    _print(made, as_json=as_json)


@app.command()
def edit(
    rollout: RolloutArgument,
    tenant: OwnerOption = None,
    canary: Annotated[str | None, typer.Option(help="Number or id of the one to try.")] = None,
    stable: Annotated[str | None, typer.Option(help="Number or id of the one to keep.")] = None,
    shadow: Annotated[
        float | None,
        typer.Option(min=0, max=100, help="Percentage of the requests; 0: no shadow step."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Percentages of the subjects, comma-separated.")
    ] = None,
    hold_s: Annotated[
        int | None, typer.Option(min=0, help="Seconds that each step lasts at least.")
    ] = None,
    sticky_by: Annotated[
        Literal["tenant", "key", "user", "conversation"] | None,
        typer.Option(help="Who stays with one side."),
    ] = None,
    approval: Annotated[
        bool | None,
        typer.Option("--approval/--automatic", help="Whether it waits for `promote` at its end."),
    ] = None,
    gate: Annotated[
        Path | None, typer.Option(help="JSON file with all gates, in place of those there are.")
    ] = None,
    offline: OfflineOption = None,
    golden: GoldenOption = None,
    version: VersionOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Change a draft; what is not given stays.

    Example:

      loraplex rollouts edit rol_... -t acme --sticky-by conversation --weights 5,25
    """
    with open_admin(data_dir, control_url) as admin:
        path = f"{_path(admin, tenant)}/{rollout}"
        found, etag = admin.read(path)
        body: dict[str, Any] = {"canary": canary, "stable": stable, "sticky_by": sticky_by}
        if approval is not None:
            body["promotion"] = "approval" if approval else "automatic"
        if (gate, offline, golden) != (None, None, None):
            settings = found["gate"] if gate is None else _read_gate(gate)
            body["gate"] = _gates(admin, tenant, settings, offline, golden)
        if (shadow, weights, hold_s) != (None, None, None):
            body["steps"] = _steps(found["steps"], shadow, weights, hold_s)
        body = {name: value for name, value in body.items() if value is not None}
        if not body:
            raise CommandError("nothing is given to change")
        done = admin.change("PATCH", path, body, etag if version is None else f'"{version}"')
    _print(done, as_json=as_json)


@app.command("list")
def list_rollouts(
    tenant: OwnerOption = None,
    deployment: Annotated[
        str | None, typer.Option("--deployment", "-d", help="Only of it.")
    ] = None,
    state: Annotated[str | None, typer.Option(help="Only in this state.")] = None,
    limit: LimitOption = 20,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show rollouts, newest first.

    Example:

      loraplex rollouts list -t acme
    """
    from itertools import islice

    filters = {"deployment": deployment, "state": state}
    wanted = {name: value for name, value in filters.items() if value is not None}
    with open_admin(data_dir, control_url) as admin:
        found = list(islice(admin.pages(_path(admin, tenant), **wanted), limit))
    if as_json:
        print_json(found)
        return
    table = _table("id", "deployment", "from", "to", "state", "step", "changes", "made")
    for row in found:
        table.add_row(
            row["id"],
            row["deployment"],
            str(row["stable_number"]),
            str(row["canary_number"]),
            _state_of(row),
            _step_of(row),
            ", ".join(row["changes"]),
            moment_of(row["created_at"]),
        )
    _console().print(table)


@app.command()
def show(
    rollout: RolloutArgument,
    tenant: OwnerOption = None,
    step: Annotated[
        int | None,
        typer.Option(min=1, show_default="the current one", help="Another step's sides, from 1."),
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show a rollout and both sides of its step: shares, errors, latencies, and each gate in words.

    Example:

      loraplex rollouts show rol_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f -t acme
    """
    with open_admin(data_dir, control_url) as admin:
        path = f"{_path(admin, tenant)}/{rollout}"
        found = admin.call("GET", path)
        metrics = None
        if step is not None:
            metrics = admin.call("GET", f"{path}/metrics", step=str(step - 1))
        elif found["step"] is not None:
            metrics = admin.call("GET", f"{path}/metrics")
    if as_json:
        print_json({"rollout": found, "metrics": metrics})
        return
    _console().print(_view(found, metrics))


@app.command()
def events(
    rollout: RolloutArgument,
    tenant: OwnerOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show what happened to a rollout, oldest first.

    Example:

      loraplex rollouts events rol_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f -t acme
    """
    with open_admin(data_dir, control_url) as admin:
        found = list(admin.pages(f"{_path(admin, tenant)}/{rollout}/events"))
    if as_json:
        print_json(found)
        return
    _console().print(_event_table(found))


@app.command()
def watch(
    rollout: RolloutArgument,
    tenant: OwnerOption = None,
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    timeout_s: Annotated[
        float | None, typer.Option(min=0, help="Give up after so many seconds; exit status 5.")
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Watch a rollout until it has ended. Exit status: 0 promoted, 3 aborted, 4 rolled back, 5 time over.

    Ctrl-C leaves it going on. Without a terminal each event is one line; with --json they are JSON lines, and the
    rollout itself is the last of them.

    Example:

      loraplex rollouts watch rol_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f -t acme
    """
    import json

    from rich.live import Live

    console = _console(is_for_errors=as_json)
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    last = "0"
    told: list[dict[str, Any]] = []
    with (
        open_admin(data_dir, control_url) as admin,
        Live(console=console, auto_refresh=False, transient=True) as live,
    ):
        path = f"{_path(admin, tenant)}/{rollout}"
        while True:
            # The rollout before its events: what has ended then has told all of them.
            found = admin.call("GET", path)
            for event in admin.pages(f"{path}/events", after=last):
                last = event["id"]
                told.append(event)
                if as_json:
                    typer.echo(json.dumps(event, ensure_ascii=False))
                elif not console.is_terminal:
                    typer.echo(_line_of(event))
            is_over = found["state"] not in (*_ACTIVE, "draft")
            is_late = until_s is not None and time.monotonic() >= until_s
            if is_over or is_late:
                break
            if console.is_terminal and not as_json:
                live.update(_watched(found, told), refresh=True)
            time.sleep(every_s)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
    elif console.is_terminal:
        console.print(_watched(found, told))
    if not is_over:
        typer.echo(f"{rollout} is still {_state_of(found)}", err=True)
    raise typer.Exit(_EXIT_OF.get(found["state"], UNDER_WAY))


@app.command()
def start(
    rollout: RolloutArgument,
    tenant: OwnerOption = None,
    version: VersionOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Start a draft: its canary is judged and loaded, then its first step begins.

    Example:

      loraplex rollouts start rol_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f -t acme
    """
    _act("start", rollout, tenant, version, None, as_json, data_dir, control_url)


@app.command()
def pause(
    rollout: RolloutArgument,
    tenant: OwnerOption = None,
    version: VersionOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Let it go no step further; failing gates still abort it.

    Example:

      loraplex rollouts pause rol_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f -t acme
    """
    _act("pause", rollout, tenant, version, None, as_json, data_dir, control_url)


@app.command()
def resume(
    rollout: RolloutArgument,
    tenant: OwnerOption = None,
    version: VersionOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Let a paused rollout go on.

    Example:

      loraplex rollouts resume rol_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f -t acme
    """
    _act("resume", rollout, tenant, version, None, as_json, data_dir, control_url)


@app.command()
def promote(
    rollout: RolloutArgument,
    tenant: OwnerOption = None,
    reason: ReasonOption = "",
    version: VersionOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Have the canary answer everything now, whatever steps are left.

    Example:

      loraplex rollouts promote rol_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f -t acme
    """
    _act("promote", rollout, tenant, version, reason, as_json, data_dir, control_url)


@app.command()
def abort(
    rollout: RolloutArgument,
    tenant: OwnerOption = None,
    reason: ReasonOption = "",
    version: VersionOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Have the stable revision answer everything now.

    Example:

      loraplex rollouts abort rol_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f -t acme
    """
    _act("abort", rollout, tenant, version, reason, as_json, data_dir, control_url)


@app.command()
def rollback(
    rollout: RolloutArgument,
    tenant: OwnerOption = None,
    reason: ReasonOption = "",
    version: VersionOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Undo a deployment's last promotion: the stable revision answers again, whole.

    Example:

      loraplex rollouts rollback rol_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f -t acme
    """
    _act("rollback", rollout, tenant, version, reason, as_json, data_dir, control_url)


# ---------------------------------------------------------------------------- insides


def _act(
    verb: str,
    rollout: str,
    tenant: str | None,
    version: int | None,
    reason: str | None,
    as_json: bool,
    data_dir: Path,
    control_url: str | None,
) -> None:
    with open_admin(data_dir, control_url) as admin:
        path = f"{_path(admin, tenant)}/{rollout}/{verb}"
        body = {"reason": reason} if reason else None
        done = admin.change("POST", path, body, None if version is None else f'"{version}"')
    _print(done, as_json=as_json)


def _path(admin: AdminClient, tenant: str | None) -> str:
    return "/rollouts" if tenant is None else f"/tenants/{admin.tenant(tenant)['id']}/rollouts"


def _suite_id(admin: AdminClient, tenant: str | None, suite: str) -> str:
    path = (
        "/eval-suites" if tenant is None else f"/tenants/{admin.tenant(tenant)['id']}/eval-suites"
    )
    found = [row for row in admin.pages(path) if suite in (row["id"], row["name"])]
    # A tenant's own suite before the platform's of the same name.
    found.sort(key=lambda row: row["owner"] == "platform")
    if not found:
        raise CommandError(f"there is no eval suite {suite}")
    return str(found[0]["id"])


def _read_gate(file: Path | None) -> dict[str, Any]:
    import json

    if file is None:
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{file}: {error}") from None
    if not isinstance(found, dict):
        raise CommandError(f'{file}: it must hold a JSON object, as {{"alpha": 0.05}}')
    return found


def _gates(
    admin: AdminClient,
    tenant: str | None,
    settings: dict[str, Any],
    offline: str | None,
    golden: str | None,
) -> dict[str, Any]:
    for name, suite in (("offline", offline), ("golden", golden)):
        if suite is not None:
            suite_id = _suite_id(admin, tenant, suite)
            # Of another suite the version that was fixed says nothing.
            settings[name] = (settings.get(name) or {}) | {"suite_id": suite_id}
            settings[name].pop("suite_version", None)
    return settings


def _steps(
    steps: list[dict[str, Any]], shadow: float | None, weights: str | None, hold_s: int | None
) -> list[dict[str, Any]]:
    """The steps with what is given in their place."""
    hold = steps[0]["hold_s"] if hold_s is None else hold_s
    shadows = [step for step in steps if step["kind"] == "shadow"]
    canaries = [step for step in steps if step["kind"] == "canary"]
    if shadow is not None:
        one = {"kind": "shadow", "share_bp": round(shadow * 100), "hold_s": hold}
        shadows = [one] if shadow > 0 else []
    if weights is not None:
        canaries = [
            {"kind": "canary", "weight_bp": _weight_bp(part.strip()), "hold_s": hold}
            for part in weights.split(",")
        ]
    found = [*shadows, *canaries]
    return found if hold_s is None else [step | {"hold_s": hold_s} for step in found]


def _weight_bp(text: str) -> int:
    try:
        return round(float(text.removesuffix("%")) * 100)
    except (ValueError, OverflowError):
        raise CommandError(
            f"--weights: {text or 'nothing'} is no percentage: use for example 1,5,25,50"
        ) from None


def _print(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    typer.echo(
        f"{found['id']}  {found['deployment']} {found['stable_number']} -> {found['canary_number']}: "
        f"{_state_of(found)}"
    )
    for warning in found["warnings"]:
        typer.echo(f"warning: {warning}", err=True)


def _console(*, is_for_errors: bool = False) -> Console:
    from rich.console import Console

    return Console(highlight=False, stderr=is_for_errors)


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _state_of(row: dict[str, Any]) -> str:
    return f"{row['state'].replace('_', ' ')}{', paused' if row['is_paused'] else ''}"


def _step_of(row: dict[str, Any]) -> str:
    if row["step"] is None:
        return f"0 of {len(row['steps'])}"
    step = row["steps"][row["step"]]
    share = step["share_bp"] if step["kind"] == "shadow" else step["weight_bp"]
    return f"{row['step'] + 1} of {len(row['steps'])}: {step['kind']} {share / 100:g} %"


def _line_of(event: dict[str, Any]) -> str:
    return f"{moment_of(event['at'])}  {event['kind']}  {event['message']}"


def _event_table(found: list[dict[str, Any]]) -> Table:
    from rich.markup import escape

    table = _table("at", "what", "who", "")
    for event in found:
        table.add_row(
            moment_of(event["at"]), event["kind"], event["actor"], escape(event["message"])
        )
    return table


def _watched(found: dict[str, Any], told: list[dict[str, Any]]) -> RenderableType:
    from rich.console import Group

    return Group(_view(found, None), _event_table(told[-_SHOWN_EVENTS:]))


def _view(found: dict[str, Any], metrics: dict[str, Any] | None) -> RenderableType:
    """A rollout for people: where it is, both sides, the gates."""
    from rich.console import Group
    from rich.markup import escape

    verdict = found["verdict"] or {}
    metrics = metrics or (verdict if "stable" in verdict else None)
    lines = [
        f"[bold]{found['id']}[/]  {escape(found['deployment'])}: revision {found['stable_number']} ->"
        f" {found['canary_number']}, which changes {', '.join(found['changes']) or 'nothing'}",
        f"{_state_of(found)}, step {_step_of(found)}; version {found['version']}",
    ]
    lines += [f"[yellow]{escape(warning)}[/]" for warning in found["warnings"]]
    if found["end_reason"]:
        lines.append(escape(found["end_reason"]))
    elif verdict.get("waits_for"):
        lines.append(f"waits for: {escape(verdict['waits_for'])}")
    parts: list[RenderableType] = ["\n".join(lines)]
    if metrics is not None:
        sides = _table("", "stable", "canary")
        for label, field, form in _FIGURES:
            sides.add_row(
                label, *(_figure(metrics[side][field], form) for side in ("stable", "canary"))
            )
        parts.append(sides)
        if metrics["sample"]:
            parts.append(f"All of it {metrics['sample']}.")
        gates = _table("gate", "says", "")
        for gate in metrics["gates"]:
            colour = {"pass": "green", "fail": "red"}.get(gate["verdict"], "yellow")
            gates.add_row(gate["gate"], f"[{colour}]{gate['verdict']}[/]", escape(gate["summary"]))
        if metrics["gates"]:
            parts.append(gates)
    return Group(*parts)


_FIGURES = (
    ("subjects", "num_subjects", "d"),
    ("share of subjects", "subject_share", "%"),
    ("requests", "num_requests", "d"),
    ("share of requests", "request_share", "%"),
    ("tokens", "num_tokens", "d"),
    ("share of tokens", "token_share", "%"),
    ("errors", "error_rate", "%"),
    ("aborts", "abort_rate", "%"),
    ("first token p50, ms", "ttft_p50_ms", "g"),
    ("first token p95, ms", "ttft_p95_ms", "g"),
    ("between tokens p50, ms", "itl_p50_ms", "g"),
    ("between tokens p95, ms", "itl_p95_ms", "g"),
    ("tokens an answer", "mean_output_tokens", "g"),
    ("log-probability a token", "mean_logprob", "g"),
    ("answers scored", "num_scored", "d"),
)


def _figure(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    if form == "%":
        return f"{100 * value:.3g} %"
    return f"{value:d}" if isinstance(value, int) else f"{value:.4g}"
