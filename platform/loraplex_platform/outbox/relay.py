"""Delivers outbox messages to the handlers of their topics, at least once.

No transaction is open while a handler works: a message is claimed for `claim_s`, handled, and then
marked. A relay that dies in between leaves it to the next one, so handlers must be idempotent by the
message's `dedupe_key`. A failure is tried again with growing waits; after `max_tries` the message is
dead: kept, counted in the metrics, delivered again only when somebody revives it.
Any number of relays may run; they skip what others hold.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import PlatformError
from loraplex_platform.outbox import queries
from loraplex_platform.outbox.queries import Message

log = structlog.get_logger(__name__)

KEEP_DONE = timedelta(days=1)
PURGE_BATCH = 10_000
_MAX_ERROR_CHARS = 500

Handler = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """Who gets the messages of a topic, and with how much patience.

    Attributes:
        handle: delivers one message; raising anything means that it was not delivered.
        interval_s: how often the worker looks for messages.
        claim_s: longer than a batch may take; until then nobody else delivers it.
        batch: how many are claimed at once; they are handled side by side.
        first_wait_s, max_wait_s: the wait after the first failure, doubled after each further one.
    """

    name: str
    handle: Handler
    interval_s: float = 1.0
    claim_s: float = 60.0
    batch: int = 50
    max_tries: int = 12
    first_wait_s: float = 1.0
    max_wait_s: float = 3600.0

    def wait_s(self, tries: int) -> float:
        """How long after so many tries; spread, so that what failed together does not return so."""
        longest = min(self.max_wait_s, self.first_wait_s * 2.0 ** min(tries - 1, 40))
        return longest * random.uniform(0.8, 1.2)  # noqa: S311 # not a secret


class OutboxMetrics:
    """What relays count; `note_backlog` fills the gauges."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.delivered = Counter(
            "loraplex:outbox_delivered", "Messages delivered.", ["topic"], registry=registry
        )
        self.failed = Counter(
            "loraplex:outbox_failures", "Deliveries that failed.", ["topic"], registry=registry
        )
        self.waiting = Gauge(
            "loraplex:outbox_waiting", "Messages to be delivered.", ["topic"], registry=registry
        )
        self.dead = Gauge(
            "loraplex:outbox_dead", "Messages that were given up.", ["topic"], registry=registry
        )
        self.oldest = Gauge(
            "loraplex:outbox_oldest_seconds",
            "Age of the oldest message to be delivered.",
            ["topic"],
            registry=registry,
        )


class Relay:
    """One topic's."""

    def __init__(
        self, sessions: SessionFactory, topic: Topic, metrics: OutboxMetrics | None = None
    ) -> None:
        self._sessions = sessions
        self._topic = topic
        self._metrics = metrics

    async def relay_once(self, left_at: datetime | None = None) -> int:
        """Deliver what is due, until nothing is; how many messages were delivered.

        Args:
            left_at: `now()` of the transaction whose messages alone are meant; None: everybody's.
        """
        num_delivered = 0
        while True:
            async with self._sessions.begin() as session:
                messages = await queries.claim(
                    session,
                    self._topic.name,
                    limit=self._topic.batch,
                    claim_s=self._topic.claim_s,
                    left_at=left_at,
                )
            if not messages:
                return num_delivered
            results = await asyncio.gather(*map(self._deliver, messages))
            num_delivered += sum(results)

    async def _deliver(self, message: Message) -> bool:
        topic = self._topic
        try:
            await topic.handle(message)
        except Exception as error:  # noqa: BLE001 # whatever it was, the message stays
            await self._put_off(message, error)
            return False
        async with self._sessions.begin() as session:
            await queries.finish(session, message)
        if self._metrics is not None:
            self._metrics.delivered.labels(topic.name).inc()
        return True

    async def _put_off(self, message: Message, error: Exception) -> None:
        topic = self._topic
        is_dead = message.tries >= topic.max_tries
        # Other exceptions may quote what they were given: only their kind is kept.
        reason = error.message if isinstance(error, PlatformError) else type(error).__name__
        async with self._sessions.begin() as session:
            await queries.put_off(
                session,
                message,
                reason[:_MAX_ERROR_CHARS],
                wait_s=topic.wait_s(message.tries),
                is_dead=is_dead,
            )
        level = log.error if is_dead else log.warning
        level(
            "outbox_given_up" if is_dead else "outbox_put_off",
            topic=topic.name,
            dedupe_key=message.dedupe_key,
            tries=message.tries,
            reason=reason[:_MAX_ERROR_CHARS],
        )
        if self._metrics is not None:
            self._metrics.failed.labels(topic.name).inc()


async def note_backlog(sessions: SessionFactory, metrics: OutboxMetrics, topics: list[str]) -> None:
    """Bring the gauges up to date, also those of topics that nobody handles."""
    async with sessions() as session:
        found = {entry.topic: entry for entry in await queries.backlog(session)}
    for name in {*topics, *found}:
        entry = found.get(name) or queries.Backlog(name, 0, 0, 0.0)
        metrics.waiting.labels(name).set(entry.waiting)
        metrics.dead.labels(name).set(entry.dead)
        metrics.oldest.labels(name).set(entry.oldest_s)


async def purge_done(sessions: SessionFactory) -> int:
    """Delete what was delivered more than a day ago; how many."""
    num_purged = 0
    while True:
        async with sessions.begin() as session:
            batch = await queries.purge(session, older_than=KEEP_DONE, limit=PURGE_BATCH)
        num_purged += batch
        if batch < PURGE_BATCH:
            return num_purged
