"""I6: what Redis counts as running does run.

A place is renewed by the gateway that runs the request and ends by itself when nobody does. One that is
still held long after its request was closed would be somebody's concurrency, lost for ever.
"""

from __future__ import annotations

import time
from typing import cast
from uuid import UUID

from pydantic import SecretStr
from redis import asyncio as redis_asyncio
from redis.exceptions import RedisError
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.ids import format_id, unix_s_of
from loraplex_platform.metering.invariants import MAX_OFFENDERS, Check, ExtraCheck
from loraplex_platform.rates.limiter import LEASE_S

NAME = "places_are_of_running_requests"
TITLE = "What counts as running in Redis is a request that runs"
DEADLINE_S = 10.0
# A place that nobody renews is gone by then.
SLACK_S = 3 * LEASE_S

_CLOSED = text("""
select id from requests
where id = any(cast(:ids as uuid[])) and state <> 'reserved'
    and settled_at < now() - make_interval(secs => :slack_s)
""")
_KNOWN = text("select id from requests where id = any(cast(:ids as uuid[]))")


def checks_of_redis(redis_url: SecretStr | None) -> list[ExtraCheck]:
    """For `check_invariants`; none without a Redis."""
    return [] if redis_url is None else [places_check(redis_url.get_secret_value())]


def places_check(redis_url: str) -> ExtraCheck:
    """The check over one Redis. When that does not answer there is nothing to compare, and it says so."""

    async def check(session: AsyncSession) -> Check:
        try:
            held = await _held(redis_url)
        except (RedisError, OSError, TimeoutError) as error:
            detail = f"not looked at: Redis does not answer ({type(error).__name__})"
            return Check(NAME, TITLE, ok=True, detail=detail, code="I6")
        ids = list(held)
        closed = (await session.scalars(_CLOSED, {"ids": ids, "slack_s": SLACK_S})).all()
        known = set((await session.scalars(_KNOWN, {"ids": ids})).all())
        # Admitted, and never reserved: held only for as long as its gateway asks Postgres.
        long_ago_s = time.time() - SLACK_S
        strangers = [id_ for id_ in ids if id_ not in known and unix_s_of(id_) < long_ago_s]
        offenders = [*closed, *strangers]
        return Check(
            NAME,
            TITLE,
            ok=not offenders,
            detail=f"{len(ids)} requests hold places"
            + (f", {len(offenders)} of them do not run" if offenders else ""),
            offenders=[format_id("request", id_) for id_ in offenders[:MAX_OFFENDERS]],
            code="I6",
        )

    return check


async def _held(redis_url: str) -> set[UUID]:
    """Requests with a place that has not ended."""
    client = redis_asyncio.Redis.from_url(
        redis_url, socket_timeout=DEADLINE_S, socket_connect_timeout=DEADLINE_S
    )
    held: set[UUID] = set()
    async with client:
        seconds, microseconds = await client.time()
        now_us = seconds * 1_000_000 + microseconds
        async for name in client.scan_iter("lpx:{*}:concurrency:*", count=1000):
            live = await client.zrangebyscore(name, f"({now_us}", "+inf")
            held.update(UUID(hex=member.decode()) for member in cast("list[bytes]", live))
    return held
