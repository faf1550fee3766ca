"""Weights of eight and four bits: how they are chosen from a checkpoint's, and what they stand for.

int8: one scale for each output, symmetric: w = q * scale, q in -127 .. 127.
int4: a scale and an offset for each group of 32 inputs of an output: w = q * scale + offset, q in 0 .. 15, both in
bfloat16: five bits a weight; for products in bf16 w is rounded to it. Offsets are worth their half a bit: of normally distributed weights (ranges shrunk as
quantize.c does) the relative error is 7.4%, without offsets 8.3%, with offsets for groups of 64 8.4%; of weights
with heavier tails (Student's t, 5 degrees) it is 8.5%, 10.5% and 10.3%.

N outputs, K inputs, G groups.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from loraplex_kernels.cpu.build import load_library

INT4_GROUP: Final = 32

_POINTER, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight, and what it lost."""

    q_NK: Tensor  # int8; int4: uint8 below 16
    scale_NG: Tensor  # fp32; int8: G = 1
    offset_NG: Tensor | None  # fp32; None: int8
    relative_error: float  # |dequantized - weight| / |weight|, Frobenius
    dtype: torch.dtype = torch.float32  # what int4 is rounded to before it is multiplied

    def dequantized(self) -> Tensor:
        """(N, K) fp32, each the exact value rounded as the kernel takes it.

        int8 in products in bf16: q is taken as it is, and the sum multiplied by the scale.
        """
        if self.offset_NG is None:
            return self.q_NK.float() * self.scale_NG
        num_inputs = self.q_NK.shape[1]
        scale_NK, offset_NK = (
            part.double().repeat_interleave(INT4_GROUP, dim=1)[:, :num_inputs]
            for part in (self.scale_NG, self.offset_NG)
        )
        # Exact in fp64 but for sums whose parts lie more than 2^40 apart.
        return (self.q_NK.double() * scale_NK + offset_NK).float().to(self.dtype).float()


class Quantizer:
    """The compiled search for levels and scales."""

    def __init__(
        self, *, cache_dir: Path, num_threads: int, dtype: torch.dtype = torch.float32
    ) -> None:
        """Compile or load it.

        Args:
            dtype: see `QuantizedWeight.dtype`; `LinearKernel.weight_dtype`.

        Raises:
            NativeBuildError: no compiler here, or it failed.
        """
        library = load_library("quantize", cache_dir)
        self._int8, self._int4 = library.quantize_int8, library.quantize_int4
        self._int8.argtypes = (*(_POINTER,) * 5, _I64, _I64, _I32)
        self._int4.argtypes = (*(_POINTER,) * 6, _I64, _I64, _I32, _I32)
        self._int8.restype = self._int4.restype = None
        self._num_threads = num_threads
        self._dtype = dtype

    def int8(self, weight_NK: Tensor) -> QuantizedWeight:
        """Eight bits an input, one scale an output.

        Args:
            weight_NK: any floating dtype, K at least 1.

        Raises:
            ValueError: a weight is not finite.
        """
        return self._run(weight_NK, bits=8)

    def int4(self, weight_NK: Tensor) -> QuantizedWeight:
        """Four bits an input, scale and offset for each `INT4_GROUP` inputs; else as `int8`."""
        return self._run(weight_NK, bits=4)

    def _run(self, weight_NK: Tensor, *, bits: int) -> QuantizedWeight:
        weight = weight_NK.float().contiguous()
        num_outputs, num_inputs = weight.shape
        num_groups = 1 if bits == 8 else -(-num_inputs // INT4_GROUP)
        q = torch.empty(weight.shape, dtype=torch.int8 if bits == 8 else torch.uint8)
        scale = torch.empty(num_outputs, num_groups)
        offset = None if bits == 8 else torch.empty_like(scale)
        lost_2N = torch.empty(2, num_outputs, dtype=torch.float64)
        results = [q, scale, *([] if offset is None else [offset]), *lost_2N]
        addresses = [part.data_ptr() for part in (weight, *results)]
        if bits == 8:
            self._int8(*addresses, num_outputs, num_inputs, self._num_threads)
        else:
            is_bf16 = self._dtype is torch.bfloat16
            self._int4(*addresses, num_outputs, num_inputs, is_bf16, self._num_threads)
        lost, energy = lost_2N.sum(1).tolist()
        if not energy < float("inf"):
            raise ValueError("a weight is not finite")
        error = (lost / energy) ** 0.5 if energy else 0.0
        return QuantizedWeight(q, scale, offset, error, self._dtype)
