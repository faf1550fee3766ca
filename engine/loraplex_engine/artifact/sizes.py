"""What a base model and its caches take of memory, told from its config.json before anything is loaded.

The one place of these formulas: the engine sizes its KV cache by them, `loraplex plan` and `loraplex doctor`
tell by them what will fit. What an adapter takes is beside it, in `memory.py`. No torch here.

| on a CPU | a number of a linear layer takes | of `lm_head` | of the embedding |
|---|---|---|---|
| as it is | as in the checkpoint, or in what it is computed in if that is narrower (bf16: 2 bytes) | the same | the same |
| int8 | 1 byte, and 4 for each output | 1 byte, and 4 for each output | as it is |
| int4 | 5/8 byte: four bits, and 4 bytes for each 32 | as with int8 | as it is |

`lm_head` lies packed beside the embedding also where the two are one tensor. On a GPU all have the model's dtype,
and tied tensors are one.

Unit: bytes, unless a name says otherwise.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from loraplex_engine.artifact.shape import ModelShape

Quantization = Literal["none", "int8", "int4"]

BYTES_OF_DTYPE: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "fp8": 1}
_SCALE_BYTES: Final = 4
_INT4_GROUP: Final = 32
# Python, torch, the server and its sockets, whatever the model: README, table of the scale workload, less
# weights, KV cache and the adapter.
PROCESS_BYTES: Final = 256 * 1024**2


def kv_bytes_per_token(*, num_kv_heads: int, head_dim: int, number_bytes: int) -> int:
    """What a token's keys and values take in one layer.

    Args:
        number_bytes: of what they are kept in. One byte (int8, fp8) has a scale in fp32 beside it, for each head,
            of keys and of values.
    """
    per_head = head_dim * number_bytes
    if number_bytes == 1:
        per_head += _SCALE_BYTES
    return 2 * num_kv_heads * per_head


class BaseMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a base model takes while it is loaded."""

    linears: int
    head: int
    embedding: int  # 0: it is the head's tensor

    @property
    def total(self) -> int:
        """All of it."""
        return self.linears + self.head + self.embedding


def base_memory(
    shape: ModelShape,
    *,
    stored_dtype: str = "bfloat16",
    dtype: str = "bfloat16",
    quantization: Quantization = "none",
    is_gpu: bool = False,
) -> BaseMemory:
    """Weights of the base model; the norms, a ten-thousandth of them, are left out.

    Args:
        stored_dtype: of the checkpoint.
        dtype: what is computed in.

    Raises:
        ValueError: `quantization` on a GPU, where there is none.
    """
    linears = shape.linear_shapes().values()
    numbers = shape.num_layers * sum(outputs * inputs for outputs, inputs in linears)
    outputs = shape.num_layers * sum(outputs for outputs, _ in linears)
    vocabulary = shape.vocab_size * shape.hidden_size
    if is_gpu:
        if quantization != "none":
            raise ValueError(f"quantization {quantization} is of a CPU's linear layers")
        size = BYTES_OF_DTYPE[dtype]
        return BaseMemory(
            linears=numbers * size,
            head=vocabulary * size,
            embedding=0 if shape.is_tied else vocabulary * size,
        )
    size = min(BYTES_OF_DTYPE[stored_dtype], BYTES_OF_DTYPE[dtype])
    int8_head = vocabulary + _SCALE_BYTES * shape.vocab_size
    by_quantization = {
        "none": (numbers * size, vocabulary * size),
        "int8": (numbers + _SCALE_BYTES * outputs, int8_head),
        "int4": (numbers // 2 + _SCALE_BYTES * numbers // _INT4_GROUP, int8_head),
    }
    in_linears, in_head = by_quantization[quantization]
    return BaseMemory(linears=in_linears, head=in_head, embedding=vocabulary * size)


def parameters(shape: ModelShape) -> int:
    """Numbers of the base model, norms left out; a tied head is counted once."""
    whole = base_memory(shape, dtype="int8", is_gpu=True)
    return whole.total


def adapter_numbers(
    shape: ModelShape, rank: int, modules: frozenset[str] | None = None, *, multiple: int = 1
) -> int:
    """Numbers of an adapter of this rank on these linear layers of every layer.

    Args:
        modules: last parts of names, such as q_proj; None: all seven.
        multiple: what a backend pads ranks to.

    Raises:
        ValueError: a module that the model does not have; the message names those it has.
    """
    linears = {name.rsplit(".", 1)[-1]: sizes for name, sizes in shape.linear_shapes().items()}
    wanted = linears.keys() if modules is None else modules
    unknown = sorted(wanted - linears.keys())
    if unknown:
        raise ValueError(f"no module {', '.join(unknown)}: there are {', '.join(linears)}")
    padded = -(-rank // multiple) * multiple
    return padded * shape.num_layers * sum(sum(linears[name]) for name in wanted)
