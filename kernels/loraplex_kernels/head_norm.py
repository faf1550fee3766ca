"""RMSNorm of every query and key head on its own, in place in the merged qkv rows (Qwen3, Gemma 3).

One program normalises BLOCK_HEADS heads of one token; a head's sum stays within it, so a row's bits depend on that
row only, in both columns and every phase. Rounding as in `rms_norm`.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.grid import ceil_div, next_power_of_2
from loraplex_kernels.plans import Plan, PlanTable
from loraplex_kernels.support import Support, dtype_name, dtype_size, triton_type

KERNEL = "head_norm"


@triton.jit
def _head_norm(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    qkv_stride,
    num_q_heads,
    num_heads,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, BLOCK_D)
    mask = (head < num_heads)[:, None] & (d < HEAD_DIM)[None, :]
    at = qkv_ptr + row * qkv_stride + head[:, None] * HEAD_DIM + d[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
    q_weight = tl.load(q_weight_ptr + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
    weight = tl.where((head < num_q_heads)[:, None], q_weight[None, :], k_weight[None, :])
    normed = (x * scale[:, None]).to(qkv_ptr.dtype.element_ty).to(tl.float32)
    tl.store(at, (normed * weight).to(qkv_ptr.dtype.element_ty), mask=mask)


def head_norm(
    qkv_TC: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    eps: float,
    plan: Plan,
    *,
    num_q_heads: int,
    num_kv_heads: int,
) -> None:
    """Normalise the first `num_q_heads` heads with q's weight and the next `num_kv_heads` with k's.

    Shapes: T rows, C columns (at least (num_q_heads + num_kv_heads) * D; the rest, v, stays), D head width.
    Args:
        qkv_TC: (T, C) bf16, fp16 or fp32, rows contiguous; changed in place.
        q_weight_D, k_weight_D: (D,) contiguous, dtype of qkv.
    Raises:
        ValueError: a shape, stride or dtype differs from the above.
    Reference: `reference.head_norm`.
    """
    dtype_name(qkv_TC.dtype)
    if qkv_TC.ndim != 2 or qkv_TC.stride(1) != 1 or not qkv_TC.is_floating_point():
        raise ValueError(f"qkv is {tuple(qkv_TC.shape)} {qkv_TC.dtype}, strides {qkv_TC.stride()}")
    head_dim, num_heads = q_weight_D.shape[-1], num_q_heads + num_kv_heads
    for name, weight in (("q_weight", q_weight_D), ("k_weight", k_weight_D)):
        if (
            weight.shape != (head_dim,)
            or weight.dtype != qkv_TC.dtype
            or not weight.is_contiguous()
        ):
            raise ValueError(
                f"{name} is {tuple(weight.shape)} {weight.dtype}, not ({head_dim},) {qkv_TC.dtype}"
            )
    if num_q_heads < 1 or num_kv_heads < 1 or num_heads * head_dim > qkv_TC.shape[1]:
        raise ValueError(
            f"{num_q_heads} + {num_kv_heads} heads of {head_dim} do not fit in qkv's "
            f"{qkv_TC.shape[1]} columns"
        )
    if qkv_TC.shape[0]:
        grid = (qkv_TC.shape[0], ceil_div(num_heads, plan.config["BLOCK_HEADS"]))
        _head_norm[grid](
            qkv_TC,
            q_weight_D,
            k_weight_D,
            qkv_TC.stride(0),
            num_q_heads,
            num_heads,
            eps,
            **_constants(head_dim),
            **plan.launch(),
        )


def aot_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    """Every entry in bf16 at Qwen3-8B's heads."""
    for entry in table.entries(KERNEL):
        dtype, rows, head_dim, num_q_heads, num_heads = "bf16", 256, 128, 32, 40
        pointer = f"*{triton_type(dtype)}"
        yield AotCase(
            kernel=KERNEL,
            fn=_head_norm,
            signature={
                "qkv_ptr": pointer,
                "q_weight_ptr": pointer,
                "k_weight_ptr": pointer,
                "qkv_stride": "i32",
                "num_q_heads": "i32",
                "num_heads": "i32",
                "eps": "fp32",
            },
            constexprs={**_constants(head_dim), **entry.plan.config},
            divisible_by_16=("qkv_ptr", "q_weight_ptr", "k_weight_ptr", "qkv_stride"),
            plan=entry.plan,
            arch=support.name,
            dtype=dtype,
            needs=None,
            bytes_moved=2 * rows * num_heads * head_dim * dtype_size(dtype),
            flops=rows * num_heads * head_dim * 5,
            shape=f"T={rows} H={num_q_heads}+{num_heads - num_q_heads} D={head_dim}",
        )


def _constants(head_dim: int) -> dict[str, int]:
    return {"HEAD_DIM": head_dim, "BLOCK_D": next_power_of_2(head_dim)}
