"""One step of the engine, as data: what the scheduler decided and what the runner answered.

The scheduler never touches tensors and the runner never decides: a `Step` goes down and one
`StepResult` comes up. It is plain data (ints, tuples, numpy), so it can be sent to other ranks.

Vocabulary: a *row* is a persistent place in the runner's input batch (0 .. max_num_seqs - 1), held
by a request from the step in which it is admitted until it finishes or is preempted. The runner
keeps each row's token ids, block table and sampling state between steps, so a step says only what
changed. A row's known tokens are its prompt plus everything sampled so far; the runner appends the
token it samples to the row itself, which is what lets a later step be scheduled before this one's
tokens have been seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loraplex_engine.protocol import SamplingParams, TokenLogprobs
from loraplex_engine.request import BlockReason

Int32Array = npt.NDArray[np.int32]
UInt32Array = npt.NDArray[np.uint32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that takes a row in this step (admitted, or resumed after preemption)."""

    row: int
    token_ids: tuple[int, ...]  # prompt, then tokens sampled before a preemption
    num_prompt_tokens: int  # output position of a token = its index - num_prompt_tokens
    block_ids: tuple[int, ...]
    adapter_slot: int  # -1: base
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """Blocks appended to a row's table at `first_index`."""

    row: int
    first_index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What to compute. Arrays have one entry per scheduled row, B in all, in batch order.

    The runner first forgets `freed_rows`, then copies blocks, then applies `new_rows` and
    `block_updates`, then computes tokens [num_computed, num_computed + num_scheduled) of each row, and
    samples where `samples`.

    A row with drafts computes them as if they were its next known tokens (they are counted in
    num_scheduled) and samples at its last known token and at each draft. Drafts are accepted from the
    first on for as long as each equals what was sampled in its place; the row gets the sampled tokens
    up to and with the first that differs, or all of them.
    """

    step_id: int
    freed_rows: tuple[int, ...]
    new_rows: tuple[NewRow, ...]
    block_updates: tuple[BlockUpdate, ...]
    rows_B: Int32Array
    num_computed_B: Int32Array
    num_scheduled_B: Int32Array
    # True where this step reaches the row's last known token, unless it is to be computed once more
    samples_B: BoolArray
    block_copies: tuple[tuple[int, int], ...] = ()  # (from, to), whole blocks, all layers
    drafts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # batch index -> draft ids
    # batch index -> (1 + drafts, ceil(vocab / 32)) uint32: bit v % 32 of word v // 32 allows id v there.
    token_masks: Mapping[int, UInt32Array] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, over all rows."""
        return int(self.num_scheduled_B.sum())


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came out, in the batch order of the `Step`."""

    step_id: int
    tokens: Sequence[Sequence[int]]  # none where the row did not sample; several: accepted drafts
    # False: that row's logits held NaN or Inf, or, where it did not sample, its last token's hidden state
    # did; its tokens mean nothing. With drafts the row is then as it was before the step.
    is_finite_B: BoolArray
    # batch index -> one per token of that entry
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    # Batch indexes whose masks, filters and bans left no id to sample: those rows end with an error.
    stuck: Sequence[int] = ()


class Executor(Protocol):
    """Runs steps; one process today, several ranks later."""

    def launch(self, step: Step) -> None:
        """Start computing `step`; returns before or after it is done."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result."""
        ...


class AdapterPool(Protocol):
    """What the scheduler needs to know of adapters: may this request run now, and in which slot?

    All calls come from the step thread and return at once; loading happens elsewhere. A lease keeps
    an adapter in its slot; each successful `lease` is matched by exactly one `release`, with the same
    tenant. The pool shares slots, memory and loaders out among the tenants that ask; "" is nobody.
    """

    def prefetch(self, digest: str, tenant_id: str = "") -> None:
        """Start loading unless it is loaded or loading already."""
        ...

    def lease(self, digest: str, tenant_id: str = "") -> int | None:
        """The step slot, now leased once more; None: still loading, every slot is in use, or another
        tenant's turn.

        Asking is enough to have it loaded again if it was evicted meanwhile.

        Raises:
            AdapterUnavailableError: the store does not have it, or reading it failed.
            AdapterInvalidError: what the store has is not what the digest names, or does not fit.
        """
        ...

    def is_loaded(self, digest: str) -> bool:
        """Whether it is in host memory or a slot: whoever waits for it waits for a slot at most."""
        ...

    def why_refused(self, digest: str, tenant_id: str = "") -> BlockReason:
        """Why `lease` has just given this tenant None: ADAPTER_LOADING, ADAPTER_SLOT or ADAPTER_SHARE."""
        ...

    def release(self, digest: str, tenant_id: str = "") -> None:
        """Give one lease back."""
        ...

    @property
    def num_leases(self) -> int:
        """Leases not given back, by the pool's own count."""
        ...
