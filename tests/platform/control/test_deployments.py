"""Deployments and their revisions."""

from __future__ import annotations

import asyncio

from loraplex_engine.protocol import PrefetchAdapter
from loraplex_platform.db import AuditLog, Deployment, DeploymentRevision
from loraplex_platform.gateway.queries import find_model
from loraplex_platform.ids import parse_id
from sqlalchemy import select

from tests.platform.control.stand import BASE, Stand, error_of


async def test_put_points_a_name_at_a_version_and_get_shows_it(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    version_id = await stand.version(tenant["id"])
    path = f"/admin/v1/tenants/{tenant['id']}/deployments"

    made = await stand.admin.put(f"{path}/capitals", json={"version_id": version_id})

    assert made.status_code == 200
    deployment = made.json()
    assert set(deployment) == {
        "object", "id", "tenant_id", "name", "base_model", "revision", "follow", "created_at",
        "updated_at",
    }  # fmt: skip
    assert deployment["base_model"] == BASE
    revision = deployment["revision"]
    assert (revision["number"], revision["version_id"]) == (1, version_id)
    assert revision["adapter_name"] == "capitals"
    assert revision["digest"].startswith("sha256:")
    assert (await stand.admin.get(f"{path}/capitals")).json() == deployment
    assert (await stand.admin.get(path)).json()["data"] == [deployment]
    prefetched = stand.engine.received_of(PrefetchAdapter)
    assert [m.adapter_digest for m in prefetched] == [revision["digest"]]  # type: ignore[union-attr]


async def test_each_content_is_a_revision_and_the_old_ones_stay(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    first, second = [await stand.version(tenant["id"], seed=seed) for seed in (0, 1)]
    path = f"/admin/v1/tenants/{tenant['id']}/deployments/capitals"

    numbers = []
    for version_id in (first, second, second, None, first):
        answer = await stand.admin.put(path, json={"version_id": version_id})
        assert answer.json()["revision"]["version_id"] == version_id
        numbers.append(answer.json()["revision"]["number"])

    assert numbers == [1, 2, 2, 3, 1]  # the same again is the same
    async with stand.db.sessions() as session:
        rows = await session.scalars(
            select(DeploymentRevision)
            .where(DeploymentRevision.tenant_id == parse_id("tenant", tenant["id"]))
            .order_by(DeploymentRevision.number)
        )
        assert [row.adapter_version_id is None for row in rows] == [False, False, True]
        audit = (
            await session.scalars(select(AuditLog).where(AuditLog.action == "deployment.put"))
        ).all()
    assert len([row for row in audit if row.tenant_id is not None]) == 4


async def test_puts_at_once_leave_one_deployment_and_whole_revisions(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    versions = [await stand.version(tenant["id"], seed=seed) for seed in (0, 1)]
    path = f"/admin/v1/tenants/{tenant['id']}/deployments/capitals"

    answers = await asyncio.gather(
        *(stand.admin.put(path, json={"version_id": versions[n % 2]}) for n in range(6))
    )

    assert {answer.status_code for answer in answers} == {200}
    async with stand.db.sessions() as session:
        [deployment] = (
            await session.scalars(select(Deployment).where(Deployment.tenant_id.is_not(None)))
        ).all()
        numbers = (
            await session.scalars(
                select(DeploymentRevision.number).where(
                    DeploymentRevision.deployment_id == deployment.id
                )
            )
        ).all()
    assert sorted(numbers) == list(range(1, len(numbers) + 1))


async def test_an_archived_name_is_gone_and_may_be_used_again(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/deployments"
    first = (await stand.admin.put(f"{path}/pirate", json={"version_id": None})).json()

    assert (await stand.admin.delete(f"{path}/pirate")).status_code == 204

    error_of(await stand.admin.get(f"{path}/pirate"), 404, "not_found")
    error_of(await stand.admin.delete(f"{path}/pirate"), 404, "not_found")
    assert (await stand.admin.get(path)).json()["data"] == []
    tenant_uuid = parse_id("tenant", tenant["id"])
    assert await find_model(stand.db.sessions, tenant_uuid, BASE, "pirate") is None
    again = (await stand.admin.put(f"{path}/pirate", json={"version_id": None})).json()
    assert again["id"] != first["id"]


async def test_the_gateway_sees_what_was_deployed_and_the_base(stand: Stand) -> None:
    tenant, other = await stand.tenant("acme"), await stand.tenant("globex")
    version_id = await stand.version(tenant["id"])
    path = f"/admin/v1/tenants/{tenant['id']}/deployments/capitals"
    deployed = (await stand.admin.put(path, json={"version_id": version_id})).json()
    tenant_uuid, other_uuid = (parse_id("tenant", t["id"]) for t in (tenant, other))

    mine = await find_model(stand.db.sessions, tenant_uuid, BASE, "capitals")
    theirs = await find_model(stand.db.sessions, other_uuid, BASE, "capitals")
    base = await find_model(stand.db.sessions, other_uuid, BASE, BASE)

    assert mine is not None
    assert mine.revision.adapter_digest == deployed["revision"]["digest"]
    assert theirs is None
    assert base is not None
    assert base.revision.adapter_digest is None


async def test_names_have_a_form_and_the_bases_is_taken(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/deployments"

    for name in ("-x", "a b", "é", "x" * 129, "%00", "=cmd"):
        refused = await stand.admin.put(f"{path}/{name}", json={"version_id": None})
        assert error_of(refused, 400, "invalid_request")["param"] == "name"
        assert (await stand.admin.get(f"{path}/{name}")).status_code in (400, 404)
    taken = await stand.admin.put(f"{path}/{BASE}", json={"version_id": None})
    assert error_of(taken, 409, "conflict")["param"] == "name"
    for body in ({}, {"version_id": 7}, {"version": "x"}, [], "x"):
        refused = await stand.admin.put(f"{path}/ok", json=body)
        error_of(refused, 400, "invalid_request")
