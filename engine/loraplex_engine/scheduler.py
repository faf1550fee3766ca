"""What each step computes: running requests first, then waiting ones, within one token budget.

Owns who runs: rows, block tables and adapter leases are taken and given back here and nowhere else.
Pure Python, no torch: a `Step` goes to the runner, which decides nothing.

A step is put together in this order:
1. Waiting requests past their deadline end.
2. Running requests that are caught up get a token each, in the policy's order; where blocks run out,
   those last in that order are preempted.
3. Prefills share what is left of the budget in the policy's order: those under way, and waiting
   requests, which are admitted here. A waiting request that is blocked (`BlockReason`) is skipped,
   never waited for; one that only lacks room ends admission, so that smaller ones cannot starve it.
4. Drafts take what then is left.

| state              | row | blocks                    | adapter lease | leaves by                     |
|--------------------|-----|---------------------------|---------------|-------------------------------|
| waiting, preempted | no  | no                        | no            | admission, `remove`, deadline |
| running            | yes | for all its known tokens  | if it has one | preemption, `remove`          |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from heapq import heapify, heappop, heappush

from loraplex_engine.adapter_turns import AdapterTurns
from loraplex_engine.batch import Batch, Decision
from loraplex_engine.config import Admission
from loraplex_engine.errors import AdapterInvalidError, AdapterUnavailableError
from loraplex_engine.kv.manager import Hit, KvManager
from loraplex_engine.policies import Policy, ServiceGap
from loraplex_engine.queue_meter import QueueMeter
from loraplex_engine.request import BASE_SLOT, BlockReason, Ending, Request, RequestStatus
from loraplex_engine.speculative import DraftCounts, Drafter, DraftWant
from loraplex_engine.step import AdapterPool, BlockUpdate, NewRow, Step

# What waiting requests wait for that other threads are at work on.
BROUGHT_BY_OTHERS = (BlockReason.ADAPTER_LOADING, BlockReason.GRAMMAR)
# What a step keeps for the oldest prefill under way when others pass it: it ends, whoever comes.
PASSED_SHARE = 16  # one token in so many
# What a step spends on looking waiting requests up, before others wait for the next one: in names of
# blocks, each of which takes about 10 us to make. The prompt that goes beyond is still looked up whole.
LOOKUP_WORK = 512
# Forced tokens that a row computes in a step: others wait while the host looks at as many rows of logits.
MOST_FORCED = 32
_ADAPTER_REASONS = (
    BlockReason.ADAPTER_LOADING,
    BlockReason.ADAPTER_SLOT,
    BlockReason.ADAPTER_SHARE,
)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step and of the queue.

    admission: "optimistic" admits what there is room for now (and `watermark_blocks` more), and takes
        blocks back from the last in line when running requests outgrow the cache; "reserve" admits a
        request only when the cache can hold its prompt and max_tokens beside what it has promised to
        others already, so that nobody is ever preempted.
    waiting_served_ratio: requests are admitted only while at least so many wait for each one that
        runs, or nothing has been admitted for `max_steps_closed` steps. Higher: steps hold decodes
        alone for longer, so inter-token latency is lower and time to first token higher. 0: always.
    """

    max_num_batched_tokens: int
    max_num_seqs: int  # rows
    max_waiting: int
    long_prefill_token_threshold: int | None = None  # per row and step
    watermark_blocks: int = 0  # kept free at admission, so that running rows can grow
    max_partial_prefills: int | None = None  # rows amid a prefill at the end of a step
    admission: Admission = "optimistic"
    waiting_served_ratio: float = 0.0
    max_steps_closed: int = 20


class _Verdict(Enum):
    """What became of a waiting request whose turn it was."""

    TAKEN = auto()  # it runs, or it ended
    SKIPPED = auto()
    NO_ROOM = auto()  # nobody behind it may pass


class Scheduler:
    """Decides; the core tells it of arrivals and endings, and what became of a step."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KvManager,
        adapters: AdapterPool,
        policy: Policy,
        drafter: Drafter | None = None,
    ) -> None:
        self.limits = limits
        self.num_preemptions = 0
        self.meter = QueueMeter()
        self._kv = kv
        self._adapters = adapters
        self._waiting = policy
        self._drafter = drafter
        self._running: list[Request] = []  # sorted by the policy's rank when a step is decided
        # A heap, in which requests stay that have left the queue.
        self._deadlines: list[tuple[float, int, Request]] = []
        self._free_rows = list(range(limits.max_num_seqs))
        heapify(self._free_rows)
        self._freed_rows: list[int] = []  # since the last step: the runner is to forget them
        self._turns = AdapterTurns(adapters)
        self._next_step_id = 0
        self._num_steps_closed = 0  # since admission was last open

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
    def retry_after_s(self) -> float:
        """When a client that found the queue full should come again."""
        return self.meter.retry_after_s(len(self._waiting))

    @property
    def service_gap(self) -> ServiceGap | None:
        """How far apart tenants have been, where the policy keeps accounts."""
        return self._waiting.service_gap()

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

    @property
    def num_query_tokens(self) -> int:
        """Prompt tokens looked up in the prefix cache, once per request."""
        return self._kv.num_query_tokens

    @property
    def num_hit_tokens(self) -> int:
        """Those of them that were found."""
        return self._kv.num_hit_tokens

    @property
    def is_stuck(self) -> bool:
        """Whether nobody runs and somebody waits for what no other thread brings: as of the last step."""
        return not self._running and any(
            request.blocked_on not in BROUGHT_BY_OTHERS for request in self._waiting.requests()
        )

    def commit(self, request: Request, num_written: int) -> None:
        """A running request's first `num_written` tokens are computed, and its last logits finite."""
        self._kv.commit(request, num_written)

    def forget_cached(self) -> None:
        """Empty the prefix cache."""
        self._kv.forget_cached()

    def has_place_for(self, tenant_id: str, count: int) -> bool:
        """Whether a tenant may queue so many more requests, all or none."""
        num_places = self.limits.max_waiting - len(self._waiting)
        return self._waiting.has_place_for(tenant_id, num_places, count)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._enqueue(request)
        deadline = request.generate.deadline_unix_s
        if deadline is not None:
            heappush(self._deadlines, (deadline, request.seq, request))
            self._forget_past_deadlines()

    def withdraw(self, request: Request) -> None:
        """As `remove`, of a request that `add` may have failed to queue."""
        if any(queued is request for queued in self._waiting.requests()):
            self.remove(request)
        request.status = RequestStatus.FINISHED

    def remove(self, request: Request) -> None:
        """Take a request out for good, wherever it is, with all it holds."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._give_back(request)
            self._kv.leave(request)
        else:
            self._waiting.remove(request)
            self.meter.leave(request)
        request.status = RequestStatus.FINISHED
        self._kv.note_choice(request)
        if self._drafter is not None:
            self._drafter.forget(request)

    def schedule(self, now_unix_s: float) -> Decision:
        """Decide the next step; its tokens count as computed from here on."""
        batch = Batch(budget=self.limits.max_num_batched_tokens)
        batch.now_unix_s = now_unix_s
        batch.most_lookup_work = self._kv.lookup_work + LOOKUP_WORK
        self._turns.begin_step()
        self._waiting.begin_step(now_unix_s)
        self.meter.begin_step(now_unix_s)
        for request in self._running:
            self._waiting.charge(request)
        self._running.sort(key=self._waiting.rank)
        self._drop_expired(batch, now_unix_s)
        self._schedule_running(batch)
        self._schedule_prefills(batch)
        self._add_drafts(batch)
        return Decision(step=self._launchable(batch), requests=batch.requests, ended=batch.ended)

    @property
    def draft_counts(self) -> DraftCounts:
        """Drafts computed and accepted so far."""
        return DraftCounts() if self._drafter is None else self._drafter.counts

    def stop_drafting(self) -> None:
        """No drafts from here on."""
        self._drafter = None

    def settle_drafts(self, request: Request, num_drafts: int, num_sampled: int) -> None:
        """A running row had drafts and sampled so many tokens, which the request does not know yet.

        The last of them was not computed, whatever stood in its place; what was computed behind it, the
        keys and values of drafts that were not accepted, is computed anew.
        """
        assert 1 <= num_sampled <= num_drafts + 1
        request.num_computed_tokens = request.num_tokens + num_sampled - 1
        if request.sampling.forced_token_ids:
            return
        assert self._drafter is not None
        self._drafter.note(request, num_drafts, num_sampled - 1)

    def drop_drafts(self, request: Request, num_drafts: int) -> None:
        """A running row with drafts got no number: its next step is to compute its last token alone."""
        request.num_computed_tokens = request.num_tokens - 1
        if request.sampling.forced_token_ids:
            request.is_draftless = True
            return
        assert self._drafter is not None
        self._drafter.note_spoilt(request, num_drafts)

    def repeat(self, request: Request, num_drafts: int) -> None:
        """A running row that was to sample did not: its next step computes its last token once more."""
        if num_drafts:
            self.drop_drafts(request, num_drafts)
        request.num_computed_tokens = request.num_tokens - 1

    def note_step(self, step: Step, seconds: float) -> None:
        """A step took so long, from launch to result."""
        if self._drafter is None or not step.samples_B.all():
            return
        num_drafts = sum(len(ids) for ids in step.drafts.values())
        if step.num_tokens - num_drafts == len(step.rows_B):
            self._drafter.note_step(step.num_tokens, seconds)

    def check(self) -> None:
        """Assert that rows, blocks and tables are where the table above says."""
        self._kv.check()
        rows = [request.row for request in self._running] + self._free_rows
        assert sorted(rows) == list(range(self.limits.max_num_seqs)), "a row is lost or doubled"
        assert self._kv.num_tables == len(self._running), "a table has no running request"
        assert self._adapters.num_leases == self.num_leases, "a lease has no running request"
        for request in self._running:
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed_tokens <= request.num_tokens
            num_held = self._kv.num_blocks_of(request.seq) * self._kv.block_size
            assert num_held >= request.num_computed_tokens, f"{request.identity} lacks blocks"
        self._waiting.check(self._running)
        waiting = list(self._waiting.requests())
        assert len(waiting) == len(self._waiting) == sum(self.meter.num_by_priority.values())
        for request in waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert (request.row, request.adapter_slot) == (-1, BASE_SLOT)

    # ---------------------------------------------------------------------------- deadlines

    def _drop_expired(self, batch: Batch, now_unix_s: float) -> None:
        """End what waited past its deadline. A preempted request has answered already: it may resume.

        Cost: O(log) per deadline passed, nothing per request that waits.
        """
        while self._deadlines and self._deadlines[0][0] <= now_unix_s:
            request = heappop(self._deadlines)[2]
            # The choices of a request that has begun are not "still waiting" either.
            if request.status is RequestStatus.WAITING and not request.has_begun:
                ending = Ending(
                    "error",
                    error_code="deadline_exceeded",
                    error_message="the request was still waiting at its deadline",
                )
                self._end(batch, request, ending)

    def _forget_past_deadlines(self) -> None:
        """Keep the heap in proportion to the queue, whatever deadlines served requests had."""
        if len(self._deadlines) > 2 * len(self._waiting) + 64:
            is_waiting = RequestStatus.WAITING
            self._deadlines = [entry for entry in self._deadlines if entry[2].status is is_waiting]
            heapify(self._deadlines)

    # ---------------------------------------------------------------------- running requests

    def _schedule_running(self, batch: Batch) -> None:
        """A token for each running request that is caught up; the others' turn comes with prefills."""
        running = self._running
        index = 0
        while index < len(running):
            request = running[index]
            if not self._make_room(batch, request):
                break  # it was the last in line, so nobody is behind it
            if request.num_tokens - request.num_computed_tokens > 1:
                batch.partials.append(request)
                batch.num_partials += 1
            elif batch.budget > 0:
                batch.append(request, 1)
            index += 1

    def _make_room(self, batch: Batch, request: Request) -> bool:
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
                self._preempt(batch, victim)
                continue
            if len(self._running) == 1:
                # Nobody's blocks are left to take: whoever else holds some is not a request. Its
                # recomputation would end here again, so it ends with what it has.
                self._end(batch, request, Ending("length"))
            else:
                self._preempt(batch, request)
            return False

    # ------------------------------------------------------------ prefills and admission

    def _schedule_prefills(self, batch: Batch) -> None:
        """Prefills under way and waiting requests, in the policy's order."""
        rank = self._waiting.prefill_rank
        batch.partials = deque(sorted(batch.partials, key=rank))
        queue = self._admissible(batch)
        # The oldest prefill under way may be passed, but not have all of the budget taken from it.
        oldest = min(batch.partials, key=lambda request: request.seq, default=None)
        kept = 0 if oldest is None else max(1, batch.budget // PASSED_SHARE)
        head = next(queue, None)
        while batch.budget > 0:
            if batch.partials and (
                head is None or batch.budget <= kept or rank(batch.partials[0]) <= rank(head)
            ):
                partial = batch.partials.popleft()
                if partial is oldest:
                    kept = 0
                if batch.budget > kept:
                    self._continue_prefill(batch, partial, batch.budget - kept)
            elif head is None:
                break
            else:
                budget = batch.budget - kept
                verdict = self._try_to_admit(batch, head, budget)
                if verdict is _Verdict.SKIPPED:
                    assert head.blocked_on is not None
                    head.num_skips += 1
                    self.meter.note_skip(head.blocked_on)
                head = None if verdict is _Verdict.NO_ROOM else next(queue, None)

    def _continue_prefill(self, batch: Batch, request: Request, budget: int) -> None:
        batch.append(request, self._chunk(request, budget))
        batch.num_partials -= request.num_computed_tokens == request.num_tokens

    def _admissible(self, batch: Batch) -> Iterator[Request]:
        """The queue in order, or nothing where this step is to admit nobody."""
        if batch.num_preempted or not self._is_admission_open():
            # What a preemption freed is for those who run: who resumed now would be preempted again.
            return iter(())
        return self._waiting.in_order()

    def _is_admission_open(self) -> bool:
        """See `SchedulerLimits.waiting_served_ratio`."""
        num_waiting, num_running = len(self._waiting), len(self._running)
        is_open = (
            num_waiting >= self.limits.waiting_served_ratio * num_running
            or self._num_steps_closed >= self.limits.max_steps_closed
        )
        self._num_steps_closed = 0 if is_open or num_waiting == 0 else self._num_steps_closed + 1
        return is_open

    def _try_to_admit(self, batch: Batch, request: Request, budget: int) -> _Verdict:
        """Let a waiting request run, unless it is blocked or lacks room.

        The checks are apart, cheapest first. The adapter's lease is the last, for it would have to be
        given back; but who was blocked on it at the last look asks for it first, so that no request is
        looked up step after step in vain. `budget`: tokens that it may compute in this step.
        """
        if not self._free_rows:
            return _Verdict.NO_ROOM
        was_blocked_on = request.blocked_on
        request.blocked_on = self._block_reason(batch, request, budget)
        if request.blocked_on is not None:
            return _Verdict.SKIPPED
        digest = request.adapter_digest
        if digest is not None and (
            was_blocked_on in _ADAPTER_REASONS or not self._adapters.is_loaded(digest)
        ):
            verdict = self._take_lease(batch, request)
            if verdict is not None:
                return verdict
        verdict = self._look_up_and_admit(batch, request, budget)
        if verdict is not _Verdict.TAKEN and digest is not None and request.adapter_slot >= 0:
            self._adapters.release(digest, request.generate.tenant_id)
            request.adapter_slot = BASE_SLOT
        return verdict

    def _look_up_and_admit(self, batch: Batch, request: Request, budget: int) -> _Verdict:
        """The checks that take time; then the lease, if the request has none yet."""
        # With nobody running no step is held up; and somebody is to run.
        if self._running and self._kv.lookup_work >= batch.most_lookup_work:
            return _Verdict.NO_ROOM
        while True:
            hit = self._kv.lookup(request, partial(self._may_wait_for, request))
            request.num_computed_tokens = hit.num_tokens
            request.blocked_on = self._prefill_block_reason(batch, request, budget, hit)
            if request.blocked_on is not None:
                return _Verdict.SKIPPED
            num_lacking = self._num_lacking(request, hit)
            left = self._left_to_drop(request, hit, num_lacking) if num_lacking > 0 else []
            if num_lacking > 0 and not left:
                return _Verdict.NO_ROOM
            if request.adapter_digest is not None and request.adapter_slot == BASE_SLOT:
                verdict = self._take_lease(batch, request)
                if verdict is not None:
                    return verdict
            if not left:
                break
            # Only now: nothing is thrown away for who is not admitted.
            self._kv.drop_left(left)
        self._admit(batch, request, budget, hit)
        return _Verdict.TAKEN

    def _left_to_drop(self, request: Request, hit: Hit, num_lacking: int) -> list[int]:
        """The prompts of ended choices that are to go so that a waiting request has room, if that does."""
        left = self._kv.left_to_drop(request, num_lacking, hit=hit)
        if not left and not self._running:
            # Nobody will end and make room. So its own may go too, which costs it the prompt and gains
            # at most the block that it would have copied.
            left = self._kv.left_to_drop(request, num_lacking, hit=hit, with_own=True)
        return left

    def _take_lease(self, batch: Batch, request: Request) -> _Verdict | None:
        """Lease a waiting request's adapter; None: it has its slot, else what became of it."""
        try:
            slot = self._turns.lease(request, self._running)
        except (AdapterUnavailableError, AdapterInvalidError) as error:
            ending = Ending("error", error_code=error.code, error_message=str(error))
            self._end(batch, request, ending)
            return _Verdict.TAKEN
        if slot is None:
            request.blocked_on = self._turns.block_reason(request)
            return _Verdict.SKIPPED
        request.adapter_slot = slot
        return None

    def _may_wait_for(self, request: Request, leader: Request) -> bool:
        """Whether a waiting request may wait for one that computes what it shares: not for one whose
        turn comes after its own, or it would be served in that one's place in line.
        """
        if leader.siblings is request.siblings:
            return True  # choices of one request
        rank = self._waiting.prefill_rank
        return bool(rank(leader) <= rank(request))

    def _block_reason(self, batch: Batch, request: Request, budget: int) -> BlockReason | None:
        """Why a request is to be skipped in this step, as far as is known without looking it up."""
        if request.is_compiling:
            return BlockReason.GRAMMAR
        reason = self._turns.block_reason(request)
        if reason is not None:
            return reason
        if any(self._may_wait_for(request, leader) for leader in self._kv.leaders(request)):
            return BlockReason.PREFIX
        if request.blocked_on is BlockReason.PARTIAL_PREFILLS:
            return self._partials_block_reason(batch, request, budget)  # by what it found then
        return None

    def _prefill_block_reason(
        self, batch: Batch, request: Request, budget: int, hit: Hit
    ) -> BlockReason | None:
        """Why a request is to be skipped in this step, given what it need not compute."""
        if hit.is_coming:
            return BlockReason.PREFIX
        return self._partials_block_reason(batch, request, budget)

    def _partials_block_reason(
        self, batch: Batch, request: Request, budget: int
    ) -> BlockReason | None:
        """Whether a request would be one prefill under way too many."""
        cap = self.limits.max_partial_prefills
        if cap is not None and batch.num_partials >= cap:
            num_left = request.num_tokens - request.num_computed_tokens
            if self._chunk(request, budget) < num_left:
                return BlockReason.PARTIAL_PREFILLS
        return None

    def _num_lacking(self, request: Request, hit: Hit) -> int:
        """How many blocks too few are free (0 or less: none): all known tokens' at once, so that a prefill
        that has begun never waits for room; with "reserve", those of all tokens that it may ever have.
        """
        if self.limits.admission == "reserve":
            # What running requests have been promised and do not hold yet is as good as taken.
            promised = sum(
                max(0, self._num_promised_blocks(other) - self._kv.num_blocks_of(other.seq))
                for other in self._running
            )
            most = request.num_prompt_tokens + request.sampling.max_tokens
            return self._kv.num_missing(hit, most) + promised - self._kv.num_free
        watermark = self.limits.watermark_blocks if self._running else 0
        return self._kv.num_missing(hit, request.num_tokens) + watermark - self._kv.num_free

    def _num_promised_blocks(self, request: Request) -> int:
        """Blocks for all tokens that a request may ever have."""
        return self._kv.blocks_for(request.num_prompt_tokens + request.sampling.max_tokens)

    def _admit(self, batch: Batch, request: Request, budget: int, hit: Hit) -> None:
        """Give a waiting request a row and blocks; every check has been passed."""
        if not request.has_begun:
            self.meter.note_wait(batch.now_unix_s - request.arrived_at_unix_s)
        self.meter.leave(request)
        self._waiting.admit(request)
        request.status = RequestStatus.RUNNING
        request.row = heappop(self._free_rows)
        self._running.append(request)
        blocks, copy = self._kv.admit(request, hit, request.num_tokens)
        if copy is not None:
            batch.block_copies.append(copy)
        batch.new_rows.append(
            NewRow(
                row=request.row,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=tuple(blocks),
                adapter_slot=request.adapter_slot,
                sampling=request.sampling,
            )
        )
        batch.append(request, self._chunk(request, budget))
        batch.num_partials += request.num_computed_tokens < request.num_tokens

    # ------------------------------------------------------------------------------- drafts

    def _add_drafts(self, batch: Batch) -> None:
        """Let rows that have caught up compute drafts as well, in what budget and blocks nobody wants.

        Nobody is preempted or loses budget for a draft, and the watermark stays free.
        """
        forced: list[tuple[int, DraftWant]] = []
        wants: list[tuple[int, DraftWant]] = []
        for index, request in enumerate(batch.requests):
            room = request.sampling.max_tokens - request.num_output_tokens - 1
            if room > 0 and batch.samples[index] and batch.num_scheduled[index] == 1:
                want = (index, DraftWant(request, room))
                (forced if request.sampling.forced_token_ids else wants).append(want)
        if forced:
            self._add_forced(batch, forced)
        if self._drafter is None or batch.budget == 0 or not wants:
            return
        num_tokens = self.limits.max_num_batched_tokens - batch.budget
        drafts = self._drafter.draft([want for _, want in wants], num_tokens, batch.budget)
        for (index, drafted), ids in zip(wants, drafts, strict=True):
            self._append_drafts(batch, index, drafted.request, ids)

    def _add_forced(self, batch: Batch, wants: list[tuple[int, DraftWant]]) -> None:
        """Forced tokens are drafts that are always right.

        A step samples no more positions for them than it has rows, which is what memory was measured for.
        """
        spare = min(batch.budget, self.limits.max_num_seqs - sum(batch.samples))
        for index, want in wants:
            request = want.request
            if spare <= 0 or request.is_draftless:
                continue
            start = request.num_output_tokens
            count = min(want.room, spare, MOST_FORCED)
            ids = request.sampling.forced_token_ids[start : start + count]
            spare -= self._append_drafts(batch, index, request, ids)

    def _append_drafts(
        self, batch: Batch, index: int, request: Request, ids: tuple[int, ...]
    ) -> int:
        """As many of the drafts as there are blocks for; how many."""
        count = self._room_for_drafts(batch, request, len(ids))
        if count:
            batch.append_drafts(index, ids[:count])
        return count

    def _room_for_drafts(self, batch: Batch, request: Request, count: int) -> int:
        """Grow a table for `count` drafts, or as far as free blocks go; how many it holds."""
        num_held = self._kv.num_blocks_of(request.seq)
        spare = max(0, self._kv.num_free - self.limits.watermark_blocks)
        wanted = self._kv.blocks_for(request.num_tokens + count) - num_held
        if wanted > spare:
            count = (num_held + spare) * self._kv.block_size - request.num_tokens
        blocks = self._kv.grow(request.seq, request.num_tokens + count)
        assert blocks is not None, "so many are free"
        if blocks:
            batch.block_updates.append(BlockUpdate(request.row, num_held, tuple(blocks)))
        return count

    # ------------------------------------------------------------------------------- shared

    def _chunk(self, request: Request, budget: int) -> int:
        """How many of a request's tokens to compute now."""
        count = min(request.num_tokens - request.num_computed_tokens, budget)
        threshold = self.limits.long_prefill_token_threshold
        return count if threshold is None else min(count, threshold)

    def _preempt(self, batch: Batch, request: Request) -> None:
        """Take back all that the last running request holds; it is computed anew when it resumes."""
        last = self._running.pop()
        assert last is request, "only the last in line is preempted"
        self._give_back(request)
        self._kv.free(request.seq)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._enqueue(request)
        self.num_preemptions += 1
        batch.num_preempted += 1

    def _enqueue(self, request: Request) -> None:
        self.meter.enter(request)
        try:
            self._waiting.push(request)
        except BaseException:
            self.meter.leave(request)
            raise

    def _end(self, batch: Batch, request: Request, ending: Ending) -> None:
        self.remove(request)
        batch.ended.append((request, ending))

    def _give_back(self, request: Request) -> None:
        """All but its blocks, which go last."""
        self._waiting.leave(request)
        heappush(self._free_rows, request.row)
        self._freed_rows.append(request.row)
        request.row = -1
        if request.adapter_digest is not None:
            self._adapters.release(request.adapter_digest, request.generate.tenant_id)
            request.adapter_slot = BASE_SLOT

    def _launchable(self, batch: Batch) -> Step | None:
        if not batch.requests:
            return None  # freed rows are told with the next step
        step = batch.step(self._next_step_id, self._freed_rows)
        self._freed_rows.clear()
        self._next_step_id += 1
        return step
