"""The commands that are processes of a fleet: `up`, compose and a cluster all run these.

Settings come from LORAPLEX_* variables; a flag wins over its variable. Each runs until SIGTERM or SIGINT,
drains, and returns an exit code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex_platform.cli.errors import CommandError

HostOption = Annotated[
    str | None, typer.Option(help="Where to listen.", show_default="LORAPLEX_..._HOST")
]
PortOption = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="0: any free one.", show_default="LORAPLEX_..._PORT"),
]
PortFileOption = Annotated[
    Path | None, typer.Option(help="Write the port there once it listens.", show_default=False)
]
ToolFormatOption = Annotated[
    str | None,
    typer.Option(
        help="How the model writes tool calls: auto, hermes, llama or mistral.",
        show_default="LORAPLEX_TOOL_FORMAT, or auto: as its chat template says",
    ),
]
LogLevelOption = Annotated[
    str | None,
    typer.Option(help="debug, info, warning or error.", show_default="LORAPLEX_LOG_LEVEL, or info"),
]
LogFormatOption = Annotated[
    str | None, typer.Option(help="json or console.", show_default="LORAPLEX_LOG_FORMAT, or json")
]


def engine(ctx: typer.Context) -> None:
    """Serve the base model and its adapters to gateways (`loraplex engine --help`: its flags).

    Example:

      loraplex engine --model-dir /models/llama --base-model llama --address ipc:///run/engine.sock --journal-dir /var/lib/journal
    """
    exec_module("loraplex_engine.server", ctx.args)


def gateway(
    host: HostOption = None,
    port: PortOption = None,
    port_file: PortFileOption = None,
    tool_format: ToolFormatOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """Serve the OpenAI-compatible API.

    Needs LORAPLEX_DATABASE_URL, LORAPLEX_REDIS_URL, LORAPLEX_MODEL_DIR,
    LORAPLEX_KEY_PEPPER and LORAPLEX_SALT_KEY.

    Example:

      loraplex gateway --port 8000
    """
    from loraplex_platform.gateway.main import run
    from loraplex_platform.logs import configure_logging
    from loraplex_platform.settings import GatewaySettings

    settings = GatewaySettings(
        **_given(
            gateway_host=host,
            gateway_port=port,
            tool_format=tool_format,
            log_level=log_level,
            log_format=log_format,
        )
    )
    configure_logging(settings.log_level, settings.log_format)
    raise typer.Exit(run(settings, port_file=port_file))


def control(
    host: HostOption = None,
    port: PortOption = None,
    port_file: PortFileOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """Serve the admin API.

    Needs what the gateway needs, and LORAPLEX_SESSION_KEY,
    LORAPLEX_ADMIN_KEY and LORAPLEX_STORE_URL.

    Example:

      loraplex control --port 8001
    """
    from loraplex_platform.control.main import run
    from loraplex_platform.logs import configure_logging
    from loraplex_platform.settings import ControlSettings

    settings = ControlSettings(
        **_given(control_host=host, control_port=port, log_level=log_level, log_format=log_format)
    )
    configure_logging(settings.log_level, settings.log_format)
    raise typer.Exit(run(settings, port_file=port_file))


def worker(
    host: HostOption = None,
    port: PortOption = None,
    port_file: PortFileOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """Settle what dead gateways left, pull the engines' journals, mirror the registry.

    Needs LORAPLEX_DATABASE_URL and LORAPLEX_REDIS_URL.

    Example:

      loraplex worker
    """
    from loraplex_platform.settings import WorkerSettings
    from loraplex_platform.worker.main import run

    settings = WorkerSettings(
        **_given(worker_host=host, worker_port=port, log_level=log_level, log_format=log_format)
    )
    raise typer.Exit(run(settings, port_file=port_file))


def console(host: HostOption = None, port: PortOption = None) -> None:
    """Serve the admin console (Streamlit).

    Needs LORAPLEX_CONTROL_URL.

    Example:

      loraplex console --port 8501
    """
    from loraplex_platform.settings import ConsoleSettings

    settings = ConsoleSettings(**_given(console_host=host, console_port=port))
    spec = find_spec("loraplex_admin")
    if spec is None or not spec.submodule_search_locations:
        raise CommandError("the console is not installed: pip install 'loraplex[admin]'")
    # How it looks and behaves is in the `.streamlit` folder beside it.
    app_file = Path(spec.submodule_search_locations[0]) / "app.py"
    os.environ["LORAPLEX_CONTROL_URL"] = settings.control_url
    exec_module(
        "streamlit",
        [
            "run",
            str(app_file),
            f"--server.address={settings.console_host}",
            f"--server.port={settings.console_port}",
        ],
    )


def migrate() -> None:
    """Bring the database schema up to date; safe to run from several places at once.

    Needs LORAPLEX_DATABASE_URL, of a role that owns the database. With
    LORAPLEX_SERVE_ROLE it also makes the login of the serving processes, with
    LORAPLEX_SERVE_PASSWORD: their LORAPLEX_DATABASE_URL should name that one,
    so that none of them can change the books.

    Example:

      loraplex migrate
    """
    from loraplex_platform.db.migrate import ensure_serving_role, upgrade
    from loraplex_platform.settings import MigrationSettings

    settings = MigrationSettings()  # type: ignore[call-arg] # filled from the environment
    revision = upgrade(settings)
    ensure_serving_role(settings)
    typer.echo(f"The schema is at revision {revision}.")


def exec_bench(arguments: Sequence[str]) -> None:
    """Become the benchmark, which lives in the repository and is not installed."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "bench" / "run.py").is_file():
        raise CommandError("bench needs a clone of the repository: run `make bench` there")
    os.chdir(root)
    exec_module("bench.run", arguments)


def exec_module(module: str, arguments: Sequence[str]) -> None:
    """Become `python -m module`: same pid, so whoever supervises us supervises it."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606 - the purpose


def _given(**settings: Any) -> dict[str, Any]:  # noqa: ANN401 - flags of several types
    """Only what was given: the rest comes from the environment."""
    return {name: value for name, value in settings.items() if value is not None}
