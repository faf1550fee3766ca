"""What is told of a model's memory before it is loaded is what the loaded engine has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loraplex_engine.artifact import (
    ModelShape,
    adapter_numbers,
    base_memory,
    kv_bytes_per_token,
    parameters,
)
from loraplex_engine.artifact.sizes import Quantization
from loraplex_engine.attention.base import AttentionShape
from loraplex_engine.compute import load_model
from loraplex_engine.config import DType, EngineConfig
from loraplex_engine.convert import cache_dir
from loraplex_engine.model.linear import Linear
from loraplex_engine.model.native_linear import NativeLinear

from tests.support.tiny_model import TinyShape, write_tiny_model

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=128,
    is_tied=True,
)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("bfloat16", "float32"), ("float32", "float32"), ("float32", "bfloat16")],
)
def test_the_loaded_weights_take_what_was_told(
    tmp_path: Path, stored: str, dtype: DType, quantization: Quantization
) -> None:
    # Widths that panels and tiles fill, as those of real models do.
    folder = write_tiny_model(
        tmp_path / "model",
        TinyShape(
            hidden_size=128,
            intermediate_size=256,
            num_heads=4,
            head_dim=32,
            vocab_size=512,
            dtype=getattr(torch, stored),
        ),
    )
    config = EngineConfig(
        model_dir=folder,
        base_model="tiny",
        dtype=dtype,
        quantization=quantization,
        linear_backend="native",
    )

    model, _ = load_model(config, cache=cache_dir())

    told = base_memory(
        ModelShape.from_config_json(folder / "config.json"),
        stored_dtype=stored,
        dtype=dtype,
        quantization=quantization,
    )
    layers = [(one.qkv, one.o, one.gate_up, one.down) for one in model.layers]
    assert told.linears == sum(_bytes_of(linear) for layer in layers for linear in layer)
    assert told.head == _bytes_of(model.lm_head)
    assert told.embedding == model._embedding_VH.nbytes


def _bytes_of(linear: Linear) -> int:
    assert isinstance(linear, NativeLinear)
    return linear.weight_bytes


@pytest.mark.parametrize("kept_in", [torch.bfloat16, torch.float32, torch.int8])
def test_the_kv_cache_is_sized_by_the_same_formula(kept_in: torch.dtype) -> None:
    shape = AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)

    told = kv_bytes_per_token(num_kv_heads=3, head_dim=64, number_bytes=kept_in.itemsize)

    assert told == shape.kv_bytes_per_token(kept_in)
    # Keys and values of three heads; one byte each has a scale.
    assert told == 2 * 3 * (64 * kept_in.itemsize + (4 if kept_in.itemsize == 1 else 0))


def test_a_gpu_has_one_tensor_for_a_tied_head() -> None:
    tied = base_memory(SHAPE, is_gpu=True)

    assert (tied.head, tied.embedding) == (128 * 64 * 2, 0)
    assert parameters(SHAPE) == tied.total // 2
    with pytest.raises(ValueError, match="int4 is of a CPU"):
        base_memory(SHAPE, is_gpu=True, quantization="int4")


def test_an_adapter_has_its_rank_times_the_widths_of_its_modules() -> None:
    only_q = adapter_numbers(SHAPE, 8, frozenset({"q_proj"}))

    assert only_q == 8 * 2 * (64 + 64)
    assert adapter_numbers(SHAPE, 5, frozenset({"q_proj"}), multiple=8) == only_q
    assert adapter_numbers(SHAPE, 8) > only_q
    with pytest.raises(ValueError, match="no module w_proj: there are q_proj"):
        adapter_numbers(SHAPE, 8, frozenset({"w_proj"}))
