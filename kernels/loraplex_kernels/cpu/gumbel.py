"""Python side of gumbel.c: the few vocabulary ids that can win a draw, instead of noise for all in numpy."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loraplex_kernels.cpu.build import load_library
from loraplex_kernels.cpu.cut import LikelyCut

_CAPACITY = 4096  # each survivor all but sets a new record, and of those a row has a few dozen


class GumbelSurvivors:
    """The compiled filter, and the one of top-k and top-p that goes before it.

    Raises:
        NativeBuildError: they cannot be compiled here; draw without them.
    """

    def __init__(self, cache_dir: Path) -> None:
        self.cut = LikelyCut(cache_dir)
        self._call = load_library("gumbel", cache_dir).gumbel_survivors
        self._call.restype = ctypes.c_int64
        self._call.argtypes = (
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_double),
            *(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_double, ctypes.c_int64, ctypes.c_void_p),
        )
        self._ids = np.empty(_CAPACITY, np.int64)

    def __call__(
        self,
        scores_V: npt.NDArray[np.float32],
        *,
        highest: float,
        temperature: float,
        seed: int,
        position: int,
        floor: float,
    ) -> npt.NDArray[np.int64] | None:
        """Ids, ascending, among which is that of the highest (score - highest) / temperature + noise.

        Args:
            scores_V: contiguous; minus infinity for ids that cannot be drawn.
            floor: what some id is known to reach.

        Returns:
            None: there are too many to be worth it.

        Raises:
            ValueError: the scores are not contiguous float32.
        """
        if scores_V.dtype != np.float32 or not scores_V.flags.c_contiguous:
            raise ValueError("scores must be contiguous float32")
        count = self._call(
            scores_V.ctypes.data,
            scores_V.size,
            highest,
            temperature,
            seed,
            position,
            floor,
            _CAPACITY,
            self._ids.ctypes.data,
        )
        return None if count < 0 else self._ids[:count].copy()
