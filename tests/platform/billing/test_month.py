"""A month of traffic: invoices equal what SQL of its own makes of the requests, to the pico-dollar.

Three time zones (one with a change of clocks in the month, one 5:45 from UTC), two price books, prices
of every kind of target, faults, probes and requests just outside of the month. The recomputation knows
requests, attempts and price items; not the ledger, the rollups or any function of ours, and the
boundaries of months and days come from Python's own time zones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING
from uuid import UUID
from zoneinfo import ZoneInfo

import psycopg
import pytest
from loraplex_platform.billing.adapter_hours import MODEL_NAME, AdapterHoursWorker
from loraplex_platform.billing.invoices import InvoiceWorker
from loraplex_platform.billing.rollups import RollupWorker
from loraplex_platform.db import Invoice, InvoiceLine
from loraplex_platform.db.session import open_database
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.metering.usage import UsageQuery, report_usage
from sqlalchemy import select

from tests.support.adapter_hours import Book, Event, set_history
from tests.support.adapter_hours import recompute as recompute_hours
from tests.support.billing import ISSUER, NIL, STANDARD_BOOK, add_book, add_model, set_zone
from tests.support.metering import add_customer
from tests.support.postgres import database_settings, serving_url
from tests.support.traffic import Caller, add_traffic

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database

ZONES = ("Europe/Berlin", "America/New_York", "Asia/Kathmandu")
# Clocks change on 8 March in New York and on 29 March in Berlin.
MONTH = date(2026, 3, 1)
CHANGE = datetime(2026, 3, 17, 13, 37, 11, tzinfo=UTC)
STANDARD_HOUR, SPRING_HOUR = 10_000_000_019, 7_777_777_777  # no multiples of an hour's seconds
Key = tuple[UUID, date, str, UUID | None, UUID, str]

_RECOMPUTED = """
with targets as (
    select distinct r.price_book_id as book, r.deployment_id, r.adapter_version_id,
        v.adapter_id, d.base_model_id
    from requests r
    left join adapter_versions v on v.id = r.adapter_version_id
    left join deployments d on d.id = r.deployment_id
), classes (class) as (values ('input'), ('cached_input'), ('output'), ('request')),
own as (
    select t.*, c.class, coalesce(
        (select price_pico from price_items where price_book_id = book and price_class = class
            and target_kind = 'deployment' and target_id = deployment_id),
        (select price_pico from price_items where price_book_id = book and price_class = class
            and target_kind = 'adapter' and target_id = adapter_id),
        (select price_pico from price_items where price_book_id = book and price_class = class
            and target_kind = 'base_model' and target_id = base_model_id),
        (select price_pico from price_items where price_book_id = book and price_class = class
            and target_kind = case when adapter_version_id is null then 'any_base'
                else 'any_adapter' end)
    ) as price
    from targets t cross join classes c
), priced as (
    select o.*, coalesce(o.price, case o.class
        when 'cached_input' then (select i.price from own i where i.class = 'input'
            and i.book = o.book and i.deployment_id is not distinct from o.deployment_id
            and i.adapter_version_id is not distinct from o.adapter_version_id)
        else 0 end) as paid
    from own o
), used as (
    select r.tenant_id, s.label, r.model, r.deployment_id, r.adapter_version_id, r.price_book_id,
        sum(r.prompt_tokens - r.cached_tokens) as input, sum(r.cached_tokens) as cached_input,
        sum(a.billed) as output, count(*) as request
    from requests r
    join attempts a on a.request_id = r.id
    join spans s on s.tenant_id = r.tenant_id and r.admitted_at >= s.start_at
        and r.admitted_at < s.end_at
    where r.kind = 'user' and a.outcome = 'completed'
    group by r.tenant_id, s.label, r.model, r.deployment_id, r.adapter_version_id, r.price_book_id
)
select u.tenant_id, u.label, u.model, u.adapter_version_id, u.price_book_id, p.class,
    sum(p.paid * case p.class when 'input' then u.input when 'cached_input' then u.cached_input
        when 'output' then u.output else u.request end) as pico
from used u join priced p on p.book = u.price_book_id
    and p.deployment_id is not distinct from u.deployment_id
    and p.adapter_version_id is not distinct from u.adapter_version_id
group by u.tenant_id, u.label, u.model, u.adapter_version_id, u.price_book_id, p.class
"""


def midnight(day: date, zone: str) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(zone))


def months(zone: str) -> Iterator[tuple[date, datetime, datetime]]:
    firsts = [date(2026, month, 1) for month in (2, 3, 4, 5)]
    for first, following in pairwise(firsts):
        yield first, midnight(first, zone), midnight(following, zone)


def days(zone: str) -> Iterator[tuple[date, datetime, datetime]]:
    for number in range(60):
        day = date(2026, 2, 20) + timedelta(days=number)
        yield day, midnight(day, zone), midnight(day + timedelta(days=1), zone)


def recompute(url: str, spans: list[tuple[UUID, date, datetime, datetime]]) -> dict[Key, int]:
    """Pico-USD by tenant, span, model, adapter version, price book and class; zeros left out."""
    with psycopg.connect(url) as owner:
        owner.execute(
            "create temporary table spans (tenant_id uuid, label date, start_at timestamptz,"
            " end_at timestamptz)"
        )
        for span in spans:
            owner.execute("insert into spans values (%s, %s, %s, %s)", span)
        owner.execute("analyze spans")
        rows = owner.execute(_RECOMPUTED).fetchall()
    return {
        (tenant, label, model, version, book, name): int(pico)
        for tenant, label, model, version, book, name, pico in rows
        if pico
    }


async def callers(db: Database, url: str) -> list[Caller]:
    made = []
    for zone in ZONES:
        customer = await add_customer(db, zone.lower().replace("/", "-").replace("_", "-"))
        set_zone(url, customer, zone)
        models = [None, *(add_model(url, customer, f"bot-{n}-of-{zone}") for n in range(3))]
        made += [Caller(customer, model) for model in models]
    return made


def add_new_prices(url: str, found: list[Caller]) -> UUID:
    """A book with prices of every kind of target, not all of which have every class."""
    models = [caller.model for caller in found if caller.model is not None]
    prices = {
        ("any_base", NIL, "input"): 21_001,
        ("any_base", NIL, "output"): 43_003,
        ("any_base", NIL, "request"): 50_000_007,
        ("any_adapter", NIL, "input"): 31_013,
        ("any_adapter", NIL, "cached_input"): 15_017,
        ("any_adapter", NIL, "output"): 61_027,
        ("adapter", models[0].adapter_id, "input"): 11_003,
        ("adapter", models[0].adapter_id, "cached_input"): 0,
        ("deployment", models[1].deployment_id, "output"): 99_991,
        ("deployment", models[1].deployment_id, "request"): 1,
        ("base_model", models[2].base_model_id, "input"): 7,
        ("any_adapter", NIL, "adapter_hour"): SPRING_HOUR,
    }
    return add_book(url, "spring", CHANGE, prices)


def add_hours(
    url: str, found: list[Caller], spring: UUID
) -> dict[tuple[UUID, tuple[UUID, UUID, date]], int]:
    """Have adapters be deployed, changed and taken away; what each tenant's days come to."""
    with psycopg.connect(url) as owner:
        owner.execute("set session_replication_role = replica")
        owner.execute(
            "insert into price_items (price_book_id, target_kind, price_class, price_pico)"
            " values (%s, 'any_adapter', 'adapter_hour', %s)",
            [STANDARD_BOOK, STANDARD_HOUR],
        )
    books = [
        Book(STANDARD_BOOK, datetime(2025, 1, 1, tzinfo=UTC), CHANGE, STANDARD_HOUR),
        Book(spring, CHANGE, None, SPRING_HOUR),
    ]
    hours: dict[tuple[UUID, tuple[UUID, UUID, date]], int] = {}
    for number, zone in enumerate(ZONES):
        own = found[4 * number : 4 * number + 4]
        customer, models = own[0].customer, [one.model for one in own if one.model is not None]
        events = []
        for place, model in enumerate(models):
            begins = datetime(2026, 2, 27, 3 * place, 7, number, 11, tzinfo=UTC)
            ends = datetime(2026, 4, 2, 23 - place, 59, 59, 999_999, tzinfo=UTC)
            other = models[(place + 1) % len(models)]
            events += [
                Event(begins, model.deployment_id, model.adapter_version_id),
                Event(begins + timedelta(days=9 + place), model.deployment_id, None),
                # From here on two names point at the same version.
                Event(
                    begins + timedelta(days=11, seconds=7919),
                    model.deployment_id,
                    (other if place else model).adapter_version_id,
                ),
                Event(ends, model.deployment_id, None),
            ]
        set_history(url, customer, events)
        days = [date(2026, 2, 25) + timedelta(days=count) for count in range(40)]
        for key, (_, pico) in recompute_hours(events, zone, days, books).items():
            hours[customer.tenant_id, key] = pico
    return hours


async def _check_a_month(db: Database, url: str, rows: int) -> dict[str, float]:
    found = await callers(db, url)
    spring = add_new_prices(url, found)
    hours = add_hours(url, found, spring)
    began_s = time.perf_counter()
    add_traffic(
        url,
        found,
        rows=rows,
        start=datetime(2026, 2, 27, tzinfo=UTC),
        end=datetime(2026, 4, 3, tzinfo=UTC),
    )
    took = {"traffic": time.perf_counter() - began_s}
    tenants = {caller.customer.tenant_id: zone for caller, zone in zip(
        found, (zone for zone in ZONES for _ in range(4)), strict=True)}  # fmt: skip

    began_s = time.perf_counter()
    worker = RollupWorker(db.sessions)
    while await worker.run_once():
        pass
    took["rollups"] = time.perf_counter() - began_s
    await AdapterHoursWorker(db.sessions).run_once()
    began_s = time.perf_counter()
    assert await InvoiceWorker(db.sessions, ISSUER, timedelta(0)).run_once() == 2 * 3 * len(ZONES)
    took["invoices"] = time.perf_counter() - began_s
    print({name: round(seconds, 1) for name, seconds in took.items()})

    expected = recompute(
        url, [(tenant, *span) for tenant, zone in tenants.items() for span in months(zone)]
    )
    by_month: dict[Key, int] = {}
    for (tenant, (version, book, day)), pico in hours.items():
        key = (tenant, day.replace(day=1), MODEL_NAME, version, book, "adapter_hour")
        by_month[key] = by_month.get(key, 0) + pico
    assert len(by_month) > 20
    assert await invoiced(db) == expected | by_month
    assert len({key[4] for key in expected if key[1] == MONTH}) == 2  # both books
    assert len({key[5] for key in expected}) == 4
    daily = recompute(
        url, [(tenant, *span) for tenant, zone in tenants.items() for span in days(zone)]
    )
    assert sum(daily.values()) == sum(expected.values())
    by_day: dict[tuple[UUID, str], int] = {}
    for key, pico in daily.items():
        by_day[key[0], key[1].isoformat()] = by_day.get((key[0], key[1].isoformat()), 0) + pico
    for (tenant, (_, _, day)), pico in hours.items():
        by_day[tenant, day.isoformat()] = by_day.get((tenant, day.isoformat()), 0) + pico
    assert await reported(db) == by_day
    began_s = time.perf_counter()
    # All of it at once, as `loraplex reconcile` looks: longer than a serving process may take.
    settings = database_settings(serving_url(url))
    async with open_database(settings, statement_timeout_s=600.0) as patient:
        report = await check_invariants(patient.sessions)
    took["invariants"] = time.perf_counter() - began_s
    assert [
        check for check in report.checks if not check.ok and check.code in ("I1", "I5", "I8")
    ] == []
    return took


async def invoiced(db: Database) -> dict[Key, int]:
    """The lines of all final invoices, by the same key; zeros left out."""
    statement = (
        select(InvoiceLine, Invoice)
        .join(Invoice, Invoice.id == InvoiceLine.invoice_id)
        .where(Invoice.status == "final")
    )
    totals: dict[Key, int] = {}
    async with db.sessions() as session:
        for line, invoice in await session.execute(statement):
            zone = ZoneInfo(invoice.billing_tz)
            month = invoice.period_start.astimezone(zone).date()
            assert invoice.period_start == midnight(month, invoice.billing_tz)
            assert line.section == "usage"
            key = (
                invoice.tenant_id,
                month,
                line.model,
                line.adapter_version_id,
                line.price_book_id,
                line.price_class,
            )
            totals[key] = totals.get(key, 0) + int(line.amount_pico)
    return {key: pico for key, pico in totals.items() if pico}


async def reported(db: Database) -> dict[tuple[UUID, str], int]:
    """The usage report by tenant and day."""
    query = UsageQuery(
        start=datetime(2026, 2, 1, tzinfo=UTC),
        end=datetime(2026, 5, 1, tzinfo=UTC),
        group_by=("tenant_id",),
    )
    async with db.sessions() as session:
        page = await report_usage(session, query)
    assert page.next_page is None
    return {
        (row.tenant_id, row.date): row.cost_pico
        for row in page.rows
        if row.tenant_id is not None and row.date is not None and row.cost_pico
    }


async def test_invoices_equal_an_independent_recomputation(db: Database, db_url: str) -> None:
    await _check_a_month(db, db_url, 20_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_million_requests(
    db: Database, db_url: str, record_property: pytest.RecordProperty
) -> None:
    took = await _check_a_month(db, db_url, 1_000_000)

    for name, seconds in took.items():
        record_property(f"{name}_s", round(seconds, 1))
        print(f"{name}: {seconds:.1f} s")


def test_the_recomputation_uses_nothing_of_ours() -> None:
    for name in ("loraplex_", "ledger", "usage_daily", "invoice"):
        assert name not in _RECOMPUTED
