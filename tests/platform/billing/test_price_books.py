"""Price books over HTTP: drafts, dates, what is published for ever, previews and quotes."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest
from loraplex_platform.ids import format_id, uuid7
from loraplex_platform.metering.service import reserve
from psycopg import errors

from tests.platform.control.stand import Stand, error_of
from tests.support.billing import add_model, add_usage, as_owner, set_zone
from tests.support.metering import add_customer, reservation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from loraplex_platform.db.session import Database

PATH = "/admin/v1/price-books"
STANDARD = "prb_00000000000070008000000000000001"
BASE = [
    {"target_kind": "any_base", "price_class": "input", "price_usd": "0.03"},
    {"target_kind": "any_base", "price_class": "output", "price_usd": "0.06"},
]


@pytest.fixture
async def stand(db_url: str, redis_url: str, short_tmp_path: Path) -> AsyncIterator[Stand]:
    async with Stand.open(db_url, redis_url, short_tmp_path) as stand:
        yield stand


async def made(stand: Stand, **body: Any) -> dict[str, Any]:
    answer = await stand.admin.post(PATH, json={"name": "next", "prices": BASE} | body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def published(stand: Stand, book: dict[str, Any], **body: Any) -> httpx.Response:
    return await stand.admin.post(f"{PATH}/{book['id']}/publish", json=body)


async def books(stand: Stand) -> dict[str, dict[str, Any]]:
    answer = await stand.admin.get(PATH)
    return {book["name"]: book for book in answer.json()["data"]}


async def test_a_draft_is_made_copied_changed_and_deleted(stand: Stand) -> None:
    draft = await made(stand, copy_from=STANDARD)
    assert (draft["status"], draft["is_in_force"], draft["currency"]) == ("draft", False, "USD")
    prices = {(p["target_kind"], p["price_class"]): p for p in draft["prices"]}
    assert prices["any_base", "input"]["price_usd"] == "0.030000"  # on top of what was copied
    assert prices["any_adapter", "output"]["price_usd"] == "0.060000"
    assert prices["any_adapter", "output"]["per"] == "1M tokens"

    request = {"target_kind": "any_base", "price_class": "request", "price_usd": "0.000000000001"}
    changed = await stand.admin.patch(
        f"{PATH}/{draft['id']}", json={"name": "2027", "prices": [*BASE, request]}
    )

    assert changed.status_code == 200, changed.text
    assert changed.headers["etag"] == '"2"'
    assert changed.json()["name"] == "2027"
    assert [p["price_usd"] for p in changed.json()["prices"]][-1] == "0.000000000001"
    stale = await stand.admin.patch(
        f"{PATH}/{draft['id']}", json={"name": "x"}, headers={"if-match": '"1"'}
    )
    error_of(stale, 409, "version_conflict")
    assert (await stand.admin.delete(f"{PATH}/{draft['id']}")).status_code == 204
    error_of(await stand.admin.get(f"{PATH}/{draft['id']}"), 404, "not_found")
    assert set(await books(stand)) == {"standard"}


async def test_publishing_ends_the_book_in_force_and_serves_at_once(stand: Stand) -> None:
    customer = await add_customer(stand.db)
    draft = await made(stand)

    answer = await published(stand, draft)

    assert answer.status_code == 200, answer.text
    found = await books(stand)
    assert found["next"]["is_in_force"]
    assert found["standard"]["effective_to"] == found["next"]["effective_from"]
    assert abs(found["next"]["effective_from"] - time.time()) < 60
    reserved = await reserve(stand.db.sessions, reservation(customer))
    assert format_id("price_book", reserved.price_book_id) == draft["id"]


async def test_a_book_is_scheduled_between_others_and_withdrawn(stand: Stand) -> None:
    now = int(time.time())
    later, between = await made(stand, name="later"), await made(stand, name="between")
    assert (await published(stand, later, effective_from=now + 9000)).status_code == 200
    assert (await published(stand, between, effective_from=now + 5000)).status_code == 200
    found = await books(stand)
    assert [found[name]["effective_to"] for name in ("standard", "between", "later")] == [
        now + 5000,
        now + 9000,
        None,
    ]
    clash = await made(stand, name="clash")
    error_of(await published(stand, clash, effective_from=now + 9000), 409, "conflict")

    withdrawn = await stand.admin.post(f"{PATH}/{between['id']}/retire")

    assert withdrawn.json()["status"] == "retired"
    found = await books(stand)
    assert found["standard"]["effective_to"] == now + 9000
    assert found["standard"]["is_in_force"]
    in_force = await stand.admin.post(f"{PATH}/{STANDARD}/retire")
    assert "Publish another one" in error_of(in_force, 409, "conflict")["message"]
    error_of(await stand.admin.post(f"{PATH}/{clash['id']}/retire"), 409, "conflict")


async def test_the_past_is_never_priced_again(stand: Stand) -> None:
    draft = await made(stand)

    past = await published(stand, draft, effective_from=int(time.time()) - 60)

    assert error_of(past, 400, "invalid_request")["param"] == "effective_from"
    empty = await made(stand, name="empty", prices=[])
    assert "Add prices first" in error_of(await published(stand, empty), 409, "conflict")["message"]


async def test_a_published_book_never_changes_whoever_tries(stand: Stand, db_url: str) -> None:
    draft = await made(stand)
    await published(stand, draft)
    url = f"{PATH}/{draft['id']}"
    for answer in (
        await stand.admin.patch(url, json={"name": "x"}),
        await stand.admin.delete(url),
        await stand.admin.post(f"{url}/publish", json={}),
    ):
        assert "copy_from" in error_of(answer, 409, "conflict")["message"]
    in_book = f"price_book_id = '{draft['id'][4:]}'"

    for statement in (
        f"update price_items set price_pico = 0 where {in_book}",
        f"delete from price_items where {in_book}",
        f"insert into price_items select price_book_id, 'any_adapter', 'input', 1, target_id"
        f" from price_items where {in_book} limit 1",
        "update price_books set name = 'x' where status = 'published'",
        "update price_books set status = 'draft' where status = 'published'",
        "update price_books set effective_from = now() where status = 'published'",
        "update price_books set effective_to = now() - interval '1 s' where name = 'next'",
        "delete from price_books where status = 'published'",
        "insert into price_books (id, name, status, effective_from, published_at)"
        " values (gen_random_uuid(), 'x', 'published', now(), now())",
    ):
        with pytest.raises(errors.CheckViolation):
            as_owner(db_url, statement)


async def test_two_books_never_hold_at_once_whoever_tries(stand: Stand, db_url: str) -> None:
    draft = await made(stand)
    with psycopg.connect(db_url) as owner, pytest.raises(errors.ExclusionViolation):
        owner.execute(
            "update price_books set status = 'published', published_at = now(),"
            " effective_from = now() + interval '1 day' where id = %s",
            [draft["id"][4:]],
        )


@pytest.mark.parametrize(
    ("price", "param"),
    [
        ({"target_kind": "everything"}, "prices.0.target_kind"),
        ({"price_class": "gold"}, "prices.0.price_class"),
        ({"price_usd": 0.5}, "prices.0.price_usd"),
        ({"price_usd": "-1"}, "prices.0.price_usd"),
        ({"price_usd": "1e3"}, "prices.0.price_usd"),
        ({"price_usd": "0.0000001"}, "prices.0"),
        ({"target_id": "adp_1"}, "prices.0"),
        ({"target_kind": "adapter"}, "prices.0"),
        ({"target_kind": "adapter", "target_id": "nonsense"}, "prices.0.target_id"),
        ({"target_kind": "adapter", "target_id": f"adp_{uuid7().hex}"}, "prices.0.target_id"),
        ({"target_kind": "deployment", "target_id": f"dep_{uuid7().hex}"}, "prices.0.target_id"),
    ],
)
async def test_a_bad_price_is_refused_by_name(
    stand: Stand, price: dict[str, Any], param: str
) -> None:
    good = {"target_kind": "any_base", "price_class": "input", "price_usd": "1"}

    refused = await stand.admin.post(PATH, json={"name": "x", "prices": [good | price]})

    assert error_of(refused, 400, "invalid_request")["param"] == param
    twice = await stand.admin.post(PATH, json={"name": "x", "prices": [good, good]})
    assert error_of(twice, 400, "invalid_request")["param"] == "prices.1"


async def test_what_a_book_cannot_price_is_named_and_not_served(stand: Stand, db_url: str) -> None:
    customer = await add_customer(stand.db)
    model = add_model(db_url, customer)
    draft = await made(stand)  # no price of any adapter
    assert draft["unpriced_models"] == ["support-bot"]
    target = {
        "target_kind": "deployment",
        "target_id": format_id("deployment", model.deployment_id),
    }
    own = [target | {"price_class": name, "price_usd": "1"} for name in ("input", "output")]

    priced = await stand.admin.patch(f"{PATH}/{draft['id']}", json={"prices": [*BASE, *own]})

    assert priced.json()["unpriced_models"] == []


async def test_a_preview_says_what_would_have_been_paid(stand: Stand, db_url: str) -> None:
    acme, globex = await add_customer(stand.db, "acme"), await add_customer(stand.db, "globex")
    set_zone(db_url, globex, "Asia/Tokyo")
    model = add_model(db_url, acme)
    noon = datetime(2026, 3, 14, 12, tzinfo=UTC)
    add_usage(db_url, acme, noon, cached=4)
    add_usage(db_url, acme, noon, model=model)
    add_usage(db_url, globex, noon + timedelta(hours=4))  # the 15th in Tokyo
    add_usage(db_url, globex, noon - timedelta(days=9))  # before
    request = {"target_kind": "any_base", "price_class": "request", "price_usd": "0.5"}
    draft = await made(stand, prices=[*BASE, request])
    day = {"start_time": int(noon.timestamp()) - 3600, "end_time": int(noon.timestamp()) + 5 * 3600}

    report = (await stand.admin.post(f"{PATH}/{draft['id']}/preview", json=day)).json()

    rows = {row["tenant"]: row for row in report["data"]}
    assert rows["acme"]["cost_usd"] == _usd(
        6 * 20_000 + 4 * 10_000 + 20 * 40_000 + 10 * 30_000 + 20 * 60_000
    )
    assert rows["acme"]["preview_usd"] == _usd(10 * 30_000 + 20 * 60_000 + 5 * 10**11)
    assert (rows["acme"]["requests"], rows["acme"]["unpriced_requests"]) == (2, 1)
    assert rows["globex"]["preview_usd"] == _usd(10 * 30_000 + 20 * 60_000 + 5 * 10**11)
    assert report["unpriced_requests"] == 1
    one = day | {"tenant_id": format_id("tenant", globex.tenant_id)}
    [only] = (await stand.admin.post(f"{PATH}/{draft['id']}/preview", json=one)).json()["data"]
    assert only["tenant"] == "globex"
    for bad, status in (
        (day | {"end_time": 0}, 400),
        (day | {"tenant_id": "nobody"}, 404),
        (day | {"tenant_id": format_id("tenant", uuid7())}, 404),
    ):
        assert (
            await stand.admin.post(f"{PATH}/{draft['id']}/preview", json=bad)
        ).status_code == status


async def test_a_quote_is_what_the_request_will_cost(stand: Stand) -> None:
    shape = {"prompt_tokens": 100, "cached_tokens": 64, "completion_tokens": 7}

    base = await stand.admin.post(f"{PATH}/{STANDARD}/quote", json=shape)
    adapter = await stand.admin.post(
        f"{PATH}/{STANDARD}/quote", json=shape | {"adapter_version_id": f"ver_{uuid7().hex}"}
    )

    assert base.json()["cost_usd"] == _usd(36 * 20_000 + 64 * 10_000 + 7 * 40_000)
    assert adapter.json()["cost_usd"] == _usd(36 * 30_000 + 64 * 15_000 + 7 * 60_000)
    for bad, param in (
        ({"cached_tokens": 101}, "cached_tokens"),
        ({"adapter_version_id": "x"}, "adapter_version_id"),
        ({"prompt_tokens": -1}, "prompt_tokens"),
    ):
        refused = await stand.admin.post(f"{PATH}/{STANDARD}/quote", json=shape | bad)
        assert error_of(refused, 400, "invalid_request")["param"] == param
    draft = await made(stand, prices=[BASE[0]])
    error_of(await stand.admin.post(f"{PATH}/{draft['id']}/quote", json=shape), 503, "no_price")


def _usd(pico: int) -> str:
    return f"{pico // 10**12}.{pico % 10**12:012d}"


async def until_waiting(connection: psycopg.AsyncConnection[Any], pid: int) -> None:
    """Until the backend `pid` waits for a lock."""
    for _ in range(500):
        row = await (
            await connection.execute(
                "select wait_event_type from pg_stat_activity where pid = %s", [pid]
            )
        ).fetchone()
        if row == ("Lock",):
            return
        await asyncio.sleep(0.01)
    pytest.fail("it never waited")


@pytest.mark.parametrize(
    ("make", "close", "change", "told"),
    [
        (
            "insert into price_books (id, name, status) values (%(id)s, 'n', 'draft')",
            "update price_books set status = 'retired', published_at = now(),"
            " effective_from = now() + interval '1 day', effective_to = now() + interval '1 day'"
            " where id = %(id)s",
            "insert into price_items (price_book_id, target_kind, price_class, price_pico)"
            " values (%(id)s, 'any_base', 'input', 999)",
            "published book",
        ),
        (
            "insert into invoices (id, tenant_id, kind, status, period_start, period_end, billing_tz,"
            " issuer, customer, exact_pico, subtotal_cents, adjustments_cents, tax_cents, total_cents,"
            " due_cents) select %(id)s, id, 'invoice', 'draft', now(), now(), 'UTC', '{}', '{}',"
            " 0, 0, 0, 0, 0, 0 from tenants",
            "update invoices set status = 'final', number = 'X-1', issued_at = now()"
            " where id = %(id)s",
            "insert into invoice_lines (invoice_id, tenant_id, line_no, section, description,"
            " quantity, unit_price_pico, amount_pico, amount_cents)"
            " select %(id)s, id, 1, 'usage', 'x', 0, 0, 0, 0 from tenants",
            "invoice with a number",
        ),
    ],
    ids=["price book", "invoice"],
)
async def test_what_is_closed_while_a_line_waits_does_not_get_it(
    db: Database, db_url: str, make: str, close: str, change: str, told: str
) -> None:
    await add_customer(db)
    ids = {"id": uuid7()}
    connect = psycopg.AsyncConnection[Any].connect
    async with (
        await connect(db_url) as closer,
        await connect(db_url) as changer,
        await connect(db_url, autocommit=True) as watcher,
    ):
        await closer.execute(make.encode(), ids)
        await closer.commit()
        await closer.execute(close.encode(), ids)
        waiting = asyncio.create_task(changer.execute(change.encode(), ids))
        await until_waiting(watcher, changer.info.backend_pid)
        await closer.commit()
        with pytest.raises(psycopg.errors.CheckViolation, match=told):
            await waiting
