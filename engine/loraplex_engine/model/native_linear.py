"""Linear layers on our own C kernel, the choice between them and torch's, and weights of eight and four bits.

A row is one chain of additions whatever shares the step, so no rows are padded. Weights are kept as narrow as loses
nothing: a checkpoint's bf16 stays bf16 when the model computes in fp32. With quantization they are narrower than the
checkpoint's; how much that loses is measured as they are loaded.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
import torch
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.linear import (
    LinearKernel,
    PackedLinear,
    list_arithmetics,
)
from loraplex_kernels.cpu.quantize import Quantizer
from loraplex_kernels.plans import Phase
from torch import Tensor

from loraplex_engine.arithmetic import native_name
from loraplex_engine.config import LinearBackendName, Quantization
from loraplex_engine.errors import ConfigError, ModelError
from loraplex_engine.model.linear import (
    LinearMethod,
    PackedMethod,
    PlainMethod,
    UpcastMethod,
    can_pack,
    choose_method,
    has_fast_bf16,
)

log = structlog.get_logger(__name__)

_UNAVAILABLE: Final = (
    "weights take twice the memory where the checkpoint is bf16, and steps of few rows longer"
)
# See `numerics_environment`.
_NO_TILES: Final = (
    "; on a CPU with AMX prompts take much longer too: for the row rule, oneDNN is kept from its tiles"
    " (ONEDNN_MAX_CPU_ISA)"
)
# Between lines that tell how far quantization is.
_PROGRESS_S: Final = 10.0


class NativeLinear:
    """One weight of the kernel's."""

    def __init__(self, packed: PackedLinear) -> None:
        self.packed: Final = packed
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self.weight_bytes: Final = packed.num_bytes

    def __call__(self, x_MK: Tensor, phase: Phase = "prefill") -> Tensor:
        """See `Linear`."""
        return self.packed.kernel.forward(x_MK, self.packed)


class NativeMethod:
    """The kernel of linear.c: fp32 sums whatever the dtype, rounded once."""

    row_multiple = 1

    def __init__(self, kernel: LinearKernel) -> None:
        self.name = native_name(kernel.arithmetic)
        self._kernel = kernel

    def pack(self, weight_NK: Tensor, bias_N: Tensor | None) -> NativeLinear:
        """See `LinearMethod`."""
        return NativeLinear(self._kernel.pack(weight_NK, bias_N))

    def pack_head(self, weight_NK: Tensor) -> NativeLinear:
        """The same."""
        return self.pack(weight_NK, None)


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """What quantization lost so far: |quantized - weight| / |weight| (Frobenius) of each weight."""

    errors: tuple[float, ...]
    num_bytes: int
    duration_s: float

    @property
    def mean(self) -> float:
        return sum(self.errors) / len(self.errors)

    @property
    def worst(self) -> float:
        return max(self.errors)


class QuantizedMethod:
    """Weights of eight or four bits. lm_head has eight in both: its errors go straight into the scores."""

    row_multiple = 1

    def __init__(self, kernel: LinearKernel, quantizer: Quantizer, *, bits: int) -> None:
        assert bits in (4, 8)
        self.name = native_name(kernel.arithmetic, f"int{bits}")
        self._kernel = kernel
        self._quantize_head = quantizer.int8
        self._quantize = quantizer.int8 if bits == 8 else quantizer.int4
        self._errors: list[float] = []
        self._num_bytes = 0
        self._seconds = 0.0
        self._told_at = time.monotonic()

    @property
    def report(self) -> QuantizationReport:
        return QuantizationReport(tuple(self._errors), self._num_bytes, self._seconds)

    def pack(self, weight_NK: Tensor, bias_N: Tensor | None) -> NativeLinear:
        """See `LinearMethod`.

        Raises:
            ModelError: a weight is not finite.
        """
        return self._pack(weight_NK, bias_N, is_head=False)

    def pack_head(self, weight_NK: Tensor) -> NativeLinear:
        """lm_head, in eight bits. Raises as `pack` does."""
        return self._pack(weight_NK, None, is_head=True)

    def _pack(self, weight_NK: Tensor, bias_N: Tensor | None, *, is_head: bool) -> NativeLinear:
        started = time.monotonic()
        try:
            quantized = (self._quantize_head if is_head else self._quantize)(weight_NK)
        except ValueError as error:
            raise ModelError(
                f"cannot quantize a weight of {tuple(weight_NK.shape)}: {error}; use quantization none"
            ) from error
        packed = self._kernel.pack_quantized(quantized, bias_N)
        now = time.monotonic()
        self._errors.append(quantized.relative_error)
        self._num_bytes += packed.num_bytes
        self._seconds += now - started
        if now - self._told_at > _PROGRESS_S:
            self._told_at = now
            log.info("quantizing", weights=len(self._errors), weight_bytes=self._num_bytes)
        return NativeLinear(packed)


def open_linear_method(
    dtype: torch.dtype,
    *,
    cache_dir: Path | None,
    num_threads: int,
    backend: LinearBackendName = "auto",
    quantization: Quantization = "none",
) -> LinearMethod:
    """How the linears of a CPU's model are stored and multiplied.

    Args:
        cache_dir: for the compiled kernel; None: there is none.
        backend: auto takes native, and oneDNN or torch with one warning where that cannot be compiled.
        quantization: other than none takes native.

    Raises:
        ConfigError: what was asked for cannot be had here.
    """
    bits = {"int8": 8, "int4": 4}.get(quantization)
    if backend == "torch":
        plain = PlainMethod()
        is_slow = dtype == torch.bfloat16 and not has_fast_bf16()
        return UpcastMethod(plain) if is_slow else plain
    if backend == "onednn":
        return _open_onednn(dtype)
    asked = (
        f"quantization is {quantization!r}"
        if bits
        else "linear_backend is 'native'"
        if backend == "native"
        else None
    )
    try:
        if cache_dir is None:
            raise NativeBuildError("there is no folder for what is compiled")
        native = cache_dir / "native"
        kernel = LinearKernel(
            cache_dir=native,
            num_threads=num_threads,
            arithmetic=list_arithmetics(dtype, native)[0],
        )
        if bits:
            quantizer = Quantizer(
                cache_dir=native, num_threads=num_threads, dtype=kernel.weight_dtype
            )
            return QuantizedMethod(kernel, quantizer, bits=bits)
        return NativeMethod(kernel)
    except NativeBuildError as error:
        if asked is not None:
            raise ConfigError(
                f"{asked}, which needs kernels that cannot be had here ({error}): use"
                f" {'quantization none' if bits else 'linear_backend auto'}"
            ) from error
        method = choose_method(dtype)
        log.warning(
            "native_linear_unavailable",
            reason=str(error),
            fallback=method.name,
            effect=_UNAVAILABLE + (_NO_TILES if dtype == torch.bfloat16 else ""),
        )
        return method


def _open_onednn(dtype: torch.dtype) -> LinearMethod:
    is_slow = dtype == torch.bfloat16 and not has_fast_bf16()
    own = torch.float32 if is_slow else dtype
    if not can_pack(own):
        raise ConfigError(
            "linear_backend is 'onednn', which this torch does not have for this CPU: use auto or torch"
        )
    return UpcastMethod(PackedMethod()) if is_slow else PackedMethod()


def tell_quantization(method: LinearMethod) -> None:
    """One line of what a loaded model lost to quantization; nothing for other methods."""
    if not isinstance(method, QuantizedMethod):
        return
    report = method.report
    log.info(
        "quantized",
        linear=method.name,
        weights=len(report.errors),
        weight_bytes=report.num_bytes,
        mean_relative_error=round(report.mean, 5),
        worst_relative_error=round(report.worst, 5),
        duration_s=round(report.duration_s, 2),
    )
