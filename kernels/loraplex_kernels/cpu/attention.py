"""Python side of attention.c: tasks laid out once per step, then one foreign call per layer.

Contract of rounding and order: the header of attention.c. Reference: torch's SDPA over the gathered
keys, within rounding.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraplex_kernels.cpu.build import load_library

QUERY_TILE: Final = 8
MAX_FOLD: Final = 16
MAX_HEAD_DIM: Final = 256

# attention_task in attention.c
TASK_DTYPE: Final = np.dtype(
    [
        ("first_row", np.int32),
        ("count", np.int32),
        ("position", np.int32),
        ("sequence", np.int32),
    ]
)


class _Shape(ctypes.Structure):
    """attention_shape in attention.c."""

    _fields_ = (
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class AttentionTasks:
    """One step's work; keeps alive what it points to."""

    tasks: npt.NDArray[Any]  # (num_tasks,) of TASK_DTYPE
    table_BM: npt.NDArray[np.int32]  # block ids, contiguous

    @classmethod
    def of(
        cls,
        num_computed_B: npt.NDArray[np.int32],
        num_scheduled_B: npt.NDArray[np.int32],
        table_BM: npt.NDArray[np.int32],
    ) -> AttentionTasks:
        """Cut B sequences' queries into tasks of at most `QUERY_TILE`.

        Sequence b's queries are rows sum(num_scheduled[:b]) .. of the step, at positions
        num_computed[b] .. num_computed[b] + num_scheduled[b] - 1.
        """
        tasks_B = -(-num_scheduled_B // QUERY_TILE)
        sequence = np.repeat(np.arange(len(num_scheduled_B), dtype=np.int32), tasks_B)
        within = np.arange(len(sequence)) - np.repeat(np.cumsum(tasks_B) - tasks_B, tasks_B)
        offset = within * QUERY_TILE
        start_B = np.cumsum(num_scheduled_B) - num_scheduled_B
        tasks = np.zeros(len(sequence), dtype=TASK_DTYPE)
        tasks["first_row"] = start_B[sequence] + offset
        tasks["count"] = np.minimum(QUERY_TILE, num_scheduled_B[sequence] - offset)
        tasks["position"] = num_computed_B[sequence] + offset
        tasks["sequence"] = sequence
        # The longest tasks first: with few threads the last one to finish decides.
        order = np.argsort(-(tasks["position"] + tasks["count"]) * tasks["count"], kind="stable")
        return cls(tasks[order], np.ascontiguousarray(table_BM, dtype=np.int32))


class NativeAttentionKernel:
    """The compiled kernel for one attention shape, with its threads' scratch."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        cache_dir: Path,
        num_threads: int,
    ) -> None:
        """Compile or load the kernel.

        Raises:
            ValueError: a shape or dtype the kernel does not have.
            NativeBuildError: no compiler here, or it failed.
        """
        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim {head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}")
        if num_heads % num_kv_heads or num_heads // num_kv_heads > MAX_FOLD:
            raise ValueError(f"{num_heads} heads on {num_kv_heads} kv heads: more than {MAX_FOLD}")
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype {dtype} is neither float32 nor bfloat16")
        library = load_library("attention", cache_dir)
        library.attention_scratch_bytes.restype = ctypes.c_size_t
        self._forward = library.attention_forward
        self._forward.restype = None
        self._forward.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_int32,
        )
        self._shape = _Shape(
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            int(dtype == torch.bfloat16),
            head_dim**-0.5,
        )
        self._num_threads = num_threads
        size = int(library.attention_scratch_bytes())
        self._scratch = np.empty(size * num_threads // 4 + 1, dtype=np.float32)

    def forward(self, q_TC: Tensor, out_TC: Tensor, kv: Tensor, work: AttentionTasks) -> None:
        """Attend every row that `work` names; other rows of `out_TC` are left as they are.

        Args:
            q_TC: (T, H * D) rotated queries, contiguous, the kernel's dtype.
            out_TC: (T, H * D), contiguous, the kernel's dtype.
            kv: (slots, 2, kv heads, D) of one layer, contiguous; the step's keys already stored.
        """
        self._forward(
            ctypes.byref(self._shape),
            work.tasks.ctypes.data,
            len(work.tasks),
            q_TC.data_ptr(),
            out_TC.data_ptr(),
            kv.data_ptr(),
            work.table_BM.ctypes.data,
            work.table_BM.shape[1],
            self._scratch.ctypes.data,
            self._num_threads,
        )
