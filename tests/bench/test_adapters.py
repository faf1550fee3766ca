"""The bench's adapters are what everybody reads as bf16."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from loraplex_engine.artifact import AdapterLimits, read_adapter
from safetensors.torch import load_file

from bench import adapters


def test_what_is_written_is_bf16_for_peers_and_for_us(
    tmp_path: Path,
) -> None:
    config = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    folder = adapters.write(tmp_path / "a", tmp_path, rank=2, seed=5, base_name="tiny")

    read = load_file(folder / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in read.values()} == {torch.bfloat16}
    assert {tensor.element_size() for tensor in read.values()} == {adapters.NUMBER_BYTES}
    drawn = np.random.default_rng(5).standard_normal((2, 8)) / np.sqrt(8)
    first = torch.from_numpy(drawn).bfloat16()
    assert torch.equal(
        read["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"], first
    )
    artifact = read_adapter(folder, limits=AdapterLimits())
    assert {view.dtype for view in artifact.tensors.values()} == {"BF16"}
    assert artifact.rank_max == 2
