"""Draws on a GPU, by our kernels: temperature, top-k, top-p, min-p and seed, in the same launches for all rows.

Rows that ask for more (penalties, biases, masks, log-probabilities) are the host's, see `rows.is_plain`.
Which side draws does not change a row's token: both have the same noise, filters and ties.

R rows that sample, V vocabulary ids.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from loraplex_engine.sampling.device import DeviceSampled
from loraplex_engine.sampling.filters import temperature_of
from loraplex_engine.sampling.rows import SampleBatch, SampleRow, is_greedy
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
        # What the last step's records were made of.
        self._place: Staged | None = None
        self._serial_R: npt.NDArray[np.int64] | None = None
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
        batch = SampleBatch.of(rows_R)
        num_rows = len(batch)
        place = self._small
        if num_rows > place.shape[0] and self._large is not None:
            place = self._large
        place.use(num_rows * NUM_FIELDS)
        records = place.host[:num_rows]
        # Decoding repeats its rows: then only positions change, and most of the work falls away.
        if not self._are_staged(batch, place):
            self._taken_R = batch.is_plain_R.copy()
            self._is_filtered = _pack(records, batch, self._taken_R)
            self._serial_R, self._place = batch.serial_R, place
        records[:, POSITION] = batch.position_R
        self._rows_RF = place.device[:num_rows]
        return self._taken_R

    def _are_staged(self, batch: SampleBatch, place: Staged) -> bool:
        """Whether the records of these very requests lie there from the last step."""
        return (
            self._place is place
            and batch.serial_R is not None
            and self._serial_R is not None
            and np.array_equal(batch.serial_R, self._serial_R)
            and np.array_equal(batch.is_plain_R, self._taken_R)
        )

    def sample(self, logits_RV: Tensor) -> DeviceSampled:
        """See `DeviceSampler.sample`."""
        assert self._rows_RF is not None, "sample without prepare"
        drawn = sample(logits_RV, self._rows_RF, self._plans, is_filtered=self._is_filtered)
        return DeviceSampled(drawn.token_R, torch.ne(drawn.status_R, NOT_FINITE))


_Fields = tuple[float, int, float, float, int]
_GREEDY: _Fields = (0.0, 0, 1.0, 0.0, 0)


def _pack(records: npt.NDArray[np.int64], rows_R: SampleBatch, taken_R: BoolArray) -> bool:
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
    if is_greedy(params):
        return _GREEDY
    temperature = temperature_of(params)
    return temperature, params.top_k, params.top_p, params.min_p, params.seed
