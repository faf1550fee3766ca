"""Random adapters of mixed rank for benchmarks: they cost what real ones cost and change the output.

Written in PEFT's format, so that every server and peer loads the same folders, and in bf16, so that all
compute with the same numbers: most round an adapter to the model's dtype.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

NUMBER_BYTES = 2
_VERSION = 2  # of the content: another number, other files in the cache
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _shapes(config: dict[str, int]) -> dict[str, tuple[str, int, int]]:
    """Module -> (parent, in_features, out_features)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    return {
        "q_proj": ("self_attn", hidden, q),
        "k_proj": ("self_attn", hidden, kv),
        "v_proj": ("self_attn", hidden, kv),
        "o_proj": ("self_attn", q, hidden),
        "gate_proj": ("mlp", hidden, inner),
        "up_proj": ("mlp", hidden, inner),
        "down_proj": ("mlp", inner, hidden),
    }


def write(folder: Path, model_dir: Path, *, rank: int, seed: int, base_name: str) -> Path:
    """A PEFT folder with all seven linear targets at `rank`, bf16 tensors of modest norm."""
    config = json.loads((model_dir / "config.json").read_text())
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (parent, size_in, size_out) in _shapes(config).items():
            prefix = f"base_model.model.model.layers.{layer}.{parent}.{name}"
            a_RK = rng.standard_normal((rank, size_in)) / np.sqrt(size_in)
            b_NR = rng.standard_normal((size_out, rank)) * 0.02
            tensors[f"{prefix}.lora_A.weight"] = torch.from_numpy(a_RK).bfloat16()
            tensors[f"{prefix}.lora_B.weight"] = torch.from_numpy(b_NR).bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": base_name,
                "r": rank,
                "lora_alpha": rank,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": list(_TARGETS),
                "inference_mode": True,
            }
        )
    )
    return folder


def fleet(
    cache: Path, model_dir: Path, names_and_ranks: Iterable[tuple[str, int]], *, base_name: str
) -> Path:
    """A folder that holds these adapters by name; those that are not in the cache are written.

    The same names give the same tensors: an adapter's seed is its name.
    """
    key = hashlib.sha256((model_dir / "config.json").read_bytes()).hexdigest()[:12]
    root = cache / f"adapters-{_VERSION}-{key}"
    for name, rank in names_and_ranks:
        folder = root / name
        if not folder.exists():
            part = root / f"{name}.part"
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
            write(part, model_dir, rank=rank, seed=seed, base_name=base_name)
            part.rename(folder)
    return root
