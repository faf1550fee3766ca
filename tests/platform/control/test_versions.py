"""What the control API changes is known in Redis when it answers, so gateways know at their next request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import redis
from loraplex_platform.ids import parse_id
from loraplex_platform.rates import keys, versions
from loraplex_platform.rates.redis_client import DeadlineRedis
from sqlalchemy import text

from tests.support.metering import run_sql

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.platform.control.stand import Stand


@pytest.fixture
def known(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


async def test_a_platform_limit_is_one_message_for_all_tenants_and_waits_for_nobodys(
    stand: Stand, known: redis.Redis
) -> None:
    for slug in ("acme", "globex"):
        await stand.tenant(slug)
    await run_sql(stand.db, "update tenants set limits_version = limits_version + 1")
    count = text("select count(*), count(done_at) from outbox where topic = 'version'")

    limit = {"scope_kind": "platform", "metric": "rpm", "value": "60"}
    assert (await stand.admin.post("/admin/v1/limits", json=limit)).status_code == 201

    async with stand.db.sessions() as session:
        left, delivered = (await session.execute(count)).one()
    assert (left, delivered) == (3, 1)
    assert known.hgetall(keys.versions(keys.SHARED)) == {"l": "2"}


async def test_telling_ends_in_time(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = await stand.tenant("acme")

    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(versions, "TELL_DEADLINE_S", 0.1)
    monkeypatch.setattr(DeadlineRedis, "run", hang)
    limit = {"scope_kind": "tenant", "scope_id": tenant["id"], "metric": "rpm", "value": "60"}

    async with asyncio.timeout(5.0):
        answer = await stand.admin.post("/admin/v1/limits", json=limit)

    assert answer.status_code == 201


async def test_a_revoked_key_and_changed_limits_are_known_at_once(
    stand: Stand, known: redis.Redis
) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}"
    key = (await stand.admin.post(f"{path}/keys", json={"name": "x"})).json()
    names = keys.versions(keys.tag_of(parse_id("tenant", tenant["id"])))
    assert known.hgetall(names) == {}

    assert (await stand.admin.delete(f"{path}/keys/{key['id']}")).status_code == 204
    limit = {"scope_kind": "tenant", "scope_id": tenant["id"], "metric": "rpm", "value": "60"}
    assert (await stand.admin.post("/admin/v1/limits", json=limit)).status_code == 201

    found = known.hgetall(names)
    assert int(found[parse_id("api_key", key["id"]).hex]) >= 2
    assert int(found["l"]) >= 2
    async with stand.db.sessions() as session:
        waiting = text("select count(*) from outbox where topic = 'version' and done_at is null")
        assert await session.scalar(waiting) == 0
