"""`loraplex bench`: what this machine does. Flags are those of the modules that measure."""

from __future__ import annotations

from typing import Any

import typer

from loraplex_platform.cli import process_commands
from loraplex_platform.cli.errors import CommandGroup

_OTHERS_FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True}


class BenchGroup(CommandGroup):
    """`loraplex bench --rounds 2` means `loraplex bench run --rounds 2`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer's click
        """Put `run` before flags that are not the group's own."""
        if not args or args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["run", *args]
        return list(super().parse_args(ctx, args))


app = typer.Typer(
    cls=BenchGroup,
    help="Measure this machine: throughput (`run`, which is also meant by flags alone), or a step's parts.",
)


@app.command(add_help_option=False, context_settings=_OTHERS_FLAGS)
def run(ctx: typer.Context) -> None:
    """Measure throughput beside other servers (from a clone of the repository).

    Example:

      loraplex bench run --workload mixed --rounds 1
    """
    process_commands.exec_bench(ctx.args)


@app.command(add_help_option=False, context_settings=_OTHERS_FLAGS)
def profile(ctx: typer.Context) -> None:
    """Show where a step's time goes, and how near each part is to what this machine can do.

    Example:

      loraplex bench profile
    """
    from loraplex_platform.profiling.command import run as run_profile

    raise typer.Exit(run_profile(ctx.args))
