"""Put the LoRA side of an engine together: store, pool and the best backend of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.lora import LoraKernel

from loraplex_engine.artifact import AdapterLimits, AdapterStore, ModelShape
from loraplex_engine.lora.backend import NativeLora, SlotWeights, TorchLora
from loraplex_engine.lora.pool import MAX_DISK_BYTES, MAX_HOST_BYTES, LoraPool
from loraplex_engine.lora.seam import LoraBackend
from loraplex_engine.lora.weights import AdapterTensors, pack_native, pack_torch

log = structlog.get_logger(__name__)

BackendName = Literal["auto", "native", "torch"]


@dataclass(frozen=True, slots=True)
class Lora:
    """The pool for the scheduler and the backend for the model; `name` says which backend it is."""

    pool: LoraPool[Any]
    backend: LoraBackend
    name: str
    pack: Callable[[AdapterTensors, ModelShape], Any]
    open_backend: Callable[[SlotWeights[Any]], LoraBackend]  # another one, over other slots


def open_lora(
    *,
    store_url: str,
    shape: ModelShape,
    cache_dir: Path,
    max_loras: int = 16,
    max_cpu_loras: int = 64,
    max_cpu_lora_bytes: int = MAX_HOST_BYTES,
    max_disk_bytes: int = MAX_DISK_BYTES,
    idle_s: float | None = None,
    max_lora_rank: int = 64,
    backend: BackendName = "auto",
) -> Lora:
    """Open the store and make an empty pool.

    Args:
        cache_dir: for compiled kernels and for adapters of a remote store.
        max_cpu_lora_bytes, max_disk_bytes, idle_s: see `LoraPool`.
        backend: auto takes the native kernel, and torch with one warning where it does not compile.

    Raises:
        NativeBuildError: the native kernel was asked for and does not compile here.
        ValueError: the URL or a size is wrong.
    """
    kernel = (
        None if backend == "torch" else _load_kernel(cache_dir, is_required=backend == "native")
    )

    def open_backend(slots: SlotWeights[Any]) -> LoraBackend:
        return TorchLora(slots, shape) if kernel is None else NativeLora(slots, shape, kernel)

    pack: Callable[[AdapterTensors, ModelShape], Any]
    pack, name = (pack_torch, TorchLora.name) if kernel is None else (pack_native, NativeLora.name)
    store = AdapterStore(store_url)
    pool = LoraPool(
        store=store,
        shape=shape,
        # A store holds what passed at upload, under its digest; whatever is finite is served, and
        # an adapter that overflows harms nobody but its own rows.
        limits=AdapterLimits(max_rank=max_lora_rank, max_norm=float("inf")),
        pack=lambda artifact: pack(artifact, shape),
        cache_dir=cache_dir / "adapters",
        max_loras=max_loras,
        max_cpu_loras=max_cpu_loras,
        max_cpu_lora_bytes=max_cpu_lora_bytes,
        max_disk_bytes=max_disk_bytes,
        idle_s=idle_s,
        # Of a remote store, one adapter may download while another one is checked and packed.
        num_loaders=1 if store.is_local else 2,
    )
    return Lora(pool, open_backend(pool), name, pack, open_backend)


def _load_kernel(cache_dir: Path, *, is_required: bool) -> LoraKernel | None:
    try:
        return LoraKernel(cache_dir / "native")
    except NativeBuildError as error:
        if is_required:
            raise
        log.warning("native_lora_unavailable", reason=str(error), fallback=TorchLora.name)
        return None
