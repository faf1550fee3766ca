"""What a gateway costs: the replay runs to its end through the gateway's own code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from loraplex_engine.client import EngineClient
from loraplex_platform.gateway.event_queue import EventQueue
from loraplex_platform.gateway.metrics import InterTokenTimes
from loraplex_platform.gateway.pump import Pump
from loraplex_platform.profiling import command
from loraplex_platform.profiling.stand import measure_gateway
from prometheus_client import CollectorRegistry, Histogram

from tests.platform.gateway import tiny_model


def test_all_streams_end_and_every_part_has_a_cost(tmp_path: Path) -> None:
    before = (EngineClient._handle, Pump._take)

    cost = measure_gateway(tiny_model.write(tmp_path), 2, num_steps=5, step_ms=2.0)

    assert cost.batch == 2
    assert cost.receive_ms > 0
    assert cost.detokenize_ms > 0
    assert cost.us_per_token > 0
    assert cost.num_bytes > 2 * 5 * 200  # frames of more than 200 bytes
    assert (EngineClient._handle, Pump._take) == before


def test_the_engine_gets_the_figures_and_all_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model.write(tmp_path)
    seen: list[tuple[list[str], list[dict[str, float]]]] = []

    def run_engine(arguments: Sequence[str]) -> int:
        figures = json.loads(Path(arguments[-1]).read_text())
        seen.append((list(arguments[:-1]), figures))
        return 7

    def measure(model: object, batches: Sequence[int]) -> list[dict[str, float]]:
        return [{"batch": batch} for batch in batches]

    monkeypatch.setattr(command, "_run_engine", run_engine)
    monkeypatch.setattr(command, "_measure", measure)
    flags = ["--model", str(folder), "--batch", "4,1", "--steps", "3"]

    code = command.run(flags)

    assert code == 7
    assert seen == [([*flags, "--gateway-figures"], [{"batch": 1}, {"batch": 4}])]


@pytest.mark.parametrize("flags", [["--help"], ["--no-gateway"], ["--batch", "x"], ["--model"]])
def test_without_a_gateway_to_measure_the_engine_answers(
    monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    seen: list[list[str]] = []

    def run_engine(arguments: Sequence[str]) -> int:
        seen.append(list(arguments))
        return 0

    monkeypatch.setattr(command, "_run_engine", run_engine)

    assert command.run(flags) == 0
    assert seen == [flags]


def test_cheap_times_read_as_a_histogram_does() -> None:
    registry, buckets = CollectorRegistry(), (0.001, 0.5, 1)
    cheap = InterTokenTimes("cheap_seconds", "text", buckets)
    registry.register(cheap)
    oracle = Histogram("oracle_seconds", "text", ["endpoint"], buckets=buckets, registry=registry)

    for endpoint, seconds, count in (("a", 0.001, 1), ("a", 0.7, 3), ("b", 9.0, 2), ("a", 1.0, 1)):
        cheap.observe(endpoint, seconds, count)
        for _ in range(count):
            oracle.labels(endpoint).observe(seconds)

    samples: dict[str, set[tuple[str, str, float]]] = {"cheap": set(), "oracle": set()}
    for metric in registry.collect():
        for sample in metric.samples:
            kind, _, name = sample.name.partition("_")
            if name != "seconds_created":
                labels = json.dumps(sample.labels, sort_keys=True)
                samples[kind].add((name, labels, round(sample.value, 9)))
    assert samples["cheap"] == samples["oracle"]
    assert len(samples["cheap"]) == 2 * (4 + 2)


async def test_a_cancelled_reader_loses_nothing() -> None:
    box: EventQueue[int] = EventQueue()
    reading = asyncio.create_task(box.get())
    await asyncio.sleep(0)

    box.put_nowait(1)
    reading.cancel()  # after it was woken, before it ran
    await asyncio.gather(reading, return_exceptions=True)
    box.put_nowait(2)

    assert await box.get_all() == [1, 2]
