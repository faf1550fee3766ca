"""What the control API changes is known in Redis when it answers, so gateways know at their next request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis
from loraplex_platform.ids import parse_id
from loraplex_platform.rates import keys
from sqlalchemy import text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.platform.control.stand import Stand


@pytest.fixture
def known(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


async def test_a_revoked_key_and_changed_limits_are_known_at_once(
    stand: Stand, known: redis.Redis
) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}"
    key = (await stand.admin.post(f"{path}/keys", json={"name": "x"})).json()
    versions = keys.versions(keys.tag_of(parse_id("tenant", tenant["id"])))
    assert known.hgetall(versions) == {}

    assert (await stand.admin.delete(f"{path}/keys/{key['id']}")).status_code == 204
    limit = {"scope_kind": "tenant", "scope_id": tenant["id"], "metric": "rpm", "value": "60"}
    assert (await stand.admin.post("/admin/v1/limits", json=limit)).status_code == 201

    found = known.hgetall(versions)
    assert int(found[parse_id("api_key", key["id"]).hex]) >= 2
    assert int(found["l"]) >= 2
    async with stand.db.sessions() as session:
        waiting = text("select count(*) from outbox where topic = 'version' and done_at is null")
        assert await session.scalar(waiting) == 0
