"""A step being put together: who computes how much, what rows and blocks that takes, and who ended.

Owns the lists; the scheduler decides what goes in. Pure data, no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from loraplex_engine.request import Ending, Request
from loraplex_engine.step import BlockUpdate, NewRow, Step


@dataclass(frozen=True, slots=True)
class Decision:
    """One call of `schedule`: the step, whose rows are `requests` in batch order; and who ended."""

    step: Step | None  # None: nothing to compute now
    requests: list[Request]
    ended: list[tuple[Request, Ending]]  # already removed from the scheduler


@dataclass(slots=True)
class Batch:
    """A step being put together."""

    budget: int
    requests: list[Request] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    block_updates: list[BlockUpdate] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    num_scheduled: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by batch index
    ended: list[tuple[Request, Ending]] = field(default_factory=list)
    # Running requests with more than a token to compute.
    partials: deque[Request] = field(default_factory=deque)
    num_partials: int = 0  # rows that will be amid a prefill after this step, as far as is known
    num_preempted: int = 0
    now_unix_s: float = 0.0
    most_lookup_work: int = 0  # where `KvManager.lookup_work` may be before the last look-up

    def append(self, request: Request, count: int) -> None:
        """Compute `count` more tokens of `request`."""
        self.budget -= count
        self.requests.append(request)
        self.rows.append(request.row)
        self.num_computed.append(request.num_computed_tokens)
        self.num_scheduled.append(count)
        request.num_computed_tokens += count
        self.samples.append(request.num_computed_tokens == request.num_tokens)

    def append_drafts(self, index: int, ids: tuple[int, ...]) -> None:
        """Compute `ids` behind the last known token of batch entry `index`, which samples."""
        self.budget -= len(ids)
        self.num_scheduled[index] += len(ids)
        self.drafts[index] = ids
        self.requests[index].num_computed_tokens += len(ids)

    def step(self, step_id: int, freed_rows: Sequence[int]) -> Step:
        """What the runner gets; somebody computes something."""
        assert self.requests
        return Step(
            step_id=step_id,
            freed_rows=tuple(freed_rows),
            new_rows=tuple(self.new_rows),
            block_updates=tuple(self.block_updates),
            block_copies=tuple(self.block_copies),
            rows_B=np.array(self.rows, dtype=np.int32),
            num_computed_B=np.array(self.num_computed, dtype=np.int32),
            num_scheduled_B=np.array(self.num_scheduled, dtype=np.int32),
            samples_B=np.array(self.samples, dtype=np.bool_),
            drafts=self.drafts,
        )
