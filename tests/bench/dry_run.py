"""The timed parts of gpu_check, and `memory`, at their full batches, contexts and adapters, on a GPU that does nothing.

A process of its own: Triton must not be interpreted. The model is narrow and has three layers; counts of rows,
blocks, slots, graphs and buckets are those of the real run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loraplex_engine.device.memory_profile import DeviceMeter
from loraplex_engine.model.config import ModelConfig
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.model.loading import build_decoder
from loraplex_kernels.plans import Column, open_plans

from bench import fake_gpu
from bench.gpu_check import bandwidth, memory, sizes, speed
from bench.gpu_check.figures import Recorder
from bench.gpu_check.machine import RehearsalMachine
from bench.host_cost import _NoProducts

_NARROW = sizes.model_config(
    vocab=512, hidden=256, inner=512, layers=3, heads=32, kv_heads=8, head_dim=16
)


@dataclass
class DryMachine(fake_gpu.FakeMachine):
    """Goes every way that a GPU goes; what is timed on the device takes 100 microseconds."""

    is_rehearsal: bool = False

    def time_us(self, run: Callable[[], object], repeats: int) -> float:
        run()
        return 100.0

    def meter(self) -> DeviceMeter:
        return RehearsalMachine().meter()


def _decoder(_: Any, config: ModelConfig, dtype: torch.dtype, column: Column) -> Decoder:
    weights = sizes.RandomWeights(torch.device("cpu"), dtype, has_head=True)
    plans = open_plans("sm_90", column)
    return build_decoder(config, dtype, weights, plans=plans, method=_NoProducts())


def _unpinned(make: Callable[..., Any], *args: Any, pin: bool, **named: Any) -> Any:
    return make(*args, pin=False, **named)


def main(figures: Path) -> None:
    fake_gpu.install()
    torch.set_num_threads(1)
    torch.cuda.empty_cache = lambda: None
    speed.random_decoder = memory.random_decoder = _decoder
    speed.random_adapter = partial(_unpinned, speed.random_adapter)
    bandwidth.random_adapter = partial(_unpinned, bandwidth.random_adapter)
    memory.random_adapter = partial(_unpinned, memory.random_adapter)
    full = replace(
        sizes.FULL,
        speed_model=_NARROW,
        memory_model=(_NARROW, torch.bfloat16),
        steps=2,
        read_bytes=1 << 26,
        cache_bytes=2 << 20,
        repeats=1,
    )
    for name, run in (
        ("memory", memory.run),
        ("bandwidth", bandwidth.run),
        ("decode", speed.run_decode),
        ("prefill", speed.run_prefill),
        ("invariant", speed.run_invariant),
    ):
        run(DryMachine(), full, Recorder(name, figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
