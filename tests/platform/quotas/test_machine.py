"""Whatever requests, limits, crashes and takeovers do to each other: the windows are what the books say."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from loraplex_platform.db import LedgerEntry, Limit, QuotaWindow, Request
from loraplex_platform.db.session import Database
from loraplex_platform.errors import ConflictError
from loraplex_platform.metering import service
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.quotas.errors import BudgetTooSmallError, QuotaExceededError
from sqlalchemy import select

from tests.support.limits import change_limit, remove_limit, set_limit
from tests.support.metering import add_customer, reservation, run_sql, settlement
from tests.support.postgres import database_settings, serving_url

if TYPE_CHECKING:
    from tests.support.postgres import PostgresServer

_VALUES = {
    "requests": st.integers(1, 6),
    "tokens_in": st.integers(5, 60),
    "tokens_out": st.integers(5, 60),
    "tokens_total": st.integers(5, 90),
    "cost": st.integers(1, 5).map(lambda n: f"0.00000{n}"),
}
_slugs = itertools.count(1)


@dataclass
class Flight:
    """A request that is reserved, as whoever owns it knows it."""

    request_id: UUID
    prompt: int
    max_tokens: int  # of each choice
    num_choices: int
    lease_token: int = 1


class Quotas(RuleBasedStateMachine):
    """Rules are what happens; the invariant compares windows with an independent count of the books."""

    database_url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        settings_ = database_settings(self.database_url, database_pool_size=4)
        self.db = self.run(self._connect(settings_))
        self.customer = self.run(add_customer(self.db, f"t{next(_slugs)}"))
        self.flights: list[Flight] = []
        self.limits: dict[UUID, str] = {}  # and their metrics

    async def _connect(self, settings_: Any) -> Database:
        return Database.connected(settings_)

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    # ------------------------------------------------------------------ requests

    @rule(
        prompt=st.integers(1, 20),
        max_tokens=st.integers(1, 30),
        num_choices=st.integers(1, 3),
        min_tokens=st.integers(1, 5),
        crowd=st.integers(1, 4),
        is_ack_lost=st.booleans(),
    )
    def request(
        self,
        prompt: int,
        max_tokens: int,
        num_choices: int,
        min_tokens: int,
        crowd: int,
        is_ack_lost: bool,
    ) -> None:
        """Some at once; each is admitted, or takes nothing."""
        wanted = [
            reservation(
                self.customer,
                est_prompt_tokens=prompt,
                est_completion_tokens=max_tokens * num_choices,
                num_choices=num_choices,
                min_completion_tokens=min(min_tokens, max_tokens),
            )
            for _ in range(crowd)
        ]

        async def all_at_once() -> list[Any]:
            return await asyncio.gather(
                *(service.reserve(self.db.sessions, each) for each in wanted),
                return_exceptions=True,
            )

        for each, result in zip(wanted, self.run(all_at_once()), strict=True):
            if isinstance(result, QuotaExceededError | BudgetTooSmallError):
                continue
            assert not isinstance(result, BaseException), result
            assert each.min_completion_tokens <= result.max_tokens <= max_tokens
            if is_ack_lost:
                again = self.run(service.reserve(self.db.sessions, each))
                assert (again.max_tokens, again.lease_token) == (result.max_tokens, 1)
            self.flights.append(Flight(each.request_id, prompt, result.max_tokens, num_choices))

    @precondition(lambda self: self.flights)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["completed", "completed", "aborted", "fault"]),
        how=st.sampled_from(["settle", "settle", "twice", "crash", "void"]),
    )
    def end(self, data: st.DataObject, outcome: str, how: str) -> None:
        flight = data.draw(st.sampled_from(self.flights))
        most = flight.max_tokens * flight.num_choices
        ending = settlement(
            flight.request_id,
            flight.lease_token,
            usage_outcome=outcome,
            usage_prompt_tokens=flight.prompt,
            usage_cached_tokens=data.draw(st.integers(0, flight.prompt)),
            usage_generated=data.draw(st.integers(0, most)),
        )
        if how == "crash":
            self.run(self._settle_and_lose_it(ending))
            return
        self.flights.remove(flight)
        if how == "void":
            result = self.run(
                service.void(
                    self.db.sessions, flight.request_id, flight.lease_token, voided_by="test"
                )
            )
        else:
            result = self.run(service.settle(self.db.sessions, ending))
        assert result.applied
        if how == "twice":
            assert not self.run(service.settle(self.db.sessions, ending)).applied

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def take_over(self, data: st.DataObject) -> None:
        """A sweeper: whoever held the lease before can do nothing any more."""
        flight = data.draw(st.sampled_from(self.flights))
        self.run(
            run_sql(
                self.db,
                "update requests set lease_token = lease_token + 1 where id = :id",
                id=flight.request_id,
            )
        )
        late = settlement(flight.request_id, flight.lease_token, usage_prompt_tokens=flight.prompt)
        assert not self.run(service.settle(self.db.sessions, late)).applied
        flight.lease_token += 1

    async def _settle_and_lose_it(self, ending: Any) -> None:
        async with self.db.sessions() as session:
            await service.settle_in(session, ending)
            await session.rollback()

    # ------------------------------------------------------------------ limits

    @rule(
        data=st.data(),
        metric=st.sampled_from(sorted(_VALUES)),
        period=st.sampled_from(["day", "month", "total", "rolling"]),
        scope=st.sampled_from(["tenant", "key"]),
        is_hard=st.booleans(),
    )
    def set_limit(
        self, data: st.DataObject, metric: str, period: str, scope: str, is_hard: bool
    ) -> None:
        fields = {"window_hours": 24} if period == "rolling" else {}
        value = str(data.draw(_VALUES[metric]))
        try:
            limit_id = self.run(
                set_limit(
                    self.db,
                    self.customer,
                    metric,
                    value,
                    period,
                    scope_kind=scope,
                    hard=is_hard,
                    alert_pct=[50],
                    **fields,
                )
            )
        except ConflictError:
            return
        self.limits[limit_id] = metric

    @precondition(lambda self: self.limits)
    @rule(data=st.data())
    def change_limit(self, data: st.DataObject) -> None:
        limit_id = data.draw(st.sampled_from(sorted(self.limits)))
        value = str(data.draw(_VALUES[self.limits[limit_id]]))
        self.run(change_limit(self.db, limit_id, value=value))

    @precondition(lambda self: self.limits)
    @rule(data=st.data())
    def remove_limit(self, data: st.DataObject) -> None:
        limit_id = data.draw(st.sampled_from(sorted(self.limits)))
        del self.limits[limit_id]
        self.run(remove_limit(self.db, limit_id))

    # ------------------------------------------------------------------ the books

    @invariant()
    def windows_are_what_the_books_say(self) -> None:
        self.run(self._compare())

    async def _compare(self) -> None:
        tenant_id = self.customer.tenant_id
        async with self.db.sessions() as session:
            limits = (
                await session.scalars(select(Limit).where(Limit.tenant_id == tenant_id))
            ).all()
            windows = (
                await session.scalars(select(QuotaWindow).where(QuotaWindow.tenant_id == tenant_id))
            ).all()
            requests = (
                await session.scalars(select(Request).where(Request.tenant_id == tenant_id))
            ).all()
            entries = await session.scalars(
                select(LedgerEntry).where(LedgerEntry.tenant_id == tenant_id)
            )
            paid = {e.entry_id: e for e in entries if e.account == "revenue"}
        limited = {_what(limit) for limit in limits}
        for window in windows:
            assert window.committed >= 0
            assert window.held >= 0
            mine = [request for request in requests if window.id in request.windows]
            held = sum(_worst(r, window.metric) for r in mine if r.state == "reserved")
            assert window.held == held, "no hold is lost or left behind"
            if _what(window) in limited:
                inside = [r for r in requests if _is_in(window, r.admitted_at)]
                used = sum(_used(paid[r.id], window.metric) for r in inside if r.id in paid)
                assert window.committed == used
        for limit in limits:
            total = sum(
                int(w.committed + w.held) for w in windows if _what(w) == _what(limit)
            )  # all of this test's time is in one period
            if limit.is_hard:
                assert total <= max(limit.value, limit.used_then), "zero overshoot"

    def teardown(self) -> None:
        try:
            report = self.run(check_invariants(self.db.sessions))
            assert [check for check in report.checks if not check.ok] == []
        finally:
            self.run(self.db.close())
            self.runner.close()


def _what(row: Limit | QuotaWindow) -> tuple[str, UUID, str, str, int]:
    return row.scope_kind, row.scope_id, row.metric, row.period, row.window_s


def _is_in(window: QuotaWindow, at: datetime) -> bool:
    end = window.period_end or datetime.max.replace(tzinfo=UTC)
    return window.period_start <= at < end


def _worst(request: Request, metric: str) -> int:
    return int(
        {
            "requests": 1,
            "tokens_in": request.est_prompt_tokens,
            "tokens_out": request.est_completion_tokens,
            "tokens_total": request.est_prompt_tokens + request.est_completion_tokens,
            "cost": request.est_pico,
        }[metric]
    )


def _used(entry: LedgerEntry, metric: str) -> int:
    return int(
        {
            "requests": 1,
            "tokens_in": entry.prompt_tokens,
            "tokens_out": entry.completion_tokens,
            "tokens_total": entry.prompt_tokens + entry.completion_tokens,
            "cost": entry.amount_pico,
        }[metric]
    )


@pytest.mark.parametrize(
    "examples",
    # Each history checks all books so far: minutes, and more beside other work.
    [8, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_windows_are_what_the_books_say_after_any_sequence_of_events(
    postgres_server: PostgresServer, examples: int
) -> None:
    with postgres_server.borrow() as url:
        Quotas.database_url = serving_url(url)
        run_state_machine_as_test(
            Quotas, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None)
        )
