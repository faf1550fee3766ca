"""Days and months of every time zone follow one another without gap or overlap, clock changes included."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from zoneinfo import available_timezones

import psycopg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

_ZONES = sorted(available_timezones() - {"Factory", "localtime"})
_MOMENTS = st.integers(86_400, 4_102_444_800).map(
    lambda unix_s: datetime.fromtimestamp(unix_s, UTC)
)


def _utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[misc] # a date's parts, and a time's


@pytest.fixture(scope="module")
def connection(postgres_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres_url, autocommit=True) as opened:
        opened.execute("set timezone to 'UTC'")
        yield opened


def period(
    connection: psycopg.Connection, kind: str, zone: str, at: datetime, window_s: int = 0
) -> tuple[datetime, datetime]:
    row = connection.execute(
        "select period_start, period_end from loraplex_period(%s, %s, %s, %s)",
        [kind, window_s, zone, at],
    ).fetchone()
    assert row is not None
    return row[0], row[1]


def local(connection: psycopg.Connection, zone: str, at: datetime) -> datetime:
    """By the server's own time zone data: what is tested is the rule, not the release of the data."""
    row = connection.execute("select %s::timestamptz at time zone %s", [at, zone]).fetchone()
    assert row is not None
    found: datetime = row[0]
    return found


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(["day", "month"]),
    zone=st.sampled_from(_ZONES),
    at=_MOMENTS,
)
@example("day", "America/Havana", _utc(2025, 11, 2, 4, 30))  # midnight comes twice: the first
@example("day", "America/Havana", _utc(2025, 11, 2, 5, 30))  # the second
@example("day", "America/St_Johns", _utc(2006, 10, 29, 2, 30, 30))  # a minute of the new day,
@example("day", "America/St_Johns", _utc(2006, 10, 29, 3, 0))  # then the old one again
@example("day", "America/Sao_Paulo", _utc(2018, 11, 4, 3, 0))  # midnight is skipped
@example("day", "Africa/Cairo", _utc(2024, 4, 25, 22, 0))
@example("day", "Pacific/Apia", _utc(2011, 12, 30, 10, 0))  # a day is skipped
@example("day", "Pacific/Kwajalein", _utc(1993, 8, 21, 12, 0))
@example("month", "Europe/Berlin", _utc(2025, 3, 30, 1, 0))
@example("month", "Asia/Beirut", _utc(2023, 3, 31, 22, 0))
def test_every_moment_is_in_one_period_that_begins_where_the_one_before_ends(
    connection: psycopg.Connection, kind: str, zone: str, at: datetime
) -> None:
    try:
        local(connection, zone, at)
    except psycopg.errors.InvalidParameterValue:
        return  # a zone that the server's data does not have

    start, end = period(connection, kind, zone, at)

    assert start <= at < end
    assert period(connection, kind, zone, start) == (start, end)
    assert period(connection, kind, zone, end - timedelta(microseconds=1)) == (start, end)
    assert period(connection, kind, zone, end)[0] == end
    assert period(connection, kind, zone, start - timedelta(microseconds=1))[1] == start
    first_day = local(connection, zone, start).date()
    assert local(connection, zone, start - timedelta(seconds=1)).date() < first_day
    next_day = local(connection, zone, end).date()
    if kind == "day":
        assert timedelta(hours=20) <= end - start <= timedelta(hours=49)
        assert next_day > first_day
    else:
        assert first_day.day == 1
        assert next_day == date(first_day.year + first_day.month // 12, first_day.month % 12 + 1, 1)


@settings(max_examples=100, deadline=None)
@given(
    at=_MOMENTS,
    hours=st.integers(1, 8784),
)
def test_buckets_of_a_rolling_period_are_its_24ths(
    connection: psycopg.Connection, at: datetime, hours: int
) -> None:
    start, end = period(connection, "rolling", "UTC", at, hours * 3600)

    assert start <= at < end
    assert (end - start) * 24 == timedelta(hours=hours)
    assert period(connection, "rolling", "UTC", end, hours * 3600)[0] == end


def test_a_day_with_a_clock_change_has_its_own_length(connection: psycopg.Connection) -> None:
    lengths = [
        end - start
        for start, end in (
            period(connection, "day", "Europe/Berlin", datetime(2025, month, day, 12, tzinfo=UTC))
            for month, day in ((3, 29), (3, 30), (10, 26))
        )
    ]

    assert lengths == [timedelta(hours=hours) for hours in (24, 23, 25)]
