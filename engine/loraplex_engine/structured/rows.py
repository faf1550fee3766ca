"""Requests under a grammar, from their arrival to their end: what the core does for them at each turn.

| when | what |
|---|---|
| a request arrives | its grammar is compiled; until then the scheduler passes it over |
| that failed | it ends with the grammar's error, before any work |
| its row is about to sample | its own matcher says what may come: the step's masks |
| no mask can be had | the step goes on for all others, and it ends with an error once that is done |
| a token was sampled | its matcher takes it; a complete text stops, a refusal is an error |

Every choice of a request has its own matcher, made when it first samples. Pure Python; the step thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loraplex_engine.request import Ending, Request, RequestStatus
from loraplex_engine.step import Step, UInt32Array
from loraplex_engine.structured.compiler import GrammarSource
from loraplex_engine.structured.errors import GrammarError


class GrammarRows:
    """One engine's requests under grammars."""

    def __init__(self, source: GrammarSource) -> None:
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

        A row without a mask that should have one gets a `failure`: its token means nothing.
        """
        masks: dict[int, UInt32Array] = {}
        for index, request in enumerate(requests):
            if request.compilation is None or not step.samples_B[index]:
                continue
            try:
                if request.matcher is None:
                    request.matcher = request.compilation.matcher()
                masks[index] = request.matcher.masks_for(step.drafts.get(index, ()))
            except GrammarError as error:
                request.failure = _ending(error)
        return replace(step, token_masks=masks) if masks else step

    def advance(self, request: Request, token_id: int) -> Ending | None:
        """A token was sampled; an ending if the grammar says so."""
        if request.matcher is None:
            return None
        try:
            request.matcher.advance(token_id)
        except GrammarError as error:
            return _ending(error)
        return Ending("stop") if request.matcher.is_complete else None


def constrain_drafts(request: Request, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Drafts up to the first that a request's grammar does not allow."""
    if request.matcher is None:
        return () if request.compilation is not None else ids
    try:
        return ids[: request.matcher.validate_drafts(ids)]
    except GrammarError:
        return ()  # its next mask says so again


def _ending(error: GrammarError) -> Ending:
    return Ending("error", error_code=error.code, error_message=str(error))
