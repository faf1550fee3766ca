from __future__ import annotations

import asyncio

from loraplex_platform.ids import uuid7
from loraplex_platform.quotas.records import EffectiveLimits, LimitScopes
from loraplex_platform.rates.limits_cache import TTL_S, LimitsCache

SCOPES = LimitScopes(tenant_id=uuid7())


class Table:
    """Limits as Postgres has them, and when it may answer."""

    def __init__(self) -> None:
        self.version = 1
        self.num_reads = 0
        self.now_s = 0.0
        self.gate = asyncio.Event()
        self.gate.set()

    async def load(self, scopes: LimitScopes) -> EffectiveLimits:
        self.num_reads += 1
        seen = self.version
        await self.gate.wait()
        return EffectiveLimits(version=seen)

    def cache(self, max_entries: int = 100) -> LimitsCache:
        return LimitsCache(self.load, max_entries=max_entries, clock=lambda: self.now_s)


async def test_limits_are_remembered_for_a_few_seconds_and_read_again_on_demand() -> None:
    table = Table()
    cache = table.cache()

    versions = [(await cache.find(SCOPES)).version for _ in range(3)]
    table.version = 2
    versions.append((await cache.find(SCOPES, is_fresh=True)).version)
    table.version = 3
    table.now_s += TTL_S
    versions.append((await cache.find(SCOPES)).version)

    assert versions == [1, 1, 1, 2, 3]
    assert table.num_reads == 3


async def test_a_slow_read_does_not_bring_old_limits_back() -> None:
    table = Table()
    cache = table.cache()
    table.gate.clear()
    slow = asyncio.create_task(cache.find(SCOPES))
    await asyncio.sleep(0)
    table.version = 2
    table.gate.set()
    await cache.find(SCOPES, is_fresh=True)
    await slow

    assert (await cache.find(SCOPES)).version == 2


async def test_no_more_than_so_many_are_remembered() -> None:
    table = Table()
    cache = table.cache(max_entries=10)

    for _ in range(50):
        await cache.find(LimitScopes(tenant_id=uuid7()))

    assert len(cache._known) == 10
