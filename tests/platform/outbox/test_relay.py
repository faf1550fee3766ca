from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from loraplex_platform.errors import UnavailableError
from loraplex_platform.outbox import queries, relay, service
from loraplex_platform.outbox.queries import Message
from loraplex_platform.outbox.relay import OutboxMetrics, Relay, Topic
from prometheus_client import CollectorRegistry
from sqlalchemy import text

from tests.support.metering import run_sql

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from loraplex_platform.db.session import Database


class Inbox:
    """A handler that notes what it gets, and fails as often as told."""

    def __init__(self, *failures: Exception) -> None:
        self.got: list[str] = []
        self.failures = list(failures)

    async def __call__(self, message: Message) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.got.append(message.dedupe_key)


def topic(handle: Callable[[Message], Awaitable[None]], **changes: Any) -> Topic:
    return Topic(name="news", handle=handle, first_wait_s=0.0, **changes)


async def leave(db: Database, *keys: str, topic: str = "news") -> list[bool]:
    async with db.transaction() as session:
        return [await service.enqueue(session, topic, key, {"n": 1}) for key in keys]


async def column(db: Database, statement: str) -> list[Any]:
    async with db.sessions() as session:
        return list((await session.scalars(text(statement))).all())


async def test_each_message_is_delivered_once_and_its_name_is_taken(db: Database) -> None:
    inbox = Inbox()

    first = await leave(db, "a", "b")
    again = await leave(db, "a", "c")
    await leave(db, "other", topic="else")
    delivered = await Relay(db.sessions, topic(inbox)).relay_once()
    later = await Relay(db.sessions, topic(inbox)).relay_once()

    assert (first, again) == ([True, True], [False, True])
    assert (delivered, later) == (3, 0)
    assert sorted(inbox.got) == ["a", "b", "c"]


async def test_what_is_rolled_back_is_never_told(db: Database) -> None:
    inbox = Inbox()

    async with db.sessions() as session:
        await service.enqueue(session, "news", "a", {})
        await session.rollback()

    assert await Relay(db.sessions, topic(inbox)).relay_once() == 0


async def test_relays_side_by_side_deliver_everything_once(db: Database) -> None:
    inbox = Inbox()
    await leave(db, *[f"m{i}" for i in range(300)])

    await asyncio.gather(
        *(Relay(db.sessions, topic(inbox, batch=7)).relay_once() for _ in range(5))
    )

    assert sorted(inbox.got) == sorted(f"m{i}" for i in range(300))


async def test_a_slow_transaction_is_not_passed_by(db: Database) -> None:
    inbox = Inbox()
    async with db.sessions.begin() as slow:
        await service.enqueue(slow, "news", "slow", {})
        await leave(db, "fast")
        await Relay(db.sessions, topic(inbox)).relay_once()

    await Relay(db.sessions, topic(inbox)).relay_once()

    assert inbox.got == ["fast", "slow"]


async def test_a_failure_is_tried_again_and_given_up_in_the_end(db: Database) -> None:
    registry = CollectorRegistry()
    metrics = OutboxMetrics(registry)
    inbox = Inbox(*[UnavailableError("down")] * 3)
    patient = Relay(db.sessions, topic(inbox, max_tries=3), metrics)
    await leave(db, "a")

    assert await patient.relay_once() == 0

    async with db.sessions() as session:
        (entry,) = await queries.backlog(session)
    assert (entry.topic, entry.waiting, entry.dead) == ("news", 0, 1)
    await relay.note_backlog(db.sessions, metrics, ["news", "quiet"])
    assert registry.get_sample_value("loraplex:outbox_dead", {"topic": "news"}) == 1
    assert registry.get_sample_value("loraplex:outbox_waiting", {"topic": "quiet"}) == 0
    assert registry.get_sample_value("loraplex:outbox_failures_total", {"topic": "news"}) == 3
    async with db.transaction() as session:
        assert await queries.revive(session, "news") == 1
    assert await patient.relay_once() == 1
    assert inbox.got == ["a"]


async def test_an_error_is_kept_without_what_it_may_quote(db: Database) -> None:
    await leave(db, "a")
    handle = Inbox(ValueError("the secret is 42"))

    await Relay(db.sessions, topic(handle, max_tries=1)).relay_once()

    assert await column(db, "select error from outbox") == ["ValueError"]


async def test_a_relay_that_dies_leaves_its_messages_to_the_next(db: Database) -> None:
    await leave(db, "a")
    async with db.transaction() as session:
        (claimed,) = await queries.claim(session, "news", limit=9, claim_s=60)
    inbox = Inbox()

    assert await Relay(db.sessions, topic(inbox)).relay_once() == 0
    await run_sql(db, "update outbox set next_at = now()")
    assert await Relay(db.sessions, topic(inbox)).relay_once() == 1

    assert (claimed.dedupe_key, inbox.got) == ("a", ["a"])


async def test_waits_grow_up_to_a_bound(db: Database) -> None:
    slow = Topic(name="x", handle=Inbox(), first_wait_s=1.0, max_wait_s=60.0)

    assert 0.8 <= slow.wait_s(1) <= 1.2
    assert 3.2 <= slow.wait_s(3) <= 4.8
    assert 48 <= slow.wait_s(1000) <= 72


async def test_done_messages_go_after_a_day_and_dead_ones_stay(db: Database) -> None:
    await leave(db, "old", "new", "dead", "open")
    await run_sql(
        db,
        "update outbox set done_at = case dedupe_key"
        " when 'old' then now() - interval '25 hours' when 'new' then now() end,"
        " dead_at = case dedupe_key when 'dead' then now() - interval '9 days' end",
    )

    assert await relay.purge_done(db.sessions) == 1

    assert await column(db, "select dedupe_key from outbox order by id") == ["new", "dead", "open"]
