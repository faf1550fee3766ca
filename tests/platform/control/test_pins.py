"""Pins: what stays at a revision, until when, and who is told when it is over."""

from __future__ import annotations

import time
from datetime import timedelta

from loraplex_platform.db import AuditLog, OutboxMessage
from loraplex_platform.registry.pins import PinWatch
from sqlalchemy import select

from tests.platform.control.people import member
from tests.platform.control.stand import BASE, Stand, error_of
from tests.platform.control.test_revisions import add_build
from tests.support.metering import run_sql


async def test_a_pin_is_set_shown_changed_and_ended(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}"
    support = f"{path}/deployments/support"
    first = (await stand.admin.put(support, json={"version_id": None})).json()["revision"]
    until = int(time.time()) + 86400 * 30
    body = {"revision_id": first["id"], "until": until, "reason": "audit"}

    made = await stand.admin.put(f"{support}/pin", json=body)

    assert made.status_code == 200, made.text
    pin = made.json()
    assert (pin["deployment"], pin["revision"], pin["until"]) == ("support", 1, until)
    assert (pin["state"], pin["problems"], pin["reason"]) == ("live", [], "audit")
    assert (await stand.admin.get(f"{support}/pin")).json() == pin
    assert (await stand.admin.get(f"{path}/pins")).json()["data"] == [pin]
    etag = made.headers["etag"]
    forever = {"revision_id": first["id"], "reason": "audit"}
    changed = await stand.admin.put(f"{support}/pin", json=forever, headers={"if-match": etag})
    assert changed.json()["until"] is None
    late = await stand.admin.put(f"{support}/pin", json=body, headers={"if-match": etag})
    assert "until" in error_of(late, 409, "version_conflict")["message"]
    assert (await stand.admin.delete(f"{support}/pin")).status_code == 204
    error_of(await stand.admin.get(f"{support}/pin"), 404, "not_found")
    async with stand.db.sessions() as session:
        is_ours = AuditLog.object_kind == "pin"
        rows = list(await session.scalars(select(AuditLog).where(is_ours).order_by(AuditLog.id)))
    assert [row.action for row in rows] == ["pin.put", "pin.put", "pin.delete"]


async def test_what_cannot_be_pinned_is_refused(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/deployments"
    first, other = [
        (await stand.admin.put(f"{path}/{name}", json={"version_id": None})).json()["revision"]
        for name in ("support", "sales")
    ]

    def body(**changes: object) -> dict[str, object]:
        return {"revision_id": first["id"], "reason": "audit"} | changes

    past = await stand.admin.put(f"{path}/support/pin", json=body(until=1))
    assert error_of(past, 400, "invalid_request")["param"] == "until"
    for reason in ("", "x" * 501, None):
        refused = await stand.admin.put(f"{path}/support/pin", json=body(reason=reason))
        assert error_of(refused, 400, "invalid_request")["param"] == "reason"
    foreign = await stand.admin.put(f"{path}/support/pin", json=body(revision_id=other["id"]))
    assert error_of(foreign, 404, "not_found")["param"] == "revision_id"
    error_of(await stand.admin.put(f"{path}/none/pin", json=body()), 404, "not_found")


async def test_each_tenant_pins_the_platforms_deployment_for_itself(stand: Stand) -> None:
    base = (await stand.admin.get(f"/admin/v1/deployments/{BASE}")).json()["revision"]
    tenants = [await stand.tenant(slug) for slug in ("acme", "globex")]
    owner = await member(stand, tenants[0]["id"], "owner", "owner@acme.example")
    path = f"/admin/v1/tenants/{tenants[0]['id']}"

    made = await owner.put(
        f"{path}/deployments/{BASE}/pin", json={"revision_id": base["id"], "reason": "audit"}
    )

    assert made.status_code == 200, made.text
    assert made.json()["is_platforms"] is True
    others = await stand.admin.get(f"/admin/v1/tenants/{tenants[1]['id']}/pins")
    assert others.json()["data"] == []


async def test_a_pin_to_what_nothing_runs_says_so(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/deployments/support"
    await stand.admin.put(path, json={"version_id": None})
    body = {"version_id": None, "engine_build_id": await add_build(stand)}
    revision = (await stand.admin.post(f"{path}/revisions", json=body)).json()

    made = await stand.admin.put(
        f"{path}/pin", json={"revision_id": revision["id"], "reason": "audit"}
    )

    assert made.json()["problems"] == ["build_not_running"]


async def test_its_end_is_told_a_week_and_a_day_before_and_when_it_comes(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/deployments/support"
    revision = (await stand.admin.put(path, json={"version_id": None})).json()["revision"]
    eight_days = int(time.time()) + 8 * 86400
    body = {"revision_id": revision["id"], "reason": "audit", "until": eight_days}
    await stand.admin.put(f"{path}/pin", json=body)
    counted: list[str] = []
    watch = PinWatch(stand.db.sessions, on_told=counted.append)
    told = []

    # Days go by: 8 are left, then 6, 5, 23 hours, 2 hours, none.
    for passed_h in (0, 48, 24, 97, 21, 3, 1):
        await run_sql(
            stand.db,
            "update pins set until = until - :passed, created_at = created_at - :passed,"
            " warned_at = warned_at - :passed",
            passed=timedelta(hours=passed_h),
        )
        told.append(await watch.run_once())

    assert told == [[], ["expiring"], [], ["expiring"], [], ["expired"], []]
    assert counted == ["expiring", "expiring", "expired"]
    async with stand.db.sessions() as session:
        messages = list(
            await session.scalars(
                select(OutboxMessage)
                .where(OutboxMessage.topic == "alert")
                .order_by(OutboxMessage.id)
            )
        )
        actions = list(
            await session.scalars(
                select(AuditLog.action).where(AuditLog.object_kind == "pin").order_by(AuditLog.id)
            )
        )
    assert [m.payload["kind"] for m in messages] == ["pin_expiring", "pin_expiring", "pin_expired"]
    assert {m.payload["deployment"] for m in messages} == {"support"}
    assert actions == ["pin.put", "pin.expiring", "pin.expiring", "pin.expired"]
    shown = (await stand.admin.get(f"{path}/pin")).json()
    assert shown["state"] == "expired"


async def test_a_pin_that_is_made_short_is_not_warned_of_at_once(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/deployments/support"
    revision = (await stand.admin.put(path, json={"version_id": None})).json()["revision"]
    until = int(time.time()) + 3600
    await stand.admin.put(
        f"{path}/pin", json={"revision_id": revision["id"], "reason": "x", "until": until}
    )

    assert await PinWatch(stand.db.sessions).run_once() == []


async def test_an_archived_deployments_pin_is_gone(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}"
    support = f"{path}/deployments/support"
    revision = (await stand.admin.put(support, json={"version_id": None})).json()["revision"]
    await stand.admin.put(f"{support}/pin", json={"revision_id": revision["id"], "reason": "audit"})

    await stand.admin.delete(support)

    assert (await stand.admin.get(f"{path}/pins")).json()["data"] == []
