"""Adapters that every replica keeps in memory: desired state, and where the fleet is not so."""

from __future__ import annotations

from typing import Any

import pytest
from loraplex_platform.db import AuditLog
from loraplex_platform.fleet import engines
from sqlalchemy import select

from tests.platform.control.stand import BASE, Stand, announce, error_of
from tests.platform.control.test_revisions import add_build

FLEET = "/admin/v1/fleet"


async def drift_of(stand: Stand) -> dict[str, Any]:
    answer = await stand.admin.get(f"{FLEET}/drift")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_a_resident_version_is_kept_shown_and_let_go(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    version_id = await stand.version(tenant["id"])
    path = f"{FLEET}/residency/{version_id}"

    made = await stand.admin.put(path, json={"reason": "launch"})

    assert made.status_code == 200, made.text
    digest = made.json()["digest"]
    assert made.json()["replicas"] == [
        {"replica_id": "fake-0", "pinned": [digest], "refusal": None, "message": None}
    ]
    assert stand.engine.pinned == {digest}
    [listed] = (await stand.admin.get(f"{FLEET}/residency")).json()["data"]
    assert (listed["adapter_name"], listed["version"], listed["reason"]) == (
        "capitals",
        1,
        "launch",
    )
    drift = await drift_of(stand)
    assert drift["has_drift"] is False
    assert drift["replicas"][0]["desired"] == [digest]
    assert drift["replicas"][0]["in_memory"] == [digest]

    gone = await stand.admin.delete(path)

    assert gone.json()["replicas"][0]["pinned"] == []
    assert stand.engine.pinned == frozenset()
    error_of(await stand.admin.delete(path), 404, "not_found")
    error_of(
        await stand.admin.put(f"{FLEET}/residency/ver_x", json={"reason": "x"}), 404, "not_found"
    )
    error_of(await stand.admin.put(path, json={}), 400, "invalid_request")
    async with stand.db.sessions() as session:
        is_ours = AuditLog.action.like("resident_adapter.%")
        rows = list(await session.scalars(select(AuditLog).where(is_ours).order_by(AuditLog.id)))
    assert [(row.action, row.detail["digest"]) for row in rows] == [
        ("resident_adapter.put", digest),
        ("resident_adapter.delete", digest),
    ]


async def test_content_of_two_tenants_stays_until_neither_wants_it(stand: Stand) -> None:
    paths = []
    for slug in ("acme", "globex"):
        tenant = await stand.tenant(slug)
        paths.append(f"{FLEET}/residency/{await stand.version(tenant['id'])}")
        await stand.admin.put(paths[-1], json={"reason": slug})
    assert len(stand.engine.pinned) == 1

    await stand.admin.delete(paths[0])
    assert len(stand.engine.pinned) == 1
    await stand.admin.delete(paths[1])
    assert stand.engine.pinned == frozenset()


async def test_what_every_replica_refuses_is_not_desired(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"{FLEET}/residency/{await stand.version(tenant['id'])}"
    stand.engine.pin_refusal = "too_many_pins"

    refusal = error_of(await stand.admin.put(path, json={"reason": "x"}), 409, "conflict")

    assert refusal["message"].startswith("fake-0: ")
    assert (await stand.admin.get(f"{FLEET}/residency")).json()["data"] == []


async def test_without_a_replica_that_answers_it_is_desired_and_drift(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "PIN_TIMEOUT_S", 0.05)
    monkeypatch.setattr(engines, "STATS_TIMEOUT_S", 0.05)
    monkeypatch.setattr(engines, "FRESH_S", 0.0)
    tenant = await stand.tenant("acme")
    path = f"{FLEET}/residency/{await stand.version(tenant['id'])}"
    stand.engine.is_mute = True

    made = await stand.admin.put(path, json={"reason": "x"})

    assert made.status_code == 200
    assert made.json()["replicas"][0]["refusal"] == "unreachable"
    drift = await drift_of(stand)
    assert drift["has_drift"] is True
    assert [item["answers"] for item in drift["replicas"]] == [False]


async def test_drift_tells_what_is_missing_why_and_since_when(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    version_id = await stand.version(tenant["id"])
    made = await stand.admin.put(f"{FLEET}/residency/{version_id}", json={"reason": "x"})
    digest = made.json()["digest"]

    stand.engine.pin_failures = {digest: "its files are not what the digest names"}
    stray, own = "sha256:" + "b" * 64, "sha256:" + "c" * 64
    stand.engine.pinned |= {stray, own}
    stand.engine.pinned_at_start = frozenset({own})

    [replica] = (await drift_of(stand))["replicas"]
    [missing] = replica["missing"]
    assert missing["reason"] == "its files are not what the digest names"
    assert (missing["version_id"], missing["is_pinned"]) == (version_id, True)
    assert missing["since"] >= made.json()["created_at"]
    assert replica["extra"] == [stray]
    stand.engine.pinned = frozenset()  # as after a restart
    stand.engine.pin_failures = {}
    [missing] = (await drift_of(stand))["replicas"][0]["missing"]
    assert (missing["reason"], missing["is_pinned"]) == (None, False)


async def test_a_build_that_something_names_and_nobody_runs_is_drift(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    build = await add_build(stand)
    path = f"/admin/v1/tenants/{tenant['id']}/deployments/support"
    body = {"version_id": None, "engine_build_id": build}
    deployed = (await stand.admin.put(path, json=body)).json()

    drift = await drift_of(stand)

    [missing] = drift["builds"]
    assert missing["engine_build_id"] == build
    assert missing["wanted_by"] == [
        {
            "tenant_id": tenant["id"],
            "deployment": "support",
            "revision_id": deployed["revision"]["id"],
            "wanted_as": "current",
        }
    ]
    assert (drift["has_drift"], drift["replicas"][0]["weights"]) == (True, None)


async def test_other_weights_than_the_base_deployment_names_are_drift(stand: Stand) -> None:
    announce(stand.redis_url, stand.engine, base_revision="sha256:other")
    await stand.app.state.context.fleet._router.refresh()

    [replica] = (await drift_of(stand))["replicas"]

    assert replica["weights"]["serves"] == "sha256:other"
    base = (await stand.admin.get(f"/admin/v1/deployments/{BASE}")).json()["revision"]
    assert replica["weights"]["named"] == base["base_revision"]
