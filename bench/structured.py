"""What structured output costs: `python -m bench.structured --model-dir ~/.cache/loraplex/models/smollm2-135m`.

Compiling (in the worker and again in the engine), a mask, advancing, forking, over the tests' fifty
schemas; then, with the model, the time of a step with and without
a grammar on every row.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from loraplex_engine.build import NoAdapters
from loraplex_engine.config import EngineConfig
from loraplex_engine.core import EngineCore, build_core
from loraplex_engine.model.config import ModelConfig
from loraplex_engine.protocol import Generate, Grammar, SamplingParams
from loraplex_engine.runner import build_runner, load_model
from loraplex_engine.structured.matcher import LlMatcher
from loraplex_engine.structured.setup import open_grammars
from loraplex_engine.structured.tokenizer import find_tokenizer, native_matcher, open_tokenizer
from loraplex_engine.structured.worker_frames import Setup
from loraplex_engine.structured.worker_process import WorkerProcess

_MAX_TOKENS = 300


def _ms(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    return (
        f"mean {statistics.fmean(ordered) * 1e3:7.3f}   p50 {ordered[len(ordered) // 2] * 1e3:7.3f}"
        f"   p99 {ordered[int(len(ordered) * 0.99)] * 1e3:7.3f}   max {ordered[-1] * 1e3:7.3f} ms"
    )


def _timed(into: list[float], call: Callable[..., Any], *arguments: Any) -> Any:
    started_s = time.perf_counter()
    result = call(*arguments)
    into.append(time.perf_counter() - started_s)
    return result


def measure_masks(model_dir: Path, grammars: Sequence[Grammar]) -> None:
    """Everything but the model."""
    config = ModelConfig.from_folder(model_dir)
    vocab_size = config.num_token_ids
    spec = find_tokenizer(model_dir, vocab_size, frozenset(config.eos_token_ids))
    assert spec is not None
    opening: list[float] = []
    tokenizer = _timed(opening, open_tokenizer, spec)
    setup = Setup(tokenizer=spec, cpu_limit_s=10.0, memory_bytes=512 * 1024**2)
    worker = WorkerProcess(setup, wall_limit_s=60.0)
    starting: list[float] = []
    _timed(starting, worker.try_grammar, Grammar(kind="json_object"))
    tried: list[float] = []
    built: list[float] = []
    first: list[float] = []
    forks: list[float] = []
    masks: list[float] = []
    advances: list[float] = []
    for number, grammar in enumerate(grammars):
        _timed(tried, worker.try_grammar, grammar)
        native = _timed(built, native_matcher, tokenizer, grammar)
        template = LlMatcher(native, vocab_size)
        _timed(first, template.masks_for)
        matcher = _timed(forks, template.fork)
        choice = random.Random(number)
        for _ in range(_MAX_TOKENS):
            mask_W = _timed(masks, matcher.masks_for)[0]
            bits = np.unpackbits(mask_W.view(np.uint8), bitorder="little")
            token_id = int(choice.choice(np.flatnonzero(bits).tolist()))
            _timed(advances, matcher.advance, token_id)
            if matcher.is_complete:
                break
    worker.close()
    print(f"{len(grammars)} grammars, {vocab_size} ids, {len(masks)} masks")
    print(f"  tokenizer, once      {opening[0] * 1e3:9.1f} ms")
    print(f"  worker start, once   {starting[0] * 1e3:9.1f} ms")
    for name, seconds in (
        ("compile in worker", tried),
        ("compile in engine", built),
        ("first mask (compiler)", first),
        ("fork", forks),
        ("mask", masks),
        ("advance", advances),
    ):
        print(f"  {name:22}{_ms(seconds)}")


def measure_steps(model_dir: Path, batches: Sequence[int], num_tokens: int) -> None:
    """Decoding steps of the model, free and under a grammar that every row follows."""
    config = EngineConfig(
        model_dir=model_dir, base_model="bench", speculative="off", max_model_len=512
    )
    model, sizes = load_model(config)
    eos = frozenset(model.config.eos_token_ids)
    grammars = open_grammars(config, model.config.num_token_ids, eos)
    assert grammars is not None
    grammar = Grammar(
        kind="json_schema",
        value=json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 500}),
    )
    core = build_core(
        config,
        sizes,
        build_runner(config, model, sizes),
        NoAdapters(),
        vocab_size=model.config.num_token_ids,
        eos_token_ids=eos,
        grammars=grammars,
    )
    print(f"steps of {num_tokens} tokens per row, {model.dtype}")
    for batch in batches:
        free = _step_s(core, batch, num_tokens, None)
        bound = _step_s(core, batch, num_tokens, grammar)
        print(
            f"  batch {batch:3}   free {free * 1e3:8.2f} ms   grammar {bound * 1e3:8.2f} ms"
            f"   per row {(bound - free) / batch * 1e3:6.3f} ms   {(bound / free - 1) * 100:5.1f} %"
        )
    grammars.close()


def _step_s(core: EngineCore, batch: int, num_tokens: int, grammar: Grammar | None) -> float:
    """Median seconds of a decoding step."""
    for index in range(batch):
        sampling = SamplingParams(
            max_tokens=num_tokens, seed=index, temperature=1.0, ignore_eos=True, grammar=grammar
        )
        core.add(
            Generate(
                request_id=f"{batch}-{grammar is None}-{index}",
                attempt=0,
                lease_token=0,
                tenant_id="bench",
                tenant_salt=b"bench",
                prompt_token_ids=list(range(100, 116)),
                sampling=msgspec.structs.replace(sampling),
            )
        )
    seconds = []
    while core.has_work():
        started_s = time.perf_counter()
        core.step()
        if core.last_step_num_tokens == batch:
            seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


def main() -> None:
    """Measure and print."""
    from tests.support.grammars import SCHEMAS, schema

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=24)
    values = parser.parse_args()
    grammars = [*map(schema, SCHEMAS), Grammar(kind="json_object")]
    measure_masks(values.model_dir, grammars)
    if values.batches:
        measure_steps(values.model_dir, values.batches, values.tokens)


if __name__ == "__main__":
    main()
