"""Rates, concurrency and revocation over HTTP: what clients see, and what is left in Redis."""

from __future__ import annotations

import asyncio
import struct
import time
from typing import TYPE_CHECKING, Any

import openai
import pytest
import pytest_asyncio
import redis
from loraplex_platform.audit.service import Actor
from loraplex_platform.db import Limit, Request
from loraplex_platform.db.quotas import NO_SCOPE_ID
from loraplex_platform.ids import uuid7
from loraplex_platform.outbox.relay import Relay
from loraplex_platform.rates.invariant import places_check
from loraplex_platform.rates.redis_client import DEADLINE_S, DeadlineRedis, RedisMetrics
from loraplex_platform.rates.versions import version_topic
from loraplex_platform.tenancy import key_service, keys
from loraplex_platform.tenancy.unknown_keys import BURST
from prometheus_client import CollectorRegistry
from sqlalchemy import func, select

from tests.platform.gateway.stand import BASE, Stand, eventually, says
from tests.support.fake_engine import Script
from tests.support.metering import run_sql
from tests.support.pausing import paused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="package")

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ACTOR = Actor("user", "test", "req_test")


@pytest_asyncio.fixture(loop_scope="package")
async def stand(db_url: str, _redis_server_url: str, short_tmp_path: Path) -> AsyncIterator[Stand]:
    """A stand with the memory of keys that a real gateway has."""
    redis_url = f"{_redis_server_url}?db=2"
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
    async with Stand.open(db_url, redis_url, short_tmp_path, key_cache_s=5.0) as stand:
        yield stand
        await stand.close_clients()
        await stand.check_books()


async def set_limit(stand: Stand, metric: str, value: int, **changes: Any) -> None:
    """A limit of acme's, and its news."""
    period = "none" if metric == "concurrency" else "minute"
    values: dict[str, Any] = {
        "id": uuid7(),
        "tenant_id": stand.customer.tenant_id,
        "scope_kind": "tenant",
        "scope_id": stand.customer.tenant_id,
        "metric": metric,
        "period": period,
        "value": value,
    }
    async with stand.db.transaction() as session:
        session.add(Limit(**values | changes))
    await tell(stand)


async def tell(stand: Stand) -> None:
    """What the control API does after each commit."""
    client = DeadlineRedis(stand.redis_url, RedisMetrics(CollectorRegistry()))
    await Relay(stand.db.sessions, version_topic(client)).relay_once()
    await client.aclose()


async def revoke(stand: Stand) -> None:
    """As the control API does it, without the news."""
    async with stand.db.transaction() as session:
        await key_service.revoke_key(
            session, ACTOR, stand.customer.tenant_id, stand.customer.key_id
        )


async def ask(stand: Stand, client: openai.AsyncOpenAI | None = None, **changes: Any) -> Any:
    values: dict[str, Any] = {"model": BASE, "messages": HELLO, "max_tokens": 20}
    completions = (client or stand.client).chat.completions
    return await completions.with_raw_response.create(**values | changes)


def of_kind(headers: Any, kind: str) -> list[str | None]:
    return [headers.get(f"x-ratelimit-{name}-{kind}") for name in ("limit", "remaining")]


async def test_every_answer_says_how_the_limits_stand(stand: Stand) -> None:
    stand.engine.script = says("hi")
    await set_limit(stand, "rpm", 60, burst=10)
    await set_limit(stand, "tpm_out", 1000)

    whole = await ask(stand)
    stream = await ask(stand, stream=True)
    await stream.parse().close()
    await stand.settled()
    async with stand.http() as http:
        bad = await http.post("/v1/chat/completions", json={"model": BASE})
        unknown = await http.post("/v1/chat/completions", json={"model": "no", "messages": HELLO})
        models = await http.get("/v1/models")
        nobody = await http.get("/v1/models", headers={"authorization": "Bearer x"})

    assert of_kind(whole.headers, "requests") == ["60", "9"]
    assert of_kind(whole.headers, "tokens") == ["1000", "980"]
    assert whole.headers["x-ratelimit-reset-requests"] == "1s"
    assert of_kind(stream.headers, "requests") == ["60", "8"]
    for answer, status in ((bad, 400), (unknown, 404), (models, 200)):
        assert answer.status_code == status
        assert answer.headers["x-ratelimit-limit-requests"] == "60"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) > 980 - 20
        assert answer.headers["ratelimit-policy"] == '"tenant-requests";q=10;qu="requests";w=10'
        assert answer.headers["ratelimit"].startswith('"tenant-requests";r=')
    assert nobody.status_code == 401
    assert not [name for name in nobody.headers if "ratelimit" in name]


async def test_a_limit_of_the_platform_holds_at_the_next_request(stand: Stand) -> None:
    stand.engine.script = says("hi")
    await ask(stand)  # limits are remembered from here on
    platforms = {"tenant_id": None, "scope_kind": "platform", "scope_id": NO_SCOPE_ID}

    await set_limit(stand, "rpm", 1, burst=1, **platforms)
    answer = await ask(stand)
    with pytest.raises(openai.RateLimitError, match="for all its users together"):
        await ask(stand)
    await run_sql(stand.db, "delete from limits")
    await tell(stand)
    await ask(stand)

    assert "ratelimit" not in answer.headers  # how much is left of it is other tenants' business


async def test_a_refusal_is_openais_and_leaves_nothing_behind(stand: Stand) -> None:
    stand.engine.script = says("hi")
    await set_limit(stand, "rpm", 1, burst=2)
    await ask(stand)
    await ask(stand)

    with pytest.raises(openai.RateLimitError) as refusal:
        await ask(stand)

    assert refusal.value.code == "rate_limit_exceeded"
    assert "requests per minute is 1 (at most 2 at once)" in refusal.value.message
    headers = refusal.value.response.headers
    assert 50 <= int(headers["retry-after"]) <= 72
    assert int(headers["retry-after-ms"]) > 50_000
    assert of_kind(headers, "requests") == ["1", "0"]
    async with stand.db.sessions() as session:
        count = await session.scalar(select(func.count()).select_from(Request))
    assert count == 2


async def test_a_place_is_free_when_its_answer_has_come(stand: Stand) -> None:
    stand.engine.script = says("hi")
    await set_limit(stand, "concurrency", 1)

    for number in range(12):
        answer = await ask(stand, stream=number % 2 == 1)
        if number % 2:
            async for _ in answer.parse():
                pass

    check = await places_of(stand)
    assert (check.ok, check.detail) == (True, "0 requests hold places")


async def places_of(stand: Stand) -> Any:
    async with stand.db.sessions() as session:
        return await places_check(stand.redis_url)(session)


async def test_a_running_request_holds_its_place_until_its_client_leaves(stand: Stand) -> None:
    stand.engine.script = Script(token_delay_s=0.1)
    await set_limit(stand, "concurrency", 1)
    running = await ask(stand, stream=True, max_tokens=100)

    with pytest.raises(openai.RateLimitError, match="may have 1 requests at a time"):
        await ask(stand)
    assert (await places_of(stand)).detail == "1 requests hold places"
    await running.parse().close()
    stand.engine.script = says("hi")

    async def passes() -> bool:
        try:
            await ask(stand)
        except openai.RateLimitError:
            return False
        return True

    await eventually(passes, "a free place")


async def test_tokens_count_as_they_were_used(stand: Stand) -> None:
    stand.engine.script = says("hi")
    await set_limit(stand, "tpm_total", 1, burst=10_000)

    usage = (await ask(stand, max_tokens=100)).parse().usage
    async with stand.http() as http:
        headers = (await http.get("/v1/models")).headers

    assert of_kind(headers, "tokens") == ["1", str(10_000 - usage.total_tokens)]


async def test_what_the_books_refuse_takes_no_share(stand: Stand) -> None:
    stand.engine.script = says("hi")
    await set_limit(stand, "rpm", 1, burst=5)
    await ask(stand)
    await revoke(stand)  # the gateway remembers the key; the reserve does not let it pass

    for _ in range(3):
        with pytest.raises(openai.AuthenticationError):
            await ask(stand)

    name = f"lpx:{{{stand.customer.tenant_id.hex}}}:rpm:tenant:{stand.customer.tenant_id.hex}"
    with redis.Redis.from_url(stand.redis_url) as client:
        level, _ = struct.unpack("<dd", client.get(name))
    assert 4 <= level < 4.5


async def test_a_revoked_key_stops_at_its_next_request(stand: Stand) -> None:
    stand.engine.script = says("hi")
    await ask(stand)
    async with stand.http() as http:
        assert (await http.get("/v1/models")).status_code == 200
        await revoke(stand)
        await tell(stand)

        models = await http.get("/v1/models")
        answer = await http.post("/v1/chat/completions", json={"model": BASE, "messages": HELLO})

    assert (models.status_code, answer.status_code) == (401, 401)
    assert answer.json()["error"]["code"] == "revoked_api_key"


async def test_a_key_that_lost_its_models_stops_at_its_next_request(stand: Stand) -> None:
    stand.engine.script = says("hi")
    await ask(stand)
    await run_sql(
        stand.db,
        "update api_keys set scopes = '{models.read}' where id = :id",
        id=stand.customer.key_id,
    )
    await tell(stand)

    with pytest.raises(openai.PermissionDeniedError):
        await ask(stand)


async def test_a_suspended_tenant_stops_at_its_next_request(stand: Stand) -> None:
    stand.engine.script = says("hi")
    await ask(stand)
    await run_sql(
        stand.db,
        "update tenants set status = 'suspended' where id = :id",
        id=stand.customer.tenant_id,
    )
    await tell(stand)

    async with stand.http() as http:
        answer = await http.get("/v1/models")

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "tenant_suspended")


async def test_unknown_keys_from_one_address_are_stopped(stand: Stand) -> None:
    async with stand.http("") as http:

        async def show(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await http.get("/v1/models", headers=headers)).status_code

        first = [await show(keys.mint().secret) for _ in range(5)]
        then: set[int] = set()
        for _ in range(5):  # one a second is allowed again, and machines are slow at times
            then |= set(await asyncio.gather(*(show(keys.mint().secret) for _ in range(BURST))))

    assert set(first) == {401}
    assert then == {401, 429}


async def test_nobody_waits_for_a_paused_redis(stand: Stand) -> None:
    stand.engine.script = says("hi")
    await set_limit(stand, "rpm", 10_000)
    client = stand.client  # making one takes longer than anything here
    await asyncio.gather(*(ask(stand, client) for _ in range(20)))
    with redis.Redis.from_url(stand.redis_url) as connection:
        pid = int(connection.info("server")["process_id"])

    with paused(pid):
        began_s = time.monotonic()
        answers = await asyncio.gather(*(ask(stand, client) for _ in range(20)))
        elapsed_s = time.monotonic() - began_s

    assert all(each.headers["x-loraplex-rate-limits"] == "degraded" for each in answers)
    assert all(each.headers["x-ratelimit-limit-requests"] == "10000" for each in answers)
    # In and out of the gate, and the answer itself on a busy machine.
    assert elapsed_s < 2 * DEADLINE_S + 3.0

    async def is_back() -> bool:
        return "x-loraplex-rate-limits" not in (await ask(stand, client)).headers

    await eventually(is_back, "redis")
