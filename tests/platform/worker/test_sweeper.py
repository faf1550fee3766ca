from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec
import pytest
from loraplex_engine.client import EngineClient
from loraplex_engine.protocol import FinishReason, Generate, SamplingParams
from loraplex_platform.db.session import DatabaseUnavailableError
from loraplex_platform.metering import queries, service
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.metering.records import Renewal, Reservation
from loraplex_platform.worker import sweeper as module
from loraplex_platform.worker.engines import ConnectedEngines
from loraplex_platform.worker.journals import JournalPuller
from loraplex_platform.worker.sweeper import Sweeper

from tests.support.engines import connected
from tests.support.fake_engine import FakeEngine, Script
from tests.support.limits import set_limit, use_of
from tests.support.metering import (
    Customer,
    add_customer,
    reservation,
    rows_of,
    run_sql,
    settlement,
)

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database


@pytest.fixture
async def engine(short_tmp_path: Path) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(short_tmp_path, replica_id="replica-1") as fake:
        yield fake


def sweeper_of(db: Database, engines: ConnectedEngines, lost_after_s: float = 0.0) -> Sweeper:
    return Sweeper(db.sessions, engines, grace_s=0.0, replica_lost_after_s=lost_after_s)


def generate_of(wanted: Reservation) -> Generate:
    return Generate(
        request_id=str(wanted.request_id),
        attempt=wanted.attempt,
        lease_token=1,
        tenant_id=str(wanted.tenant_id),
        tenant_salt=b"salt",
        prompt_token_ids=list(range(10)),
        sampling=SamplingParams(max_tokens=wanted.est_completion_tokens),
    )


async def expire(db: Database, request_id: UUID) -> None:
    await run_sql(
        db, "update requests set lease_until = now() - interval '1 s' where id=:id", id=request_id
    )


async def run_and_die(
    db: Database, engine: FakeEngine, customer: Customer, **changes: object
) -> Reservation:
    """A gateway that reserved, ran the request to its end, and died before it settled."""
    wanted = reservation(customer, **changes)
    await service.reserve(db.sessions, wanted)
    async with EngineClient(engine.address, gateway_id="gw-1") as client:
        await client.connect()
        async for _ in await client.generate(generate_of(wanted)):
            pass
    await expire(db, wanted.request_id)
    return wanted


async def assert_books_are_right(db: Database, engines: ConnectedEngines) -> None:
    await JournalPuller(db.sessions, engines).pull_once()
    report = await check_invariants(db.sessions)
    assert [check for check in report.checks if not check.ok] == []
    assert report.identity.pending_requests == 0


async def test_a_finished_answer_that_nobody_has_heard_to_its_end_is_absorbed_once(
    db: Database, engine: FakeEngine
) -> None:
    customer = await add_customer(db)
    engine.script = Script(token_ids=range(7), cached_tokens=4)
    wanted = await run_and_die(db, engine, customer)

    async with connected(engine) as engines:
        first = await sweeper_of(db, engines).sweep_once()
        second = await sweeper_of(db, engines).sweep_once()
        await assert_books_are_right(db, engines)

    request, [attempt], [entry] = await rows_of(db, wanted.request_id)
    assert (first, second) == (["settled"], [])
    assert (attempt.outcome, attempt.source, attempt.billed) == ("lost", "journal", 0)
    assert (entry.account, entry.prompt_tokens, entry.cached_tokens) == ("absorbed", 10, 4)
    assert (entry.completion_tokens, attempt.absorbed) == (7, 7)
    assert (request.settled_by, request.error_code) == ("sweeper", "gateway_lost")
    assert (request.finish_reason, request.completion_tokens) == ("error", 0)


async def test_what_is_absorbed_uses_up_no_quota(db: Database, engine: FakeEngine) -> None:
    customer = await add_customer(db)
    quota = await set_limit(db, customer, "tokens_total", "1000", "total")
    engine.script = Script(token_ids=range(7))
    wanted = await run_and_die(db, engine, customer)
    before = await use_of(db, quota)

    async with connected(engine) as engines:
        await sweeper_of(db, engines).sweep_once()
        await assert_books_are_right(db, engines)

    assert before == (0, wanted.est_prompt_tokens + wanted.est_completion_tokens)
    assert await use_of(db, quota) == (0, 0)


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
async def test_what_has_ended_is_left_to_a_gateway_that_is_cut_off_and_lives(
    db: Database, engine: FakeEngine, reason: FinishReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client may have heard the end, which is in the gateway's spool."""
    customer = await add_customer(db)
    engine.script = Script(token_ids=range(7))
    engine.gateway_timeout_s = 60.0
    wanted, forgotten = [await run_and_die(db, engine, customer) for _ in range(2)]
    engine.journal = [msgspec.structs.replace(e, finish_reason=reason) for e in engine.journal]

    async with connected(engine) as engines:
        sweeper = sweeper_of(db, engines)
        first = await sweeper.sweep_once()
        request, _, _ = await rows_of(db, wanted.request_id)
        settled = await service.settle(
            db.sessions, settlement(wanted.request_id, usage_generated=7)
        )
        monkeypatch.setattr(module, "MAX_SPARED_S", 0.0)
        await expire(db, forgotten.request_id)
        last = await sweeper.sweep_once()
        await assert_books_are_right(db, engines)

    assert (first, request.lease_token, request.state) == ([], 1, "reserved")
    assert settled.applied
    assert last == ["settled"]  # not even a gateway that lives is waited for without end


async def test_how_long_a_gateway_is_waited_for_does_not_begin_again_with_what_others_leave(
    db: Database, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that finds only others' requests forgets none of those that are spared."""
    customer = await add_customer(db)
    engine.script = Script(token_ids=range(7))
    engine.gateway_timeout_s = 60.0
    forgotten, other = [await run_and_die(db, engine, customer) for _ in range(2)]
    await run_sql(
        db,
        "update requests set lease_until = now() + interval '1 h' where id=:id",
        id=other.request_id,
    )

    async with connected(engine) as engines:
        sweeper = sweeper_of(db, engines)
        rounds = [await sweeper.sweep_once()]
        await expire(db, other.request_id)
        rounds.append(await sweeper.sweep_once())
        monkeypatch.setattr(module, "MAX_SPARED_S", 0.0)
        await expire(db, forgotten.request_id)
        rounds.append(await sweeper.sweep_once())
        request, _, _ = await rows_of(db, forgotten.request_id)

    assert rounds[:2] == [[], []]
    assert "settled" in rounds[2]
    assert request.state == "settled"


@pytest.mark.parametrize("reason", ["error", None])
async def test_what_runs_or_has_failed_is_not_left_to_a_gateway_that_is_cut_off(
    db: Database, engine: FakeEngine, reason: FinishReason | None
) -> None:
    customer = await add_customer(db)
    engine.script = Script(error_after=3) if reason else Script(never_answers=True)
    engine.gateway_timeout_s = 60.0
    wanted = reservation(customer)
    await service.reserve(db.sessions, wanted)
    async with (
        connected(engine) as engines,
        EngineClient(engine.address, gateway_id="gw-1") as client,
    ):
        await client.connect()
        stream = await client.generate(generate_of(wanted))
        if reason:
            [event async for event in stream]
        await expire(db, wanted.request_id)

        assert await sweeper_of(db, engines).sweep_once() == ["settled" if reason else "aborting"]


async def test_the_slow_gateway_that_comes_back_changes_nothing(
    db: Database, engine: FakeEngine
) -> None:
    customer = await add_customer(db)
    engine.script = Script(token_ids=range(7))
    wanted = await run_and_die(db, engine, customer)
    async with connected(engine) as engines:
        await sweeper_of(db, engines).sweep_once()

    late = await service.settle(db.sessions, settlement(wanted.request_id, usage_generated=7))
    lost = await service.renew(db.sessions, [Renewal(wanted.request_id, 1)])

    assert (late.applied, lost) == (False, {wanted.request_id})
    assert len((await rows_of(db, wanted.request_id))[2]) == 1


async def test_a_gateway_that_was_faster_wins_over_the_sweeper(
    db: Database, engine: FakeEngine
) -> None:
    customer = await add_customer(db)
    wanted = await run_and_die(db, engine, customer)
    await service.settle(db.sessions, settlement(wanted.request_id, usage_generated=100))

    async with connected(engine) as engines:
        assert await sweeper_of(db, engines).sweep_once() == []


async def test_a_running_request_is_aborted_as_a_fault_and_absorbed(
    db: Database, engine: FakeEngine
) -> None:
    customer = await add_customer(db)
    engine.script = Script(token_ids=range(90), token_delay_s=0.01)
    wanted = reservation(customer)
    await service.reserve(db.sessions, wanted)
    async with (
        connected(engine) as engines,
        EngineClient(engine.address, gateway_id="gw-1") as client,
    ):
        await client.connect()
        stream = await client.generate(generate_of(wanted))
        await anext(stream)
        await expire(db, wanted.request_id)
        sweeper = sweeper_of(db, engines)

        assert await sweeper.sweep_once() == ["aborting"]
        deadline = time.monotonic() + 10
        verdicts: list[str] = []
        while "settled" not in verdicts:
            assert time.monotonic() < deadline
            verdicts += await sweeper.sweep_once()
            await asyncio.sleep(0.01)
        await assert_books_are_right(db, engines)

    request, [attempt], [entry] = await rows_of(db, wanted.request_id)
    assert engine.num_running == 0
    assert 0 < attempt.generated < 90
    assert (attempt.outcome, attempt.billed, attempt.absorbed) == ("fault", 0, attempt.generated)
    assert attempt.generated == engine.journal[0].usage.completion_tokens
    assert (entry.account, entry.completion_tokens) == ("absorbed", attempt.generated)
    assert request.finish_reason == "error"


async def test_a_clients_abort_that_its_gateway_could_not_settle_is_billed(
    db: Database, engine: FakeEngine
) -> None:
    customer = await add_customer(db)
    engine.script = Script(token_ids=range(9))
    wanted = await run_and_die(db, engine, customer)
    engine.journal[0] = msgspec.structs.replace(engine.journal[0], finish_reason="abort")

    async with connected(engine) as engines:
        await sweeper_of(db, engines).sweep_once()
        await assert_books_are_right(db, engines)

    _, [attempt], [entry] = await rows_of(db, wanted.request_id)
    assert (attempt.outcome, attempt.billed, entry.account) == ("aborted", 9, "revenue")


async def test_an_engines_error_is_absorbed(db: Database, engine: FakeEngine) -> None:
    customer = await add_customer(db)
    engine.script = Script(error_after=3)
    wanted = await run_and_die(db, engine, customer)

    async with connected(engine) as engines:
        await sweeper_of(db, engines).sweep_once()
        await assert_books_are_right(db, engines)

    _, [attempt], [entry] = await rows_of(db, wanted.request_id)
    assert (attempt.outcome, attempt.billed, attempt.absorbed) == ("fault", 0, 3)
    assert entry.account == "absorbed"


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
async def test_with_stop_strings_an_abort_is_billed_up_to_the_checkpoint(
    db: Database, engine: FakeEngine, reason: FinishReason
) -> None:
    customer = await add_customer(db)
    engine.script = Script(token_ids=range(9))
    wanted = await run_and_die(db, engine, customer, has_stop_strings=True)
    engine.journal[0] = msgspec.structs.replace(engine.journal[0], finish_reason=reason)
    await run_sql(db, "update requests set checkpoint_tokens = 6")

    async with connected(engine) as engines:
        await sweeper_of(db, engines).sweep_once()
        await assert_books_are_right(db, engines)

    _, [attempt], [entry] = await rows_of(db, wanted.request_id)
    billed = 6 if reason == "abort" else 0
    assert (attempt.generated, attempt.billed, attempt.absorbed) == (9, billed, 9 - billed)
    assert entry.account == ("revenue" if billed else "absorbed")
    assert entry.completion_tokens == (billed or 9)


async def test_a_request_that_was_never_dispatched_is_void(
    db: Database, engine: FakeEngine
) -> None:
    customer = await add_customer(db)
    known = reservation(customer)
    nowhere = reservation(customer, replica_id=None)
    for wanted in (known, nowhere):
        await service.reserve(db.sessions, wanted)
        await expire(db, wanted.request_id)

    async with connected(engine) as engines:
        assert await sweeper_of(db, engines).sweep_once() == ["voided", "voided"]
        await assert_books_are_right(db, engines)

    request, attempts, ledger = await rows_of(db, known.request_id)
    assert (request.state, request.settled_by, attempts, ledger) == ("voided", "sweeper", [], [])


async def test_when_both_died_the_checkpoint_is_absorbed(db: Database, engine: FakeEngine) -> None:
    customer = await add_customer(db)
    wanted = reservation(customer)
    await service.reserve(db.sessions, wanted)
    await service.renew(db.sessions, [Renewal(wanted.request_id, 1, checkpoint_tokens=5)])
    await expire(db, wanted.request_id)

    async with connected(engine) as engines:
        assert await sweeper_of(db, engines).sweep_once() == ["lost"]
        await assert_books_are_right(db, engines)

    _, [attempt], [entry] = await rows_of(db, wanted.request_id)
    assert (attempt.outcome, attempt.source, attempt.absorbed) == ("lost", "observed", 5)
    assert (entry.account, entry.prompt_tokens, entry.completion_tokens) == ("absorbed", 10, 5)


async def test_a_silent_replica_is_waited_for_and_given_up_in_the_end(db: Database) -> None:
    customer = await add_customer(db)
    wanted = reservation(customer)
    await service.reserve(db.sessions, wanted)
    await expire(db, wanted.request_id)

    async with connected() as engines:
        assert await sweeper_of(db, engines, lost_after_s=60).sweep_once() == ["waiting"]
        request, _, _ = await rows_of(db, wanted.request_id)
        assert (request.state, request.lease_token) == ("reserved", 2)
        await expire(db, wanted.request_id)
        assert await sweeper_of(db, engines, lost_after_s=0).sweep_once() == ["voided"]


async def test_a_landed_journal_settles_although_its_engine_is_gone(
    db: Database, engine: FakeEngine
) -> None:
    customer = await add_customer(db)
    engine.script = Script(token_ids=range(7))
    wanted = await run_and_die(db, engine, customer)
    async with connected(engine) as engines:
        await JournalPuller(db.sessions, engines).pull_once()
    await engine.crash()

    async with connected() as engines:
        assert await sweeper_of(db, engines).sweep_once() == ["settled"]
        await assert_books_are_right(db, engines)

    _, [attempt], _ = await rows_of(db, wanted.request_id)
    assert (attempt.source, attempt.absorbed) == ("journal", 7)


async def test_work_that_turns_up_after_the_void_is_absorbed(
    db: Database, engine: FakeEngine
) -> None:
    customer = await add_customer(db)
    engine.script = Script(token_ids=range(7))
    wanted = await run_and_die(db, engine, customer)
    async with connected() as engines:  # the engine cannot be reached, and is given up
        assert await sweeper_of(db, engines).sweep_once() == ["voided"]

    async with connected(engine) as engines:
        await assert_books_are_right(db, engines)

    request, [attempt], [entry] = await rows_of(db, wanted.request_id)
    assert request.state == "voided"
    assert (attempt.outcome, attempt.source, attempt.absorbed) == ("lost", "journal", 7)
    assert (entry.kind, entry.account, entry.completion_tokens) == ("late", "absorbed", 7)


async def test_two_sweepers_settle_everything_once(db: Database, engine: FakeEngine) -> None:
    customer = await add_customer(db)
    engine.script = Script(token_ids=range(3))
    wanted = [await run_and_die(db, engine, customer) for _ in range(12)]

    async with connected(engine) as engines, connected(engine) as others:
        sweepers = [sweeper_of(db, engines), sweeper_of(db, others)]
        rounds = await asyncio.gather(*(s.sweep_once() for s in sweepers for _ in range(2)))
        await assert_books_are_right(db, engines)

    assert sum(verdict == "settled" for verdicts in rounds for verdict in verdicts) == len(wanted)
    for each in wanted:
        _, attempts, ledger = await rows_of(db, each.request_id)
        assert (len(attempts), len(ledger)) == (1, 1)


async def test_sweeper_and_slow_gateway_at_once_settle_exactly_once(
    db: Database, engine: FakeEngine
) -> None:
    customer = await add_customer(db)
    engine.script = Script(token_ids=range(5))
    wanted = [await run_and_die(db, engine, customer) for _ in range(12)]

    async with connected(engine) as engines:
        results = await asyncio.gather(
            sweeper_of(db, engines).sweep_once(),
            *(
                service.settle(db.sessions, settlement(each.request_id, usage_generated=5))
                for each in wanted
            ),
        )
        await assert_books_are_right(db, engines)

    verdicts, settled = results[0], results[1:]
    num_swept = sum(verdict == "settled" for verdict in verdicts)
    assert num_swept + sum(result.applied for result in settled) == len(wanted)
    for each in wanted:
        _, attempts, ledger = await rows_of(db, each.request_id)
        assert (len(attempts), len(ledger)) == (1, 1)


# ---------------------------------------------------------------------------- after an outage


@pytest.mark.parametrize("fault", ["away", "stands still"])
async def test_after_an_outage_gateways_have_the_word_first(
    db: Database, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    customer = await add_customer(db)
    wanted = reservation(customer, replica_id=None)
    await service.reserve(db.sessions, wanted)
    await expire(db, wanted.request_id)
    sweeper = Sweeper(
        db.sessions,
        None,  # type: ignore[arg-type] # no replica to ask
        grace_s=0.0,
        replica_lost_after_s=0.0,
        recovery_s=0.5,
    )
    real_claim = queries.claim_expired

    async def claim(*arguments: object, **options: object) -> object:
        if fault == "away":
            raise DatabaseUnavailableError
        claimed = await real_claim(*arguments, **options)  # type: ignore[arg-type] # passed on
        await asyncio.sleep(0.1)  # longer than a claim takes
        return claimed

    monkeypatch.setattr(module, "STALL_S", 0.05)
    monkeypatch.setattr(queries, "claim_expired", claim)
    with pytest.raises(DatabaseUnavailableError):
        await sweeper.sweep_once()
    monkeypatch.setattr(queries, "claim_expired", real_claim)
    monkeypatch.setattr(module, "STALL_S", 60.0)

    await asyncio.sleep(0.5)  # however long it was away: their time begins when it is back
    # Nothing is taken, nor was it: the owner's token is still the right one.
    assert await sweeper.sweep_once() == []
    request, _, _ = await rows_of(db, wanted.request_id)
    assert request.lease_token == 1
    await asyncio.sleep(0.5)
    assert await sweeper.sweep_once() == ["voided"]
