from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

import psycopg
import pytest
from loraplex_platform.db.session import Database, open_database
from loraplex_platform.ids import uuid7
from loraplex_platform.metering import service
from loraplex_platform.metering.invariants import InvariantReport, check_invariants

from tests.support.metering import Customer, add_customer, reservation, settlement
from tests.support.postgres import database_settings, serving_url

if TYPE_CHECKING:
    from tests.support.postgres import PostgresServer

_LAND = """
insert into engine_usage (request_id, attempt, replica_id, tenant_id, finish_reason, prompt_tokens,
    cached_tokens, completion_tokens, ended_at)
values (%s, 1, 'replica-1', %s, 'stop', 10, 0, %s, now())
"""
_PRICE = """(select price_pico from price_items i
    where i.price_book_id = ledger.price_book_id and i.target_kind = 'any_base'
        and i.price_class = '{}')"""
_INPUT, _CACHED, _OUTPUT = (_PRICE.format(name) for name in ("input", "cached_input", "output"))


async def settled(db: Database, customer: Customer, **changes: object) -> UUID:
    wanted = reservation(customer)
    await service.reserve(db.sessions, wanted)
    await service.settle(db.sessions, settlement(wanted.request_id, **changes))
    return wanted.request_id


def as_owner(url: str, statement: str, *parameters: object) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(statement, parameters)


def broken(report: InvariantReport) -> set[str]:
    return {check.name for check in report.checks if not check.ok}


async def test_empty_books_are_right(db: Database) -> None:
    report = await check_invariants(db.sessions)

    assert report.ok
    assert report.identity.difference == 0
    assert {"identity", "journals_agree", "books_are_append_only"} <= {
        check.name for check in report.checks
    }


async def test_the_identity_adds_up_over_every_kind_of_ending(db: Database, db_url: str) -> None:
    customer = await add_customer(db)
    ids = [
        await settled(db, customer, usage_generated=20, usage_discarded_past_stop=3),
        await settled(db, customer, usage_generated=7, usage_outcome="aborted"),
        await settled(db, customer, usage_generated=5, usage_outcome="fault"),
    ]
    for request_id, tokens in zip(ids, (20, 7, 5), strict=True):
        as_owner(db_url, _LAND, request_id, customer.tenant_id, tokens)
    observed = await settled(
        db, customer, usage_generated=4, usage_outcome="lost", usage_source="observed"
    )
    unlanded = await settled(db, customer, usage_generated=6)
    pending = reservation(customer)
    await service.reserve(db.sessions, pending)
    as_owner(db_url, _LAND, pending.request_id, customer.tenant_id, 50)

    report = await check_invariants(db.sessions)

    identity = report.identity
    assert broken(report) == set()
    assert (identity.generated, identity.billed, identity.absorbed) == (42, 17 + 7 + 6, 5 + 4)
    assert (identity.discarded_past_stop, identity.discarded_past_abort) == (3, 0)
    assert (identity.pending_requests, identity.unlanded, identity.difference) == (1, 1, 0)
    assert unlanded != observed


async def test_a_journal_that_turns_up_after_a_loss_explains_itself(
    db: Database, db_url: str
) -> None:
    customer = await add_customer(db)
    cases = (("lost", 0), ("completed", 2), ("aborted", 0))
    for outcome, past_stop in cases:
        request_id = await settled(
            db,
            customer,
            usage_generated=4,
            usage_outcome=outcome,
            usage_source="observed",
            usage_discarded_past_stop=past_stop,
        )
        as_owner(db_url, _LAND, request_id, customer.tenant_id, 9)

    report = await check_invariants(db.sessions)

    identity = report.identity
    assert broken(report) == set()
    assert (identity.generated, identity.absorbed, identity.billed) == (27, 9, 2 + 4)
    assert (identity.discarded_past_stop, identity.discarded_past_abort) == (2 + 5, 5)


async def test_a_gateway_that_miscounts_is_found_out(db: Database, db_url: str) -> None:
    customer = await add_customer(db)
    request_id = await settled(db, customer, usage_generated=20)
    as_owner(db_url, _LAND, request_id, customer.tenant_id, 21)

    report = await check_invariants(db.sessions)

    assert broken(report) == {"identity", "journals_agree"}
    assert report.identity.difference == 1
    [check] = [check for check in report.checks if check.name == "journals_agree"]
    assert check.offenders == [f"req_{request_id.hex}"]
    assert "engine 10 (0 cached)+21, settled 10 (0 cached)+20" in check.detail


async def test_a_gateway_that_calls_a_prompt_cached_is_found_out(db: Database, db_url: str) -> None:
    customer = await add_customer(db)
    request_id = await settled(db, customer, usage_cached_tokens=4)
    assert (await check_invariants(db.sessions)).ok
    as_owner(db_url, _LAND, request_id, customer.tenant_id, 20)

    assert broken(await check_invariants(db.sessions)) == {"journals_agree"}


async def test_an_absorbed_charge_is_checked_to_the_token(db: Database, db_url: str) -> None:
    await settled(db, await add_customer(db), usage_outcome="fault")
    assert (await check_invariants(db.sessions)).ok

    as_owner(
        db_url,
        "update ledger set completion_tokens = completion_tokens - 1,"
        f" amount_pico = amount_pico - {_OUTPUT}",
    )

    assert broken(await check_invariants(db.sessions)) == {"ledger_equals_attempts"}


async def test_work_without_a_request_is_found_out(db: Database, db_url: str) -> None:
    customer = await add_customer(db)
    as_owner(db_url, _LAND, uuid7(), customer.tenant_id, 8)

    report = await check_invariants(db.sessions)

    assert broken(report) == {"identity", "journal_has_request"}
    assert report.identity.difference == 8


async def test_work_for_another_tenant_is_found_out(db: Database, db_url: str) -> None:
    customer = await add_customer(db)
    request_id = await settled(db, customer)
    as_owner(db_url, _LAND, request_id, uuid7(), 20)

    assert broken(await check_invariants(db.sessions)) == {"journals_agree", "journal_has_request"}


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("delete from ledger", {"settled_has_one_ledger_row"}),
        ("update ledger set amount_pico = amount_pico + 1", {"amount_is_tokens_times_price"}),
        (
            "update ledger set completion_tokens = 19, amount_pico = amount_pico - 40000",
            {"ledger_equals_attempts"},
        ),
        (
            "update ledger set prompt_tokens = prompt_tokens + 1,"
            f" amount_pico = amount_pico + {_INPUT}",
            {"ledger_equals_attempts"},
        ),
        (
            "update ledger set cached_tokens = 4,"
            f" amount_pico = amount_pico - 4 * ({_INPUT} - {_CACHED})",
            {"ledger_equals_attempts"},
        ),
        ("delete from attempts", {"ledger_equals_attempts"}),
        ("update attempts set outcome = 'fault'", {"ledger_equals_attempts"}),
        ("update requests set state = 'voided'", {"settled_has_one_ledger_row"}),
        ("delete from requests", {"settled_has_one_ledger_row"}),
        ("update ledger set account = 'absorbed'", {"ledger_equals_attempts"}),
        (
            "update requests set state = 'reserved', settled_at = null,"
            " lease_until = now() - interval '1 min'",
            {"no_stale_reservation", "settled_has_one_ledger_row"},
        ),
        (
            "update attempts set recorded_at = now() - interval '61 s'",
            {"attempts_are_confirmed"},
        ),
    ],
)
async def test_each_tampering_breaks_its_check(
    db: Database, db_url: str, statement: str, expected: set[str]
) -> None:
    await settled(db, await add_customer(db))
    assert (await check_invariants(db.sessions)).ok

    as_owner(db_url, statement)

    assert broken(await check_invariants(db.sessions)) == expected


async def test_changes_of_the_schema_break_their_checks(postgres_server: PostgresServer) -> None:
    with postgres_server.clone() as url:
        as_owner(url, "grant delete on ledger to loraplex_app")
        as_owner(url, "drop table " + _this_month(url, "requests"))
        async with open_database(database_settings(serving_url(url))) as db:
            await settled(db, await add_customer(db))

            report = await check_invariants(db.sessions)

    assert broken(report) == {"books_are_append_only", "partitions_are_ahead"}
    details = {check.name: check.offenders for check in report.checks}
    assert details["books_are_append_only"] == ["ledger"]
    assert "requests_default" in details["partitions_are_ahead"]


async def test_a_process_that_logs_in_as_the_owner_is_found_out(db_url: str) -> None:
    async with open_database(database_settings(db_url)) as db:
        report = await check_invariants(db.sessions)

    assert broken(report) == {"books_are_append_only"}
    details = {check.name: check.offenders for check in report.checks}
    assert details["books_are_append_only"] == ["postgres"]


def _this_month(url: str, parent: str) -> str:
    with psycopg.connect(url) as connection:
        row = connection.execute(
            """select %s || to_char(now() at time zone 'UTC', '"_y"YYYY"m"MM')""", [parent]
        ).fetchone()
    assert row is not None
    return str(row[0])


async def test_only_requests_since_a_time_are_looked_at(db: Database, db_url: str) -> None:
    from datetime import UTC, datetime, timedelta

    await settled(db, await add_customer(db))
    as_owner(db_url, "delete from ledger")
    since = datetime.now(UTC) + timedelta(minutes=1)

    assert (await check_invariants(db.sessions, since=since)).ok
    assert not (await check_invariants(db.sessions)).ok
