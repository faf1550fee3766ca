"""Requests under a grammar, from their arrival to their end: what the core does for them at each turn.

| when | what |
|---|---|
| a request arrives | its grammar is compiled; until then the scheduler passes it over |
| that failed | it ends with the grammar's error, before any work |
| its row is about to sample | its own matcher says what may come: the step's masks |
| no mask can be had | the step goes on for all others, and it ends with an error once that is done |
| its tenant's masks took too long | it samples in a later step (`mask_budget.py`) |
| all of its masks take too long | it ends with an error |
| a token was sampled | its matcher takes it; a complete text stops, a refusal is an error |

Every choice of a request has its own matcher, made when it first samples. Pure Python; the step thread.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from loraplex_engine.request import Ending, Request, RequestStatus
from loraplex_engine.step import Step, UInt32Array
from loraplex_engine.structured.compiler import GrammarSource
from loraplex_engine.structured.errors import (
    GRAMMAR_ERRORS,
    GrammarError,
    GrammarTooComplexError,
)
from loraplex_engine.structured.mask_budget import MaskBudget

# Of the step thread's CPU. An honest mask takes 0.4 ms in the mean, one in a hundred 6 ms (49,152 ids); at
# worst some 70, for what a unit of the parser's fuel costs grows with the grammar. What the masks of all
# of a request's choices take beyond the first figure each, those below it counted in, may add up to the
# second.
FREE_MASK_S = 0.004
MAX_EXCESS_S = 1.0


class GrammarRows:
    """One engine's requests under grammars."""

    def __init__(self, source: GrammarSource) -> None:
        self.clock = time.thread_time
        self.meter = source.meter
        self._budget = MaskBudget()
        self._is_shared = False  # whether the last step had rows of several tenants
        self._source = source
        self._compiling: list[Request] = []

    def begin(self, choices: Sequence[Request]) -> None:
        """Take the choices of a request that arrives, if it has a grammar.

        Raises:
            QueueFullError, InvalidRequestError: refuse it.
        """
        generate = choices[0].generate
        if generate.sampling.grammar is None:
            return
        compilation = self._source.request(generate.sampling.grammar, generate.tenant_id)
        for choice in choices:
            choice.compilation = compilation
        self._compiling += choices

    def begin_step(self) -> None:
        """A step is about to be decided."""
        if self._is_shared:
            self._budget.begin_step()
        else:
            self._budget.forgive()

    def failures(self) -> list[tuple[Request, Ending]]:
        """Requests whose grammars turned out to be unusable since the last call."""
        failed, compiling = [], []
        for request in self._compiling:
            compilation = request.compilation
            if request.status is RequestStatus.FINISHED or compilation is None:
                continue
            if not compilation.is_done:
                compiling.append(request)
            elif compilation.error is not None:
                failed.append((request, _ending(compilation.error)))
        self._compiling = compiling
        return failed

    def with_masks(self, step: Step, requests: Sequence[Request]) -> Step:
        """`step` with the masks of those of its rows (`requests`, in batch order) that sample.

        A row without a mask that should have one gets a `failure`: its token means nothing. One whose
        turn it is not (`is_deferred`) does not sample.
        """
        masks: dict[int, UInt32Array] = {}
        deferred: list[int] = []
        self._is_shared = len({request.generate.tenant_id for request in requests}) > 1
        for index in self._in_turn(step, requests):
            request = requests[index]
            if self._is_shared and not self._budget.is_open(request.generate.tenant_id):
                request.is_deferred = True
                request.num_deferrals += 1
                deferred.append(index)
                continue
            request.num_deferrals = 0
            try:
                masks[index] = self._masks_of(request, step.drafts.get(index, ()))
            except GrammarError as error:
                request.failure = _ending(error)
        if deferred:
            self.meter.num_deferred += len(deferred)
            samples_B = step.samples_B.copy()
            samples_B[deferred] = False
            step = replace(step, samples_B=samples_B)
        return replace(step, token_masks=masks) if masks else step

    def advance(self, request: Request, token_id: int) -> Ending | None:
        """A token was sampled; an ending if the grammar says so."""
        if request.matcher is None:
            return None
        try:
            with self._timed(request, 0):
                request.matcher.advance(token_id)
        except GrammarError as error:
            return _ending(error)
        return Ending("stop") if request.matcher.is_complete else None

    def note_end(self, ending: Ending) -> None:
        """A request has ended, by its grammar or otherwise."""
        if ending.error_code in GRAMMAR_ERRORS:
            self.meter.failures[ending.error_code] += 1

    def constrain_drafts(self, request: Request, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Drafts up to the first that a request's grammar does not allow."""
        if request.matcher is None:
            return () if request.compilation is not None else ids
        # To look at drafts must not take the time that a row needs to go on at all.
        if request.num_deferrals or not self._budget.is_open(request.generate.tenant_id):
            return ()
        try:
            with self._timed(request, 0):
                return ids[: request.matcher.validate_drafts(ids)]
        except GrammarError:
            return ()  # its next mask says so again

    def _in_turn(self, step: Step, requests: Sequence[Request]) -> Iterator[int]:
        """The rows that need masks: of who owes least first, who was left out most often first."""
        rows: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for index, request in enumerate(requests):
            if request.compilation is not None and step.samples_B[index]:
                rows[request.generate.tenant_id].append((-request.num_deferrals, index))
        turns = sorted(
            (self._budget.debt_s(tenant_id), min(own)) for tenant_id, own in rows.items()
        )
        for _, (_, first) in turns:
            for _, index in sorted(rows[requests[first].generate.tenant_id]):
                yield index

    def _masks_of(self, request: Request, drafts: Sequence[int]) -> UInt32Array:
        assert request.compilation is not None
        with self._timed(request, 1 + len(drafts)):
            if request.matcher is None:
                request.matcher = request.compilation.matcher()
            return request.matcher.masks_for(drafts)

    @contextmanager
    def _timed(self, request: Request, num_masks: int) -> Iterator[None]:
        """Charge what a grammar takes; and if it was too much for it, let it be known.

        Raises:
            GrammarTooComplexError: it has taken more than a request may have.
        """
        first = request.siblings[0] if request.siblings else request
        self._check_excess(request, first)  # another choice may have spent it in this step
        started_s = self.clock()
        try:
            yield
        except GrammarTooComplexError as error:
            self._note_failure(request, error)
            raise
        finally:
            seconds = self.clock() - started_s
            self._budget.take(request.generate.tenant_id, seconds)
            self.meter.note_masks(num_masks, seconds)
            excess_s = first.grammar_excess_s + seconds - FREE_MASK_S * num_masks
            first.grammar_excess_s = max(0.0, excess_s)
        self._check_excess(request, first)

    def _check_excess(self, request: Request, first: Request) -> None:
        if first.grammar_excess_s > MAX_EXCESS_S:
            failure = GrammarTooComplexError("the grammar's steps take too much work")
            self._note_failure(request, failure)
            raise failure

    def _note_failure(self, request: Request, error: GrammarTooComplexError) -> None:
        assert request.compilation is not None
        request.compilation.note_failure(error)


def _ending(error: GrammarError) -> Ending:
    return Ending("error", error_code=error.code, error_message=str(error))
