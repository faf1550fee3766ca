"""When a schedule is due: cron expressions in a zone (cronsim), or every so many hours.

Daylight saving is as Debian's cron has it: an hour that does not exist runs once, right after the gap; one
that is there twice runs once.
"""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

# A cron expression may name a day that is years away (29 February), but not one that never comes.
_LEAST = timedelta(minutes=5)


class TimetableError(ValueError):
    """The message says what is wrong and what to write instead."""


def next_after(
    after: datetime, *, cron: str | None, every_hours: int | None, zone: str
) -> datetime:
    """The next time, in UTC, strictly after `after`.

    Raises:
        TimetableError: not a cron expression or zone, or one that runs more often than every 5 minutes.
    """
    if every_hours is not None:
        return after.astimezone(UTC) + timedelta(hours=every_hours)
    return _upcoming(after, cron or "", zone)[0]


def check(now: datetime, cron: str, zone: str) -> None:
    """Raises `TimetableError` unless the expression can be a schedule."""
    times = _upcoming(now, cron, zone, count=12)
    if any(later - sooner < _LEAST for sooner, later in itertools.pairwise(times)):
        raise TimetableError("cron: at most every 5 minutes, for example */5 * * * *.")


def _upcoming(after: datetime, cron: str, zone: str, count: int = 1) -> list[datetime]:
    if len(cron.split()) != 5:
        raise TimetableError("cron: five fields, minute hour day month weekday, as 0 6 * * 1.")
    try:
        local = after.astimezone(ZoneInfo(zone))
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise TimetableError("zone: not a time zone's name, as Europe/Berlin or UTC.") from None
    try:
        times = CronSim(cron, local.replace(microsecond=0))
        return [next(times).astimezone(UTC) for _ in range(count)]
    except (CronSimError, StopIteration):
        raise TimetableError("cron: no time matches it; write it as 0 6 * * 1.") from None
