"""Parts `staging` and `gemm-order`: what only a device with a clock and sums of its own can get wrong.

The tests that are marked `gpu` call the same functions.
"""

from __future__ import annotations

import numpy as np
import torch
from loraplex_engine.device.staging import Staging
from loraplex_kernels.gemm import gemm
from loraplex_kernels.plans import open_plans
from loraplex_kernels.support import dtype_name
from torch import Tensor

from bench.gpu_check.figures import Recorder
from bench.gpu_check.machine import Machine
from bench.gpu_check.numerics import num_unlike
from bench.gpu_check.sizes import Sizes

_STEPS = 64
ORDER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def run_staging(machine: Machine, sizes: Sizes, record: Recorder) -> None:
    """Small and large buffers, step after step as fast as the host goes."""
    del sizes
    for count in (1 << 8,) if machine.is_rehearsal else (1 << 10, 1 << 20):
        record.add(
            f"steps of {count} staged numbers that were written over too early",
            num_overwritten(machine.device, count, _STEPS),
            f"of {_STEPS}",
            at_most=0,
        )


def num_overwritten(device: torch.device, count: int, steps: int) -> int:
    """Steps whose numbers did not all arrive: the host had waited, and wrote the next ones into the same place."""
    staging = Staging(device)
    staged = staging.reserve("x", (count,), np.int32)
    staging.seal()
    arrived = []
    for step in range(steps):
        staging.wait()
        staged.put(np.full(staged.shape, step, np.int32))
        staging.flush()
        arrived.append(staged.device.clone())
    return sum(not bool((one == step).all()) for step, one in enumerate(arrived))


def run_gemm_order(machine: Machine, sizes: Sizes, record: Recorder) -> None:
    """Of `invariant` plans: a position's products are the same, computed alone or in a prompt."""
    del sizes
    for dtype in ORDER_DTYPES[:1] if machine.is_rehearsal else ORDER_DTYPES:
        num_different, count = num_out_of_order(machine, dtype)
        record.add(
            f"decode and prefill products, invariant {dtype_name(dtype)}",
            num_different,
            f"of {count} numbers differ",
            at_most=0,
        )


def num_out_of_order(machine: Machine, dtype: torch.dtype) -> tuple[int, int]:
    """Numbers of a product that differ between the plans of decode and prefill, and of how many."""
    rows, inputs, outputs = (5, 70, 24) if machine.is_rehearsal else (300, 4096, 1000)
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator)
        if machine.is_rehearsal:
            # The interpreter's products are numpy's, with an order of its own: of whole numbers every one is right.
            drawn = (4 * drawn).round()
        return drawn.to(dtype).to(machine.device)

    x, weight, bias = draw(rows, inputs), draw(outputs, inputs), draw(outputs)
    plans = open_plans(machine.support.name, "invariant")
    decode, prefill = (
        gemm(
            x,
            weight,
            bias,
            plans.choose("gemm", phase=phase, tokens=1, dtype=dtype_name(dtype)),
        )
        for phase in ("decode", "prefill")
    )
    return num_unlike(decode, prefill), decode.numel()
