"""The best attention backend of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog
import torch
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.plans import PlanTable

from loraplex_engine.attention.base import AttentionBackend, AttentionShape
from loraplex_engine.attention.native_attention import NativeAttention
from loraplex_engine.attention.torch_attention import TorchAttention
from loraplex_engine.config import KvCacheDType
from loraplex_engine.device.staging import Staging

log = structlog.get_logger(__name__)

BackendName = Literal["auto", "native", "torch", "triton"]

# None: the model's own.
_KV_DTYPES: dict[KvCacheDType, torch.dtype | None] = {
    "auto": None,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class AttentionDevice:
    """What the Triton backend must know of the engine that it works in."""

    device: torch.device
    plans: PlanTable
    staging: Staging  # not yet sealed
    max_tokens: int  # rows of a step, padding counted
    max_rows: int  # sequences of a step
    max_blocks_per_row: int  # of the longest sequence


def open_attention(
    shape: AttentionShape,
    *,
    num_blocks: int,
    block_size: int,
    cache_dir: Path,
    num_threads: int,
    backend: BackendName = "auto",
    kv_cache_dtype: KvCacheDType = "auto",
    on_device: AttentionDevice | None = None,
) -> AttentionBackend[Any, Any]:
    """The backend for a model's shape.

    Args:
        cache_dir: for the compiled kernel.
        backend: auto takes the Triton kernels where `on_device` is a GPU, else the native kernel, and torch
            with one warning where that cannot be had.
        kv_cache_dtype: what keys and values are kept in; the CPU's backends have the model's dtype alone.
        on_device: needed for the Triton backend.

    Raises:
        NativeBuildError, ValueError: the kernel that was asked for cannot be had here.
        loraplex_kernels.support.UnsupportedDeviceError: the device has no numbers of that kind.
    """
    is_gpu = on_device is not None and on_device.device.type == "cuda"
    if is_gpu and backend not in ("auto", "triton"):
        raise ValueError(f"backend {backend} computes on the CPU: use triton on a GPU")
    if is_gpu or backend == "triton":
        if on_device is None:
            raise ValueError("backend triton needs a device: give on_device")
        # Not at the top: an engine on a CPU needs no Triton.
        from loraplex_engine.attention.triton_attention import TritonAttention

        return TritonAttention(
            shape,
            block_size=block_size,
            device=on_device.device,
            plans=on_device.plans,
            staging=on_device.staging,
            max_tokens=on_device.max_tokens,
            max_rows=on_device.max_rows,
            max_blocks_per_row=on_device.max_blocks_per_row,
            kv_dtype=_KV_DTYPES[kv_cache_dtype],
        )
    if kv_cache_dtype != "auto":
        raise ValueError(
            f"kv_cache_dtype {kv_cache_dtype}: the CPU's backends keep the model's dtype, use auto"
        )
    if backend != "torch":
        try:
            return NativeAttention(
                shape,
                block_size=block_size,
                cache_dir=cache_dir / "native",
                num_threads=num_threads,
            )
        except (NativeBuildError, ValueError) as error:
            if backend == "native":
                raise
            log.warning(
                "native_attention_unavailable", reason=str(error), fallback=TorchAttention.name
            )
    return TorchAttention(shape, num_blocks=num_blocks, block_size=block_size)
