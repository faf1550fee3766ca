"""Part `memory`: no step takes more than the trial at an engine's start says, whatever rows ask for.

Only what this process allocates is looked at: other parts run beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import numpy as np
from loraplex_engine.device.memory_profile import largest_step, measure_use
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.step import NewRow, Step

from bench.gpu_check.adapters import random_adapter
from bench.gpu_check.figures import Recorder
from bench.gpu_check.machine import Machine
from bench.gpu_check.sizes import Sizes, shape_of
from bench.gpu_check.stand import GREEDY, Room, Stand, blocks_for, random_decoder

_DRAWN = SamplingParams(max_tokens=1 << 20, temperature=0.9, top_p=0.9, top_k=40, seed=1)


def run(machine: Machine, sizes: Sizes, record: Recorder) -> None:
    """The trial, then steps that try to take more than it did."""
    config, dtype = sizes.memory_model
    model = random_decoder(machine, config, dtype, "fast")
    rows, tokens, drafts = sizes.memory_step
    stand = Stand(
        machine,
        model,
        "fast",
        Room(
            max_rows=rows,
            max_tokens=tokens,
            max_len=tokens,
            num_blocks=blocks_for(1, tokens),
            num_slots=2,
            max_rank=sizes.max_rank,
        ),
    )
    meter = machine.meter()
    use = measure_use(
        meter,
        stand.runner,
        weights_bytes=0,
        lora_bytes=0,
        max_tokens=tokens,
        num_drafts=drafts,
        has_graphs=False,
    )
    for slot in range(2):
        rank, pin = (8, sizes.max_rank)[slot], not machine.is_rehearsal
        stand.pool.put(
            slot, random_adapter(shape_of(config), rank, dtype, pin=pin, seed=slot, has_ends=True)
        )
    note = f"{use.activations / 1e6:.1f} MB in the trial"
    for name, step in _steps(rows, tokens, drafts):
        standing = meter.allocated()
        meter.start_peak()
        stand.runner.launch(step)
        stand.runner.collect()
        took = meter.peak() - standing
        record.add(name, 100 * took / use.activations, "% of the trial", at_most=100.0, note=note)


def _steps(rows: int, tokens: int, drafts: int) -> Iterator[tuple[str, Step]]:
    """(what it is, a step of all rows)."""
    most = largest_step(
        max_tokens=tokens, max_rows=rows, max_len=tokens, num_slots=2, num_drafts=drafts
    )
    logprobs = msgspec.structs.replace(GREEDY, logprobs=5)
    yield "a crowd with drafts and adapters, drawn", _asking(most, lambda _: _DRAWN)
    # The host is given logits, and the device keeps them meanwhile.
    yield (
        "the same, all but one row with log-probabilities",
        _asking(most, lambda row: logprobs if row else _DRAWN),
    )
    yield "the same, every row with log-probabilities", _asking(most, lambda _: logprobs)
    prompt = NewRow(0, (0,) * tokens, tokens, (0,) * blocks_for(1, tokens), 1, logprobs)
    one = np.zeros(1, np.int32)
    yield (
        "one prompt of all tokens",
        replace(
            most,
            freed_rows=tuple(range(rows)),
            new_rows=(prompt,),
            rows_B=one,
            num_computed_B=one,
            num_scheduled_B=one + np.int32(tokens),
            samples_B=one == 0,
            drafts={},
        ),
    )


def _asking(step: Step, params_of: Callable[[int], SamplingParams]) -> Step:
    rows = tuple(replace(row, sampling=params_of(row.row)) for row in step.new_rows)
    return replace(step, new_rows=rows)
