"""The command tree: flags and help. What a command does is in the module that it imports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, Annotated, cast

import typer
from loraplex_engine.urls import redis_fault

from loraplex_platform.cli import (
    adapter_commands,
    alert_commands,
    audit_commands,
    backup_commands,
    bench_commands,
    billing_commands,
    deployment_commands,
    doctor_commands,
    eval_commands,
    fleet_commands,
    key_commands,
    limit_commands,
    member_commands,
    outbox_commands,
    plan_commands,
    playground_command,
    process_commands,
    reconcile_commands,
    report_commands,
    retention_commands,
    rollout_commands,
    secret_commands,
    tenant_commands,
    user_commands,
    webhook_commands,
)
from loraplex_platform.cli.errors import CommandGroup
from loraplex_platform.cli.options import (
    ControlUrlOption,
    DataDirOption,
    ToolFormat,
    open_admin,
    sound_url,
)
from loraplex_platform.cli.output import (
    JsonOption,
    SearchOption,
    moment_of,
    print_json,
    print_rows,
    searched,
)
from loraplex_platform.urls import postgres_fault

_LOCAL = "On this machine"
_PROCESSES = "Processes of a fleet"
_OPERATION = "Operation"

app = typer.Typer(
    name="loraplex",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Multi-LoRA serving: one base model, many tenants' adapters, exact bills.",
)
models = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Base models.")
app.add_typer(models, name="models")
app.add_typer(bench_commands.app, name="bench", rich_help_panel=_LOCAL)
app.add_typer(adapter_commands.app, name="adapters")
app.add_typer(deployment_commands.app, name="deployments")
app.add_typer(deployment_commands.aliases, name="aliases")
app.add_typer(deployment_commands.pins, name="pins")
app.add_typer(key_commands.app, name="keys")
app.add_typer(eval_commands.app, name="eval")
app.add_typer(rollout_commands.app, name="rollouts")
app.add_typer(tenant_commands.app, name="tenants")
app.add_typer(tenant_commands.projects, name="projects")
app.add_typer(member_commands.app, name="members")
app.add_typer(user_commands.app, name="users")
app.add_typer(limit_commands.app, name="limits")
app.command()(limit_commands.explain)
app.add_typer(billing_commands.prices, name="prices")
app.add_typer(billing_commands.credits, name="credits")
app.add_typer(billing_commands.invoices, name="invoices")
app.command()(playground_command.playground)
app.command()(report_commands.usage)
app.command()(report_commands.requests)
app.command(rich_help_panel=_OPERATION)(report_commands.overview)
app.command(rich_help_panel=_OPERATION)(fleet_commands.fleet)
app.command(rich_help_panel=_OPERATION)(alert_commands.alerts)
app.add_typer(audit_commands.app, name="audit", rich_help_panel=_OPERATION)
app.command(rich_help_panel=_OPERATION)(doctor_commands.doctor)
app.command(rich_help_panel=_OPERATION)(plan_commands.plan)
app.command(rich_help_panel=_OPERATION)(outbox_commands.outbox)
app.command(rich_help_panel=_OPERATION)(reconcile_commands.reconcile)
app.command(rich_help_panel=_OPERATION)(retention_commands.retention)
app.command(rich_help_panel=_OPERATION)(backup_commands.backup)
app.command(rich_help_panel=_OPERATION)(backup_commands.restore)
app.add_typer(secret_commands.app, name="secrets", rich_help_panel=_OPERATION)
app.add_typer(fleet_commands.builds, name="engine-builds", rich_help_panel=_OPERATION)
app.add_typer(fleet_commands.residency, name="residency", rich_help_panel=_OPERATION)
app.command(rich_help_panel=_OPERATION)(fleet_commands.drift)
app.add_typer(webhook_commands.app, name="webhooks", rich_help_panel=_OPERATION)


@app.command(rich_help_panel=_LOCAL)
def up(
    data_dir: DataDirOption = Path(".loraplex"),
    demo: Annotated[
        bool, typer.Option("--demo", help="Make two tenants with keys and three adapters.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="Where gateway, control API and console listen.")
    ] = "127.0.0.1",
    gateway_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the OpenAI API; 0: any free one.")
    ] = 8000,
    control_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the admin API; 0: any free one.")
    ] = 8001,
    console_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the console; 0: any free one.")
    ] = 8501,
    no_console: Annotated[bool, typer.Option("--no-console", help="Start no console.")] = False,
    model: Annotated[
        str, typer.Option(help="Base model: a name (pulled if needed) or a Hugging Face folder.")
    ] = "smollm2-135m",
    database_url: Annotated[
        str | None,
        typer.Option(
            envvar="LORAPLEX_DATABASE_URL",
            callback=sound_url(postgres_fault),
            show_default="an embedded Postgres",
            help="Postgres, through a login that may make tables and roles.",
        ),
    ] = None,
    serve_database_url: Annotated[
        str | None,
        typer.Option(
            envvar="LORAPLEX_SERVE_DATABASE_URL",
            callback=sound_url(postgres_fault),
            show_default="one made at the start",
            help="The same Postgres through the login of the serving processes, a member of the "
            "role loraplex_app and of no other.",
        ),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            envvar="LORAPLEX_REDIS_URL",
            callback=sound_url(redis_fault),
            show_default="an embedded Redis",
            help="Redis.",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the engine: auto, bfloat16 or float32.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the engine: auto, or on a GPU int8 or fp8, what keys and values are kept in."
        ),
    ] = None,
    max_loras: Annotated[
        int | None, typer.Option(min=1, help="Of the engine: most adapters in one step.")
    ] = None,
    max_lora_rank: Annotated[
        int | None, typer.Option(min=1, help="Of the engine: highest rank accepted.")
    ] = None,
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="Of the engine: CPU threads.")
    ] = None,
    tool_format: Annotated[
        ToolFormat | None,
        typer.Option(
            envvar="LORAPLEX_TOOL_FORMAT",
            show_default="auto: as its chat template says",
            help="Of the gateway: how the model writes tool calls.",
        ),
    ] = None,
    force_unsafe_demo: Annotated[
        bool,
        typer.Option("--force-unsafe-demo", help="Allow --demo on a --host that others reach."),
    ] = False,
) -> None:
    """Run everything on this machine, in the foreground; Ctrl-C drains and stops it.

    Starts Postgres and Redis (embedded, unless URLs are given), engine,
    gateway, control API, worker and console, and restarts what crashes.
    Data, secrets and logs lie in the data directory. Any other flag of the
    engine can be set as LORAPLEX_ENGINE_<FLAG>.

    Examples:

      loraplex up --demo

      loraplex up --gateway-port 0 --control-port 0 --no-console

      loraplex up --database-url postgresql://me@db/x --redis-url redis://r
    """
    from rich.console import Console

    from loraplex_platform.local.display import LastingOutput
    from loraplex_platform.local.up import UpOptions, run_up

    flags = {
        "--dtype": dtype,
        "--kv-cache-dtype": kv_cache_dtype,
        "--max-loras": max_loras,
        "--max-lora-rank": max_lora_rank,
        "--num-threads": num_threads,
    }
    options = UpOptions(
        data_dir=data_dir,
        host=host,
        gateway_port=gateway_port,
        control_port=control_port,
        console_port=None if no_console else console_port,
        model=model,
        database_url=database_url,
        serve_database_url=serve_database_url,
        redis_url=redis_url,
        demo=demo,
        force_unsafe_demo=force_unsafe_demo,
        engine_flags=tuple(
            part
            for flag, value in flags.items()
            if value is not None
            for part in (flag, str(value))
        ),
        tool_format=tool_format,
    )
    raise typer.Exit(
        run_up(options, Console(highlight=False, file=cast("IO[str]", LastingOutput(sys.stdout))))
    )


@app.command(rich_help_panel=_LOCAL)
def demo(
    data_dir: DataDirOption = Path(".loraplex"),
    max_tokens: Annotated[int, typer.Option(min=1, max=512, help="Per answer.")] = 48,
) -> None:
    """Show the running demo: adapters side by side in one batch, the speed-up, and the bill.

    Needs a running `loraplex up --demo`. Asks every model of both tenants
    and the base at once, streams the answers beside each other, compares
    the speed with one request at a time, and ends with what it cost.

    Example:

      loraplex demo --max-tokens 64
    """
    from rich.console import Console

    from loraplex_platform.cli.demo import run_demo

    raise typer.Exit(run_demo(data_dir, max_tokens, Console(highlight=False)))


@app.command(rich_help_panel=_LOCAL)
def verify(
    data_dir: DataDirOption = Path(".loraplex"),
    max_tokens: Annotated[int, typer.Option(min=1, max=256, help="Per answer.")] = 24,
) -> None:
    """Prove on the running demo that neighbours change nothing and that the bill adds up.

    Text and log-probabilities of greedy answers must be the same alone, in
    a crowd of 16 mixed requests, and again afterwards; then every token
    that the engine made must be accounted for. The exit code is 0 only if
    all lines are green.

    Example:

      loraplex verify && echo exact
    """
    from rich.console import Console

    from loraplex_platform.cli.verify import run_verify

    raise typer.Exit(run_verify(data_dir, max_tokens, Console(highlight=False)))


@models.command()
def pull(
    name: Annotated[str, typer.Argument(help="smollm2-135m, or a model of the Hugging Face hub.")],
) -> None:
    """Download a base model, check it and convert it into the cache, once.

    Example:

      loraplex models pull smollm2-135m
    """
    process_commands.exec_module("loraplex_engine.convert", ["pull", name])


@models.command("list")
def list_models(
    search: SearchOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """List the base models that control APIs have registered, newest first.

    Example:

      loraplex models list --search smollm
    """
    with open_admin(data_dir, control_url) as admin:
        found = list(admin.pages("/base-models", **searched(search)))
    if as_json:
        print_json(found)
        return
    rows = [(m["id"], m["name"], m["revision"][:19], moment_of(m["created_at"])) for m in found]
    print_rows([("ID", "NAME", "REVISION", "SINCE"), *rows])


app.command(
    rich_help_panel=_PROCESSES,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)(process_commands.engine)
app.command(rich_help_panel=_PROCESSES)(process_commands.gateway)
app.command(rich_help_panel=_PROCESSES)(process_commands.control)
app.command(rich_help_panel=_PROCESSES)(process_commands.worker)
app.command(rich_help_panel=_PROCESSES)(process_commands.console)
app.command(rich_help_panel=_PROCESSES)(process_commands.migrate)
