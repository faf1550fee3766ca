"""The engine's heart: takes requests, steps, and says what happened. One thread, no sockets, no torch.

A step is schedule -> launch -> collect -> update. Launch and collect are apart so that a later step can
be launched before this one's tokens have been seen; today one step is in flight at most.
Every accepted request gets exactly one terminal event, in whatever way it ends.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import get_args

from loraplex_engine.admission import ModelLimits, check_request
from loraplex_engine.batch import Decision
from loraplex_engine.choices import ChoiceGroup, make_choices
from loraplex_engine.config import EngineConfig, EngineSizes
from loraplex_engine.errors import DrainingError, QueueFullError
from loraplex_engine.kv.block_pool import BlockPool
from loraplex_engine.kv.manager import KvManager
from loraplex_engine.kv.prefix_cache import PrefixCache
from loraplex_engine.policies import make_policy, max_charge
from loraplex_engine.protocol import (
    GIVEN_UP,
    EngineStats,
    FinishReason,
    Generate,
    TokenEvent,
    TokenLogprobs,
    Usage,
)
from loraplex_engine.request import BASE_SLOT, Ending, Identity, Request, RequestStatus
from loraplex_engine.scheduler import Scheduler, SchedulerLimits
from loraplex_engine.speculative import Proposer, make_drafter
from loraplex_engine.step import AdapterPool, Executor, StepResult
from loraplex_engine.structured.compiler import GrammarSource, NoGrammars
from loraplex_engine.structured.rows import GrammarRows

Clock = Callable[[], float]  # unix seconds

# How many ended identities are remembered, so that a late copy of a Generate is not run again. The
# journal remembers all; this covers copies that cross the terminal event on the wire.
NUM_ENDED_REMEMBERED = 16_384
RETRY_AFTER_S = 1.0


class EngineCore:
    """All calls come from one thread, the step thread. Deadlines and `clock` are unix seconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        adapters: AdapterPool,
        clock: Clock = time.time,
        *,
        limits: ModelLimits,
        grammars: GrammarSource | None = None,
    ) -> None:
        self.limits = limits
        self.is_draining = False
        # Tokens that the last `step` computed. 0 while `has_work()`: everything waits (an adapter is
        # loading, say), so the caller should wait for messages a few milliseconds, not spin.
        self.last_step_num_tokens = 0
        self._scheduler = scheduler
        self._executor = executor
        self._adapters = adapters
        self._clock = clock
        self._grammars = GrammarRows(grammars or NoGrammars())
        self._started_at_unix_s = clock()
        self._live: dict[Identity, ChoiceGroup] = {}
        self._ended: OrderedDict[Identity, None] = OrderedDict()  # oldest first
        self._events: list[TokenEvent] = []
        self._in_flight: deque[Decision] = deque()
        self._launched_at_s = 0.0
        self._next_seq = 0
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0
        self._finished_total: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self._steps_total = 0
        self._mixed_steps_total = 0
        self._max_adapters_in_step = 0

    def add(self, generate: Generate) -> None:
        """Queue a request. A second copy of one that is live, or ended lately, is a no-op.

        Raises:
            DrainingError, QueueFullError: not now, elsewhere or later.
            InvalidRequestError, NeverFitsError: not on this replica, ever.
        """
        identity = (generate.request_id, generate.attempt)
        if identity in self._live or identity in self._ended:
            return
        if self.is_draining:
            raise DrainingError("the replica is shutting down", retry_after_s=RETRY_AFTER_S)
        max_waiting = self._scheduler.limits.max_waiting
        check_request(generate, self.limits, self._scheduler.num_kv_slots, max_waiting)
        if not self._scheduler.has_place_for(generate.tenant_id, generate.sampling.n):
            num_waiting = self._scheduler.num_waiting
            raise QueueFullError(
                f"{num_waiting} requests are waiting already",
                num_waiting=num_waiting,
                retry_after_s=self._scheduler.retry_after_s,
            )
        if generate.adapter_digest is not None:
            self._adapters.prefetch(generate.adapter_digest, generate.tenant_id)
        stop_ids = frozenset(generate.sampling.stop_token_ids)
        if not generate.sampling.ignore_eos and not generate.sampling.forced_token_ids:
            stop_ids |= self.limits.eos_token_ids
        group = make_choices(
            generate,
            first_seq=self._next_seq,
            stop_ids=stop_ids,
            arrived_at_unix_s=self._clock(),
        )
        self._grammars.begin(group.choices)
        self._next_seq += len(group.choices)
        try:
            for choice in group.choices:
                self._scheduler.add(choice)
        except BaseException:
            for choice in group.choices:
                self._scheduler.withdraw(choice)
            raise
        self._live[identity] = group  # the last: what is live is queued, all of it

    def abort(
        self,
        request_id: str,
        attempt: int,
        as_stop: bool = False,
        is_platform_fault: bool = False,
        index: int | None = None,
    ) -> None:
        """End a request in whatever state it is; unknown or ended: no-op.

        Its terminal event, with what it cost so far, comes from the next `step` or `drain_events`. A
        token that is being computed meanwhile never existed.

        Args:
            index: with `as_stop`, the one choice whose text is complete; the others go on.
        """
        group = self._live.get((request_id, attempt))
        if group is None:
            return
        if as_stop and index is not None:
            choice = group.find(index)
            if choice is not None:
                self._end(choice, Ending("stop"))
        elif is_platform_fault and not as_stop:
            ending = Ending("error", error_code=GIVEN_UP, error_message="the platform gave it up")
            self._end_group(group, ending)
        else:
            self._end_group(group, Ending("stop" if as_stop else "abort"))

    def begin_drain(self) -> None:
        """Take nothing new; what was accepted is finished."""
        self.is_draining = True

    def live_usage(self) -> dict[tuple[str, int], Usage]:
        """What each unfinished request cost so far, by (request_id, attempt)."""
        return {identity: group.usage() for identity, group in self._live.items()}

    def forget_cached(self) -> None:
        """Empty the prefix cache: nothing of what was computed so far is found by later requests."""
        self._scheduler.forget_cached()

    def constrain_drafts(self, request: Request, ids: tuple[int, ...]) -> tuple[int, ...]:
        """`Drafter.constrain`: drafts up to the first that a request's grammar does not allow."""
        return self._grammars.constrain_drafts(request, ids)

    def stop_drafting(self) -> None:
        """Compute no drafts from here on, whatever the settings say."""
        self._scheduler.stop_drafting()

    def has_work(self) -> bool:
        """Whether requests are unfinished or events undelivered."""
        return bool(self._live or self._events)

    @property
    def is_stuck(self) -> bool:
        """Whether the last `step` found requests waiting for nothing that could come, and nobody runs."""
        return self._scheduler.is_stuck

    def step(self) -> list[TokenEvent]:
        """Compute one step, if anything can run, and return all events since the last call.

        What the executor raises passes through: its rows are in an unknown state then, so the process
        is to end, and its gateways see the replica as lost.
        """
        self._launch()
        if self._in_flight:
            decision, result = self._in_flight.popleft(), self._executor.collect()
            assert decision.step is not None
            self._scheduler.note_step(decision.step, time.perf_counter() - self._launched_at_s)
            self._update(decision, result)
        return self.drain_events()

    def drain_events(self) -> list[TokenEvent]:
        """Events that nobody has seen yet, in order."""
        events, self._events = self._events, []
        return events

    def stats(self) -> EngineStats:
        """What the core knows: the server adds the process's `rss_bytes` and the adapter pool's lists
        (`adapters_resident`, `adapters_host`), which are empty here.
        """
        total, free = self._scheduler.num_blocks, self._scheduler.num_free_blocks
        drafts = self._scheduler.draft_counts
        meter, gap = self._scheduler.meter, self._scheduler.service_gap
        grammars = self._grammars.meter
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            kv_blocks_total=total,
            kv_blocks_free=free,
            kv_usage=(total - free) / total,
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
            requests_finished_total=dict(self._finished_total),
            num_preemptions_total=self._scheduler.num_preemptions,
            steps_total=self._steps_total,
            adapters_resident=[],
            adapters_host=[],
            # The pool's count, not the scheduler's: that one is 0 with nobody running, whatever leaked.
            adapter_leases=self._adapters.num_leases,
            max_adapters_in_step=self._max_adapters_in_step,
            mixed_steps_total=self._mixed_steps_total,
            rss_bytes=0,
            uptime_s=self._clock() - self._started_at_unix_s,
            queue_retry_after_s=self._scheduler.retry_after_s,
            waiting_by_priority=dict(meter.num_by_priority),
            skips_total=dict(meter.skips_by_reason),
            queue_time_counts=list(meter.wait_counts),
            queue_time_seconds_total=meter.wait_seconds_total,
            service_gap=gap.widest if gap else 0.0,
            service_gap_promised=gap.promised if gap else 0.0,
            service_gap_bound=gap.bound if gap else 0.0,
            prefix_cache_query_tokens_total=self._scheduler.num_query_tokens,
            prefix_cache_hit_tokens_total=self._scheduler.num_hit_tokens,
            spec_draft_tokens_total=drafts.drafts,
            spec_accepted_tokens_total=drafts.accepted,
            spec_drafts_total=drafts.blocks,
            spec_accepted_per_position_total=list(drafts.accepted_at),
            grammar_queries_total=grammars.num_queries,
            grammar_cache_hits_total=grammars.num_hits,
            grammar_compile_counts=list(grammars.compile_counts),
            grammar_compile_seconds_total=grammars.compile_seconds_total,
            grammar_failures_total=dict(grammars.failures),
            grammar_masks_total=grammars.num_masks,
            grammar_mask_seconds_total=grammars.mask_seconds_total,
            grammar_deferrals_total=grammars.num_deferred,
        )

    def check(self) -> None:
        """Assert the scheduler's invariants, and that nothing is held by requests that are gone."""
        self._scheduler.check()
        num_live = sum(len(group.live) for group in self._live.values())
        assert num_live == self._scheduler.num_running + self._scheduler.num_waiting
        if not self._live:
            assert self._scheduler.num_free_blocks == self._scheduler.num_blocks

    def _launch(self) -> None:
        self._grammars.begin_step()
        for request, ending in self._grammars.failures():
            if request.status is not RequestStatus.FINISHED:  # else another choice took it along
                self._end(request, ending)
        decision = self._scheduler.schedule(self._clock())
        for request, ending in decision.ended:
            self._finish(request, ending)
        self.last_step_num_tokens = 0
        if decision.step is None:
            return
        self.last_step_num_tokens = decision.step.num_tokens
        self._count_step(decision.requests)
        self._launched_at_s = time.perf_counter()
        step = self._grammars.with_masks(decision.step, decision.requests)
        self._executor.launch(step)
        self._in_flight.append(decision)

    def _update(self, decision: Decision, result: StepResult) -> None:
        """Apply what came out. Blocks may become findable here, once full and finite, and not before."""
        step = decision.step
        assert step is not None
        assert result.step_id == step.step_id, "the executor answered another step"
        ends = (step.num_computed_B + step.num_scheduled_B).tolist()
        is_finite = result.is_finite_B.tolist()
        stuck = set(result.stuck)
        for index, request in enumerate(decision.requests):
            if request.status is RequestStatus.FINISHED:
                continue  # aborted while the step was in flight
            self._count_prefill(request, ends[index])
            if request.failure is not None:
                self._end(request, request.failure)
                continue
            num_drafts = len(step.drafts.get(index, ()))
            if request.is_deferred:
                request.is_deferred = False
                self._scheduler.repeat(request, num_drafts)
                continue
            if num_drafts and not is_finite[index]:
                # It may be a draft whose numbers are not finite: the next step asks without any.
                self._scheduler.drop_drafts(request, num_drafts)
                continue
            if is_finite[index]:
                # Drafts lie behind the last known token, and may be overwritten.
                self._scheduler.commit(request, min(ends[index], request.num_tokens))
            if not is_finite[index]:
                self._end(
                    request,
                    Ending(
                        "error",
                        error_code="non_finite_logits",
                        error_message="the model's output was not a number; nothing was sampled",
                    ),
                )
            elif index in stuck:
                self._end(
                    request,
                    Ending(
                        "error",
                        error_code="no_token_allowed",
                        error_message="grammar, bans and filters left no token to choose",
                    ),
                )
            elif result.tokens[index]:
                if num_drafts:
                    self._scheduler.settle_drafts(request, num_drafts, len(result.tokens[index]))
                self._append(request, result.tokens[index], result.logprobs.get(index))

    def _append(
        self, request: Request, sampled: Sequence[int], logprobs: Sequence[TokenLogprobs] | None
    ) -> None:
        """Take over what a row sampled, up to the token that ends the request."""
        token_ids: list[int] = []
        ending: Ending | None = None
        for token_id in sampled:
            assert 0 <= token_id < self.limits.vocab_size, f"the runner sampled {token_id}"
            token_ids.append(token_id)
            request.token_ids.append(token_id)
            of_grammar = self._grammars.advance(request, token_id)
            if of_grammar is not None and of_grammar.finish_reason == "error":
                ending = of_grammar
            elif token_id in request.stop_ids:
                ending = Ending("stop", stop_token_id=token_id)
            elif of_grammar is not None:
                ending = of_grammar
            elif request.num_output_tokens == request.sampling.max_tokens:
                ending = Ending("length")
            if ending is not None:
                break
        self._generation_tokens_total += len(token_ids)
        kept_logprobs = None if logprobs is None else list(logprobs[: len(token_ids)])
        if ending is not None:
            self._end(request, ending, token_ids, kept_logprobs)
            return
        self._events.append(
            TokenEvent(
                request_id=request.generate.request_id,
                attempt=request.generate.attempt,
                index=request.choice,
                token_ids=token_ids,
                logprobs=kept_logprobs,
            )
        )

    def _end(
        self,
        request: Request,
        ending: Ending,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        self._scheduler.remove(request)
        self._finish(request, ending, token_ids, logprobs)

    def _finish(
        self,
        request: Request,
        ending: Ending,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        """Say that a choice, gone from the scheduler, has ended: the last one ends its request, and so
        does any that ends with an error.
        """
        group = self._live.get(request.identity)
        if group is None:
            return  # another choice took it along
        group.live.remove(request)
        if ending.finish_reason == "error" or not group.live:
            self._end_group(group, ending, request.choice, token_ids, logprobs)
            return
        self._events.append(
            TokenEvent(
                request_id=request.generate.request_id,
                attempt=request.generate.attempt,
                index=request.choice,
                token_ids=token_ids or [],
                logprobs=logprobs,
                finish_reason=ending.finish_reason,
                stop_token_id=ending.stop_token_id,
            )
        )

    def _end_group(
        self,
        group: ChoiceGroup,
        ending: Ending,
        index: int = 0,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        """End what choices are left, and with them the request: its terminal event."""
        for choice in group.live:
            if choice.status is not RequestStatus.FINISHED:  # else the scheduler ended it just now
                self._scheduler.remove(choice)
        group.live.clear()
        del self._live[group.identity]
        self._ended[group.identity] = None
        if len(self._ended) > NUM_ENDED_REMEMBERED:
            self._ended.popitem(last=False)
        self._finished_total[ending.finish_reason] += 1
        self._grammars.note_end(ending)
        self._events.append(
            TokenEvent(
                request_id=group.generate.request_id,
                attempt=group.generate.attempt,
                index=index,
                token_ids=token_ids or [],
                logprobs=logprobs,
                finish_reason=ending.finish_reason,
                stop_token_id=ending.stop_token_id,
                usage=group.usage(),
                error_code=ending.error_code,
                error_message=ending.error_message,
            )
        )

    def _count_step(self, requests: list[Request]) -> None:
        slots = {request.adapter_slot for request in requests}
        has_base = BASE_SLOT in slots
        num_adapters = len(slots) - has_base
        self._steps_total += 1
        self._max_adapters_in_step = max(self._max_adapters_in_step, num_adapters)
        self._mixed_steps_total += has_base and num_adapters >= 2

    def _count_prefill(self, request: Request, end: int) -> None:
        """Cached tokens count as well: the prompt counts once, whoever computed it, and however often."""
        prefilled = min(end, request.num_prompt_tokens)
        request.num_prefilled_tokens = max(request.num_prefilled_tokens, prefilled)
        group = self._live[request.identity]
        if prefilled > group.num_prefilled_tokens:
            self._prompt_tokens_total += prefilled - group.num_prefilled_tokens
            group.num_prefilled_tokens = prefilled


def build_core(
    config: EngineConfig,
    sizes: EngineSizes,
    executor: Executor,
    adapters: AdapterPool,
    *,
    vocab_size: int,
    eos_token_ids: frozenset[int],
    clock: Clock = time.time,
    prefix_cache: PrefixCache | None = None,
    proposer: Proposer | None = None,
    grammars: GrammarSource | None = None,
) -> EngineCore:
    """An engine core as the settings say; the executor's KV cache has `sizes.num_blocks` blocks.

    Args:
        prefix_cache: see `kv.setup.open_prefix_cache`; None: nothing is kept after a request.
        proposer: another source of drafts than a row's own n-grams.
        grammars: compiles them; None: requests with one are refused.
    """
    limits = SchedulerLimits(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        watermark_blocks=int(config.kv_watermark * sizes.num_blocks),
        max_partial_prefills=config.max_partial_prefills,
        admission=config.admission,
        waiting_served_ratio=config.waiting_served_ratio,
        max_steps_closed=config.max_steps_closed,
    )
    most_charged = max_charge(
        max_model_len=sizes.max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_kv_tokens=sizes.num_blocks * config.block_size,
        is_reserving=config.admission == "reserve",
    )
    policy = make_policy(config.policy, aging_s=config.aging_s, most_charged=most_charged)
    kv = KvManager(BlockPool(sizes.num_blocks), config.block_size, cache=prefix_cache)
    drafter = make_drafter(config, proposer)
    core = EngineCore(
        Scheduler(limits, kv, adapters, policy, drafter),
        executor,
        adapters,
        clock,
        limits=ModelLimits(
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            max_model_len=sizes.max_model_len,
        ),
        grammars=grammars,
    )
    if drafter is not None:
        drafter.constrain = core.constrain_drafts
    return core
