"""How large everything is: on a GPU the models and batches of the issue, in a rehearsal next to nothing."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from loraplex_engine.artifact import ModelShape
from loraplex_engine.model.config import ModelConfig
from torch import Tensor


def model_config(
    *,
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    is_tied: bool = False,
    max_position: int = 16_384,
) -> ModelConfig:
    """A Llama of these sizes."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        is_tied=is_tied,
        dtype="bfloat16",
        eos_token_ids=(),
        num_token_ids=vocab,
    )


TINY = model_config(vocab=211, hidden=64, inner=96, layers=2, heads=4, kv_heads=2, head_dim=16)
SMOLLM2 = model_config(
    vocab=49_152, hidden=576, inner=1536, layers=30, heads=9, kv_heads=3, head_dim=64, is_tied=True
)
LLAMA_8B = model_config(
    vocab=128_256, hidden=4096, inner=14_336, layers=32, heads=32, kv_heads=8, head_dim=128
)
_SMALLEST = model_config(
    vocab=37, hidden=32, inner=48, layers=1, heads=2, kv_heads=1, head_dim=16, max_position=256
)


def shape_of(config: ModelConfig) -> ModelShape:
    """What adapters must know of a model."""
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        is_tied=config.is_tied,
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one run of the script."""

    parity_models: dict[str, tuple[ModelConfig, torch.dtype]]
    parity_steps: int
    memory_model: tuple[ModelConfig, torch.dtype]
    memory_step: tuple[int, int, int]  # rows, tokens, most drafts of a row
    speed_model: ModelConfig
    speed_dtype: torch.dtype
    contexts: dict[int, int]  # batch -> tokens of context of each row
    steps: int  # timed decoding steps
    adapters: tuple[int, ...]  # numbers of distinct adapters in a step
    rank: int  # of uniform adapters
    mixed_ranks: tuple[int, ...]
    mixed_like_rank: int  # uniform rank with about the bytes of the mixed ones
    max_rank: int
    num_slots: int
    prefill_tokens: int
    attention_batches: tuple[int, ...]
    attention_context: int
    attention_ragged: tuple[int, int]  # keys of one long row, and of each of the others
    arriving_tokens: int  # of a prompt that comes among decoding rows
    cache_bytes: int  # what is smaller than this may stay in the GPU's cache
    read_bytes: int  # of the buffer that bandwidth is measured on
    repeats: int
    widths: tuple[int, ...]  # hidden sizes of the numerics


FULL = Sizes(
    parity_models={"tiny": (TINY, torch.float32), "SmolLM2-shaped": (SMOLLM2, torch.bfloat16)},
    parity_steps=12,
    memory_model=(SMOLLM2, torch.bfloat16),
    # Half of the tokens are drafts: neither layers nor logits are all of it.
    memory_step=(128, 2048, 7),
    speed_model=LLAMA_8B,
    speed_dtype=torch.bfloat16,
    contexts={1: 1024, 8: 1024, 64: 1024, 256: 512},
    steps=24,
    adapters=(1, 8, 64),
    rank=16,
    mixed_ranks=(8, 16, 32, 64),
    mixed_like_rank=32,
    max_rank=64,
    num_slots=64,
    prefill_tokens=8192,
    attention_batches=(32, 64),
    attention_context=8192,
    attention_ragged=(32_768, 512),
    arriving_tokens=512,
    cache_bytes=200 << 20,
    read_bytes=4 << 30,
    repeats=20,
    widths=(576, 4096),
)
REHEARSAL = Sizes(
    parity_models={"tiny": (_SMALLEST, torch.float32)},
    parity_steps=1,
    memory_model=(_SMALLEST, torch.float32),
    memory_step=(2, 5, 2),
    speed_model=_SMALLEST,
    speed_dtype=torch.bfloat16,
    contexts={1: 6, 2: 6},
    steps=1,
    adapters=(1, 2),
    rank=16,
    mixed_ranks=(8, 16),
    mixed_like_rank=16,
    max_rank=16,
    num_slots=2,
    prefill_tokens=9,
    attention_batches=(2,),
    attention_context=20,
    attention_ragged=(20, 5),
    arriving_tokens=5,
    cache_bytes=20_000,
    read_bytes=1 << 16,
    repeats=1,
    widths=(48,),
)


class RandomWeights:
    """`WeightSource` of random numbers: a tensor depends on its name and shape alone.

    Scaled so that activations neither vanish nor explode over the layers.

    Args:
        device: where they are drawn; devices draw different numbers.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, has_head: bool) -> None:
        self._device = device
        self._dtype = dtype
        self._has_head = has_head

    def __contains__(self, name: str) -> bool:
        return name != "lm_head.weight" or self._has_head

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `WeightSource`."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype)
        if len(shape) == 1:
            return 1 + 0.1 * drawn
        return drawn if "embed" in name else drawn.div_(math.sqrt(shape[1]))

    def check_all_taken(self) -> None:
        """There is no end of them."""
