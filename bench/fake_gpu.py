"""A GPU that does nothing, to measure what the host does: Triton compiles and binds as ever, launches go nowhere.

Triton asks its driver for the device; this one names an H100-class device, takes every binary and counts launches.
What a real driver adds to each launch (about 3 microseconds) is not in the figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from loraplex_engine.device.graphs import Captured
from loraplex_engine.device.memory_profile import DeviceMeter
from loraplex_kernels.support import ARCHITECTURES, Support

# The kernel whose result the host reads: its outputs must be tokens.
_ANSWERS = {"_sample_pick": ("token_ptr", "status_ptr")}


@dataclass
class Launches:
    """How many kernels were launched."""

    count: int = 0


class _Utils:
    """What Triton asks of a driver's module."""

    def load_binary(self, name: str, *_: object) -> tuple[str, str, int, int, int]:
        return name, name, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        del device
        return {"max_shared_mem": ARCHITECTURES["sm_90"].shared_bytes, "multiprocessor_count": 132}


class FakeDriver:
    """Triton's driver for sm_90, without a device."""

    def __init__(self, launches: Launches) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", 90, 32)
        self._launches = launches
        self.utils = _Utils()

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """What is called for a launch: grid, stream, function, metadata, hooks, then the kernel's arguments."""
        names = source.fn.arg_names
        answers = [names.index(name) for name in _ANSWERS.get(metadata.name, ())]
        launches = self._launches
        num_first = 9

        def launch(*args: Any) -> None:
            launches.count += 1
            for index in answers:
                args[num_first + index].zero_()

        return launch

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        del device
        return 0

    def get_current_target(self) -> Any:
        """sm_90."""
        return self._target


def install() -> Launches:
    """Have Triton use the fake from here on; returns its counter.

    Raises:
        RuntimeError: TRITON_INTERPRET is set, under which nothing is launched at all.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 is set: unset it, the interpreter launches nothing")
    from triton.runtime import driver

    launches = Launches()
    driver.set_active(FakeDriver(launches))
    return launches


@dataclass
class FakeMachine:
    """`bench.gpu_check.machine.Machine` whose tensors are the CPU's; it measures nothing itself."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_rehearsal: bool = True

    @property
    def support(self) -> Support:
        """sm_90."""
        return ARCHITECTURES["sm_90"]

    def synchronize(self) -> None:
        """Nothing is under way."""

    def warm(self) -> None:
        """There are no clocks."""

    def time_us(self, run: Callable[[], object], repeats: int) -> float:
        """There is no device whose time could be taken."""
        raise NotImplementedError("a fake device takes no time")

    def graph_backend(self) -> _NoGraphs:
        """Recordings whose replay is free, as one call of the driver nearly is."""
        return _NoGraphs()

    def meter(self) -> DeviceMeter:
        """There is no device whose memory could be read."""
        raise NotImplementedError("a fake device has no memory")

    def facts(self) -> dict[str, str]:
        """See `Machine`."""
        return {"gpu": "none: a fake that takes launches"}


class _NoGraphs:
    def capture(self, run: Callable[[], None]) -> Captured:
        run()
        return _Nothing()


class _Nothing:
    def replay(self) -> None:
        """Nothing to do."""
