"""Plain-torch references of every kernel: slow, obvious, and what all others are compared to."""

from __future__ import annotations

import torch
from torch import Tensor


def lora_shrink(x_TK: Tensor, a_LRK: Tensor, slot_T: Tensor) -> Tensor:
    """h[t] = a[slot[t]] @ x[t]; zeros where slot[t] == -1 (no adapter).

    Shapes: T tokens, K inputs, L adapter slots, R rank (padded with zeros to the largest).
    Args:
        x_TK: (T, K) bf16, fp16 or fp32.   a_LRK: (L, R, K), dtype of x.
        slot_T: (T,) int32 in [-1, L).
    Returns:
        (T, R) fp32: the sum over K is kept in fp32 so that `lora_expand` rounds only once.
    Raises:
        ValueError: a shape or dtype differs from the above.
    Source: Punica SGMV, arXiv 2310.18547.
    """
    _check_slots(slot_T, num_tokens=x_TK.shape[0], num_slots=a_LRK.shape[0])
    if a_LRK.shape[2] != x_TK.shape[1] or a_LRK.dtype != x_TK.dtype:
        raise ValueError(f"a is {a_LRK.shape} {a_LRK.dtype}, x is {x_TK.shape} {x_TK.dtype}")
    h_TR = torch.zeros(x_TK.shape[0], a_LRK.shape[1], dtype=torch.float32)
    for token, slot in enumerate(slot_T.tolist()):
        # A token is computed from its own adapter alone: no mask is ever multiplied in, because a
        # neighbour's overflow times zero is NaN.
        if slot >= 0:
            h_TR[token] = a_LRK[slot].float() @ x_TK[token].float()
    return h_TR


def lora_expand(
    y_TN: Tensor, h_TR: Tensor, b_LNR: Tensor, slot_T: Tensor, scale_L: Tensor
) -> Tensor:
    """y[t] + scale[slot[t]] * (b[slot[t]] @ h[t]), rounded once; y[t] itself where slot[t] == -1.

    Shapes: T tokens, N outputs, L adapter slots, R rank (padded with zeros to the largest).
    Args:
        y_TN: (T, N) bf16, fp16 or fp32; not changed.   h_TR: (T, R) fp32, from `lora_shrink`.
        b_LNR: (L, N, R), any float dtype.   slot_T: (T,) int32 in [-1, L).
        scale_L: (L,) fp32: alpha / r, or alpha / sqrt(r).
    Returns:
        (T, N), dtype of y.
    Raises:
        ValueError: a shape or dtype differs from the above.
    Source: Punica SGMV, arXiv 2310.18547.
    """
    _check_slots(slot_T, num_tokens=y_TN.shape[0], num_slots=b_LNR.shape[0])
    if b_LNR.shape[1:] != (y_TN.shape[1], h_TR.shape[1]) or h_TR.dtype != torch.float32:
        raise ValueError(f"b is {b_LNR.shape}, y is {y_TN.shape}, h is {h_TR.shape} {h_TR.dtype}")
    result_TN = y_TN.clone()
    for token, slot in enumerate(slot_T.tolist()):
        if slot >= 0:
            delta_N = b_LNR[slot].float() @ (h_TR[token] * scale_L[slot].float())
            result_TN[token] = (y_TN[token].float() + delta_N).to(y_TN.dtype)
    return result_TN


def lora_embed_shrink(token_T: Tensor, a_LRV: Tensor, slot_T: Tensor) -> Tensor:
    """h[t] = a[slot[t]][:, token[t]]: `lora_shrink` of a one-hot x; zeros where slot[t] == -1.

    Shapes: T tokens, V vocabulary, L adapter slots, R rank (padded with zeros to the largest).
    Args:
        token_T: (T,) int64 in [0, V).   a_LRV: (L, R, V), any float dtype.
        slot_T: (T,) int32 in [-1, L).
    Returns:
        (T, R) fp32.
    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    _check_slots(slot_T, num_tokens=token_T.shape[0], num_slots=a_LRV.shape[0])
    if token_T.dtype != torch.int64:
        raise ValueError(f"token is {token_T.dtype}, not int64")
    h_TR = torch.zeros(token_T.shape[0], a_LRV.shape[1], dtype=torch.float32)
    for row, (token, slot) in enumerate(zip(token_T.tolist(), slot_T.tolist(), strict=True)):
        if slot >= 0:
            h_TR[row] = a_LRV[slot, :, token].float()
    return h_TR


def _check_slots(slot_T: Tensor, *, num_tokens: int, num_slots: int) -> None:
    if slot_T.shape != (num_tokens,) or slot_T.dtype != torch.int32:
        raise ValueError(f"slot is {slot_T.shape} {slot_T.dtype}, not ({num_tokens},) int32")
    if num_tokens and not -1 <= int(slot_T.min()) <= int(slot_T.max()) < num_slots:
        raise ValueError(f"slots must lie in [-1, {num_slots})")


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight; rounded before and after the multiplication by the weight.

    Shapes: T rows, H width.
    Args:
        x_TH: (T, H) bf16, fp16 or fp32.   weight_H: (H,), dtype of x.
    Returns:
        (T, H), dtype of x.
    Source: Zhang and Sennrich, arXiv 1910.07467; rounding as in transformers' LlamaRMSNorm.
    """
    x = x_TH.double()
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed.to(x_TH.dtype).double() * weight_H.double()).to(x_TH.dtype)


def head_norm(
    qkv_TC: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    eps: float,
    *,
    num_q_heads: int,
    num_kv_heads: int,
) -> Tensor:
    """`rms_norm` of each of the first heads with q's weight, of each of the next with k's; the rest as it is.

    Shapes: T rows, C columns, D head width.
    Args:
        qkv_TC: (T, C) bf16, fp16 or fp32; not changed.   q_weight_D, k_weight_D: (D,), dtype of qkv.
    Returns:
        (T, C), dtype of qkv.
    """
    num_tokens, head_dim = qkv_TC.shape[0], q_weight_D.shape[0]
    result_TC = qkv_TC.clone()
    for head in range(num_q_heads + num_kv_heads):
        columns = slice(head * head_dim, (head + 1) * head_dim)
        weight_D = q_weight_D if head < num_q_heads else k_weight_D
        result_TC[:, columns] = rms_norm(qkv_TC[:, columns], weight_D, eps).view(num_tokens, -1)
    return result_TC


def gated(gate_up_TI: Tensor, activation: str) -> Tensor:
    """act(gate) * up, rounded after act and after the product.

    Shapes: T rows, I inner width.
    Args:
        gate_up_TI: (T, 2 * I) bf16, fp16 or fp32, gate first.   activation: "silu" or "gelu_tanh".
    Returns:
        (T, I), dtype of gate_up.
    """
    gate, up = gate_up_TI.double().chunk(2, dim=-1)
    if activation == "silu":
        activated = gate * torch.sigmoid(gate)
    else:
        activated = torch.nn.functional.gelu(gate, approximate="tanh")
    return (activated.to(gate_up_TI.dtype).double() * up).to(gate_up_TI.dtype)


def gemm(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """x W^T + b, rounded once.

    Shapes: M rows, K inputs, N outputs.
    Args:
        x_MK: (M, K) bf16, fp16 or fp32.   weight_NK: (N, K), bias_N: (N,) or None, dtype of x.
    Returns:
        (M, N), dtype of x.
    """
    y_MN = x_MK.double() @ weight_NK.double().T
    return (y_MN if bias_N is None else y_MN + bias_N.double()).to(x_MK.dtype)
