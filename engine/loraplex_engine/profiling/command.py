"""`python -m loraplex_engine.profiling`: the engine's half of `loraplex bench profile`, and its tables.

The other half is the gateway's, which hands its figures over in a file. Tables and JSON go to stdout, what is
going on to stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec

from loraplex_engine.config import (
    DEFAULT_BATCHED_TOKENS,
    BackendName,
    DType,
    EngineConfig,
    LinearBackendName,
    Quantization,
)
from loraplex_engine.convert import cache_dir, pull
from loraplex_engine.errors import ConfigError, EngineError
from loraplex_engine.numerics_environment import prepare_numerics

if TYPE_CHECKING:
    import torch

    from loraplex_engine.profiling.figures import GatewayFigures
    from loraplex_engine.profiling.machine import MachineFigures

DEFAULT_BATCHES = (1, 4, 16, 64)
DEFAULT_ADAPTERS = (0, 16)
_BLOCK = 16
EXIT_USAGE = 2

Note = Callable[[str], None]


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="loraplex bench profile",
        description=(
            "Where a step's time goes on this CPU: linears, attention, LoRA, small operations, sampling, runner,"
            " scheduler, IPC and gateway, in ms, as a share of the step and of what the machine can do (its read"
            " bandwidth and matrix peak are measured before and after). Runs the engine's and the gateway's own code."
            " Stop what else is running: it shares the cores."
        ),
        epilog="Example: loraplex bench profile --batch 1,16 --adapters 0,16 --json profile.json",
    )
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        help="a name (pulled if the cache lacks it) or a Hugging Face folder (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=_numbers(1),
        default=DEFAULT_BATCHES,
        metavar="N,...",
        help="rows of the decoding steps (default: 1,4,16,64)",
    )
    parser.add_argument(
        "--adapters",
        type=_numbers(0),
        default=DEFAULT_ADAPTERS,
        metavar="N,...",
        help="adapters that the rows are spread over; 0: all on the base (default: 0,16)",
    )
    parser.add_argument(
        "--rank", type=_number(1), default=16, help="of the adapters (default: %(default)s)"
    )
    parser.add_argument(
        "--context",
        type=_number(2),
        default=200,
        help="tokens before a decoding step, in each row (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill",
        type=_number(0),
        default=512,
        help="tokens of the prompt that is measured; 0: none (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=_number(1),
        default=24,
        help="steps per case, timed inside, and as many that are not; the fastest quarter counts"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=_number(1), help="of the engine (default: what the cgroup allows)"
    )
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="of the model"
    )
    parser.add_argument(
        "--attention-backend",
        default="auto",
        choices=("auto", "native", "torch"),
        help="see engine",
    )
    parser.add_argument(
        "--lora-backend", default="auto", choices=("auto", "native", "torch"), help="see engine"
    )
    parser.add_argument(
        "--linear-backend", default="auto", choices=get_args(LinearBackendName), help="see engine"
    )
    parser.add_argument(
        "--quantization", default="none", choices=get_args(Quantization), help="see engine"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures there; -: to stdout, no tables"
    )
    parser.add_argument(
        "--no-gateway", action="store_true", help="leave the gateway out; its rows are missing then"
    )
    parser.add_argument("--gateway-figures", type=Path, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    options = make_parser().parse_args(arguments)
    prepare_numerics()
    from loraplex_engine.server_cli import set_up_logging

    set_up_logging("warning", "console")
    started = time.monotonic()

    def note(text: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {text}", file=sys.stderr, flush=True)  # noqa: T201

    try:
        _run(options, note)
    except (EngineError, OSError) as error:
        print(f"loraplex bench profile: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE
    return 0


def _run(options: argparse.Namespace, note: Note) -> None:
    model_dir = pull(options.model, cache_dir(), lambda what, done, total: None)
    gateways = _read_gateways(options.gateway_figures)
    if options.json is not None and str(options.json) != "-":
        _check_writable(options.json)
    # torch takes a second or two to import, and wrong flags need none.
    import torch

    from loraplex_engine.profiling.cases import decode_case, prefill_case
    from loraplex_engine.profiling.figures import Profile, format_profile
    from loraplex_engine.profiling.machine import measure_machine
    from loraplex_engine.profiling.stand import Stand
    from loraplex_engine.threads import usable_cpus

    torch.set_num_threads(options.threads or usable_cpus())
    num_adapters = max(options.adapters)
    note("loading the model")
    with Stand(
        model_dir,
        lambda store_url: _config(options, model_dir, store_url),
        [options.rank] * num_adapters,
    ) as stand:
        model = stand.engine.runner.model

        def measure() -> MachineFigures:
            note("measuring memory and matrix products")
            return measure_machine(_product_dtype(model.dtype), kernel_dir=cache_dir() / "native")

        before = measure()
        stand.load_adapters()
        stand.fill_cache(max(_BLOCK, options.context))
        measured = []
        for adapters in sorted(set(options.adapters)):
            for batch in sorted(set(options.batch)):
                note(f"decoding, batch {batch}, {min(adapters, batch)} adapters")
                measured.append(
                    decode_case(
                        stand,
                        gateways.get(batch),
                        batch=batch,
                        num_adapters=min(adapters, batch),
                        context=options.context,
                        num_steps=options.steps,
                    )
                )
            if options.prefill:
                note(f"prefill, {options.prefill} tokens, {min(adapters, 1)} adapters")
                measured.append(
                    prefill_case(
                        stand,
                        gateways.get(1),
                        num_tokens=options.prefill,
                        is_adapted=adapters > 0,
                        num_steps=max(2, options.steps // 6),
                    )
                )
        machine = measure().at_least(before)
        facts = stand.engine.facts
        profile = Profile(
            model=model_dir.name,
            dtype=facts.dtype,
            backends={**facts.backends, "ops": model.ops.name},
            machine=machine,
            has_fused_layers=model.has_fused_layers,
            cases=[case.against(machine) for case in measured],
        )
    note("done")
    text = msgspec.json.format(msgspec.json.encode(profile)).decode()
    if options.json is not None and str(options.json) == "-":
        print(text)  # noqa: T201
        return
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(format_profile(profile))  # noqa: T201


def _config(options: argparse.Namespace, model_dir: Path, store_url: str | None) -> EngineConfig:
    dtype: DType = options.dtype
    attention: BackendName = options.attention_backend
    lora: BackendName = options.lora_backend
    rows = max(options.batch)
    longest = max(options.context + 2 * options.steps + 8, options.prefill + 16)
    blocks = rows * -(-(options.context + 2 * options.steps + 16) // _BLOCK)
    num_slots = max(1, *options.adapters)
    return EngineConfig(
        model_dir=model_dir,
        base_model=model_dir.name,
        device="cpu",
        dtype=dtype,
        attention_backend=attention,
        lora_backend=lora,
        linear_backend=options.linear_backend,
        quantization=options.quantization,
        block_size=_BLOCK,
        num_blocks=int(1.05 * blocks) + -(-longest // _BLOCK) + 16,
        max_num_batched_tokens=max(DEFAULT_BATCHED_TOKENS, options.prefill, rows),
        max_num_seqs=rows,
        max_loras=num_slots,
        max_cpu_loras=num_slots,
        max_lora_rank=max(64, options.rank),
        store_url=store_url,
        num_threads=options.threads,
        speculative="off",  # a row is to be one token
    )


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    import torch

    from loraplex_engine.model.linear import has_fast_bf16

    return torch.float32 if dtype == torch.bfloat16 and not has_fast_bf16() else dtype


def _read_gateways(path: Path | None) -> dict[int, GatewayFigures]:
    from loraplex_engine.profiling.figures import GatewayFigures

    if path is None:
        return {}
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[GatewayFigures])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--gateway-figures {path}: {error}") from error
    return {figures.batch: figures for figures in found}


def _check_writable(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"--json {path}: there is no folder {path.parent}; make it first")


def _number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number of {least} or more")
        return int(text)

    return parse


def _numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    one = _number(least)
    return lambda text: tuple(one(part) for part in text.split(","))
