"""Weights of eight and four bits: how they are chosen from a checkpoint's, and what they stand for.

int8: one scale for each output, symmetric: w = q * scale, q in -127 .. 127.
int4: a scale and an offset for each group of 32 inputs of an output: w = q * scale + offset, q in 0 .. 15, both in
bfloat16: five bits a weight. Offsets make up for their half a bit: of normally distributed weights (bf16 scales,
ranges shrunk as below) the relative error is 7.4%, without offsets 8.3%, with groups of 64 8.4%; with heavier tails
they differ more.

N outputs, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

INT4_GROUP: Final = 32
_INT8_TOP: Final = 127
_INT4_TOP: Final = 15
# Shares of a group's range that are tried at either end: to cut off an extreme weight makes all others finer.
_SHRINKS: Final = (1.0, 0.92, 0.84)
# Weights at a time: the trials' intermediate results stay in cache.
_PIECE: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight, and what it lost."""

    q_NK: Tensor  # int8; int4: uint8 below 16
    scale_NG: Tensor  # fp32; int8: G = 1
    offset_NG: Tensor | None  # fp32; None: int8
    relative_error: float  # |dequantized - weight| / |weight|, Frobenius

    def dequantized(self) -> Tensor:
        """(N, K) fp32, each the exact value rounded once, as the kernel takes it."""
        if self.offset_NG is None:
            return self.q_NK.float() * self.scale_NG
        num_inputs = self.q_NK.shape[1]
        scale_NK, offset_NK = (
            part.double().repeat_interleave(INT4_GROUP, dim=1)[:, :num_inputs]
            for part in (self.scale_NG, self.offset_NG)
        )
        # A product of 4 and 8 bits plus 8 bits may need more than fp64 has only where it is far below the sum.
        return (self.q_NK.double() * scale_NK + offset_NK).float()


def quantize_int8(weight_NK: Tensor) -> QuantizedWeight:
    """Eight bits an input, one scale an output.

    Raises:
        ValueError: a weight is not finite.
    """
    pieces = []
    for piece in _pieces_of(weight_NK):
        scale = piece.abs().amax(1, keepdim=True) / _INT8_TOP
        q = (piece / _nonzero(scale)).round_().clamp_(-_INT8_TOP, _INT8_TOP)
        pieces.append((q.to(torch.int8), scale, _lost(q * scale, piece), _energy(piece)))
    q, scale, lost, energy = zip(*pieces, strict=True)
    return QuantizedWeight(torch.cat(q), torch.cat(scale), None, _ratio(sum(lost), sum(energy)))


def quantize_int4(weight_NK: Tensor) -> QuantizedWeight:
    """Four bits an input, scale and offset for each `INT4_GROUP` inputs, those of the least squared error tried.

    Raises:
        ValueError: a weight is not finite.
    """
    num_inputs = weight_NK.shape[1]
    pieces = []
    for piece in _pieces_of(weight_NK):
        # The last group is filled up with its last weight, which changes neither end of its range.
        missing = -num_inputs % INT4_GROUP
        filled = torch.cat((piece, piece[:, -1:].expand(-1, missing)), dim=1) if missing else piece
        groups = filled.view(piece.shape[0], -1, INT4_GROUP)
        scale, offset = _best_ranges(groups)
        q = ((groups - offset) / _nonzero(scale)).round_().clamp_(0, _INT4_TOP)
        value = (q * scale + offset).view(filled.shape)[:, :num_inputs]
        q = q.to(torch.uint8).view(filled.shape)[:, :num_inputs]
        pieces.append(
            (q, scale.squeeze(-1), offset.squeeze(-1), _lost(value, piece), _energy(piece))
        )
    q, scale, offset, lost, energy = zip(*pieces, strict=True)
    return QuantizedWeight(
        torch.cat(q).contiguous(),
        torch.cat(scale),
        torch.cat(offset),
        _ratio(sum(lost), sum(energy)),
    )


def _best_ranges(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset (rows, G, 1) of groups (rows, G, 32), of values that bfloat16 holds."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    best_error = torch.full_like(low, torch.inf)
    best_scale, best_offset = torch.zeros_like(low), torch.zeros_like(low)
    for low_share in _SHRINKS:
        offset = (low * low_share).to(torch.bfloat16).float()
        for high_share in _SHRINKS:
            scale = ((high * high_share - offset) / _INT4_TOP).to(torch.bfloat16).float()
            q = ((groups - offset) / _nonzero(scale)).round_().clamp_(0, _INT4_TOP)
            error = (q.mul_(scale).add_(offset).sub_(groups)).square_().sum(-1, keepdim=True)
            is_better = error < best_error
            best_scale = torch.where(is_better, scale, best_scale)
            best_offset = torch.where(is_better, offset, best_offset)
            best_error = torch.minimum(error, best_error)
    return best_scale, best_offset


def _pieces_of(weight_NK: Tensor) -> Iterator[Tensor]:
    rows = max(1, _PIECE // weight_NK.shape[1])
    for piece in weight_NK.split(rows):
        values = piece.float()
        if not bool(values.isfinite().all()):
            raise ValueError("a weight is not finite")
        yield values


def _nonzero(scale: Tensor) -> Tensor:
    """Where all weights are the same any scale will do."""
    return torch.where(scale == 0, 1.0, scale)


def _lost(value: Tensor, weight: Tensor) -> float:
    return float((value - weight).square().sum(dtype=torch.float64))


def _energy(weight: Tensor) -> float:
    return float(weight.square().sum(dtype=torch.float64))


def _ratio(lost: float, energy: float) -> float:
    return float((lost / energy) ** 0.5) if energy else 0.0
