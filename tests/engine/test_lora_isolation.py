"""Through the whole engine: a bad adapter harms its own requests and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loraplex_engine.artifact import (
    TENSORS_FILE,
    AdapterArtifact,
    AdapterStore,
    ModelShape,
)
from loraplex_engine.build import AssembledEngine, assemble_engine
from loraplex_engine.config import EngineConfig
from loraplex_engine.protocol import Generate, SamplingParams, TokenEvent

from tests.support.adapter_files import ALL_LINEARS, OUTSIDE, make_adapter, native_cache_dir
from tests.support.core_driver import run_to_end
from tests.support.tiny_model import TinyShape, write_tiny_model

PROMPT = list(range(3, 40))


class Tenants:
    """An engine, its store, and requests by name."""

    def __init__(self, engine: AssembledEngine, store: AdapterStore, shape: ModelShape) -> None:
        self.engine, self.store, self.shape = engine, store, shape
        self._count = 0

    def publish(self, folder: Path, **adapter: Any) -> AdapterArtifact:
        linears = [*ALL_LINEARS, *OUTSIDE]
        artifact = make_adapter(folder, self.shape, linears=linears, **adapter)
        self.store.put(folder, artifact.digest)
        return artifact

    def add(self, digest: str | None, *, num_tokens: int = 12, temperature: float = 0.0) -> str:
        self._count += 1
        request_id = f"00000000-0000-7000-8000-{self._count:012d}"
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=temperature, seed=5, ignore_eos=True, logprobs=3
        )
        self.engine.core.add(
            Generate(
                request_id=request_id,
                attempt=1,
                lease_token=1,
                tenant_id="t",
                tenant_salt=b"s",
                prompt_token_ids=PROMPT,
                sampling=sampling,
                adapter_digest=digest,
            )
        )
        return request_id

    def finish(self) -> dict[str, list[TokenEvent]]:
        """Step until nothing is left; the events of each request."""
        events: dict[str, list[TokenEvent]] = {}
        for event in run_to_end(self.engine.core):
            events.setdefault(event.request_id, []).append(event)
        return events

    def answer(self, digest: str | None, **request: Any) -> list[tuple[Any, ...]]:
        """What a request gets when it is alone."""
        request_id = self.add(digest, **request)
        return bits(self.finish()[request_id])


def bits(events: list[TokenEvent]) -> list[tuple[Any, ...]]:
    """Tokens and log-probabilities, to the bit."""
    assert events[-1].finish_reason == "length", events[-1].error_message
    return [
        (token, logprobs.logprob, tuple(logprobs.top_ids), tuple(logprobs.top_logprobs))
        for event in events
        for token, logprobs in zip(event.token_ids, event.logprobs or [], strict=True)
    ]


@pytest.fixture(params=["float32", "bfloat16"])
def tenants(
    request: pytest.FixtureRequest, tmp_path: Path, pytestconfig: pytest.Config
) -> Iterator[Tenants]:
    model_dir = write_tiny_model(tmp_path / "model", TinyShape())
    store = AdapterStore(f"file://{tmp_path}/store")
    config = EngineConfig(
        model_dir=model_dir,
        base_model="tiny",
        dtype=request.param,
        store_url=store.url,
        max_loras=4,
        num_threads=1,
    )
    engine = assemble_engine(config, cache=native_cache_dir(pytestconfig))
    yield Tenants(engine, store, ModelShape.from_config_json(model_dir / "config.json"))
    engine.close()


def test_an_overflowing_adapter_changes_no_bit_of_a_victim(
    tenants: Tenants, tmp_path: Path
) -> None:
    hostile = tenants.publish(tmp_path / "hostile", rank=8, size=1e30, seed=1)
    victim = tenants.publish(tmp_path / "victim", rank=5, seed=2).digest
    alone = {digest: tenants.answer(digest, temperature=0.7) for digest in (victim, None)}

    attackers = [tenants.add(hostile.digest, num_tokens=40) for _ in range(3)]
    victims = [
        (digest, tenants.add(digest, temperature=0.7)) for digest in (victim, None, victim, None)
    ]
    attackers += [tenants.add(hostile.digest, num_tokens=40) for _ in range(2)]
    events = tenants.finish()

    for digest, request_id in victims:
        assert bits(events[request_id]) == alone[digest]
    for request_id in attackers:
        assert events[request_id][-1].finish_reason == "error"
    assert tenants.engine.stats().mixed_steps_total > 0
    assert tenants.engine.stats().adapter_leases == 0
    # And nothing of it is left behind in blocks or scratch memory.
    assert {digest: tenants.answer(digest, temperature=0.7) for digest in alone} == alone


def test_requests_for_a_damaged_or_missing_adapter_end_alone(
    tenants: Tenants, tmp_path: Path
) -> None:
    good = tenants.publish(tmp_path / "good", rank=4, seed=3).digest
    damaged = tenants.publish(tmp_path / "damaged", rank=4, seed=4).digest
    path = tenants.store.fetch(damaged, tmp_path) / TENSORS_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    missing = "sha256:" + "0" * 64
    alone = tenants.answer(good)

    requests = {digest: tenants.add(digest) for digest in (damaged, good, missing)}
    events = tenants.finish()

    assert bits(events[requests[good]]) == alone
    for digest, code in ((damaged, "adapter_invalid"), (missing, "adapter_unavailable")):
        (last,) = events[requests[digest]]
        assert (last.finish_reason, last.error_code) == ("error", code)
        assert last.usage is not None
        assert last.usage.completion_tokens == 0


def test_a_change_of_alpha_is_another_adapter(tenants: Tenants, tmp_path: Path) -> None:
    """Same tensors, another scale: both are served side by side, and differ."""
    first = tenants.publish(tmp_path / "1", rank=4, seed=5, lora_alpha=16)
    second = tenants.publish(tmp_path / "2", rank=4, seed=5, lora_alpha=64)
    assert first.digest != second.digest
    alone = {artifact.digest: tenants.answer(artifact.digest) for artifact in (first, second)}
    assert alone[first.digest] != alone[second.digest]

    requests = {digest: tenants.add(digest) for digest in alone}
    events = tenants.finish()

    assert {digest: bits(events[request]) for digest, request in requests.items()} == alone
