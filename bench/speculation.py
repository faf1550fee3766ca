"""`python -m bench.speculation`: speculation against plain decoding, on the engine's core without HTTP.

Two workloads: *repetitive* (the prompt is to be repeated word for word; greedy), where looking back finds
what comes next, and *plain* (free text at temperature 1), where it finds little. At each batch size one
round runs every setting in turn, in rotating order, so that all see the same drift of the machine; speeds
are of decoding, from the step in which the last prompt was answered. The first round of each cell is
not counted: `auto` measures the machine in it. Texts must be the same in every setting, token for token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex_engine.config import EngineConfig, Speculative
from loraplex_engine.convert import cache_dir
from loraplex_engine.numerics_environment import prepare_numerics
from loraplex_engine.protocol import Generate, SamplingParams
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from loraplex_engine.core import EngineCore

MODES: tuple[Speculative, ...] = ("off", "auto", "ngram")
WORKLOADS = ("repetitive", "plain")
_TABLE_WIDTH = 110
_NUM_BLOCKS = 1024
_NOUNS = (
    "river harbour lantern orchard violin compass glacier meadow engine library thunder velvet "
    "pepper saddle canyon mirror falcon blanket copper window garden hammer island pocket ribbon "
    "shadow ticket valley walnut yellow"
)


@dataclass(frozen=True)
class Run:
    """One setting on one workload at one batch size, once."""

    workload: str
    batch: int
    mode: str
    round: int
    tokens: int  # while all rows decoded
    seconds: float
    row_steps: int  # rows that sampled, over those steps
    drafts: int
    accepted: int


def _prompt(workload: str, index: int) -> str:
    """A prompt of its own for each request; a chat as SmolLM2's template writes it."""
    known = _NOUNS.split()
    nouns = [known[(7 * index + 11 * n) % len(known)] for n in range(36)]
    if workload == "repetitive":
        rows = "\n".join(
            f"{n + 1}. The {a} of the {b} is near the {c}."
            for n, (a, b, c) in enumerate(zip(nouns[0::3], nouns[1::3], nouns[2::3], strict=True))
        )
        text = f"Repeat this list word for word, and nothing else:\n{rows}"
    else:
        text = f"Tell me something surprising about a {nouns[0]}, a {nouns[1]} and a {nouns[2]}."
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def _requests(tokenizer: Tokenizer, workload: str, batch: int, max_tokens: int) -> list[Generate]:
    return [
        Generate(
            request_id=f"{workload}-{index}",
            attempt=0,
            lease_token=0,
            tenant_id="bench",
            tenant_salt=b"",
            prompt_token_ids=tokenizer.encode(_prompt(workload, index)).ids,
            sampling=SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0 if workload == "repetitive" else 1.0,
                seed=index,
                ignore_eos=True,
            ),
        )
        for index in range(batch)
    ]


def _cores(config: EngineConfig) -> dict[str, EngineCore]:
    """One core per mode, over the same weights."""
    # Here, so that `main` has set OpenMP's waiting before it is loaded.
    import torch
    from loraplex_engine.attention.setup import open_attention
    from loraplex_engine.build import NoAdapters
    from loraplex_engine.core import build_core
    from loraplex_engine.runner import build_runner, load_model
    from loraplex_engine.sampling.setup import open_survivors

    model, sizes = load_model(config, cache=cache_dir())
    survivors = open_survivors(cache_dir())
    cores = {}
    for mode in MODES:
        attention = open_attention(
            model.attention_shape,
            num_blocks=sizes.num_blocks,
            block_size=config.block_size,
            cache_dir=cache_dir(),
            num_threads=torch.get_num_threads(),
        )
        settings = {name: getattr(config, name) for name in config.__dataclass_fields__}
        own = EngineConfig(**settings | {"speculative": mode})
        cores[mode] = build_core(
            own,
            sizes,
            build_runner(own, model, sizes, attention=attention, survivors=survivors),
            NoAdapters(),
            vocab_size=model.config.num_token_ids,
            eos_token_ids=frozenset(model.config.eos_token_ids),
        )
    return cores


def _measure(
    core: EngineCore, requests: list[Generate], attempt: int
) -> tuple[dict[str, list[int]], int, float, int]:
    """Run them; texts, then tokens, seconds and row steps since the last of them had begun."""
    texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        core.add(Generate(**fields | {"attempt": attempt}))
    tokens = row_steps = 0
    started: float | None = None
    while core.has_work():
        events = core.step()
        for event in events:
            texts[event.request_id] += event.token_ids
        if started is not None:
            tokens += sum(len(event.token_ids) for event in events)
            row_steps += len(events)
        elif all(texts.values()):
            started = time.perf_counter()
    assert started is not None
    return texts, tokens, time.perf_counter() - started, row_steps


def _table(runs: list[Run]) -> Table:
    table = Table(title="speculation against plain, decoding only, medians over rounds")
    for column in (
        "workload",
        "batch",
        "setting",
        "tok/s",
        "to plain, paired",
        "tokens per row and step",
        "accepted",
    ):
        table.add_column(column, justify="right")
    for workload in WORKLOADS:
        for batch in sorted({run.batch for run in runs}):
            cell = [run for run in runs if (run.workload, run.batch) == (workload, batch)]
            plain = {run.round: run.tokens / run.seconds for run in cell if run.mode == "off"}
            for mode in MODES:
                of_mode = [run for run in cell if run.mode == mode]
                speed = {run.round: run.tokens / run.seconds for run in of_mode}
                drafts = sum(run.drafts for run in of_mode)
                accepted = sum(run.accepted for run in of_mode)
                table.add_row(
                    workload,
                    str(batch),
                    {"off": "plain"}.get(mode, mode),
                    f"{statistics.median(speed.values()):.1f}",
                    f"{statistics.median(speed[n] / plain[n] for n in plain):.2f}x",
                    f"{sum(r.tokens for r in of_mode) / sum(r.row_steps for r in of_mode):.2f}",
                    f"{accepted} of {drafts}" if drafts else "-",
                )
        table.add_section()
    return table


def main() -> None:
    """Command line."""
    default_model = Path(os.environ.get("LORAPLEX_CACHE_DIR", "~/.cache/loraplex")).expanduser()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=default_model / "models" / "smollm2-135m")
    parser.add_argument("--rounds", type=int, default=1, help="counted; one more comes before")
    parser.add_argument("--max-tokens", type=int, default=48, help="per request at batch 1")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--out", type=Path, help="write all runs there, as JSON")
    args = parser.parse_args()
    # As the server does: beside other processes, threads that spin at a barrier take each other's time.
    prepare_numerics()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    cores = _cores(
        EngineConfig(
            model_dir=args.model,
            base_model="smollm2-135m",
            num_blocks=_NUM_BLOCKS,
            prefix_cache=False,
        )
    )
    runs: list[Run] = []
    num_different = attempt = 0
    for batch in map(int, args.batches.split(",")):
        for workload in WORKLOADS:
            # The defaults take about four minutes on two cores.
            max_tokens = max(24, args.max_tokens // (1 + batch // 4))
            requests = _requests(tokenizer, workload, batch, max_tokens)
            for number in range(args.rounds + 1):
                texts: list[dict[str, list[int]]] = []
                for mode in (*MODES[number % 3 :], *MODES[: number % 3]):
                    core, before = cores[mode], cores[mode].stats()
                    attempt += 1
                    text, tokens, seconds, row_steps = _measure(core, requests, attempt)
                    after = core.stats()
                    texts.append(text)
                    run = Run(
                        workload=workload,
                        batch=batch,
                        mode=mode,
                        round=number,
                        tokens=tokens,
                        seconds=seconds,
                        row_steps=row_steps,
                        drafts=after.spec_draft_tokens_total - before.spec_draft_tokens_total,
                        accepted=after.spec_accepted_tokens_total
                        - before.spec_accepted_tokens_total,
                    )
                    if number:
                        runs.append(run)
                        if args.out is not None:
                            args.out.write_text(json.dumps([asdict(r) for r in runs], indent=2))
                num_different += sum(text != texts[0] for text in texts)
    console = Console() if sys.stdout.isatty() else Console(width=_TABLE_WIDTH)
    console.print(_table(runs))
    console.print(
        f"texts: {'the same in every setting' if not num_different else 'THEY DIFFER'}; "
        f"rounds: {args.rounds}, after one that is not counted"
    )
    sys.exit(1 if num_different else 0)


if __name__ == "__main__":
    main()
