"""What an adapter takes of an engine's memory, told before any engine has loaded it.

An estimate, for reports: the engine's own count is its backend's. The rules that it knows of the backends
(`loraplex_engine.lora`), which tests compare with them:

| backend | weights are held as | ranks are padded to |
|---|---|---|
| native, CPU | bf16 where the file is bf16, else fp32 | 1; with AMX, tiles of bf16: 16 |
| torch, CPU | fp32 | 8 |
| triton, GPU | the model's dtype, in slots of the largest rank that is served | 16 |
"""

from __future__ import annotations

from typing import Final

import msgspec

from loraplex_engine.artifact.reader import AdapterArtifact
from loraplex_engine.artifact.shape import ModelShape

# README, `make bench ARGS="--workload scale"`, two cores with AMX, 64 requests in flight: a step takes 64 / 359 s with
# one adapter and 64 / 124 s with an adapter for each row, so that each of the 63 others adds 5.4 ms; the step of a
# lone row takes 1 / 32 s. Adapters there have rank 8 to 64, 30 on the average, whose bytes are 6.8% of the base's.
_MEASURED_PERCENT: Final = 100 * (64 / 124 - 64 / 359) / 63 * 32
_MEASURED_BYTES_PERCENT: Final = 6.8
_SOURCE: Final = (
    "low: the adapter's bytes beside the base's, which a step of one row reads once (bf16); high: that, times what an"
    " adapter of the bench's scale workload costs beside its own bytes on two CPU cores (README)"
)
_TORCH_PAD: Final = 8
_DEVICE_PAD: Final = 16
BYTES_OF: Final = {"bfloat16": 2, "float32": 4}


class ModuleMemory(msgspec.Struct, frozen=True, kw_only=True):
    """All modules of one name: q_proj of every layer that has one."""

    module: str
    layers: int
    rank: int  # the largest
    parameters: int
    # Of one rank of one of them, at two bytes a number; twice that in float32.
    bytes_per_rank: int


class AdapterOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """What one more adapter in a decoding step costs, in percent of a step of the base with one row.

    Rows that share an adapter share this cost; rows of the base have none of it.
    """

    low_percent: float
    high_percent: float
    source: str


class AdapterMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one adapter takes while it is loaded."""

    modules: tuple[ModuleMemory, ...]
    cpu_bytes: dict[str, tuple[int, int]]  # dtype of the model -> (least, most), by backend and CPU
    gpu_host_bytes: dict[str, int]  # dtype -> of page-locked memory, beside a slot
    gpu_slot_bytes: dict[str, int]  # dtype -> of a slot, whose size is every adapter's alike


def estimate_memory(
    artifact: AdapterArtifact, shape: ModelShape, *, max_rank: int
) -> AdapterMemory:
    """The estimate for an adapter that fits this model.

    Args:
        max_rank: the largest rank that is served, which sizes a GPU's slots.
    """
    is_bf16 = all(tensor.dtype == "BF16" for tensor in artifact.tensors.values())
    by_name: dict[str, list[tuple[int, int]]] = {}  # -> (rank, numbers of one rank)
    for module, pair in artifact.pairs.items():
        outputs, inputs = shape.module_shape(module)
        name = module.linear.rsplit(".", 1)[-1]
        by_name.setdefault(name, []).append((pair.rank, inputs + outputs))
    pairs = [pair for found in by_name.values() for pair in found]

    def numbers(multiple: int) -> int:
        return sum(-(-rank // multiple) * multiple * width for rank, width in pairs)

    stored = numbers(1) * (2 if is_bf16 else 4)
    # fp32 values that need it are held as up to three bf16 planes, for the tiles.
    tiles = numbers(16) * 2 * (1 if is_bf16 else 3)
    as_torch = numbers(_TORCH_PAD) * 4
    return AdapterMemory(
        modules=tuple(
            ModuleMemory(
                module=name,
                layers=len(found),
                rank=max(rank for rank, _ in found),
                parameters=sum(rank * width for rank, width in found),
                bytes_per_rank=2 * found[0][1],
            )
            for name, found in sorted(by_name.items())
        ),
        cpu_bytes={
            "bfloat16": (min(stored, as_torch), max(stored, tiles, as_torch)),
            "float32": (min(stored, as_torch), max(stored, as_torch)),
        },
        gpu_host_bytes={
            dtype: _power_of_two(numbers(_DEVICE_PAD) * size) for dtype, size in BYTES_OF.items()
        },
        gpu_slot_bytes={
            dtype: _slot_numbers(shape, max_rank) * size for dtype, size in BYTES_OF.items()
        },
    )


def _slot_numbers(shape: ModelShape, max_rank: int) -> int:
    """Numbers of a slot: every module of the base at the largest rank, embedding and head too."""
    rank = -(-max_rank // _DEVICE_PAD) * _DEVICE_PAD
    layer = sum(outputs + inputs for outputs, inputs in shape.linear_shapes().values())
    outside = 2 * (shape.vocab_size + shape.hidden_size)
    return rank * (shape.num_layers * layer + outside)


def _power_of_two(size: int) -> int:
    # torch's allocator of page-locked memory hands out powers of two.
    return 1 << max(0, size - 1).bit_length()


def base_parameters(shape: ModelShape) -> int:
    """Numbers that a decoding step of the base reads: its linear layers and its head."""
    layer = sum(outputs * inputs for outputs, inputs in shape.linear_shapes().values())
    return shape.num_layers * layer + shape.vocab_size * shape.hidden_size


def estimate_overhead(artifact: AdapterArtifact, shape: ModelShape) -> AdapterOverhead:
    """The cost of this adapter in a step, from its bytes and from what the bench has measured of others."""
    low = 100 * artifact.num_parameters / base_parameters(shape)
    high = low * _MEASURED_PERCENT / _MEASURED_BYTES_PERCENT
    return AdapterOverhead(low_percent=round(low, 2), high_percent=round(high, 2), source=_SOURCE)
