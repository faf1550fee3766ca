"""A revision that names a price book is billed by it, to the pico-dollar, wherever that book stands in time."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from loraplex_platform.audit.service import SYSTEM
from loraplex_platform.billing import invoice_queries as queries
from loraplex_platform.billing import invoices, price_queries
from loraplex_platform.billing.adapter_hours import AdapterHoursWorker
from loraplex_platform.billing.prices import NoPriceError
from loraplex_platform.billing.rollups import RollupWorker
from loraplex_platform.db import Tenant
from loraplex_platform.ids import uuid7
from loraplex_platform.metering import queries as metering
from loraplex_platform.metering import service
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.metering.policy import AttemptUsage
from loraplex_platform.metering.usage import UsageFilter, UsageQuery, report_usage
from loraplex_platform.quotas.errors import LimitError
from psycopg import errors

from tests.support.adapter_hours import Event, set_history
from tests.support.billing import (
    ISSUER,
    NIL,
    STANDARD_BOOK,
    Model,
    add_book,
    add_model,
    as_owner,
    first_of,
    month_ago,
)
from tests.support.limits import set_limit
from tests.support.metering import Customer, add_customer, reservation, rows_of, settlement
from tests.support.revisions import add_revision, age

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database

OWN = {
    ("any_adapter", NIL, "input"): 3,
    ("any_adapter", NIL, "cached_input"): 1,
    ("any_adapter", NIL, "output"): 7,
    ("any_adapter", NIL, "request"): 11,
}
# Ten prompt tokens of which four were cached, and twenty out.
OWN_PICO = 6 * 3 + 4 * 1 + 20 * 7 + 11
STANDARD_PICO = 6 * 30_000 + 4 * 15_000 + 20 * 60_000


def own_book(url: str, prices: dict[Any, int] | None = None, *, ends: bool = True) -> UUID:
    """A book that was in force for a year, and is not any more."""
    now = datetime.now(UTC)
    book = add_book(
        url, "acme's contract", now - timedelta(days=800), OWN if prices is None else prices
    )
    if ends:
        restore_standard(url, now - timedelta(days=400))
    return book


def restore_standard(url: str, begins: datetime) -> None:
    """The standard book's prices hold again from then on."""
    prices = {
        (kind, target, price_class): int(pico)
        for kind, target, price_class, pico in as_owner(
            url,
            "select target_kind, target_id, price_class, price_pico from price_items"
            " where price_book_id = %s",
            STANDARD_BOOK,
        )
    }
    add_book(url, "list prices", begins, prices)


def wanted_of(customer: Customer, model: Model, revision_id: UUID, **changes: Any) -> Any:
    return reservation(
        customer,
        model=model.name,
        deployment_id=model.deployment_id,
        revision_id=revision_id,
        adapter_version_id=model.adapter_version_id,
        **changes,
    )


async def used(db: Database, wanted: Any) -> int:
    """Reserve and settle; what it cost."""
    await service.reserve(db.sessions, wanted)
    done = await service.settle(
        db.sessions, settlement(wanted.request_id, kind=wanted.kind, usage_cached_tokens=4)
    )
    assert done.applied
    return done.amount_pico


async def sound(db: Database) -> None:
    report = await check_invariants(db.sessions)
    assert [c for c in report.checks if c.code in ("I1", "I2", "I5", "I8") and not c.ok] == []


@pytest.mark.parametrize("stands", ["ended", "retired", "withdrawn", "not begun", "in force"])
async def test_wherever_the_book_stands_in_time_it_prices_the_revision(
    db: Database, db_url: str, stands: str
) -> None:
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    if stands == "in force":
        book = own_book(db_url, ends=False)
    elif stands in ("ended", "retired"):
        book = own_book(db_url)
    else:
        # As a publication into the future makes it.
        book = uuid7()
        as_owner(
            db_url, "insert into price_books (id, name, status) values (%s, 'b', 'draft')", book
        )
        for (kind, target, price_class), pico in OWN.items():
            as_owner(
                db_url,
                "insert into price_items (price_book_id, target_kind, target_id, price_class,"
                " price_pico) values (%s, %s, %s, %s, %s)",
                *(book, kind, target, price_class, pico),
            )
        as_owner(
            db_url,
            "update price_books set effective_to = now() + interval '9 days'"
            " where status = 'published' and effective_to is null",
        )
        as_owner(
            db_url,
            "update price_books set status = 'published', published_at = now(),"
            " effective_from = now() + interval '9 days' where id = %s",
            book,
        )
    if stands in ("retired", "withdrawn"):
        as_owner(db_url, "update price_books set status = 'retired' where id = %s", book)
    revision = add_revision(db_url, model.deployment_id, price_book_id=book)
    plain = add_revision(db_url, model.deployment_id)

    own = wanted_of(customer, model, revision)
    assert await used(db, own) == OWN_PICO
    other = await used(db, wanted_of(customer, model, plain))

    assert other == (OWN_PICO if stands == "in force" else STANDARD_PICO)
    request, _, [entry] = await rows_of(db, own.request_id)
    assert request.price_book_id == entry.price_book_id == book
    assert entry.revision_id == revision
    await sound(db)


async def test_the_invoice_and_the_reports_have_it_to_the_pico(db: Database, db_url: str) -> None:
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    book = own_book(db_url)
    revision = add_revision(db_url, model.deployment_id, price_book_id=book)
    last = month_ago(1)
    for revision_id in (revision, revision, add_revision(db_url, model.deployment_id)):
        wanted = wanted_of(customer, model, revision_id)
        await used(db, wanted)
        age(db_url, wanted.request_id, last)
    await RollupWorker(db.sessions).run_once()

    async with db.transaction() as session:
        tenant = await session.get_one(Tenant, customer.tenant_id)
        invoice = await invoices.draft(session, SYSTEM, ISSUER, tenant, first_of(last))
    async with db.sessions() as session:
        lines = await queries.lines_of(session, invoice.id)
        day = UsageQuery(
            start=last - timedelta(days=1),
            end=last + timedelta(days=1),
            group_by=("price_book_id",),
        )
        by_book = (await report_usage(session, day)).rows
        hour = UsageQuery(
            start=last - timedelta(hours=1),
            end=last + timedelta(hours=1),
            bucket_width="1h",
            group_by=("revision_id",),
        )
        by_revision = (await report_usage(session, hour)).rows
        only = UsageQuery(
            start=hour.start,
            end=hour.end,
            bucket_width="1h",
            only=UsageFilter(revision_id=revision),
        )
        [alone] = (await report_usage(session, only)).rows

    billed: Counter[UUID | None] = Counter()
    for line in lines:
        billed[line.price_book_id] += int(line.amount_pico)
    assert billed[book] == 2 * OWN_PICO
    assert sum(billed.values()) == int(invoice.exact_pico) == 2 * OWN_PICO + STANDARD_PICO
    own = [line for line in lines if line.price_book_id == book]
    assert {(line.price_class, int(line.quantity), int(line.unit_price_pico)) for line in own} == {
        ("input", 12, 3),
        ("cached_input", 8, 1),
        ("output", 40, 7),
        ("request", 2, 11),
    }
    assert {row.price_book_id: row.cost_pico for row in by_book} == dict(billed)
    assert {row.revision_id: row.cost_pico for row in by_revision}[revision] == 2 * OWN_PICO
    assert (alone.requests, alone.cost_pico) == (2, 2 * OWN_PICO)
    await sound(db)


async def test_what_its_own_book_cannot_price_is_not_served_and_the_book_is_named(
    db: Database, db_url: str
) -> None:
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    book = own_book(db_url, {("any_base", NIL, "input"): 1, ("any_base", NIL, "output"): 1})
    revision = add_revision(db_url, model.deployment_id, price_book_id=book)

    with pytest.raises(
        NoPriceError, match="that its revision names, 'acme's contract', has no price"
    ):
        await service.reserve(db.sessions, wanted_of(customer, model, revision))

    # The book in force has one, and is not asked.
    plain = add_revision(db_url, model.deployment_id)
    assert await used(db, wanted_of(customer, model, plain)) == STANDARD_PICO


async def test_the_book_in_force_is_named_too_and_so_is_that_there_is_none(
    db: Database, db_url: str
) -> None:
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    revision = add_revision(db_url, model.deployment_id, price_book_id=own_book(db_url))
    plain = wanted_of(customer, model, add_revision(db_url, model.deployment_id))
    add_book(db_url, "empty", datetime.now(UTC) - timedelta(days=9), {})
    with pytest.raises(NoPriceError, match="in force, 'empty', has no price"):
        await service.reserve(db.sessions, plain)
    as_owner(
        db_url,
        "update price_books set effective_to = now() + interval '1 ms' where name = 'empty'",
    )
    with pytest.raises(NoPriceError, match="No price book is in force"):
        await service.reserve(db.sessions, plain)

    assert await used(db, wanted_of(customer, model, revision)) == OWN_PICO


async def test_quotas_of_money_hold_and_take_what_the_own_book_says(
    db: Database, db_url: str
) -> None:
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    revision = add_revision(db_url, model.deployment_id, price_book_id=own_book(db_url))
    worst = 10 * 3 + 100 * 7 + 11
    # Pico-USD as dollars: it pays two of the worst by this book, and not one by the one in force.
    await set_limit(db, customer, "cost", f"{2 * worst / 10**12:.12f}")
    first, second, third = (wanted_of(customer, model, revision) for _ in range(3))
    await service.reserve(db.sessions, first)
    request, _, _ = await rows_of(db, first.request_id)
    assert int(request.est_pico) == worst

    await service.reserve(db.sessions, second)
    with pytest.raises(LimitError):
        await service.reserve(db.sessions, third)
    for one in (first, second):
        await service.settle(db.sessions, settlement(one.request_id, usage_cached_tokens=4))

    await sound(db)


async def test_an_attempt_that_comes_late_costs_us_by_the_same_book(
    db: Database, db_url: str
) -> None:
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    book = own_book(db_url)
    revision = add_revision(db_url, model.deployment_id, price_book_id=book)
    wanted = wanted_of(customer, model, revision)
    await used(db, wanted)
    late = AttemptUsage(
        outcome="lost",
        source="journal",
        prompt_tokens=10,
        generated=5,
        attempt=2,
        replica_id="replica-2",
    )

    async with db.transaction() as session:
        await metering.absorb_late(session, wanted.request_id, late)

    _, _, entries = await rows_of(db, wanted.request_id)
    assert [(e.kind, e.account, int(e.amount_pico)) for e in entries] == [
        ("late", "absorbed", 10 * 3 + 5 * 7),
        ("usage", "revenue", OWN_PICO),
    ]
    assert {(e.price_book_id, e.revision_id) for e in entries} == {(book, revision)}
    await sound(db)


async def test_probes_and_shadows_are_absorbed_by_the_revisions_book(
    db: Database, db_url: str
) -> None:
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    revision = add_revision(db_url, model.deployment_id, price_book_id=own_book(db_url))
    for kind in ("probe", "shadow"):
        wanted = wanted_of(customer, model, revision, kind=kind, key_id=None)

        assert await used(db, wanted) == OWN_PICO

        _, _, [entry] = await rows_of(db, wanted.request_id)
        assert entry.account == "absorbed"
    async with db.sessions() as session:
        now = datetime.now(UTC)
        query = UsageQuery(
            start=now - timedelta(hours=1), end=now + timedelta(hours=1), bucket_width="1h"
        )
        assert (await report_usage(session, query)).rows == []
    await sound(db)


async def test_a_draft_is_no_book_to_bill_by_whoever_tries(db: Database, db_url: str) -> None:
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    draft = uuid7()
    as_owner(db_url, "insert into price_books (id, name, status) values (%s, 'd', 'draft')", draft)

    with pytest.raises(errors.CheckViolation, match="published price book"):
        add_revision(db_url, model.deployment_id, price_book_id=draft)
    plain = add_revision(db_url, model.deployment_id)
    with pytest.raises(errors.CheckViolation, match="published price book"):
        as_owner(
            db_url,
            "update deployment_revisions set price_book_id = %s where id = %s",
            draft,
            plain,
        )


async def test_a_new_list_says_nothing_of_deployments_with_a_book_of_their_own(
    db: Database, db_url: str
) -> None:
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    empty = uuid7()
    as_owner(db_url, "insert into price_books (id, name, status) values (%s, 'e', 'draft')", empty)

    async def unpriced() -> list[str]:
        async with db.sessions() as session:
            return await price_queries.unpriced_models(session, empty)

    assert model.name in await unpriced()
    add_revision(db_url, model.deployment_id, price_book_id=own_book(db_url), is_current=True)
    assert model.name not in await unpriced()


async def test_other_weights_change_no_price_of_what_was_used(db: Database, db_url: str) -> None:
    """Prices for a base model are those of the one that a deployment was made for."""
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    own = {("base_model", model.base_model_id, name): 5 for name in ("input", "output")}
    add_book(db_url, "by base", datetime.now(UTC) - timedelta(days=9), OWN | own)
    first = await used(db, wanted_of(customer, model, add_revision(db_url, model.deployment_id)))
    other = uuid7()
    as_owner(
        db_url,
        "insert into base_models (id, name, revision, tokenizer_sha256, chat_template_sha256,"
        " architecture) select %s, name, 'other', tokenizer_sha256, chat_template_sha256, '{}'"
        " from base_models where id = %s",
        *(other, model.base_model_id),
    )
    promoted = add_revision(db_url, model.deployment_id, is_current=True)
    as_owner(
        db_url,
        "update deployment_revisions set base_model_id = %s where id = %s",
        *(other, promoted),
    )

    second = await used(db, wanted_of(customer, model, promoted))

    assert first == second == 6 * 5 + 4 * 1 + 20 * 5 + 11
    await sound(db)
    with pytest.raises(errors.CheckViolation, match="stays with the base model"):
        as_owner(db_url, "update deployments set base_model_id = %s", other)


async def test_adapter_hours_go_by_the_book_in_force(db: Database, db_url: str) -> None:
    """A version may be deployed by several revisions at once, and costs its hour once."""
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    hour = ("any_adapter", NIL, "adapter_hour")
    own = own_book(db_url, OWN | {hour: 10**9})
    listed = add_book(
        db_url, "with hours", datetime.now(UTC) - timedelta(days=200), OWN | {hour: 7200}
    )
    add_revision(db_url, model.deployment_id, price_book_id=own, is_current=True)
    yesterday = (datetime.now(UTC) - timedelta(days=1)).replace(
        hour=0, minute=0, second=0, microsecond=0
    )
    set_history(
        db_url,
        customer,
        [
            Event(yesterday, model.deployment_id, model.adapter_version_id),
            Event(yesterday + timedelta(hours=2), model.deployment_id, None),
        ],
    )

    await AdapterHoursWorker(db.sessions).run_once()

    rows = as_owner(
        db_url, "select price_book_id, seconds, amount_pico from ledger where kind = 'hours'"
    )
    assert [(book, seconds, int(pico)) for book, seconds, pico in rows] == [(listed, 7200, 14_400)]
    await sound(db)


@pytest.mark.parametrize(
    ("tampering", "rule"),
    [
        ("update requests set price_book_id = %(standard)s", "revisions_book_bills"),
        ("update ledger set revision_id = gen_random_uuid()", "ledger_equals_attempts"),
        ("update ledger set price_book_id = %(standard)s", "ledger_equals_attempts"),
    ],
)
async def test_a_bill_by_another_book_or_revision_is_found_out(
    db: Database, db_url: str, tampering: str, rule: str
) -> None:
    customer = await add_customer(db)
    model = add_model(db_url, customer)
    revision = add_revision(db_url, model.deployment_id, price_book_id=own_book(db_url))
    await used(db, wanted_of(customer, model, revision))
    await sound(db)

    as_owner(db_url, tampering.replace("%(standard)s", f"'{STANDARD_BOOK}'"))

    report = await check_invariants(db.sessions)
    assert rule in {check.name for check in report.checks if not check.ok}
