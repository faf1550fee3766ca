"""What each step computes: running requests first, then waiting ones, within one token budget.

Owns who runs: rows, block tables and adapter leases are taken and given back here and nowhere else.
Pure Python, no torch: a `Step` goes to the runner, which decides nothing.

| state              | row | blocks                    | adapter lease | leaves by                     |
|--------------------|-----|---------------------------|---------------|-------------------------------|
| waiting, preempted | no  | no                        | no            | admission, `remove`, deadline |
| running            | yes | for all its known tokens  | if it has one | preemption, `remove`          |
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from loraplex_engine.errors import AdapterInvalidError, AdapterUnavailableError
from loraplex_engine.kv.manager import KvManager
from loraplex_engine.policies import Policy
from loraplex_engine.request import BASE_SLOT, Ending, Request, RequestStatus
from loraplex_engine.step import AdapterPool, BlockUpdate, NewRow, Step


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step and of the queue."""

    max_num_batched_tokens: int
    max_num_seqs: int  # rows
    max_waiting: int
    long_prefill_token_threshold: int | None = None  # per row and step
    watermark_blocks: int = 0  # kept free at admission, so that running rows can grow


@dataclass(frozen=True, slots=True)
class Decision:
    """One call of `schedule`: the step, whose rows are `requests` in batch order; and who ended."""

    step: Step | None  # None: nothing to compute now
    requests: list[Request]
    ended: list[tuple[Request, Ending]]  # already removed from the scheduler


@dataclass(slots=True)
class _Batch:
    """A step being put together."""

    budget: int
    requests: list[Request] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    block_updates: list[BlockUpdate] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    num_scheduled: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    ended: list[tuple[Request, Ending]] = field(default_factory=list)

    def append(self, request: Request, count: int) -> None:
        """Compute `count` more tokens of `request`."""
        self.budget -= count
        self.requests.append(request)
        self.rows.append(request.row)
        self.num_computed.append(request.num_computed_tokens)
        self.num_scheduled.append(count)
        request.num_computed_tokens += count
        self.samples.append(request.num_computed_tokens == request.num_tokens)


class Scheduler:
    """Decides; the core tells it of arrivals and endings, and what became of a step."""

    def __init__(
        self, limits: SchedulerLimits, kv: KvManager, adapters: AdapterPool, policy: Policy
    ) -> None:
        self.limits = limits
        self.num_preemptions = 0
        self._kv = kv
        self._adapters = adapters
        self._waiting = policy
        self._running: list[Request] = []  # sorted by the policy's rank
        self._free_rows = list(range(limits.max_num_seqs))
        heapify(self._free_rows)
        self._freed_rows: list[int] = []  # since the last step: the runner is to forget them
        self._draining: str | None = None  # the adapter that is to give its slot up
        self._next_step_id = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_leases(self) -> int:
        return sum(request.adapter_digest is not None for request in self._running)

    @property
    def is_queue_full(self) -> bool:
        return len(self._waiting) >= self.limits.max_waiting

    @property
    def num_blocks(self) -> int:
        return self._kv.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._kv.num_free

    @property
    def num_kv_slots(self) -> int:
        """Tokens that the whole KV cache holds."""
        return self._kv.num_blocks * self._kv.block_size

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.push(request)

    def remove(self, request: Request) -> None:
        """Take a request out for good, wherever it is, with all it holds."""
        if request.status is RequestStatus.RUNNING:
            rank = self._waiting.rank
            index = bisect_left(self._running, rank(request), key=rank)
            assert self._running[index] is request, f"{request.identity} is not in its place"
            del self._running[index]
            self._give_back(request)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED

    def schedule(self, now_unix_s: float) -> Decision:
        """Decide the next step; its tokens count as computed from here on."""
        batch = _Batch(budget=self.limits.max_num_batched_tokens)
        self._drop_expired(batch, now_unix_s)
        self._schedule_running(batch)
        self._admit_waiting(batch)
        return Decision(step=self._step(batch), requests=batch.requests, ended=batch.ended)

    def check(self) -> None:
        """Assert that rows, blocks and tables are where the table above says."""
        self._kv.check()
        ranks = [self._waiting.rank(request) for request in self._running]
        assert ranks == sorted(ranks), "running requests are out of order"
        rows = [request.row for request in self._running] + self._free_rows
        assert sorted(rows) == list(range(self.limits.max_num_seqs)), "a row is lost or doubled"
        assert self._kv.num_tables == len(self._running), "a table has no running request"
        assert self._adapters.num_leases == self.num_leases, "a lease has no running request"
        for request in self._running:
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed_tokens <= request.num_tokens
            num_held = self._kv.num_blocks_of(request.seq) * self._kv.block_size
            assert num_held >= request.num_computed_tokens, f"{request.identity} lacks blocks"
        for request in self._waiting.in_order():
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert (request.row, request.adapter_slot) == (-1, BASE_SLOT)

    def _drop_expired(self, batch: _Batch, now_unix_s: float) -> None:
        """End what waited past its deadline. A preempted request has answered already: it may resume."""
        for request in self._waiting.in_order():
            deadline = request.generate.deadline_unix_s
            if (
                deadline is not None
                and deadline <= now_unix_s
                and request.status is RequestStatus.WAITING
            ):
                ending = Ending(
                    "error",
                    error_code="deadline_exceeded",
                    error_message="the request was still waiting at its deadline",
                )
                self._end(batch, request, ending)

    def _schedule_running(self, batch: _Batch) -> None:
        running = self._running
        index = 0
        while index < len(running) and batch.budget > 0:
            request = running[index]
            if not self._make_room(batch, request):
                break  # it was the last in line, so nobody is behind it
            # A long prefill leaves a token for each row behind it, so that nobody's stream stalls.
            num_behind = len(running) - index - 1
            batch.append(request, self._chunk(request, max(1, batch.budget - num_behind)))
            index += 1

    def _make_room(self, batch: _Batch, request: Request) -> bool:
        """Grow a running request's table to its known tokens, at the cost of those behind it.

        Returns:
            False when it could not grow and does not run any more.
        """
        while True:
            blocks = self._kv.grow(request.seq, request.num_tokens)
            if blocks is not None:
                if blocks:
                    first_index = self._kv.num_blocks_of(request.seq) - len(blocks)
                    update = BlockUpdate(request.row, first_index, tuple(blocks))
                    batch.block_updates.append(update)
                return True
            victim = self._running[-1]
            if victim is not request:
                self._preempt(victim)
                continue
            if len(self._running) == 1:
                # Nobody's blocks are left to take: whoever else holds some is not a request. Its
                # recomputation would end here again, so it ends with what it has.
                self._end(batch, request, Ending("length"))
            else:
                self._preempt(request)
            return False

    def _admit_waiting(self, batch: _Batch) -> None:
        unavailable: set[str] = set()  # each adapter is asked for once per step
        has_refused = False  # someone further ahead a slot
        for request in self._waiting.in_order():
            if batch.budget == 0 or not self._free_rows:
                break
            digest = request.adapter_digest
            if digest in unavailable:
                continue
            watermark = self.limits.watermark_blocks if self._running else 0
            if self._kv.blocks_for(request.num_tokens) + watermark > self._kv.num_free:
                break  # smaller ones behind it must not starve it
            slot = BASE_SLOT
            if digest is not None:
                try:
                    leased = self._adapters.lease(digest)
                except (AdapterUnavailableError, AdapterInvalidError) as error:
                    ending = Ending("error", error_code=error.code, error_message=str(error))
                    self._end(batch, request, ending)
                    continue
                if leased is None:
                    unavailable.add(digest)
                    if not has_refused and self._adapters.lacks_slot(digest):
                        has_refused = True
                        unavailable.add(self._adapter_to_drain())
                    continue
                slot = leased
            self._admit(batch, request, slot)

    def _admit(self, batch: _Batch, request: Request, slot: int) -> None:
        self._waiting.remove(request)
        request.status = RequestStatus.RUNNING
        request.row = heappop(self._free_rows)
        request.adapter_slot = slot
        insort(self._running, request, key=self._waiting.rank)
        # Blocks for all known tokens at once: a prefill that has begun never waits for room.
        blocks = self._kv.grow(request.seq, request.num_tokens)
        assert blocks is not None, "room was checked"
        batch.new_rows.append(
            NewRow(
                row=request.row,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=tuple(blocks),
                adapter_slot=slot,
                sampling=request.sampling,
            )
        )
        batch.append(request, self._chunk(request, batch.budget))

    def _adapter_to_drain(self) -> str:
        """The adapter whose slot goes to the first request that lacks one: nobody behind that request
        may lease it anew, or it would never be free while requests for it keep coming. It stays the
        same until its slot is free; that of least work left is chosen.
        """
        work_left: dict[str, int] = {}
        for request in self._running:
            if request.adapter_digest is not None:
                left = request.num_prompt_tokens + request.sampling.max_tokens - request.num_tokens
                work_left[request.adapter_digest] = max(
                    work_left.get(request.adapter_digest, 0), left
                )
        assert work_left, "every slot is leased, but nobody runs with an adapter"
        if self._draining not in work_left:
            self._draining = min(work_left, key=work_left.__getitem__)
        assert self._draining is not None
        return self._draining

    def _chunk(self, request: Request, budget: int) -> int:
        """How many of a request's tokens to compute now."""
        count = min(request.num_tokens - request.num_computed_tokens, budget)
        threshold = self.limits.long_prefill_token_threshold
        return count if threshold is None else min(count, threshold)

    def _preempt(self, request: Request) -> None:
        """Take back all that the last running request holds; it is computed anew when it resumes."""
        last = self._running.pop()
        assert last is request, "only the last in line is preempted"
        self._give_back(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self._waiting.push(request)
        self.num_preemptions += 1

    def _end(self, batch: _Batch, request: Request, ending: Ending) -> None:
        self.remove(request)
        batch.ended.append((request, ending))

    def _give_back(self, request: Request) -> None:
        self._kv.free(request.seq)
        heappush(self._free_rows, request.row)
        self._freed_rows.append(request.row)
        request.row = -1
        if request.adapter_digest is not None:
            self._adapters.release(request.adapter_digest)
            request.adapter_slot = BASE_SLOT

    def _step(self, batch: _Batch) -> Step | None:
        if not batch.requests:
            return None  # freed rows are told with the next step
        step = Step(
            step_id=self._next_step_id,
            freed_rows=tuple(self._freed_rows),
            new_rows=tuple(batch.new_rows),
            block_updates=tuple(batch.block_updates),
            rows_B=np.array(batch.rows, dtype=np.int32),
            num_computed_B=np.array(batch.num_computed, dtype=np.int32),
            num_scheduled_B=np.array(batch.num_scheduled, dtype=np.int32),
            samples_B=np.array(batch.samples, dtype=np.bool_),
        )
        self._freed_rows.clear()
        self._next_step_id += 1
        return step
