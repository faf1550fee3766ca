"""Everything a step tells the device, in one host-to-device copy.

Whoever has metadata for the device reserves room once, at start; `seal` makes one pinned host buffer and one
device buffer of all reservations. In a step each writes numpy into its `host` views and says with `use` how
much of them counts; `flush` copies from the first byte in use to the last, at once. So a step costs one copy
whatever it is made of, and every device address is fixed for the engine's life: kernel launches that a CUDA graph
recorded read the next step's values.

What lies between is copied too: the device then has what the host has there, and a reservation that is not
written in a step keeps its values. Only a gap that would take longer to copy than a copy takes to start is left
out. Reserve what is small and always used first, what is large and rarely full last.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# The widest vector load, and what Triton's pointer specialisation asks for.
ALIGNMENT: Final = 16
# Starting a copy takes some microseconds, in which a PCIe link moves about so much.
MAX_GAP_BYTES: Final = 128 * 1024

_TORCH_DTYPES: Final[dict[np.dtype[Any], torch.dtype]] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.bool_): torch.bool,
}


class Staged:
    """One reservation: the same array on the host, to write, and on the device, to read.

    `host` and `device` are there once the staging is sealed.
    """

    host: npt.NDArray[Any]  # view of the pinned buffer; a write counts from the next `flush` on
    device: Tensor  # view of the device buffer; its address never changes

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], begin_byte: int
    ) -> None:
        self.name: Final = name
        self.shape: Final = shape
        self.dtype: Final = dtype
        self.begin_byte: Final = begin_byte
        self.size: Final = math.prod(shape)
        self.used_bytes = 0  # since the last `flush`

    def use(self, count: int) -> None:
        """Have the next `flush` carry the first `count` entries, counted in the flattened array.

        Raises:
            ValueError: there are not so many.
        """
        if not 0 <= count <= self.size:
            raise ValueError(f"{self.name}: {count} entries in use, of {self.size} reserved")
        self.used_bytes = count * self.dtype.itemsize

    def put(self, values: npt.NDArray[Any]) -> None:
        """Write `values` to the beginning of the flattened array and use exactly these.

        Raises:
            ValueError: more values than reserved.
        """
        self.use(values.size)
        self.host.reshape(-1)[: values.size] = values.reshape(-1)


class Staging:
    """The reservations of one engine; see the module. Used by the step thread alone."""

    def __init__(self, device: torch.device) -> None:
        self.device: Final = device
        self._staged: list[Staged] = []
        self._size_bytes = 0
        self._host: Tensor | None = None
        self._device_buffer: Tensor | None = None
        self._copied: torch.cuda.Event | None = None  # of the last copy, on a GPU

    @property
    def size_bytes(self) -> int:
        """Of all reservations: on the device, and as much pinned host memory."""
        return self._size_bytes

    def reserve(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Staged:
        """Room for an array of `shape`, 16-byte aligned, zeros at first; only before `seal`.

        Raises:
            ValueError: the name is taken, a size is below 1, or the device has no such dtype.
        """
        assert self._host is None, f"{name} is reserved after the buffers were made"
        numpy_dtype = np.dtype(dtype)
        if any(staged.name == name for staged in self._staged):
            raise ValueError(f"{name}: reserved twice")
        if not shape or min(shape) < 1:
            raise ValueError(f"{name}: shape is {shape}; every size must be 1 or more")
        if numpy_dtype not in _TORCH_DTYPES:
            choices = ", ".join(str(known) for known in _TORCH_DTYPES)
            raise ValueError(f"{name}: dtype is {numpy_dtype}; use one of {choices}")
        staged = Staged(name, shape, numpy_dtype, self._size_bytes)
        num_bytes = staged.size * numpy_dtype.itemsize
        self._size_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._staged.append(staged)
        return staged

    def seal(self) -> None:
        """Make the buffers; `host` and `device` of every reservation are there from now on."""
        assert self._host is None, "sealed twice"
        is_cuda = self.device.type == "cuda"
        self._host = torch.zeros(self._size_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        # A buffer of its own on a CPU too: there, as on a GPU, nothing arrives before `flush`.
        self._device_buffer = torch.zeros(self._size_bytes, dtype=torch.uint8, device=self.device)
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]  # torch's stub
        for staged in self._staged:
            span = slice(staged.begin_byte, staged.begin_byte + staged.size * staged.dtype.itemsize)
            staged.host = self._host.numpy()[span].view(staged.dtype).reshape(staged.shape)
            staged.device = (
                self._device_buffer[span].view(_TORCH_DTYPES[staged.dtype]).view(staged.shape)
            )

    def wait(self) -> None:
        """Return once the last copy has read the host buffer: before that, writing would change it.

        Call it before a step's first write. A step that has handed out its results has waited already.
        """
        if self._copied is not None:
            self._copied.synchronize()

    def flush(self) -> int:
        """Copy what is in use, in one go, on the current stream; returns the bytes copied.

        Nothing is copied where nothing is in use. Everything counts as unused afterwards.
        """
        assert self._host is not None, "flushed before seal"
        assert self._device_buffer is not None
        num_bytes = 0
        for begin, stop in self._spans():
            self._device_buffer[begin:stop].copy_(self._host[begin:stop], non_blocking=True)
            num_bytes += stop - begin
        if num_bytes and self._copied is not None:
            self._copied.record()
        return num_bytes

    def _spans(self) -> list[tuple[int, int]]:
        """What is in use, as few ranges of bytes; all of it counts as unused from now on."""
        spans: list[tuple[int, int]] = []
        for staged in self._staged:  # in order of their bytes
            if not staged.used_bytes:
                continue
            begin, stop = staged.begin_byte, staged.begin_byte + staged.used_bytes
            staged.used_bytes = 0
            if spans and begin - spans[-1][1] <= MAX_GAP_BYTES:
                begin, _ = spans.pop()
            spans.append((begin, stop))
        return spans
