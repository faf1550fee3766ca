"""Plain-torch references of the attention kernels: slow, obvious, and what they are compared to.

A cache is (2, num_blocks, kv heads, block_size, D): keys, then values.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """x * cos + swap(x) * sin, every operation rounded to the dtype of x.

    Shapes: T rows, H heads, D head_dim; swap exchanges the halves of a head, whose sign is in `sin_TD`.
    Args:
        x_THD: any float dtype.   cos_TD, sin_TD: (T, D), dtype of x.
    """
    low, high = x_THD.chunk(2, dim=-1)
    swapped = torch.cat((high, low), dim=-1)
    return x_THD * cos_TD[:, None] + swapped * sin_TD[:, None]


def quantize(x: Tensor, kv_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes like x in int8 or float8_e4m3fn, fp32 scale without the last dimension): x is code * scale.

    scale = amax / 127 or / 448; 0 for zeros, NaN where a number is not finite.
    """
    largest = _LARGEST[kv_dtype]
    wide = x.float()
    scale = wide.abs().amax(-1) / largest
    scale = torch.where(wide.isfinite().all(-1), scale, torch.nan)
    codes = wide / torch.where(scale == 0, 1.0, scale)[..., None]
    codes = codes.nan_to_num(nan=0.0).clamp(-largest, largest)
    return (codes.round() if kv_dtype == torch.int8 else codes).to(kv_dtype), scale


def rope_kv(
    qkv_TC: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    slot_T: Tensor,
    kv: Tensor,
    *,
    num_heads: int,
    scale: Tensor | None = None,
) -> None:
    """Rotate queries of rows with a slot in place; store their rotated keys, and values.

    Arguments as those of `rope_kv.rope_kv`.
    """
    _, _, num_kv_heads, block_size, head_dim = kv.shape
    heads_THD = qkv_TC.view(len(qkv_TC), num_heads + 2 * num_kv_heads, head_dim)
    rotated_THD = rotate(heads_THD, cos_TD.view(-1, head_dim), sin_TD.view(-1, head_dim))
    for row, slot in enumerate(slot_T.tolist()):
        if slot < 0:
            continue
        heads_THD[row, :num_heads] = rotated_THD[row, :num_heads]
        block, place = divmod(slot, block_size)
        key = rotated_THD[row, num_heads : num_heads + num_kv_heads]
        for plane, x in enumerate((key, heads_THD[row, num_heads + num_kv_heads :])):
            if scale is None:
                kv[plane, block, :, place] = x
            else:
                codes, steps = quantize(x, kv.dtype)
                kv[plane, block, :, place], scale[plane, block, :, place] = codes, steps


def paged_attention(
    q_TC: Tensor,
    kv: Tensor,
    tables: list[Tensor],
    positions: list[int],
    *,
    num_heads: int,
    scale: Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """softmax(q K^T / sqrt(D)) V in fp64, row by row: (T, H * D).

    Args:
        q_TC: (T, H * D or more), rotated.   tables, positions: of each row its block ids and its position, which is
            the last that it sees.
        scale: as the cache's dtype needs.   window: keys further back are not seen.
        soft_cap: scores become soft_cap * tanh(score / soft_cap).
    """
    _, _, num_kv_heads, block_size, head_dim = kv.shape
    fold = num_heads // num_kv_heads
    rows = []
    for q, table, own in zip(q_TC, tables, positions, strict=True):
        seen = torch.arange(max(0, own + 1 - window) if window else 0, own + 1)
        blocks, places = table.long()[seen // block_size], seen % block_size
        keys_values = kv[:, blocks, :, places].double()  # (S, 2, G, D)
        if scale is not None:
            keys_values = keys_values * scale[:, blocks, :, places].double()[..., None]
        key, value = keys_values.repeat_interleave(fold, dim=2).unbind(1)
        heads = q[: num_heads * head_dim].double().view(num_heads, head_dim)
        score = torch.einsum("hd,shd->hs", heads, key) * head_dim**-0.5
        if soft_cap:
            score = soft_cap * (score / soft_cap).tanh()
        rows.append(torch.einsum("hs,shd->hd", score.softmax(-1), value).reshape(-1))
    return torch.stack(rows)


def copy_blocks(kv: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy blocks of both planes; every source is read as it was before."""
    kv[:, target] = kv[:, source].clone()
