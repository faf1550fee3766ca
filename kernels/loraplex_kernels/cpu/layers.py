"""Python side of layers.c: all layers of a decoder in one foreign call.

The model's table (weights, caches, which kernels to call) is laid out once; a step fills in some pointers.
Reference: the same kernels called one by one, whose bits these are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraplex_kernels.cpu.attention import AttentionWork, NativeAttentionKernel
from loraplex_kernels.cpu.build import load_library
from loraplex_kernels.cpu.linear import PackedLinear
from loraplex_kernels.cpu.lora import LoraKernel, LoraStep
from loraplex_kernels.cpu.ops import OpsKernel

NUM_SITES: Final = 4  # qkv, o, gate_up, down
# What a step's time is told apart by: norms, rotation and activation are `small`.
TIMED_PARTS: Final = ("linear", "attention", "lora", "small")

_POINTER, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class _Linear(ctypes.Structure):
    """layers_linear in layers.c."""

    _fields_ = (
        ("panels", _POINTER),
        ("bias", _POINTER),
        ("num_inputs", _I64),
        ("num_outputs", _I64),
        ("format", _I64),
    )


class _Layer(ctypes.Structure):
    """layers_layer."""

    _fields_ = (
        ("input_norm", _POINTER),
        ("mlp_norm", _POINTER),
        ("kv", _POINTER),
        ("linear", _Linear * NUM_SITES),
    )


class _Model(ctypes.Structure):
    """layers_model."""

    _fields_ = (
        *((name, _POINTER) for name in ("rms_norm", "gated", "rotate_and_write")),
        *((name, _POINTER) for name in ("linear", "attention", "lora", "layers")),
        ("slice_begins", _POINTER * NUM_SITES),
        *((name, _I64) for name in ("num_layers", "hidden_size", "inner_size")),
        *((name, _I32) for name in ("num_heads", "num_kv_heads", "head_dim", "is_bf16")),
        ("num_threads", _I32),
        ("eps", _F32),
    )


class _Step(ctypes.Structure):
    """layers_step."""

    _fields_ = (
        *((name, _POINTER) for name in ("hidden", "cos", "sin", "slot")),
        *((name, _I64) for name in ("num_rows", "num_tokens")),
        *((name, _POINTER) for name in ("attention", "attention_kv", "items", "merges")),
        ("attention_scratch", _POINTER),
        *((name, _I32) for name in ("num_items", "num_merges")),
        *((name, _POINTER) for name in ("lora", "is_active")),
        *((name, _POINTER) for name in ("normed", "qkv", "attended", "added")),
        *((name, _POINTER) for name in ("gate_up", "gated", "wide", "part_seconds")),
    )


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer: what it multiplies with, and its cache."""

    input_norm: Tensor
    mlp_norm: Tensor
    linears: tuple[PackedLinear, PackedLinear, PackedLinear, PackedLinear]  # as the sites are
    kv: Tensor


class LayersKernel:
    """The compiled loop over one model's layers, with the memory for their results.

    H hidden size, I inner width, T rows of a step.
    """

    def __init__(
        self,
        layers: Sequence[LayerParts],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        ops: OpsKernel,
        attention: NativeAttentionKernel,
        lora: LoraKernel | None,
        slice_addresses: Sequence[int],
        cache_dir: Path,
    ) -> None:
        """Compile or load it, and lay out the table of `layers`.

        Their weights are kept alive, their caches are not: `forward` is not to be called without them.

        Args:
            lora: None: no step has adapters.
            slice_addresses: by site, of the `SliceOffsets.begins`; empty without `lora`.

        Raises:
            NativeBuildError: not on this machine.
        """
        self._forward = load_library("layers", cache_dir).layers_forward
        self._forward.restype = None
        self._forward.argtypes = (_POINTER, _POINTER)
        self._kept = [(parts.input_norm, parts.mlp_norm, parts.linears) for parts in layers]
        self._kernels = (ops, attention, lora)
        self._attention_scratch = attention.scratch_address
        table = (_Layer * len(layers))()
        for entry, parts in zip(table, layers, strict=True):
            entry.input_norm, entry.mlp_norm = (
                parts.input_norm.data_ptr(),
                parts.mlp_norm.data_ptr(),
            )
            entry.kv = parts.kv.data_ptr()
            for site, linear in zip(entry.linear, parts.linears, strict=True):
                site.panels, site.bias = linear.panels_address, linear.bias_address
                site.num_inputs, site.num_outputs = linear.in_features, linear.out_features
                site.format = linear.format
        self._table = table
        qkv, _, gate_up, down = layers[0].linears
        self._dtype = ops.dtype
        self._widths = (
            qkv.in_features,
            qkv.out_features,
            num_heads * head_dim,
            down.out_features,
            gate_up.out_features,
            down.in_features,
        )
        self._wide_per_row = max(
            linear.wide_per_row(ops.dtype) for parts in layers for linear in parts.linears
        )
        self._model = _Model(
            rms_norm=ops.rms_norm_address,
            gated=ops.gated_address,
            rotate_and_write=ops.rotate_and_write_address,
            linear=qkv.forward_address,
            attention=attention.forward_address,
            lora=lora.add_address if lora else None,
            layers=ctypes.addressof(table),
            num_layers=len(layers),
            hidden_size=qkv.in_features,
            inner_size=down.in_features,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            is_bf16=int(ops.dtype is torch.bfloat16),
            num_threads=attention.num_threads,
            eps=eps,
        )
        for site, address in enumerate(slice_addresses):
            self._model.slice_begins[site] = address
        self._step = _Step()
        self._num_rows = 0  # that there is memory for
        self._results: list[Tensor] = []

    def forward(
        self,
        hidden_TH: Tensor,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        slot_T: Tensor,
        work: AttentionWork,
        *,
        lora_step: LoraStep | None = None,
        is_active: Any = None,  # noqa: ANN401 -- array of bool, by layer * 4 + site
        part_seconds: npt.NDArray[np.float64] | None = None,
    ) -> Tensor:
        """Run all layers on `hidden_TH`, in place, up to the last one's sum.

        Args:
            hidden_TH: (T, H) embedded tokens, contiguous, the kernels' dtype.
            cos_T1D, sin_T1D: of all T rows.
            slot_T: int64, of the first rows; rows behind them are padding.
            is_active: with `lora_step`: where some adapter adds.
            part_seconds: one for each of `TIMED_PARTS`, increased by what it took. None: no clock is read.

        Returns:
            (T, H), still to be added to `hidden_TH`; the next call overwrites it.

        Raises:
            ValueError: a dtype or layout differs from the above.
        """
        num_rows, num_tokens = hidden_TH.shape[0], slot_T.numel()
        for name, value in (("hidden", hidden_TH), ("cos", cos_T1D), ("sin", sin_T1D)):
            if value.dtype is not self._dtype or not value.is_contiguous():
                raise ValueError(f"{name} is {value.dtype}: it must be {self._dtype}, contiguous")
            if value.shape[0] != num_rows:
                raise ValueError(f"{name} has {value.shape[0]} rows, hidden {num_rows}")
        if slot_T.dtype is not torch.int64 or not slot_T.is_contiguous() or num_tokens > num_rows:
            raise ValueError(
                f"slot is {slot_T.shape} {slot_T.dtype}, contiguous: {slot_T.is_contiguous()}; it must"
                " be int64, contiguous, at most one a row"
            )
        if part_seconds is not None and (
            part_seconds.shape != (len(TIMED_PARTS),)
            or part_seconds.dtype != np.float64
            or not part_seconds.flags.c_contiguous
        ):
            raise ValueError(
                f"part_seconds is {part_seconds.shape} {part_seconds.dtype}:"
                f" it must be ({len(TIMED_PARTS)},) float64, contiguous"
            )
        if num_rows > self._num_rows:
            self._grow(num_rows)
        step, call = self._step, work.call
        _, qkv, attended, added, _, _ = self._results
        step.hidden, step.cos, step.sin = (
            hidden_TH.data_ptr(),
            cos_T1D.data_ptr(),
            sin_T1D.data_ptr(),
        )
        step.slot, step.num_rows, step.num_tokens = slot_T.data_ptr(), num_rows, num_tokens
        call.q, call.q_stride = qkv.data_ptr(), qkv.stride(0)
        call.out, call.out_stride = attended.data_ptr(), attended.stride(0)
        step.attention = ctypes.addressof(call)
        step.attention_kv = step.attention + type(call).kv.offset
        step.items, step.num_items = work.items.ctypes.data, len(work.items)
        step.merges, step.num_merges = work.merges.ctypes.data, len(work.merges)
        step.lora = lora_step.address if lora_step is not None else None
        step.is_active = is_active.ctypes.data if lora_step is not None else None
        step.part_seconds = None if part_seconds is None else part_seconds.ctypes.data
        self._forward(ctypes.byref(self._model), ctypes.byref(step))
        return added[:num_rows]

    def _grow(self, num_rows: int) -> None:
        """Make room for the results of so many rows."""
        results = [torch.empty((num_rows, width), dtype=self._dtype) for width in self._widths]
        wide = torch.empty(num_rows * self._wide_per_row)
        # Only now: what cannot be allocated leaves the smaller ones in use.
        self._num_rows, self._results, self._wide = num_rows, results, wide
        step = self._step
        names = ("normed", "qkv", "attended", "added", "gate_up", "gated")
        for name, result in zip(names, self._results, strict=True):
            setattr(step, name, result.data_ptr())
        step.wide = self._wide.data_ptr() or None
        step.attention_scratch = self._attention_scratch
