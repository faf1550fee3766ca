"""Python side of scan.c: each row's best id, and whether the row is finite. Reference: numpy's argmax."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraplex_kernels.cpu.build import load_library


class Best(NamedTuple):
    """One entry per row of logits; the next call overwrites both."""

    id_R: npt.NDArray[
        np.int64
    ]  # the first of the highest; means nothing where the row is not finite
    is_finite_R: npt.NDArray[np.bool_]


class RowScan:
    """The compiled scan. R rows, V vocabulary ids."""

    def __init__(self, cache_dir: Path, *, num_threads: int) -> None:
        """Compile or load it.

        Raises:
            NativeBuildError: it cannot be compiled here.
        """
        self._call = load_library("scan", cache_dir).scan_rows
        self._call.restype = None
        self._call.argtypes = (
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32),
        )
        self._num_threads = num_threads
        self._grow(64)

    def __call__(self, logits_RV: Tensor) -> Best:
        """Look at every row.

        Args:
            logits_RV: fp32 or bf16 on the CPU, each row contiguous, V at least 1.

        Raises:
            ValueError: a dtype or layout differs from the above.
        """
        num_rows, width = logits_RV.shape
        dtype = logits_RV.dtype
        if not (dtype is torch.float32 or dtype is torch.bfloat16):
            raise ValueError(f"logits are {dtype}: they must be float32 or bfloat16")
        if width < 1 or logits_RV.stride(1) != 1 or logits_RV.device.type != "cpu":
            raise ValueError(
                f"logits are {tuple(logits_RV.shape)}, strides {logits_RV.stride()}, on"
                f" {logits_RV.device}: rows must be contiguous, on the CPU"
            )
        if num_rows > len(self._id):
            self._grow(num_rows)
        self._call(
            logits_RV.data_ptr(),
            num_rows,
            width,
            logits_RV.stride(0),
            dtype is torch.bfloat16,
            self._id_address,
            self._finite_address,
            self._num_threads,
        )
        return Best(self._id[:num_rows], self._is_finite[:num_rows])

    def _grow(self, num_rows: int) -> None:
        # Both or none: what cannot be allocated leaves the smaller ones in use.
        self._id, self._is_finite = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.bool_)
        self._id_address, self._finite_address = self._id.ctypes.data, self._is_finite.ctypes.data
