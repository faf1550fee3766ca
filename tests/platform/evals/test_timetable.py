from __future__ import annotations

from datetime import UTC, datetime

import pytest
from loraplex_platform.evals.timetable import TimetableError, check, next_after


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("after", "cron", "zone", "expected"),
    [
        ("2026-01-05T04:59", "0 6 * * 1", "Europe/Berlin", "2026-01-05T05:00"),
        ("2026-01-05T05:00", "0 6 * * 1", "Europe/Berlin", "2026-01-12T05:00"),
        ("2026-07-06T03:00", "0 6 * * 1", "Europe/Berlin", "2026-07-06T04:00"),
        # 02:30 does not exist on the day the clocks go forward: right after the gap.
        ("2026-03-29T00:00", "30 2 * * *", "Europe/Berlin", "2026-03-29T01:00"),
        # It exists twice on the day they go back: once.
        ("2026-10-25T00:00", "30 2 * * *", "Europe/Berlin", "2026-10-25T00:30"),
        ("2026-10-25T00:30", "30 2 * * *", "Europe/Berlin", "2026-10-26T01:30"),
        ("2026-01-01T00:00", "0 0 29 2 *", "UTC", "2028-02-29T00:00"),
    ],
)
def test_the_next_time_is_in_the_zone(after: str, cron: str, zone: str, expected: str) -> None:
    found = next_after(at(after), cron=cron, every_hours=None, zone=zone)

    assert found == at(expected)


def test_every_so_many_hours() -> None:
    found = next_after(at("2026-03-28T12:00"), cron=None, every_hours=24, zone="Europe/Berlin")

    assert found == at("2026-03-29T12:00")


@pytest.mark.parametrize(
    ("cron", "zone", "said"),
    [
        ("* * * * *", "UTC", "every 5 minutes"),
        ("0 6 31 2 *", "UTC", "no time matches"),
        ("0 6 * *", "UTC", "five fields"),
        ("0 6 * * * *", "UTC", "five fields"),
        ("61 6 * * *", "UTC", "no time matches"),
        ("0 6 * * 1", "Mars/Olympus", "zone"),
        ("0 6 * * 1", "../../etc/passwd", "zone"),
        ("0 6 * * 1", "", "zone"),
    ],
)
def test_what_is_no_time_is_refused(cron: str, zone: str, said: str) -> None:
    with pytest.raises(TimetableError, match=said):
        check(at("2026-01-01T00:00"), cron, zone)
