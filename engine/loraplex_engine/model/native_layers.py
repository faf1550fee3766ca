"""All layers of a decoder in one foreign call, where every part of them is one of the CPU's kernels.

From Python to a kernel and back takes microseconds, ten times a layer: for few rows as long as the arithmetic. The
kernels, and so the bits, are those that the decoder's own loop calls.

T rows of a step, H hidden size.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt
from loraplex_kernels.cpu.layers import LayerParts, LayersKernel
from loraplex_kernels.cpu.linear import PackedLinear
from loraplex_kernels.cpu.ops import OpsKernel
from torch import Tensor

from loraplex_engine.attention.base import AttentionBackend
from loraplex_engine.attention.native_attention import NativeAttention, NativePlan
from loraplex_engine.lora.backend import NativeBatch, NativeLora
from loraplex_engine.lora.seam import LoraBackend, LoraBatch
from loraplex_engine.model.decoder import DecoderLayer


class NativeLayers:
    """`LayerCall` on layers.c, for one model.

    Args:
        layers: the model's own; with a linear of another kind nothing is taken.
    """

    def __init__(self, layers: Sequence[DecoderLayer], ops: OpsKernel, *, eps: float) -> None:
        self._layers = tuple(layers)
        self._weights = [weights for layer in layers if (weights := _weights_of(layer)) is not None]
        self._ops = ops
        self._eps = eps
        # What the kernel's table was made of: the last caller's.
        self._attention: AttentionBackend[Any, Any] | None = None
        self._lora: LoraBackend | None = None
        # Not kept alive: who makes a new cache has room for one.
        self._kv: tuple[weakref.ref[Any], ...] = ()
        self._kernel: LayersKernel | None = None
        # See `LayersKernel.forward`: whoever measures sets it.
        self.part_seconds: npt.NDArray[np.float64] | None = None

    @property
    def has_run(self) -> bool:
        """See `LayerCall.has_run`."""
        return self._kernel is not None

    def forward(
        self,
        hidden_TH: Tensor,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        *,
        layers: Sequence[DecoderLayer],
        kv_layers: Sequence[Any],
        attention: AttentionBackend[Any, Any],
        plan: Any,  # noqa: ANN401 -- made by `attention.prepare`
        lora: LoraBackend | None,
        lora_batch: LoraBatch | None,
    ) -> Tensor | None:
        """See `LayerCall.forward`."""
        # Somebody may have put objects of their own between the parts, to look at what passes.
        if type(attention) is not NativeAttention or not (lora is None or type(lora) is NativeLora):
            return None
        if not len(self._weights) == len(self._layers) == len(layers) == len(kv_layers):
            return None
        if not all(map(is_, layers, self._layers)):
            return None
        is_same = (
            self._attention is attention
            and self._lora is lora
            and len(self._kv) == len(kv_layers)
            and all(kv is known() for kv, known in zip(kv_layers, self._kv, strict=True))
        )
        if self._kernel is None or not is_same:
            self._kernel = self._make(kv_layers, attention, lora)
            self._attention, self._lora = attention, lora
            self._kv = tuple(weakref.ref(kv) for kv in kv_layers)
        assert isinstance(plan, NativePlan)
        step, is_active = None, None
        if lora_batch is not None:
            assert isinstance(lora_batch, NativeBatch)
            step, is_active = lora_batch.step, lora_batch.is_active
        return self._kernel.forward(
            hidden_TH,
            cos_T1D,
            sin_T1D,
            plan.write_slot,
            plan.work,
            lora_step=step,
            is_active=is_active,
            part_seconds=self.part_seconds,
        )

    def _make(
        self, kv_layers: Sequence[Any], attention: NativeAttention, lora: NativeLora | None
    ) -> LayersKernel:
        parts = [
            LayerParts(layer.input_norm, layer.mlp_norm, weights, kv)
            for layer, weights, kv in zip(self._layers, self._weights, kv_layers, strict=True)
        ]
        shape = attention.shape
        return LayersKernel(
            parts,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            eps=self._eps,
            ops=self._ops,
            attention=attention.kernel,
            lora=None if lora is None else lora.kernel,
            slice_addresses=() if lora is None else lora.slice_addresses,
            cache_dir=self._ops.cache_dir,
        )


def _weights_of(
    layer: DecoderLayer,
) -> tuple[PackedLinear, PackedLinear, PackedLinear, PackedLinear] | None:
    """What a layer multiplies with; None: not all of it is a kernel's."""
    qkv, o, gate_up, down = (
        getattr(linear, "packed", None)
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)
    )
    if (
        isinstance(qkv, PackedLinear)
        and isinstance(o, PackedLinear)
        and isinstance(gate_up, PackedLinear)
        and isinstance(down, PackedLinear)
    ):
        return qkv, o, gate_up, down
    return None
