"""EngineConfig: each refusal names the field and the remedy; sizes follow from the model's shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loraplex_engine.config import EngineConfig, EngineSizes
from loraplex_engine.errors import ConfigError

# In 16 bits: 23,040 bytes a token over 30 layers with 3 heads of 64 numbers.
SMOLLM2 = {"block_bytes": 23_040 * 16, "max_position_embeddings": 8192}


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model_dir=Path("model"), base_model="tiny", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float16"}, "dtype is 'float16': choose one of auto, bfloat16, float32"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype is 'int4': choose one of auto, int8, fp8"),
        (
            {"kv_cache_dtype": "int8", "device": "cpu"},
            "kv_cache_dtype is 'int8', but on a CPU .*: use kv_cache_dtype auto, or a GPU",
        ),
        (
            {"kv_cache_dtype": "fp8", "attention_backend": "native"},
            "kv_cache_dtype is 'fp8', but attention_backend 'native' keeps .*: use kv_cache_dtype auto",
        ),
        ({"block_size": 0}, "block_size is 0: use 1 or more"),
        ({"block_size": 24}, "block_size is 24: use a power of two"),
        ({"block_size": 1024}, "block_size is 1024: use a power of two up to 512"),
        ({"num_blocks": 0}, "num_blocks is 0: use 1 or more"),
        ({"kv_memory_bytes": -1}, "kv_memory_bytes is -1: use 1 or more"),
        ({"num_blocks": 4, "kv_memory_bytes": 4096}, "give one"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_num_batched_tokens": 32}, "below max_num_seqs 64.*raise the first or lower"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_waiting": 0}, "max_waiting is 0"),
        ({"long_prefill_token_threshold": 0}, "long_prefill_token_threshold is 0"),
        ({"policy": "lifo"}, "policy is 'lifo': choose one of fair, priority, fcfs"),
        ({"admission": "all"}, "admission is 'all': choose one of optimistic, reserve"),
        ({"aging_s": 0.0}, "aging_s is 0.0: use seconds above 0"),
        ({"aging_s": float("inf")}, "aging_s is inf"),
        ({"max_partial_prefills": 0}, "max_partial_prefills is 0"),
        ({"waiting_served_ratio": -1.0}, "waiting_served_ratio is -1.0: use 0 or more"),
        ({"waiting_served_ratio": float("nan")}, "waiting_served_ratio is nan"),
        ({"max_steps_closed": 0}, "max_steps_closed is 0"),
        ({"max_loras": 8, "max_cpu_loras": 4}, "max_cpu_loras is 4, below max_loras 8"),
        ({"max_lora_rank": 4096}, "max_lora_rank is 4096: lower it to 512"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"kv_watermark": 0.9}, "kv_watermark is 0.9: use a share between 0 and 0.5"),
        ({"kv_watermark": float("nan")}, "kv_watermark is nan"),
        ({"device": "rocm"}, "device is 'rocm': choose one of auto, cpu, cuda"),
        ({"lora_backend": "c"}, "lora_backend is 'c': choose one of auto, torch, native, triton"),
        (
            {"device": "cuda", "attention_backend": "native"},
            "attention_backend is 'native', which computes on a CPU, but device is 'cuda': use triton",
        ),
        (
            {"quantization": "int2"},
            "quantization is 'int2': choose one of none, int8, int4",
        ),
        (
            {"linear_backend": "mkl"},
            "linear_backend is 'mkl': choose one of auto, native, onednn, torch",
        ),
        (
            {"quantization": "int4", "linear_backend": "onednn"},
            "quantization is 'int4', but linear_backend 'onednn' keeps .*: use linear_backend auto",
        ),
        (
            {"quantization": "int8", "device": "cuda"},
            "quantization is 'int8', which is of a CPU's linear layers, .*: use none",
        ),
        (
            {"linear_backend": "native", "attention_backend": "triton"},
            "linear_backend is 'native', which is of a CPU's linear layers, .*: use auto",
        ),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization is 0.0: use a share above 0"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan"),
        (
            {"gpu_memory_utilization": 0.8, "device": "cpu"},
            "gpu_memory_utilization is given, but device is 'cpu': leave it out",
        ),
        (
            {"gpu_memory_utilization": 0.8, "kv_memory_bytes": 1 << 30},
            "gpu_memory_utilization and kv_memory_bytes both set the KV cache's size: give one",
        ),
    ],
)
def test_a_bad_setting_is_named_with_its_remedy(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings)


def test_an_empty_base_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="base_model is empty"):
        EngineConfig(model_dir=Path("model"), base_model="")


def test_default_sizes_hold_a_whole_context() -> None:
    sizes = config().sizes(**SMOLLM2)

    assert sizes == EngineSizes(block_bytes=368_640, num_blocks=1456, max_model_len=8192)
    assert sizes.kv_bytes == 1456 * 368_640
    assert sizes.num_blocks * 16 >= sizes.max_model_len


def test_the_default_pool_grows_with_a_long_context() -> None:
    sizes = config().sizes(block_bytes=2 * 368_640, max_position_embeddings=131_072)

    assert sizes.num_blocks == 131_072 // 16


def test_a_gpu_s_free_memory_is_the_pool_s_where_no_setting_says() -> None:
    free_bytes = 23_040 * 16 * 100 + 5

    sizes = config().sizes(**SMOLLM2, free_bytes=free_bytes)
    given = config(num_blocks=7).sizes(**SMOLLM2, free_bytes=free_bytes)

    assert (sizes.num_blocks, sizes.max_model_len) == (100, 1600)
    assert given.num_blocks == 7
    with pytest.raises(ConfigError, match="what the GPU's memory leaves holds 1600 tokens"):
        config(max_model_len=4096).sizes(**SMOLLM2, free_bytes=free_bytes)


def test_kv_memory_bounds_the_context_when_none_was_asked_for() -> None:
    sizes = config(kv_memory_bytes=23_040 * 16 * 10).sizes(**SMOLLM2)

    assert (sizes.num_blocks, sizes.max_model_len) == (10, 160)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 9000}, "max_model_len is 9000, but the model's context is 8192"),
        (
            {"max_model_len": 4090, "num_blocks": 100},
            "num_blocks 100 holds 1600 tokens: lower it to that, or give the KV cache 94371840 bytes",
        ),
        ({"kv_memory_bytes": 1000}, "one block of 16 tokens takes 368640 bytes: raise it"),
    ],
)
def test_sizes_that_cannot_be_met_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings).sizes(**SMOLLM2)
