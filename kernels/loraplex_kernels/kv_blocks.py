"""Whole blocks of a paged cache: from block to block, out into a packed buffer, and back in.

A cache, or its scales, is (2, num_blocks, ...): a block is one contiguous piece in each of the two planes, moved as
16-byte words whatever is in it. Memory-bound; bits are copied, so NaN and unwritten memory pass unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.grid import ceil_div
from loraplex_kernels.plans import Plan, PlanTable
from loraplex_kernels.support import Support

KERNEL = "kv_blocks"


@triton.jit(do_not_specialize=["from_blocks", "to_blocks"])
def _kv_blocks(
    from_ptr,
    to_ptr,
    id_ptr,
    from_blocks,
    to_blocks,
    block_words,
    BLOCK: tl.constexpr,
    IS_GATHER: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    named = tl.load(id_ptr + index)
    source, target = index, named
    if IS_GATHER:
        source, target = named, index
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = word < block_words
    words = tl.load(from_ptr + (plane * from_blocks + source) * block_words + word, mask=mask)
    tl.store(to_ptr + (plane * to_blocks + target) * block_words + word, words, mask=mask)


def copy_blocks(cache: Tensor, source_N: Tensor, target_N: Tensor, plan: Plan) -> None:
    """Copy block source[i] of a cache to block target[i], in both planes; every source is read as it was.

    Two launches with a packed copy between: programs run in any order, and a target may be another's source.

    Args:
        cache: (2, num_blocks, ...) contiguous, any dtype; a block of a plane takes a multiple of 16 bytes.
        source_N, target_N: (N,) int64 on the cache's device; no target twice.
    Raises:
        ValueError: a shape or dtype differs from the above.
    Reference: `reference_attention.copy_blocks`.
    """
    _check_ids("target", target_N, len(source_N))
    scatter_blocks(gather_blocks(cache, source_N, plan), cache, target_N, plan)


def gather_blocks(
    cache: Tensor, source_N: Tensor, plan: Plan, *, out: Tensor | None = None
) -> Tensor:
    """The blocks source[i] of a cache, packed: (2, N, ...).

    Args:
        cache, source_N: as in `copy_blocks`; a source may come twice.
        out: (2, N, ...) contiguous, dtype of cache, to be overwritten; None: a new one.
    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    _check_ids("source", source_N, len(source_N))
    shape = (2, len(source_N), *cache.shape[2:])
    if out is None:
        out = cache.new_empty(shape)
    elif out.shape != shape or out.dtype != cache.dtype or not out.is_contiguous():
        raise ValueError(f"out is {tuple(out.shape)} {out.dtype}, not {shape} {cache.dtype}")
    _launch(cache, out, source_N, plan, is_gather=True)
    return out


def scatter_blocks(packed: Tensor, cache: Tensor, target_N: Tensor, plan: Plan) -> None:
    """Put packed blocks (2, N, ...) where `target_N` says; the reverse of `gather_blocks`.

    Raises:
        ValueError: a shape or dtype does not fit `cache`.
    """
    _check_ids("target", target_N, len(target_N))
    shape = (2, len(target_N), *cache.shape[2:])
    if packed.shape != shape or packed.dtype != cache.dtype or not packed.is_contiguous():
        raise ValueError(
            f"packed is {tuple(packed.shape)} {packed.dtype}, not {shape} {cache.dtype}"
        )
    _launch(packed, cache, target_N, plan, is_gather=False)


def _launch(begin: Tensor, end: Tensor, ids_N: Tensor, plan: Plan, *, is_gather: bool) -> None:
    cache = begin if is_gather else end
    num_bytes = math.prod(cache.shape[2:]) * cache.element_size()
    if cache.ndim < 3 or cache.shape[0] != 2 or not cache.is_contiguous() or num_bytes % 16:
        raise ValueError(
            f"cache is {tuple(cache.shape)} {cache.dtype}, not (2, num_blocks, ...) "
            "contiguous with blocks of a multiple of 16 bytes"
        )
    if not len(ids_N):
        return
    words = num_bytes // 4
    _kv_blocks[(len(ids_N), 2, ceil_div(words, plan.config["BLOCK"]))](
        # Flat first: a view as another dtype asks for a last dimension of whole words.
        begin.view(-1).view(torch.int32),
        end.view(-1).view(torch.int32),
        ids_N,
        begin.shape[1],
        end.shape[1],
        words,
        IS_GATHER=is_gather,
        **plan.launch(),
    )


def _check_ids(name: str, ids_N: Tensor, count: int) -> None:
    if ids_N.shape != (count,) or ids_N.dtype != torch.int64 or not ids_N.is_contiguous():
        raise ValueError(f"{name} is {tuple(ids_N.shape)} {ids_N.dtype}, not ({count},) int64")


def aot_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    """Every entry both ways, with blocks of 16 tokens of Llama-3.1-8B in bf16."""
    words, num_blocks = 16 * 8 * 128 * 2 // 4, 64
    for entry in table.entries(KERNEL):
        for is_gather in (True, False):
            yield AotCase(
                kernel=KERNEL,
                fn=_kv_blocks,
                signature={
                    "from_ptr": "*i32",
                    "to_ptr": "*i32",
                    "id_ptr": "*i64",
                    "from_blocks": "i32",
                    "to_blocks": "i32",
                    "block_words": "i32",
                },
                constexprs={**entry.plan.config, "IS_GATHER": is_gather},
                divisible_by_16=("from_ptr", "to_ptr", "id_ptr", "block_words"),
                plan=entry.plan,
                arch=support.name,
                dtype="bf16",
                needs=None,
                bytes_moved=num_blocks * 2 * 2 * words * 4,
                flops=0,
                shape=f"blocks={num_blocks} bytes={2 * words * 4} {'out' if is_gather else 'in'}",
            )
