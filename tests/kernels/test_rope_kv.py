"""Rotation and storing, interpreted: bit for bit the reference, in every cache dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_kernels import reference_attention
from loraplex_kernels.plans import Plan
from loraplex_kernels.rope_kv import rope_kv
from torch import Tensor

from tests.support.kernel_inputs import DTYPES, normal

PLAN = Plan({"TOKENS": 4, "HEADS": 4}, 1, 1, "test")
QUANTIZED = [torch.int8, torch.float8_e4m3fn]


class Step:
    """Random projections and angles; a cache whose slots all hold NaN, or 7 with a NaN scale."""

    def __init__(
        self,
        num_rows: int,
        device: torch.device,
        *,
        heads: tuple[int, int] = (6, 2),
        head_dim: int = 32,
        block_size: int = 8,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.num_heads, num_kv_heads = heads
        width = (self.num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = normal((num_rows, width), dtype, device)
        angle = normal((num_rows, head_dim // 2), torch.float32, device, seed=1) * 50
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        self.cos = torch.cat((cos, cos), dim=1).unsqueeze(1)
        self.sin = torch.cat((-sin, sin), dim=1).unsqueeze(1)
        shape = (2, num_rows // block_size + 2, num_kv_heads, block_size, head_dim)
        self.scale = None
        if kv_dtype is None:
            self.kv = torch.full(shape, torch.nan, dtype=dtype, device=device)
        else:
            self.kv = torch.full(shape, 7.0, device=device).to(kv_dtype)
            self.scale = torch.full(shape[:4], torch.nan, device=device)
        count = shape[1] * block_size
        slot = torch.randperm(count, generator=torch.Generator().manual_seed(2))[:num_rows]
        slot[1::3] = -1
        self.slot = slot.int().to(device)

    def run(self, function: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """(qkv, kv, scale) afterwards; `self` stays as it is."""
        qkv, kv = self.qkv.clone(), self.kv.clone()
        scale = None if self.scale is None else self.scale.clone()
        function(
            qkv,
            self.cos,
            self.sin,
            self.slot,
            kv,
            *arguments,
            num_heads=self.num_heads,
            scale=scale,
        )
        return qkv, kv, scale


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 96])
def test_equals_the_reference_bit_for_bit(
    head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    step = Step(7, device, dtype=dtype, head_dim=head_dim)

    qkv, kv, _ = step.run(rope_kv, PLAN)

    expected_qkv, expected_kv, _ = step.run(reference_attention.rope_kv)
    assert torch.equal(bits(qkv), bits(expected_qkv))
    assert torch.equal(bits(kv), bits(expected_kv))


@settings(max_examples=10, deadline=None)
@given(
    num_rows=st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (9, 3), (5, 5)]),
    head_dim=st.sampled_from([16, 64, 128]),
    block_size=st.sampled_from([8, 16, 32]),
    kv_dtype=st.sampled_from([None, *QUANTIZED]),
)
def test_any_shape_equals_the_reference(
    device: torch.device,
    num_rows: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    kv_dtype: torch.dtype | None,
) -> None:
    step = Step(
        num_rows,
        device,
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
    )

    outputs = step.run(rope_kv, PLAN)

    for output, reference in zip(outputs, step.run(reference_attention.rope_kv), strict=True):
        if output is not None and reference is not None:
            assert torch.equal(bits(output), bits(reference))


@pytest.mark.parametrize("kv_dtype", QUANTIZED, ids=str)
def test_a_code_is_within_its_bound(kv_dtype: torch.dtype, device: torch.device) -> None:
    step, exact = Step(6, device, kv_dtype=kv_dtype), Step(6, device)
    step.qkv[0, -32:] = 0

    _, kv, scale = step.run(rope_kv, PLAN)

    exact.qkv[0, -32:] = 0
    _, wanted, _ = exact.run(rope_kv, PLAN)
    assert scale is not None
    restored, is_written = kv.float() * scale[..., None], wanted.isfinite()
    error = (restored - wanted).abs()[is_written]
    largest = wanted.abs().amax(-1, keepdim=True).expand_as(wanted)[is_written]
    if kv_dtype == torch.int8:
        bound = largest / 127 / 2
    else:
        # Three bits behind the point; below the smallest normal number, 2^-6, steps of 2^-9.
        bound = torch.maximum(wanted.abs()[is_written] / 16, largest / 448 * 2**-10)
    assert (error <= bound * 1.001 + 1e-9).all()
    assert scale[1, int(step.slot[0]) // 8, 1, int(step.slot[0]) % 8] == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("kv_dtype", QUANTIZED, ids=str)
def test_quantizing_does_not_hide_what_is_not_finite(
    kv_dtype: torch.dtype, bad: float, device: torch.device
) -> None:
    step = Step(3, device, kv_dtype=kv_dtype)
    first = int(step.slot[0])
    step.qkv[0, -1] = bad

    _, kv, scale = step.run(rope_kv, PLAN)

    assert scale is not None
    head = kv[1, first // 8, 1, first % 8].float() * scale[1, first // 8, 1, first % 8]
    assert head.isnan().all()
    others = scale[:, first // 8, :, first % 8].flatten()
    assert others.isfinite().sum() == 3, "the token's other heads are as they were"


def test_wrong_arguments_are_named(device: torch.device) -> None:
    step = Step(3, device)
    for name, value in (
        ("slot", step.slot.long()),
        ("cos", step.cos.half()),
        ("sin", step.sin[:2]),
        ("qkv", step.qkv[:, :-32]),
    ):
        setattr(step, name, value)
        with pytest.raises(ValueError, match=f"{name} is"):
            step.run(rope_kv, PLAN)
        step = Step(3, device)
