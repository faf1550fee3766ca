"""Alerts: kept when they are told, listed page by page, to whom they concern and nobody else."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from loraplex_platform.db import Alert, OutboxMessage
from loraplex_platform.ids import format_id, uuid7
from loraplex_platform.metering import service as metering
from loraplex_platform.outbox import queries as outbox
from loraplex_platform.outbox.service import enqueue
from sqlalchemy import select

from tests.platform.control.people import member
from tests.platform.control.stand import Stand, error_of
from tests.support.command_line import commands
from tests.support.limits import set_limit
from tests.support.metering import add_customer, reservation, run_sql, settlement

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database

ALERTS = "/admin/v1/alerts"
LATER = 2_000_000_000  # 2033-05-18 03:33:20 UTC


@pytest.fixture
async def stand(db_url: str, redis_url: str, short_tmp_path: Path) -> AsyncIterator[Stand]:
    async with Stand.open(db_url, redis_url, short_tmp_path) as opened:
        yield opened


def uuid_of(id_: str) -> UUID:
    return UUID(id_.partition("_")[2])


def pin_expired(tenant_id: str, deployment: str) -> dict[str, Any]:
    return {
        "kind": "pin_expired",
        "tenant_id": str(uuid_of(tenant_id)),
        "deployment": deployment,
        "deployment_id": str(uuid7()),
        "pinned_revision_id": str(uuid7()),
        "current_revision_id": str(uuid7()),
        "until": LATER,
        "reason": "the audit",
    }


OF_EVERY_KIND: dict[str, dict[str, Any]] = {
    "pin_expiring": pin_expired(f"ten_{'0' * 32}", "m"),
    "eval_changed": {
        "run_id": str(uuid7()),
        "before_run_id": str(uuid7()),
        "revision_id": str(uuid7()),
        "changes": [{"kind": "broken", "count": 2, "cases": ["a", "b"]}],
    },
    "rollout_hold": {
        "rollout_id": format_id("rollout", uuid7()),
        "deployment": "m",
        "message": "w",
    },
    "rollout_aborted": {"rollout_id": "rol_odd", "deployment": "m", "message": "errors"},
    "webhook_failed": {"webhook_id": str(uuid7()), "url": "https://x.example/s", "reason": "410"},
    "limit_threshold": {
        "limit_id": str(uuid7()),
        "scope_kind": "tenant",
        "metric": "cost",
        "period": "month",
        "window_s": 0,
        "is_hard": True,
        "value": str(25 * 10**12),
        "used": str(25 * 10**12),
        "pct": 100,
    },
}


async def tell(stand: Stand, name: str, payload: dict[str, Any]) -> None:
    async with stand.db.transaction() as session:
        assert await enqueue(session, "alert", name, payload)


async def test_a_threshold_that_is_passed_is_in_the_list_without_any_webhook(db: Database) -> None:
    customer = await add_customer(db)
    limit_id = await set_limit(db, customer, "tokens_total", "50", hard=False, alert_pct=[50])
    wanted = reservation(customer)
    await metering.reserve(db.sessions, wanted)

    await metering.settle(db.sessions, settlement(wanted.request_id))

    async with db.sessions() as session:
        [alert] = (await session.scalars(select(Alert))).all()
        told = select(OutboxMessage).where(OutboxMessage.topic == "alert")
        [message] = (await session.scalars(told)).all()
    assert (alert.kind, alert.tenant_id) == ("limit_threshold", customer.tenant_id)
    assert alert.payload == message.payload
    assert alert.payload["limit_id"] == str(limit_id)
    # Its id is of its time: lists go by it.
    assert abs((alert.id.int >> 80) / 1000 - alert.at.timestamp()) < 10
    assert alert.id.version == 7


async def test_alerts_stay_when_their_message_has_gone(db: Database) -> None:
    async with db.transaction() as session:
        await enqueue(session, "alert", "one", {"kind": "webhook_failed"})
        await enqueue(session, "invoice", "two", {"kind": "invoice_issued"})
    await run_sql(db, "delete from outbox")

    async with db.sessions() as session:
        kept = (await session.scalars(select(Alert.kind))).all()
        waiting = await outbox.backlog(session)

    assert (list(kept), waiting) == (["webhook_failed"], [])


async def test_every_kind_is_said_in_words_in_the_tenants_own_time(stand: Stand) -> None:
    body = {"slug": "acme", "billing_tz": "Europe/Berlin"}
    tenant = (await stand.admin.post("/admin/v1/tenants", json=body)).json()
    tenant_uuid = str(uuid_of(tenant["id"]))
    for kind, payload in OF_EVERY_KIND.items():
        await tell(stand, kind, payload | {"kind": kind, "tenant_id": tenant_uuid})

    page = (await stand.admin.get(ALERTS, params={"tenant_id": tenant["id"]})).json()

    rows = {row["kind"]: row for row in page["data"]}
    assert list(rows) == list(reversed(OF_EVERY_KIND))
    assert {row["tenant_id"] for row in rows.values()} == {tenant["id"]}
    assert "2033-05-18 05:33:20 (Europe/Berlin)" in rows["pin_expiring"]["summary"]
    assert "the audit" in rows["pin_expiring"]["summary"]
    assert rows["pin_expiring"]["severity"] == "warning"
    assert "broken: 2 (a, b)" in rows["eval_changed"]["summary"]
    assert rows["limit_threshold"]["summary"] == (
        "100 % of the limit on spending per month of your organization is passed: 25.00 USD of 25.00 USD."
        " Requests over it are refused."
    )
    assert rows["limit_threshold"]["severity"] == "error"
    assert rows["limit_threshold"]["subjects"][0]["id"].startswith("lim_")
    assert rows["rollout_hold"]["subjects"][0]["id"] == OF_EVERY_KIND["rollout_hold"]["rollout_id"]
    assert rows["rollout_aborted"]["subjects"] == []  # an id that is none is not passed on
    # Whoever may read alerts need not be allowed to read webhooks.
    assert "x.example" not in json.dumps(rows)


async def test_pages_and_filters(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    for number in range(5):
        await tell(stand, str(number), pin_expired(tenant["id"], f"m{number}"))
    await tell(stand, "w", {"kind": "webhook_failed", "reason": "410"})

    first = (await stand.admin.get(ALERTS, params={"kind": "pin_expired", "limit": 3})).json()
    rest = await stand.admin.get(
        ALERTS, params={"kind": "pin_expired", "limit": 3, "after": first["last_id"]}
    )
    at = first["data"][0]["at"]
    later = await stand.admin.get(ALERTS, params={"start_time": at + 60})
    before = await stand.admin.get(ALERTS, params={"end_time": at + 60})
    odd = await stand.admin.get(ALERTS, params={"kind": "fire"})

    said = [row["summary"] for row in [*first["data"], *rest.json()["data"]]]
    assert ["m4" in said[0], "m3" in said[1], "m0" in said[4]] == [True] * 3
    assert (first["has_more"], rest.json()["has_more"], len(said)) == (True, False, 5)
    assert (len(later.json()["data"]), len(before.json()["data"])) == (0, 6)
    assert error_of(odd, 400, "invalid_request")["param"] == "kind"


@pytest.mark.parametrize("role", ["owner", "viewer"])
async def test_members_see_their_own_tenants_alerts_and_no_others(stand: Stand, role: str) -> None:
    mine, theirs = await stand.tenant("acme"), await stand.tenant("globex")
    await tell(stand, "a", pin_expired(mine["id"], "mine"))
    await tell(stand, "b", pin_expired(theirs["id"], "theirs"))
    await tell(stand, "c", {"kind": "webhook_failed", "reason": "410"})
    client = await member(stand, mine["id"], role, f"{role}@acme.example")

    own = (await client.get(ALERTS)).json()["data"]
    foreign = await client.get(ALERTS, params={"tenant_id": theirs["id"]})

    assert [row["tenant_id"] for row in own] == [mine["id"]]
    error_of(foreign, 404, "not_found")
    assert len((await stand.admin.get(ALERTS)).json()["data"]) == 3
    of_one = await stand.admin.get(ALERTS, params={"tenant_id": theirs["id"]})
    assert [row["tenant_id"] for row in of_one.json()["data"]] == [theirs["id"]]


@pytest.mark.parametrize("kind", sorted(OF_EVERY_KIND))
async def test_one_that_is_not_as_it_should_be_does_not_take_the_list_away(
    stand: Stand, kind: str
) -> None:
    whole = OF_EVERY_KIND[kind] | {"kind": kind}
    odd = [{"kind": kind}]
    for name in whole.keys() - {"kind"}:
        odd.append({other: value for other, value in whole.items() if other != name})
        odd += [whole | {name: value} for value in (None, {}, [1], "x", 10**30, -1, True)]
    for number, payload in enumerate(odd):
        await tell(stand, f"{kind}-{number}", payload)

    page = await stand.admin.get(ALERTS, params={"limit": 100})

    assert page.status_code == 200, page.text
    assert len(page.json()["data"]) == min(len(odd), 100)
    assert all(row["summary"] for row in page.json()["data"])


async def test_old_alerts_go_as_retention_says(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    await tell(stand, "a", pin_expired(tenant["id"], "m"))

    short = await stand.admin.put("/admin/v1/retention/alerts", json={"keep_days": 6})
    shown = await stand.admin.put("/admin/v1/retention/alerts", json={"keep_days": 7})

    error_of(short, 400, "invalid_request")
    assert shown.json()["keep_days"] == 7
    assert shown.json()["rows_due"] == 0


async def test_alerts_on_the_command_line(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    await tell(stand, "a", pin_expired(tenant["id"], "m\x1b[31m"))
    await tell(stand, "b", {"kind": "webhook_failed", "reason": "410"})

    async with commands(stand) as run:
        plain = await run("alerts")
        own = await run("alerts", "--tenant", "acme", "--since", "1h", "--json")
        none = await run("alerts", "--kind", "eval_changed")
        odd = await run("alerts", "--since", "soon")
        unknown = await run("alerts", "--kind", "fire")

    assert plain.code == own.code == none.code == 0, (plain, own, none)
    assert len(plain.out.splitlines()) == 2
    assert "\x1b" not in plain.out
    assert "webhook_failed" in plain.out
    [shown] = map(json.loads, own.out.splitlines())
    assert (shown["kind"], shown["tenant_id"]) == ("pin_expired", tenant["id"])
    assert none.out == ""
    assert odd.code != 0
    assert "7d" in odd.err
    assert unknown.code != 0
    assert "kind" in unknown.err
