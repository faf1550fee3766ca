"""Limits over HTTP: set, list with use, change, remove; scheduling; explanations."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from loraplex_platform.ids import format_id, parse_id, uuid7
from loraplex_platform.metering import service
from loraplex_platform.quotas import queries
from loraplex_platform.quotas.effective import effective_limits
from loraplex_platform.quotas.records import LimitScopes
from loraplex_platform.rates.redis_client import DeadlineRedis, RedisAwayError
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from tests.platform.control.people import member
from tests.platform.control.stand import Stand, error_of
from tests.platform.rates.stand import World, claim, never
from tests.support.metering import Customer, reservation

LIMITS = "/admin/v1/limits"


async def customer_of(stand: Stand, slug: str = "acme") -> tuple[Customer, dict[str, str]]:
    """A tenant with a key, and the ids of both as the API shows them."""
    tenant = await stand.tenant(slug)
    key = (
        await stand.admin.post(f"/admin/v1/tenants/{tenant['id']}/keys", json={"name": "k"})
    ).json()
    customer = Customer(
        parse_id("tenant", tenant["id"]), parse_id("api_key", key["id"]), key["secret"]
    )
    return customer, {"tenant": tenant["id"], "key": key["id"]}


async def set_limit(stand: Stand, **body: Any) -> dict[str, Any]:
    answer = await stand.admin.post(LIMITS, json=body)
    assert answer.status_code == 201, answer.text
    assert answer.headers["etag"] == f'"{answer.json()["version"]}"'
    return dict(answer.json())


async def test_a_quota_is_set_and_shows_its_use(stand: Stand) -> None:
    customer, ids = await customer_of(stand)

    limit = await set_limit(
        stand,
        scope_kind="tenant",
        scope_id=ids["tenant"],
        metric="cost",
        period="month",
        value="12.5",
        alert_pct=[80, 50],
    )
    await service.reserve(stand.db.sessions, reservation(customer))

    assert limit["id"].startswith("lim_")
    assert (limit["value"], limit["unit"], limit["hard"]) == ("12.50", "USD", True)
    assert (limit["alert_pct"], limit["fail_mode"], limit["burst"]) == ([50, 80], None, None)
    assert limit["tenant_id"] == limit["scope_id"] == ids["tenant"]
    [shown] = (await stand.admin.get(LIMITS, params={"tenant_id": ids["tenant"]})).json()["data"]
    assert shown["use"] | {"period_start": 0, "period_end": 0} == {
        "used": "0.00",
        "held": "0.0000042",
        "remaining": "12.4999958",
        "period_start": 0,
        "period_end": 0,
    }
    assert shown["use"]["period_start"] < shown["use"]["period_end"]
    one = await stand.admin.get(f"{LIMITS}/{limit['id']}")
    assert one.json() == shown
    assert (await stand.admin.get(LIMITS, params={"scope_kind": "key"})).json()["data"] == []


async def test_limits_of_one_tenant_are_made_changed_and_removed_side_by_side(stand: Stand) -> None:
    _, ids = await customer_of(stand)
    scope = {"scope_kind": "tenant", "scope_id": ids["tenant"], "period": "day", "value": "1000"}
    metrics = ("requests", "tokens_in", "tokens_out", "tokens_total")
    limits = [await set_limit(stand, metric=metric, **scope) for metric in metrics]

    async def change(limit: dict[str, Any]) -> list[int]:
        changes = [{"value": str(900 + number)} for number in range(5)]
        return [
            (await stand.admin.patch(f"{LIMITS}/{limit['id']}", json=one)).status_code
            for one in changes
        ]

    async def make(number: int) -> list[int]:
        body = {"scope_kind": "key", "scope_id": ids["key"], "metric": "requests", "value": "5"}
        statuses = []
        for hours in range(1 + 5 * number, 6 + 5 * number):
            made = await stand.admin.post(
                LIMITS, json={**body, "period": "rolling", "window_hours": hours}
            )
            gone = await stand.admin.delete(f"{LIMITS}/{made.json().get('id')}")
            statuses += [made.status_code, gone.status_code]
        return statuses

    async def move() -> list[int]:
        zones = ("Europe/Berlin", "Asia/Tokyo", "Europe/Berlin", "Asia/Tokyo")
        at = f"/admin/v1/tenants/{ids['tenant']}"
        return [
            (await stand.admin.patch(at, json={"billing_tz": zone})).status_code for zone in zones
        ]

    answers = await asyncio.gather(*map(change, limits), *map(make, range(4)), move())

    assert {status for one in answers for status in one} == {200, 201, 204}


async def test_a_lost_race_is_run_again(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ids = await customer_of(stand)
    fields = {"metric": "requests", "period": "day", "value": "9"}
    limit = await set_limit(stand, scope_kind="tenant", scope_id=ids["tenant"], **fields)
    real = queries.update_limit
    losses = iter((True, True))

    async def lose_twice(session: AsyncSession, *arguments: Any) -> None:
        await real(session, *arguments)
        if next(losses, False):
            await session.execute(
                text("do $$ begin raise exception using errcode = '40P01'; end $$")
            )

    monkeypatch.setattr(queries, "update_limit", lose_twice)

    changed = await stand.admin.patch(f"{LIMITS}/{limit['id']}", json={"value": "7"})

    assert (changed.status_code, changed.json()["value"]) == (200, "7")
    assert changed.json()["version"] == limit["version"] + 1


async def test_a_rate_is_set_for_a_key_and_for_the_platform(stand: Stand) -> None:
    _, ids = await customer_of(stand)

    rate = await set_limit(
        stand, scope_kind="key", scope_id=ids["key"], metric="rpm", value="60", burst=5
    )
    shared = await set_limit(stand, scope_kind="platform", metric="concurrency", value="100")

    assert (rate["period"], rate["burst"], rate["use"]) == ("minute", 5, None)
    assert rate["fail_mode"] == "local"
    assert rate["tenant_id"] == ids["tenant"]
    assert (shared["period"], shared["scope_id"], shared["tenant_id"]) == (None, None, None)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"metric": "cost"}, "period"),
        ({"metric": "rpm", "period": "day"}, "period"),
        ({"metric": "cost", "period": "rolling"}, "window_hours"),
        ({"metric": "cost", "period": "day", "window_hours": 24}, "window_hours"),
        ({"metric": "tokens_in", "period": "day", "value": "1.5"}, "value"),
        ({"metric": "cost", "period": "day", "value": "-1"}, "value"),
        ({"metric": "cost", "period": "day", "value": "1e3"}, "value"),
        ({"metric": "cost", "period": "day", "burst": 1}, "burst"),
        ({"metric": "concurrency", "burst": 1}, "burst"),
        ({"metric": "cost", "period": "day", "fail_mode": "open"}, "fail_mode"),
        ({"metric": "rpm", "alert_pct": [50]}, "alert_pct"),
        ({"metric": "rpm", "hard": False}, "hard"),
        ({"metric": "rpm", "valid_from": 2, "valid_to": 2}, "valid_to"),
        ({"metric": "rpm", "scope_kind": "platform"}, "scope_id"),
        ({"metric": "rpm", "scope_id": None}, "scope_id"),
    ],
)
async def test_what_does_not_fit_names_its_field(
    stand: Stand, body: dict[str, Any], param: str
) -> None:
    _, ids = await customer_of(stand)
    whole = {"scope_kind": "tenant", "scope_id": ids["tenant"], "value": "10"} | body

    refused = await stand.admin.post(LIMITS, json=whole)

    assert error_of(refused, 400, "invalid_request")["param"] == param
    assert (await stand.admin.get(LIMITS)).json()["data"] == []


async def test_a_scope_that_is_not_there_is_not_found(stand: Stand) -> None:
    for kind, scope_id in (
        ("tenant", format_id("tenant", uuid7())),
        ("key", "key_nonsense"),
        ("project", format_id("project", uuid7())),
        ("deployment", format_id("deployment", uuid7())),
        ("adapter", format_id("adapter", uuid7())),
    ):
        body = {"scope_kind": kind, "scope_id": scope_id, "metric": "rpm", "value": "1"}
        error_of(await stand.admin.post(LIMITS, json=body), 404, "not_found")


async def test_there_is_one_of_a_kind(stand: Stand) -> None:
    _, ids = await customer_of(stand)
    body = {
        "scope_kind": "tenant",
        "scope_id": ids["tenant"],
        "metric": "cost",
        "period": "month",
        "value": "1",
    }
    await set_limit(stand, **body)

    error_of(await stand.admin.post(LIMITS, json=body | {"value": "2"}), 409, "conflict")
    await set_limit(stand, **body | {"hard": False})


async def test_a_change_names_the_version_that_it_means(stand: Stand) -> None:
    _, ids = await customer_of(stand)
    limit = await set_limit(
        stand, scope_kind="tenant", scope_id=ids["tenant"], metric="rpm", value="60", burst=5
    )
    path = f"{LIMITS}/{limit['id']}"

    changed = await stand.admin.patch(
        path, json={"value": "70", "burst": None}, headers={"if-match": '"1"'}
    )
    stale = await stand.admin.patch(path, json={"value": "80"}, headers={"if-match": '"1"'})

    assert (changed.json()["value"], changed.json()["burst"]) == ("70", None)
    assert changed.headers["etag"] == '"2"'
    assert "value is '70'" in error_of(stale, 409, "version_conflict")["message"]
    error_of(await stand.admin.delete(path, headers={"if-match": '"1"'}), 409, "version_conflict")
    assert (await stand.admin.delete(path, headers={"if-match": '"2"'})).status_code == 204
    error_of(await stand.admin.get(path), 404, "not_found")
    error_of(await stand.admin.patch(path, json={"value": "1"}), 404, "not_found")
    refused = await stand.admin.patch(f"{LIMITS}/nonsense", json={"value": "1"})
    error_of(refused, 404, "not_found")


async def test_priority_weight_and_memory_are_the_operators_to_set(stand: Stand) -> None:
    _, ids = await customer_of(stand)
    path = f"/admin/v1/tenants/{ids['tenant']}/scheduling"
    before = await stand.admin.get(path)

    changed = await stand.admin.patch(
        path, json={"weight": 2.5}, headers={"if-match": before.headers["etag"]}
    )
    stale = await stand.admin.patch(
        path, json={"priority": 1}, headers={"if-match": before.headers["etag"]}
    )
    viewer = await stand.login()

    assert (before.json()["priority"], before.json()["weight"]) == (0, 1.0)
    assert (changed.json()["priority"], changed.json()["weight"]) == (0, 2.5)
    error_of(stale, 409, "version_conflict")
    for body in (
        *({"weight": 0}, {"weight": 1001}, {"priority": 101}, {"priority": 0.5}),
        *(
            {"memory_weight": 0},
            {"memory_weight": 1001},
            {"max_adapters": 0},
            {"max_adapters": 1.5},
        ),
    ):
        error_of(await stand.admin.patch(path, json=body), 400, "invalid_request")
    shares = {"memory_weight": 4.0, "max_adapters": 2}
    for wanted in (shares, {"weight": 2.0}, {"memory_weight": None, "max_adapters": None}):
        shown = (await stand.admin.patch(path, json=wanted)).json()
        shares |= {field: value for field, value in wanted.items() if field in shares}
        assert {field: shown[field] for field in shares} == shares
    error_of(await viewer.patch(path, json={"weight": 3}), 403, "permission_denied")


async def test_a_blocked_request_is_explained(stand: Stand) -> None:
    customer, ids = await customer_of(stand)
    await set_limit(
        stand,
        scope_kind="tenant",
        scope_id=ids["tenant"],
        metric="tokens_total",
        period="day",
        value="100",
    )
    wanted = reservation(customer)
    await service.reserve(stand.db.sessions, wanted)

    answer = await stand.admin.get(f"/admin/v1/explain/{format_id('request', wanted.request_id)}")

    found = answer.json()
    assert found["outcome"] == "running"
    assert found["tenant_id"] == ids["tenant"]
    assert "was cut to 90" in found["details"][0]
    assert len(found["limit_ids"]) == 1
    unknown = format_id("request", uuid7())
    error_of(await stand.admin.get(f"/admin/v1/explain/{unknown}"), 404, "not_found")
    error_of(await stand.admin.get("/admin/v1/explain/nonsense"), 404, "not_found")


async def test_changes_are_audited(stand: Stand) -> None:
    _, ids = await customer_of(stand)
    limit = await set_limit(
        stand, scope_kind="tenant", scope_id=ids["tenant"], metric="rpm", value="60"
    )
    await stand.admin.patch(f"{LIMITS}/{limit['id']}", json={"value": "61"})
    await stand.admin.delete(f"{LIMITS}/{limit['id']}")

    entries = (await stand.admin.get("/admin/v1/audit")).json()["data"]
    mine = [entry for entry in entries if entry["object_id"] == limit["id"]]
    assert [entry["action"] for entry in mine] == ["limit.delete", "limit.update", "limit.create"]
    assert (mine[1]["before"], mine[1]["after"]) == ({"value": "60"}, {"value": "61"})


async def test_all_limits_of_a_caller_and_how_they_stand(stand: Stand) -> None:
    customer, ids = await customer_of(stand)
    _, others = await customer_of(stand, "globex")
    key = {"scope_kind": "key", "scope_id": ids["key"]}
    tenant = {"scope_kind": "tenant", "scope_id": ids["tenant"]}
    limits = [
        await set_limit(stand, metric="concurrency", value="4", **key),
        await set_limit(stand, metric="rpm", value="1", burst=10, **key),
        await set_limit(stand, metric="requests", period="day", value="9", **tenant),
        await set_limit(stand, metric="rpm", value="2", scope_kind="platform"),
    ]
    await set_limit(stand, metric="rpm", value="1", valid_to=1, **tenant)
    await set_limit(stand, metric="rpm", value="1", scope_kind="key", scope_id=others["key"])
    await service.reserve(stand.db.sessions, reservation(customer))
    async with stand.db.sessions() as session:
        scopes = LimitScopes(tenant_id=customer.tenant_id, key_id=customer.key_id)
        effective = await effective_limits(session, scopes)
    newest = 10**6  # of all versions, for what was published about them is in this Redis
    world = World(stand.redis_url)
    try:
        await world.gateway().admit(
            claim(
                tenant_id=customer.tenant_id,
                key_id=customer.key_id,
                key_version=newest,
                tenant_version=newest,
                limits=replace(effective, version=newest, shared_version=newest),
            ),
            never,
        )
        answer = await stand.admin.get(f"{LIMITS}/effective", params={"key_id": ids["key"]})
    finally:
        await world.close()

    shown = answer.json()["data"]
    assert [one["id"] for one in shown] == [limit["id"] for limit in limits]
    assert [(one["value"], one["used"], one["held"], one["remaining"]) for one in shown] == [
        ("4", "0", "1", "3"),
        ("1", "1", "0", "9"),
        ("9", "0", "1", "8"),
        ("2", "1", "0", "1"),
    ]
    assert [one["is_shared"] for one in shown] == [False, False, False, True]
    assert shown[0]["resets_at"] is None
    assert 0 < shown[1]["resets_at"] - time.time() <= 61
    assert shown[2]["resets_at"] > time.time()


async def test_limits_of_a_deployment_and_its_adapter_bind_its_callers(stand: Stand) -> None:
    _, ids = await customer_of(stand)
    version_id = await stand.version(ids["tenant"])
    path = f"/admin/v1/tenants/{ids['tenant']}/deployments/bot"
    deployment = (await stand.admin.put(path, json={"version_id": version_id})).json()
    adapter = (await stand.admin.get(f"/admin/v1/tenants/{ids['tenant']}/adapters")).json()
    for kind, scope_id in (
        ("deployment", deployment["id"]),
        ("adapter", adapter["data"][0]["id"]),
    ):
        await set_limit(stand, scope_kind=kind, scope_id=scope_id, metric="rpm", value="5")

    alone = await stand.admin.get(f"{LIMITS}/effective", params={"key_id": ids["key"]})
    there = await stand.admin.get(
        f"{LIMITS}/effective", params={"key_id": ids["key"], "deployment_id": deployment["id"]}
    )

    assert alone.json()["data"] == []
    assert [one["scope_kind"] for one in there.json()["data"]] == ["adapter", "deployment"]


async def test_without_redis_nobody_knows_how_rates_stand(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ids = await customer_of(stand)
    await set_limit(stand, scope_kind="key", scope_id=ids["key"], metric="rpm", value="5")

    async def away(*_: Any) -> Any:
        raise RedisAwayError("Redis did not answer.")

    monkeypatch.setattr(DeadlineRedis, "command", away)
    answer = await stand.admin.get(f"{LIMITS}/effective", params={"key_id": ids["key"]})

    [shown] = answer.json()["data"]
    assert (shown["value"], shown["used"], shown["remaining"]) == ("5", None, None)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({}, "key_id"),
        ({"key_id": "key_nonsense"}, "key_id"),
        ({"key_id": format_id("api_key", uuid7())}, "key_id"),
        ({"key_id": None, "deployment_id": format_id("deployment", uuid7())}, "deployment_id"),
    ],
)
async def test_whose_limits_must_be_known(stand: Stand, query: dict[str, Any], param: str) -> None:
    _, ids = await customer_of(stand)
    query = {name: value or ids["key"] for name, value in query.items()}

    answer = await stand.admin.get(f"{LIMITS}/effective", params=query)

    assert answer.status_code == (404 if query else 400)
    assert answer.json()["error"]["param"] == param


async def test_a_member_sees_its_own_callers_limits_only(stand: Stand) -> None:
    _, ids = await customer_of(stand)
    _, others = await customer_of(stand, "globex")
    await set_limit(stand, scope_kind="key", scope_id=ids["key"], metric="rpm", value="5")
    await set_limit(stand, scope_kind="platform", metric="rpm", value="500")
    viewer = await member(stand, ids["tenant"], "viewer", "ann@acme.example")

    own = await viewer.get(f"{LIMITS}/effective", params={"key_id": ids["key"]})
    foreign = await viewer.get(f"{LIMITS}/effective", params={"key_id": others["key"]})

    assert [one["value"] for one in own.json()["data"]] == ["5"]
    error_of(foreign, 404, "not_found")
