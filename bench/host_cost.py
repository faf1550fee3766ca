"""What a decoding step costs the host: metadata and launches, eager and replayed, on a GPU that does nothing.

    python -m bench.host_cost

32 layers of Llama-3.1-8B's structure at small widths (a launch costs the host the same at any), products left out
(their launches are cuBLAS's: about 5 microseconds each on a GPU, 129 of them), all else as in the engine: rows,
staging, attention and LoRA metadata, Triton's binding of arguments, sampling parameters, results.
The first run compiles the kernels, which takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.model.linear import Linear
from loraplex_engine.model.loading import build_decoder
from loraplex_kernels.plans import Phase, open_plans
from torch import Tensor

from bench import fake_gpu
from bench.gpu_check.adapters import random_adapter
from bench.gpu_check.sizes import RandomWeights, model_config, shape_of
from bench.gpu_check.stand import Room, Rows, Stand, blocks_for

_CONTEXT = 512
_RANK = 16
_CONFIG = {"vocab": 256, "hidden": 128, "inner": 256, "heads": 8, "kv_heads": 2, "head_dim": 16}


@dataclass(frozen=True, slots=True)
class Cost:
    """Lower quartiles over the steps, in microseconds: other processes can only make a step longer."""

    batch: int
    adapters: int  # distinct ones in the step
    is_replayed: bool
    metadata_us: float  # attention, LoRA, inputs: written down in numpy
    launches_us: float  # everything from the embedding to the logits
    rest_us: float  # rows, sampling parameters and launches, results
    num_launches: int  # of Triton, in a step

    @property
    def total_us(self) -> float:
        return self.metadata_us + self.launches_us + self.rest_us


def measure(
    batches: Sequence[int], adapters: Sequence[int], *, num_steps: int, num_layers: int = 32
) -> list[Cost]:
    """Costs for every batch and number of adapters that it can hold, eager and replayed.

    Triton must launch on the fake, see `fake_gpu.install`.
    """
    launches = fake_gpu.install()
    machine = fake_gpu.FakeMachine()
    model = _decoder(num_layers)
    num_new = 4 * num_steps
    stand = Stand(
        machine,
        model,
        "fast",
        Room(
            max_rows=max(batches),
            max_tokens=max(batches),
            max_len=_CONTEXT + num_new,
            num_blocks=blocks_for(max(batches), _CONTEXT + num_new),
            num_slots=max(1, *adapters),
            max_rank=_RANK,
        ),
    )
    adapter = random_adapter(shape_of(model.config), _RANK, model.dtype, pin=False)
    for slot in range(max(adapters)):
        stand.pool.put(slot, adapter.again())
    costs = []
    for batch in batches:
        for count in sorted({min(count, batch) for count in adapters}):
            for is_replayed in (False, True):
                costs.append(
                    _measure_one(stand, launches, batch, count, is_replayed, num_steps=num_steps)
                )
    return costs


def _measure_one(
    stand: Stand,
    launches: fake_gpu.Launches,
    batch: int,
    count: int,
    is_replayed: bool,
    *,
    num_steps: int,
) -> Cost:
    stand.graphs.forget()
    if is_replayed:
        stand.capture(batch, count)
    rows = Rows(
        stand.runner,
        np.random.default_rng(0).integers(3, 200, (batch, _CONTEXT)).tolist(),
        [row % count if count else -1 for row in range(batch)],
        num_new=num_steps + 4,
        is_computed=True,
    )
    for _ in range(3):
        rows.step()
    totals, metadata, computing = [], [], []
    with _Stopwatch(stand.runner.forward_pass) as watch:
        for _ in range(num_steps):
            watch.clear()
            launches.count = 0
            started = time.perf_counter()
            rows.step()
            totals.append(time.perf_counter() - started)
            metadata.append(watch.seconds["prepare"])
            computing.append(watch.seconds["run"])
    metadata_us, launches_us, total_us = (
        1e6 * statistics.quantiles(times, n=4)[0] for times in (metadata, computing, totals)
    )
    return Cost(
        batch=batch,
        adapters=count,
        is_replayed=is_replayed,
        metadata_us=metadata_us,
        launches_us=launches_us,
        rest_us=total_us - metadata_us - launches_us,
        num_launches=launches.count,
    )


class _Stopwatch:
    """Times two methods of an object for as long as it is entered."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.seconds: dict[str, float] = {}

    def clear(self) -> None:
        self.seconds.clear()

    def __enter__(self) -> _Stopwatch:
        for name in ("prepare", "run"):
            setattr(self._target, name, self._timed(name, getattr(self._target, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("prepare", "run"):
            delattr(self._target, name)  # the class's own is found again

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            result = method(*args)
            self.seconds[name] = time.perf_counter() - started
            return result

        return call


class _NoProducts:
    """`LinearMethod` without arithmetic: only the output's memory is taken."""

    name = "none"
    row_multiple = 1

    def pack(self, weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
        """See `LinearMethod`."""
        del bias_N
        return _NoProduct(*weight_NK.shape)

    def pack_head(self, weight_NK: Tensor) -> Linear:
        """See `LinearMethod`."""
        return _NoProduct(*weight_NK.shape)


@dataclass
class _NoProduct:
    out_features: int
    in_features: int

    def __call__(self, x_MK: Tensor, phase: Phase = "prefill") -> Tensor:
        del phase
        return x_MK.new_empty((x_MK.shape[0], self.out_features))


def _decoder(num_layers: int) -> Decoder:
    config = model_config(**_CONFIG, layers=num_layers)
    dtype = torch.bfloat16
    weights = RandomWeights(torch.device("cpu"), dtype, has_head=True)
    plans = open_plans("sm_90", "fast")
    return build_decoder(config, dtype, weights, plans=plans, method=_NoProducts())


def format_table(costs: Sequence[Cost]) -> str:
    """One line a cost."""
    lines = [
        "batch  adapters  steps     metadata us  launches us  rest us  total us  Triton launches"
    ]
    for cost in costs:
        lines.append(
            f"{cost.batch:5}  {cost.adapters:8}  {'replayed' if cost.is_replayed else 'eager':8}"
            f"  {cost.metadata_us:11.0f}  {cost.launches_us:11.0f}  {cost.rest_us:7.0f}"
            f"  {cost.total_us:8.0f}  {cost.num_launches:15}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.host_cost", description=__doc__)
    parser.add_argument("--batch", type=int, action="append", help="default: 1, 64, 256")
    parser.add_argument("--adapters", type=int, action="append", help="default: 0, 8, 64")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    costs = measure(
        options.batch or (1, 64, 256),
        options.adapters or (0, 8, 64),
        num_steps=options.steps,
        num_layers=options.layers,
    )
    print(format_table(costs))
    if options.json:
        rows = [{**asdict(cost), "total_us": cost.total_us} for cost in costs]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
