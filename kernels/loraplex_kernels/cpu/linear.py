"""Python side of linear.c: weights laid out once in panels, then y = x W^T + b.

Contract of rounding and order: the header of linear.c; of the formats: panels.h. Reference: an fp32 product with
`QuantizedWeight.dequantized`, or with the weight itself, whose bits every format gives.

M rows, K inputs, N outputs.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from loraplex_kernels.cpu.build import address_of, load_library
from loraplex_kernels.cpu.quantize import QuantizedWeight

WeightFormat = Literal["fp32", "bf16", "int8", "int4"]

_FORMATS: Final[dict[WeightFormat, int]] = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}
_POINTER, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
# Of an arena, and what a weight begins at a multiple of: a line of the cache.
_ARENA_BYTES: Final = 64 * 1024**2
_ALIGNMENT: Final = 64


class LinearKernel:
    """The compiled product, and the memory of the weights packed for it."""

    def __init__(self, *, cache_dir: Path, num_threads: int) -> None:
        """Compile or load it.

        Raises:
            NativeBuildError: no compiler here, or it failed.
        """
        library = load_library("linear", cache_dir)
        self._forward = library.linear_forward
        self._forward.argtypes = (*(_POINTER,) * 5, *(_I64,) * 5, *(_I32,) * 3)
        self._pack = library.linear_pack
        self._pack.argtypes = (*(_POINTER,) * 4, _I64, _I64, _I32, _I32)
        self._forward.restype = self._pack.restype = None
        self._packed_bytes = library.linear_packed_bytes
        self._packed_bytes.argtypes = (_I64, _I64, _I32)
        self._packed_bytes.restype = _I64
        self.forward_address: Final = address_of(self._forward)
        self.num_threads: Final = num_threads
        self._arena = _Arena()

    def pack(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> PackedLinear:
        """Weights as they are, in fp32 or bf16; fp32 ones that bf16 holds to the bit, all of them, as bf16.

        Args:
            weight_NK, bias_N: float32 or bfloat16, on the CPU.

        Raises:
            ValueError: another dtype or shape.
        """
        if weight_NK.ndim != 2 or weight_NK.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"weight is {tuple(weight_NK.shape)} {weight_NK.dtype}: (N, K) float32 or bfloat16"
            )
        narrow = weight_NK if weight_NK.dtype is torch.bfloat16 else _as_bf16(weight_NK)
        values = (weight_NK if narrow is None else narrow).contiguous()
        return self._make("fp32" if narrow is None else "bf16", values, None, None, bias_N)

    def pack_quantized(self, weight: QuantizedWeight, bias_N: Tensor | None = None) -> PackedLinear:
        """Weights of eight or four bits, with their scales."""
        return self._make(
            "int8" if weight.offset_NG is None else "int4",
            weight.q_NK,
            weight.scale_NG,
            weight.offset_NG,
            bias_N,
        )

    def _make(
        self,
        weight_format: WeightFormat,
        values_NK: Tensor,
        scale_NG: Tensor | None,
        offset_NG: Tensor | None,
        bias_N: Tensor | None,
    ) -> PackedLinear:
        num_outputs, num_inputs = values_NK.shape
        if bias_N is not None and bias_N.shape != (num_outputs,):
            raise ValueError(f"bias is {tuple(bias_N.shape)}: it must be ({num_outputs},)")
        code = _FORMATS[weight_format]
        panels = self._arena.take(self._packed_bytes(num_inputs, num_outputs, code))
        self._pack(
            panels.data_ptr(),
            values_NK.data_ptr(),
            None if scale_NG is None else scale_NG.data_ptr(),
            None if offset_NG is None else offset_NG.data_ptr(),
            num_inputs,
            num_outputs,
            code,
            self.num_threads,
        )
        bias = None if bias_N is None else bias_N.float().contiguous()
        return PackedLinear(self, weight_format, panels, bias, num_inputs, num_outputs)

    def forward(self, x_MK: Tensor, linear: PackedLinear) -> Tensor:
        """y (M, N) in the dtype of x; for any M a row's bits depend on that row only.

        Args:
            x_MK: float32 or bfloat16, each row contiguous.

        Raises:
            ValueError: shape, dtype or layout differs from the above.
        """
        if (
            x_MK.ndim != 2
            or x_MK.shape[1] != linear.in_features
            or x_MK.dtype not in (torch.float32, torch.bfloat16)
        ):
            raise ValueError(
                f"x is {tuple(x_MK.shape)} {x_MK.dtype}: (M, {linear.in_features}) float32 or bfloat16"
            )
        if x_MK.stride(1) != 1 and linear.in_features > 1:
            raise ValueError(f"x has strides {x_MK.stride()}: its rows must be contiguous")
        is_bf16 = x_MK.dtype is torch.bfloat16
        num_rows, num_inputs = x_MK.shape
        y_MN = torch.empty((num_rows, linear.out_features), dtype=x_MK.dtype)
        wide = torch.empty(num_rows * num_inputs) if is_bf16 else None
        self._forward(
            linear.panels_address,
            linear.bias_address,
            x_MK.data_ptr(),
            y_MN.data_ptr(),
            None if wide is None else wide.data_ptr(),
            num_rows,
            num_inputs,
            linear.out_features,
            x_MK.stride(0),
            linear.out_features,
            linear.format,
            is_bf16,
            self.num_threads,
        )
        return y_MN


class PackedLinear:
    """One weight in panels, and its bias. Made by `LinearKernel.pack`."""

    def __init__(
        self,
        kernel: LinearKernel,
        weight_format: WeightFormat,
        panels: Tensor,
        bias_N: Tensor | None,
        in_features: int,
        out_features: int,
    ) -> None:
        self.kernel: Final = kernel
        self.weight_format: Final = weight_format
        self.in_features: Final = in_features
        self.out_features: Final = out_features
        self.num_bytes: Final = panels.numel()
        self._kept = (panels, bias_N)
        # For linear_forward: who calls it from C keeps this object.
        self.format: Final = _FORMATS[weight_format]
        self.panels_address: Final = panels.data_ptr()
        self.bias_address: Final = None if bias_N is None else bias_N.data_ptr()
        self.forward_address: Final = kernel.forward_address


class _Arena:
    """Zeroed memory for what lives as long as the model, in large pages where the kernel gives them.

    Weights are read from front to back, faster than addresses of small pages can be looked up: large pages made a
    row's product 10 to 15% faster.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """uint8, aligned to a cache line."""
        begin = self._used
        if begin + num_bytes > self._memory.numel():
            pages = mmap.mmap(-1, max(_ARENA_BYTES, num_bytes))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                pages.madvise(mmap.MADV_HUGEPAGE)
            # The tensor and its views keep the mapping.
            self._memory, begin = torch.frombuffer(pages, dtype=torch.uint8), 0
        self._used = begin + num_bytes + -num_bytes % _ALIGNMENT
        return self._memory[begin : begin + num_bytes]


def _as_bf16(weight_NK: Tensor) -> Tensor | None:
    """The same values in bfloat16; None where one of them needs more bits."""
    bits = weight_NK.contiguous().view(torch.int32)
    if bool((bits & 0xFFFF).any()):
        return None
    return weight_NK.to(torch.bfloat16)
