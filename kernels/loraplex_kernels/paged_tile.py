"""One tile of keys and values of a paged cache against rows of queries: what decode and prefill share.

Layout of a layer's cache: (2, num_blocks, num_kv_heads, block_size, head_dim), keys then values, so that a
block of one head is contiguous. A cache in int8 or fp8 has a fp32 scale for every (slot, head), laid out
alike without head_dim: number = code * scale.

What a row sees is decided by selection. Positions that do not exist are never read (another tenant's block or
NaN may lie there); scores of existing keys that a row must not see become -inf, and weigh exactly zero.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_kernels.support import dtype_name

# exp(x) = exp2(x * LOG2E): the hardware has exp2.
LOG2E: Final = tl.constexpr(1.4426950408889634)
KV_DTYPES: Final = ("bf16", "fp16", "fp32", "int8", "fp8")
QUANTIZED: Final = ("int8", "fp8")
MAX_HEAD_DIM: Final = 256


@triton.jit
def cache_rows(  # noqa: ANN201 -- a tensor of Triton's language
    table_ptr, position, is_there, kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Which rows of head_dim numbers hold these positions, in the plane of keys; int64."""
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
    return (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def attend_tile(  # noqa: ANN201 -- tensors of Triton's language
    q,
    top,
    weight,
    total,
    kv_ptr,
    scale_ptr,
    row,
    is_there,
    is_seen,
    plane_rows,
    score_scale,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    IS_MASKED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Online softmax over one tile; scores and `top` are in units of log2.

    q (M, PAD_DIM); top, weight (M,) fp32; total (M, PAD_DIM) fp32; row int64, is_there (N,): the tile's cache
    rows; is_seen (M, N), looked at if IS_MASKED; plane_rows: cache rows of all keys, the values lie behind.
    Returns top, weight and total with the tile counted in.
    """
    width = tl.arange(0, PAD_DIM)
    mask = is_there[:, None]
    if HEAD_DIM < PAD_DIM:
        mask = mask & (width < HEAD_DIM)[None, :]
    key = tl.load(kv_ptr + row[:, None] * HEAD_DIM + width[None, :], mask=mask, other=0.0)
    scores = tl.dot(q, tl.trans(key.to(q.dtype)), input_precision="ieee")
    if IS_QUANTIZED:
        scores *= tl.load(scale_ptr + row, mask=is_there, other=0.0)[None, :]
    if SOFT_CAP > 0:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)): right at both ends, where exp is 0 or inf.
        power = tl.exp2(scores * (score_scale * (2 * LOG2E / SOFT_CAP)))
        scores = (1.0 - 2.0 / (1.0 + power)) * (SOFT_CAP * LOG2E)
    else:
        scores *= score_scale * LOG2E
    if IS_MASKED:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # A row that has seen nothing yet has no maximum; -inf minus -inf would be NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = tl.exp2(top - base)
    share = tl.exp2(scores - base[:, None])
    weight = weight * rescale + tl.sum(share, axis=1)
    row += plane_rows
    value = tl.load(kv_ptr + row[:, None] * HEAD_DIM + width[None, :], mask=mask, other=0.0)
    if IS_QUANTIZED:
        share *= tl.load(scale_ptr + row, mask=is_there, other=0.0)[None, :]
    total = tl.dot(
        share.to(q.dtype), value.to(q.dtype), total * rescale[:, None], input_precision="ieee"
    )
    return new_top, weight, total


def check_cache(
    q_TC: Tensor, kv: Tensor, scale: Tensor | None, *, num_heads: int
) -> tuple[int, int, int, int]:
    """(num_blocks, num_kv_heads, block_size, head_dim) of a cache that fits `q_TC`.

    Raises:
        ValueError: shapes, strides or dtypes do not fit together; says which argument.
    """
    if kv.ndim != 5 or kv.shape[0] != 2 or not kv.is_contiguous():
        raise ValueError(
            f"kv is {tuple(kv.shape)}, strides {kv.stride()}, not a contiguous "
            "(2, num_blocks, num_kv_heads, block_size, head_dim)"
        )
    _, num_blocks, num_kv_heads, block_size, head_dim = kv.shape
    is_quantized = dtype_name(kv.dtype) in QUANTIZED
    if not is_quantized and kv.dtype != q_TC.dtype:
        raise ValueError(f"kv is {kv.dtype}, q is {q_TC.dtype}: alike, or kv int8 or float8_e4m3fn")
    if (scale is not None) != is_quantized:
        raise ValueError(f"scale: a cache in {kv.dtype} has {'one' if is_quantized else 'none'}")
    if scale is not None and (
        scale.shape != kv.shape[:4] or scale.dtype != torch.float32 or not scale.is_contiguous()
    ):
        raise ValueError(
            f"scale is {tuple(scale.shape)} {scale.dtype}, not {tuple(kv.shape[:4])} fp32 contiguous"
        )
    if num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads is {num_heads}, not a multiple of kv's {num_kv_heads} heads")
    if head_dim % 16 or not 16 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}, not a multiple of 16 up to {MAX_HEAD_DIM}")
    if block_size & (block_size - 1):
        raise ValueError(f"block_size is {block_size}, not a power of two")
    if q_TC.ndim != 2 or q_TC.stride(1) != 1 or q_TC.shape[1] < num_heads * head_dim:
        raise ValueError(
            f"q is {tuple(q_TC.shape)}, strides {q_TC.stride()}, "
            f"not (T, {num_heads} * {head_dim} or more) with contiguous rows"
        )
    return num_blocks, num_kv_heads, block_size, head_dim


def check_output(out_TW: Tensor, q_TC: Tensor, width: int) -> None:
    """Raise ValueError unless `out_TW` is a (T, width) contiguous tensor like `q_TC`."""
    expected = (q_TC.shape[0], width)
    if out_TW.shape != expected or out_TW.dtype != q_TC.dtype or not out_TW.is_contiguous():
        raise ValueError(
            f"out is {tuple(out_TW.shape)} {out_TW.dtype}, strides {out_TW.stride()}, "
            f"not {expected} {q_TC.dtype} contiguous"
        )


def check_work(name: str, work_N4: Tensor) -> None:
    """Raise ValueError unless `work_N4` is a (N, 4) contiguous int32 tensor."""
    if (
        work_N4.ndim != 2
        or work_N4.shape[1] != 4
        or work_N4.dtype != torch.int32
        or not work_N4.is_contiguous()
    ):
        raise ValueError(f"{name} is {tuple(work_N4.shape)} {work_N4.dtype}, not (N, 4) int32")
