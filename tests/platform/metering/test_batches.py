"""Requests that are booked in one transaction: each as if it were alone, whatever the others are."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from loraplex_platform.db.session import open_database
from loraplex_platform.errors import InvalidApiKeyError
from loraplex_platform.metering import queries, service
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.metering.records import Reservation, Reserved, Settlement, SettleResult
from loraplex_platform.quotas.errors import QuotaExceededError

from tests.support.limits import set_limit, use_of
from tests.support.metering import Customer, add_customer, reservation, rows_of, run_sql, settlement
from tests.support.postgres import database_settings, serving_url, until_in_statement

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database, SessionFactory

PAID = 110  # tokens of `reservation`'s request at most; `settlement` makes 30 of them
_DEADLOCKS = "select deadlocks from pg_stat_database where datname = current_database()"
_slugs = itertools.count(1)


async def _together(db: Database, *asked: Reservation | Settlement) -> list[Any]:
    """All in one batch: they have come before the first of them is sent."""
    return await asyncio.gather(
        *(
            service.reserve(db.sessions, one)
            if isinstance(one, Reservation)
            else service.settle(db.sessions, one)
            for one in asked
        ),
        return_exceptions=True,
    )


class _Counting:
    """How often the database was asked, by statement."""

    def __init__(self, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        rows = db.sessions.calls.rows

        async def counting(query: str, parameters: Any) -> Any:
            self.counts[query] += 1
            return await rows(query, parameters)

        monkeypatch.setattr(db.sessions.calls, "rows", counting)


@pytest.fixture
def counting(db: Database, monkeypatch: pytest.MonkeyPatch) -> _Counting:
    return _Counting(db, monkeypatch)


async def test_many_tenants_are_one_transaction(db: Database, counting: _Counting) -> None:
    customers = [await add_customer(db, f"t{number}") for number in range(5)]
    wanted = [reservation(customer) for customer in customers for _ in range(3)]

    reserved = await _together(db, *wanted)
    settled = await _together(db, *(settlement(one.request_id) for one in wanted))

    assert all(isinstance(one, Reserved) for one in reserved)
    assert settled == [SettleResult(applied=True, amount_pico=10 * 20_000 + 20 * 40_000)] * 15
    assert counting.counts == {queries.BOOK: 2}
    assert (await check_invariants(db.sessions)).ok


async def test_what_a_settlement_gives_back_is_there_for_who_asks_beside_it(db: Database) -> None:
    customer = await add_customer(db)
    limit_id = await set_limit(db, customer, "tokens_total", str(PAID + 30))
    first = reservation(customer)
    await service.reserve(db.sessions, first)

    before = await _together(db, reservation(customer, min_completion_tokens=100))
    [settled, reserved] = await _together(
        db, settlement(first.request_id), reservation(customer, min_completion_tokens=100)
    )

    assert isinstance(before[0], QuotaExceededError)
    assert settled.applied
    assert isinstance(reserved, Reserved)
    assert await use_of(db, limit_id) == (30, PAID)


async def test_the_first_of_a_period_makes_its_window_alone(
    db: Database, counting: _Counting
) -> None:
    customer, other = await add_customer(db), await add_customer(db, "globex")
    limit_id = await set_limit(db, customer, "tokens_total", "1000")
    await run_sql(db, "delete from quota_windows")

    reserved = await _together(db, reservation(other), reservation(customer), reservation(other))

    assert all(isinstance(one, Reserved) for one in reserved)
    assert counting.counts[queries.RESERVE] == 1
    assert await use_of(db, limit_id) == (0, PAID)


async def test_a_settlement_that_cannot_be_is_its_own_error(db: Database) -> None:
    customers = [await add_customer(db, slug) for slug in ("acme", "globex")]
    wanted = [reservation(customer) for customer in customers]
    probe = reservation(customers[0], key_id=None, kind="probe")
    await _together(db, *wanted, probe)

    outcomes = await _together(
        db,
        settlement(wanted[0].request_id),
        settlement(probe.request_id),  # of another kind
        settlement(wanted[1].request_id),
        reservation(customers[1], key_id=customers[0].key_id),
        reservation(customers[1]),
    )

    assert [type(one) for one in outcomes] == [
        SettleResult,
        psycopg.errors.RaiseException,
        SettleResult,
        InvalidApiKeyError,
        Reserved,
    ]
    for one in wanted:
        request, attempts, ledger = await rows_of(db, one.request_id)
        assert (request.state, len(attempts), len(ledger)) == ("settled", 1, 1)
    request, attempts, ledger = await rows_of(db, probe.request_id)
    assert (request.state, attempts, ledger) == ("reserved", [], [])


async def test_text_that_the_database_cannot_have_breaks_nobody_elses(db: Database) -> None:
    customer, other = await add_customer(db), await add_customer(db, "globex")

    odd, good = await _together(db, reservation(customer, model="a\0b"), reservation(other))

    assert isinstance(odd, psycopg.DataError)
    assert isinstance(good, Reserved)


async def test_a_tenant_whose_quota_is_being_set_up_holds_up_nobody_else(
    db: Database, db_url: str
) -> None:
    slow, other = await add_customer(db), await add_customer(db, "globex")
    running, others_running = reservation(slow), reservation(other)
    await _together(db, running, others_running)
    with psycopg.connect(db_url) as owner:
        owner.execute("select loraplex_lock_limits(%s)", [slow.tenant_id])
        owner.execute("select 1 from requests where id = %s for update", [running.request_id])
        waiting = [
            asyncio.create_task(service.reserve(db.sessions, reservation(slow))),
            asyncio.create_task(service.settle(db.sessions, settlement(running.request_id))),
        ]
        async with asyncio.timeout(5):
            reserved, settled = await _together(
                db, reservation(other), settlement(others_running.request_id)
            )
        await until_in_statement(db_url, "loraplex_reserve(")
        await until_in_statement(db_url, "loraplex_settle(")
        assert not any(task.done() for task in waiting)
        owner.commit()

    assert isinstance(reserved, Reserved)
    assert settled.applied
    done = await asyncio.gather(*waiting)
    assert isinstance(done[0], Reserved)
    assert done[1].applied


async def test_a_window_that_somebody_holds_holds_up_nobody_else_for_long(
    db: Database, db_url: str
) -> None:
    slow, other = await add_customer(db), await add_customer(db, "globex")
    limit_id = await set_limit(db, slow, "requests", "10")
    await _together(db, reservation(slow))
    with psycopg.connect(db_url) as owner:
        owner.execute("select 1 from quota_windows for update")
        waiting = asyncio.create_task(service.reserve(db.sessions, reservation(slow)))
        async with asyncio.timeout(5):
            [reserved] = await _together(db, reservation(other))
        assert not waiting.done()
        owner.commit()

    assert isinstance(reserved, Reserved)
    await waiting
    assert await use_of(db, limit_id) == (0, 2)


async def test_two_gateways_with_windows_in_common_do_not_lock_each_other_out(
    db: Database, db_url: str
) -> None:
    customers = [await add_customer(db, f"t{number}") for number in range(4)]
    for customer in customers:
        await set_limit(db, customer, "tokens_total", "1000000")
    shared = await set_limit(db, customers[0], "requests", "1000000", scope_kind="platform")

    async def run(sessions: SessionFactory, order: list[Customer]) -> None:
        for _ in range(5):
            wanted = [reservation(customer) for customer in order]
            await asyncio.gather(*(service.reserve(sessions, one) for one in wanted))
            await asyncio.gather(
                *(service.settle(sessions, settlement(one.request_id)) for one in wanted)
            )

    async with open_database(database_settings(serving_url(db_url))) as second:
        with psycopg.connect(db_url, autocommit=True) as owner:
            [(before,)] = owner.execute(_DEADLOCKS).fetchall()
            await asyncio.gather(run(db.sessions, customers), run(second.sessions, customers[::-1]))
            owner.execute("select pg_stat_force_next_flush()")
            [(after,)] = owner.execute(_DEADLOCKS).fetchall()

    assert after == before
    assert await use_of(db, shared) == (2 * 5 * len(customers), 0)
    assert (await check_invariants(db.sessions)).ok


# ---------------------------------------------------------------------------- the property


_REQUEST = st.fixed_dictionaries(
    {
        "whose": st.integers(0, 1),
        "max_tokens": st.integers(1, 60),
        "min_tokens": st.integers(1, 60),
        "how": st.sampled_from(["good", "good", "good", "twice", "stranger's key"]),
    }
)
_ENDING = st.sampled_from(["good", "good", "twice", "lost lease", "none", "fault", "retried"])


async def _pair(db: Database, limits: list[tuple[str, int]]) -> list[Customer]:
    pair = [await add_customer(db, f"p{next(_slugs)}") for _ in range(2)]
    for metric, value in limits:
        await set_limit(db, pair[0], metric, str(value))
    return pair


def _reservations(pair: list[Customer], requests: list[dict[str, Any]]) -> list[Reservation]:
    wanted = []
    for request in requests:
        whose = request["whose"]
        key_id = pair[1 - whose if request["how"] == "stranger's key" else whose].key_id
        one = reservation(
            pair[whose],
            key_id=key_id,
            est_completion_tokens=request["max_tokens"],
            min_completion_tokens=min(request["min_tokens"], request["max_tokens"]),
        )
        wanted += [one] * (2 if request["how"] == "twice" else 1)
    return wanted


def _settlements(
    wanted: list[Reservation], outcomes: list[Any], endings: list[str]
) -> list[Settlement]:
    found = []
    running = {
        one.request_id: got
        for one, got in zip(wanted, outcomes, strict=True)
        if isinstance(got, Reserved)
    }
    for (request_id, got), how in zip(running.items(), itertools.cycle(endings), strict=False):
        lease_token = 7 if how == "lost lease" else got.lease_token
        outcome = "fault" if how == "fault" else "completed"
        earlier = (settlement(request_id, usage_outcome="fault").usage,) if how == "retried" else ()
        one = settlement(
            request_id,
            lease_token,
            usage_outcome=outcome,
            usage_generated=got.max_tokens,
            usage_attempt=2,
            earlier=earlier,
        )
        found += [one] * {"twice": 2, "none": 0}.get(how, 1)
    return found


def _told(outcome: Any) -> object:
    if isinstance(outcome, Reserved):
        return "reserved", outcome.lease_token, outcome.max_tokens
    return outcome if isinstance(outcome, SettleResult) else (type(outcome), str(outcome))


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    limits=st.lists(
        st.tuples(st.sampled_from(["tokens_total", "tokens_out", "requests"]), st.integers(1, 150)),
        max_size=2,
        unique_by=lambda limit: limit[0],
    ),
    first=st.lists(_REQUEST, min_size=1, max_size=5),
    second=st.lists(_REQUEST, max_size=5),
    endings=st.lists(_ENDING, min_size=1, max_size=5),
)
async def test_a_batch_gives_each_what_it_would_get_alone(
    db: Database,
    limits: list[tuple[str, int]],
    first: list[dict[str, Any]],
    second: list[dict[str, Any]],
    endings: list[str],
) -> None:
    """The same twice, for tenants alike: in batches, and one after another."""
    together, apart = await _pair(db, limits), await _pair(db, limits)

    wanted = _reservations(together, first)
    batch = await _together(db, *wanted)
    ends = _settlements(wanted, batch, endings)
    others = _reservations(together, second)
    batch += await _together(db, *ends, *others)

    alone_wanted = _reservations(apart, first)
    alone = [(await _together(db, one))[0] for one in alone_wanted]
    alone_ends = _settlements(alone_wanted, alone, endings)
    for one in (*alone_ends, *_reservations(apart, second)):
        alone += await _together(db, one)

    assert [_told(one) for one in batch] == [_told(one) for one in alone]
    assert [u for t in together for u in await _use(db, t)] == [
        u for t in apart for u in await _use(db, t)
    ]


async def _use(db: Database, customer: Customer) -> list[tuple[Any, ...]]:
    query = """
    select coalesce((select json_agg(json_build_array(metric, committed, held) order by metric)
            from quota_windows where tenant_id = %(tenant_id)s),
        '[]')::text, count(*)::integer, coalesce(sum(amount_pico), 0)::text
    from ledger where tenant_id = %(tenant_id)s
    """
    return [await db.sessions.calls.call(query, {"tenant_id": customer.tenant_id})]
