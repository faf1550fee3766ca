"""Python side of linear.c: weights laid out once in panels, then y = x W^T + b.

Arithmetic `fp32` is for rows of either dtype: chains of fp32 FMAs on panels.h. The others are for bf16 rows, whose
products a CPU makes in hardware, on blocks.h: `amx` in tiles, `avx512_bf16` in vectors. Contract of rounding and
order: the headers of linear.c and linear_bf16.h. Reference: an fp32 product with `QuantizedWeight.dequantized`, or
with the weight itself, whose bits every format gives in `fp32`.

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
Arithmetic = Literal["amx", "avx512_bf16", "fp32"]

_FORMATS: Final[dict[WeightFormat, int]] = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}
# linear.c's codes of the formats of blocks.h, and what marks products in tiles.
_BLOCKS: Final[dict[WeightFormat, int]] = {"bf16": 8, "int8": 9, "int4": 10}
_IN_TILES: Final = 16
# What of linear_hardware stands for each.
_HARDWARE: Final[dict[Arithmetic, int]] = {"amx": 2, "avx512_bf16": 1}
_POINTER, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
# Of an arena, and what a weight begins at a multiple of: a line of the cache.
_ARENA_BYTES: Final = 64 * 1024**2
_ALIGNMENT: Final = 64


def list_arithmetics(dtype: torch.dtype, cache_dir: Path) -> tuple[Arithmetic, ...]:
    """What this CPU has for rows of `dtype`, the fastest first.

    Raises:
        NativeBuildError: no compiler here, or it failed.
    """
    if dtype is not torch.bfloat16:
        return ("fp32",)
    found = load_library("linear", cache_dir).linear_hardware()
    return (*(name for name, bit in _HARDWARE.items() if found & bit), "fp32")


class LinearKernel:
    """The compiled product, and the memory of the weights packed for it."""

    def __init__(
        self, *, cache_dir: Path, num_threads: int, arithmetic: Arithmetic = "fp32"
    ) -> None:
        """Compile or load it.

        Args:
            arithmetic: one of `list_arithmetics`.

        Raises:
            NativeBuildError: no compiler here, or it failed.
            ValueError: this CPU has no such arithmetic.
        """
        found = list_arithmetics(torch.bfloat16, cache_dir)
        if arithmetic not in found:
            raise ValueError(f"this CPU has no {arithmetic}: use {' or '.join(found)}")
        self.arithmetic: Final = arithmetic
        # What the values of int4 are rounded to before they are multiplied.
        self.weight_dtype: Final = torch.float32 if arithmetic == "fp32" else torch.bfloat16
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

        Others in fp32 are multiplied in fp32, whatever the arithmetic.

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
        """Weights of eight or four bits, with their scales.

        Raises:
            ValueError: int4 whose values are rounded in another way than the kernel's.
        """
        if weight.offset_NG is not None and weight.dtype is not self.weight_dtype:
            raise ValueError(f"int4 is of {weight.dtype}, {self.arithmetic} of {self.weight_dtype}")
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
        is_blocks = self.arithmetic != "fp32" and weight_format in _BLOCKS
        code = _BLOCKS[weight_format] if is_blocks else _FORMATS[weight_format]
        if is_blocks and self.arithmetic == "amx":
            code |= _IN_TILES
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
        return PackedLinear(
            self, weight_format, code, panels, bias, num_inputs, num_outputs, is_blocks=is_blocks
        )

    def forward(self, x_MK: Tensor, linear: PackedLinear) -> Tensor:
        """y (M, N) in the dtype of x; for any M a row's bits depend on that row only.

        Args:
            x_MK: one of `linear.row_dtypes`, each row contiguous.

        Raises:
            ValueError: shape, dtype or layout differs from the above.
        """
        if (
            x_MK.ndim != 2
            or x_MK.shape[1] != linear.in_features
            or x_MK.dtype not in linear.row_dtypes
        ):
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in linear.row_dtypes)
            raise ValueError(
                f"x is {tuple(x_MK.shape)} {x_MK.dtype}: (M, {linear.in_features}) {names}"
            )
        if x_MK.stride(1) != 1 and linear.in_features > 1:
            raise ValueError(f"x has strides {x_MK.stride()}: its rows must be contiguous")
        is_bf16 = x_MK.dtype is torch.bfloat16
        num_rows, num_inputs = x_MK.shape
        y_MN = torch.empty((num_rows, linear.out_features), dtype=x_MK.dtype)
        num_wide = linear.wide_per_row(x_MK.dtype) * num_rows
        wide = torch.empty(num_wide) if num_wide else None
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
        code: int,
        panels: Tensor,
        bias_N: Tensor | None,
        in_features: int,
        out_features: int,
        *,
        is_blocks: bool,
    ) -> None:
        self.kernel: Final = kernel
        self.weight_format: Final = weight_format
        self.in_features: Final = in_features
        self.out_features: Final = out_features
        self.num_bytes: Final = panels.numel()
        self._kept = (panels, bias_N)
        # For linear_forward: who calls it from C keeps this object.
        self.format: Final = code
        self.panels_address: Final = panels.data_ptr()
        self.bias_address: Final = None if bias_N is None else bias_N.data_ptr()
        self.forward_address: Final = kernel.forward_address
        # Products in hardware.
        self.is_blocks: Final = is_blocks
        self.row_dtypes: Final = (torch.bfloat16,) if is_blocks else (torch.float32, torch.bfloat16)

    def wide_per_row(self, dtype: torch.dtype) -> int:
        """Floats that linear_forward needs to work in, for each row of `dtype`."""
        return self.in_features if dtype is torch.bfloat16 and not self.is_blocks else 0


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
