"""What a step brings back from the device, with one synchronisation.

The counterpart of `staging`: results are copied to pinned memory one after the other, and the host waits once,
for all of them. On a CPU there is nothing to copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64


class Landing:
    """Pinned memory that grows with the largest step so far. Used by the step thread alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self.syncs_total = 0  # times that the host has waited for the device

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors on the host, contiguous; valid until the next call."""
        if self._device.type == "cpu":
            return list(tensors)
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        pinned = self._room(sum(sizes))
        landed, begin = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            target = pinned[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor, non_blocking=True)
            landed.append(target)
            begin += size
        if self._arrived is None:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stub
        self._arrived.record()
        self._arrived.synchronize()
        self.syncs_total += 1
        return landed

    def _room(self, num_bytes: int) -> Tensor:
        if self._pinned is None or self._pinned.nbytes < num_bytes:
            # Twice as much as is needed now: pinning takes milliseconds, and is to happen rarely.
            self._pinned = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=True)
        return self._pinned
