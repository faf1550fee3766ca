"""What admission costs: `python -m bench.rates`.

CPU of this process (the gateway's part) and of Redis, and the time that a request waits, for an
admission and its release; and what remembering keys saves. With and without in turns, so that
whatever else the machine does meets both alike. Servers are embedded ones, on unix sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import psutil
import uvloop
from loraplex_platform.db import ApiKey, ApiKeySecret, Tenant, migrate
from loraplex_platform.db.session import SessionFactory, open_database
from loraplex_platform.ids import uuid7
from loraplex_platform.local.embedded import start_postgres, start_redis
from loraplex_platform.quotas.records import EffectiveLimits, RateLimit, RateMetric
from loraplex_platform.rates.admission import Claim, TokenUse
from loraplex_platform.rates.limiter import RateLimiter
from loraplex_platform.rates.queries import Place
from loraplex_platform.rates.redis_client import DeadlineRedis, RedisMetrics
from loraplex_platform.settings import DatabaseSettings
from loraplex_platform.tenancy import keys
from loraplex_platform.tenancy.authentication import Authenticated, authenticate
from loraplex_platform.tenancy.key_cache import KeyCache
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

PAIRS = 5
SIDE_BY_SIDE = 16
_PEPPER = SecretStr("pepper-for-benchmarks-0123456789abcdef")
_TENANT, _KEY = uuid7(), uuid7()

Work = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one request: CPU in microseconds, waiting in milliseconds."""

    gateway_us: float
    redis_us: float
    p50_ms: float
    p99_ms: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.rates", description=__doc__)
    parser.add_argument("--requests", type=int, default=3000, help="of each turn")
    count: int = parser.parse_args(arguments).requests
    with tempfile.TemporaryDirectory(prefix="lp-", ignore_cleanup_errors=True) as folder:
        redis = start_redis(Path(folder) / "redis")
        postgres = start_postgres(Path(folder) / "postgres", is_durable=False)
        try:
            migrate.upgrade(_settings(postgres.url))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_measure(redis.url, psutil.Process(redis.pid), postgres.url, count))
        finally:
            postgres.stop()
            redis.stop()
    return 0


def _settings(url: str) -> DatabaseSettings:
    return DatabaseSettings.model_validate({"database_url": url})


async def _measure(redis_url: str, server: psutil.Process, postgres_url: str, count: int) -> None:
    async def running(owner: UUID | None) -> Sequence[Place]:
        return []

    client = DeadlineRedis(redis_url, RedisMetrics(CollectorRegistry()), deadline_s=5.0)
    gateway = RateLimiter(client, running, CollectorRegistry())
    many: tuple[tuple[RateMetric, int], ...] = (
        *(("rpm", 10**9), ("tpm_total", 10**12), ("concurrency", 10**6)),
        *(("tpm_in", 10**12), ("tpm_out", 10**12)),
    )
    cases = {
        "versions alone": (),
        "3 limits": tuple(_limit(*one) for one in many[:3]),
        "5 limits, 1 shared": (*(_limit(*one) for one in many), _limit("rpm", 10**9, is_own=False)),
    }
    print(f"admission and release, {count} requests a turn, {PAIRS} turns, medians")
    print(f"{'':22}{'gateway us':>12}{'redis us':>10}{'p50 ms':>8}{'p99 ms':>8}")
    for name, limits in cases.items():
        await _print_pairs(name, _admission(gateway, limits), server, count)
    await client.aclose()
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(open_database(_settings(postgres_url)))
        secret = await _add_key(database.sessions)

        async def load(shown: str) -> Authenticated:
            return await authenticate(database.sessions, _PEPPER, shown)

        remembered = KeyCache(load, CollectorRegistry())
        read = KeyCache(load, CollectorRegistry(), ttl_s=0.0)
        print("\na key looked up")
        for name, cache in (("read each time", read), ("remembered", remembered)):

            async def look_up(cache: KeyCache = cache) -> None:
                await cache.find(secret, "127.0.0.1")

            await _print_pairs(name, look_up, server, count)


def _limit(metric: RateMetric, value: int, *, is_own: bool = True) -> RateLimit:
    return RateLimit(
        limit_id=uuid7(),
        scope_kind="tenant" if is_own else "platform",
        scope_id=_TENANT if is_own else None,
        owner_tenant_id=_TENANT if is_own else None,
        metric=metric,
        value=value,
        burst=value,
    )


def _admission(gateway: RateLimiter, limits: tuple[RateLimit, ...]) -> Work:
    effective = EffectiveLimits(version=1, rates=limits)

    async def reload() -> Claim:
        raise RuntimeError("nothing has changed")

    async def pass_through() -> None:
        claim = Claim(
            request_id=uuid7(),
            tenant_id=_TENANT,
            key_id=_KEY,
            key_version=1,
            tenant_version=1,
            limits=effective,
            prompt_tokens=100,
            max_completion_tokens=100,
        )
        admission = await gateway.admit(claim, reload)
        if admission.is_degraded:
            raise RuntimeError("Redis did not answer in time")
        await gateway.release(admission, TokenUse(100, 50))

    return pass_through


async def _print_pairs(name: str, work: Work, server: psutil.Process, count: int) -> None:
    async def nothing() -> None:
        await asyncio.sleep(0)

    await _turn(work, server, count // 10)
    costs = []
    for _ in range(PAIRS):
        without = await _turn(nothing, server, count)
        with_it = await _turn(work, server, count)
        costs.append(
            Cost(
                with_it.gateway_us - without.gateway_us,
                with_it.redis_us - without.redis_us,
                with_it.p50_ms,
                with_it.p99_ms,
            )
        )
    median = [statistics.median(getattr(cost, field) for cost in costs) for field in Cost.__slots__]
    print(f"{name:22}{median[0]:12.0f}{median[1]:10.0f}{median[2]:8.2f}{median[3]:8.2f}")


async def _turn(work: Work, server: psutil.Process, count: int) -> Cost:
    """`count` times, a few side by side as under load."""
    waits_s: list[float] = []

    async def one_after_another(number: int) -> None:
        for _ in range(number):
            began_s = time.perf_counter()
            await work()
            waits_s.append(time.perf_counter() - began_s)

    before, redis_before = time.process_time(), sum(server.cpu_times()[:2])
    await asyncio.gather(*(one_after_another(count // SIDE_BY_SIDE) for _ in range(SIDE_BY_SIDE)))
    gateway_s = time.process_time() - before
    redis_s = sum(server.cpu_times()[:2]) - redis_before
    done = len(waits_s)
    waits_s.sort()
    return Cost(
        1e6 * gateway_s / done,
        1e6 * redis_s / done,
        1e3 * waits_s[done // 2],
        1e3 * waits_s[done * 99 // 100],
    )


async def _add_key(sessions: SessionFactory) -> str:
    minted = keys.mint()
    async with sessions.begin() as session:
        session.add(Tenant(id=_TENANT, slug="bench", name="bench"))
        await session.flush()
        key = ApiKey(
            id=_KEY,
            tenant_id=_TENANT,
            name="bench",
            public_id=minted.public_id,
            last4=minted.last4,
        )
        session.add(key)
        await session.flush()
        mac = keys.mac(_PEPPER, minted.secret)
        session.add(ApiKeySecret(id=uuid7(), key_id=key.id, mac=mac))
    return minted.secret


if __name__ == "__main__":
    sys.exit(main())
