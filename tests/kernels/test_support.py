"""Which architecture can do what."""

from __future__ import annotations

import pytest
import torch
from loraplex_kernels.roofline import PEAKS
from loraplex_kernels.support import (
    ARCHITECTURES,
    MODEL_DTYPES,
    UnsupportedDeviceError,
    dtype_name,
    dtype_size,
    support_of,
    support_of_capability,
    triton_type,
)


@pytest.mark.parametrize(
    ("capability", "name", "has_fp8", "shared_kib"),
    [
        ((8, 0), "sm_80", False, 163),
        ((8, 6), "sm_89", False, 99),
        ((8, 9), "sm_89", True, 99),
        ((9, 0), "sm_90", True, 227),
        ((10, 0), "sm_100", True, 227),
        ((10, 3), "sm_100", True, 227),
        ((12, 0), "sm_89", True, 99),
    ],
)
def test_a_gpu_uses_the_plans_of_its_nearest_relative(
    capability: tuple[int, int], name: str, has_fp8: bool, shared_kib: int
) -> None:
    support = support_of_capability(*capability)

    assert support.name == name
    assert support.capability == 10 * capability[0] + capability[1]
    assert support.allows("fp8") == support.has_fp8 == has_fp8
    assert support.shared_bytes == shared_kib * 1024
    assert all(support.allows(dtype) for dtype in (*MODEL_DTYPES, "int8"))
    assert not support.allows("fp64")


def test_what_is_not_supported_is_said_with_a_remedy() -> None:
    with pytest.raises(UnsupportedDeviceError, match=r"7\.5: the kernels need 8\.0"):
        support_of_capability(7, 5)
    with pytest.raises(UnsupportedDeviceError, match=r"8\.9 or newer, this is 8\.0: use int8"):
        ARCHITECTURES["sm_80"].check("fp8")
    with pytest.raises(UnsupportedDeviceError, match="'fp4': kernels know bf16"):
        ARCHITECTURES["sm_100"].check("fp4")
    with pytest.raises(UnsupportedDeviceError, match="float64: kernels know"):
        dtype_name(torch.float64)
    with pytest.raises(UnsupportedDeviceError, match="device meta"):
        support_of(torch.device("meta"))
    ARCHITECTURES["sm_89"].check("fp8")


def test_a_product_has_the_instruction_of_its_architecture() -> None:
    wide = {name: support.matrix_instruction("wgmma") for name, support in ARCHITECTURES.items()}

    assert wide == {
        "sm_80": "mma.sync",
        "sm_89": "mma.sync",
        "sm_90": "wgmma.mma_async",
        "sm_100": "tcgen05.mma",
    }
    assert {s.matrix_instruction("mma") for s in ARCHITECTURES.values()} == {"mma.sync"}


def test_dtypes_have_one_name_each() -> None:
    assert dtype_name(torch.float8_e4m3fn) == "fp8"
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn):
        assert dtype_size(dtype_name(dtype)) == dtype.itemsize
    assert [triton_type(name) for name in ("bf16", "int8", "fp8")] == ["bf16", "i8", "fp8e4nv"]


def test_the_floor_is_whichever_takes_longer() -> None:
    assert set(PEAKS) == set(ARCHITECTURES)
    h200 = PEAKS["sm_90"]

    def floor(bytes_moved: int, flops: int, dtype: str = "bf16", *, tensor: bool = True) -> float:
        return h200.floor_us(
            bytes_moved=bytes_moved, flops=flops, dtype=dtype, on_tensor_cores=tensor
        )

    assert floor(4_800_000, 1) == pytest.approx(1.0)
    assert floor(1, 989_000_000) == pytest.approx(1.0)
    assert floor(1, 67_000_000, tensor=False) == pytest.approx(1.0)
    assert floor(1, 494_000_000, "fp32") == pytest.approx(1.0)
