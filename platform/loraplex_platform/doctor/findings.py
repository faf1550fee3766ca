"""What a check finds, and the checks by name.

A check is an async function of a `Look`; it returns one `Finding` and raises `NotLookedAtError` where what it needs
is not there or not configured. A check that breaks is a failed one, and keeps no other from being made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeVar

from loraplex_engine.urls import without_secrets

if TYPE_CHECKING:
    from loraplex_platform.doctor.look import Look

# Of one check. Compiling the kernels on a busy machine, and trying the row rule of a large model, take longest.
CHECK_TIMEOUT_S: Final = 1200.0


class Status(StrEnum):
    """From good to bad; `skipped` says nothing."""

    SKIPPED = "skipped"
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class NotLookedAtError(Exception):
    """A check could not be made; the message says what it would need."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    status: Status
    found: str
    remedy: str | None = None  # a command, or what to set; None: nothing to do


def ok(found: str) -> Finding:
    """All is well."""
    return Finding(Status.OK, found)


def warn(found: str, remedy: str) -> Finding:
    """It works, but not as it should, or not for long."""
    return Finding(Status.WARN, found, remedy)


def fail(found: str, remedy: str) -> Finding:
    """Something that users need does not work."""
    return Finding(Status.FAIL, found, remedy)


@dataclass(frozen=True, slots=True)
class Check:
    """A question to the machine or the configuration."""

    name: str  # group.what
    title: str
    run: Callable[[Look], Awaitable[Finding]] = field(repr=False)

    @property
    def group(self) -> str:
        """The part before the dot."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Answer:
    """A check and what it found."""

    check: Check
    finding: Finding


Run = TypeVar("Run", bound=Callable[..., Awaitable[Finding]])


class Catalogue:
    """The checks of one module, in the order in which they are told."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def check(self, name: str, title: str) -> Callable[[Run], Run]:
        """Register a function as the check of this name."""

        def register(run: Run) -> Run:
            self.checks.append(Check(name, title, run))
            return run

        return register


class BadUrlError(NotLookedAtError):
    """A check could not be made since a URL cannot be read; the message has nothing of the URL."""


async def answer(check: Check, look: Look) -> Answer:
    """Make a check, whatever becomes of it. What a library said of an error is told without our secrets."""
    finding = await _finding(check, look)
    secrets = list(look.secrets())
    return Answer(
        check,
        Finding(
            finding.status,
            without_secrets(finding.found, secrets),
            finding.remedy and without_secrets(finding.remedy, secrets),
        ),
    )


async def _finding(check: Check, look: Look) -> Finding:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return await check.run(look)
    except NotLookedAtError as error:
        return Finding(Status.SKIPPED, str(error))
    except ModuleNotFoundError as error:
        # An engine's image has no client of Postgres, a gateway's no torch: each looks at its own.
        return Finding(
            Status.SKIPPED,
            f"{error.name} is not installed here: run doctor where gateway or control API are",
        )
    except Exception as error:  # noqa: BLE001 - one broken check must not hide what the others find
        return fail(
            f"the check itself failed: {type(error).__name__}: {error}",
            "run it alone with --only " + check.name + ", and report what it prints",
        )


def worst(answers: Sequence[Answer]) -> Status:
    """The verdict over all."""
    order = list(Status)
    return max((one.finding.status for one in answers), key=order.index, default=Status.SKIPPED)
