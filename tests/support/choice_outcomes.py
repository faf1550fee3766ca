"""What a request's events said, choice by choice (n > 1), and what each choice says alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from loraplex_engine.protocol import FinishReason, Generate, TokenEvent, TokenLogprobs, Usage

from tests.support.engine_fakes import solo_output


@dataclass
class Choices:
    """One request, ended."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    terminal: TokenEvent | None = None

    @property
    def usage(self) -> Usage:
        assert self.terminal is not None, "it never ended"
        assert self.terminal.usage is not None
        return self.terminal.usage


def collect_choices(events: list[TokenEvent]) -> dict[str, Choices]:
    """Events by request; asserts that nobody speaks after an end, and that usage comes once, last."""
    collected: dict[str, Choices] = {}
    for event in events:
        choices = collected.setdefault(event.request_id, Choices())
        assert choices.terminal is None, f"{event.request_id} spoke after its end"
        assert event.index not in choices.reasons or event.usage is not None
        choices.tokens.setdefault(event.index, []).extend(event.token_ids)
        choices.logprobs.setdefault(event.index, []).extend(event.logprobs or [])
        if event.finish_reason is not None:
            choices.reasons.setdefault(event.index, event.finish_reason)
        if event.usage is not None:
            assert event.finish_reason is not None
            choices.terminal = event
    return collected


def solo_choices(generate: Generate) -> list[tuple[list[int], str]]:
    """Per choice, what a request of n = 1 with its seed says on the fake runner."""
    return [solo_output(single(generate, index)) for index in range(generate.sampling.n)]


def single(generate: Generate, index: int, request_id: str | None = None) -> Generate:
    """The request of n = 1 that choice `index` stands for."""
    seed = (generate.sampling.seed + index) % 2**64
    return msgspec.structs.replace(
        generate,
        request_id=request_id or generate.request_id,
        sampling=msgspec.structs.replace(generate.sampling, seed=seed, n=1),
    )
