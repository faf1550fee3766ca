"""The decoder's small operations behind one interface: norms, residual additions, the gated activation.

`TorchOps` is plain torch, in the order of operations of transformers' Llama: what a CPU without a C compiler
takes. `NativeOps` (native_ops.py) runs our C kernels, `TritonOps` (triton_ops.py) our Triton kernels. The decoder
knows no device.

T rows of a step, R of them that are sampled, H hidden size, I inner width of the MLP.
"""

from __future__ import annotations

from typing import Protocol

import torch
from loraplex_kernels.plans import Phase
from torch import Tensor
from torch.nn import functional

from loraplex_engine.model.linear import ROW_MULTIPLE

# Elementwise kernels work on vectors of at most this many numbers and finish the rest with scalar code
# whose exp differs in the last bit; torch hands a thread at least _GRAIN numbers.
_VECTOR = 32
_GRAIN = 32_768


class ModelOps(Protocol):
    """What the decoder computes between its linears and attention; obeys the row rule."""

    name: str

    def rows_for(self, num_tokens: int, inner_width: int) -> int:
        """The row count to pad a step of `num_tokens` to, so that no row's bits depend on it."""
        ...

    def head_rows_for(self, num_rows: int) -> int:
        """The row count to pad `num_rows` sampled rows to."""
        ...

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight; in fp32 up to the multiplication by the weight."""
        ...

    def rms_norm_of(self, x_TH: Tensor, row_R: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """`rms_norm` of the rows `row_R` (int64, may repeat) alone: (R, H)."""
        ...

    def add_rms_norm(self, hidden_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """`hidden_TH += y_TH` in place, then the norm of the sum."""
        ...

    def gated(self, gate_up_TI: Tensor, phase: Phase) -> Tensor:
        """silu(gate) * up for a merged (T, 2 * I) projection: (T, I)."""
        ...


class TorchOps:
    """Plain torch on a CPU, bit for bit as transformers computes it."""

    name = "torch"

    def rows_for(self, num_tokens: int, inner_width: int) -> int:
        """See `padded_rows`."""
        return padded_rows(num_tokens, inner_width, torch.get_num_threads())

    def head_rows_for(self, num_rows: int) -> int:
        """The next multiple that linears ask for."""
        return num_rows + -num_rows % ROW_MULTIPLE

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """See `ModelOps.rms_norm`."""
        x = x_TH.float()
        scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        return (x * scale).to(x_TH.dtype).mul_(weight_H)

    def rms_norm_of(self, x_TH: Tensor, row_R: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """See `ModelOps.rms_norm_of`."""
        return self.rms_norm(x_TH.index_select(0, row_R), weight_H, eps)

    def add_rms_norm(self, hidden_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """See `ModelOps.add_rms_norm`."""
        hidden_TH += y_TH
        return self.rms_norm(hidden_TH, weight_H, eps)

    def gated(self, gate_up_TI: Tensor, phase: Phase) -> Tensor:
        """See `ModelOps.gated`."""
        gate, up = gate_up_TI.chunk(2, dim=-1)
        width = gate.shape[1]
        missing = -width % _VECTOR
        if missing:
            gate = functional.pad(gate, (0, missing))
            return functional.silu(gate)[:, :width] * up
        return functional.silu(gate).mul_(up)


def padded_rows(num_tokens: int, width: int, num_threads: int) -> int:
    """Smallest multiple of ROW_MULTIPLE at which every thread's share of (rows, width) ends on a vector.

    A share that ends inside a vector is finished by scalar code, and which row that hits would depend
    on the number of rows.
    """
    rows = num_tokens + -num_tokens % ROW_MULTIPLE
    width += -width % _VECTOR
    while True:
        numbers = rows * width
        threads = min(num_threads, -(-numbers // _GRAIN))
        if threads <= 1 or -(-numbers // threads) % _VECTOR == 0:
            return rows
        rows += ROW_MULTIPLE
