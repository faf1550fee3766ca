"""The least time that a workload takes on this machine: `make bench` gives all speeds as a share of it too.

Bandwidth and GEMM rate are measured (the profile's `measure_machine`), and each step's parts are held against
them as `loraplex bench profile` does: prompts packed into steps of 512 tokens, what an earlier prompt of the
same tenant and adapter shares computed once, then whole batches decoding together. No engine reaches it:
it counts no launch, no scheduler, no HTTP. The libraries below torch have the settings that an engine gives
them, but for those of torch's bf16 product, which may use AMX here; the GEMM rate is the better of its and ours.

    python -m bench.roofline --model-dir DIR --dtype float32 --adapters DIR w.jsonl:16 ...

Other processes can only make a machine look slower, so what an earlier run measured is a lower bound: given
with --read-gb-s and --gemm-gflop-s, the floors are those of the better figures, which are printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from loraplex_engine.numerics_environment import prepare_numerics

from bench import workload
from bench.suite import BASE_MODEL
from bench.workload import WorkItem

if TYPE_CHECKING:
    from loraplex_engine.profiling.floors import StepShape
    from loraplex_engine.profiling.machine import MachineFigures

_STEP_TOKENS = 512
RankOf = Callable[[str], int]  # an adapter's rank by its name; 0: the base


def steps(
    items: Sequence[WorkItem], concurrency: int, rank_of: RankOf
) -> Iterator[tuple[StepShape, int]]:
    """(shape of a step, how many of them): prompts first, then decoding.

    One token of each request is sampled with its prompt, so it decodes one less than it asks for.
    """
    yield from ((step, 1) for step in _prompt_steps(items, rank_of))
    for at in range(0, len(items), concurrency):
        group = items[at : at + concurrency]
        num_steps = max(item.max_tokens for item in group) - 1
        if num_steps:
            context = [len(item.prompt) + item.max_tokens // 2 for item in group]
            yield _shape(group, context, [1] * len(group), rank_of), num_steps


def _prompt_steps(items: Sequence[WorkItem], rank_of: RankOf) -> Iterator[StepShape]:
    known: dict[tuple[str, str], list[list[int]]] = {}
    pieces: list[tuple[WorkItem, int, int]] = []  # request, tokens before, tokens now
    room = _STEP_TOKENS
    for item in items:
        earlier = known.setdefault((item.tenant, item.model), [])
        # The last token is always computed: its logits choose the next.
        at = min(
            max((_common(item.prompt, other) for other in earlier), default=0),
            len(item.prompt) - 1,
        )
        earlier.append(item.prompt)
        while at < len(item.prompt):
            now = min(room, len(item.prompt) - at)
            pieces.append((item, at, now))
            at += now
            room -= now
            if not room:
                yield _of_pieces(pieces, rank_of)
                pieces, room = [], _STEP_TOKENS
    if pieces:
        yield _of_pieces(pieces, rank_of)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _of_pieces(pieces: Sequence[tuple[WorkItem, int, int]], rank_of: RankOf) -> StepShape:
    return _shape([p[0] for p in pieces], [p[1] for p in pieces], [p[2] for p in pieces], rank_of)


def _shape(
    items: Sequence[WorkItem], before: Sequence[int], now: Sequence[int], rank_of: RankOf
) -> StepShape:
    from loraplex_engine.profiling.floors import StepShape

    models = {item.model for item in items if item.model != BASE_MODEL}
    return StepShape(
        num_computed=before,
        num_scheduled=now,
        adapter_ranks=[rank_of(model) for model in sorted(models)],
        row_ranks=[0 if item.model == BASE_MODEL else rank_of(item.model) for item in items],
    )


def at_least(machine: MachineFigures, read_gb_s: float, gemm_gflop_s: float) -> MachineFigures:
    """The machine, each figure raised to what was measured before."""
    return msgspec.structs.replace(
        machine,
        read_gb_s=max(machine.read_gb_s, read_gb_s),
        gemm_gflop_s=max(machine.gemm_gflop_s, gemm_gflop_s),
    )


def main() -> None:
    """Measure, and print JSON: the machine, and the floor of each file in seconds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--dtype", required=True, choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--adapters", type=Path, required=True, help="PEFT folders, by name")
    parser.add_argument("--read-gb-s", type=float, default=0.0, help="as measured before")
    parser.add_argument("--gemm-gflop-s", type=float, default=0.0, help="as measured before")
    parser.add_argument("files", nargs="*", help="workload file:requests in flight")
    args = parser.parse_args()
    prepare_numerics()  # what follows imports torch
    from loraplex_engine.artifact import ModelShape
    from loraplex_engine.config import EngineConfig
    from loraplex_engine.convert import cache_dir
    from loraplex_engine.profiling.floors import step_work
    from loraplex_engine.profiling.machine import measure_machine
    from loraplex_engine.runner import load_model

    from bench.adapters import NUMBER_BYTES

    config = EngineConfig(model_dir=args.model_dir, base_model=BASE_MODEL, dtype=args.dtype)
    # The weights as the server reads them: what torch keeps is wider than a checkpoint in bf16.
    model, _ = load_model(config, cache=cache_dir())
    shape = ModelShape.from_config_json(args.model_dir / "config.json")
    measured = measure_machine(model.dtype, kernel_dir=cache_dir() / "native")
    machine = at_least(measured, args.read_gb_s, args.gemm_gflop_s)
    sizes = model.config
    kv_bytes = 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * model.dtype.itemsize

    def rank_of(name: str) -> int:
        if name == BASE_MODEL:
            return 0
        return int(json.loads((args.adapters / name / "adapter_config.json").read_text())["r"])

    floors = {}
    for file in args.files:
        path, _, concurrency = file.rpartition(":")
        seconds = 0.0
        for step, count in steps(workload.read(Path(path)), int(concurrency), rank_of):
            parts = step_work(
                step,
                model,
                shape,
                kv_bytes_per_token=kv_bytes,
                adapter_number_bytes=NUMBER_BYTES,
            )
            seconds += count * sum(part.floor_ms(machine) for part in parts.values()) / 1e3
        floors[Path(path).stem] = seconds
    print(json.dumps({"machine": msgspec.to_builtins(machine), "floor_s": floors}))


if __name__ == "__main__":
    main()
