"""What an engine process is started with, and the sizes that follow from it.

Owns the settings' ranges and the KV cache's arithmetic; no torch, so that the scheduler's tests and the
command line load it for free. `dtype="auto"` is resolved where torch is known (the runner).
Units: a block is `block_size` tokens; memory is bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from loraplex_engine.errors import ConfigError

DType = Literal["auto", "bfloat16", "float32"]

DEFAULT_KV_MEMORY_BYTES = 512 * 1024**2
MAX_BLOCK_SIZE = 512
MAX_LORA_RANK = 512


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine process, checked when made.

    Raises:
        ConfigError: a value is out of its range or contradicts another; the message names the setting
            and the remedy.
    """

    model_dir: Path  # Hugging Face folder of the base model
    base_model: str  # its public name
    dtype: DType = "auto"  # auto: bfloat16 where the CPU computes it fast, else float32
    block_size: int = 16
    num_blocks: int | None = None  # None: from kv_memory_bytes
    kv_memory_bytes: int | None = None  # None: 512 MiB, or one whole context where that is more
    max_model_len: int | None = None  # None: what the model and the KV cache hold
    max_num_batched_tokens: int = 512  # computed per step, over all rows
    max_num_seqs: int = 64  # rows
    max_waiting: int = 256  # queued requests; more are refused
    long_prefill_token_threshold: int | None = None  # per row and step; None: no bound
    kv_watermark: float = 0.02  # share of blocks kept free for running rows when admitting
    max_loras: int = 16  # adapter slots: most distinct adapters in a step
    max_cpu_loras: int = 64  # adapters kept in host memory, those in slots included
    max_lora_rank: int = 64
    store_url: str | None = None  # fsspec URL of the adapter store; None: base model only
    num_threads: int | None = None  # None: from the cgroup quota

    def __post_init__(self) -> None:
        if not self.base_model:
            raise ConfigError("base_model is empty: give the name that clients will use")
        if self.dtype not in get_args(DType):
            choices = ", ".join(get_args(DType))
            raise ConfigError(f"dtype is {self.dtype!r}: choose one of {choices}")
        for name in (
            "block_size",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_waiting",
            "max_loras",
            "max_cpu_loras",
            "max_lora_rank",
        ):
            _require_positive(name, getattr(self, name))
        for name in (
            "num_blocks",
            "kv_memory_bytes",
            "max_model_len",
            "long_prefill_token_threshold",
            "num_threads",
        ):
            value = getattr(self, name)
            if value is not None:
                _require_positive(name, value)
        if self.block_size > MAX_BLOCK_SIZE or self.block_size & (self.block_size - 1):
            raise ConfigError(
                f"block_size is {self.block_size}: use a power of two up to {MAX_BLOCK_SIZE}, such as 16"
            )
        if self.num_blocks is not None and self.kv_memory_bytes is not None:
            raise ConfigError(
                "num_blocks and kv_memory_bytes both set the KV cache's size: give one"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            # Fewer tokens than rows would leave the last rows without a token for as long as it lasts.
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs "
                f"{self.max_num_seqs}: each row needs a token per step; raise the first or lower the second"
            )
        if self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras is {self.max_cpu_loras}, below max_loras {self.max_loras}: "
                "an adapter in a slot is in host memory too; raise the first or lower the second"
            )
        if self.max_lora_rank > MAX_LORA_RANK:
            raise ConfigError(f"max_lora_rank is {self.max_lora_rank}: lower it to {MAX_LORA_RANK}")
        if not 0.0 <= self.kv_watermark <= 0.5:
            raise ConfigError(f"kv_watermark is {self.kv_watermark}: use a share between 0 and 0.5")

    def sizes(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype_bytes: int,
        max_position_embeddings: int,
    ) -> EngineSizes:
        """The KV cache and the longest sequence for a model of this shape.

        The pool always holds at least one sequence of `max_model_len` tokens, so that a request that was
        admitted can finish once it is alone.

        Raises:
            ConfigError: max_model_len is more than the model's context or than the KV cache holds.
        """
        bytes_per_token = kv_bytes_per_token(num_layers, num_kv_heads, head_dim, dtype_bytes)
        block_bytes = bytes_per_token * self.block_size
        wanted_len = self.max_model_len or max_position_embeddings
        if wanted_len > max_position_embeddings:
            raise ConfigError(
                f"max_model_len is {wanted_len}, but the model's context is {max_position_embeddings} "
                "tokens: lower it to that or leave it out"
            )
        if self.num_blocks is not None:
            num_blocks, source = self.num_blocks, f"num_blocks {self.num_blocks}"
        elif self.kv_memory_bytes is not None:
            num_blocks = self.kv_memory_bytes // block_bytes
            source = f"kv_memory_bytes {self.kv_memory_bytes}"
        else:
            num_blocks = max(
                DEFAULT_KV_MEMORY_BYTES // block_bytes, -(-wanted_len // self.block_size)
            )
            source = "the default"
        num_slots = num_blocks * self.block_size
        if num_slots == 0:
            raise ConfigError(
                f"kv_memory_bytes is {self.kv_memory_bytes}, but one block of {self.block_size} tokens "
                f"takes {block_bytes} bytes: raise it"
            )
        if self.max_model_len is not None and num_slots < self.max_model_len:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}, but {source} holds {num_slots} tokens: lower it "
                f"to that, or give the KV cache {self.max_model_len * bytes_per_token} bytes"
            )
        return EngineSizes(
            kv_bytes_per_token=bytes_per_token,
            num_blocks=num_blocks,
            max_model_len=min(wanted_len, num_slots),
        )


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What `EngineConfig.sizes` derived."""

    kv_bytes_per_token: int
    num_blocks: int
    max_model_len: int  # longest prompt plus output, in tokens


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of keys and values that one token leaves in all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype_bytes


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}: use 1 or more")
