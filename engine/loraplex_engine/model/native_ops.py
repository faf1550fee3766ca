"""`ModelOps` on the C kernels of the CPU, and the choice between them and plain torch.

A row is computed alone, whatever rows share the call, so nothing needs padded rows but the linears may.
"""

from __future__ import annotations

from pathlib import Path

import structlog
import torch
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.ops import OpsKernel
from loraplex_kernels.plans import Phase
from torch import Tensor

from loraplex_engine.config import OpsBackendName

log = structlog.get_logger(__name__)


class NativeOps:
    """The kernels of ops.c.

    Args:
        row_multiple: what the model's linears want rows padded to.
    """

    name = "native"

    def __init__(self, kernel: OpsKernel, *, row_multiple: int) -> None:
        self._kernel = kernel
        self._row_multiple = row_multiple

    def rows_for(self, num_tokens: int, inner_width: int) -> int:
        """The next multiple that linears ask for."""
        return num_tokens + -num_tokens % self._row_multiple

    def head_rows_for(self, num_rows: int) -> int:
        """The same."""
        return num_rows + -num_rows % self._row_multiple

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """See `ModelOps.rms_norm`."""
        return self._kernel.rms_norm(x_TH, weight_H, eps)

    def rms_norm_of(self, x_TH: Tensor, row_R: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """See `ModelOps.rms_norm_of`."""
        return self._kernel.rms_norm_of(x_TH, row_R, weight_H, eps)

    def add_rms_norm(self, hidden_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """See `ModelOps.add_rms_norm`."""
        return self._kernel.rms_norm(hidden_TH, weight_H, eps, y_TH=y_TH)

    def gated(self, gate_up_TI: Tensor, phase: Phase) -> Tensor:
        """See `ModelOps.gated`."""
        return self._kernel.gated(gate_up_TI)


def open_ops_kernel(
    dtype: torch.dtype, *, cache_dir: Path, num_threads: int, backend: OpsBackendName = "auto"
) -> OpsKernel | None:
    """The kernels of `NativeOps`; None: take torch.

    Args:
        cache_dir: for the compiled kernels.
        backend: auto takes native, and torch with one warning where that cannot be compiled.

    Raises:
        NativeBuildError, ValueError: native was asked for and cannot be had here.
    """
    if backend == "torch":
        return None
    try:
        return OpsKernel(dtype, cache_dir=cache_dir / "native", num_threads=num_threads)
    except (NativeBuildError, ValueError) as error:
        if backend == "native":
            raise
        log.warning(
            "native_ops_unavailable",
            reason=str(error),
            fallback="torch",
            effect="norms, rotation and activation take two to four times as long",
        )
        return None
