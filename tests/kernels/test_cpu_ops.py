"""The C operations against float64, against torch's bits where they are promised, and row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loraplex_engine.model.rope import RotaryTable, rotate_merged_
from loraplex_kernels.cpu import build
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.ops import OpsKernel
from torch import Tensor

from tests.support.adapter_files import native_cache_dir
from tests.support.cpu import cpu_flags

WIDTHS = (1, 7, 8, 33, 100, 190, 576)
DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-5
# Half the distance of neighbouring numbers, relative: what one rounding may change.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
FP32 = UNIT[torch.float32]
# More numbers than one thread computes alone, at a width of 576.
MANY_ROWS = 130

OpenKernel = Callable[..., OpsKernel]


@pytest.fixture
def open_kernel(pytestconfig: pytest.Config) -> OpenKernel:
    cache: Path = native_cache_dir(pytestconfig)

    def open_(dtype: torch.dtype, num_threads: int = 2) -> OpsKernel:
        try:
            return OpsKernel(dtype, cache_dir=cache, num_threads=num_threads)
        except NativeBuildError as error:
            pytest.skip(f"no C compiler here: {error}")

    return open_


def draw(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_the_norm_is_within_the_roundings_that_it_makes(
    open_kernel: OpenKernel, dtype: torch.dtype, width: int, scale: float
) -> None:
    x, weight = draw(5, width, dtype=dtype, scale=scale), draw(width, dtype=dtype, seed=1)

    out = open_kernel(dtype).rms_norm(x, weight, EPS)

    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    # Each of 32 sums has width / 32 additions of squares, their tree 5; the root halves what they err.
    # Then the mean, eps (given in fp32), the root, its reciprocal and two products.
    bound = ((width / 32 + 6) / 2 + 7) * FP32
    bound += 2 * UNIT[dtype] * 1.01 if dtype is torch.bfloat16 else 0.0
    assert ((out.double() - expected).abs() <= bound * expected.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_sum_has_torch_s_bits_and_its_norm_is_the_norm(
    open_kernel: OpenKernel, dtype: torch.dtype, width: int
) -> None:
    kernel = open_kernel(dtype)
    hidden, y = draw(3, width, dtype=dtype), draw(3, width, dtype=dtype, seed=1)
    weight, sum_ = draw(width, dtype=dtype, seed=2), hidden + y

    out = kernel.rms_norm(hidden, weight, EPS, y_TH=y)

    assert same_bits(hidden, sum_)
    assert same_bits(out, kernel.rms_norm(sum_, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_of_gathered_rows_is_that_of_the_rows(
    open_kernel: OpenKernel, dtype: torch.dtype
) -> None:
    kernel = open_kernel(dtype)
    x, weight = draw(9, 100, dtype=dtype), draw(100, dtype=dtype, seed=1)
    row = torch.tensor([8, 0, 3, 3])

    assert same_bits(kernel.rms_norm_of(x, row, weight, EPS), kernel.rms_norm(x[row], weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_activation_is_within_the_roundings_that_it_makes(
    open_kernel: OpenKernel, dtype: torch.dtype, width: int
) -> None:
    gates = torch.linspace(-86.9, 90.0, 40 * width).reshape(40, width).to(dtype)
    gates = gates.clamp(min=-86.9)
    ups = draw(40, width, dtype=dtype)

    out = open_kernel(dtype).gated(torch.cat((gates, ups), dim=1))

    expected = gates.double() * torch.sigmoid(gates.double()) * ups.double()
    # e^-|a| is within 2 ulp (4 units), and counts above and below the line; then a sum, a quotient and
    # two products.
    bound = 12 * FP32 + (UNIT[dtype] if dtype is torch.bfloat16 else 0.0)
    # Results below the smallest normal number are rounded to multiples of the smallest there is.
    assert ((out.double() - expected).abs() <= bound * 1.001 * expected.abs() + 2.0**-126).all()


def test_the_activation_of_the_largest_and_smallest_gates(open_kernel: OpenKernel) -> None:
    gates = torch.tensor([[3e38, -3e38, -88.0, 0.0, -0.0, torch.inf, -torch.inf, torch.nan]])

    out = open_kernel(torch.float32).gated(torch.cat((gates, torch.ones(1, 8)), dim=1))

    assert out[0, :2].tolist() == [gates[0, 0].item(), 0.0]
    assert out[0, 2].item() == pytest.approx(-88.0 * 6.05e-39, abs=1e-36)
    assert out[0, 3:6].tolist() == [0.0, 0.0, torch.inf]
    # As torch has it: minus infinity times zero.
    assert out[0, 6:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (2, 1, 8), (3, 3, 6)])
def test_rotation_and_cache_have_torch_s_bits(
    open_kernel: OpenKernel, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    num_rows, num_tokens, num_slots = 11, 9, 40
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    qkv = draw(num_rows, q_size + 2 * kv_size, dtype=dtype)
    position = torch.arange(num_rows) * 31 % 97
    cos, sin = RotaryTable(head_dim, 128, 10_000.0, dtype).gather(position)
    slot = torch.randperm(num_slots, generator=torch.Generator().manual_seed(3))[:num_tokens]
    kv = torch.full((num_slots, 2 * kv_size), torch.nan, dtype=dtype)
    expected_qkv, expected_kv = qkv.clone(), kv.clone()
    rotate_merged_(expected_qkv, heads + kv_heads, cos, sin)
    expected_kv[slot] = expected_qkv[:num_tokens, q_size:]

    open_kernel(dtype).rotate_and_write(
        qkv, cos, sin, kv, slot, num_heads=heads, num_kv_heads=kv_heads
    )

    assert same_bits(qkv[:num_tokens], expected_qkv[:num_tokens])
    assert same_bits(kv, expected_kv)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 576])
def test_a_row_s_bits_are_its_own(open_kernel: OpenKernel, dtype: torch.dtype, width: int) -> None:
    """Alone, among neighbours of any number, beside NaN and infinities, and by any number of threads."""
    alone = open_kernel(dtype, 1)
    x, y = draw(MANY_ROWS, width, dtype=dtype), draw(MANY_ROWS, width, dtype=dtype, seed=1)
    gates, weight = (
        draw(MANY_ROWS, 2 * width, dtype=dtype, seed=2),
        draw(width, dtype=dtype, seed=3),
    )
    hostile = torch.arange(MANY_ROWS) % 7 == 3
    for tensor in (x, y, gates):
        tensor[hostile] = torch.nan
        tensor[hostile, 0] = torch.inf
    expected = [
        torch.cat(rows)
        for rows in zip(
            *(
                (
                    alone.rms_norm(x[i : i + 1].clone(), weight, EPS, y_TH=y[i : i + 1]),
                    alone.gated(gates[i : i + 1]),
                )
                for i in range(MANY_ROWS)
            ),
            strict=True,
        )
    ]
    kept = ~hostile

    for threads in (1, 2, 4):
        kernel = open_kernel(dtype, threads)
        for count in (*range(1, 18), 33, MANY_ROWS):
            rows = slice(MANY_ROWS - count, MANY_ROWS)
            found = (
                kernel.rms_norm(x[rows].clone(), weight, EPS, y_TH=y[rows].contiguous()),
                kernel.gated(gates[rows]),
            )
            for out, whole in zip(found, expected, strict=True):
                assert same_bits(out[kept[rows]], whole[rows][kept[rows]]), (threads, count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 30, 100, 190, 576])
def test_wide_vectors_have_the_bits_of_narrow_ones(
    open_kernel: OpenKernel, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int
) -> None:
    if not {"avx512f", "avx512bw", "avx512dq"} <= cpu_flags():
        pytest.skip("this CPU has no AVX-512: there are no wide vectors here")
    wide = open_kernel(dtype)
    flags = [flag.replace("-march=native", "-march=haswell") for flag in build.FLAGS]
    monkeypatch.setattr(build, "FLAGS", tuple(flags))
    narrow = open_kernel(dtype)
    x, y = draw(5, width, dtype=dtype), draw(5, width, dtype=dtype, seed=1)
    x[1, width // 2], x[2] = torch.nan, 3e38
    x[3] *= 1e-39  # subnormal, in fp32 and in bf16
    weight = draw(width, dtype=dtype, seed=2)
    cos, sin = RotaryTable(width, 64, 10_000.0, dtype).gather(torch.arange(5))
    results = []

    for kernel in (wide, narrow):
        hidden, qkv, kv = x.clone(), x.repeat(1, 3), torch.zeros(5, 2 * width, dtype=dtype)
        normed = kernel.rms_norm(hidden, weight, EPS, y_TH=y)
        slot = torch.arange(5)
        kernel.rotate_and_write(qkv, cos, sin, kv, slot, num_heads=1, num_kv_heads=1)
        results.append((hidden, normed, kernel.gated(torch.cat((x * 40, y), dim=1)), qkv, kv))

    for own, expected in zip(*results, strict=True):
        assert same_bits(own.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(own.isnan(), expected.isnan())


def test_rotation_by_several_threads_is_rotation(open_kernel: OpenKernel) -> None:
    qkv = draw(MANY_ROWS, 960, dtype=torch.float32)
    cos, sin = RotaryTable(64, 256, 10_000.0, torch.float32).gather(torch.arange(MANY_ROWS))
    found = []
    for threads in (1, 4):
        own, kv = qkv.clone(), torch.zeros(MANY_ROWS, 384)
        open_kernel(torch.float32, threads).rotate_and_write(
            own, cos, sin, kv, torch.arange(MANY_ROWS), num_heads=9, num_kv_heads=3
        )
        found.append((own, kv))

    assert same_bits(found[0][0], found[1][0])
    assert same_bits(found[0][1], found[1][1])


def test_what_the_kernel_cannot_read_is_refused(open_kernel: OpenKernel) -> None:
    kernel = open_kernel(torch.float32)
    x, weight = torch.zeros(4, 8), torch.zeros(8)

    with pytest.raises(ValueError, match=r"x is \(4, 8\) torch.bfloat16"):
        kernel.rms_norm(x.bfloat16(), weight, EPS)
    with pytest.raises(ValueError, match="contiguous: False"):
        kernel.rms_norm(torch.zeros(8, 4).T, weight, EPS)
    with pytest.raises(ValueError, match=r"weight is \(7,\)"):
        kernel.rms_norm(x, weight[:7], EPS)
    with pytest.raises(ValueError, match=r"y is \(3, 8\)"):
        kernel.rms_norm(x, weight, EPS, y_TH=x[:3])
    with pytest.raises(ValueError, match=r"row is torch\.int32"):
        kernel.rms_norm_of(x, torch.zeros(2, dtype=torch.int32), weight, EPS)
    with pytest.raises(ValueError, match="7 columns"):
        kernel.gated(torch.zeros(4, 7))
    with pytest.raises(ValueError, match=r"kv is \(9, 7\)"):
        kernel.rotate_and_write(
            torch.zeros(4, 32),
            torch.zeros(4, 1, 8),
            torch.zeros(4, 1, 8),
            torch.zeros(9, 7),
            torch.zeros(4, dtype=torch.int64),
            num_heads=2,
            num_kv_heads=1,
        )
    with pytest.raises(ValueError, match="float16"):
        OpsKernel(torch.float16, cache_dir=Path(), num_threads=1)
