"""I2 and I7: each tampering with windows or limits turns exactly its check red."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest
from loraplex_platform.metering import service
from loraplex_platform.metering.invariants import check_invariants

from tests.support.limits import change_limit, set_limit
from tests.support.metering import Customer, add_customer, reservation, settlement

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database

I2, I7 = "windows_equal_the_books", "hard_quotas_are_kept"


async def used(db: Database, customer: Customer) -> None:
    """One request that has ended and one that runs."""
    for is_over in (True, False):
        wanted = reservation(customer)
        await service.reserve(db.sessions, wanted)
        if is_over:
            await service.settle(db.sessions, settlement(wanted.request_id))


async def broken(db: Database) -> dict[str, str]:
    report = await check_invariants(db.sessions)
    return {check.name: check.detail for check in report.checks if not check.ok}


def as_owner(url: str, statement: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(statement)


@pytest.mark.parametrize("period", ["day", "total", "rolling"])
@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("update quota_windows set committed = committed + 1", {I2}),
        ("update quota_windows set committed = committed - 1 where committed > 0", {I2}),
        ("update quota_windows set held = held + 1", {I2}),
        ("update quota_windows set held = 0", {I2}),
        ("update quota_windows set committed = 200", {I2, I7}),
        ("update requests set windows = '{}'", {I2}),
        ("update limits set value = 139", {I7}),
    ],
)
async def test_each_tampering_breaks_its_check(
    db: Database, db_url: str, period: str, statement: str, expected: set[str]
) -> None:
    customer = await add_customer(db)
    fields = {"window_hours": 24} if period == "rolling" else {}
    await set_limit(db, customer, "tokens_total", "1000", period, **fields)
    as_owner(db_url, "update limits set value = 250")
    await used(db, customer)
    assert await broken(db) == {}

    as_owner(db_url, statement)

    assert set(await broken(db)) == expected


async def test_a_limit_lowered_below_what_is_used_is_no_break_until_more_is(
    db: Database, db_url: str
) -> None:
    customer = await add_customer(db)
    limit_id = await set_limit(db, customer, "tokens_total", "1000")
    await used(db, customer)

    await change_limit(db, limit_id, value="50")

    assert await broken(db) == {}
    as_owner(db_url, "update quota_windows set held = held + 1")
    assert set(await broken(db)) == {I2, I7}


async def test_what_an_ended_period_still_holds_is_found(db: Database, db_url: str) -> None:
    customer = await add_customer(db)
    await set_limit(db, customer, "requests", "10")
    await used(db, customer)
    as_owner(
        db_url,
        "update quota_windows set period_start = period_start - interval '9 days',"
        " period_end = period_end - interval '9 days'",
    )
    assert await broken(db) == {}

    as_owner(db_url, "update quota_windows set held = held + 1")

    assert "has ended and holds 2, reserved are 1" in (await broken(db))[I2]
