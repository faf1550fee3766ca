"""A source of drafts that knows what each request will say on the fake runner, and lies at will."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from loraplex_engine.protocol import Generate
from loraplex_engine.speculative import Ask

from tests.support.engine_fakes import VOCAB_SIZE, next_token


@dataclass
class Oracle:
    """Knows the requests in the order of their arrival; every `lie_every`th draft is wrong."""

    requests: list[Generate] = field(default_factory=list)
    lie_every: int = 0  # 0: never
    num_told: int = 0
    forgotten: list[int] = field(default_factory=list)

    def propose(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        return [self._propose(ask) for ask in asks]

    def forget(self, key: int) -> None:
        self.forgotten.append(key)

    def _propose(self, ask: Ask) -> list[int]:
        request = self.requests[ask.key]
        known = list(ask.token_ids)
        for _ in range(ask.max_drafts):
            known.append(next_token(tuple(known), request.adapter_digest, request.sampling.seed))
        drafts = known[len(ask.token_ids) :]
        for place in range(len(drafts)):
            self.num_told += 1
            if self.lie_every and self.num_told % self.lie_every == 0:
                drafts[place] = (drafts[place] + 1) % VOCAB_SIZE
        return drafts


def choices_of(request: Generate) -> list[Generate]:
    """Each choice as a request of its own."""
    seed = request.sampling.seed
    return [
        msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, seed=seed + index, n=1)
        )
        for index in range(request.sampling.n)
    ]
