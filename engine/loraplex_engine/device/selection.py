"""Which device an engine computes on, and what it is called.

`auto` takes the first CUDA device where torch sees one. What stands in the way of a device that was asked
for is said with its remedy, before anything is loaded.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Protocol

import torch
from loraplex_kernels.support import Support, UnsupportedDeviceError, support_of_capability

from loraplex_engine.config import DeviceName
from loraplex_engine.errors import ConfigError

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class EngineDevice:
    """The device, as the engine uses it and as its registry record names it."""

    torch_device: torch.device = _CPU
    name: str = "cpu"  # "cpu", or the GPU's name
    isa: str = field(default_factory=torch.backends.cpu.get_cpu_capability)  # "AVX2", or "sm_90"
    support: Support | None = None  # of a GPU

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.torch_device.type == "cuda"


class CudaProbe(Protocol):
    """What must be known of this machine's GPUs; injected in tests."""

    def missing(self) -> str | None:
        """Why no GPU can be used; None: the first one can."""
        ...

    def name(self) -> str: ...
    def capability(self) -> tuple[int, int]: ...


class TorchCuda:
    """This machine, as torch sees it."""

    def missing(self) -> str | None:
        """See `CudaProbe.missing`."""
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch"
        if not torch.cuda.is_available():
            return (
                "torch sees no CUDA device: check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
            )
        return None

    def name(self) -> str:
        """Of the first GPU."""
        return torch.cuda.get_device_name(0)

    def capability(self) -> tuple[int, int]:
        """Of the first GPU."""
        return torch.cuda.get_device_capability(0)


def has_triton() -> bool:
    """Whether Triton is installed; nothing is imported."""
    return importlib.util.find_spec("triton") is not None


def select_device(
    wanted: DeviceName, cuda: CudaProbe | None = None, *, is_triton_here: bool | None = None
) -> EngineDevice:
    """The device for `wanted`.

    Raises:
        ConfigError: a GPU was asked for, or is there under `auto`, and cannot be used.
    """
    if wanted == "cpu":
        return EngineDevice()
    cuda = cuda or TorchCuda()
    problem = cuda.missing()
    if problem is not None:
        if wanted == "auto":
            return EngineDevice()
        raise ConfigError(f"device is 'cuda', but {problem}; or use --device cpu")
    name = cuda.name()
    if not (has_triton() if is_triton_here is None else is_triton_here):
        raise ConfigError(
            f"device is {wanted!r} and this is {name}, but Triton is not installed: install"
            " loraplex[gpu], or use --device cpu"
        )
    try:
        support = support_of_capability(*cuda.capability())
    except UnsupportedDeviceError as error:
        raise ConfigError(
            f"device is {wanted!r} and this is {name}: {error}; use --device cpu"
        ) from error
    return EngineDevice(torch.device("cuda", 0), name, f"sm_{support.capability}", support)
