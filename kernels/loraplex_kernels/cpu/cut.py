"""Python side of cut.c: the ids that top-k and top-p leave, without sorting a vocabulary in numpy."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loraplex_kernels.cpu.build import load_library

_CAPACITY = 8192  # with more of them left numpy is about as fast
_ITEM_BYTES = 8
_POINTER, _I64 = ctypes.c_void_p, ctypes.c_int64


class LikelyCut:
    """The compiled cut. V vocabulary ids."""

    def __init__(self, cache_dir: Path) -> None:
        """Compile or load it.

        Raises:
            NativeBuildError: it cannot be compiled here.
        """
        self._call = load_library("cut", cache_dir).cut_kept
        self._call.restype = _I64
        self._call.argtypes = (
            *(_POINTER, _I64, ctypes.c_float, ctypes.c_double, _I64, ctypes.c_double),
            *(_POINTER, _POINTER, _I64, _POINTER),
        )
        self._items = np.empty(2 * _CAPACITY * _ITEM_BYTES, np.uint8)
        self._ids = np.empty(_CAPACITY, np.int64)
        self._scaled = np.empty(0, np.float32)

    def __call__(
        self,
        scores_V: npt.NDArray[np.float32],
        *,
        highest: float,
        temperature: float,
        top_k: int,
        top_p: float,
    ) -> npt.NDArray[np.int64] | None:
        """What stays, most likely first, of equals the lowest id first.

        Args:
            scores_V: contiguous, at most 2^31; minus infinity for ids that cannot be drawn.
            highest: of them, finite.
            temperature: above 0.
            top_k: 0: any number; else below V.
            top_p: 1 or more: any.

        Returns:
            None: too many to be worth it, or too close to `top_p` to be sure of what the reference would say.

        Raises:
            ValueError: the scores are not contiguous float32.
        """
        if scores_V.dtype != np.float32 or not scores_V.flags.c_contiguous:
            raise ValueError("scores must be contiguous float32")
        if scores_V.size > self._scaled.size:
            self._scaled = np.empty(scores_V.size, np.float32)
        count = self._call(
            scores_V.ctypes.data,
            scores_V.size,
            highest,
            temperature,
            top_k,
            top_p,
            self._scaled.ctypes.data,
            self._items.ctypes.data,
            _CAPACITY,
            self._ids.ctypes.data,
        )
        return None if count < 0 else self._ids[:count].copy()
