"""I5 and I8: each tampering with rollups or invoices turns exactly its check red."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from loraplex_platform.audit.service import SYSTEM
from loraplex_platform.billing import adjustments
from loraplex_platform.billing.rollups import RollupWorker
from loraplex_platform.metering.invariants import check_invariants

from tests.platform.billing.test_invoices import adjust, draft, finalize
from tests.support.billing import add_usage, as_owner, first_of, month_ago
from tests.support.metering import Customer, add_customer

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database

# As the owner, whose triggers are off: what nobody else can do.
_TRIGGERS_OFF = "set session_replication_role = replica; "


async def broken(db: Database) -> set[str]:
    report = await check_invariants(db.sessions)
    return {check.name for check in report.checks if check.code in ("I5", "I8") and not check.ok}


@pytest.fixture
async def acme(db: Database, db_url: str) -> Customer:
    """A tenant with a final invoice, a draft, a credit and its reversal."""
    customer = await add_customer(db)
    for months in (2, 1):
        add_usage(db_url, customer, month_ago(months), completion=3 * 10**7)
    credit = await adjust(db, customer, "0.5")
    as_owner(db_url, "update ledger set occurred_at = %s where entry_id = %s", month_ago(2), credit)
    await finalize(db, await draft(db, customer, first_of(month_ago(2))))
    await draft(db, customer, first_of(month_ago(1)))
    async with db.transaction() as session:
        entry = f"adj_{credit.hex}"
        await adjustments.reverse(session, SYSTEM, customer.tenant_id, entry, "not so")
    await RollupWorker(db.sessions).run_once()
    return customer


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("update usage_daily set requests = requests + 1", {"rollups_equal_the_ledger"}),
        ("update usage_daily set key_id = null", {"rollups_equal_the_ledger"}),
        (
            "update usage_daily set amount_pico = amount_pico + 1",
            {"rollups_equal_the_ledger", "invoices_equal_the_ledger"},
        ),
        (
            "delete from usage_daily",
            {"rollups_equal_the_ledger", "invoices_equal_the_ledger"},
        ),
        (
            "insert into usage_daily select tenant_id, day + 1, row_no, project_id, key_id,"
            " deployment_id, model, adapter_version_id, price_book_id, requests, billed_requests,"
            " prompt_tokens, cached_tokens, completion_tokens, absorbed_tokens, 0, absorbed_pico"
            " from usage_daily",
            {"rollups_equal_the_ledger"},
        ),
        (
            "update ledger set amount_pico = amount_pico + 1 where kind = 'reversal'",
            {"reversals_take_back_what_was"},
        ),
        ("delete from ledger_reversals", {"reversals_take_back_what_was"}),
        (
            "update invoices set subtotal_cents = 1, adjustments_cents = total_cents - 1"
            " where status = 'final'",
            {"invoices_add_up"},
        ),
        (
            "update invoice_lines set amount_cents = amount_cents + 1 where line_no = 1",
            {"invoices_add_up"},
        ),
        (
            "update invoice_lines set quantity = quantity + 1,"
            " amount_pico = amount_pico + unit_price_pico where price_class = 'output'",
            {"invoices_add_up", "invoices_equal_the_ledger"},
        ),
        ("delete from invoice_lines", {"invoices_add_up", "invoices_equal_the_ledger"}),
        (
            "update invoice_lines set amount_pico = 2 * amount_pico, quantity = 2,"
            " amount_cents = 2 * amount_cents where section = 'adjustment'",
            {"invoices_add_up", "adjustments_are_invoiced_once"},
        ),
        (
            "update invoices set number = 'INV-000002' where status = 'final'",
            {"invoice_numbers_have_no_gap"},
        ),
        ("update invoice_series set last_number = 2", {"invoice_numbers_have_no_gap"}),
    ],
)
async def test_each_tampering_breaks_its_check(
    db: Database, db_url: str, acme: Customer, statement: str, expected: set[str]
) -> None:
    assert await broken(db) == set()

    as_owner(db_url, _TRIGGERS_OFF + statement)

    assert await broken(db) == expected


async def test_a_credit_on_two_invoices_is_found_out(
    db: Database, db_url: str, acme: Customer
) -> None:
    last = await draft(db, acme, first_of(month_ago(1)))
    await finalize(db, last)

    as_owner(
        db_url,
        _TRIGGERS_OFF + "insert into invoice_lines select i.id, x.tenant_id, 99, x.section,"
        " x.description, x.deployment_id, x.model, x.adapter_version_id, x.price_book_id,"
        " x.price_class, x.quantity, x.unit_price_pico, x.amount_pico, x.amount_cents, x.entry_id,"
        " x.entry_kind, x.entry_seq from invoice_lines x, invoices i"
        f" where x.section = 'adjustment' and i.id = '{last}'",
    )

    assert await broken(db) == {"invoices_add_up", "adjustments_are_invoiced_once"}


async def test_a_marked_day_and_late_usage_are_no_finding(
    db: Database, db_url: str, acme: Customer
) -> None:
    for _ in range(2):
        from datetime import UTC, datetime

        add_usage(db_url, acme, month_ago(2), settled_at=datetime.now(UTC))
        assert await broken(db) == set()
        await RollupWorker(db.sessions).run_once()
        assert await broken(db) == set()
