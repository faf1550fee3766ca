"""The index arrays of a step (tokens, positions, which rows are sampled) as tensors on its device.

On a CPU they are the numpy arrays themselves. Elsewhere, and for kernels that a graph records, they go through
the staging: one copy, fixed addresses.

T tokens, R sampled positions, U rows that do not sample, H rows that the host samples.
"""

from __future__ import annotations

from typing import Final, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraplex_engine.device.staging import Staged, Staging

InputName = Literal["token_T", "position_T", "token_R", "token_U", "host_row_H"]
Int64Array = npt.NDArray[np.int64]


class Inputs(Protocol):
    """Takes int64 arrays; each name at most once a step."""

    def put(self, name: InputName, values: Int64Array) -> Tensor:
        """The tensor that holds `values` once `flush` has been called; int64, as long as they are."""
        ...

    def wait(self) -> None:
        """Call before a step's first `put`."""
        ...

    def flush(self) -> None:
        """Call once all is put, by everybody, and before anything is computed."""
        ...


class HostInputs:
    """Arrays of a CPU, used in place."""

    def put(self, name: InputName, values: Int64Array) -> Tensor:
        """See `Inputs.put`; `values` is not to change before the step is over."""
        return torch.from_numpy(values)

    def wait(self) -> None:
        """Nothing is under way."""

    def flush(self) -> None:
        """Nothing is to be copied."""


class StagedInputs:
    """Arrays that go to the device with whatever else has been staged.

    Each has two places: a small one at the front, where decoding steps fit, so that they copy no more than they
    use; and a large one at the very end, for which `reserve_large` is called when all others have reserved.

    Args:
        max_rows: of the largest decoding step, padding counted.
    """

    def __init__(self, staging: Staging, max_rows: int) -> None:
        self._staging: Final = staging
        self._max_rows: Final = max_rows
        self._small = self._reserve("small", max_rows)
        self._large: dict[InputName, Staged] = {}

    def reserve_large(self, max_tokens: int) -> None:
        """Make room for steps of so many rows, padding counted; the last reservation before `seal`."""
        if max_tokens > self._max_rows:
            self._large = self._reserve("large", max_tokens)

    def put(self, name: InputName, values: Int64Array) -> Tensor:
        """See `Inputs.put`. Raises `ValueError`: more values than the largest step has."""
        is_large = values.size > self._max_rows and bool(self._large)
        staged = (self._large if is_large else self._small)[name]
        staged.put(values)
        return staged.device[: values.size]

    def wait(self) -> None:
        """See `Inputs.wait`."""
        self._staging.wait()

    def flush(self) -> None:
        """See `Inputs.flush`."""
        self._staging.flush()

    def _reserve(self, place: str, size: int) -> dict[InputName, Staged]:
        return {
            name: self._staging.reserve(f"{place} {name}", (size,), np.int64)
            for name in get_args(InputName)
        }
