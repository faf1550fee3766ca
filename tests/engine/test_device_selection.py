"""The device that was asked for, or why not and what to do."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from loraplex_engine.config import DeviceName
from loraplex_engine.device.selection import EngineDevice, TorchCuda, select_device
from loraplex_engine.errors import ConfigError


@dataclass
class FakeCuda:
    problem: str | None = None
    version: tuple[int, int] = (9, 0)

    def missing(self) -> str | None:
        return self.problem

    def name(self) -> str:
        return "NVIDIA H200"

    def capability(self) -> tuple[int, int]:
        return self.version


def select(
    wanted: DeviceName, cuda: FakeCuda | None = None, *, has_triton: bool = True
) -> EngineDevice:
    return select_device(wanted, cuda or FakeCuda(), is_triton_here=has_triton)


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_gpu_is_taken_where_there_is_one_and_says_what_it_is(wanted: DeviceName) -> None:
    device = select(wanted)

    assert device.is_cuda
    assert (device.torch_device, device.name, device.isa) == (
        torch.device("cuda", 0),
        "NVIDIA H200",
        "sm_90",
    )


def test_the_isa_is_the_gpu_s_own_where_another_one_s_plans_serve_it() -> None:
    device = select("cuda", FakeCuda(version=(8, 6)))

    assert device.isa == "sm_86"
    assert device.support is not None
    assert device.support.name == "sm_89"


def test_the_cpu_is_taken_when_asked_for_and_by_auto_without_a_gpu() -> None:
    for device in (select("cpu"), select("auto", FakeCuda("no driver"))):
        assert (device.is_cuda, device.name) == (False, "cpu")
        assert device.isa == torch.backends.cpu.get_cpu_capability()


@pytest.mark.parametrize(
    ("cuda", "has_triton", "message"),
    [
        (
            FakeCuda("no driver: install it"),
            True,
            "device is 'cuda', but no driver: install it; or",
        ),
        (FakeCuda(), False, r"NVIDIA H200, but Triton is not installed: install loraplex\[gpu\]"),
        (FakeCuda(version=(7, 5)), True, "7.5: the kernels need 8.0 .* use --device cpu"),
    ],
)
def test_what_stands_in_the_way_of_a_gpu_is_named_with_its_remedy(
    cuda: FakeCuda, has_triton: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        select("cuda", cuda, has_triton=has_triton)


def test_an_unusable_gpu_under_auto_is_an_error_too() -> None:
    with pytest.raises(ConfigError, match="Triton is not installed"):
        select("auto", has_triton=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_this_machine_says_why_it_has_no_gpu() -> None:
    assert TorchCuda().missing() is not None
    with pytest.raises(ConfigError, match="use --device cpu"):
        select_device("cuda")
