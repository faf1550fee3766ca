"""Draws on a GPU, by our kernels: temperature, top-k, top-p, min-p and seed, in the same launches for all rows.

Rows that ask for more (penalties, biases, masks, log-probabilities) are the host's, see `device.is_plain`.
Which side draws does not change a row's token: both have the same noise, filters and ties.

R rows that sample, V vocabulary ids.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from loraplex_kernels.plans import PlanTable
from loraplex_kernels.sample import sample
from loraplex_kernels.sample_draw import NOT_FINITE
from loraplex_kernels.sample_rows import NUM_FIELDS, POSITION, pack_rows
from torch import Tensor

from loraplex_engine.device.staging import Staged, Staging
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.sampling.device import DeviceSampled, is_plain
from loraplex_engine.sampling.filters import temperature_of
from loraplex_engine.sampling.sampler import SampleRow
from loraplex_engine.step import BoolArray


class TritonSampler:
    """`DeviceSampler` on the kernels of `loraplex_kernels.sample`.

    The rows' records have two places in the staging, as `StagedInputs` has: steps without drafts fit in the
    small one, near the front.

    Args:
        max_rows: of the largest step without drafts.
    """

    def __init__(self, staging: Staging, plans: PlanTable, max_rows: int) -> None:
        self._staging = staging
        self._plans = plans
        self._small = staging.reserve("small sample_RF", (max_rows, NUM_FIELDS), np.int64)
        self._large: Staged | None = None
        self._rows_RF: Tensor | None = None  # of the rows last prepared
        self._asked: _Asked | None = None  # what the last step's records were made of
        self._taken_R: BoolArray = np.empty(0, np.bool_)
        self._is_filtered = False

    def reserve_large(self, max_tokens: int) -> None:
        """Make room for steps that sample so many positions, drafts counted; before `seal`."""
        if max_tokens > self._small.shape[0]:
            self._large = self._staging.reserve(
                "large sample_RF", (max_tokens, NUM_FIELDS), np.int64
            )

    def prepare(self, rows_R: Sequence[SampleRow]) -> BoolArray:
        """See `DeviceSampler.prepare`. Raises `ValueError`: more rows than there is room for."""
        num_rows = len(rows_R)
        place = self._small
        if num_rows > place.shape[0] and self._large is not None:
            place = self._large
        place.use(num_rows * NUM_FIELDS)
        records = place.host[:num_rows]
        asked = _Asked(place, [row.params for row in rows_R], [row.mask is None for row in rows_R])
        # Decoding repeats its rows: then only positions change, and most of the work falls away.
        if self._asked is None or not asked.is_same(self._asked):
            self._asked = asked
            self._taken_R = np.fromiter(map(is_plain, rows_R), np.bool_, num_rows)
            self._is_filtered = _pack(records, rows_R, self._taken_R)
        records[:, POSITION] = [row.position for row in rows_R]
        self._rows_RF = place.device[:num_rows]
        return self._taken_R

    def sample(self, logits_RV: Tensor) -> DeviceSampled:
        """See `DeviceSampler.sample`."""
        assert self._rows_RF is not None, "sample without prepare"
        drawn = sample(logits_RV, self._rows_RF, self._plans, is_filtered=self._is_filtered)
        return DeviceSampled(drawn.token_R, torch.ne(drawn.status_R, NOT_FINITE))


class _Asked(NamedTuple):
    """What decides a step's records, besides positions."""

    place: Staged
    params_R: list[SamplingParams]
    is_unmasked_R: list[bool]

    def is_same(self, other: _Asked) -> bool:
        """Whether these are the very same requests: parameters are compared by identity."""
        return (
            self.place is other.place
            and self.is_unmasked_R == other.is_unmasked_R
            and all(map(operator.is_, self.params_R, other.params_R))
        )


_Fields = tuple[float, int, float, float, int]
_GREEDY: _Fields = (0.0, 0, 1.0, 0.0, 0)


def _pack(records: npt.NDArray[np.int64], rows_R: Sequence[SampleRow], taken_R: BoolArray) -> bool:
    fields = [
        # Of a row that the host samples the cheapest that there is is computed, and not looked at.
        _fields(row.params) if is_taken else _GREEDY
        for row, is_taken in zip(rows_R, taken_R.tolist(), strict=True)
    ]
    temperature, top_k, top_p, min_p, seed = zip(*fields, strict=True)
    return pack_rows(
        records,
        temperature_R=temperature,
        top_k_R=top_k,
        top_p_R=top_p,
        min_p_R=min_p,
        seed_R=np.asarray(seed, np.uint64),
        position_R=0,
    )


def _fields(params: SamplingParams) -> _Fields:
    # Of one id nothing is drawn: the host takes the best too.
    if params.temperature <= 0 or params.top_k == 1:
        return _GREEDY
    temperature = temperature_of(params)
    return temperature, params.top_k, params.top_p, params.min_p, params.seed
