"""Histories of deployments, and what they come to by arithmetic of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from itertools import pairwise
from uuid import UUID
from zoneinfo import ZoneInfo

import psycopg

from tests.support.metering import Customer

# Key: version, book, day. Value: whole seconds and pico-USD.
Booked = dict[tuple[UUID, UUID, date], tuple[int, int]]


@dataclass(frozen=True)
class Event:
    """From `at` on a deployment points at a version; None: at no adapter."""

    at: datetime
    deployment_id: UUID
    version_id: UUID | None


@dataclass(frozen=True)
class Book:
    """When a price book is in force, and its pico-USD an hour; None: it has no price."""

    book_id: UUID
    begins: datetime
    ends: datetime | None
    price: int | None


def midnight(day: date, zone: str) -> datetime:
    """The first moment of a day, in UTC."""
    return datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(zone)).astimezone(UTC)


def recompute(
    events: Sequence[Event], zone: str, days: Sequence[date], books: Sequence[Book]
) -> Booked:
    """By sweeping over all moments at which anything changes."""
    found: defaultdict[tuple[UUID, UUID, date], timedelta] = defaultdict(timedelta)
    for day in days:
        first_at, end_at = midnight(day, zone), midnight(day + timedelta(days=1), zone)
        cuts = {first_at, end_at} | {event.at for event in events}
        cuts |= {time for book in books for time in (book.begins, book.ends) if time}
        moments = sorted(cut for cut in cuts if first_at <= cut <= end_at)
        for begins, ends in pairwise(moments):
            points_at: dict[UUID, UUID | None] = {}
            for event in sorted(events, key=lambda one: one.at):
                if event.at <= begins:
                    points_at[event.deployment_id] = event.version_id
            for version in {one for one in points_at.values() if one is not None}:
                for book in books:
                    if book.begins <= begins and (book.ends is None or ends <= book.ends):
                        found[version, book.book_id, day] += ends - begins
    prices = {book.book_id: book.price for book in books}
    booked: Booked = {}
    for key, length in found.items():
        price, seconds = prices[key[1]], length // timedelta(seconds=1)
        if price is not None and seconds:
            booked[key] = (seconds, round(Fraction(seconds * price, 3600)))  # half to even
    return booked


def set_history(url: str, customer: Customer, events: Sequence[Event]) -> None:
    """Of a tenant's deployments, instead of what the trigger has noted; only the owner can."""
    with psycopg.connect(url) as owner:
        owner.execute("delete from deployment_events where tenant_id = %s", [customer.tenant_id])
        for event in events:
            owner.execute(
                "insert into deployment_events (tenant_id, deployment_id, at, adapter_version_id)"
                " values (%s, %s, %s, %s)",
                [customer.tenant_id, event.deployment_id, event.at, event.version_id],
            )
