"""Sampling on the device: logits to tokens, one row as the other rows never were there.

    sample_cutoff   rows that filter (top-k, top-p, min-p): where the kept ids begin     one program a row
    sample_draw     fp32 scores with noise; the best candidates of each chunk of ids     rows x chunks
    sample_pick     the candidates again in fp64; the token                              one program a row

Reference: loraplex_engine.sampling.sampler, the host's sampler, which has the same integers of noise, the same
filters and the same ties. Tokens of both are equal as long as the sums of probability at top-p's border are
further apart than fp32 rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_kernels import sample_cutoff, sample_draw
from loraplex_kernels.plans import Plan, PlanTable
from loraplex_kernels.sample_rows import NUM_FIELDS
from loraplex_kernels.support import dtype_name

# Integer probabilities of so many ids fit in 63 bits.
MAX_VOCAB = 2**20


@dataclass(frozen=True, slots=True)
class Drawn:
    """One answer per row, on the device."""

    token_R: Tensor  # (R,) int32; 0 where there is none
    status_R: Tensor  # (R,) int32: sample_draw.FINE, NOT_FINITE or STUCK
    logprob_R: Tensor | None  # (R,) fp32, natural, unfiltered, temperature 1; None: not asked for


def sample(
    logits_RV: Tensor,
    rows_RF: Tensor,
    plans: PlanTable,
    *,
    is_filtered: bool,
    has_bans: bool = False,
    has_logprobs: bool = False,
    out_2R: Tensor | None = None,
) -> Drawn:
    """Draw one token for each row.

    Shapes: R rows, V vocabulary ids (at most MAX_VOCAB), F = sample_rows.NUM_FIELDS.
    Args:
        logits_RV: (R, V) bf16, fp16 or fp32, rows contiguous; not changed.
        rows_RF: (R, F) int64 contiguous, from `sample_rows.pack_rows`, on the device.
        is_filtered: what `pack_rows` returned; False: top-k, top-p and min-p are not looked at.
        has_bans: minus infinity bans an id. Without, a row that holds one is not finite.
        out_2R: (2, R) int32 contiguous, for tokens and status; None: a new one.
    Raises:
        ValueError: a shape, stride or dtype differs from the above.
    """
    dtype = dtype_name(logits_RV.dtype)
    if logits_RV.ndim != 2 or not logits_RV.is_floating_point() or logits_RV.stride(1) != 1:
        raise ValueError(
            f"logits is {tuple(logits_RV.shape)} {logits_RV.dtype}, strides {logits_RV.stride()}"
        )
    num_rows, size = logits_RV.shape
    if not 1 <= size <= MAX_VOCAB:
        raise ValueError(f"logits has {size} ids: 1 to {MAX_VOCAB} is supported")
    _check("rows", rows_RF, (num_rows, NUM_FIELDS), torch.int64, logits_RV.device)
    device, int32 = logits_RV.device, torch.int32
    if out_2R is None:
        out_2R = torch.empty((2, num_rows), dtype=int32, device=device)
    _check("out", out_2R, (2, num_rows), int32, device)
    token_R, status_R = out_2R.unbind(0)
    logprob_R = torch.empty(num_rows if has_logprobs else 0, dtype=torch.float32, device=device)
    if num_rows:

        def plan_of(kernel: str) -> Plan:
            return plans.choose(kernel, phase="decode", tokens=num_rows, n=size, dtype=dtype)

        cutoffs = None
        if is_filtered:
            cutoffs = (
                torch.empty(num_rows, dtype=int32, device=device),
                torch.empty(num_rows, dtype=int32, device=device),
            )
            sample_cutoff.sample_cutoff(logits_RV, rows_RF, *cutoffs, plan_of(sample_cutoff.KERNEL))
        found = sample_draw.sample_draw(
            logits_RV,
            rows_RF,
            cutoffs,
            plan_of(sample_draw.KERNEL),
            has_bans=has_bans,
            has_logprobs=has_logprobs,
        )
        sample_draw.sample_pick(
            logits_RV,
            rows_RF,
            found,
            token_R,
            status_R,
            logprob_R,
            plan_of(sample_draw.PICK_KERNEL),
            has_logprobs=has_logprobs,
        )
    return Drawn(token_R, status_R, logprob_R if has_logprobs else None)


def _check(
    name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if (
        value.shape != shape
        or value.dtype != dtype
        or not value.is_contiguous()
        or value.device != device
    ):
        raise ValueError(
            f"{name} is {tuple(value.shape)} {value.dtype} on {value.device}, "
            f"not contiguous {shape} {dtype} on {device}"
        )
