"""`ModelOps` and the invariant linear on our Triton kernels: on a GPU, or on a CPU in Triton's interpreter.

Every row is a program's own, so nothing needs padded rows. Launch plans come from the table of the device's
architecture, in the engine's column; they are looked up per call, which costs microseconds while eager and
nothing in a recorded graph.
"""

from __future__ import annotations

from typing import Final

import structlog
import torch
from loraplex_kernels.gated import gated
from loraplex_kernels.gemm import gemm
from loraplex_kernels.plans import Phase, PlanTable
from loraplex_kernels.rms_norm import rms_norm
from loraplex_kernels.support import dtype_name
from torch import Tensor

log = structlog.get_logger(__name__)


class TritonOps:
    """The kernels rms_norm and gated."""

    name = "triton"

    def __init__(self, plans: PlanTable) -> None:
        self._plans = plans

    def rows_for(self, num_tokens: int, inner_width: int) -> int:
        """As many as there are."""
        return num_tokens

    def head_rows_for(self, num_rows: int) -> int:
        """As many as there are."""
        return num_rows

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """See `ModelOps.rms_norm`."""
        plan = self._plans.choose("rms_norm", phase="decode", tokens=x_TH.shape[0], k=x_TH.shape[1])
        return rms_norm(x_TH, weight_H, eps, plan)

    def rms_norm_of(self, x_TH: Tensor, row_R: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """See `ModelOps.rms_norm_of`."""
        return self.rms_norm(x_TH.index_select(0, row_R), weight_H, eps)

    def add_rms_norm(self, hidden_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """See `ModelOps.add_rms_norm`."""
        plan = self._plans.choose("rms_norm", phase="decode", tokens=y_TH.shape[0], k=y_TH.shape[1])
        return rms_norm(y_TH, weight_H, eps, plan, residual_TH=hidden_TH)

    def gated(self, gate_up_TI: Tensor, phase: Phase) -> Tensor:
        """See `ModelOps.gated`."""
        plan = self._plans.choose(
            "gated", phase=phase, tokens=gate_up_TI.shape[0], n=gate_up_TI.shape[1] // 2
        )
        return gated(gate_up_TI, "silu", plan)


class _GemmLinear:
    # Taken whatever the step's phase; None: the step's.
    only_phase: Phase | None = None

    def __init__(self, plans: PlanTable, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self.out_features, self.in_features = weight_NK.shape
        self._plans = plans
        self._weight = weight_NK.contiguous()
        self._bias = bias_N
        self._dtype = dtype_name(weight_NK.dtype)

    def __call__(self, x_MK: Tensor, phase: Phase = "prefill") -> Tensor:
        plan = self._plans.choose(
            "gemm",
            phase=self.only_phase or phase,
            tokens=x_MK.shape[0],
            k=self.in_features,
            n=self.out_features,
            dtype=self._dtype,
        )
        return gemm(x_MK, self._weight, self._bias, plan)


class GemmMethod:
    """Our own GEMM, whose sums have one order: a row's bits do not depend on the number of rows.

    Nor on whether somebody beside it is in prefill: the plans of the two phases are meant to sum alike, which
    is tried once per shape, and where the device does not, decoding's serves both.
    """

    name = "triton"
    row_multiple = 1

    def __init__(self, plans: PlanTable) -> None:
        self._plans = plans
        self._only_phase: dict[tuple[int, int, bool], Phase | None] = {}

    def pack_head(self, weight_NK: Tensor) -> _GemmLinear:
        """See `LinearMethod.pack_head`."""
        return self.pack(weight_NK, None)

    def pack(self, weight_NK: Tensor, bias_N: Tensor | None) -> _GemmLinear:
        """See `LinearMethod.pack`."""
        linear = _GemmLinear(self._plans, weight_NK, bias_N)
        shape = (linear.out_features, linear.in_features, bias_N is not None)
        if shape not in self._only_phase:
            is_alike = _do_phases_agree(linear, weight_NK)
            if not is_alike:
                log.warning(
                    "gemm_phases_differ",
                    outputs=shape[0],
                    inputs=shape[1],
                    effect="prefill takes decoding's launch plan and is slower",
                )
            self._only_phase[shape] = None if is_alike else "decode"
        linear.only_phase = self._only_phase[shape]
        return linear


def _do_phases_agree(linear: _GemmLinear, weight_NK: Tensor) -> bool:
    """Whether all bits of some random rows' outputs are the same under the plans of either phase."""
    generator = torch.Generator().manual_seed(0)
    x_MK = torch.randn(_TRIAL_ROWS, linear.in_features, generator=generator).to(weight_NK)
    return torch.equal(linear(x_MK, "decode"), linear(x_MK, "prefill"))


_TRIAL_ROWS: Final = 8
