"""Redis paused, slow, killed, emptied, restored from an old copy: with the real server."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
import redis
from loraplex_platform.db.session import DatabaseUnavailableError
from loraplex_platform.local.embedded import start_redis
from loraplex_platform.rates.admission import RateLimitedError, RatesUnavailableError, TokenUse
from loraplex_platform.rates.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, MAX_PAUSE_S, Breaker
from loraplex_platform.rates.limiter import RateLimiter
from loraplex_platform.rates.queries import Place
from loraplex_platform.rates.redis_client import DEADLINE_S
from prometheus_client import CollectorRegistry

from tests.platform.rates.stand import (
    ACME,
    World,
    admitted,
    claim,
    eventually,
    limit,
    never,
    shared,
)
from tests.support.pausing import paused

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from uuid import UUID

    from loraplex_platform.local.server_process import EmbeddedServer

# Beside what Redis may take: the event loop and a busy machine.
SLACK_S = 0.5


async def timed(gateway: RateLimiter, *limits: object) -> tuple[float, bool]:
    """How long an admission took, and whether it was decided without Redis."""
    began_s = time.monotonic()
    passed = await gateway.admit(claim(*limits), never)  # type: ignore[arg-type]
    return time.monotonic() - began_s, passed.is_degraded


async def is_back(gateway: RateLimiter) -> bool:
    return not (await timed(gateway))[1]


async def test_nobody_waits_for_a_paused_redis(own_redis: EmbeddedServer, own_world: World) -> None:
    gateway = own_world.gateway()
    assert not (await timed(gateway))[1]

    with paused(own_redis.pid):
        first = await asyncio.gather(*(timed(gateway, limit("rpm", 10**6)) for _ in range(50)))
        later = [await timed(gateway, limit("rpm", 10**6)) for _ in range(20)]

    assert max(elapsed_s for elapsed_s, _ in first) < DEADLINE_S + SLACK_S
    assert all(is_degraded for _, is_degraded in [*first, *later])
    # Held back by the breaker; one of them may have had its turn to try.
    assert sorted(elapsed_s for elapsed_s, _ in later)[-2] < DEADLINE_S / 2
    await eventually(lambda: is_back(gateway), "redis")


async def test_a_slow_redis_is_as_good_as_none(own_redis: EmbeddedServer, own_world: World) -> None:
    gateway = own_world.gateway()
    await timed(gateway)
    with redis.Redis.from_url(own_redis.url) as busy:
        sleeping = threading.Thread(target=lambda: busy.execute_command("DEBUG", "SLEEP", 2))
        sleeping.start()
        await asyncio.sleep(0.1)

        elapsed_s, is_degraded = await timed(gateway)

        sleeping.join()
    assert is_degraded
    assert elapsed_s < DEADLINE_S + SLACK_S
    await eventually(lambda: is_back(gateway), "redis")


async def test_answers_that_come_late_are_nobodys(
    own_redis: EmbeddedServer, own_world: World
) -> None:
    gateway = own_world.gateway()
    one = limit("concurrency", 10**6)
    await gateway.admit(claim(one), never)
    for _ in range(3):
        with paused(own_redis.pid):
            await asyncio.gather(*(gateway.admit(claim(one), never) for _ in range(8)))
        # The client checks by the id in each answer that it is the answer to its question.
        await eventually(lambda: is_back(gateway), "redis")
        assert len(await admitted([gateway], [claim(one) for _ in range(64)])) == 64


async def test_alone_each_gateway_enforces_its_part(
    own_redis: EmbeddedServer, own_world: World
) -> None:
    gateways = [own_world.gateway() for _ in range(3)]
    for gateway in gateways:
        gateway.num_gateways = 3
    limits = (limit("rpm", 1, burst=30), limit("concurrency", 12), limit("tpm_out", 1, burst=10**6))
    own_redis.stop()

    passed = await admitted(gateways, [claim(*limits) for _ in range(90)])
    assert len(passed) == 12
    for number, one in enumerate(passed):
        await gateways[number % 3].release(one, TokenUse(10, 100))
    again = await admitted(gateways, [claim(*limits) for _ in range(90)])

    assert len(again) == 12
    assert all(one.headers["x-loraplex-rate-limits"] == "degraded" for one in again)
    with pytest.raises(RateLimitedError) as refusal:
        await gateways[0].admit(claim(*limits), never)
    assert refusal.value.headers["x-loraplex-rate-limits"] == "degraded"


async def test_places_of_requests_that_run_count_when_redis_goes(
    own_redis: EmbeddedServer, own_world: World
) -> None:
    gateway = own_world.gateway()
    one = limit("concurrency", 2)
    first = await gateway.admit(claim(one), never)
    await gateway.admit(claim(one), never)
    own_redis.stop()

    with pytest.raises(RateLimitedError):
        await gateway.admit(claim(one), never)
    await gateway.release(first, None)
    await gateway.admit(claim(one), never)


async def test_limits_fail_as_they_are_told_to(own_redis: EmbeddedServer, own_world: World) -> None:
    gateway = own_world.gateway()
    own_redis.stop()

    open_ = await gateway.admit(claim(limit("rpm", 0, fail_mode="open")), never)
    with pytest.raises(RatesUnavailableError) as refusal:
        await gateway.admit(claim(limit("rpm", 100, fail_mode="closed")), never)
    with pytest.raises(RateLimitedError):
        await gateway.admit(claim(limit("rpm", 0, fail_mode="local")), never)

    assert open_.is_degraded
    assert (refusal.value.status, refusal.value.error_code) == (503, "rate_limits_unavailable")
    assert "Retry-After" in refusal.value.headers


async def test_without_any_redis_limits_hold_locally() -> None:
    async def running(owner: UUID | None) -> Sequence[Place]:
        raise AssertionError("asked")

    gateway = RateLimiter(None, running, CollectorRegistry())
    one = limit("rpm", 1, burst=3)

    assert len(await admitted([gateway], [claim(one) for _ in range(9)])) == 3
    assert await gateway.look(claim(one)) == ("AWAY", [])


# ---------------------------------------------------------------------------- rebuilt


def places(*ids: UUID) -> list[Place]:
    return [Place(id_, "tenant", ACME) for id_ in ids]


async def test_an_emptied_redis_is_filled_from_what_runs(world: World) -> None:
    gateways = [world.gateway(), world.gateway()]
    one = limit("concurrency", 3)
    running = await admitted(gateways, [claim(one) for _ in range(3)])
    world.running = places(*(each.claim.request_id for each in running))
    before = world.num_reads

    with redis.Redis.from_url(world.url) as client:
        client.flushall()

    assert await admitted(gateways, [claim(one) for _ in range(30)]) == []
    assert world.num_reads == before + 1, "by one of them, once"
    await gateways[0].release(running[0], TokenUse(1, 1))
    assert len(await admitted(gateways, [claim(one) for _ in range(30)])) == 1


async def test_shared_gauges_are_filled_too(world: World) -> None:
    gateway = world.gateway()
    common = shared("concurrency", 1)
    running = await gateway.admit(claim(common), never)
    world.running = [Place(running.claim.request_id, "platform", None)]

    with redis.Redis.from_url(world.url) as client:
        client.flushall()

    assert await admitted([gateway], [claim(common)]) == []


async def test_a_redis_that_was_restarted_is_noticed(
    own_redis: EmbeddedServer, own_world: World, short_tmp_path: Path
) -> None:
    gateway = own_world.gateway()
    one = limit("concurrency", 1)
    running = await gateway.admit(claim(one), never)
    own_world.running = places(running.claim.request_id)
    own_redis.stop()

    again = start_redis(short_tmp_path / "redis")
    try:
        await eventually(lambda: is_back(gateway), "redis")
        assert await admitted([gateway], [claim(one)]) == []
        assert own_world.num_reads >= 2
    finally:
        again.stop()


async def test_a_redis_restored_from_an_old_copy_is_not_believed(
    own_redis: EmbeddedServer, own_world: World, short_tmp_path: Path
) -> None:
    gateway = own_world.gateway()
    one = limit("concurrency", 2)
    await gateway.admit(claim(one), never)
    with redis.Redis.from_url(own_redis.url) as client:
        client.save()
    later = await gateway.admit(claim(one), never)
    own_world.running = places(later.claim.request_id)
    os.kill(own_redis.pid, signal.SIGKILL)
    own_redis.stop()

    again = start_redis(short_tmp_path / "redis")
    try:
        await eventually(lambda: is_back(gateway), "redis")
        with redis.Redis.from_url(again.url) as client:
            assert client.dbsize() > 0, "it was restored"
        # The one in the old copy and the one that came after it.
        assert await admitted([gateway], [claim(one)]) == []
    finally:
        again.stop()


async def test_while_postgres_is_away_too_an_empty_redis_is_as_good_as_none(world: World) -> None:
    async def running(owner: UUID | None) -> Sequence[Place]:
        raise DatabaseUnavailableError

    gateway = RateLimiter(world.client(), running, CollectorRegistry())

    began_s = time.monotonic()
    passed = await gateway.admit(claim(limit("rpm", 60)), never)

    assert passed.is_degraded
    assert time.monotonic() - began_s < DEADLINE_S + SLACK_S


# ---------------------------------------------------------------------------- the breaker


def test_the_breaker_opens_after_failures_and_tries_with_growing_pauses() -> None:
    now_s = 100.0
    breaker = Breaker(clock=lambda: now_s)
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.note_failure()
    assert breaker.allows()
    for _ in range(20):  # many were under way when it opened
        breaker.note_failure()
    assert breaker.is_open
    assert not breaker.allows()

    pauses = []
    for _ in range(8):
        began_s = now_s
        while not breaker.allows():
            now_s += 0.1
        pauses.append(now_s - began_s)
        assert not breaker.allows(), "one at a time"
        breaker.note_failure()

    assert pauses[0] == pytest.approx(FIRST_PAUSE_S, abs=0.11)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(MAX_PAUSE_S, abs=0.11)
    breaker.note_success()
    assert breaker.allows()
    assert not breaker.is_open


def test_a_success_in_between_starts_the_count_anew() -> None:
    breaker = Breaker()

    for _ in range(20):
        breaker.note_failure()
        breaker.note_success()

    assert not breaker.is_open
