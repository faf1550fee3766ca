"""`loraplex doctor`: what is wrong here, and what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraplex_platform.cli.errors import EXIT_USAGE
from loraplex_platform.cli.options import DataDirOption
from loraplex_platform.cli.output import OneJsonOption

if TYPE_CHECKING:
    from loraplex_platform.doctor.findings import Answer, Check
    from loraplex_platform.doctor.look import Look

EXIT_SICK = 1


def doctor(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only this check or group of checks; may be given again."),
    ] = None,
    self_check: Annotated[
        bool,
        typer.Option(
            "--self-check", help="Also load the model here and try that neighbours change no bit."
        ),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings too.")] = False,
    list_checks: Annotated[bool, typer.Option("--list", help="Only name the checks.")] = False,
    as_json: OneJsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
) -> None:
    """Look for what is wrong with this machine or configuration, and say the remedy.

    Looks at what the LORAPLEX_* variables name, as a process of the fleet
    would get them; without LORAPLEX_DATABASE_URL, at the local fleet of
    --data-dir. Changes nothing, but that it compiles the native kernels into
    the cache. What cannot be looked at from here is told as skipped: an engine's
    machine is looked at there.

    Exit code 0: nothing failed; 1: a check failed (with --strict, or warned);
    2: wrong usage.

    Examples:

      loraplex doctor

      loraplex doctor --only database --only redis.reachable

      loraplex doctor --json | jq -r '.checks[] | select(.status == "fail").remedy'

      docker compose exec gateway loraplex doctor
    """
    import asyncio
    import json

    from loraplex_platform.doctor.findings import Status, worst
    from loraplex_platform.doctor.look import find_setup
    from loraplex_platform.doctor.run import as_json as report_json
    from loraplex_platform.doctor.run import choose
    from loraplex_platform.logs import configure_logging

    configure_logging("critical", "console")  # what goes wrong is a finding, told once
    try:
        checks = choose(only or [])
    except ValueError as error:
        typer.echo(f"{typer.style('Error', fg='red')}: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from None
    if list_checks:
        if as_json:
            named = [{"name": check.name, "title": check.title} for check in checks]
            typer.echo(json.dumps({"checks": named}, indent=2))
        else:
            width = max(len(check.name) for check in checks)
            for check in checks:
                typer.echo(f"{check.name.ljust(width)}  {check.title}")
        return
    look = find_setup(data_dir, with_model=self_check)
    answers = asyncio.run(_examine(look, checks, is_told=not as_json))
    if as_json:
        typer.echo(json.dumps(report_json(look, answers), indent=2, ensure_ascii=False))
    else:
        _print(look, answers)
    verdict = worst(answers)
    is_sick = verdict is Status.FAIL or (strict and verdict is Status.WARN)
    raise typer.Exit(EXIT_SICK if is_sick else 0)


async def _examine(look: Look, checks: list[Check], *, is_told: bool) -> list[Answer]:
    from rich.console import Console

    from loraplex_platform.doctor.run import examine

    console = Console(stderr=True)
    if not (is_told and console.is_terminal):
        return await examine(look, checks)
    with console.status("Looking (the first time, kernels are compiled) ..."):
        return await examine(look, checks)


def _print(look: Look, answers: list[Answer]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from loraplex_platform.doctor.findings import Status

    styles = {
        Status.OK: "green",
        Status.WARN: "yellow",
        Status.FAIL: "bold red",
        Status.SKIPPED: "dim",
    }
    console = Console(highlight=False, file=sys.stdout)
    console.print(Text(f"Looked at {look.source}."))
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    reasons: dict[str, list[str]] = {}
    for one in answers:
        finding = one.finding
        if finding.status is Status.SKIPPED:
            # Many for one reason, as a rule: it is told once.
            reasons.setdefault(finding.found, []).append(one.check.name)
            continue
        style = styles[finding.status]
        found = Text(finding.found)
        if finding.remedy is not None:
            found.append(f"\n-> {finding.remedy}", style="bold")
        table.add_row(Text(finding.status.value, style=style), Text(one.check.name), found)
    for reason, names in reasons.items():
        text = Text(", ".join(names), style="dim").append(f"\n{reason}")
        table.add_row(Text("skipped", style="dim"), Text(str(len(names)), style="dim"), text)
    console.print(table)
    counts = {status: sum(one.finding.status is status for one in answers) for status in Status}
    told = [f"{counts[status]} {status.value}" for status in (Status.FAIL, Status.WARN, Status.OK)]
    if counts[Status.SKIPPED]:
        told.append(f"{counts[Status.SKIPPED]} skipped")
    console.print(Text(", ".join(told) + "."))
