"""Usage, CSV, the request log, invariants, fleet and overview."""

from __future__ import annotations

import csv
import io
import time
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from loraplex_platform.db import ApiKey
from loraplex_platform.fleet import engines
from loraplex_platform.fleet.service import CountKeeper
from loraplex_platform.ids import format_id, parse_id
from loraplex_platform.metering import routes as metering_routes
from loraplex_platform.metering.csv_export import safe_cell, to_csv
from loraplex_platform.metering.service import reserve, settle
from loraplex_platform.metering.usage import FILE_ROWS, UsagePage, UsageQuery, report_usage
from sqlalchemy import func, update
from sqlalchemy.ext.asyncio import AsyncSession

from tests.platform.control.stand import Stand, announce, error_of
from tests.platform.gateway.stand import eventually
from tests.support.metering import Customer, add_customer, reservation, settlement


async def served(stand: Stand, customer: Customer, **changes: Any) -> None:
    """One settled request: 10 tokens in, 20 out."""
    wanted = reservation(customer, **changes)
    reserved = await reserve(stand.db.sessions, wanted)
    done = settlement(wanted.request_id, reserved.lease_token)
    assert (await settle(stand.db.sessions, done)).applied


async def test_usage_is_grouped_and_priced_exactly(stand: Stand) -> None:
    acme, globex = await add_customer(stand.db, "acme"), await add_customer(stand.db, "globex")
    for customer, count in ((acme, 3), (globex, 1)):
        for _ in range(count):
            await served(stand, customer)
    params: dict[str, Any] = {"start_time": int(time.time()) - 3600, "group_by[]": ["tenant_id"]}

    report = (await stand.admin.get("/admin/v1/usage", params=params)).json()

    assert report["object"] == "list"
    assert (report["currency"], report["time_zone"]) == ("USD", None)
    assert abs(report["final_until"] - time.time()) < 60
    rows = {row["tenant"]: row for row in report["data"]}
    assert set(rows["acme"]) == {
        "start_time", "end_time", "date", "tenant_id", "tenant", "requests", "prompt_tokens",
        "cached_tokens", "completion_tokens", "absorbed_tokens", "adapter_seconds", "cost_usd",
    }  # fmt: skip
    assert rows["acme"]["tenant_id"] == format_id("tenant", acme.tenant_id)
    assert (rows["acme"]["requests"], rows["acme"]["completion_tokens"]) == (3, 60)
    _whole, _, fraction = rows["acme"]["cost_usd"].partition(".")
    assert len(fraction) == 12
    pico = {slug: int(row["cost_usd"].replace(".", "")) for slug, row in rows.items()}
    assert pico["acme"] == 3 * pico["globex"] > 0
    one = params | {"tenant_id": format_id("tenant", globex.tenant_id), "group_by[]": []}
    [alone] = (await stand.admin.get("/admin/v1/usage", params=one)).json()["data"]
    assert alone["requests"] == 1
    assert "tenant" not in alone
    keyed = params | {"group_by[]": ["key_id", "model", "adapter_version_id"]}
    for row in (await stand.admin.get("/admin/v1/usage", params=keyed)).json()["data"]:
        assert row["key_id"].startswith("key_")
        assert row["adapter_version_id"] is None
    overview = (await stand.admin.get("/admin/v1/overview")).json()
    assert int(overview["cost_today_usd"].replace(".", "")) == sum(pico.values())
    assert (overview["tenants"], overview["keys"]) == (2, 2)


async def test_usage_as_csv_is_whole_and_starts_no_formula(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    acme = await add_customer(stand.db, "acme")
    for model in ("=1+1", "@cmd", "plain", "-x"):
        await served(stand, acme, model=model)
    # Pages of one row: the export must walk all of them.
    short = lambda session, query: report_usage(session, _limited(query))  # noqa: E731
    monkeypatch.setattr(metering_routes, "report_usage", short)
    params: dict[str, Any] = {"start_time": 0, "group_by[]": "model", "format": "csv"}

    answer = await stand.admin.get("/admin/v1/usage", params=params)

    assert answer.headers["content-type"].startswith("text/csv")
    assert "attachment" in answer.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert sorted(row["model"] for row in rows) == ["'-x", "'=1+1", "'@cmd", "plain"]
    assert {row["completion_tokens"] for row in rows} == {"20"}


def _limited(query: UsageQuery) -> UsageQuery:
    return replace(query, limit=1)


async def test_a_csv_has_no_end_but_the_reports_whatever_the_limit(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    acme = await add_customer(stand.db, "acme")
    await served(stand, acme, model="a")
    limits: list[int] = []

    async def many_pages(session: AsyncSession, query: UsageQuery) -> UsagePage:
        limits.append(query.limit)
        page = await report_usage(session, replace(query, page=None))
        return replace(page, next_page="more" if len(limits) < 250 else None)

    monkeypatch.setattr(metering_routes, "report_usage", many_pages)
    params: dict[str, Any] = {"start_time": 0, "format": "csv", "limit": 1}

    answer = await stand.admin.get("/admin/v1/usage", params=params)

    assert len(list(csv.DictReader(io.StringIO(answer.text)))) == 250
    assert set(limits) == {FILE_ROWS}


def test_csv_cells_are_data() -> None:
    for start in "=+-@\t\r＝＋－＠":
        assert safe_cell(f"{start}x") == f"'{start}x"
    assert safe_cell(-5) == -5
    assert safe_cell(None) == ""
    assert to_csv([["a,b", 'c"d', -1]]) == '"a,b","c""d",-1\r\n'


async def test_bad_report_queries_name_the_parameter(stand: Stand) -> None:
    for params, param in (
        ({}, "start_time"),
        ({"start_time": "yesterday"}, "start_time"),
        ({"start_time": -1}, "start_time"),
        ({"start_time": 10**15}, "start_time"),
        ({"start_time": 10, "end_time": 5}, "start_time"),
        ({"start_time": 0, "bucket_width": "1y"}, "bucket_width"),
        ({"start_time": 0, "group_by[]": "secret"}, "group_by[].0"),
        ({"start_time": 0, "page": "x"}, "page"),
        ({"start_time": 0, "format": "xml"}, "format"),
        ({"start_time": 0, "limit": 100_000}, "limit"),
    ):
        refused = await stand.admin.get("/admin/v1/usage", params=params)
        assert error_of(refused, 400, "invalid_request")["param"] == param
    for path in ("/admin/v1/usage?start_time=0&", "/admin/v1/requests?"):
        for tenant_id in (f"ten_{'0' * 32}", "acme", "%00"):
            error_of(await stand.admin.get(f"{path}tenant_id={tenant_id}"), 404, "not_found")


async def test_the_request_log_is_metadata_of_one_tenant_or_all(stand: Stand) -> None:
    acme, globex = await add_customer(stand.db, "acme"), await add_customer(stand.db, "globex")
    await served(stand, acme)
    await served(stand, globex)
    await reserve(stand.db.sessions, reservation(acme))

    everyone = (await stand.admin.get("/admin/v1/requests")).json()
    params = {"tenant_id": format_id("tenant", acme.tenant_id), "limit": 1}
    page = (await stand.admin.get("/admin/v1/requests", params=params)).json()

    assert len(everyone["data"]) == 3
    assert page["has_more"] is True
    [newest] = page["data"]
    assert (newest["state"], newest["settled_at"]) == ("reserved", None)
    params["after"] = page["last_id"]
    page = (await stand.admin.get("/admin/v1/requests", params=params)).json()
    assert page["has_more"] is False
    [settled] = page["data"]
    assert (settled["state"], settled["completion_tokens"], settled["kind"]) == (
        "settled",
        20,
        "user",
    )
    assert settled["key_id"] == format_id("api_key", acme.key_id)
    assert parse_id("request", settled["id"]).version == 7


async def test_invariants_are_shown_check_by_check(stand: Stand) -> None:
    await served(stand, await add_customer(stand.db, "acme"))

    report = (await stand.admin.get("/admin/v1/invariants")).json()

    assert report["object"] == "invariants"
    assert report["ok"] is True
    assert report["identity"]["difference"] == 0
    assert report["identity"]["billed"] == 20
    assert report["identity"]["unlanded"] == 1
    assert {"name", "title", "ok", "detail"} <= set(report["checks"][0])
    assert abs(report["checked_at"] - time.time()) < 60


async def test_a_killed_replicas_last_figures_are_not_its_successors(stand: Stand) -> None:
    [before] = (await stand.admin.get("/admin/v1/fleet")).json()["replicas"]
    assert before["stats"] is not None

    await stand.engine.crash()
    stand.engine.is_mute = True  # it has started, and has said nothing yet
    await stand.engine.start()
    announce(stand.redis_url, stand.engine)

    async def is_seen() -> bool:
        seen.append((await stand.admin.get("/admin/v1/fleet")).json()["replicas"][0])
        return bool(seen[-1]["incarnation"] == stand.engine.incarnation)

    seen: list[dict[str, Any]] = []
    await eventually(is_seen, "the new process")
    assert seen[-1]["stats"] is None
    assert seen[-1]["requests_per_s"] == 0
    stand.engine.is_mute = False


async def test_the_fleet_shows_replicas_their_stats_and_rates(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "STATS_TIMEOUT_S", 0.3)
    first = (await stand.admin.get("/admin/v1/fleet")).json()
    [replica] = first["replicas"]
    assert replica["replica_id"] == "fake-0"
    assert replica["stats"]["kv_blocks_total"] == 1024
    assert first["gateways"] == []

    tenant = await stand.tenant("acme")
    await stand.version(tenant["id"])
    [replica] = (await stand.admin.get("/admin/v1/fleet")).json()["replicas"]
    overview = (await stand.admin.get("/admin/v1/overview")).json()
    assert replica["generation_tokens_per_s"] > 0
    assert replica["requests_per_s"] > 0
    assert overview["tokens_per_s"] > 0
    assert (overview["adapters"], overview["deployments"]) == (1, 0)

    stand.engine.is_mute = True
    monkeypatch.setattr(engines, "FRESH_S", 0.0)
    [mute] = (await stand.admin.get("/admin/v1/fleet")).json()["replicas"]
    assert mute["stats"] is None
    assert mute["generation_tokens_per_s"] == 0
    assert (await stand.admin.get("/admin/v1/overview")).json()["running"] == 0
    announce(stand.redis_url, stand.engine)


async def test_what_is_many_is_counted_anew_after_a_second_per_so_many(stand: Stand) -> None:
    await add_customer(stand.db, "acme")
    now_s = 100.0
    keeper = CountKeeper(counted_per_s=1, clock=lambda: now_s)  # one tenant, one key: two seconds
    async with stand.db.sessions() as session:
        first = await keeper.get(session)
    await add_customer(stand.db, "globex")
    now_s = 101.9
    async with stand.db.sessions() as session:
        kept = await keeper.get(session)
        now_s = 102.0
        anew = await keeper.get(session)
        few = await CountKeeper(clock=lambda: now_s).get(session)

    assert (first.tenants, first.keys) == (1, 1)
    assert kept is first
    assert (anew.tenants, anew.keys) == (few.tenants, few.keys) == (2, 2)


async def test_keys_that_are_over_are_not_counted(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/keys"
    for name, ends in (
        ("on", {}),
        ("over", {}),
        ("later", {"expires_at": int(time.time()) + 3600}),
    ):
        made = await stand.admin.post(path, json={"name": name} | ends)
        assert made.status_code == 201, made.text
        if name == "over":
            key_id = parse_id("api_key", made.json()["id"])
    async with stand.db.sessions.begin() as session:
        await session.execute(
            update(ApiKey).where(ApiKey.id == key_id).values(expires_at=func.now())
        )

    assert (await stand.admin.get("/admin/v1/overview")).json()["keys"] == 2


@pytest.mark.slow  # as long as a statement may take
async def test_books_too_long_to_check_while_one_waits_are_no_lost_database(
    stand: Stand, db_url: str
) -> None:
    with psycopg.connect(db_url) as owner:
        owner.execute("lock table ledger in access exclusive mode")
        refused = await stand.admin.get("/admin/v1/invariants", timeout=60)

    message = error_of(refused, 503, "database_unavailable")["message"]
    assert "too long to be checked while you wait" in message
    assert "loraplex reconcile" in message
