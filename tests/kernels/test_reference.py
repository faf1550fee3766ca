"""The LoRA references against one line of linear algebra, and their argument checks."""

from __future__ import annotations

import pytest
import torch
from loraplex_kernels.reference import lora_expand, lora_shrink


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shrink_then_expand_is_the_low_rank_product(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 24).to(dtype), torch.randn(5, 17).to(dtype)
    a, b = torch.randn(3, 4, 24).to(dtype), torch.randn(3, 17, 4).to(dtype)
    slots = torch.tensor([2, -1, 0, 2, 1], dtype=torch.int32)
    scales = torch.tensor([0.5, 2.0, 3.0])

    result = lora_expand(y, lora_shrink(x, a, slots), b, slots, scales)

    for row, slot in enumerate(slots.tolist()):
        wanted = y[row].double()
        if slot >= 0:
            wanted = wanted + scales[slot] * (
                b[slot].double() @ (a[slot].double() @ x[row].double())
            )
        tolerance = 1e-5 if dtype is torch.float32 else 2**-8
        torch.testing.assert_close(result[row].double(), wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(result[1], y[1])


def test_a_neighbours_overflow_is_not_multiplied_in() -> None:
    a = torch.stack([torch.ones(1, 4), torch.full((1, 4), 1e38)])
    x = torch.full((2, 4), 10.0)

    h = lora_shrink(x, a, torch.tensor([0, 1], dtype=torch.int32))

    assert h[0].item() == 40
    assert h[1].isinf()


def test_wrong_arguments_are_refused() -> None:
    x, a, b = torch.zeros(2, 4), torch.zeros(1, 3, 4), torch.zeros(1, 5, 3)
    slots, scales = torch.zeros(2, dtype=torch.int32), torch.ones(1)
    with pytest.raises(ValueError, match="slots must lie"):
        lora_shrink(x, a, slots + 1)
    with pytest.raises(ValueError, match="int32"):
        lora_shrink(x, a, slots.long())
    with pytest.raises(ValueError, match="a is"):
        lora_shrink(x, a.half(), slots)
    with pytest.raises(ValueError, match="b is"):
        lora_expand(torch.zeros(2, 6), torch.zeros(2, 3), b, slots, scales)
