from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import redis
from loraplex_platform.errors import RevokedKeyError
from loraplex_platform.ids import uuid7
from loraplex_platform.outbox.queries import Message
from loraplex_platform.quotas.records import EffectiveLimits
from loraplex_platform.rates import keys
from loraplex_platform.rates.admission import (
    Admission,
    Claim,
    RateLimitedError,
    TokenUse,
    go_duration,
)
from loraplex_platform.rates.limiter import RateLimiter
from loraplex_platform.rates.versions import version_topic
from prometheus_client import CollectorRegistry

from tests.platform.rates.stand import (
    ACME,
    ACME_KEY,
    GLOBEX,
    World,
    admitted,
    claim,
    limit,
    never,
    shared,
)

if TYPE_CHECKING:
    from uuid import UUID

    from loraplex_platform.quotas.records import RateMetric
    from loraplex_platform.rates.queries import Place


async def test_headers_show_the_tightest_limit_of_each_kind(world: World) -> None:
    gateway = world.gateway()
    limits = (
        limit("rpm", 60, burst=10),
        limit("rpm", 600, scope_kind="key", scope_id=ACME_KEY),
        limit("tpm_total", 1000),
        limit("tpm_out", 500, scope_kind="key", scope_id=ACME_KEY),
        limit("concurrency", 3),
    )

    passed = await gateway.admit(claim(*limits), never)

    headers = passed.headers
    shown = {k: v for k, v in headers.items() if k.startswith("x-") and "reset" not in k}
    assert shown == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-limit-tokens": "500",
        "x-ratelimit-remaining-tokens": "400",
    }
    assert headers["x-ratelimit-reset-requests"] == "1s"
    assert headers["x-ratelimit-reset-tokens"] == "12s"


async def test_without_limits_everything_passes_and_nothing_is_shown(world: World) -> None:
    assert (await world.gateway().admit(claim(), never)).headers == {}


async def test_a_refusal_names_the_limit_and_when_to_come_back(world: World) -> None:
    gateway = world.gateway()
    limits = (limit("rpm", 6, burst=1), limit("tpm_total", 1, burst=10_000))
    await gateway.admit(claim(*limits), never)

    with pytest.raises(RateLimitedError) as refusal:
        await gateway.admit(claim(*limits), never)

    error = refusal.value
    assert (error.status, error.type, error.error_code) == (
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
    )
    assert error.limit_id == limits[0].limit_id
    assert "requests per minute is 6 (at most 1 at once), 1 are used" in error.message
    assert "x-should-retry" not in error.headers
    assert 10 <= int(error.headers["Retry-After"]) <= 12
    assert 9_900 <= int(error.headers["retry-after-ms"]) <= 12_000
    assert error.headers["x-ratelimit-remaining-requests"] == "0"
    assert error.headers["x-ratelimit-remaining-tokens"] == "9890"


async def test_what_never_fits_is_not_to_be_tried_again(world: World) -> None:
    with pytest.raises(RateLimitedError) as refusal:
        await world.gateway().admit(claim(limit("tpm_out", 99)), never)

    assert refusal.value.headers["x-should-retry"] == "false"
    assert "Retry-After" not in refusal.value.headers
    assert "needs 100" in refusal.value.message


@pytest.mark.parametrize("metric", ["rpm", "concurrency", "tpm_in"])
async def test_a_limit_of_zero_closes(world: World, metric: RateMetric) -> None:
    with pytest.raises(RateLimitedError, match="closed for now"):
        await world.gateway().admit(claim(limit(metric, 0)), never)


@pytest.mark.parametrize(
    ("metric", "at_first", "in_the_end"),
    [("tpm_in", 10, 10), ("tpm_out", 100, 7), ("tpm_total", 110, 17)],
)
async def test_each_token_class_counts_what_it_says(
    world: World, metric: RateMetric, at_first: int, in_the_end: int
) -> None:
    # So slow that nothing comes back by itself while the test runs.
    frozen = limit(metric, 1, burst=1000)
    gateway = world.gateway()

    passed = await gateway.admit(claim(frozen), never)
    assert passed.views[0].remaining == 1000 - at_first
    await gateway.release(passed, TokenUse(prompt_tokens=10, completion_tokens=7))

    _, views = await gateway.look(claim(frozen))
    assert views[0].remaining == 1000 - in_the_end


async def test_what_was_not_run_costs_nothing(world: World) -> None:
    limits = (limit("rpm", 1, burst=10), limit("tpm_total", 1, burst=1000), limit("concurrency", 1))
    gateway = world.gateway()

    for _ in range(30):
        await gateway.release(await gateway.admit(claim(*limits), never), None)

    _, views = await gateway.look(claim(*limits))
    assert [view.remaining for view in views] == [10, 1000, 1]


async def test_giving_back_twice_gives_back_once(world: World) -> None:
    gateway = world.gateway()
    one = limit("tpm_total", 1, burst=1000)
    passed = await gateway.admit(claim(one), never)
    await gateway.admit(claim(one), never)

    twin = replace(passed, shares=list(passed.shares))  # as of a gateway that has forgotten
    await gateway.release(passed, None)
    await gateway.release(passed, None)
    await gateway.release(twin, None)

    _, views = await gateway.look(claim(one))
    assert views[0].remaining == 890


async def test_three_gateways_together_admit_no_more_than_the_limit(world: World) -> None:
    gateways = [world.gateway() for _ in range(3)]
    limits = (limit("rpm", 1, burst=50), limit("concurrency", 40), limit("tpm_total", 10**9))

    passed = await admitted(gateways, [claim(*limits) for _ in range(600)])

    assert len(passed) == 40
    for number, one in enumerate(passed):
        await gateways[number % 3].release(one, TokenUse(10, 1))
    assert len(await admitted(gateways, [claim(*limits) for _ in range(600)])) == 10


async def test_a_shared_limit_that_refuses_gives_the_tenants_own_back(world: World) -> None:
    gateway = world.gateway()
    own, common = limit("rpm", 1, burst=10), shared("concurrency", 1)
    first = await gateway.admit(claim(own, common), never)

    for _ in range(5):
        with pytest.raises(RateLimitedError, match="for all its users together"):
            await gateway.admit(claim(own, common), never)
    _, views = await gateway.look(claim(own, common))

    assert [view.remaining for view in views] == [9]
    assert first.headers["x-ratelimit-remaining-requests"] == "9"
    await gateway.release(first, TokenUse(1, 1))
    await gateway.admit(claim(own, common), never)


async def test_tenants_do_not_touch_each_others_limits(world: World) -> None:
    gateway = world.gateway()
    theirs = limit("rpm", 1, burst=1, scope_id=GLOBEX, owner_tenant_id=GLOBEX)
    await gateway.admit(claim(limit("rpm", 1, burst=1)), never)

    passed = await gateway.admit(claim(theirs, tenant_id=GLOBEX, key_id=uuid7()), never)

    assert passed.views[0].remaining == 0


async def test_two_rates_of_one_scope_both_hold(world: World) -> None:
    gateway = world.gateway()
    usual, raised = limit("rpm", 1, burst=3), limit("rpm", 1, burst=8)
    two = (usual, raised)

    assert len(await admitted([gateway], [claim(*two) for _ in range(9)])) == 3
    _, views = await gateway.look(claim(*two))
    assert sorted(view.remaining for view in views) == [0, 5]


async def test_a_place_is_kept_as_long_as_it_is_renewed(world: World) -> None:
    gateway = world.gateway(lease_s=0.4)
    one = limit("concurrency", 2)
    kept = await gateway.admit(claim(one), never)
    lost = await gateway.admit(claim(one), never)
    with redis.Redis.from_url(world.url) as client:
        name = keys.names_of([one])[one.limit_id]

        for _ in range(4):
            await asyncio.sleep(0.15)
            await gateway.renew([kept])

        assert client.zcount(name, "-inf", "+inf") == 2
    passed = await admitted([gateway], [claim(one) for _ in range(5)])
    assert len(passed) == 1
    await gateway.renew([lost, kept])  # it lives after all: it is counted again
    assert len(await admitted([gateway], [claim(one)])) == 0


async def test_places_of_many_tenants_are_renewed_together() -> None:
    num_open = most_open = 0

    class Slow:
        epoch = "x"

        async def run(self, *_: object) -> int:
            nonlocal num_open, most_open
            num_open += 1
            most_open = max(most_open, num_open)
            await asyncio.sleep(0.01)
            num_open -= 1
            return 1

    async def nobody(_: UUID | None) -> list[Place]:
        return []

    admissions = []
    for _ in range(50):
        tenant_id = uuid7()
        place = limit("concurrency", 9, scope_id=tenant_id, owner_tenant_id=tenant_id)
        one = Admission(claim(place, tenant_id=tenant_id))
        one.shares = list(one.claim.shares())
        admissions.append(one)

    await RateLimiter(Slow(), nobody, CollectorRegistry()).renew(admissions)  # type: ignore[arg-type]

    assert most_open == len(admissions)


# ---------------------------------------------------------------------------- versions


async def publish(world: World, **payload: object) -> None:
    topic = version_topic(world.client())
    await topic.handle(Message(1, "x", {"tenant_id": str(ACME), **payload}, 1))


@pytest.mark.parametrize(
    "news",
    [
        {"key_id": str(ACME_KEY), "version": 2},
        {"version": 2, "limits_version": 1},
        {"version": 1, "limits_version": 2},
    ],
)
async def test_what_has_changed_is_looked_up_before_anything_is_taken(
    world: World, news: dict[str, object]
) -> None:
    gateways = [world.gateway(), world.gateway()]
    one = limit("rpm", 1, burst=10)
    await gateways[0].admit(claim(one), never)
    await publish(world, **news)

    async def revoked() -> Claim:
        raise RevokedKeyError("This API key has been revoked.")

    for gateway in gateways:
        with pytest.raises(RevokedKeyError):
            await gateway.admit(claim(one), revoked)

    assert (await gateways[0].look(claim(one)))[0] == "STALE"
    newest = EffectiveLimits(version=2, rates=(one,))
    _, views = await gateways[0].look(claim(limits=newest, key_version=2, tenant_version=2))
    assert views[0].remaining == 9


async def test_limits_that_have_changed_hold_at_once(world: World) -> None:
    gateway = world.gateway()
    await publish(world, version=1, limits_version=2)
    stricter = claim(limit("rpm", 0))
    newest = replace(stricter, limits=replace(stricter.limits, version=2))
    reloads = itertools.count()

    async def reload() -> Claim:
        next(reloads)
        return newest

    with pytest.raises(RateLimitedError):
        await gateway.admit(claim(limit("rpm", 100)), reload)

    assert next(reloads) == 1


async def test_a_limit_that_tenants_share_holds_at_once_for_all_of_them(world: World) -> None:
    gateways = [world.gateway() for _ in range(2)]
    common = shared("rpm", 1, burst=1)
    of_now = EffectiveLimits(version=1, shared_version=2, rates=(limit("rpm", 1, burst=9), common))
    for gateway in gateways:
        await gateway.admit(claim(limit("rpm", 1, burst=9)), never)
    topic = version_topic(world.client())
    await topic.handle(Message(1, "shared_limits:2", {"limits_version": 2}, 1))
    reloads = itertools.count()

    async def ask(gateway: RateLimiter) -> Admission:
        asked = claim(limit("rpm", 1, burst=9))

        async def reload() -> Claim:
            next(reloads)
            return replace(asked, limits=of_now)

        return await gateway.admit(asked, reload)

    passed = await ask(gateways[0])
    with pytest.raises(RateLimitedError, match="for all its users together"):
        await ask(gateways[1])

    assert next(reloads) == 2
    assert [view.limit for view in passed.views] == list(of_now.rates)
    # What was taken before the news was read has been given back, and so has what was refused.
    _, views = await gateways[0].look(claim(limits=of_now))
    assert [view.remaining for view in views] == [6]


async def test_a_shared_limit_that_was_loosened_or_taken_away_is_forgotten_at_once(
    world: World,
) -> None:
    gateway = world.gateway()
    own = limit("rpm", 1, burst=9)
    old = EffectiveLimits(version=1, shared_version=1, rates=(own, shared("rpm", 0)))
    topic = version_topic(world.client())
    await topic.handle(Message(1, "shared_limits:2", {"limits_version": 2}, 1))
    newest = EffectiveLimits(version=1, shared_version=2, rates=(own,))
    asked = claim(limits=old)

    async def reload() -> Claim:
        return replace(asked, limits=newest)

    passed = await gateway.admit(asked, reload)

    assert [view.remaining for view in passed.views] == [8]


async def test_postgres_has_the_last_word_on_versions(world: World) -> None:
    await publish(world, key_id=str(ACME_KEY), version=9)  # then Postgres was restored
    old = claim(limit("rpm", 60))

    async def reload() -> Claim:
        return old

    assert (await world.gateway().admit(old, reload)).views[0].remaining == 59


# ---------------------------------------------------------------------------- small things


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0, "0s"),
        (1, "1ms"),
        (17_000, "17ms"),
        (999_001, "1s"),
        (1_500_000, "1.5s"),
        (360_000_000, "6m0s"),
        (86_400_000, "1m26.4s"),
        (3_723_000_000, "1h2m3s"),
    ],
)
def test_durations_are_written_as_go_does(microseconds: int, text: str) -> None:
    assert go_duration(microseconds) == text
