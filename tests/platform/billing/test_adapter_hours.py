"""Adapter-hours: what the worker books of a history of deployments, against a recomputation in Python."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loraplex_platform.audit.service import SYSTEM
from loraplex_platform.billing import invoices
from loraplex_platform.billing.adapter_hours import MODEL_NAME, AdapterHoursWorker
from loraplex_platform.billing.adjustments import balance_of
from loraplex_platform.billing.document import compose
from loraplex_platform.billing.invoices import InvoiceWorker
from loraplex_platform.billing.price_schemas import Price, price_pico, show_price
from loraplex_platform.db import Invoice, InvoiceLine, PriceItem, Tenant
from loraplex_platform.ids import format_id, uuid7
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.metering.usage import UsageQuery, report_usage
from pydantic import ValidationError
from sqlalchemy import select, text

from tests.support.adapter_hours import Book, Booked, Event, recompute, set_history
from tests.support.billing import ISSUER, NIL, Model, add_book, add_model, as_owner, set_zone
from tests.support.metering import Customer, add_customer

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database

HOUR = timedelta(hours=1)


async def ledger(db: Database) -> Booked:
    async with db.sessions() as session:
        rows = await session.execute(
            text(
                "select adapter_version_id, price_book_id, day, sum(seconds), sum(amount_pico)"
                " from ledger where kind = 'hours' group by 1, 2, 3"
                " having sum(seconds) <> 0 or sum(amount_pico) <> 0"
            )
        )
        return {(row[0], row[1], row[2]): (int(row[3]), int(row[4])) for row in rows}


def add_version(url: str, customer: Customer, model: Model) -> UUID:
    """Another version of the model's adapter."""
    version_id = uuid7()
    as_owner(
        url,
        "insert into adapter_versions (id, tenant_id, adapter_id, version, digest, status,"
        " size_bytes, rank, target_modules, report)"
        " values (%s, %s, %s, 4, %s, 'ready', 1, 8, '{}', '{}')",
        *(version_id, customer.tenant_id, model.adapter_id, "sha256:" + version_id.hex * 2),
    )
    return version_id


def days_from(start: date, count: int) -> list[date]:
    return [start + timedelta(days=number) for number in range(count)]


BEGIN = datetime(2026, 3, 6, tzinfo=UTC)
# Within four weeks, in which clocks change in New York (8 March) and in Berlin (29 March).
TIMES = st.integers(0, 28 * 86_400 * 1000).map(lambda ms: BEGIN + timedelta(milliseconds=ms))
PRICES = st.none() | st.integers(0, 10**13)


@pytest.mark.parametrize("zone", ["America/New_York", "Europe/Berlin", "Asia/Kathmandu"])
async def test_what_is_booked_equals_an_independent_recomputation(
    db: Database, db_url: str, zone: str
) -> None:
    customer = await add_customer(db, "acme")
    set_zone(db_url, customer, zone)
    model, other = (add_model(db_url, customer, name) for name in ("one", "two"))
    versions = [model.adapter_version_id, add_version(db_url, customer, model), None]
    change = BEGIN + timedelta(days=11, hours=7, minutes=13, seconds=59, microseconds=250_001)
    old, new = uuid7(), uuid7()
    books: list[Book] = []
    days = days_from(date(2026, 3, 5), 30)
    clear = "truncate deployment_events; delete from adapter_hours_progress"

    @settings(
        max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(
        moves=st.lists(
            st.tuples(TIMES, st.sampled_from([model, other]), st.integers(0, 2)), max_size=12
        ),
        late=st.lists(
            st.tuples(TIMES, st.sampled_from([model, other]), st.integers(0, 2)), max_size=3
        ),
        old_price=PRICES,
        new_price=PRICES,
    )
    def run(
        moves: list[tuple[datetime, Model, int]],
        late: list[tuple[datetime, Model, int]],
        old_price: int | None,
        new_price: int | None,
    ) -> None:
        with psycopg.connect(db_url) as owner:
            owner.execute(clear)
            owner.execute("delete from ledger where kind = 'hours'")
            owner.execute("set session_replication_role = replica")
            owner.execute("delete from price_items where price_class = 'adapter_hour'")
            for book, price in ((old, old_price), (new, new_price)):
                if price is not None:
                    owner.execute(
                        "insert into price_items (price_book_id, target_kind, price_class, price_pico)"
                        " values (%s, 'any_adapter', 'adapter_hour', %s)",
                        [book, price],
                    )
        books[:] = [
            Book(old, datetime(2020, 1, 1, tzinfo=UTC), change, old_price),
            Book(new, change, None, new_price),
        ]
        known = [Event(at, one.deployment_id, versions[which]) for at, one, which in moves]
        events = list({(event.at, event.deployment_id): event for event in known}.values())
        set_history(db_url, customer, events)
        check(events)
        # What comes to be known later is corrected by further lines, and booked again changes nothing.
        known += [Event(at, one.deployment_id, versions[which]) for at, one, which in late]
        events = list({(event.at, event.deployment_id): event for event in known}.values())
        set_history(db_url, customer, events)
        check(events)

    def check(events: list[Event]) -> None:
        with psycopg.connect(db_url) as owner:
            for expected_lines in (None, 0):
                lines = [
                    owner.execute(
                        "select loraplex_book_adapter_hours(%s, %s)", [customer.tenant_id, day]
                    ).fetchall()[0][0]
                    for day in days
                ]
                assert expected_lines is None or sum(lines) == expected_lines
            rows = owner.execute(
                "select adapter_version_id, price_book_id, day, sum(seconds), sum(amount_pico),"
                " count(distinct entry_id) from ledger where kind = 'hours' group by 1, 2, 3"
            ).fetchall()
        assert all(row[5] == 1 for row in rows)
        booked = {(row[0], row[1], row[2]): (int(row[3]), int(row[4])) for row in rows}
        expected = recompute(events, zone, days, books)
        assert {key: both for key, both in booked.items() if any(both)} == expected

    with psycopg.connect(db_url) as owner:
        owner.execute("set session_replication_role = replica")
        owner.execute("delete from price_items")
        owner.execute("delete from price_books")
        for book, begins, ends in (
            (old, datetime(2020, 1, 1, tzinfo=UTC), change),
            (new, change, None),
        ):
            owner.execute(
                "insert into price_books (id, name, status, effective_from, effective_to, published_at)"
                " values (%s, 'b', 'published', %s, %s, %s)",
                [book, begins, ends, begins],
            )
    run()


async def test_days_of_23_and_25_hours(db: Database, db_url: str) -> None:
    customer = await add_customer(db, "acme")
    set_zone(db_url, customer, "Europe/Berlin")
    model = add_model(db_url, customer)
    add_book(db_url, "hours", datetime(2025, 1, 1, tzinfo=UTC), {hourly(): 7})
    set_history(db_url, customer, [deployed(model, datetime(2025, 10, 1, tzinfo=UTC))])

    async with db.sessions.begin() as session:
        for day in (date(2025, 10, 25), date(2025, 10, 26), date(2026, 3, 29)):
            await session.execute(
                text("select loraplex_book_adapter_hours(:tenant, :day)"),
                {"tenant": customer.tenant_id, "day": day},
            )

    found = {key[2].isoformat(): both for key, both in (await ledger(db)).items()}
    assert found == {
        "2025-10-25": (24 * 3600, 24 * 7),
        "2025-10-26": (25 * 3600, 25 * 7),
        "2026-03-29": (23 * 3600, 23 * 7),
    }


async def test_the_history_is_what_deployments_pointed_at(db: Database, db_url: str) -> None:
    customer = await add_customer(db, "acme")
    model = add_model(db_url, customer)

    def history() -> list[UUID | None]:
        rows = as_owner(db_url, "select adapter_version_id from deployment_events order by at, id")
        return [row[0] for row in rows]

    assert history() == [model.adapter_version_id]
    as_owner(db_url, "update deployments set updated_at = now() where not tenant_id is null")
    assert history() == [model.adapter_version_id]
    as_owner(
        db_url, "update deployments set archived_at = now() where id = %s", model.deployment_id
    )
    assert history() == [model.adapter_version_id, None]
    async with db.sessions() as session:
        for statement in (
            "delete from deployment_events",
            "update deployment_events set at = now()",
        ):
            with pytest.raises(Exception, match="permission denied"):
                await session.execute(text(statement))
            await session.rollback()


def hourly(kind: str = "any_adapter", target: UUID = NIL) -> tuple[str, UUID, str]:
    return (kind, target, "adapter_hour")


def deployed(model: Model, at: datetime) -> Event:
    return Event(at, model.deployment_id, model.adapter_version_id)


def last_months(count: int) -> list[date]:
    first = datetime.now(UTC).date().replace(day=1)
    months = []
    for _ in range(count):
        first = (first - timedelta(days=1)).replace(day=1)
        months.append(first)
    return months[::-1]


async def test_hours_are_booked_reported_and_invoiced_once(db: Database, db_url: str) -> None:
    customer = await add_customer(db, "acme")
    model = add_model(db_url, customer, "bot")
    # The same version under another name, all the while: it is deployed once.
    second = uuid7()
    as_owner(
        db_url,
        "insert into deployments (id, tenant_id, public_name, base_model_id) values (%s, %s, 'b2', %s)",
        *(second, customer.tenant_id, model.base_model_id),
    )
    month, last = last_months(2)
    first_at = datetime(month.year, month.month, 10, 6, 30, 0, 500_000, tzinfo=UTC)
    price = 10**10 + 1  # does not divide by the seconds of an hour
    book = add_book(
        db_url, "hours", datetime(month.year, month.month, 1, tzinfo=UTC), {hourly(): price}
    )
    priced = Book(book, BEGIN - timedelta(days=999), None, price)
    events = [deployed(model, first_at), Event(first_at, second, model.adapter_version_id)]
    set_history(db_url, customer, events)
    worker = AdapterHoursWorker(db.sessions)

    booked = await worker.run_once()

    today = datetime.now(UTC).date()
    days = days_from(first_at.date(), (today - first_at.date()).days)
    expected = recompute(events, "UTC", days, [priced])
    assert booked == len(days)
    assert await ledger(db) == expected
    assert await worker.run_once() == 0
    total = sum(pico for _, pico in expected.values())
    async with db.sessions() as session:
        assert (await balance_of(session, customer.tenant_id)).total_pico == total
        query = UsageQuery(
            start=first_at - timedelta(days=40), end=datetime.now(UTC), group_by=("model",)
        )
        page = await report_usage(session, query)
    assert {row.model for row in page.rows} == {MODEL_NAME}
    assert sum(row.adapter_seconds for row in page.rows) == sum(s for s, _ in expected.values())
    assert sum(row.cost_pico for row in page.rows) == total

    assert await InvoiceWorker(db.sessions, ISSUER, timedelta(0)).run_once() == 4  # two, and final
    of_month = {
        first: {key: both for key, both in expected.items() if key[2].replace(day=1) == first}
        for first in (month, last)
    }
    lines = await invoiced(db)
    assert [(line.price_class, line.section) for line in lines] == [("adapter_hour", "usage")] * 2
    for line, first in zip(lines, (month, last), strict=True):
        assert int(line.quantity) == sum(seconds for seconds, _ in of_month[first].values())
        assert int(line.amount_pico) == sum(pico for _, pico in of_month[first].values())
        assert int(line.unit_price_pico) == price

    # Somebody finds that it was taken away in the first month: the ledger is corrected, and so is the
    # next invoice, but not those that have numbers.
    ended_at = first_at + timedelta(days=3)
    events = [event for one in events for event in (one, Event(ended_at, one.deployment_id, None))]
    set_history(db_url, customer, events)
    as_owner(db_url, "delete from adapter_hours_progress")
    await worker.run_once()
    assert await ledger(db) == recompute(events, "UTC", days, [priced])
    report = await check_invariants(db.sessions)
    assert [one for one in report.checks if not one.ok and one.code in ("I1", "I5", "I8")] == []
    async with db.sessions() as session:
        tenant = await session.get_one(Tenant, customer.tenant_id)
        this_month = await invoices.draft(session, SYSTEM, ISSUER, tenant, today.replace(day=1))
        [line] = await session.scalars(
            select(InvoiceLine).where(InvoiceLine.invoice_id == this_month.id)
        )
    assert line.section == "earlier"
    in_time = sum(pico for of in of_month.values() for _, pico in of.values())
    assert int(line.amount_pico) == sum(pico for _, pico in (await ledger(db)).values()) - in_time
    assert int(line.amount_pico) < 0


async def invoiced(db: Database) -> list[InvoiceLine]:
    async with db.sessions() as session:
        statement = (
            select(InvoiceLine)
            .join(Invoice, Invoice.id == InvoiceLine.invoice_id)
            .where(Invoice.status == "final")
            .order_by(Invoice.period_start)
        )
        return list((await session.scalars(statement)).all())


async def test_the_paper_shows_hours(db: Database, db_url: str) -> None:
    customer = await add_customer(db, "acme")
    model = add_model(db_url, customer, "bot")
    [month] = last_months(1)
    begin = datetime(month.year, month.month, 2, tzinfo=UTC)
    add_book(db_url, "hours", begin, {hourly("adapter", model.adapter_id): 12_500_000_000})
    ended = Event(begin + timedelta(hours=1234 % 48, seconds=1), model.deployment_id, None)
    set_history(db_url, customer, [deployed(model, begin), ended])
    await AdapterHoursWorker(db.sessions).run_once()
    await InvoiceWorker(db.sessions, ISSUER, timedelta(0)).run_once()

    async with db.sessions() as session:
        invoice = (await session.scalars(select(Invoice))).one()
        lines = list((await session.scalars(select(InvoiceLine))).all())
    document = compose(invoice, lines)

    [line] = document.sections[0].lines
    assert line.description == "bot-adapter v3, deployed (prices: hours)"
    assert (line.unit, line.quantity) == ("Hours deployed", "34.0003")
    assert line.unit_price == "0.0125 per hour"
    assert line.exact == "0.425003472222"
    assert any("whole seconds" in note for note in document.notes)


@pytest.mark.parametrize("kind", ["any_base", "deployment"])
def test_a_name_has_no_price_of_an_hour(kind: str) -> None:
    target = None if kind == "any_base" else format_id("deployment", uuid7())
    with pytest.raises(ValidationError, match="adapter_hour is for any_adapter"):
        Price(
            target_kind=kind,  # type: ignore[arg-type]  # both are kinds
            target_id=target,
            price_class="adapter_hour",
            price_usd="0.01",
        )


def test_a_price_of_an_hour_has_twelve_places() -> None:
    price = Price(target_kind="any_adapter", price_class="adapter_hour", price_usd="0.010000000001")
    item = PriceItem(
        target_kind="any_adapter", target_id=NIL, price_class="adapter_hour", price_pico=0
    )

    item.price_pico = price_pico(price)

    assert item.price_pico == 10**10 + 1
    shown = show_price(item)
    assert (shown.price_usd, shown.per) == ("0.010000000001", "hour")


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ("update ledger set seconds = seconds + 1 where kind = 'hours'", "hours_equal_the_history"),
        (
            "update ledger set amount_pico = amount_pico + 1 where kind = 'hours'",
            "hours_equal_the_history",
        ),
        ("delete from ledger where kind = 'hours'", "hours_equal_the_history"),
        ("delete from deployment_events", "hours_equal_the_history"),
    ],
)
async def test_the_invariant_sees_what_is_wrong(
    db: Database, db_url: str, change: str, broken: str
) -> None:
    customer = await add_customer(db, "acme")
    model = add_model(db_url, customer)
    begin = datetime.now(UTC).replace(hour=0, minute=0) - timedelta(days=5)
    add_book(db_url, "hours", begin, {hourly("base_model", model.base_model_id): 10**9})
    set_history(db_url, customer, [deployed(model, begin + HOUR)])
    await AdapterHoursWorker(db.sessions).run_once()
    assert await broken_rules(db) == []

    as_owner(db_url, change)

    assert await broken_rules(db) == [broken]


async def broken_rules(db: Database) -> list[str]:
    """But for that of partitions: days of months before the database's first are in none of their own."""
    report = await check_invariants(db.sessions)
    names = [check.name for check in report.checks if not check.ok]
    return [name for name in names if name != "partitions_are_ahead"]
