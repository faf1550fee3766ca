"""Linear layers behind one small interface: y = x W^T + b. All but cuBLAS obey the row rule.

A `LinearMethod` turns a weight into a callable once, at load. Those here are torch's; native_linear.py has our own
kernel's, triton_ops.py our GPU's. Torch's matrix kernels pick another inner loop
for the last rows of a block, so a row's bits would depend on how many rows came with it; with the
row count padded to a multiple of `ROW_MULTIPLE` they do not (measured in fp32 and bf16, up to 2,048
rows; the start-up self-check repeats it on the machine at hand). The model pads its rows once per
step, so the padding here costs nothing there.

M rows, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Protocol

import torch
from loraplex_kernels.plans import Phase
from torch import Tensor
from torch.nn import functional

ROW_MULTIPLE = 4
# The layout hint for packing; any value serves all row counts.
_PACK_ROWS = 16


class Linear(Protocol):
    """One packed weight."""

    in_features: int
    out_features: int

    def __call__(self, x_MK: Tensor, phase: Phase = "prefill") -> Tensor:
        """y (M, N) in the dtype of x, for any M; a row's bits depend on that row only.

        Args:
            phase: of the step; picks a launch plan on a GPU, means nothing on a CPU.
        """
        ...


class LinearMethod(Protocol):
    """How weights are stored and multiplied."""

    name: str
    # What a step's rows should be padded to, so that a row's bits do not depend on their number. A `Linear`
    # pads by itself what comes with fewer, which costs a copy; 1: nothing ever needs padding.
    row_multiple: int

    def pack(self, weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
        """Take a weight in the model's dtype; the caller drops its own reference."""
        ...

    def pack_head(self, weight_NK: Tensor) -> Linear:
        """`pack` of lm_head, which a method may keep in another way."""
        ...


class _PlainLinear:
    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self.out_features, self.in_features = weight_NK.shape
        self._weight = weight_NK.contiguous()
        self._bias = bias_N

    def __call__(self, x_MK: Tensor, phase: Phase = "prefill") -> Tensor:
        num_rows = x_MK.shape[0]
        return functional.linear(_pad_rows(x_MK), self._weight, self._bias)[:num_rows]


class PlainMethod:
    """`functional.linear` on padded rows: works everywhere."""

    name = "torch"
    row_multiple = ROW_MULTIPLE

    def pack(self, weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
        return _PlainLinear(weight_NK, bias_N)

    def pack_head(self, weight_NK: Tensor) -> Linear:
        return _PlainLinear(weight_NK, None)


class _CublasLinear:
    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self.out_features, self.in_features = weight_NK.shape
        self._weight = weight_NK.contiguous()
        self._bias = bias_N

    def __call__(self, x_MK: Tensor, phase: Phase = "prefill") -> Tensor:
        return functional.linear(x_MK, self._weight, self._bias)


class CublasMethod:
    """`functional.linear` on a GPU, the fastest there; a row's bits may depend on the number of rows.

    `triton_ops.GemmMethod` is the one whose rows' bits do not.
    """

    name = "cublas"
    row_multiple = 1

    def pack(self, weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
        return _CublasLinear(weight_NK, bias_N)

    def pack_head(self, weight_NK: Tensor) -> Linear:
        return _CublasLinear(weight_NK, None)


class _PackedLinear:
    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self.out_features, self.in_features = weight_NK.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), _PACK_ROWS)
        self._bias = bias_N

    def __call__(self, x_MK: Tensor, phase: Phase = "prefill") -> Tensor:
        num_rows = x_MK.shape[0]
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            _pad_rows(x_MK), self._packed, self._bias, "none", [], ""
        )
        return y[:num_rows] if y.shape[0] != num_rows else y


class PackedMethod:
    """oneDNN weights in the CPU's own layout; the unpacked copy is freed."""

    name = "onednn"
    row_multiple = ROW_MULTIPLE

    def pack(self, weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
        return _PackedLinear(weight_NK, bias_N)

    def pack_head(self, weight_NK: Tensor) -> Linear:
        return _PackedLinear(weight_NK, None)


class _UpcastLinear:
    def __init__(self, inner: Linear) -> None:
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self._inner = inner

    def __call__(self, x_MK: Tensor, phase: Phase = "prefill") -> Tensor:
        return self._inner(x_MK.float(), phase).to(x_MK.dtype)


class UpcastMethod:
    """bf16 on a CPU that multiplies bf16 slowly: fp32 products and sums, rounded once at the end.

    Twice the memory of bf16 weights, but about ten times the speed of plain bf16 there.
    """

    def __init__(self, inner: LinearMethod) -> None:
        self._inner = inner
        self.name = f"{inner.name}_fp32"
        self.row_multiple = inner.row_multiple

    def pack(self, weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
        return _UpcastLinear(
            self._inner.pack(weight_NK.float(), None if bias_N is None else bias_N.float())
        )

    def pack_head(self, weight_NK: Tensor) -> Linear:
        return _UpcastLinear(self._inner.pack_head(weight_NK.float()))


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware that oneDNN can use."""
    return _has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def choose_method(dtype: torch.dtype) -> LinearMethod:
    """The fastest of torch's methods for `dtype` on this CPU and torch build; `native_linear` has a faster one."""
    if dtype == torch.bfloat16 and not has_fast_bf16():
        return UpcastMethod(choose_method(torch.float32))
    return PackedMethod() if can_pack(dtype) else PlainMethod()


def can_pack(dtype: torch.dtype) -> bool:
    """Whether `PackedMethod` works for `dtype` on this CPU and torch build."""
    if not _has_onednn():
        return False
    x = torch.ones(ROW_MULTIPLE, 32, dtype=dtype)
    try:
        y = PackedMethod().pack(torch.ones(32, 32, dtype=dtype), None)(x)
    except (RuntimeError, AttributeError):
        # oneDNN without this primitive for this CPU or dtype says so by raising.
        return False
    return bool(torch.equal(y, torch.full_like(y, 32.0)))


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]  # torch's stub


def _pad_rows(x_MK: Tensor) -> Tensor:
    missing = -x_MK.shape[0] % ROW_MULTIPLE
    return functional.pad(x_MK, (0, 0, 0, missing)) if missing else x_MK
