"""One copy a step, of what is in use; addresses that stay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loraplex_engine.device.staging import ALIGNMENT, MAX_GAP_BYTES, Staging
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu_check.device_only import num_overwritten

CPU = torch.device("cpu")


class Copies(TorchDispatchMode):
    """Counts the bytes of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def test_all_that_is_in_use_arrives_in_one_copy_and_nothing_before() -> None:
    staging = Staging(CPU)
    tokens = staging.reserve("tokens", (5,), np.int64)
    scales = staging.reserve("scales", (3,), np.float32)
    table = staging.reserve("table", (4, 6), np.int32)
    staging.seal()
    tokens.host[:2] = [7, 8]
    tokens.use(2)
    scales.put(np.asarray([0.5], np.float32))
    table.host[:2] = np.arange(12).reshape(2, 6)
    table.use(12)
    assert not tokens.device.any()

    with Copies() as copies:
        staging.flush()

    # 5 int64 and 3 fp32, each rounded up to 16 bytes, and half of the table.
    assert copies.sizes == [48 + 16 + 48]
    assert tokens.device.tolist() == [7, 8, 0, 0, 0]
    assert scales.device.tolist() == [0.5, 0.0, 0.0]
    assert table.device[:2].flatten().tolist() == list(range(12))


def test_what_lies_behind_the_last_used_byte_does_not_travel() -> None:
    staging = Staging(CPU)
    first = staging.reserve("first", (4,), np.int32)
    second = staging.reserve("second", (4,), np.int32)
    staging.seal()
    first.host[:] = 1
    second.host[:] = 2
    first.use(4)

    assert staging.flush() == 16
    assert first.device.tolist() == [1] * 4
    assert second.device.tolist() == [0] * 4


def test_a_gap_that_is_dearer_than_a_copy_is_left_out() -> None:
    staging = Staging(CPU)
    first = staging.reserve("first", (4,), np.int32)
    middle = staging.reserve("middle", (MAX_GAP_BYTES + 16,), np.uint8)
    last = staging.reserve("last", (4,), np.int32)
    staging.seal()
    for staged in (first, middle, last):
        staged.host[:] = 3

    with Copies() as copies:
        first.use(4)
        last.use(4)
        staging.flush()

    assert copies.sizes == [16, 16]
    assert first.device.tolist() == last.device.tolist() == [3] * 4
    assert not middle.device.any()


def test_a_flush_without_use_copies_nothing_and_use_lasts_for_one_flush() -> None:
    staging = Staging(CPU)
    staged = staging.reserve("x", (4,), np.int32)
    staging.seal()
    staged.host[:] = 3

    with Copies() as copies:
        staging.flush()
        staged.use(0)
        staging.flush()
        staged.use(4)
        staging.flush()
        staging.flush()

    assert copies.sizes == [16]


def test_values_stay_where_a_reservation_is_not_written_again() -> None:
    staging = Staging(CPU)
    kept = staging.reserve("kept", (2,), np.int32)
    other = staging.reserve("other", (2,), np.int32)
    staging.seal()
    kept.put(np.asarray([4, 5], np.int32))
    staging.flush()

    other.put(np.asarray([6, 7], np.int32))
    staging.flush()

    assert kept.device.tolist() == [4, 5]
    assert other.device.tolist() == [6, 7]


def test_every_reservation_is_aligned_and_its_address_never_changes() -> None:
    staging = Staging(CPU)
    staged = [
        staging.reserve(f"s{i}", shape, dtype)
        for i, (shape, dtype) in enumerate(
            [((3,), np.uint8), ((1, 7), np.int32), ((5,), np.bool_), ((2, 3), np.int64)]
        )
    ]
    staging.seal()
    before = [one.device.data_ptr() for one in staged]

    for one in staged:
        one.put(np.ones(one.shape, one.dtype))
    staging.flush()

    assert [one.device.data_ptr() for one in staged] == before
    assert all(pointer % ALIGNMENT == 0 for pointer in before)
    assert all(bool(one.device.all()) for one in staged)
    assert staging.size_bytes == 16 + 32 + 16 + 48


def test_misuse_names_the_reservation() -> None:
    staging = Staging(CPU)
    staged = staging.reserve("tokens", (4,), np.int32)

    with pytest.raises(ValueError, match="tokens: reserved twice"):
        staging.reserve("tokens", (4,), np.int32)
    with pytest.raises(ValueError, match=r"empty: shape is \(0,\)"):
        staging.reserve("empty", (0,), np.int32)
    with pytest.raises(ValueError, match="wide: dtype is complex128"):
        staging.reserve("wide", (1,), np.complex128)
    staging.seal()
    with pytest.raises(ValueError, match="tokens: 5 entries in use, of 4"):
        staged.use(5)
    with pytest.raises(ValueError, match="tokens: 6 entries"):
        staged.put(np.zeros(6, np.int32))
    with pytest.raises(AssertionError, match="late is reserved after"):
        staging.reserve("late", (1,), np.int32)


@pytest.mark.gpu
def test_on_a_gpu_the_copy_is_awaited_before_the_host_is_written_again() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

    assert num_overwritten(torch.device("cuda"), 1 << 20, steps=8) == 0
