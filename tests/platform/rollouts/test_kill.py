"""kill -9 of worker and control API in every state and transition, under traffic through a real gateway.

Each killed worker is followed by another one: the rollout goes on, exactly once. No request fails for it, every
request is on the side that its subject has, and the books hold.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from loraplex_platform.gateway.app import open_gateway
from loraplex_platform.ids import parse_id
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.rollouts.assignment import assign, subject_of
from sqlalchemy import text

from tests.platform.control.stand import ADMIN_KEY, Stand
from tests.platform.control.test_process import MODULE, environment
from tests.platform.gateway.stand import eventually, serving
from tests.platform.gateway.stand import settings_for as gateway_settings
from tests.platform.rollouts.stand import ERRORS_ONLY, MODEL, World, canary, shadow
from tests.platform.worker.test_main import worker
from tests.support.fake_engine import Script
from tests.support.metering import run_sql
from tests.support.postgres import serving_url

# Processes start here, perhaps on cores that others use.
DEADLINE_S = 120.0
# Of a few nothing is decided but what is blatant.
NUM_USERS = 60
STEPS = [shadow(10_000), canary(4000), canary(6000)]


@dataclass
class Traffic:
    """Requests of many users, one after another, until it is stopped."""

    url: str
    key: str
    failed: list[str] = field(default_factory=list)
    count: int = 0

    async def run(self) -> None:
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60) as client:
            while True:
                body = {
                    "model": MODEL,
                    "messages": [{"role": "user", "content": "Hi"}],
                    "max_tokens": 4,
                    "user": f"user-{self.count % NUM_USERS}",
                }
                answer = await client.post("/v1/chat/completions", json=body)
                self.count += 1
                if answer.status_code != 200:
                    self.failed.append(answer.text)
                await asyncio.sleep(0.01)


@dataclass
class Scene:
    """A world under traffic, and processes that may be killed."""

    world: World
    db_url: str
    folder: Path
    traffic: Traffic
    num_workers: int = 0

    def worker_settings(self, failpoint: str | None) -> dict[str, str]:
        stand = self.world.stand
        settings = {
            "database_url": serving_url(self.db_url),
            "redis_url": stand.redis_url,
            "rollout_interval_s": "0.05",
        }
        if failpoint is not None:
            settings |= {"failpoint": f"{failpoint}:kill", "allow_failpoints": "1"}
        return settings

    async def worker_dies(self, failpoint: str) -> None:
        """A worker that kills itself there."""
        self.num_workers += 1
        folder = self.folder / f"w{self.num_workers}"
        folder.mkdir()
        with worker(folder, **self.worker_settings(failpoint)) as process:
            await eventually(
                lambda: process.poll() is not None, f"dead at {failpoint}", deadline_s=DEADLINE_S
            )
            assert process.returncode == -signal.SIGKILL, (folder / "log").read_text()[-2000:]

    @asynccontextmanager
    async def working(self, count: int = 1) -> AsyncIterator[None]:
        """Workers that live for as long as the block lasts."""
        async with AsyncExitStack() as stack:
            for _ in range(count):
                self.num_workers += 1
                folder = self.folder / f"w{self.num_workers}"
                folder.mkdir()
                stack.enter_context(worker(folder, **self.worker_settings(None)))
            yield

    async def place(self, rollout_id: str) -> tuple[str, int | None]:
        found = await self.world.read(rollout_id)
        return found["state"], found["step"]

    async def reaches(self, rollout_id: str, state: str) -> None:
        async def is_there() -> bool:
            return (await self.place(rollout_id))[0] == state

        await eventually(is_there, state, deadline_s=DEADLINE_S)

    async def canary_fails(self, rollout_id: str, count: int) -> None:
        """The engine fails in what the canary answers, until so many have seen it."""
        digest = self.world.revisions[0]["digest"]
        self.world.stand.engine.script_for = lambda generate: (
            Script(error_after=1) if generate.adapter_digest == digest else Script()
        )
        await eventually(
            lambda: len(self.traffic.failed) >= count, "failures", deadline_s=DEADLINE_S
        )

    async def check(self, rollout_id: str, *, has_failures: bool = False) -> None:
        """Nothing failed, everybody was on their side, and the books hold."""
        assert has_failures or self.traffic.failed == []
        rollout = await self.world.read(rollout_id)
        number_of = {
            "stable": rollout["stable_revision_id"],
            "canary": rollout["canary_revision_id"],
        }
        async with self.world.db.sessions() as session:
            salt = await session.scalar(
                text("select salt from rollouts where id = :id"),
                {"id": parse_id("rollout", rollout_id)},
            )
            rows = (
                await session.execute(
                    text(
                        "select arm, rollout_step, subject_key, revision_id from requests"
                        " where rollout_id = :id and kind = 'user'"
                    ),
                    {"id": parse_id("rollout", rollout_id)},
                )
            ).all()
        customer = self.world.customer
        subjects = {
            found.subject_key: found
            for found in (
                assign(
                    salt,
                    subject_of(
                        "user",
                        tenant_id=customer.tenant_id,
                        key_id=customer.key_id,
                        user=f"user-{idx}",
                    ),
                )
                for idx in range(NUM_USERS)
            )
        }
        assert rows
        for arm, step, subject_key, revision_id in rows:
            weight = rollout["steps"][step].get("weight_bp", 0)
            assert arm == ("canary" if subjects[subject_key].is_canary(weight) else "stable")
            assert parse_id("deployment_revision", number_of[arm]) == revision_id


@pytest.fixture
async def scene(db_url: str, redis_url: str, short_tmp_path: Path) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        stand = await enter(Stand.open(db_url, redis_url, short_tmp_path))
        world = await World.make(stand)
        (short_tmp_path / "gw").mkdir()
        settings = gateway_settings(db_url, redis_url, short_tmp_path / "gw")
        gateway = await enter(open_gateway(settings))
        url = await enter(serving(gateway))
        await eventually(lambda: gateway.router.num_ready == 1, "the engine")
        traffic = Traffic(url, world.customer.secret)
        task = asyncio.create_task(traffic.run())
        try:
            yield Scene(world, db_url, short_tmp_path, traffic)
            assert not task.done(), task.result()
            assert traffic.count > 50
        finally:
            task.cancel()
            await asyncio.wait([task])
        await eventually(lambda: gateway.copying.num_pending == 0, "no copies", deadline_s=60)
        # What killed workers had asked is the sweeper's: their leases run out.
        await run_sql(
            world.db,
            "update requests set lease_until = now() - interval '1 min' where state = 'reserved'",
        )
        scene = Scene(world, db_url, short_tmp_path, traffic, num_workers=90)
        async with scene.working():

            async def is_closed() -> bool:
                identity = (await check_invariants(world.db.sessions)).identity
                return not identity.pending_requests and not identity.unlanded

            await eventually(is_closed, "the books are closed", deadline_s=DEADLINE_S)
        await world.check_books()


GATE = {**ERRORS_ONLY, "error_rate": {"max_increase": 0.4, "min_requests": 20}}


@pytest.mark.slow
async def test_killed_workers_lose_no_transition_and_double_none(scene: Scene) -> None:
    rollout = await scene.world.started(steps=STEPS, gate=GATE, sticky_by="user")
    name = rollout["id"]

    await scene.worker_dies("rollout_claimed")
    assert await scene.place(name) == ("evaluating", None)
    await scene.worker_dies("inside_transition")
    assert await scene.place(name) == ("evaluating", None)
    await scene.worker_dies("after_transition")
    assert await scene.place(name) == ("shadow", 0)
    await scene.worker_dies("inside_transition")
    assert await scene.place(name) == ("shadow", 0)
    await scene.worker_dies("after_transition")
    assert await scene.place(name) == ("canary", 1)
    await scene.worker_dies("rollout_looked")
    async with scene.working(2):
        await scene.reaches(name, "promoted")

    kinds = [kind for kind in await scene.world.kinds(name) if kind not in ("hold", "verdict")]
    assert kinds == ["created", "started", "step", "step", "step", "promoted"]
    assert await scene.world.current_number() == 1
    await scene.check(name)


@pytest.mark.slow
async def test_a_worker_killed_while_it_aborts_aborts_once(scene: Scene) -> None:
    rollout = await scene.world.started(
        steps=[canary(4000, hold_s=3600)], gate=GATE, sticky_by="user"
    )
    name = rollout["id"]
    async with scene.working():
        await scene.reaches(name, "canary")
    await scene.canary_fails(name, 40)

    await scene.worker_dies("inside_transition")
    assert (await scene.place(name))[0] == "canary"
    await scene.worker_dies("after_transition")
    assert (await scene.place(name))[0] == "aborted"
    async with scene.working():
        await asyncio.sleep(1)
    assert (await scene.world.kinds(name)).count("aborted") == 1
    assert await scene.world.current_number() == 2
    await scene.check(name, has_failures=True)
    # From the abort on everybody has the stable revision again.
    failures = len(scene.traffic.failed)
    until = scene.traffic.count + 2 * NUM_USERS
    await eventually(lambda: scene.traffic.count > until, "traffic", deadline_s=DEADLINE_S)
    assert len(scene.traffic.failed) == failures


@asynccontextmanager
async def control(scene: Scene, failpoint: str) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    """A control API of its own that kills itself there."""
    folder = scene.folder / f"c-{failpoint}"
    folder.mkdir()
    (folder / "model").symlink_to(scene.folder / "model")
    port_file = folder / "port"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        MODULE,
        f"--port-file={port_file}",
        env=environment(
            scene.db_url,
            scene.world.stand.redis_url,
            folder,
            LORAPLEX_FAILPOINT=f"{failpoint}:kill",
            LORAPLEX_ALLOW_FAILPOINTS="1",
            LORAPLEX_STORE_URL=f"file://{scene.folder / 'store'}",
            PYTHONPATH=os.environ.get("PYTHONPATH", ""),
        ),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await eventually(port_file.exists, "the control API", deadline_s=DEADLINE_S)
        url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


# How a rollout gets to where the verb can be done, and where the verb takes it.
VERBS = {
    "start": ("draft", "evaluating", "started"),
    "pause": ("canary", "canary", "paused"),
    "promote": ("canary", "promoted", "promoted"),
    "abort": ("canary", "aborted", "aborted"),
    "rollback": ("promoted", "rolled_back", "rolled_back"),
}
_FAST = ("promote",)


@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
@pytest.mark.parametrize(
    "verb",
    [verb if verb in _FAST else pytest.param(verb, marks=pytest.mark.slow) for verb in VERBS],
)
async def test_a_killed_control_api_has_done_all_of_it_or_nothing(
    scene: Scene, verb: str, point: str
) -> None:
    before, after, kind = VERBS[verb]
    world = scene.world
    rollout = await world.made(steps=[canary(4000, hold_s=3600)], gate=GATE, sticky_by="user")
    name = rollout["id"]
    if before != "draft":
        await world.act(name, "start")
        await world.look()
    if before == "promoted":
        await world.act(name, "promote")
    was = await scene.place(name)
    key = {"idempotency-key": f"{verb}-{point}-once"}
    async with control(scene, point) as (process, client):
        with pytest.raises(httpx.TransportError):
            await client.post(f"{world.path}/{name}/{verb}", headers=key)
        assert await process.wait() == -signal.SIGKILL

    if point == "before_commit":
        assert await scene.place(name) == was
        assert kind not in await world.kinds(name)
        await world.act(name, verb)
    else:
        # Whoever asks again with the same key hears what was done, and it is not done again.
        again = await world.act(name, verb, headers=key)
        assert again["state"] == after
    assert (await scene.place(name))[0] == after
    assert (await world.kinds(name)).count(kind) == 1
    assert await world.current_number() == (1 if after == "promoted" else 2)
    if before == "canary":
        await eventually(lambda: scene.traffic.count > 60, "traffic")
        await scene.check(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", ["rollout_claimed", "rollout_looked", "inside_transition", "after_transition"]
)
@pytest.mark.parametrize("ending", ["promoted", "aborted"])
async def test_every_transition_at_every_point(scene: Scene, ending: str, point: str) -> None:
    steps = STEPS if ending == "promoted" else [shadow(10_000), canary(4000, hold_s=3600)]
    rollout = await scene.world.started(steps=steps, gate=GATE, sticky_by="user")
    name = rollout["id"]
    for _ in range(20):
        state, _step = await scene.place(name)
        if state == ending:
            break
        if ending == "aborted" and state == "canary":
            await scene.canary_fails(name, 40)
        await scene.worker_dies(point)
        if point != "after_transition":
            # Nothing was done; somebody has to, before the next one dies.
            was = await scene.place(name)
            async with scene.working():

                async def has_moved(was: tuple[str, int | None] = was) -> bool:
                    return await scene.place(name) != was

                await eventually(has_moved, "the next step", deadline_s=DEADLINE_S)
    assert (await scene.place(name))[0] == ending
    kinds = [kind for kind in await scene.world.kinds(name) if kind not in ("hold", "verdict")]
    assert kinds == ["created", "started", *["step"] * len(steps), ending]
    await scene.check(name, has_failures=ending == "aborted")
