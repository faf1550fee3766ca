"""The rows that a step samples: what each asks for, and for all of them at once which ask for nothing.

Nearly all rows of nearly all steps take the best id, or draw from logits that nothing edits. That much stands in
arrays, so that they are told apart without Python per row; a row's own object is made when somebody asks for it.

R positions that are sampled, V vocabulary ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from loraplex_engine.protocol import SamplingParams
from loraplex_engine.sampling.edits import RowRules
from loraplex_engine.sampling.noise import Int64Array
from loraplex_engine.step import BoolArray, UInt32Array


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One position to sample. A request with k drafts has k + 1 of them, each with its own history."""

    params: SamplingParams
    position: int  # output position of the token to be drawn (0: the first after the prompt)
    token_ids: Int64Array  # prompt and output before this position; may be a view
    num_prompt_tokens: int
    mask: UInt32Array | None = None  # bit v % 32 of word v // 32 allows id v; None: all
    rules: RowRules | None = None  # of `params`, where the caller keeps them; None: made here


def is_greedy(params: SamplingParams) -> bool:
    """Whether a request takes the best id: of one id nothing is drawn either."""
    return params.temperature <= 0 or params.top_k == 1


def is_plain(params: SamplingParams, rules: RowRules) -> bool:
    """Whether a request, while it has no mask, asks for its token alone, from logits that nothing edits."""
    return rules.is_neutral and params.logprobs is None and not params.forced_token_ids


class SampleBatch(Sequence[SampleRow]):
    """The rows of a step, in order.

    Args:
        position_R: int64, of each row.
        is_greedy_R: see `is_greedy`.
        is_plain_R: see `is_plain`; False where a row has a mask.
        row: makes the object of one row.
        serial_R: int64, one number per request, never given twice: where they are as they were, so are all
            parameters. None: not known.
    """

    __slots__ = ("_row", "is_easy_R", "is_greedy_R", "is_plain_R", "position_R", "serial_R")

    def __init__(
        self,
        *,
        position_R: Int64Array,
        is_greedy_R: BoolArray,
        is_plain_R: BoolArray,
        row: Callable[[int], SampleRow],
        serial_R: Int64Array | None = None,
    ) -> None:
        self.position_R = position_R
        self.is_greedy_R = is_greedy_R
        self.is_plain_R = is_plain_R
        self.serial_R = serial_R
        # Those that take the best of unedited logits, and that is all.
        self.is_easy_R: BoolArray = is_greedy_R & is_plain_R
        self._row = row

    @classmethod
    def of(cls, rows: Sequence[SampleRow]) -> SampleBatch:
        """A batch of rows that are there already; itself, where it is one."""
        if isinstance(rows, SampleBatch):
            return rows
        rules = [RowRules.of(row.params) if row.rules is None else row.rules for row in rows]
        return cls(
            position_R=np.array([row.position for row in rows], np.int64),
            is_greedy_R=np.array([is_greedy(row.params) for row in rows], np.bool_),
            is_plain_R=np.array(
                [
                    row.mask is None and is_plain(row.params, own)
                    for row, own in zip(rows, rules, strict=True)
                ],
                np.bool_,
            ),
            row=rows.__getitem__,
        )

    def only(self, index_S: Int64Array) -> SampleBatch:
        """The batch of some of these rows."""
        return SampleBatch(
            position_R=self.position_R[index_S],
            is_greedy_R=self.is_greedy_R[index_S],
            is_plain_R=self.is_plain_R[index_S],
            row=lambda index: self._row(int(index_S[index])),
            serial_R=None if self.serial_R is None else self.serial_R[index_S],
        )

    def __len__(self) -> int:
        return len(self.position_R)

    @overload
    def __getitem__(self, index: int) -> SampleRow: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[SampleRow]: ...

    def __getitem__(self, index: int | slice) -> SampleRow | Sequence[SampleRow]:
        if isinstance(index, slice):
            return [self._row(place) for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._row(index % len(self))
