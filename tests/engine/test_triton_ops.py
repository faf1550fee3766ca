"""A whole decoder on our Triton kernels (interpreted where there is no GPU) against plain torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from loraplex_engine.attention.base import AttentionBatch, AttentionShape
from loraplex_engine.attention.torch_attention import TorchAttention
from loraplex_engine.model import triton_ops
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.model.linear import PlainMethod
from loraplex_engine.model.loading import load_decoder
from loraplex_engine.model.ops import TorchOps
from loraplex_engine.model.triton_ops import GemmMethod, TritonOps
from loraplex_kernels.plans import Column, Phase, Plan, open_plans
from loraplex_kernels.support import is_interpreted
from torch import Tensor

from tests.support.tiny_model import TinyShape, write_tiny_model

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="attention here is a CPU's")

BLOCK = 16
NUM_BLOCKS = 12
SHAPES = {
    "llama": TinyShape(num_layers=2),
    "qwen2-bias-odd-width": TinyShape(kind="qwen2", num_layers=2, intermediate_size=33),
}


@cache
def open_attention(shape: AttentionShape) -> TorchAttention:
    """Measures the machine when it is made."""
    return TorchAttention(shape, num_blocks=NUM_BLOCKS, block_size=BLOCK)


def run(
    model: Decoder, tokens_by_sequence: list[list[int]], num_computed: int, phase: Phase
) -> tuple[Tensor, Tensor]:
    """(hidden, logits) of each sequence's tokens; sequence b owns blocks 2 b and 2 b + 1, seeded alike."""
    attention = open_attention(model.attention_shape)
    caches = [attention.allocate_kv(NUM_BLOCKS) for _ in model.layers]
    for index, kv in enumerate(caches):
        # What was computed before: the same in every sequence's blocks.
        generator = torch.Generator().manual_seed(index)
        kv.copy_(torch.randn(kv.shape, generator=generator).to(kv.dtype))
    counts = [len(tokens) for tokens in tokens_by_sequence]
    total = sum(counts)
    rows = model.rows_for(total)
    token_T = torch.zeros(rows, dtype=torch.int64)
    token_T[:total] = torch.tensor([t for tokens in tokens_by_sequence for t in tokens])
    position_T = torch.zeros(rows, dtype=torch.int64)
    position_T[:total] = torch.cat([torch.arange(count) + num_computed for count in counts])
    batch = AttentionBatch(
        np.full(len(counts), num_computed, np.int32),
        np.asarray(counts, np.int32),
        np.arange(2 * len(counts), dtype=np.int32).reshape(-1, 2),
        rows,
    )
    with torch.inference_mode():
        hidden = model.forward(
            token_T,
            position_T,
            kv_layers=caches,
            attention=attention,
            plan=attention.prepare(batch),
            lora=None,
            lora_batch=None,
            phase=phase,
        )
        return hidden[:total], model.logits(hidden, torch.arange(total))


def load(folder: Path, dtype: torch.dtype, column: Column) -> Decoder:
    return load_decoder(folder, dtype, plans=open_plans("sm_90", column))


@pytest.mark.parametrize("column", ["fast", "invariant"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 0.35)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_equal_those_of_plain_torch(
    shape: TinyShape, dtype: torch.dtype, tolerance: float, column: Column, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path, shape)
    plain = load_decoder(folder, dtype, method=PlainMethod())
    triton = load(folder, dtype, column)
    prompts = [[5, 17, 99, 23], [8], [3, 1]]

    assert isinstance(plain.ops, TorchOps)
    assert isinstance(triton.ops, TritonOps)
    assert triton.linear_name == ("triton" if column == "invariant" else "torch")
    for phase, tokens in (("prefill", prompts), ("decode", [[9], [8], [7]])):
        expected = run(plain, tokens, 5, phase)[1].float()
        logits = run(triton, tokens, 5, phase)[1].float()
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)
        # The bound would also hold for logits that are all small.
        assert expected.abs().max() > 4 * tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_invariant_rows_have_the_same_bits_in_any_company(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = load(write_tiny_model(tmp_path, SHAPES["llama"]), dtype, "invariant")
    chunk = [5, 17, 99, 23, 41]

    whole, alone = run(model, [chunk, [8], [3, 1]], 0, "prefill"), run(model, [chunk], 0, "prefill")

    for together, lonely in zip(whole, alone, strict=True):
        assert torch.equal(together[: len(chunk)], lonely)
    many = run(model, [[token] for token in range(20, 25)], 7, "decode")
    one = run(model, [[20]], 7, "decode")
    for together, lonely in zip(many, one, strict=True):
        assert torch.equal(together[:1], lonely)


def test_one_row_of_nan_does_not_reach_its_neighbours(tmp_path: Path) -> None:
    model = load(write_tiny_model(tmp_path, SHAPES["llama"]), torch.float32, "invariant")
    healthy, _ = run(model, [[1], [2], [3]], 4, "decode")
    model._embedding_VH = model._embedding_VH.clone()
    model._embedding_VH[2] = torch.nan

    hidden, logits = run(model, [[1], [2], [3]], 4, "decode")

    assert hidden[1].isnan().all()
    assert logits[1].isnan().all()
    assert torch.equal(hidden[[0, 2]], healthy[[0, 2]])


def test_a_tied_head_shares_the_embedding_where_weights_are_kept_as_they_are(
    tmp_path: Path,
) -> None:
    folder = write_tiny_model(tmp_path, TinyShape(is_tied=True))

    model = load(folder, torch.float32, "invariant")

    assert model.lm_head._weight.data_ptr() == model._embedding_VH.data_ptr()
    assert model.device == torch.device("cpu")


def test_where_the_phases_do_not_sum_alike_decoding_s_plan_serves_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = open_plans("sm_90", "invariant")
    weight = torch.ones(4, 8, dtype=torch.bfloat16)
    bounds = {"tokens": 1, "k": 8, "n": 4, "dtype": "bf16"}
    prefill = plans.choose("gemm", phase="prefill", **bounds)
    assert prefill != plans.choose("gemm", phase="decode", **bounds)
    offset = 0.0

    def gemm(x_MK: Tensor, weight_NK: Tensor, bias_N: None, plan: Plan) -> Tensor:
        return x_MK @ weight_NK.T + (offset if plan == prefill else 0.0)

    monkeypatch.setattr(triton_ops, "gemm", gemm)
    x_MK = torch.ones(3, 8, dtype=torch.bfloat16)
    alike = GemmMethod(plans).pack(weight, None)
    offset = 1.0
    method = GemmMethod(plans)
    different = [method.pack(weight, None), method.pack(weight, None)]

    for linear in different:
        assert torch.equal(linear(x_MK, "prefill"), linear(x_MK, "decode"))
    # Where they are alike, each phase keeps its own plan.
    assert not torch.equal(alike(x_MK, "prefill"), alike(x_MK, "decode"))
