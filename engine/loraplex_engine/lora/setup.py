"""Put the LoRA side of an engine together: store, pool and the best backend of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import structlog
import torch
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.lora import LoraKernel
from loraplex_kernels.plans import PlanTable

from loraplex_engine.arithmetic import native_name
from loraplex_engine.artifact import AdapterLimits, AdapterStore, ModelShape
from loraplex_engine.device.staging import Staging
from loraplex_engine.lora.backend import NativeLora, SlotWeights, TorchLora
from loraplex_engine.lora.pool import MAX_DISK_BYTES, MAX_HOST_BYTES, LoraPool
from loraplex_engine.lora.seam import CapturableLora, LoraBackend
from loraplex_engine.lora.weights import AdapterTensors, pack_native, pack_torch

log = structlog.get_logger(__name__)

# The self-check tries steps of up to so many rows, whatever is served.
_MIN_TOKENS = 256

BackendName = Literal["auto", "native", "torch", "triton"]


@dataclass(frozen=True, slots=True)
class Lora:
    """The pool for the scheduler and the backend for the model; `name` says which backend it is."""

    pool: LoraPool[Any]
    backend: LoraBackend
    name: str
    pack: Callable[[AdapterTensors, ModelShape], Any]
    # Another one, over other slots, so many of them, of a model of this shape; nothing is shared with `backend`.
    open_backend: Callable[[SlotWeights[Any], int, ModelShape], LoraBackend]
    max_rank: int
    device_bytes: int = 0  # what `backend` takes of a GPU's memory


@dataclass(frozen=True, slots=True)
class LoraDevice:
    """What the Triton backend must know of the engine that it works in."""

    device: torch.device
    dtype: torch.dtype  # of the model
    plans: PlanTable
    staging: Staging  # not yet sealed
    max_tokens: int  # rows of a step, padding counted
    max_decode_tokens: int  # rows of the largest step that may be recorded


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
    dtype: torch.dtype | None = None,
    on_device: LoraDevice | None = None,
) -> Lora:
    """Open the store and make an empty pool.

    Args:
        cache_dir: for compiled kernels and for adapters of a remote store.
        max_cpu_lora_bytes, max_disk_bytes, idle_s: see `LoraPool`.
        backend: auto takes the Triton kernels where `on_device` is a GPU, else the native kernel, and torch
            with one warning where that does not compile.
        dtype: of the model's rows, for which a CPU's kernel may lay out weights; None: not known.
        on_device: needed for the Triton backend.

    Raises:
        NativeBuildError: the native kernel was asked for and does not compile here.
        ValueError: the URL or a size is wrong, or the backend does not go with the device.
    """
    parts = _open_parts(backend, on_device, cache_dir, max_lora_rank, dtype)
    store = AdapterStore(store_url)
    pool: LoraPool[Any] = LoraPool(
        store=store,
        shape=shape,
        # A store holds what passed at upload, under its digest; whatever is finite is served, and
        # an adapter that overflows harms nobody but its own rows.
        limits=AdapterLimits(max_rank=max_lora_rank, max_norm=float("inf")),
        pack=lambda artifact: parts.pack(artifact, shape),
        cache_dir=cache_dir / "adapters",
        max_loras=max_loras,
        max_cpu_loras=max_cpu_loras,
        max_cpu_lora_bytes=max_cpu_lora_bytes,
        max_disk_bytes=max_disk_bytes,
        idle_s=idle_s,
        # Of a remote store, one adapter may download while another one is checked and packed.
        num_loaders=1 if store.is_local else 2,
    )
    opened = parts.open_backend(pool, max_loras, shape, on_device.staging if on_device else None)
    return Lora(
        pool,
        opened,
        parts.name,
        parts.pack,
        lambda slots, num_slots, shape: parts.open_backend(slots, num_slots, shape, None),
        max_lora_rank,
        opened.device_bytes if isinstance(opened, CapturableLora) else 0,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What differs from one kind of backend to the next."""

    name: str
    pack: Callable[[AdapterTensors, ModelShape], Any]
    # (slots, their number, the model's shape, staging to share)
    open_backend: Callable[[SlotWeights[Any], int, ModelShape, Staging | None], LoraBackend]


def _open_parts(
    backend: BackendName,
    on_device: LoraDevice | None,
    cache_dir: Path,
    max_rank: int,
    dtype: torch.dtype | None,
) -> _Parts:
    is_gpu = on_device is not None and on_device.device.type == "cuda"
    if backend == "auto":
        backend = "triton" if is_gpu else "auto"
    elif is_gpu and backend != "triton":
        raise ValueError(f"backend {backend} computes on the CPU: use triton on a GPU")
    if backend == "triton":
        if on_device is None:
            raise ValueError("backend triton needs a device: give on_device")
        return _triton_parts(on_device, max_rank)
    kernel = (
        None if backend == "torch" else _load_kernel(cache_dir, is_required=backend == "native")
    )
    if kernel is None:
        return _Parts(
            TorchLora.name, pack_torch, lambda slots, _, shape, __: TorchLora(slots, shape)
        )
    tiles = kernel if kernel.has_tiles and dtype is torch.bfloat16 else None
    return _Parts(
        native_name("fp32" if tiles is None else "amx"),
        partial(pack_native, tiles=tiles),
        lambda slots, _, shape, __: NativeLora(slots, shape, kernel),
    )


def _triton_parts(on_device: LoraDevice, max_rank: int) -> _Parts:
    # Not at the top: an engine on a CPU needs no Triton.
    from loraplex_engine.lora.device_slots import DeviceAdapter, pack_device
    from loraplex_engine.lora.triton_backend import TritonLora, TritonLoraSizes

    is_gpu = on_device.device.type == "cuda"

    def pack(artifact: AdapterTensors, shape: ModelShape) -> DeviceAdapter:
        return pack_device(artifact, shape, dtype=on_device.dtype, pin=is_gpu)

    def open_backend(
        slots: SlotWeights[Any], num_slots: int, shape: ModelShape, staging: Staging | None
    ) -> LoraBackend:
        sizes = TritonLoraSizes(
            num_slots=num_slots,
            max_rank=max_rank,
            max_tokens=max(on_device.max_tokens, _MIN_TOKENS),
            max_decode_tokens=on_device.max_decode_tokens,
        )
        return TritonLora(
            slots,
            shape,
            sizes,
            dtype=on_device.dtype,
            device=on_device.device,
            plans=on_device.plans,
            staging=staging,
        )

    return _Parts(TritonLora.name, pack, open_backend)


def _load_kernel(cache_dir: Path, *, is_required: bool) -> LoraKernel | None:
    try:
        return LoraKernel(cache_dir / "native")
    except NativeBuildError as error:
        if is_required:
            raise
        log.warning("native_lora_unavailable", reason=str(error), fallback=TorchLora.name)
        return None
