"""Claims and limiters over a real Redis, for tests of rates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from loraplex_platform.ids import uuid7
from loraplex_platform.quotas.records import EffectiveLimits, RateLimit, RateMetric
from loraplex_platform.rates.admission import Admission, Claim, RateLimitedError
from loraplex_platform.rates.breaker import Breaker
from loraplex_platform.rates.limiter import RateLimiter
from loraplex_platform.rates.queries import Place
from loraplex_platform.rates.redis_client import DeadlineRedis, RedisMetrics
from prometheus_client import CollectorRegistry

ACME, GLOBEX = uuid7(), uuid7()
ACME_KEY = uuid7()


def limit(metric: RateMetric, value: int, **changes: Any) -> RateLimit:
    """Acme's own, of the whole tenant, unless told otherwise."""
    values: dict[str, Any] = {
        "limit_id": uuid7(),
        "scope_kind": "tenant",
        "scope_id": ACME,
        "owner_tenant_id": ACME,
        "metric": metric,
        "value": value,
        "burst": max(1, value),
    }
    return RateLimit(**values | changes)


def shared(metric: RateMetric, value: int, **changes: Any) -> RateLimit:
    """The platform's, for all tenants together."""
    return limit(
        metric, value, scope_kind="platform", scope_id=None, owner_tenant_id=None, **changes
    )


def claim(*limits: RateLimit, **changes: Any) -> Claim:
    """A request of acme's for 10 prompt tokens and at most 100 more."""
    values: dict[str, Any] = {
        "request_id": uuid7(),
        "tenant_id": ACME,
        "key_id": ACME_KEY,
        "key_version": 1,
        "tenant_version": 1,
        "limits": EffectiveLimits(version=1, rates=limits),
        "prompt_tokens": 10,
        "max_completion_tokens": 100,
    }
    return Claim(**values | changes)


async def never() -> Claim:
    """A reload that nobody should need."""
    raise AssertionError("looked up again")


@dataclass
class World:
    """Gateways over one Redis. `running` is what Postgres would say."""

    url: str
    deadline_s: float = 10.0  # what is tested is exactness, on a machine that may be busy
    running: list[Place] = field(default_factory=list)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    num_reads: int = 0
    _clients: list[DeadlineRedis] = field(default_factory=list)

    def client(self) -> DeadlineRedis:
        """A client of its own registry."""
        metrics = RedisMetrics(CollectorRegistry())
        client = DeadlineRedis(self.url, metrics, deadline_s=self.deadline_s, breaker=Breaker())
        self._clients.append(client)
        return client

    def gateway(self, **changes: Any) -> RateLimiter:
        """One more limiter."""

        async def running(owner: UUID | None) -> Sequence[Place]:
            self.num_reads += 1
            return self.running

        return RateLimiter(self.client(), running, CollectorRegistry(), **changes)

    async def close(self) -> None:
        """All clients."""
        for client in self._clients:
            await client.aclose()


async def admitted(gateways: Sequence[RateLimiter], claims: Sequence[Claim]) -> list[Admission]:
    """What passes when all ask at the same time, each at the next gateway."""

    async def ask(number: int, one: Claim) -> Admission | None:
        try:
            return await gateways[number % len(gateways)].admit(one, never)
        except RateLimitedError:
            return None

    results = await asyncio.gather(*(ask(i, one) for i, one in enumerate(claims)))
    return [result for result in results if result is not None]


async def eventually(
    condition: Callable[[], Awaitable[bool]], what: str, deadline_s: float = 30.0
) -> None:
    """Poll until true."""
    end_s = time.monotonic() + deadline_s
    while not await condition():
        assert time.monotonic() < end_s, f"never came: {what}"
        await asyncio.sleep(0.02)
