"""Structured output on a tiny random model: always valid, and the row rule holds under grammars.

A random model writes what nobody would, so whatever a grammar lets through comes out sooner or later.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jsonschema
import msgspec
import psutil
import pytest
from loraplex_engine.build import assemble_engine
from loraplex_engine.config import EngineConfig
from loraplex_engine.core import EngineCore, build_core
from loraplex_engine.kv.setup import open_prefix_cache
from loraplex_engine.protocol import Generate, Grammar, TokenEvent, TokenLogprobs
from loraplex_engine.runner import build_runner, load_model
from loraplex_engine.structured import rows as rows_module
from loraplex_engine.structured.compiler import GrammarCompiler
from loraplex_engine.structured.setup import open_grammars

from tests.platform.gateway import tiny_model
from tests.support.engine_fakes import make_request
from tests.support.grammars import SCHEMAS, schema
from tests.support.tiny_fleet import write_model

DEADLINE_S = 240.0
PROMPT = "The capital of France is"


@dataclass
class Stand:
    """A model folder with a tokenizer, and the compiler that all engines on it share."""

    folder: Path
    grammars: GrammarCompiler

    def core(
        self, dtype: Literal["float32", "bfloat16"] = "float32", **settings: Any
    ) -> EngineCore:
        config = _config(self.folder, dtype=dtype, **{"num_blocks": 1024, **settings})
        model, sizes = load_model(config)
        return build_core(
            config,
            sizes,
            build_runner(config, model, sizes),
            _NoAdapters(),
            vocab_size=model.config.num_token_ids,
            eos_token_ids=frozenset(model.config.eos_token_ids),
            prefix_cache=open_prefix_cache(
                config,
                sizes,
                model_fingerprint="tiny",
                kv_format="tiny",
                vocab_size=model.config.num_token_ids,
                publish=None,
            ),
            grammars=self.grammars,
        )


class _NoAdapters:
    num_leases = 0

    def prefetch(self, digest: str, tenant_id: str = "") -> None:
        raise AssertionError


def _config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model_dir=folder, base_model="tiny", num_threads=1, **settings)


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    folder = write_model(tmp_path_factory.mktemp("structured"))
    config = _config(folder)
    model, _ = load_model(config)
    grammars = open_grammars(
        config, model.config.num_token_ids, frozenset(model.config.eos_token_ids)
    )
    assert grammars is not None
    yield Stand(folder, grammars)
    grammars.close()


def ask(
    request_id: str,
    grammar: Grammar | None,
    *,
    seed: int = 0,
    max_tokens: int = 800,
    temperature: float = 1.0,
    n: int = 1,
) -> Generate:
    request = make_request(
        request_id,
        tiny_model.ids_of(PROMPT),
        max_tokens=max_tokens,
        seed=seed,
        ignore_eos=False,
        logprobs=2,
    )
    sampling = msgspec.structs.replace(
        request.sampling, grammar=grammar, temperature=temperature, n=n
    )
    return msgspec.structs.replace(request, sampling=sampling)


@dataclass
class Output:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None
    error_code: str | None = None

    @property
    def text(self) -> str:
        return tiny_model.reference().decode(self.token_ids, skip_special_tokens=True)


def run(core: EngineCore, requests: Sequence[Generate]) -> dict[tuple[str, int], Output]:
    """To the end, by request id and choice; checks invariants on the way and after."""
    outputs: dict[tuple[str, int], Output] = {}
    events: list[TokenEvent] = []
    queued, num_steps = list(requests), 0
    deadline_s = time.monotonic() + DEADLINE_S
    while queued or core.has_work():
        while queued and core.stats().num_waiting < 8:  # within the compiler's queue
            core.add(queued.pop(0))
        events += core.step()
        num_steps += 1
        if num_steps % 16 == 0:
            core.check()
        assert time.monotonic() < deadline_s
        if core.last_step_num_tokens == 0:
            time.sleep(0.001)  # a grammar compiles in another process
    core.check()
    for event in events:
        output = outputs.setdefault((event.request_id, event.index), Output())
        output.token_ids += event.token_ids
        output.logprobs += event.logprobs or []
        if event.finish_reason is not None:
            output.reason, output.error_code = event.finish_reason, event.error_code
    return outputs


def check_generations(stand: Stand, num_generations: int) -> None:
    core = stand.core(max_num_seqs=48, max_num_batched_tokens=512, max_waiting=2000)
    requests = [
        ask(f"{number % 50}:{number // 50}", schema(SCHEMAS[number % 50]), seed=number)
        for number in range(num_generations)
    ]

    outputs = run(core, requests)

    assert len(outputs) == num_generations
    for (request_id, _), output in outputs.items():
        wanted = SCHEMAS[int(request_id.split(":")[0])]
        assert (output.reason, output.error_code) == ("stop", None), output.text
        jsonschema.validate(
            json.loads(output.text), wanted, format_checker=jsonschema.FormatChecker()
        )
    assert len({output.text for output in outputs.values()}) > num_generations // 3


def test_sixty_generations_over_fifty_schemas_are_valid(stand: Stand) -> None:
    check_generations(stand, 60)


@pytest.mark.slow
def test_a_thousand_generations_over_fifty_schemas_are_valid(stand: Stand) -> None:
    check_generations(stand, 1000)


# ------------------------------------------------------------------ the row rule


def some_requests() -> tuple[list[Generate], list[Generate]]:
    """Under grammars, and free ones."""
    bound = [
        ask("object", Grammar(kind="json_object"), seed=3, max_tokens=24),
        ask("schema", schema(SCHEMAS[48]), seed=4, max_tokens=40),
        ask("greedy", schema(SCHEMAS[10]), temperature=0.0, max_tokens=40),
        ask("regex", Grammar(kind="regex", value="(yes|no)( maybe){0,9}"), seed=5, max_tokens=60),
        ask("lark", Grammar(kind="lark", value='start: "a" | "b" start'), seed=6, max_tokens=20),
        ask("choices", schema(SCHEMAS[2]), seed=7, n=3, max_tokens=24),
    ]
    free = [ask(f"free{seed}", None, seed=seed, max_tokens=16) for seed in range(3)]
    return bound, free


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_alone_is_batched_is_preempted_and_neighbours_keep_their_bits(
    dtype: Literal["float32", "bfloat16"], stand: Stand
) -> None:
    bound, free = some_requests()
    alone: dict[tuple[str, int], Output] = {}
    for request in (*bound, *free):
        alone |= run(stand.core(dtype, num_blocks=72, speculative="off"), [request])
    assert all(output.reason in ("stop", "length") for output in alone.values())

    crowd = stand.core(dtype, num_blocks=72, speculative="off", max_num_batched_tokens=64)
    assert run(crowd, [*bound, *free]) == alone

    # Few blocks, no cache to find what was computed: rows are taken away and computed anew.
    tight = stand.core(
        dtype,
        num_blocks=40,
        block_size=4,
        speculative="off",
        kv_watermark=0.0,
        prefix_cache=False,
        max_num_seqs=8,
        max_num_batched_tokens=16,
    )
    short = [msgspec.structs.replace(r, sampling=_capped(r, 60)) for r in (*bound, *free)]
    outputs = run(tight, short)
    assert tight.stats().num_preemptions_total > 0
    for key, output in outputs.items():
        assert output.token_ids == alone[key].token_ids[: len(output.token_ids)]
        assert output.logprobs == alone[key].logprobs[: len(output.logprobs)]


def _capped(request: Generate, most: int) -> Any:
    sampling = request.sampling
    return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, most))


def test_drafts_change_nothing_and_some_are_accepted(stand: Stand) -> None:
    flags = {"type": "array", "items": {"type": "boolean"}, "minItems": 24, "maxItems": 24}
    pairs = {"type": "array", "items": {"const": {"key": "value"}}, "minItems": 8, "maxItems": 8}
    requests = [
        ask("flags", schema(flags), seed=1),
        ask("flags cold", schema(flags), temperature=0.0),
        ask("pairs", schema(pairs), seed=2),
        ask("free", None, seed=3, max_tokens=30),
    ]
    plain = run(stand.core(speculative="off"), requests)
    core = stand.core(speculative="ngram")

    assert run(core, requests) == plain

    stats = core.stats()
    assert stats.spec_accepted_tokens_total > 20
    assert stats.spec_draft_tokens_total >= stats.spec_accepted_tokens_total
    assert all(plain[name, 0].reason == "stop" for name in ("flags", "pairs"))


def test_log_probabilities_are_the_models_own(stand: Stand) -> None:
    grammar = Grammar(kind="regex", value="(yes|no)")
    [under] = run(stand.core(), [ask("g", grammar, seed=1)]).values()
    [free] = run(stand.core(), [ask("f", None, seed=1, max_tokens=1)]).values()

    assert under.logprobs[0].top_ids == free.logprobs[0].top_ids
    assert under.logprobs[0].top_logprobs == free.logprobs[0].top_logprobs
    assert under.text in ("yes", "no")


def test_a_ban_that_the_grammar_cannot_do_without_ends_its_request_alone(stand: Stand) -> None:
    yes = ask("yes", Grammar(kind="regex", value="yes"))
    allowed = tuple(range(4, 8))
    stuck = msgspec.structs.replace(
        yes,
        request_id="stuck",
        sampling=msgspec.structs.replace(yes.sampling, allowed_token_ids=allowed),
    )
    free = ask("free", None, seed=3, max_tokens=5)
    [expected] = run(stand.core(), [free]).values()

    outputs = run(stand.core(), [stuck, yes, free])

    assert outputs["stuck", 0].reason == "error"
    assert outputs["stuck", 0].error_code == "no_token_allowed"
    assert outputs["yes", 0].text == "yes"
    assert outputs["free", 0] == expected


def test_the_assembled_engine_follows_grammars_and_leaves_no_worker_behind(
    stand: Stand, tmp_path: Path
) -> None:
    config = _config(stand.folder, num_blocks=128, max_num_seqs=8, max_num_batched_tokens=32)
    engine = assemble_engine(config, cache=tmp_path)
    try:
        outputs = run(
            engine.core, [ask("a", Grammar(kind="regex", value="yes|no")), ask("b", schema(False))]
        )
        assert engine.grammars is not None
        workers = [child for child in _workers() if child.is_running()]
        assert workers
    finally:
        engine.close()

    assert outputs["a", 0].text in ("yes", "no")
    assert outputs["b", 0].error_code == "grammar_invalid"
    # One, which is that of this module's stand, may be left.
    assert len(_workers()) == len(workers) - 1


def _workers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [c for c in children if "loraplex_engine.structured.worker" in " ".join(c.cmdline())]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_are_left_out_of_steps_keep_their_bits(
    dtype: Literal["float32", "bfloat16"], stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mask takes 20 ms on a clock of its own, so that a step has time for two or three."""
    requests = [
        ask(f"r{index}", schema(SCHEMAS[index]), seed=index, max_tokens=24, n=1 + index % 2)
        for index in range(6)
    ]
    tenants = [
        msgspec.structs.replace(request, tenant_id=f"tenant {index % 2}")
        for index, request in enumerate(requests)
    ]
    alone: dict[tuple[str, int], Output] = {}
    for request in tenants:
        alone |= run(stand.core(dtype), [request])
    monkeypatch.setattr(rows_module, "MAX_EXCESS_S", 1e9)
    core = stand.core(dtype, max_num_seqs=16, max_num_batched_tokens=64)
    core._grammars.clock = itertools.count(0.0, 0.02).__next__

    assert run(core, tenants) == alone

    assert core.stats().grammar_deferrals_total > 50
