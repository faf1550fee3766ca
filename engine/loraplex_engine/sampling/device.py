"""Sampling where the logits are: the seam for samplers on a device, and what is left for the host.

Logits of a large vocabulary take longer to copy than to compute, so rows that a device sampler can do are
sampled there and only their tokens come back. The others (penalties, masks, log-probabilities, whatever the
device sampler does not know) are copied to the host, once, and sampled as on a CPU: what a row asks for never
decides whether it is served.

R rows that sample, V vocabulary ids, H of the rows that the host samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from loraplex_kernels.cpu.gumbel import GumbelSurvivors
from loraplex_kernels.cpu.scan import Best, RowScan
from torch import Tensor

from loraplex_engine.device.inputs import Inputs, Int64Array
from loraplex_engine.device.landing import Landing
from loraplex_engine.sampling.rows import SampleBatch, SampleRow
from loraplex_engine.sampling.sampler import Sampled, sample, take_best
from loraplex_engine.step import BoolArray


class DeviceSampled(NamedTuple):
    """Per row, on the device. What stands in rows that were not taken means nothing."""

    token_R: Tensor  # int32
    is_finite_R: (
        Tensor  # bool; False: the row's logits held NaN or Inf, and its token means nothing
    )


class DeviceSampler(Protocol):
    """Samples rows without the host. Used in two halves, as everything that a step sends up is.

    A row's token is the one that `sampler.sample` draws (the same seed, position and noise), but where two ids
    are as good as equal: sums on a device round differently.
    """

    def prepare(self, rows_R: Sequence[SampleRow]) -> BoolArray:
        """Say which rows `sample` will do, and stage their parameters; before the step's `flush`."""
        ...

    def sample(self, logits_RV: Tensor) -> DeviceSampled:
        """Launch sampling of the rows last prepared; the host waits for nothing.

        Args:
            logits_RV: model dtype, rows contiguous; not changed.
        """
        ...


class GreedySampler:
    """The best id of rows that ask for nothing else; of equal ones the lowest, as the host takes it."""

    def prepare(self, rows_R: Sequence[SampleRow]) -> BoolArray:
        """See `DeviceSampler.prepare`; stages nothing."""
        return SampleBatch.of(rows_R).is_easy_R

    def sample(self, logits_RV: Tensor) -> DeviceSampled:
        """See `DeviceSampler.sample`."""
        token_R = logits_RV.argmax(dim=1).to(torch.int32)
        return DeviceSampled(token_R, torch.isfinite(logits_RV).all(dim=1))


class StepSampler:
    """Logits of a step to tokens, on whichever side; the host waits once."""

    def __init__(
        self,
        inputs: Inputs,
        landing: Landing,
        *,
        on_device: DeviceSampler | None = None,
        survivors: GumbelSurvivors | None = None,
        scan: RowScan | None = None,
    ) -> None:
        """Take what helps.

        Args:
            on_device: None, and all rows are the host's.
            survivors: see `sampler.sample`.
            scan: finds best ids faster; the outcome is the same without.
        """
        self._inputs = inputs
        self._landing = landing
        self._on_device = on_device
        self._survivors = survivors
        self._scan = scan
        self._rows_R = SampleBatch.of(())
        self._host_H = np.empty(0, np.int64)  # which rows the host samples
        self._host_index_H: Tensor | None = None  # the same, on the device; None: all

    def prepare(self, rows_R: Sequence[SampleRow]) -> None:
        """Stage what sampling these rows takes; before the step's `flush`."""
        rows_R = self._rows_R = SampleBatch.of(rows_R)
        if self._on_device is None or not rows_R:
            self._host_H, self._host_index_H = np.arange(len(rows_R)), None
            return
        self._host_H = np.flatnonzero(~self._on_device.prepare(rows_R))
        self._host_index_H = (
            None
            if len(self._host_H) == len(rows_R)
            else self._inputs.put("host_row_H", self._host_H)
        )

    def finish(self, logits_RV: Tensor | None, is_finite_U: Tensor | None) -> StepSampled:
        """Sample the rows last prepared, and fetch `is_finite_U` on the way.

        Args:
            logits_RV: None where no row samples.
            is_finite_U: flags of the rows that do not; None where all do.
        """
        fetched: list[Tensor] = [] if is_finite_U is None else [is_finite_U]
        num_rows, num_host = len(self._rows_R), len(self._host_H)
        if logits_RV is not None and num_host < num_rows:
            assert self._on_device is not None
            assert self._host_index_H is not None
            fetched += self._on_device.sample(logits_RV)
            if num_host:
                fetched.append(logits_RV.index_select(0, self._host_index_H))
        elif logits_RV is not None:
            fetched.append(logits_RV)
        landed = self._landing.fetch(fetched)
        flags_U = None if is_finite_U is None else landed.pop(0).numpy()
        if logits_RV is None:
            return StepSampled(None, flags_U)
        if num_host == num_rows:
            return StepSampled(self._sample(landed[0], self._rows_R), flags_U)
        token_R, finite_R = landed[0].numpy(), landed[1].numpy()
        sampled = Sampled(
            np.where(finite_R, token_R, 0).astype(np.int32),
            finite_R.copy(),
            np.zeros(num_rows, np.bool_),
            {},
        )
        if num_host:
            of_host = self._sample(landed[2], self._rows_R.only(self._host_H))
            _merge(sampled, of_host, self._host_H)
        return StepSampled(sampled, flags_U)

    def _sample(self, logits_HV: Tensor, rows_H: SampleBatch) -> Sampled:
        if self._scan is None:
            return sample(logits_HV.float().numpy(), rows_H, self._survivors)
        best = self._scan(logits_HV)
        if logits_HV.dtype is torch.float32:
            return sample(logits_HV.numpy(), rows_H, self._survivors, best)
        sampled = take_best(best)
        asking = np.flatnonzero(~rows_H.is_easy_R)
        if asking.size:
            # Only these are worth a copy in fp32.
            wide = logits_HV[torch.from_numpy(asking)].float().numpy()
            of_asking = Best(best.id_R[asking], best.is_finite_R[asking])
            _merge(sampled, sample(wide, rows_H.only(asking), self._survivors, of_asking), asking)
        return sampled


def _merge(sampled: Sampled, part: Sampled, index_P: Int64Array) -> None:
    """Put the answers of some rows in their places."""
    sampled.token_ids_R[index_P] = part.token_ids_R
    sampled.is_finite_R[index_P] = part.is_finite_R
    sampled.is_stuck_R[index_P] = part.is_stuck_R
    for index, logprobs in part.logprobs.items():
        sampled.logprobs[int(index_P[index])] = logprobs


class StepSampled(NamedTuple):
    """What came out of a step."""

    sampled: Sampled | None  # None: no row sampled
    is_finite_U: BoolArray | None
