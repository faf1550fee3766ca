"""Python side of ops.c: norms, residual additions, the gated activation, and rotation into the paged cache.

Contract of rounding and order: the header of ops.c. References: `TorchOps` of the engine and `rotate_`, whose
additions and rotations have the same bits; norms and activations are equal within rounding.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from loraplex_kernels.cpu.build import address_of, load_library

_POINTER, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class OpsKernel:
    """The compiled operations for one dtype. T rows of a step, H hidden size, I inner width."""

    def __init__(self, dtype: torch.dtype, *, cache_dir: Path, num_threads: int) -> None:
        """Compile or load them.

        Raises:
            ValueError: the dtype is neither float32 nor bfloat16.
            NativeBuildError: no compiler here, or it failed.
        """
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype {dtype} is neither float32 nor bfloat16")
        library = load_library("ops", cache_dir)
        self._norm = library.ops_rms_norm
        self._norm.argtypes = (*(_POINTER,) * 5, _I64, _I64, _F32, _I32, _I32)
        self._gated = library.ops_gated
        self._gated.argtypes = (_POINTER, _POINTER, _I64, _I64, _I32, _I32)
        self._rotate = library.ops_rotate_and_write
        self._rotate.argtypes = (*(_POINTER,) * 5, _I64, *(_I32,) * 5)
        for call in (self._norm, self._gated, self._rotate):
            call.restype = None
        # For layers.c.
        self.rms_norm_address, self.gated_address, self.rotate_and_write_address = map(
            address_of, (self._norm, self._gated, self._rotate)
        )
        self.dtype = dtype
        self.cache_dir = cache_dir
        self._is_bf16 = int(dtype is torch.bfloat16)
        self._num_threads = num_threads

    def rms_norm(
        self, x_TH: Tensor, weight_H: Tensor, eps: float, *, y_TH: Tensor | None = None
    ) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight: (T, H); with `y_TH`, of x += y, which is stored.

        Args:
            x_TH, y_TH, weight_H: the kernel's dtype, contiguous.

        Raises:
            ValueError: a shape, dtype or layout differs from the above.
        """
        self._check("x", x_TH, x_TH.shape)
        self._check("weight", weight_H, x_TH.shape[1:])
        if y_TH is not None:
            self._check("y", y_TH, x_TH.shape)
        out_TH = torch.empty_like(x_TH)
        num_rows, width = x_TH.shape
        self._norm(
            x_TH.data_ptr(),
            None,
            None if y_TH is None else y_TH.data_ptr(),
            weight_H.data_ptr(),
            out_TH.data_ptr(),
            num_rows,
            width,
            eps,
            self._is_bf16,
            self._num_threads,
        )
        return out_TH

    def rms_norm_of(self, x_TH: Tensor, row_R: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """`rms_norm` of some rows, gathered on the way: (R, H).

        Args:
            row_R: int64, contiguous, each below T; a row may come more than once.

        Raises:
            ValueError: a shape, dtype or layout differs from the above.
        """
        self._check("x", x_TH, x_TH.shape)
        self._check("weight", weight_H, x_TH.shape[1:])
        if row_R.dtype is not torch.int64 or not row_R.is_contiguous():
            raise ValueError(
                f"row is {row_R.dtype}, contiguous: {row_R.is_contiguous()}; both must be"
            )
        num_rows, width = row_R.numel(), x_TH.shape[1]
        out_RH = torch.empty((num_rows, width), dtype=self.dtype)
        self._norm(
            x_TH.data_ptr(),
            row_R.data_ptr(),
            None,
            weight_H.data_ptr(),
            out_RH.data_ptr(),
            num_rows,
            width,
            eps,
            self._is_bf16,
            self._num_threads,
        )
        return out_RH

    def gated(self, gate_up_TI: Tensor) -> Tensor:
        """silu(gate) * up of merged rows (T, 2 * I), gates first: (T, I).

        Raises:
            ValueError: dtype or layout is not the kernel's, or the width is odd.
        """
        self._check("gate_up", gate_up_TI, gate_up_TI.shape)
        num_rows, merged = gate_up_TI.shape
        if merged % 2:
            raise ValueError(f"gate_up has {merged} columns: gates and ups are equally many")
        out_TI = torch.empty((num_rows, merged // 2), dtype=self.dtype)
        self._gated(
            gate_up_TI.data_ptr(),
            out_TI.data_ptr(),
            num_rows,
            merged // 2,
            self._is_bf16,
            self._num_threads,
        )
        return out_TI

    def rotate_and_write(
        self,
        qkv_TC: Tensor,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        kv: Tensor,
        slot_T: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
    ) -> None:
        """Rotate the queries and keys of rows 0 .. len(slot) - 1 in place; copy their keys and values.

        Args:
            qkv_TC: (T, (num_heads + 2 * num_kv_heads) * D), all queries, all keys, all values.
            cos_T1D, sin_T1D: (T, 1, D), sin with the sign of the rotated half; D even.
            kv: (slots, 2 * num_kv_heads * D), one layer's cache.
            slot_T: int64, at most T, each below the number of slots, none twice.

        Raises:
            ValueError: a shape, dtype or layout differs from the above.
        """
        num_rows, head_dim = qkv_TC.shape[0], cos_T1D.shape[-1]
        kv_width = 2 * num_kv_heads * head_dim
        self._check("qkv", qkv_TC, (num_rows, num_heads * head_dim + kv_width))
        self._check("cos", cos_T1D, (num_rows, 1, head_dim))
        self._check("sin", sin_T1D, (num_rows, 1, head_dim))
        self._check("kv", kv, (kv.shape[0], kv_width))
        if (
            slot_T.dtype is not torch.int64
            or not slot_T.is_contiguous()
            or slot_T.numel() > num_rows
        ):
            raise ValueError(f"slot is {slot_T.shape} {slot_T.dtype}: int64, contiguous, one a row")
        self._rotate(
            qkv_TC.data_ptr(),
            cos_T1D.data_ptr(),
            sin_T1D.data_ptr(),
            kv.data_ptr(),
            slot_T.data_ptr(),
            slot_T.numel(),
            num_heads,
            num_kv_heads,
            head_dim,
            self._is_bf16,
            self._num_threads,
        )

    def _check(self, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
        if value.shape != shape or value.dtype is not self.dtype or not value.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(value.shape)} {value.dtype}, contiguous: {value.is_contiguous()};"
                f" it must be {tuple(shape)} {self.dtype} and contiguous"
            )
