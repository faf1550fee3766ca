"""All checks, made in order; the report for people and for programs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from loraplex_platform.doctor import books, credentials, database, fleet, machine, stores
from loraplex_platform.doctor.findings import Answer, Check, Status, answer, worst
from loraplex_platform.doctor.look import Look


def all_checks() -> list[Check]:
    """In the order in which they are told: what others hang on comes first."""
    modules = (machine, stores, credentials, database, fleet, books)
    return [check for module in modules for check in module.catalogue.checks]


def choose(names: Sequence[str]) -> list[Check]:
    """Checks by name or by group; all if none is named.

    Raises:
        ValueError: a name is neither; the message lists those there are.
    """
    checks = all_checks()
    if not names:
        return checks
    known = {check.name for check in checks} | {check.group for check in checks}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"no check {', '.join(unknown)}: groups are"
            f" {', '.join(dict.fromkeys(check.group for check in checks))}; --list shows all checks"
        )
    return [check for check in checks if check.name in names or check.group in names]


async def examine(look: Look, checks: Sequence[Check]) -> list[Answer]:
    """Make the checks: those of the machine beside the others, which are made one after another.

    So that none waits for an answer while another one keeps this process busy, and is late by that.
    """
    _load_clients()
    tasks = {
        check.name: asyncio.create_task(answer(check, look))
        for check in checks
        if check.group == "machine"
    }
    others = {check.name: await answer(check, look) for check in checks if check.name not in tasks}
    return [
        await tasks[check.name] if check.name in tasks else others[check.name] for check in checks
    ]


def _load_clients() -> None:
    """What checks import takes a second or more on a busy machine: not while a server's answer is waited for."""
    for name in (
        "httpx",
        "psycopg",
        "redis.asyncio",
        "loraplex_platform.db.migrate",
        "loraplex_platform.db.session",
        "loraplex_platform.metering.invariant_runs",
        "loraplex_platform.outbox.queries",
    ):
        # What is not installed here is told by the check that needs it.
        with contextlib.suppress(ModuleNotFoundError):
            import_module(name)


def as_json(look: Look, answers: Sequence[Answer]) -> dict[str, Any]:
    """The report for programs."""
    return {
        "status": worst(answers).value,
        "looked_at": look.source,
        "counts": {
            status.value: sum(one.finding.status is status for one in answers) for status in Status
        },
        "checks": [
            {
                "name": one.check.name,
                "title": one.check.title,
                "status": one.finding.status.value,
                "found": one.finding.found,
                "remedy": one.finding.remedy,
            }
            for one in answers
        ],
    }
