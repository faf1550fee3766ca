from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from loraplex_platform.db.session import DatabaseUnavailableError
from loraplex_platform.errors import (
    InvalidApiKeyError,
    PlatformError,
    RevokedKeyError,
    TooManyAttemptsError,
)
from loraplex_platform.ids import uuid7
from loraplex_platform.tenancy import keys
from loraplex_platform.tenancy.authentication import Authenticated
from loraplex_platform.tenancy.key_cache import REFUSED_TTL_S, TTL_S, KeyCache
from loraplex_platform.tenancy.unknown_keys import BURST
from prometheus_client import CollectorRegistry

HERE = "198.51.100.7"
SECRET = keys.mint().secret


class Keys:
    """Keys as Postgres has them, and when it may answer."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.holder: Authenticated | PlatformError = Authenticated(
            key_id=uuid7(),
            key_version=1,
            public_id="abc",
            tenant_id=uuid7(),
            tenant_slug="acme",
            tenant_version=1,
        )
        self.num_reads = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.registry = CollectorRegistry()
        self.cache = KeyCache(self.load, self.registry, clock=lambda: self.now_s)

    async def load(self, secret: str) -> Authenticated:
        self.num_reads += 1
        seen: Authenticated | PlatformError = self.holder
        if secret != SECRET:
            seen = InvalidApiKeyError("Unknown API key.")
        await self.gate.wait()
        if isinstance(seen, PlatformError):
            raise seen
        return seen

    def change(self, **changes: Any) -> None:
        assert isinstance(self.holder, Authenticated)
        self.holder = replace(self.holder, key_version=self.holder.key_version + 1, **changes)

    async def find(self, secret: str = SECRET, address: str = HERE, **how: Any) -> Authenticated:
        return await self.cache.find(secret, address, **how)

    def num(self, outcome: str) -> float:
        labels = {"outcome": outcome}
        return self.registry.get_sample_value("loraplex:key_lookups_total", labels) or 0.0


async def turns() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_key_is_read_once_for_a_few_seconds() -> None:
    keys = Keys()

    found = [(await keys.find()).key_version for _ in range(5)]
    keys.change()
    found.append((await keys.find()).key_version)
    keys.now_s += TTL_S
    found.append((await keys.find()).key_version)

    assert found == [1, 1, 1, 1, 1, 1, 2]
    assert (keys.num("read"), keys.num("remembered")) == (2, 5)


async def test_all_who_ask_at_once_wait_for_one_read() -> None:
    keys = Keys()
    keys.gate.clear()

    asking = [asyncio.create_task(keys.find()) for _ in range(20)]
    await turns()
    asking.pop().cancel()  # one leaves; the others do not notice
    await turns()
    keys.gate.set()

    assert len(await asyncio.gather(*asking)) == 19
    assert keys.num_reads == 1


async def test_who_asks_afresh_gets_no_older_read() -> None:
    keys = Keys()
    keys.gate.clear()
    old = asyncio.create_task(keys.find())
    await turns()
    keys.change()

    fresh = asyncio.create_task(keys.find(is_fresh=True))
    await turns()
    keys.gate.set()

    assert ((await old).key_version, (await fresh).key_version) == (1, 2)


async def test_a_read_that_races_a_change_does_not_bring_the_old_key_back() -> None:
    keys = Keys()
    keys.gate.clear()
    slow = asyncio.create_task(keys.find())
    await turns()
    keys.change()
    slow_gate, keys.gate = keys.gate, asyncio.Event()
    keys.gate.set()
    assert (await keys.find(is_fresh=True)).key_version == 2
    slow_gate.set()
    await slow

    assert (await keys.find()).key_version == 2


async def test_a_read_that_races_a_revocation_does_not_bring_the_key_back() -> None:
    keys = Keys()
    keys.gate.clear()
    slow = asyncio.create_task(keys.find())
    await turns()
    keys.now_s += 0.1
    keys.holder = RevokedKeyError("This API key has been revoked.")
    slow_gate, keys.gate = keys.gate, asyncio.Event()
    keys.gate.set()
    with pytest.raises(RevokedKeyError):
        await keys.find(is_fresh=True)
    slow_gate.set()
    await slow

    with pytest.raises(RevokedKeyError):
        await keys.find()


async def test_a_refusal_is_remembered_for_less_long_and_says_the_same() -> None:
    keys = Keys()
    holder, keys.holder = keys.holder, RevokedKeyError("This API key has been revoked.")

    for _ in range(5):
        with pytest.raises(RevokedKeyError, match="has been revoked"):
            await keys.find()
    assert keys.num_reads == 1

    keys.holder = holder
    keys.now_s += REFUSED_TTL_S
    await keys.find()


async def test_an_outage_is_no_refusal_and_is_not_remembered() -> None:
    keys = Keys()
    holder, keys.holder = keys.holder, DatabaseUnavailableError()
    for _ in range(2):
        with pytest.raises(DatabaseUnavailableError):
            await keys.find()

    keys.holder = holder

    await keys.find()


async def test_known_keys_are_served_from_memory_during_an_outage_but_not_for_long() -> None:
    keys = Keys()
    await keys.find()
    keys.holder = DatabaseUnavailableError()

    keys.now_s += TTL_S - 0.1
    await keys.find()
    keys.now_s += 0.2

    with pytest.raises(DatabaseUnavailableError):
        await keys.find()


@pytest.mark.parametrize(("left_s", "reads"), [(3600, 1), (-1, 2)])
async def test_a_key_is_not_remembered_beyond_its_end(left_s: float, reads: int) -> None:
    keys = Keys()
    keys.change(valid_until=datetime.now(UTC) + timedelta(seconds=left_s))

    await keys.find()
    await keys.find()

    assert keys.num_reads == reads


async def flood(found: Keys, address: str, count: int = BURST) -> list[type[Exception]]:
    errors: list[type[Exception]] = []
    for _ in range(count):
        try:
            await found.find(keys.mint().secret, address)
        except PlatformError as error:
            errors.append(type(error))
    return errors


async def test_a_flood_of_unknown_keys_stops_at_its_address() -> None:
    found = Keys()
    await found.find(address=HERE)

    errors = await flood(found, HERE, BURST + 40)
    num_reads = found.num_reads

    assert errors == [InvalidApiKeyError] * BURST + [TooManyAttemptsError] * 40
    assert num_reads == 1 + BURST
    await found.find(address=HERE)  # a known key from there still works, also read again
    found.now_s += TTL_S
    await found.find(address=HERE)
    assert await flood(found, "203.0.113.9", 1) == [InvalidApiKeyError]
    found.now_s += 60
    assert await flood(found, HERE, 1) == [InvalidApiKeyError]


async def test_the_flooded_are_told_when_to_come_back() -> None:
    found = Keys()
    await flood(found, HERE)

    with pytest.raises(TooManyAttemptsError) as refusal:
        await found.find(keys.mint().secret)

    assert refusal.value.headers["Retry-After"] == "1"


async def test_nonsense_costs_no_read() -> None:
    found = Keys()

    mistyped = SECRET[:-1] + ("a" if SECRET[-1] != "a" else "b")
    for text in ("", "sk-1", mistyped, "lpx_ak_" + SECRET[7:]):
        with pytest.raises(InvalidApiKeyError):
            await found.find(text)

    assert found.num_reads == 0


async def test_secrets_are_not_kept() -> None:
    found = Keys()
    await found.find()
    await flood(found, HERE, 1)

    kept = repr([found.cache._known, found.cache._refused, vars(found.cache._unknown)])

    assert SECRET not in kept
    assert SECRET[-12:] not in kept
