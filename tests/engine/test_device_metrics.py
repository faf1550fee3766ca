"""What a scrape says of a GPU's memory and of recorded steps."""

from __future__ import annotations

import msgspec
from loraplex_engine.device.memory_profile import MemoryUse, plan_memory
from loraplex_engine.metrics import EngineMetrics
from loraplex_engine.protocol import EngineStats
from prometheus_client import generate_latest

from tests.support.engine_fakes import make_engine


def scrape(stats: EngineStats) -> list[str]:
    metrics = EngineMetrics("tiny")
    metrics.watch(lambda: stats, lambda: 0.0, lambda: 0)
    return generate_latest(metrics.registry).decode().splitlines()


def test_memory_by_use_and_replays_beside_eager_steps() -> None:
    plan = plan_memory(
        device_bytes=1000, utilization=0.9, use=MemoryUse(weights=500, lora=50), needed_kv_bytes=1
    )
    stats = msgspec.structs.replace(
        make_engine().core.stats(),
        device_memory_bytes=plan.by_use(),
        graphs_captured=12,
        graph_capture_seconds=3.5,
        graph_replays_total=40,
        eager_steps_total=2,
    )

    lines = scrape(stats)

    for use, size in (("weights", 500.0), ("lora", 50.0), ("kv_cache", 350.0), ("unused", 100.0)):
        line = f'loraplex:device_memory_bytes{{model_name="tiny",use="{use}"}} {size}'
        assert line in lines
    assert 'loraplex:graphs{model_name="tiny"} 12.0' in lines
    assert 'loraplex:graph_capture_seconds{model_name="tiny"} 3.5' in lines
    assert 'loraplex:graph_replays_total{model_name="tiny"} 40.0' in lines
    assert 'loraplex:eager_steps_total{model_name="tiny"} 2.0' in lines


def test_a_cpu_has_no_device_memory_to_speak_of() -> None:
    lines = scrape(make_engine().core.stats())

    assert not [line for line in lines if line.startswith("loraplex:device_memory_bytes{")]
