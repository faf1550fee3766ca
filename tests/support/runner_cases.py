"""A tiny model on one attention backend, and runners on it whose free blocks are full of NaN."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from loraplex_engine.attention.base import AttentionBackend
from loraplex_engine.attention.setup import BackendName, open_attention
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.model.loading import load_decoder
from loraplex_engine.model.native_ops import open_ops_kernel
from loraplex_engine.runner import ModelRunner, RunnerLimits
from loraplex_kernels.cpu.build import NativeBuildError

from tests.support.step_driver import StepDriver
from tests.support.tiny_model import TinyShape, write_tiny_model


@dataclass(frozen=True, eq=False)
class RunnerCase:
    """What `open_case` made; hashable, so that what it computes can be kept."""

    model: Decoder
    attention: AttentionBackend[Any, Any]
    limits: RunnerLimits

    def new_driver(self, seed: int = 0) -> StepDriver:
        """A runner of its own, which hands blocks out in an order that `seed` decides."""
        runner = ModelRunner(self.model, self.attention, self.limits)
        for kv in runner.kv_layers:
            kv[:-1] = float("nan")  # the last slot may be the backend's own
        return StepDriver(runner, seed)


def open_case(
    folder: Path,
    shape: TinyShape,
    dtype: torch.dtype,
    backend: BackendName,
    limits: RunnerLimits,
    *,
    cache_dir: Path,
) -> RunnerCase:
    """Write the model to `folder` and load it, with operations of the same backend; skips where `backend` needs a C compiler and has none."""
    try:
        ops = open_ops_kernel(
            dtype,
            cache_dir=cache_dir,
            num_threads=torch.get_num_threads(),
            backend="native" if backend == "native" else "torch",
        )
        model = load_decoder(write_tiny_model(folder, shape), dtype, ops=ops)
        attention = open_attention(
            model.attention_shape,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            cache_dir=cache_dir,
            num_threads=torch.get_num_threads(),
            backend=backend,
        )
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")
    return RunnerCase(model, attention, limits)
