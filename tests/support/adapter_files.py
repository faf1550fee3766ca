"""Make PEFT adapter folders without PEFT: random weights, and whatever damage a test wants."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from loraplex_engine.artifact import (
    CONFIG_FILE,
    EMBEDDING,
    HEAD,
    TENSORS_FILE,
    AdapterArtifact,
    AdapterLimits,
    ModelShape,
    read_adapter,
)

OUTSIDE = ("embed_tokens", "lm_head")
ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

TINY_SHAPE = ModelShape(
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=128,
)
SMOLLM2_SHAPE = ModelShape(
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
)

Array = npt.NDArray[Any]


def native_cache_dir(config: pytest.Config) -> Path:
    """Where tests keep compiled kernels, so that one run after another compiles them once."""
    if config.pluginmanager.hasplugin("cacheprovider"):
        assert config.cache is not None
        return Path(config.cache.mkdir("loraplex-native"))
    return _scratch_cache()


@cache
def _scratch_cache() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="lpx-native-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """fp32 rounded to the nearest bf16, as bits."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def lora_config(**changes: Any) -> dict[str, Any]:
    """A plain adapter_config.json as PEFT writes it, with changes."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "inference_mode": True,
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
        "layers_to_transform": None,
        "layers_pattern": None,
    }
    return config | changes


def lora_tensors(
    shape: ModelShape = TINY_SHAPE,
    *,
    rank: int | Callable[[str], int] = 8,
    linears: Iterable[str] = ("q_proj", "v_proj"),
    layers: Iterable[int] | None = None,
    seed: int = 0,
    size: float = 0.1,
) -> dict[str, Array]:
    """Random A and B of every named linear, embed_tokens and lm_head too, fp32, by PEFT's names."""
    random = np.random.default_rng(seed)
    wanted = set(linears)
    tensors: dict[str, Array] = {}
    for layer in range(shape.num_layers) if layers is None else layers:
        for linear, (num_outputs, num_inputs) in shape.linear_shapes().items():
            if linear.split(".")[1] not in wanted:
                continue
            module = f"model.layers.{layer}.{linear}"
            r = rank if isinstance(rank, int) else rank(module)
            for half, dims in (("A", (r, num_inputs)), ("B", (num_outputs, r))):
                values = random.standard_normal(dims, dtype=np.float32) * np.float32(size)
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = values
    for outside, name in ((EMBEDDING, "lora_embedding_{}"), (HEAD, "lora_{}.weight")):
        if str(outside).rsplit(".", 1)[-1] in wanted:
            num_outputs, num_inputs = shape.module_shape(outside)
            r = rank if isinstance(rank, int) else rank(str(outside))
            for half, dims in (("A", (r, num_inputs)), ("B", (num_outputs, r))):
                values = random.standard_normal(dims, dtype=np.float32) * np.float32(size)
                tensors[f"base_model.model.{outside}.{name.format(half)}"] = values
    return tensors


def encode_tensors(
    tensors: Mapping[str, Array], *, dtype: str = "F32", metadata: Mapping[str, str] | None = None
) -> bytes:
    """A well-formed safetensors file; fp32 arrays are stored as `dtype`."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    chunks, used = [], 0
    for name, values in tensors.items():
        stored = {
            "F32": lambda v: v.astype("<f4"),
            "F16": lambda v: v.astype("<f2"),
            "BF16": bf16_bits,
        }[dtype](values)
        data = np.ascontiguousarray(stored).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [used, used + len(data)],
        }
        chunks.append(data)
        used += len(data)
    return encode_safetensors(json.dumps(header), b"".join(chunks))


def encode_safetensors(header: str | bytes, data: bytes) -> bytes:
    """The container around any header, right or wrong."""
    raw = header.encode() if isinstance(header, str) else header
    return len(raw).to_bytes(8, "little") + raw + data


def write_folder(folder: Path, config: Mapping[str, Any] | bytes, model: bytes) -> Path:
    """The two files, whatever is in them."""
    folder.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / CONFIG_FILE).write_bytes(text)
    (folder / TENSORS_FILE).write_bytes(model)
    return folder


def make_adapter(
    folder: Path,
    shape: ModelShape = TINY_SHAPE,
    *,
    rank: int = 8,
    linears: Iterable[str] = ("q_proj", "v_proj"),
    layers: Iterable[int] | None = None,
    seed: int = 0,
    size: float = 0.1,
    dtype: str = "BF16",
    **config: Any,
) -> AdapterArtifact:
    """A sound random adapter, written, read and checked."""
    targets = sorted(linears)
    tensors = lora_tensors(shape, rank=rank, linears=targets, layers=layers, seed=seed, size=size)
    if layers is not None:
        config |= {"layers_to_transform": sorted(layers)}
    write_folder(
        folder,
        lora_config(r=rank, target_modules=targets, **config),
        encode_tensors(tensors, dtype=dtype, metadata={"format": "pt"}),
    )
    return read_adapter(folder, limits=AdapterLimits(max_rank=512, max_norm=float("inf")))
