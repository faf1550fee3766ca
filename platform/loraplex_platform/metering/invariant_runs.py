"""Checks of the books that are kept: who ran one, when, over what, and what it found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import InvariantRun
from loraplex_platform.db.base import Json
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.ids import uuid7
from loraplex_platform.metering.invariants import (
    Check,
    ExtraCheck,
    Identity,
    InvariantReport,
    check_invariants,
)


async def check_and_keep(
    sessions: SessionFactory,
    checked_by: str,
    *,
    since: datetime | None = None,
    lease_grace_s: float = 5.0,
    is_serving: bool = True,
    extra: Sequence[ExtraCheck] = (),
) -> InvariantReport:
    """`check_invariants`, and its report kept for those who ask later.

    Args:
        checked_by: "worker", "reconcile", or a user's id.
    """
    began_s = time.monotonic()
    report = await check_invariants(
        sessions, since=since, lease_grace_s=lease_grace_s, is_serving=is_serving, extra=extra
    )
    run = InvariantRun(
        id=uuid7(),
        checked_at=report.checked_at,
        checked_by=checked_by,
        since=since,
        is_ok=report.ok,
        took_ms=round((time.monotonic() - began_s) * 1000),
        report=_to_json(report),
    )
    async with sessions.begin() as session:
        session.add(run)
    return report


async def find_last(session: AsyncSession) -> InvariantRun | None:
    """The newest kept check."""
    return await session.scalar(select(InvariantRun).order_by(InvariantRun.id.desc()).limit(1))


def report_of(run: InvariantRun) -> InvariantReport:
    """A kept report as it was."""
    return InvariantReport(
        checked_at=run.checked_at,
        identity=Identity(**run.report["identity"]),
        checks=[Check(**check) for check in run.report["checks"]],
    )


def _to_json(report: InvariantReport) -> Json:
    return {
        "identity": asdict(report.identity),
        "checks": [asdict(check) for check in report.checks],
    }
