"""Builds a `Decoder` from a Hugging Face folder, one merged weight at a time, on any device.

Each tensor goes to the device as it is read and is merged there, so that host memory holds one at a time.
"""

from __future__ import annotations

from pathlib import Path

import torch
from loraplex_kernels.cpu.ops import OpsKernel
from loraplex_kernels.plans import PlanTable
from torch import Tensor

from loraplex_engine.errors import ModelError
from loraplex_engine.model.config import ModelConfig
from loraplex_engine.model.decoder import Decoder, DecoderLayer
from loraplex_engine.model.linear import (
    CublasMethod,
    Linear,
    LinearMethod,
    PlainMethod,
    choose_method,
    has_fast_bf16,
)
from loraplex_engine.model.native_layers import NativeLayers
from loraplex_engine.model.native_ops import NativeOps
from loraplex_engine.model.ops import ModelOps, TorchOps
from loraplex_engine.model.rope import RotaryTable
from loraplex_engine.model.weights import WeightSource, open_weights

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CPU = torch.device("cpu")


def resolve_dtype(name: str, device: torch.device = _CPU) -> torch.dtype:
    """`auto` is bf16 where the device computes it fast, else fp32 (which is then the faster one)."""
    if name == "auto":
        is_fast = device.type == "cuda" or has_fast_bf16()
        return torch.bfloat16 if is_fast else torch.float32
    return _DTYPES[name]


def load_decoder(
    folder: Path,
    dtype: torch.dtype,
    *,
    max_position: int | None = None,
    method: LinearMethod | None = None,
    device: torch.device = _CPU,
    plans: PlanTable | None = None,
    ops: OpsKernel | None = None,
) -> Decoder:
    """Read, merge and pack the weights of `folder`.

    Args:
        max_position: longest sequence that will be run; None: what the model allows.
        method: how linears are stored; None: the fastest for the device, or under `invariant` plans
            the one whose rows do not depend on each other.
        device: where the weights go.
        plans: of our Triton kernels, which a GPU needs and a CPU runs in Triton's interpreter; None: the
            CPU's own routines.
        ops: the CPU's kernels for what is between the linears; None: torch, or Triton where there are plans.

    Raises:
        ModelError: the folder is not a complete model of a supported kind.
    """
    config = ModelConfig.from_folder(folder)
    with open_weights(folder) as reader:
        return build_decoder(
            config,
            dtype,
            reader,
            max_position=max_position,
            method=method,
            device=device,
            plans=plans,
            ops=ops,
        )


def build_decoder(
    config: ModelConfig,
    dtype: torch.dtype,
    reader: WeightSource,
    *,
    max_position: int | None = None,
    method: LinearMethod | None = None,
    device: torch.device = _CPU,
    plans: PlanTable | None = None,
    ops: OpsKernel | None = None,
) -> Decoder:
    """`load_decoder` of weights from anywhere.

    Raises:
        ModelError: `reader` has not exactly the weights of `config`.
    """
    assert plans is not None or device.type == "cpu", "a GPU runs our kernels, which need plans"
    assert plans is None or ops is None, "the CPU's kernels, or Triton's"
    model_ops, fastest = _open_routines(dtype, device, plans)
    method = method or fastest
    if ops is not None:
        model_ops = NativeOps(ops, row_multiple=method.row_multiple)
    with torch.inference_mode():
        builder = _Builder(config, dtype, method, reader, device)
        embedding = builder.embedding()
        lm_head = builder.lm_head(embedding)
        layers = [builder.layer(index) for index in range(config.num_layers)]
        final_norm = builder.norm("model.norm")
        reader.check_all_taken()
        return Decoder(
            config,
            dtype,
            embedding_VH=embedding,
            layers=layers,
            final_norm=final_norm,
            lm_head=lm_head,
            rotary=RotaryTable(
                config.head_dim,
                max_position or config.max_position,
                config.rope_theta,
                dtype,
                device,
            ),
            ops=model_ops,
            linear_name=method.name,
            layer_call=None if ops is None else NativeLayers(layers, ops, eps=config.rms_norm_eps),
        )


def _open_routines(
    dtype: torch.dtype, device: torch.device, plans: PlanTable | None
) -> tuple[ModelOps, LinearMethod]:
    if plans is None:
        return TorchOps(), choose_method(dtype)
    # Imported here: a machine without Triton serves on its CPU.
    from loraplex_engine.model.triton_ops import GemmMethod, TritonOps

    if plans.column == "invariant":
        return TritonOps(plans), GemmMethod(plans)
    return TritonOps(plans), CublasMethod() if device.type == "cuda" else PlainMethod()


class _Builder:
    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        method: LinearMethod,
        reader: WeightSource,
        device: torch.device,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._method = method
        self._reader = reader
        self._device = device

    def embedding(self) -> Tensor:
        """Kept in the checkpoint's dtype where that is the narrower (copied out of the mapped file).

        Looking up a row and then widening it is exact, and half the memory when bf16 runs as fp32.
        """
        config = self._config
        weight = self._reader.take(
            "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
        )
        dtype = weight.dtype if self._dtype == torch.float32 else self._dtype
        return weight.to(self._device, dtype, copy=True)

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv = [("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size)]
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return DecoderLayer(
            input_norm=self.norm(f"{prefix}.input_layernorm"),
            qkv=self._merged(attention, qkv, hidden, has_bias=config.has_qkv_bias),
            o=self._merged(
                attention, [("o_proj", hidden)], config.q_size, has_bias=config.has_o_bias
            ),
            mlp_norm=self.norm(f"{prefix}.post_attention_layernorm"),
            gate_up=self._merged(
                mlp,
                [("gate_proj", inner), ("up_proj", inner)],
                hidden,
                has_bias=config.has_mlp_bias,
            ),
            down=self._merged(mlp, [("down_proj", hidden)], inner, has_bias=config.has_mlp_bias),
        )

    def lm_head(self, embedding: Tensor) -> Linear:
        """Only rows of ids the tokenizer knows: padding ids can never be sampled."""
        config, name = self._config, "lm_head.weight"
        weight = embedding
        if name in self._reader or not config.is_tied:
            weight = self._reader.take(name, (config.vocab_size, config.hidden_size))
            if config.is_tied and not torch.equal(weight.to(embedding), embedding):
                raise ModelError(
                    "tie_word_embeddings is true but lm_head.weight differs from the embedding"
                )
        # Where the method keeps the weight as it is, a tied head shares the embedding's memory.
        weight = weight[: config.num_token_ids].to(self._device, self._dtype)
        return self._method.pack_head(weight)

    def norm(self, name: str) -> Tensor:
        """A norm's weight, copied out of the mapped file."""
        weight = self._reader.take(f"{name}.weight", (self._config.hidden_size,))
        return weight.to(self._device, self._dtype, copy=True)

    def _merged(
        self, prefix: str, parts: list[tuple[str, int]], num_inputs: int, *, has_bias: bool
    ) -> Linear:
        def take(kind: str, *shape: int) -> list[Tensor]:
            return [
                self._reader.take(f"{prefix}.{name}.{kind}", (size, *shape)).to(
                    self._device, self._dtype
                )
                for name, size in parts
            ]

        weight = torch.cat(take("weight", num_inputs))
        return self._method.pack(weight, torch.cat(take("bias")) if has_bias else None)
