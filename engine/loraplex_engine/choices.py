"""One `Generate` as several choices over one prompt: made together, ended apart, accounted as one.

Each choice is a `Request` of its own to the scheduler, with its own row, table, lease and seed; it takes
the prompt from whichever of the others has computed it (`kv.manager`). What the group adds is the answer:
which choices are unfinished, and one usage in which the prompt counts once.
"""

from __future__ import annotations

import msgspec

from loraplex_engine.protocol import Generate, Usage
from loraplex_engine.request import Identity, Request

_SEED_MASK = 2**64 - 1


class ChoiceGroup:
    """The choices of one request; for n = 1, one."""

    def __init__(self, generate: Generate, choices: list[Request]) -> None:
        self.generate = generate
        self.choices = choices
        self.live = list(choices)  # unfinished, in order
        self.num_prefilled_tokens = 0  # prompt tokens that some choice has computed or found

    @property
    def identity(self) -> Identity:
        return (self.generate.request_id, self.generate.attempt)

    def find(self, index: int) -> Request | None:
        """The unfinished choice of that index."""
        return next((choice for choice in self.live if choice.choice == index), None)

    def usage(self) -> Usage:
        """What it cost so far: a prompt that was never or partly computed counts as far as it was."""
        cached = max(choice.num_cached_tokens for choice in self.choices)
        return Usage(
            prompt_tokens=self.num_prefilled_tokens,
            completion_tokens=sum(choice.num_output_tokens for choice in self.choices),
            cached_tokens=min(cached, self.num_prefilled_tokens),
        )


def make_choices(
    generate: Generate, *, first_seq: int, stop_ids: frozenset[int], arrived_at_unix_s: float = 0.0
) -> ChoiceGroup:
    """The requests of `generate`, numbered from `first_seq`. Choice i draws with seed + i."""
    choices: list[Request] = []
    for index in range(generate.sampling.n):
        own = generate
        if index:
            seed = (generate.sampling.seed + index) & _SEED_MASK
            sampling = msgspec.structs.replace(generate.sampling, seed=seed)
            own = msgspec.structs.replace(generate, sampling=sampling)
        choices.append(
            Request(
                seq=first_seq + index,
                generate=own,
                stop_ids=stop_ids,
                arrived_at_unix_s=arrived_at_unix_s,
                choice=index,
                siblings=choices,
            )
        )
    return ChoiceGroup(generate, choices)
