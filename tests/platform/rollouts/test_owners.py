"""Whose rollouts: members of a tenant by their role, the platform's own, and versions that someone retires meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import httpx
import pytest
from loraplex_platform.audit.service import SYSTEM
from loraplex_platform.db.session import Database
from loraplex_platform.ids import format_id, parse_id
from loraplex_platform.registry import retirement
from loraplex_platform.rollouts import service
from loraplex_platform.rollouts.schemas import NewRollout
from sqlalchemy import text

from tests.platform.control.people import member
from tests.platform.control.stand import BASE, error_of
from tests.platform.control.test_revisions import add_build
from tests.platform.gateway.stand import eventually
from tests.platform.rollouts.stand import ERRORS_ONLY, MODEL, NO_GATES, World, canary
from tests.support.metering import run_sql

BODY = {"deployment": MODEL, "canary": 1, "gate": NO_GATES, "steps": [canary(500, hold_s=3600)]}


@pytest.mark.parametrize("role", ["owner", "admin", "developer"])
async def test_a_builder_of_the_tenant_does_all_of_it(world: World, role: str) -> None:
    client = await member(world.stand, world.tenant, role, f"{role}@example.com")

    async def act(name: str, verb: str) -> dict[str, Any]:
        return await world.call("POST", f"/{name}/{verb}", client=client)

    first = await world.call("POST", status=201, client=client, json=BODY)
    name = first["id"]
    changed = await world.call("PATCH", f"/{name}", client=client, json={"sticky_by": "user"})
    assert changed["sticky_by"] == "user"
    assert (await act(name, "start"))["state"] == "evaluating"
    await world.look()
    assert (await act(name, "pause"))["is_paused"] is True
    assert (await act(name, "resume"))["is_paused"] is False
    assert (await act(name, "promote"))["state"] == "promoted"
    assert await world.current_number() == 1
    assert (await act(name, "rollback"))["state"] == "rolled_back"
    assert await world.current_number() == 2

    second = await world.call("POST", status=201, client=client, json=BODY)
    await act(second["id"], "start")
    await world.look()
    assert (await act(second["id"], "abort"))["state"] == "aborted"
    listed = await world.call("GET", client=client)
    assert {one["id"] for one in listed["data"]} == {name, second["id"]}
    told = await world.call("GET", f"/{name}/events", client=client)
    assert told["data"][0]["actor"] == first["created_by"] != "system"


@pytest.mark.parametrize("role", ["billing", "viewer"])
async def test_who_builds_nothing_may_only_look(world: World, role: str) -> None:
    client = await member(world.stand, world.tenant, role, f"{role}@example.com")
    rollout = await world.stepping(steps=[canary(500, hold_s=3600)])
    name = rollout["id"]
    error_of(await client.post(world.path, json=BODY), 403, "permission_denied")
    for verb in ("start", "pause", "resume", "promote", "abort", "rollback"):
        error_of(await client.post(f"{world.path}/{name}/{verb}"), 403, "permission_denied")
    error_of(await client.patch(f"{world.path}/{name}", json={}), 403, "permission_denied")
    for path in ("", "/events", "/metrics"):
        await world.call("GET", f"/{name}{path}", client=client)
    now = await world.read(name)
    assert (now["state"], now["version"]) == ("canary", rollout["version"])


async def test_what_another_tenant_has_is_not_there(world: World) -> None:
    theirs = await World.make(world.stand, "globex")
    their_rollout = await theirs.stepping(steps=[canary(500, hold_s=3600)])
    client = await member(world.stand, world.tenant, "owner", "owner@example.com")
    deployment = await world.stand.admin.get(
        f"/admin/v1/tenants/{theirs.tenant}/deployments/{MODEL}"
    )
    for fields, param in (
        ({"canary": theirs.revisions[0]["id"]}, "canary"),
        ({"stable": theirs.revisions[1]["id"]}, "stable"),
        ({"deployment": deployment.json()["id"]}, "deployment"),
    ):
        answer = await client.post(world.path, json={**BODY, **fields})
        assert error_of(answer, 404, "not_found")["param"] == param
    one = f"/{their_rollout['id']}"
    for path in (f"{world.path}{one}", f"{world.path}{one}/metrics", f"{world.path}{one}/events"):
        error_of(await client.get(path), 404, "not_found")
    error_of(await client.post(f"{world.path}{one}/abort"), 404, "not_found")
    assert (await client.get(f"{theirs.path}{one}")).status_code in (403, 404)
    assert (await client.post(f"{theirs.path}{one}/abort")).status_code in (403, 404)
    assert (await theirs.read(their_rollout["id"]))["state"] == "canary"


# ---------------------------------------------------------------------------- the platform's own


async def _of_platform(
    client: httpx.AsyncClient, method: str, path: str = "", status: int = 200, **options: Any
) -> dict[str, Any]:
    answer = await client.request(method, f"/admin/v1/rollouts{path}", **options)
    assert answer.status_code == status, (answer.status_code, answer.text)
    return dict(answer.json())


@pytest.mark.parametrize("changed", ["params", "engine_build"])
@pytest.mark.parametrize("ending", ["promoted", "aborted"])
async def test_the_base_models_own_rollout_is_judged_by_tenants_requests(
    world: World, changed: str, ending: str
) -> None:
    admin = world.stand.admin
    before = (await admin.get(f"/admin/v1/deployments/{BASE}")).json()["revision"]
    body: dict[str, Any] = {"version_id": None, "params": {"system_prompt": "Be brief."}}
    if changed == "engine_build":
        body = {"version_id": None, "engine_build_id": await add_build(world.stand)}
    added = await admin.post(f"/admin/v1/deployments/{BASE}/revisions", json=body)
    assert added.status_code in (200, 201), added.text
    revision = added.json()

    made = await _of_platform(
        admin,
        "POST",
        status=201,
        json={
            "deployment": BASE,
            "canary": revision["id"],
            "gate": ERRORS_ONLY,
            "steps": [canary(500)],
        },
    )
    name = made["id"]
    wanted = {"params": ["system_prompt"], "engine_build": ["engine_build"]}
    assert (made["tenant_id"], made["changes"]) == (None, wanted[changed])
    await _of_platform(admin, "POST", f"/{name}/start")
    await world.look()
    assert (await _of_platform(admin, "GET", f"/{name}"))["state"] == "canary"

    # A tenant's own requests, reserved in its own books.
    await world.play(name, "stable", 60)
    ids = await world.play(name, "canary", 60, error=ending == "aborted")
    await world.look()
    ended = await _of_platform(admin, "GET", f"/{name}")
    assert ended["state"] == ending
    now = (await admin.get(f"/admin/v1/deployments/{BASE}")).json()["revision"]
    assert now["id"] == (revision if ending == "promoted" else before)["id"]
    kinds = await world.kinds(name)
    assert (kinds[:3], kinds[-1]) == (["created", "started", "step"], ending)
    async with world.db.sessions() as session:
        owners = await session.scalars(
            text("select distinct tenant_id from requests where id = any(:ids)"), {"ids": ids}
        )
        assert list(owners) == [world.customer.tenant_id]
        told = await session.scalars(
            text(
                "select payload from outbox where topic in ('rollout', 'alert')"
                " and payload ->> 'rollout_id' = :name"
            ),
            {"name": name},
        )
        assert {one.get("tenant_id") for one in told} == {None}
    # Whose traffic it is judged by does not see it.
    owner = await member(world.stand, world.tenant, "owner", "owner@example.com")
    assert (await owner.get(f"/admin/v1/rollouts/{name}")).status_code == 403
    await world.call("GET", f"/{name}", 404, client=owner)
    if ending == "promoted":
        await _of_platform(admin, "POST", f"/{name}/rollback")
        now = (await admin.get(f"/admin/v1/deployments/{BASE}")).json()["revision"]
        assert now["id"] == before["id"]
    await world.check_books()


# ---------------------------------------------------------------------------- retired meanwhile


async def _waits(db: Database, call: Awaitable[httpx.Response]) -> asyncio.Future[httpx.Response]:
    """Under way, and held up by somebody's lock."""
    task = asyncio.ensure_future(call)

    async def is_held() -> bool:
        assert not task.done(), task.result().text
        async with db.sessions() as session:
            found = await session.scalar(text("select count(*) from pg_locks where not granted"))
        return bool(found)

    await eventually(is_held, "it waits")
    return task


async def _version_path(world: World, number: int) -> tuple[str, str, str]:
    """Path, adapter id and version id of a revision's version."""
    version = world.revisions[0 if number == 1 else 1]["version_id"]
    async with world.db.sessions() as session:
        adapter = await session.scalar(
            text("select adapter_id from adapter_versions where id = :id"),
            {"id": parse_id("adapter_version", version)},
        )
    name = format_id("adapter", adapter)
    return f"/admin/v1/tenants/{world.tenant}/adapters/{name}/versions/{version}", name, version


async def test_a_version_is_not_retired_while_a_rollout_comes_to_name_it(world: World) -> None:
    path, _, _ = await _version_path(world, 1)
    async with world.db.sessions.begin() as session:
        wanted = NewRollout.model_validate(BODY)
        made = await service.create(
            session, SYSTEM, world.customer.tenant_id, wanted, is_operator=True
        )
        retire = await _waits(world.db, world.stand.admin.post(f"{path}/retire"))
        rollout_id = made.id
    answer = await retire
    assert "rollout" in error_of(answer, 409, "in_use")["message"]

    # And a draft holds it until it has ended.
    await world.act(format_id("rollout", rollout_id), "abort")
    assert (await world.stand.admin.post(f"{path}/retire")).status_code == 200


@pytest.mark.parametrize("verb", ["create", "start", "rollback"])
async def test_what_is_being_retired_is_waited_for_and_then_refused(
    world: World, verb: str
) -> None:
    number = 2 if verb == "rollback" else 1
    path = ""
    if verb == "rollback":
        rollout = await world.started(gate=NO_GATES)
        await world.act(rollout["id"], "promote")
        path = f"/{rollout['id']}/rollback"
    elif verb == "start":
        path = f"/{(await world.made(gate=NO_GATES))['id']}/start"
    _, _, version_id = await _version_path(world, number)
    async with world.db.sessions.begin() as session:
        tenant_id = world.customer.tenant_id
        adapter_id = await session.scalar(
            text("select adapter_id from adapter_versions where id = :id"),
            {"id": parse_id("adapter_version", version_id)},
        )
        version = await retirement.get_version(
            session, tenant_id, adapter_id, version_id, to_change=True
        )
        if verb == "start":
            # A draft is in the way of a retirement, so only a hand past the service retires it.
            version.status = "retired"
        else:
            await retirement.retire(session, SYSTEM, version)
        await session.flush()
        call = world.stand.admin.post(
            f"{world.path}{path}", json=BODY if verb == "create" else None
        )
        asked = await _waits(world.db, call)
    refused = error_of(await asked, 409, "conflict")
    assert refused["param"] == ("stable" if verb == "rollback" else "canary")
    assert "is retired" in refused["message"]
    await run_sql(world.db, "update adapter_versions set status = 'ready'")
    if verb != "create":
        await world.call("POST", path)
