"""A whole replica around a tiny random model: adapters, aborts, and the same tokens for all."""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from loraplex_engine.artifact import UNKNOWN_MODEL, AdapterStore, ModelShape
from loraplex_engine.block_events import TOPIC, BlockMirror, decode_batch
from loraplex_engine.build import assemble_engine, build_engine
from loraplex_engine.client import EngineClient, EnginePinRefusedError, EngineRejectedError
from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import ConfigError, ModelError
from loraplex_engine.fingerprint import (
    CACHE_NAME,
    fingerprint_model,
    hash_model,
    identify_base,
)
from loraplex_engine.kv.prefix_cache import PrefixCache
from loraplex_engine.kv.setup import open_prefix_cache
from loraplex_engine.protocol import Generate, SamplingParams, TokenEvent
from loraplex_engine.row_rule_verdict import recall_or_check
from loraplex_engine.server import EngineServer, ServerOptions
from loraplex_engine.step_loop import ReplicaFacts
from loraplex_kernels.cpu.attention import NativeAttentionKernel
from loraplex_kernels.cpu.build import NativeBuildError, load_library
from loraplex_kernels.cpu.linear import list_arithmetics
from loraplex_kernels.cpu.lora import LoraKernel
from prometheus_client import generate_latest

from tests.support.adapter_files import make_adapter, native_cache_dir
from tests.support.core_driver import run_to_end
from tests.support.tiny_model import TinyShape, write_tiny_model

DEADLINE_S = 60.0
RANKS = (4, 8, 16)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lpx-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def model_dir(folder: Path) -> Path:
    (folder / "model").mkdir()
    return write_tiny_model(folder / "model", TinyShape(num_layers=2))


@pytest.fixture(scope="module")
def digests(folder: Path, model_dir: Path) -> list[str]:
    shape = ModelShape.from_config_json(model_dir / "config.json")
    store = AdapterStore(f"file://{folder}/store")
    digests = []
    for rank in RANKS:
        source = folder / f"adapter-{rank}"
        adapter = make_adapter(source, shape, rank=rank, linears=("q_proj", "down_proj"), size=0.5)
        store.put(source, adapter.digest)
        digests.append(adapter.digest)
    return digests


def make_config(folder: Path, **changes: object) -> EngineConfig:
    settings = {
        "model_dir": folder / "model",
        "base_model": "tiny",
        "dtype": "float32",
        "device": "cpu",
        "num_blocks": 96,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 64,
        "max_loras": 2,
        "max_cpu_loras": 3,
        "store_url": f"file://{folder}/store",
        "num_threads": 1,
    }
    return EngineConfig(**(settings | changes))  # type: ignore[arg-type]  # by name


@dataclass
class Replica:
    server: EngineServer
    client: EngineClient


@pytest.fixture
async def replica(folder: Path, digests: list[str]) -> AsyncIterator[Replica]:
    config = make_config(folder)
    options = ServerOptions(
        address=f"ipc://{folder}/run/e.sock",
        replica_id="e0",
        journal_dir=folder / "journal",
        events_address=f"ipc://{folder}/run/events.sock",
    )
    server = EngineServer(
        config,
        options,
        lambda: assemble_engine(
            config, cache=folder / "cache", publish_block_event=server.publish_block_event
        ),
    )
    server.start()
    async with EngineClient(options.address, gateway_id="g", heartbeat_s=0.05) as client:
        await client.connect()
        await eventually(lambda: client.is_ready)
        yield Replica(server, client)
        await asyncio.to_thread(server.drain, 0.0)
    assert await asyncio.to_thread(server.finish) == 0


async def eventually(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not is_true():  # noqa: ASYNC110 - polls what other threads change
            await asyncio.sleep(0.01)


def make_request(name: str, prompt: list[int], adapter: str | None, max_tokens: int) -> Generate:
    return Generate(
        request_id=name,
        attempt=1,
        lease_token=1,
        tenant_id="t",
        tenant_salt=b"s",
        prompt_token_ids=prompt,
        adapter_digest=adapter,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


async def run(client: EngineClient, request: Generate, stop_at: int = 10**6) -> list[TokenEvent]:
    stream = await client.generate(request)
    events: list[TokenEvent] = []
    num_tokens = 0
    async with asyncio.timeout(DEADLINE_S):
        async for event in stream:
            events.append(event)
            num_tokens += len(event.token_ids)
            if num_tokens >= stop_at:
                stream.abort()
    return events


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.token_ids]


async def test_a_mixed_crowd_with_random_aborts_equals_alone_and_leaves_nothing(
    replica: Replica, digests: list[str]
) -> None:
    rng = random.Random(11)
    client = replica.client
    choices = [None, *digests]
    prompts = [[rng.randrange(3, 131) for _ in range(rng.randrange(1, 70))] for _ in range(4)]
    alone = {
        (i, adapter): tokens_of(
            await run(client, make_request(f"alone-{i}-{j}", prompts[i], adapter, 12))
        )
        for i in range(len(prompts))
        for j, adapter in enumerate(choices)
    }
    assert len({tuple(alone[0, adapter]) for adapter in choices}) == len(choices)

    picks = [(rng.randrange(len(prompts)), rng.choice(choices)) for _ in range(64)]
    stops = [rng.choice([10**6, 10**6, 0, 1, 5]) for _ in picks]
    crowd = await asyncio.gather(
        *(
            run(client, make_request(f"crowd-{n}", prompts[i], adapter, 12), stops[n])
            for n, (i, adapter) in enumerate(picks)
        )
    )
    stats = await client.stats()
    entries = (await client.read_journal(0)).entries

    for pick, events, stop in zip(picks, crowd, stops, strict=True):
        ids = tokens_of(events)
        assert ids == alone[pick][: len(ids)]
        assert events[-1].finish_reason in ({"length"} if stop > 12 else {"length", "abort"})
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens == len(ids)
    assert (stats.num_running, stats.num_waiting, stats.adapter_leases) == (0, 0, 0)
    assert stats.kv_blocks_free == stats.kv_blocks_total == 96
    assert stats.max_adapters_in_step == 2
    assert stats.mixed_steps_total > 0
    assert len(stats.adapters_resident) == 2
    assert set(stats.adapters_host) == set(digests)
    assert sum(e.usage.completion_tokens for e in entries) == stats.generation_tokens_total


async def test_what_was_computed_is_found_billed_as_cached_and_published(
    replica: Replica, digests: list[str]
) -> None:
    prompt = list(range(3, 60))
    assert replica.server.events_address is not None

    usages = []
    for index, adapter in enumerate([None, digests[0], None, digests[0], digests[1]]):
        events = await run(replica.client, make_request(f"r{index}", prompt, adapter, 4))
        usages.append(events[-1].usage)

    assert [usage.cached_tokens for usage in usages if usage] == [0, 0, 48, 48, 0]
    entries = (await replica.client.read_journal(0)).entries
    assert [entry.usage for entry in entries[-5:]] == usages
    stats = await replica.client.stats()
    assert stats.prefix_cache_query_tokens_total == 5 * 57
    assert stats.prefix_cache_hit_tokens_total == 2 * 48
    metrics = generate_latest(replica.server._metrics.registry).decode()
    assert 'loraplex:prefix_cache_queries_total{model_name="tiny"} 285.0' in metrics
    assert 'loraplex:prefix_cache_hits_total{model_name="tiny"} 96.0' in metrics
    mirror = BlockMirror()
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(replica.server.events_address)
        socket.subscribe(TOPIC)
        while not mirror.is_in_sync:
            assert await asyncio.to_thread(socket.poll, int(DEADLINE_S) * 1000)
            mirror.apply(decode_batch(socket.recv_multipart()[1]))
    assert len(mirror.blocks) == 3 * 3
    assert {block.adapter_digest for block in mirror.blocks.values()} == {None, *digests[:2]}


async def test_a_pin_at_run_time_loads_the_adapter_and_keeps_it(
    replica: Replica, digests: list[str]
) -> None:
    """Three places and two slots: one pin, which whatever is asked for meanwhile does not evict."""
    assert await replica.client.pin(digests[0]) == [digests[0]]
    with pytest.raises(EnginePinRefusedError, match="1 adapters can be pinned") as refused:
        await replica.client.pin(digests[1])
    assert refused.value.code == "too_many_pins"
    async with asyncio.timeout(DEADLINE_S):
        while digests[0] not in (await replica.client.stats()).adapters_host:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    for index, adapter in enumerate(digests[1:]):
        await run(replica.client, make_request(f"beside-a-pin{index}", [5, 6], adapter, 2))

    stats = await replica.client.stats()
    assert stats.adapters_pinned == [digests[0]]
    # Whoever looks later finds why the other one is not kept, and that no flag pinned the first.
    assert list(stats.adapters_pin_failed) == [digests[1]]
    assert "1 adapters can be pinned" in stats.adapters_pin_failed[digests[1]]
    assert stats.adapters_pinned_at_start == []
    assert digests[0] in stats.adapters_host
    assert await replica.client.unpin(digests[0]) == []


async def test_adapters_that_are_missing_or_malformed(replica: Replica, folder: Path) -> None:
    missing = "sha256:" + "0" * 64

    events = await run(replica.client, make_request("missing", [5], missing, 4))
    with pytest.raises(EngineRejectedError):
        await run(replica.client, make_request("malformed", [5], "sha256:x", 4))

    assert events[-1].finish_reason == "error"
    assert events[-1].error_code == "adapter_unavailable"
    assert len(tokens_of(await run(replica.client, make_request("after", [5], None, 4)))) == 4


async def test_ids_beyond_the_vocabulary_are_refused(replica: Replica) -> None:
    with pytest.raises(EngineRejectedError) as caught:
        await run(replica.client, make_request("r", [131], None, 4))

    assert caught.value.code == "invalid_request"


def test_without_a_store_only_the_base_runs(
    folder: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_CACHE_DIR", str(folder / "cache"))
    core = build_engine(make_config(folder, store_url=None))
    core.add(make_request("base", [5, 6], None, 3))
    core.add(make_request("adapter", [5, 6], "sha256:" + "1" * 64, 3))

    events = run_to_end(core)

    reasons = {e.request_id: e.finish_reason for e in events if e.finish_reason is not None}
    assert reasons == {"base": "length", "adapter": "error"}
    core.check()


def test_a_folder_without_a_model_or_a_bad_store_url_says_so(
    folder: Path, model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError):
        assemble_engine(make_config(folder, model_dir=tmp_path), cache=tmp_path)
    with pytest.raises(ConfigError, match="store-url"):
        assemble_engine(make_config(folder, store_url="nonsense"), cache=folder / "cache")


def test_a_quantized_replica_is_another_one_whose_rows_are_still_their_own(
    folder: Path, model_dir: Path, digests: list[str]
) -> None:
    facts: list[ReplicaFacts] = []
    for quantization in ("int8", "int4"):
        config = make_config(folder, quantization=quantization)
        replica = assemble_engine(config, cache=folder / "cache")
        facts.append(replica.facts)
        core, asked = replica.core, {"base": None, "adapter": digests[0]}
        alone = {}
        for name, digest in asked.items():
            core.add(make_request(f"{name}-alone", [5, 6, 7], digest, 6))
            alone[name] = tokens_of(run_to_end(core))
        for name, digest in asked.items():
            core.add(make_request(name, [5, 6, 7], digest, 6))
        together = run_to_end(core)
        replica.close()

        for name, tokens in alone.items():
            assert len(tokens) == 6
            assert tokens_of([e for e in together if e.request_id == name]) == tokens

    assert [found.backends["linear"] for found in facts] == ["native_int8", "native_int4"]
    assert [found.backends["quantization"] for found in facts] == ["int8", "int4"]
    assert len({found.model_fingerprint for found in facts}) == 2
    assert all(found.row_rule_holds for found in facts)


# ---------------------------------------------------------------------------- fingerprint


@pytest.fixture
def block_names(monkeypatch: pytest.MonkeyPatch) -> set[bytes]:
    """What each replica that is assembled calls a block of the same tokens."""
    names: set[bytes] = set()

    def watched(*args: Any, **named: Any) -> PrefixCache | None:
        cache = open_prefix_cache(*args, **named)
        assert cache is not None
        chain = cache.hasher.chain(range(17), owner="t", salt=b"s", adapter_digest=None)
        chain.extend(range(17), 1)
        names.update(chain.names)
        return cache

    monkeypatch.setattr("loraplex_engine.build.open_prefix_cache", watched)
    return names


def test_replicas_whose_caches_differ_in_kind_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_names: set[bytes]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "model").mkdir()
    write_tiny_model(tmp_path / "model", TinyShape(hidden_size=32, num_heads=2, head_dim=16))
    replicas: list[ReplicaFacts] = []
    for kv_cache_dtype in ("auto", "int8", "fp8"):
        changes = {"attention_backend": "triton", "kv_cache_dtype": kv_cache_dtype}
        config = make_config(tmp_path, store_url=None, **changes)
        replica = assemble_engine(config, cache=tmp_path / "cache")
        replica.close()
        replicas.append(replica.facts)

    assert len({facts.model_fingerprint for facts in replicas}) == 3
    assert [facts.kv_format for facts in replicas] == [
        "triton/block16/float32/tp1",
        "triton-int8/block16/float32/tp1",
        "triton-fp8/block16/float32/tp1",
    ]
    assert [facts.backends["kv_cache"] for facts in replicas] == ["float32", "int8", "fp8"]
    assert len(block_names) == 3


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config) -> Path:
    """A cache in which they are compiled."""
    cache = native_cache_dir(pytestconfig)
    try:
        load_library("linear", cache / "native")
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")
    return cache


def test_replicas_whose_products_differ_share_no_blocks(
    folder: Path, model_dir: Path, digests: list[str], kernels: Path, block_names: set[bytes]
) -> None:
    def assemble(**changes: object) -> ReplicaFacts:
        replica = assemble_engine(make_config(folder, **changes), cache=kernels)
        replica.close()
        return replica.facts

    parts = ("attention", "lora", "linear", "ops")
    others = [assemble(), *(assemble(**{f"{part}_backend": "torch"}) for part in parts)]

    assert len({facts.model_fingerprint for facts in others}) == 1
    assert len({tuple(facts.backends[part] for part in parts) for facts in others}) == 5
    assert len(block_names) == 5


def test_products_in_tiles_are_named_wherever_they_are_made(
    folder: Path,
    model_dir: Path,
    digests: list[str],
    kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
    block_names: set[bytes],
) -> None:
    """Two CPUs' replicas of one bf16 model, of which one has matrix tiles."""
    if "amx" not in list_arithmetics(torch.bfloat16, kernels / "native"):
        pytest.skip("this CPU has no matrix tiles (AMX) for bf16")

    def assemble() -> ReplicaFacts:
        replica = assemble_engine(make_config(folder, dtype="bfloat16"), cache=kernels)
        replica.close()
        return replica.facts

    with_tiles = assemble()
    monkeypatch.setattr(
        "loraplex_engine.model.native_linear.list_arithmetics", lambda *_: ("fp32",)
    )
    monkeypatch.setattr(
        "loraplex_engine.attention.native_attention.NativeAttentionKernel",
        partial(NativeAttentionKernel, in_tiles=False),
    )
    monkeypatch.setattr(
        "loraplex_engine.lora.setup.LoraKernel", lambda folder: _Untiled(LoraKernel(folder))
    )
    without = assemble()

    for part in ("attention", "lora", "linear"):
        assert (with_tiles.backends[part], without.backends[part]) == ("native_amx", "native")
    assert with_tiles.kv_format == "native_amx/block16/bfloat16/tp1"
    assert without.kv_format == "native/block16/bfloat16/tp1"
    assert with_tiles.model_fingerprint == without.model_fingerprint
    assert len(block_names) == 2


class _Untiled:
    """A LoRA kernel as on a CPU without tiles."""

    has_tiles = False

    def __init__(self, kernel: LoraKernel) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_fingerprint_changes_with_whatever_changes_answers(small_model: Path) -> None:
    seen = {
        fingerprint_model(hash_model(small_model), dtype="float32"),
        fingerprint_model(hash_model(small_model), dtype="bfloat16"),
        fingerprint_model(hash_model(small_model), dtype="float32", image="sha256:1"),
        fingerprint_model(hash_model(small_model), dtype="float32", kv_cache_dtype="int8"),
        fingerprint_model(hash_model(small_model), dtype="float32", kv_cache_dtype="fp8"),
        fingerprint_model(hash_model(small_model), dtype="float32", quantization="int8"),
        fingerprint_model(hash_model(small_model), dtype="float32", quantization="int4"),
    }
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        (small_model / name).write_text("changed")
        seen.add(fingerprint_model(hash_model(small_model), dtype="float32"))
    (small_model / "generation_config.json").write_text("{}")
    seen.add(fingerprint_model(hash_model(small_model), dtype="float32"))

    assert len(seen) == 12
    assert fingerprint_model(hash_model(small_model), dtype="float32") in seen


def test_digests_are_kept_beside_the_model(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fingerprint_model(hash_model(small_model), dtype="float32")
    monkeypatch.setattr("loraplex_engine.fingerprint._sha256", None)  # nothing may be hashed now

    assert fingerprint_model(hash_model(small_model), dtype="float32") == first


def test_a_damaged_digest_cache_is_made_again(small_model: Path) -> None:
    first = fingerprint_model(hash_model(small_model), dtype="float32")
    (small_model / CACHE_NAME).write_text("{broken")

    assert fingerprint_model(hash_model(small_model), dtype="float32") == first


def test_a_folder_that_cannot_be_written_still_has_a_fingerprint(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, data: bytes) -> int:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", refuse)

    assert fingerprint_model(hash_model(small_model), dtype="float32").startswith("sha256:")
    assert not (small_model / CACHE_NAME).exists()


def test_a_base_is_named_by_weights_tokenizer_and_template(small_model: Path) -> None:
    whole = identify_base(small_model, hash_model(small_model))

    assert whole.revision.startswith("sha256:")
    names = {"model.safetensors": whole.revision}
    for name, part in (("tokenizer.json", "tokenizer"), ("chat_template.jinja", "chat_template")):
        names[name] = getattr(whole, f"{part}_sha256")
    assert len(set(names.values())) == 3
    for name, digest in names.items():
        (small_model / name).write_text("changed")
        changed = identify_base(small_model, hash_model(small_model))
        kept = {changed.revision, changed.tokenizer_sha256, changed.chat_template_sha256}
        assert digest not in kept


def test_a_folder_without_a_tokenizer_has_no_name(small_model: Path) -> None:
    (small_model / "tokenizer.json").unlink()

    assert identify_base(small_model, hash_model(small_model)) == UNKNOWN_MODEL


# ---------------------------------------------------------------------------- row rule verdicts


def test_a_verdict_is_recalled_for_the_same_subject_only(tmp_path: Path) -> None:
    asked: list[str] = []

    def check(answer: bool, name: str) -> Callable[[], bool]:
        def run_check() -> bool:
            asked.append(name)
            return answer

        return run_check

    one, two = {"model": "1"}, {"model": "2"}
    assert not recall_or_check(tmp_path, one, check(False, "fails"))
    assert recall_or_check(tmp_path, one, check(True, "holds"))  # a failure is not remembered
    assert recall_or_check(tmp_path, one, check(True, "again"))
    assert recall_or_check(tmp_path, two, check(True, "other"))

    assert asked == ["fails", "holds", "other"]


def test_a_verdict_does_not_outlive_what_it_was_found_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_checks = 0

    def check() -> bool:
        nonlocal num_checks
        num_checks += 1
        return True

    recall_or_check(tmp_path, {}, check)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    recall_or_check(tmp_path, {}, check)
    monkeypatch.setattr("numpy.__version__", "9.9")
    recall_or_check(tmp_path, {}, check)
    monkeypatch.setattr("loraplex_kernels.cpu.build._version", lambda compiler: b"another compiler")
    recall_or_check(tmp_path, {}, check)
    recall_or_check(tmp_path, {}, check)

    assert num_checks == 4


def test_no_stray_threads_are_left() -> None:
    names = {thread.name for thread in threading.enumerate()}

    assert not names & {"step-loop", "gateway-port", "health-http", "registry"}
