"""Adapters that nobody trained, in a store of their own: they cost what real ones cost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from loraplex_engine.artifact import (
    CONFIG_FILE,
    TENSORS_FILE,
    AdapterLimits,
    AdapterStore,
    ModelShape,
    read_adapter,
)

NUMBER_BYTES = 4  # float32, as PEFT saves by default


def fill_store(folder: Path, shape: ModelShape, ranks: list[int]) -> list[str]:
    """Put one adapter of each rank, on all linears of all layers, into a store at `folder`.

    Returns:
        Their digests, in the order of `ranks`.
    """
    store = AdapterStore(f"file://{folder}")
    limits = AdapterLimits(max_rank=max(ranks, default=1), max_norm=float("inf"))
    digests = []
    for seed, rank in enumerate(ranks):
        source = folder / "new" / str(seed)
        _write(source, shape, rank, seed)
        digest = read_adapter(source, limits=limits).digest
        store.put(source, digest)
        digests.append(digest)
    return digests


def _write(folder: Path, shape: ModelShape, rank: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensors = {}
    linears = shape.linear_shapes()
    for layer in range(shape.num_layers):
        for name, (num_outputs, num_inputs) in linears.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a_RK = rng.standard_normal((rank, num_inputs), dtype=np.float32)
            b_NR = rng.standard_normal((num_outputs, rank), dtype=np.float32)
            tensors[f"{prefix}.lora_A.weight"] = a_RK / np.float32(num_inputs**0.5)
            tensors[f"{prefix}.lora_B.weight"] = b_NR * np.float32(0.02)
    folder.mkdir(parents=True)
    save_file(tensors, folder / TENSORS_FILE)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(name.rsplit(".", 1)[-1] for name in linears),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config))
