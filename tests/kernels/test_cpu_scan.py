"""The scan of logits beside numpy's argmax."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.scan import RowScan

from tests.support.adapter_files import native_cache_dir


@pytest.fixture(params=[1, 2])
def scan(request: pytest.FixtureRequest) -> RowScan:
    cache: Path = native_cache_dir(request.config)
    try:
        return RowScan(cache, num_threads=request.param)
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 7, 16, 32, 1023, 1024, 1025, 3001, 3104])
def test_the_best_is_the_first_of_the_highest(
    scan: RowScan, dtype: torch.dtype, width: int
) -> None:
    generator = torch.Generator().manual_seed(width)
    # Few distinct values: nearly every row has several that are highest.
    logits = torch.randint(-3, 4, (90, width), generator=generator).to(dtype)
    logits[1] = torch.randn(width, generator=generator).to(dtype)
    logits[2] = -3e38
    logits[3, :] = -0.0
    logits[3, width // 2 :] = 0.0

    best = scan(logits)

    assert best.id_R.tolist() == logits.float().numpy().argmax(axis=1).tolist()
    assert best.is_finite_R.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 500, 1023, 2047, 2048, 2050])
def test_one_number_that_is_none_is_found_and_stays_in_its_row(
    scan: RowScan, dtype: torch.dtype, bad: float, at: int
) -> None:
    logits = torch.randn(80, 2051, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = logits.float().numpy().argmax(axis=1)
    logits[5, at] = bad

    best = scan(logits)

    assert np.flatnonzero(~best.is_finite_R).tolist() == [5]
    others = np.arange(80) != 5
    assert best.id_R[others].tolist() == expected[others].tolist()


def test_as_many_rows_as_threads_share_are_each_scanned(scan: RowScan) -> None:
    logits = torch.randn(90, 12_000, generator=torch.Generator().manual_seed(0)).bfloat16()

    best = scan(logits)

    assert best.id_R.tolist() == logits.float().numpy().argmax(axis=1).tolist()
    assert best.is_finite_R.all()


def test_rows_may_lie_apart_and_be_more_than_before(scan: RowScan) -> None:
    wide = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    wide[:, 40:] = torch.nan

    best = scan(wide[:, :40])

    assert best.id_R.tolist() == wide[:, :40].numpy().argmax(axis=1).tolist()
    assert best.is_finite_R.all()
    assert scan(wide[:3, :40]).id_R.shape == (3,)


def test_logits_that_it_cannot_read_are_refused(scan: RowScan) -> None:
    with pytest.raises(ValueError, match="float16"):
        scan(torch.zeros(2, 2, dtype=torch.float16))
    with pytest.raises(ValueError, match="strides"):
        scan(torch.zeros(4, 2).T)
