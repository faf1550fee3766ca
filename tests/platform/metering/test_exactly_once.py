"""Any interleaving of gateways, an engine, sweepers and crashes ends with books that add up."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from loraplex_engine.client import EngineLostError
from loraplex_engine.protocol import FinishReason, JournalEntry, JournalReply, Usage, UsageReply
from loraplex_platform.db.session import Database
from loraplex_platform.ids import uuid7
from loraplex_platform.metering import service
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.metering.records import Renewal
from loraplex_platform.worker import sweeper
from loraplex_platform.worker.engines import ConnectedReplica
from loraplex_platform.worker.journals import JournalPuller
from loraplex_platform.worker.sweeper import SWEEPER, Sweeper

from tests.support.metering import add_customer, reservation, rows_of, run_sql, settlement
from tests.support.postgres import database_settings, serving_url

if TYPE_CHECKING:
    from tests.support.postgres import PostgresServer

REPLICA = "replica-1"
PROMPT = 10


class SimulatedEngine:
    """A replica as its clients see it: what runs, and a journal that survives crashes."""

    def __init__(self) -> None:
        self.running: dict[UUID, int] = {}  # request -> tokens generated
        self.journal: list[JournalEntry] = []
        self.is_reachable = True
        self.hears_gateways = False
        self.tenant_id = uuid7()
        # Its own: an address (`id`) may be that of an engine before it, whose journal was read already.
        self.journal_id = f"journal-{uuid7()}"

    def end(self, request_id: UUID, reason: FinishReason) -> None:
        tokens = self.running.pop(request_id)
        self.journal.append(
            JournalEntry(
                seq=len(self.journal) + 1,
                request_id=str(request_id),
                attempt=1,
                lease_token=1,
                tenant_id=str(self.tenant_id),
                adapter_digest=None,
                finish_reason=reason,
                usage=Usage(prompt_tokens=PROMPT, completion_tokens=tokens),
                ended_at_unix_s=1_764_000_000.0,
            )
        )

    def entry_of(self, request_id: UUID) -> JournalEntry | None:
        return next((e for e in self.journal if e.request_id == str(request_id)), None)

    # What the worker's code calls.

    async def query_usage(
        self, request_id: str, attempt: int, *, gateway_id: str | None = None
    ) -> UsageReply:
        self._check()
        entry = self.entry_of(UUID(request_id))
        state = "running" if UUID(request_id) in self.running else "unknown"
        return UsageReply(
            query_id=1,
            state="finished" if entry else state,  # type: ignore[arg-type] # one of the three
            entry=entry,
            is_gateway_connected=gateway_id is not None and self.hears_gateways,
        )

    async def read_journal(self, after_seq: int, limit: int) -> JournalReply:
        self._check()
        entries = [entry for entry in self.journal if entry.seq > after_seq][:limit]
        return JournalReply(query_id=1, journal_id=self.journal_id, entries=entries)

    def abort(self, request_id: str, attempt: int, *, is_platform_fault: bool) -> None:
        if self.is_reachable and UUID(request_id) in self.running:
            self.end(UUID(request_id), "error" if is_platform_fault else "abort")

    def _check(self) -> None:
        if not self.is_reachable:
            raise EngineLostError("unreachable")

    # What stands in for ConnectedEngines.

    def all(self) -> list[ConnectedReplica]:
        if not self.is_reachable:
            return []
        return [ConnectedReplica(REPLICA, None, self)]  # type: ignore[arg-type] # what is used of them

    def find(self, replica_id: str) -> ConnectedReplica | None:
        return next(iter(self.all()), None) if replica_id == REPLICA else None


@dataclass
class Flight:
    """A request as its gateway knows it."""

    request_id: UUID
    has_stop_strings: bool = False
    seen: int = 0  # tokens that have reached the gateway
    is_engine_lost: bool = False
    is_forgotten: bool = False  # its gateway died, or has closed the books
    ending: dict[str, Any] = field(default_factory=dict)  # what the gateway settles, fixed once


class Fleet(RuleBasedStateMachine):
    """Rules are things that happen; `teardown` lets the dust settle and looks at the books."""

    sessions_url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.engine = SimulatedEngine()
        self.flights: list[Flight] = []
        self.truth: dict[UUID, int] = {}  # tokens the engine really generated
        self.db = self.run(self._connect())
        self.customer = self.run(add_customer(self.db, f"t{next(_slugs)}"))
        self.engine.tenant_id = self.customer.tenant_id
        self.sweeper = self._sweeper()
        self.puller = self._puller()

    async def _connect(self) -> Database:
        return Database.connected(database_settings(self.sessions_url, database_pool_size=4))

    def _sweeper(self) -> Sweeper:
        return Sweeper(
            self.db.sessions,
            self.engine,  # type: ignore[arg-type] # stands in for ConnectedEngines
            grace_s=0.0,
            replica_lost_after_s=0.0,
        )

    def _puller(self) -> JournalPuller:
        return JournalPuller(self.db.sessions, self.engine)  # type: ignore[arg-type] # as above

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def live(self) -> list[Flight]:
        return [flight for flight in self.flights if not flight.is_forgotten]

    # ------------------------------------------------------------------ requests

    @rule(
        has_stop_strings=st.booleans(),
        is_ack_lost=st.booleans(),
        is_dispatched=st.sampled_from([True, True, True, False]),
        tokens=st.integers(0, 5),
        checkpoint=st.integers(0, 5),
        reason=st.sampled_from([None, "stop", "length", "error"]),
    )
    def request(
        self,
        has_stop_strings: bool,
        is_ack_lost: bool,
        is_dispatched: bool,
        tokens: int,
        checkpoint: int,
        reason: FinishReason | None,
    ) -> None:
        """A gateway reserves and dispatches; the engine gets so far with it."""
        wanted = reservation(self.customer, replica_id=REPLICA, has_stop_strings=has_stop_strings)
        for _ in range(2 if is_ack_lost else 1):
            self.run(service.reserve(self.db.sessions, wanted))
        flight = Flight(wanted.request_id, is_engine_lost=not self.engine.is_reachable)
        self.flights.append(flight)
        flight.has_stop_strings = has_stop_strings
        if not is_dispatched or flight.is_engine_lost:
            return
        self.engine.running[flight.request_id] = self.truth[flight.request_id] = tokens
        flight.seen = min(tokens, checkpoint)
        if flight.seen:
            self.run(service.renew(self.db.sessions, [Renewal(flight.request_id, 1, flight.seen)]))
        if reason is not None:
            self.engine.end(flight.request_id, reason)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), tokens=st.integers(1, 5), is_seen=st.booleans())
    def generate(self, data: st.DataObject, tokens: int, is_seen: bool) -> None:
        request_id = data.draw(st.sampled_from(list(self.engine.running)))
        self.engine.running[request_id] += tokens
        self.truth[request_id] += tokens
        flight = self._flight(request_id)
        if is_seen and not flight.is_engine_lost:
            flight.seen = self.engine.running[request_id]

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), reason=st.sampled_from(["stop", "length", "error", "abort"]))
    def finish(self, data: st.DataObject, reason: FinishReason) -> None:
        request_id = data.draw(st.sampled_from(list(self.engine.running)))
        self.engine.end(request_id, reason)

    @precondition(lambda self: self.live())
    @rule()
    def renew(self) -> None:
        renewals = [Renewal(f.request_id, 1, f.seen) for f in self.live()]
        for request_id in self.run(service.renew(self.db.sessions, renewals)):
            self._flight(request_id).is_forgotten = True  # somebody else settles
            self.engine.abort(str(request_id), 1, is_platform_fault=True)

    @precondition(lambda self: any(self._is_over(f) for f in self.live()))
    @rule(
        data=st.data(),
        past_stop=st.integers(0, 3),
        failure=st.sampled_from(["none", "before_commit", "ack_lost", "twice_at_once"]),
    )
    def settle(self, data: st.DataObject, past_stop: int, failure: str) -> None:
        flight = data.draw(st.sampled_from([f for f in self.live() if self._is_over(f)]))
        ending = flight.ending or self._ending(flight, past_stop)
        flight.ending = ending
        if failure == "before_commit":
            self.run(self._settle_and_lose_it(flight, ending))
            return  # the gateway will try again
        wanted = settlement(flight.request_id, **ending)
        if failure == "twice_at_once":
            self.run(self._gather(*(service.settle(self.db.sessions, wanted) for _ in range(2))))
        else:
            for _ in range(2 if failure == "ack_lost" else 1):
                self.run(service.settle(self.db.sessions, wanted))
        flight.is_forgotten = True

    # ------------------------------------------------------------------ what goes wrong

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def gateway_dies(self, data: st.DataObject) -> None:
        """The engine notices at once, or by and by (`finish` with "error")."""
        flight = data.draw(st.sampled_from(self.live()))
        flight.is_forgotten = True
        if data.draw(st.booleans()):
            self.engine.abort(str(flight.request_id), 1, is_platform_fault=True)

    @rule()
    def engine_dies(self) -> None:
        """And is back: what ran is gone, the journal is not."""
        for request_id in list(self.engine.running):
            del self.engine.running[request_id]
            self._flight(request_id).is_engine_lost = True

    @rule()
    def engine_is_cut_off_or_back(self) -> None:
        self.engine.is_reachable = not self.engine.is_reachable
        if not self.engine.is_reachable:
            for flight in self.flights:
                flight.is_engine_lost |= flight.request_id in self.engine.running

    @rule()
    def engine_hears_gateways_or_not(self) -> None:
        """Those that live and are cut off from the database among them."""
        self.engine.hears_gateways = not self.engine.hears_gateways

    @rule(data=st.data(), are_all=st.sampled_from([True, True, False]))
    def leases_end(self, data: st.DataObject, are_all: bool) -> None:
        """Also of gateways that are only slow."""
        for flight in self.flights:
            if are_all or data.draw(st.booleans()):
                self.run(self._expire(flight.request_id))

    # ------------------------------------------------------------------ the worker

    @rule(is_crowded=st.booleans(), is_cut_off=st.booleans())
    def sweep(self, is_crowded: bool, is_cut_off: bool) -> None:
        """Perhaps while the engine cannot be reached, which then counts as gone."""
        was_reachable = self.engine.is_reachable
        self.engine.is_reachable = was_reachable and not is_cut_off
        sweepers = [self.sweeper, self._sweeper()] if is_crowded else [self.sweeper]
        self.run(self._gather(*(sweeper.sweep_once() for sweeper in sweepers)))
        self.engine.is_reachable = was_reachable

    @rule(is_restarted=st.booleans(), is_crowded=st.booleans())
    def pull(self, is_restarted: bool, is_crowded: bool) -> None:
        if is_restarted:
            self.puller = self._puller()
        pullers = [self.puller, self._puller()] if is_crowded else [self.puller]
        self.run(self._gather(*(puller.pull_once() for puller in pullers)))

    # ------------------------------------------------------------------ the books

    def teardown(self) -> None:
        try:
            self.run(self._let_the_dust_settle())
            self.run(self._check_books())
        finally:
            self.run(self.db.close())
            self.runner.close()

    async def _let_the_dust_settle(self) -> None:
        self.engine.is_reachable = True
        self.engine.hears_gateways = False
        for request_id in list(self.engine.running):
            self.engine.end(request_id, "error")  # the engine's own end of what no gateway wants
        for _ in range(3):
            for flight in self.flights:
                await self._expire(flight.request_id)
            await self.sweeper.sweep_once()
            await self.puller.pull_once()

    async def _check_books(self) -> None:
        report = await check_invariants(self.db.sessions)
        assert [check for check in report.checks if not check.ok] == []
        identity = report.identity
        assert (identity.pending_requests, identity.unlanded) == (0, 0)
        for flight in self.flights:
            request, attempts, ledger = await rows_of(self.db, flight.request_id)
            usage = [entry for entry in ledger if entry.kind == "usage"]
            charged = sum(e.completion_tokens for e in usage if e.account == "revenue")
            assert len(usage) == (request.state == "settled")
            assert len(attempts) <= 1
            assert charged <= self.truth.get(flight.request_id, 0), "never more than was generated"
            entry = self.engine.entry_of(flight.request_id)
            if entry is not None and entry.finish_reason == "error":
                assert charged == 0, "the platform pays for what it broke"
            if request.settled_by == SWEEPER and charged:
                assert entry is not None
                assert entry.finish_reason == "abort", "nobody has heard the end of it"
                if flight.has_stop_strings:
                    assert charged <= request.checkpoint_tokens, (
                        "a stop may have completed after it"
                    )

    # ------------------------------------------------------------------ insides

    def _flight(self, request_id: UUID) -> Flight:
        return next(flight for flight in self.flights if flight.request_id == request_id)

    def _is_over(self, flight: Flight) -> bool:
        """Whether the gateway has an ending to settle: a terminal event, or a lost engine."""
        return flight.is_engine_lost or self.engine.entry_of(flight.request_id) is not None

    def _ending(self, flight: Flight, past_stop: int) -> dict[str, Any]:
        entry = self.engine.entry_of(flight.request_id)
        if entry is None or flight.is_engine_lost:
            return {
                "usage_outcome": "lost",
                "usage_source": "observed",
                "usage_generated": flight.seen,
            }
        generated = entry.usage.completion_tokens
        outcome = {"error": "fault", "abort": "aborted"}.get(entry.finish_reason, "completed")
        has_stopped = outcome == "completed" and flight.has_stop_strings
        return {
            "usage_outcome": outcome,
            "usage_generated": generated,
            "usage_discarded_past_stop": min(past_stop, generated) if has_stopped else 0,
        }

    async def _settle_and_lose_it(self, flight: Flight, ending: dict[str, Any]) -> None:
        async with self.db.sessions() as session:
            await service.settle_in(session, settlement(flight.request_id, **ending))
            await session.rollback()

    async def _expire(self, request_id: UUID) -> None:
        await run_sql(
            self.db,
            "update requests set lease_until = now() - interval '1 s'"
            " where id = :id and state = 'reserved'",
            id=request_id,
        )

    async def _gather(self, *coroutines: Any) -> None:
        await asyncio.gather(*coroutines)


_slugs = itertools.count(1)


@pytest.mark.parametrize(
    "examples",
    # Each history checks all books so far: minutes, and more beside other work.
    [8, pytest.param(150, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_the_books_add_up_after_any_sequence_of_events(
    postgres_server: PostgresServer, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A database that is slow because the machine is busy is none of these events: a sweeper that met it
    # would leave its rows alone for a while, and whoever looks at the books then finds them open.
    monkeypatch.setattr(sweeper, "STALL_S", 600.0)
    with postgres_server.borrow() as url:
        Fleet.sessions_url = serving_url(url)
        run_state_machine_as_test(
            Fleet, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None)
        )
