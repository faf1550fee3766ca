"""Rollouts of deployments that follow an alias: what they say they follow is what they answer with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from loraplex_platform.audit.service import SYSTEM
from loraplex_platform.db import DeploymentRevision
from loraplex_platform.ids import parse_id
from loraplex_platform.registry import queries as registry
from loraplex_platform.rollouts import service
from sqlalchemy import select

from tests.platform.control.stand import error_of
from tests.platform.rollouts.stand import MODEL, NO_GATES, World, canary
from tests.support.metering import run_sql


class Following:
    """The world's deployment follows `prod`, which names the first of one adapter's two versions."""

    def __init__(self, world: World, adapter: str, versions: list[str]) -> None:
        self.world, self.adapter, self.versions = world, adapter, versions
        tenant = f"/admin/v1/tenants/{world.tenant}"
        self.alias = f"{tenant}/adapters/{adapter}/aliases/prod"
        self.deployment = f"{tenant}/deployments/{MODEL}"

    @classmethod
    async def make(cls, world: World) -> Following:
        stand = world.stand
        versions = [await stand.version(world.tenant, "pirate", seed=seed) for seed in (7, 8)]
        listed = await stand.admin.get(f"/admin/v1/tenants/{world.tenant}/adapters")
        [adapter] = [one["id"] for one in listed.json()["data"] if one["name"] == "pirate"]
        self = cls(world, adapter, versions)
        await self.move(0)
        answer = await stand.admin.put(self.deployment, json={"follow": self.followed})
        assert answer.status_code == 200, answer.text
        return self

    @property
    def followed(self) -> dict[str, str]:
        return {"adapter_id": self.adapter, "alias": "prod"}

    async def move(self, version: int) -> dict[str, Any]:
        body = {"version_id": self.versions[version]}
        answer = await self.world.stand.admin.put(self.alias, json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def shown(self) -> tuple[Any, int]:
        """What it follows, and which of the versions answers."""
        answer = (await self.world.stand.admin.get(self.deployment)).json()
        return answer["follow"], self.versions.index(answer["revision"]["version_id"])

    async def revision(self, **content: Any) -> int:
        answer = await self.world.stand.admin.post(f"{self.deployment}/revisions", json=content)
        assert answer.status_code == 201, answer.text
        return int(answer.json()["number"])


@pytest.fixture
async def following(world: World) -> Following:
    return await Following.make(world)


async def test_promoted_to_another_version_it_follows_no_more(following: Following) -> None:
    world = following.world
    other = await following.revision(version_id=following.versions[1])
    rollout = await world.stepping(canary=other, gate=NO_GATES, steps=[canary(500)])
    assert "follows the alias prod" in " ".join(rollout["warnings"])
    await world.look()

    assert await following.shown() == (None, 1)
    [*_, promoted, told] = await world.events(rollout["id"])
    assert promoted[0] == "promoted"
    assert told[0] == "warning"
    assert told[1].startswith("the deployment follows the alias prod no more")
    # Moved or set again, the alias leaves alone what does not follow it.
    assert (await following.move(0))["moved"] == []
    await world.act(rollout["id"], "rollback")
    assert await following.shown() == (None, 0)
    assert (await world.kinds(rollout["id"]))[-1] == "rolled_back"


async def test_what_keeps_the_version_keeps_the_alias(following: Following) -> None:
    world = following.world
    same = await following.revision(
        version_id=following.versions[0], params={"sampling": {"temperature": 0}}
    )
    rollout = await world.stepping(canary=same, gate=NO_GATES, steps=[canary(500)])
    await world.look()
    assert (await world.read(rollout["id"]))["state"] == "promoted"
    assert await following.shown() == (following.followed, 0)
    await world.act(rollout["id"], "rollback")
    assert await following.shown() == (following.followed, 0)
    assert "warning" not in (await world.kinds(rollout["id"]))[2:]
    assert (await following.move(1))["moved"] == [MODEL]


async def test_rolled_back_past_a_move_it_follows_no_more(following: Following) -> None:
    """What answers then is not what the alias names by now."""
    world = following.world
    other = await following.revision(version_id=following.versions[1])
    rollout = await world.stepping(canary=other, gate=NO_GATES, steps=[canary(500)])
    await following.world.act(rollout["id"], "promote")
    await following.move(1)
    answer = await world.stand.admin.put(following.deployment, json={"follow": following.followed})
    assert answer.json()["follow"] == following.followed
    await world.act(rollout["id"], "rollback")
    assert await following.shown() == (None, 0)
    assert (await world.kinds(rollout["id"]))[-2:] == ["rolled_back", "warning"]


async def test_an_alias_that_is_set_to_what_it_names_brings_its_followers_along(
    following: Following,
) -> None:
    world = following.world
    other = await following.revision(version_id=following.versions[1])
    # As an older release left it: it says that it follows, and answers with something else.
    await run_sql(
        world.db,
        "update deployments d set current_revision_id = r.id from deployment_revisions r"
        " where r.deployment_id = d.id and r.number = :number and d.public_name = :name",
        number=other,
        name=MODEL,
    )
    assert await following.shown() == (following.followed, 1)
    assert (await following.move(0))["moved"] == [MODEL]
    assert await following.shown() == (following.followed, 0)
    assert (await following.move(0))["moved"] == []


# ---------------------------------------------------------------------------- at once


async def _waits(task: asyncio.Task[Any]) -> None:
    await asyncio.sleep(0.3)
    assert not task.done()


@pytest.mark.parametrize("verb", ["start", "rollback"])
async def test_a_start_or_rollback_waits_for_a_move_and_sees_it(
    following: Following, verb: str
) -> None:
    world = following.world
    same = await following.revision(
        version_id=following.versions[0], params={"sampling": {"temperature": 0}}
    )
    rollout = await world.made(canary=same, gate=NO_GATES, steps=[canary(500)])
    if verb == "rollback":
        await world.act(rollout["id"], "start")
        await world.act(rollout["id"], "promote")
    adapter_id = parse_id("adapter", following.adapter)

    # An alias moves: its followers are locked, and pointed elsewhere.
    async with world.db.sessions.begin() as session:
        [follower] = await registry.followers_of(session, adapter_id, "prod")
        first = await session.scalar(
            select(DeploymentRevision.id).where(
                DeploymentRevision.deployment_id == follower.id,
                DeploymentRevision.number == 1,
            )
        )
        await registry.point_at(session, follower.id, current_revision_id=first)
        acting = asyncio.create_task(world.stand.admin.post(f"{world.path}/{rollout['id']}/{verb}"))
        await _waits(acting)

    refused = error_of(await acting, 409, "rollout_state")
    assert "answers with revision 1 now" in refused["message"] or "elsewhere" in refused["message"]


async def test_a_move_waits_for_a_start_and_is_refused(following: Following) -> None:
    world = following.world
    rollout = await world.made(gate=NO_GATES, steps=[canary(500)])
    async with world.db.sessions.begin() as session:
        await service.start(
            session,
            SYSTEM,
            parse_id("tenant", world.tenant),
            rollout["id"],
            None,
            is_operator=True,
        )
        moving = asyncio.create_task(
            world.stand.admin.put(following.alias, json={"version_id": following.versions[1]})
        )
        await _waits(moving)
    error_of(await moving, 409, "rollout_active")
    assert await following.shown() == (following.followed, 0)


async def test_nobody_promotes_by_hand_what_is_not_stable_any_more(world: World) -> None:
    rollout = await world.stepping(gate=NO_GATES, steps=[canary(500, hold_s=3600)])
    await run_sql(
        world.db,
        "update deployments d set current_revision_id = r.id from deployment_revisions r"
        " where r.deployment_id = d.id and r.number = 1 and d.public_name = :name",
        name=MODEL,
    )
    refused = await world.act(rollout["id"], "promote", 409)
    assert refused["error"]["code"] == "rollout_state"
    assert "abort it" in refused["error"]["message"]
    assert (await world.act(rollout["id"], "abort"))["state"] == "aborted"


async def test_a_version_is_not_retired_between_a_look_at_it_and_a_start(world: World) -> None:
    """Who retires it holds its row, and a start waits for that."""
    rollout = await world.made(gate=NO_GATES, steps=[canary(500)])
    canary_version = world.revisions[0]["version_id"]
    async with world.db.sessions.begin() as session:
        version = await registry.find_version(
            session,
            parse_id("tenant", world.tenant),
            parse_id("adapter_version", canary_version),
            to_change=True,
        )
        assert version is not None
        starting = asyncio.create_task(
            world.stand.admin.post(f"{world.path}/{rollout['id']}/start")
        )
        await _waits(starting)
        version.status = "retired"
    refused = error_of(await starting, 409, "conflict")
    assert refused["param"] == "canary"
    assert "is retired" in refused["message"]
