"""Credits, debits, reversals and balances over HTTP: new lines, never changed ones."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from loraplex_platform.db import AuditLog
from loraplex_platform.ids import format_id, uuid7
from sqlalchemy import select

from tests.platform.control.stand import Stand, error_of
from tests.support.billing import add_usage
from tests.support.metering import Customer, add_customer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NOON = datetime(2026, 3, 14, 12, tzinfo=UTC)


@pytest.fixture
async def stand(db_url: str, redis_url: str, short_tmp_path: Path) -> AsyncIterator[Stand]:
    async with Stand.open(db_url, redis_url, short_tmp_path) as stand:
        yield stand


def path(customer: Customer, rest: str) -> str:
    return f"/admin/v1/tenants/{format_id('tenant', customer.tenant_id)}/{rest}"


async def post(stand: Stand, customer: Customer, rest: str, **body: Any) -> dict[str, Any]:
    answer = await stand.admin.post(path(customer, rest), json={"reason": "because"} | body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def balance(stand: Stand, customer: Customer) -> str:
    answer = (await stand.admin.get(path(customer, "balance"))).json()
    assert answer["currency"] == "USD"
    return str(answer["balance_usd"])


async def test_a_balance_is_the_sum_of_all_lines(stand: Stand, db_url: str) -> None:
    acme, globex = await add_customer(stand.db, "acme"), await add_customer(stand.db, "globex")
    add_usage(db_url, acme, NOON)  # 1_000_000 pico-USD
    add_usage(db_url, acme, NOON, account="absorbed")
    add_usage(db_url, globex, NOON)

    credit = await post(stand, acme, "adjustments", kind="credit", amount_usd="0.000003")
    debit = await post(stand, acme, "adjustments", kind="debit", amount_usd="0.000000000007")

    assert (credit["amount_usd"], debit["amount_usd"]) == ("-0.000003000000", "0.000000000007")
    assert await balance(stand, acme) == "-0.000001999993"
    assert await balance(stand, globex) == "0.000001000000"
    listed = (await stand.admin.get(path(acme, "adjustments"))).json()["data"]
    assert [line["id"] for line in listed] == [debit["id"], credit["id"]]
    async with stand.db.sessions() as session:
        audits = await session.scalars(
            select(AuditLog.action).where(AuditLog.tenant_id == acme.tenant_id)
        )
        assert sorted(audits) == ["adjustment.credit", "adjustment.debit"]


async def test_a_line_is_reversed_once_even_by_many_at_a_time(stand: Stand, db_url: str) -> None:
    acme = await add_customer(stand.db)
    request = format_id("request", add_usage(db_url, acme, NOON))
    credit = await post(stand, acme, "adjustments", kind="credit", amount_usd="1.5")

    for entry in (request, credit["id"]):
        body = {"entry_id": entry, "reason": "a mistake"}
        answers = await asyncio.gather(
            *(stand.admin.post(path(acme, "reversals"), json=body) for _ in range(5))
        )
        assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409, 409]

    assert await balance(stand, acme) == "0.000000000000"
    [of_credit, of_usage, _] = (await stand.admin.get(path(acme, "adjustments"))).json()["data"]
    assert (of_credit["amount_usd"], of_usage["amount_usd"]) == (
        "1.500000000000",
        "-0.000001000000",
    )
    again = {"entry_id": of_usage["id"], "reason": "x"}
    error_of(await stand.admin.post(path(acme, "reversals"), json=again), 409, "conflict")


async def test_what_cannot_be_reversed(stand: Stand, db_url: str) -> None:
    acme, globex = await add_customer(stand.db, "acme"), await add_customer(stand.db, "globex")
    absorbed = format_id("request", add_usage(db_url, acme, NOON, account="absorbed"))
    theirs = format_id("request", add_usage(db_url, globex, NOON))
    for entry, status, code in (
        (absorbed, 409, "conflict"),
        (theirs, 404, "not_found"),
        (f"req_{uuid7().hex}", 404, "not_found"),
        (f"adj_{uuid7().hex}", 404, "not_found"),
        ("nonsense", 404, "not_found"),
    ):
        body = {"entry_id": entry, "reason": "x"}
        refused = await stand.admin.post(path(acme, "reversals"), json=body)
        assert error_of(refused, status, code)["param"] == "entry_id"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"amount_usd": "0"}, "amount_usd"),
        ({"amount_usd": "-5"}, "amount_usd"),
        ({"amount_usd": 5}, "amount_usd"),
        ({"amount_usd": "0.0000000000001"}, "amount_usd"),
        ({"amount_usd": "1000000000000"}, "amount_usd"),
        ({"kind": "gift"}, "kind"),
        ({"reason": ""}, "reason"),
        ({"reason": "a\nb"}, "reason"),
    ],
)
async def test_bad_input_is_refused_by_name(
    stand: Stand, changes: dict[str, Any], param: str
) -> None:
    acme = await add_customer(stand.db)
    body = {"kind": "credit", "amount_usd": "1", "reason": "x"} | changes

    refused = await stand.admin.post(path(acme, "adjustments"), json=body)

    assert error_of(refused, 400, "invalid_request")["param"] == param
    assert await balance(stand, acme) == "0.000000000000"


async def test_a_viewer_may_read_but_not_give(stand: Stand) -> None:
    acme = await add_customer(stand.db)
    viewer = await stand.login("viewer")

    assert (await viewer.get(path(acme, "balance"))).status_code == 200
    body = {"kind": "credit", "amount_usd": "1", "reason": "x"}
    error_of(await viewer.post(path(acme, "adjustments"), json=body), 403, "permission_denied")
