"""The best attention backend of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import structlog
from loraplex_kernels.cpu.build import NativeBuildError

from loraplex_engine.attention.base import AttentionBackend, AttentionShape
from loraplex_engine.attention.native_attention import NativeAttention
from loraplex_engine.attention.torch_attention import TorchAttention

log = structlog.get_logger(__name__)

BackendName = Literal["auto", "native", "torch"]


def open_attention(
    shape: AttentionShape,
    *,
    num_blocks: int,
    block_size: int,
    cache_dir: Path,
    num_threads: int,
    backend: BackendName = "auto",
) -> AttentionBackend[Any, Any]:
    """The backend for a model's shape.

    Args:
        cache_dir: for the compiled kernel.
        backend: auto takes the native kernel, and torch with one warning where that cannot be had.

    Raises:
        NativeBuildError, ValueError: the native kernel was asked for and cannot be had here.
    """
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
