"""Of the platform's own rollouts a tenant's member sees nothing: no salt, no verdict, no names."""

from __future__ import annotations

from loraplex_platform.db.tenant_scope import enter_tenants
from loraplex_platform.ids import parse_id
from sqlalchemy import text

from tests.platform.control.test_revisions import add_rollout
from tests.platform.rollouts.stand import World
from tests.support.metering import run_sql


async def test_the_platforms_rollouts_are_nobody_elses(world: World) -> None:
    [base] = (await world.stand.admin.get("/admin/v1/deployments")).json()["data"]
    first = base["revision"]["id"]
    body = {"params": {"sampling": {"temperature": 0}}, "version_id": None}
    made = await world.stand.admin.post(
        f"/admin/v1/deployments/{base['name']}/revisions", json=body
    )
    assert made.status_code == 201, made.text
    platforms = await add_rollout(world.db, base["id"], first, made.json()["id"], "shadow")
    await run_sql(
        world.db,
        "insert into rollout_events (rollout_id, seq, kind, actor, message, detail)"
        " values (:id, 1, 'started', 'user x', 'started', '{}')",
        id=parse_id("rollout", platforms),
    )
    own = await world.made()

    async with world.db.sessions() as session:
        await enter_tenants(session, [parse_id("tenant", world.tenant)])
        seen = (await session.scalars(text("select id from rollouts"))).all()
        told = (await session.scalars(text("select distinct rollout_id from rollout_events"))).all()
    assert list(seen) == list(told) == [parse_id("rollout", own["id"])]
