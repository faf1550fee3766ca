from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.metering import service
from loraplex_platform.metering.usage import (
    FILE_ROWS,
    UsageFilter,
    UsageQuery,
    UsageRow,
    report_usage,
)

from tests.support.billing import add_model, add_usage
from tests.support.metering import add_customer, reservation

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database

START = datetime(2026, 3, 14, 9, 26, 0, tzinfo=UTC)


async def report(db: Database, **changes: Any) -> list[UsageRow]:
    values: dict[str, Any] = {"start": START, "end": START + timedelta(days=2)}
    async with db.sessions() as session:
        page = await report_usage(session, UsageQuery(**values | changes))
    assert page.next_page is None
    return page.rows


async def test_a_report_sums_billed_tokens_and_exact_cost(db: Database, db_url: str) -> None:
    acme = await add_customer(db, "acme")
    add_usage(db_url, acme, START, cached=4)
    add_usage(db_url, acme, START + timedelta(minutes=1), model=add_model(db_url, acme))
    add_usage(db_url, acme, START, account="absorbed")

    [row] = await report(db)

    assert (row.start, row.end) == (
        datetime(2026, 3, 14, tzinfo=UTC),
        datetime(2026, 3, 15, tzinfo=UTC),
    )
    assert (row.requests, row.prompt_tokens, row.cached_tokens) == (3, 20, 4)
    assert (row.completion_tokens, row.absorbed_tokens) == (40, 20)
    base = 6 * 20_000 + 4 * 10_000 + 20 * 40_000
    assert row.cost_pico == base + 10 * 30_000 + 20 * 60_000
    assert (row.tenant_id, row.tenant, row.key_id, row.model) == (None, None, None, None)


async def test_what_is_open_void_or_a_probe_is_in_no_report(db: Database, db_url: str) -> None:
    acme = await add_customer(db)
    add_usage(db_url, acme, START, kind="probe", account="absorbed")
    pending, void = reservation(acme), reservation(acme)
    for wanted in (pending, void):
        await service.reserve(db.sessions, wanted)
    await service.void(db.sessions, void.request_id, 1, voided_by="gw-1")

    assert await report(db) == []
    assert await report(db, start=START, end=datetime(2100, 1, 1, tzinfo=UTC)) == []


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        ("1m", [START, START + timedelta(minutes=1), START + timedelta(days=1)]),
        ("1h", [START.replace(minute=0), START.replace(day=15, minute=0)]),
        ("1d", [START.replace(hour=0, minute=0), START.replace(day=15, hour=0, minute=0)]),
    ],
)
async def test_buckets_are_utc_minutes_hours_and_days(
    db: Database, db_url: str, width: str, expected: list[datetime]
) -> None:
    acme = await add_customer(db)
    for shift in (timedelta(seconds=1), timedelta(seconds=61), timedelta(days=1)):
        add_usage(db_url, acme, START + shift)

    rows = await report(db, bucket_width=width)

    assert [row.start for row in rows] == expected
    assert sum(row.requests for row in rows) == 3


async def test_the_range_is_half_open(db: Database, db_url: str) -> None:
    acme = await add_customer(db)
    add_usage(db_url, acme, START)
    add_usage(db_url, acme, START + timedelta(hours=1))

    rows = await report(db, start=START, end=START + timedelta(hours=1), bucket_width="1m")

    assert [row.start for row in rows] == [START]


async def test_groups_and_the_tenant_filter(db: Database, db_url: str) -> None:
    acme, globex = await add_customer(db, "acme"), await add_customer(db, "globex")
    pirate = add_model(db_url, acme, "pirate")
    add_usage(db_url, acme, START, model=pirate)
    add_usage(db_url, acme, START)
    add_usage(db_url, globex, START)

    by_tenant = await report(db, group_by=("tenant_id",))
    everything = await report(db, group_by=("tenant_id", "key_id", "model", "adapter_version_id"))
    only_acme = await report(db, group_by=("model",), only=UsageFilter(tenant_id=acme.tenant_id))

    assert {row.tenant: row.requests for row in by_tenant} == {"acme": 2, "globex": 1}
    assert {
        (row.tenant_id, row.key_id, row.model, row.adapter_version_id) for row in everything
    } == {
        (acme.tenant_id, acme.key_id, "pirate", pirate.adapter_version_id),
        (acme.tenant_id, acme.key_id, "smollm2-135m", None),
        (globex.tenant_id, globex.key_id, "smollm2-135m", None),
    }
    assert {row.model: row.requests for row in only_acme} == {"pirate": 1, "smollm2-135m": 1}


async def test_pages_cover_every_row_once(db: Database, db_url: str) -> None:
    acme = await add_customer(db)
    for number in range(7):
        add_usage(db_url, acme, START + timedelta(hours=number // 2), model=f"model-{number % 2}")
    found: list[tuple[datetime, str | None]] = []
    page = None

    async with db.sessions() as session:
        for _ in range(4):
            query = UsageQuery(
                start=START,
                end=START + timedelta(days=1),
                bucket_width="1h",
                group_by=("model",),
                limit=2,
                page=page,
            )
            answer = await report_usage(session, query)
            found += [(row.start, row.model) for row in answer.rows]
            page = answer.next_page

    assert page is None
    assert len(found) == len(set(found)) == 7
    assert found == sorted(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"end": START},
        {"start": START.replace(tzinfo=None)},
        {"limit": 0},
        {"limit": FILE_ROWS + 1},
        {"page": "nonsense"},
        {"page": "WzEsMl0"},
        {"page": "' or 1=1"},
    ],
)
async def test_a_bad_question_is_refused(db: Database, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        await report(db, **changes)
