"""Rotary embedding of a step's queries and keys, and keys and values into the paged cache, in one launch.

A program takes TOKENS tokens and HEADS of their heads: queries are rotated in place; keys are rotated on their way into
the cache and left as they are in the projection; values are copied. Roundings are those of `RotaryTable` and
transformers: both products in the model's dtype, then their sum.
Quantized caches: symmetric, one fp32 scale for every (slot, head): amax / 127 in int8, amax / 448 in fp8 (e4m3). A
head that is not finite gets a NaN scale, so that quantizing cannot make it look healthy.
Memory-bound: every number is read and written once. A row's bits depend on that row only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.grid import ceil_div, next_power_of_2
from loraplex_kernels.paged_tile import QUANTIZED, check_cache
from loraplex_kernels.plans import Plan, PlanTable
from loraplex_kernels.support import KvDtype, Support, dtype_size, triton_type

KERNEL = "rope_kv"


@triton.jit
def _store_heads(
    low,
    high,
    kv_ptr,
    scale_ptr,
    cache_row,
    half,
    is_head,
    mask,
    HALF_DIM: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
):
    """Heads (N, half of D) twice, in the model's dtype, to cache rows (N,); LARGEST 0: not quantized."""
    at = kv_ptr + cache_row[:, None] * (2 * HALF_DIM) + half[None, :]
    if LARGEST == 0:
        tl.store(at, low, mask=mask)
        tl.store(at + HALF_DIM, high, mask=mask)
    else:
        low = low.to(tl.float32)
        high = high.to(tl.float32)
        highest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)
        # x - x is NaN where x is not finite; a maximum may lose a NaN, this sum does not.
        fault = tl.sum((low - low) + (high - high), axis=1)
        step = highest / LARGEST + fault
        # Of an all-zero head; a product with 1 / step would round twice.
        divisor = tl.where(step == 0.0, 1.0, step)[:, None]
        low = tl.minimum(tl.maximum(low / divisor, -LARGEST), LARGEST)
        high = tl.minimum(tl.maximum(high / divisor, -LARGEST), LARGEST)
        if IS_INTEGER:
            # Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even.
            low = (low + 12582912.0) - 12582912.0
            high = (high + 12582912.0) - 12582912.0
        tl.store(at, low.to(kv_ptr.dtype.element_ty), mask=mask)
        tl.store(at + HALF_DIM, high.to(kv_ptr.dtype.element_ty), mask=mask)
        tl.store(scale_ptr + cache_row, step, mask=is_head)


# A step's row count gets no variant of the kernel of its own.
@triton.jit(do_not_specialize=["num_rows"])
def _rope_kv(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    kv_ptr,
    scale_ptr,
    qkv_stride,
    plane_rows,
    num_rows,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF_DIM: tl.constexpr,
    PAD_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
):
    part = tl.program_id(1)
    line = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + line // HEADS
    slot = tl.load(slot_ptr + token, mask=token < num_rows, other=-1)
    # Parts: the query heads, then the key heads, then the value heads; none has heads of two kinds.
    q_parts: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_parts: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    is_query = part < q_parts
    is_value = part >= q_parts + kv_parts
    kind_part = part - tl.where(is_value, q_parts + kv_parts, tl.where(is_query, 0, q_parts))
    head = kind_part * HEADS + line % HEADS
    is_head = (head < tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)) & (slot >= 0)
    before = tl.where(is_value, NUM_HEADS + NUM_KV_HEADS, tl.where(is_query, 0, NUM_HEADS))
    half = tl.arange(0, PAD_HALF)
    mask = is_head[:, None] & (half < HALF_DIM)[None, :]
    at = qkv_ptr + (token * qkv_stride + (before + head) * (2 * HALF_DIM))[:, None] + half[None, :]
    low = tl.load(at, mask=mask, other=0.0)
    high = tl.load(at + HALF_DIM, mask=mask, other=0.0)
    cache_row = ((slot // BLOCK_SIZE).to(tl.int64) * NUM_KV_HEADS + head) * BLOCK_SIZE
    cache_row += slot % BLOCK_SIZE
    if is_value:
        cache_row += plane_rows
    else:
        dtype = qkv_ptr.dtype.element_ty
        # The halves of a table are alike, but for the sign of sin: the upper ones are read.
        table_at = token[:, None] * (2 * HALF_DIM) + HALF_DIM + half[None, :]
        cos = tl.load(cos_ptr + table_at, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + table_at, mask=mask, other=0.0).to(tl.float32)
        x = low.to(tl.float32)
        y = high.to(tl.float32)
        low = (x * cos).to(dtype).to(tl.float32)
        low = (low - (y * sin).to(dtype).to(tl.float32)).to(dtype)
        high = (y * cos).to(dtype).to(tl.float32)
        high = (high + (x * sin).to(dtype).to(tl.float32)).to(dtype)
    if is_query:
        tl.store(at, low, mask=mask)
        tl.store(at + HALF_DIM, high, mask=mask)
    else:
        _store_heads(
            low,
            high,
            kv_ptr,
            scale_ptr,
            cache_row,
            half,
            is_head,
            mask,
            HALF_DIM,
            LARGEST,
            IS_INTEGER,
        )


def rope_kv(
    qkv_TC: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    slot_T: Tensor,
    kv: Tensor,
    plan: Plan,
    *,
    num_heads: int,
    scale: Tensor | None = None,
) -> None:
    """Rotate queries in place; store rotated keys, and values, where `slot_T` says.

    Shapes: T rows of the step, H query heads, G kv heads, D head_dim; C = (H + 2 G) * D.
    Args:
        qkv_TC: (T, C) bf16, fp16 or fp32, rows contiguous: query heads, key heads, value heads. Only the
            queries are changed.
        cos_TD, sin_TD: (T, D) or (T, 1, D) contiguous, dtype of qkv; of
            `RotaryTable.gather`: both halves of cos alike, those of sin of opposite sign, the lower negated.
        slot_T: (T,) int32: block * block_size + place in the block; -1: the row is left alone. No slot twice.
        kv: (2, blocks, G, block_size, D), dtype of qkv, int8 or float8_e4m3fn, contiguous.
        scale: (2, blocks, G, block_size) fp32 for int8 and fp8.
    Raises:
        ValueError: an argument differs from the above.
    Reference: `reference_attention.rope_kv`.
    """
    num_blocks, num_kv_heads, block_size, head_dim = check_cache(
        qkv_TC, kv, scale, num_heads=num_heads
    )
    num_rows = qkv_TC.shape[0]
    if qkv_TC.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim:
        raise ValueError(
            f"qkv is {qkv_TC.shape[1]} wide, not ({num_heads} + 2 * {num_kv_heads}) * {head_dim}"
        )
    for name, angle in (("cos", cos_TD), ("sin", sin_TD)):
        if (
            angle.numel() != num_rows * head_dim
            or angle.shape[0] != num_rows
            or angle.dtype != qkv_TC.dtype
            or not angle.is_contiguous()
        ):
            raise ValueError(
                f"{name} is {tuple(angle.shape)} {angle.dtype}, "
                f"not ({num_rows}, {head_dim}) {qkv_TC.dtype} contiguous"
            )
    if slot_T.shape != (num_rows,) or slot_T.dtype != torch.int32 or not slot_T.is_contiguous():
        raise ValueError(f"slot is {tuple(slot_T.shape)} {slot_T.dtype}, not ({num_rows},) int32")
    if not num_rows:
        return
    constants = _constants(
        plan,
        kv.dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
    )
    parts = ceil_div(num_heads, constants["HEADS"]) + 2 * ceil_div(num_kv_heads, constants["HEADS"])
    _rope_kv[(ceil_div(num_rows, constants["TOKENS"]), parts)](
        qkv_TC,
        cos_TD,
        sin_TD,
        slot_T,
        kv,
        kv if scale is None else scale,
        qkv_TC.stride(0),
        num_blocks * num_kv_heads * block_size,
        num_rows,
        **constants,
        **_options(plan),
    )


def _constants(
    plan: Plan,
    kv_dtype: torch.dtype,
    *,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
) -> dict[str, int]:
    largest = {torch.int8: 127, torch.float8_e4m3fn: 448}.get(kv_dtype, 0)
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HALF_DIM": head_dim // 2,
        "PAD_HALF": next_power_of_2(head_dim // 2),
        "BLOCK_SIZE": block_size,
        "TOKENS": plan.config["TOKENS"],
        "HEADS": plan.config["HEADS"],
        "LARGEST": largest,
        "IS_INTEGER": largest == 127,
    }


def _options(plan: Plan) -> dict[str, int | bool]:
    """Without fused multiply-add: it would round fp32 products once where eager torch does twice."""
    return {**plan.options(), "enable_fp_fusion": False}


# Llama-3.1-8B's heads.
_HEADS, _KV_HEADS, _DIM, _BLOCK_SIZE = 32, 8, 128, 16


def aot_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    """Every entry into caches of bf16; the last one into int8 and, where there is fp8, that."""
    kv_dtypes: dict[KvDtype, torch.dtype] = {
        "bf16": torch.bfloat16,
        "int8": torch.int8,
        "fp8": torch.float8_e4m3fn,
    }
    for entry in table.entries(KERNEL):
        rows = entry.when.max_tokens or 8192
        for kv_dtype, torch_dtype in kv_dtypes.items():
            if not support.allows(kv_dtype) or (kv_dtype in QUANTIZED and entry.when.max_tokens):
                continue
            scale_bytes = 4 if kv_dtype in QUANTIZED else 0
            kv_pointer = f"*{triton_type(kv_dtype)}"
            yield AotCase(
                kernel=KERNEL,
                fn=_rope_kv,
                signature={
                    "qkv_ptr": "*bf16",
                    "cos_ptr": "*bf16",
                    "sin_ptr": "*bf16",
                    "slot_ptr": "*i32",
                    "kv_ptr": kv_pointer,
                    "scale_ptr": "*fp32" if scale_bytes else kv_pointer,
                    "qkv_stride": "i32",
                    "plane_rows": "i32",
                    "num_rows": "i32",
                },
                constexprs=_constants(
                    entry.plan,
                    torch_dtype,
                    num_heads=_HEADS,
                    num_kv_heads=_KV_HEADS,
                    block_size=_BLOCK_SIZE,
                    head_dim=_DIM,
                ),
                divisible_by_16=(
                    *("qkv_ptr", "cos_ptr", "sin_ptr", "slot_ptr", "kv_ptr", "scale_ptr"),
                    *("qkv_stride", "plane_rows"),
                ),
                plan=entry.plan,
                arch=support.name,
                dtype="bf16",
                needs=None,
                bytes_moved=rows
                * (
                    2 * (2 * _HEADS + 2 * _KV_HEADS + 2) * _DIM
                    + 2 * _KV_HEADS * (_DIM * dtype_size(kv_dtype) + scale_bytes)
                ),
                flops=rows * 3 * (_HEADS + _KV_HEADS) * _DIM,
                shape=f"T={rows} H={_HEADS}/{_KV_HEADS} D={_DIM} kv={kv_dtype}",
            )
