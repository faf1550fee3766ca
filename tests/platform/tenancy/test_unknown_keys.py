"""Unknown keys are counted over all gateways, and by each alone while Redis is away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from loraplex_platform.errors import TooManyAttemptsError
from loraplex_platform.rates.redis_client import DeadlineRedis, RedisMetrics
from loraplex_platform.tenancy.unknown_keys import BURST, UnknownKeys
from prometheus_client import CollectorRegistry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HERE, ELSEWHERE = "198.51.100.7", "203.0.113.9"


def client_of(url: str) -> DeadlineRedis:
    return DeadlineRedis(url, RedisMetrics(CollectorRegistry()), deadline_s=10.0)


@pytest.fixture
async def gateways(redis_url: str) -> AsyncIterator[list[UnknownKeys]]:
    """Two, over one Redis."""
    clients = [client_of(redis_url) for _ in range(2)]
    yield [UnknownKeys(client) for client in clients]
    for client in clients:
        await client.aclose()


async def is_stopped(gateway: UnknownKeys, address: str) -> bool:
    try:
        await gateway.check(address)
    except TooManyAttemptsError:
        return True
    return False


async def test_what_is_shown_to_one_gateway_counts_at_the_others(
    gateways: list[UnknownKeys],
) -> None:
    for number in range(BURST):
        assert not await is_stopped(gateways[number % 2], HERE)
        await gateways[number % 2].note(HERE)
    # What a slow run gave back by the clock.
    for number in range(BURST):
        if await is_stopped(gateways[number % 2], HERE):
            break
        await gateways[number % 2].note(HERE)

    assert [await is_stopped(one, HERE) for one in gateways] == [True, True]
    assert not await is_stopped(gateways[0], ELSEWHERE)
    with pytest.raises(TooManyAttemptsError) as refusal:
        await gateways[1].check(HERE)
    assert refusal.value.headers["Retry-After"] == "1"  # many more shown at once make it no longer


@pytest.mark.parametrize("has_redis", [True, False], ids=["away", "none"])
async def test_a_gateway_without_redis_counts_alone(has_redis: bool) -> None:
    client = client_of("redis://127.0.0.1:1") if has_redis else None
    now_s = 1000.0
    gateway = UnknownKeys(client, clock=lambda: now_s)

    for _ in range(3 * BURST):
        await gateway.note(HERE)

    assert await is_stopped(gateway, HERE)
    assert not await is_stopped(gateway, ELSEWHERE)
    now_s += 1.0
    assert not await is_stopped(gateway, HERE)
    if client is not None:
        await client.aclose()


async def test_the_addresses_of_one_customer_count_together() -> None:
    gateway = UnknownKeys(clock=lambda: 1000.0)

    for number in range(BURST):
        await gateway.note(f"2001:db8:1:2::{number + 1:x}")

    assert await is_stopped(gateway, "2001:db8:1:2:ffff::1")
    assert not await is_stopped(gateway, "2001:db8:1:3::1")
