"""Loading around a real engine: the loop is woken, steps go on, counters and metrics tell."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Any

import pytest
from loraplex_engine import step_loop
from loraplex_engine.artifact import AdapterStore, ModelShape
from loraplex_engine.build import AssembledEngine, assemble_engine
from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import ConfigError
from loraplex_engine.metrics import EngineMetrics
from loraplex_engine.protocol import Generate, SamplingParams
from loraplex_engine.server_cli import read_options
from loraplex_engine.step_loop import Failed, Output, StepLoop, StepOutput
from prometheus_client import generate_latest

from tests.support.adapter_files import (
    make_adapter,
    native_cache_dir,
)
from tests.support.core_driver import run_to_end
from tests.support.tiny_model import TinyShape, write_tiny_model

DEADLINE_S = 60.0
DIGESTS = ["sha256:" + str(digit) * 64 for digit in range(4)]


def make_request(name: str, digest: str | None, *, num_tokens: int = 4) -> Generate:
    return Generate(
        request_id=name,
        attempt=1,
        lease_token=1,
        tenant_id="t",
        tenant_salt=b"s",
        prompt_token_ids=[5, 6, 7],
        adapter_digest=digest,
        sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
    )


class Setting:
    """A tiny engine's settings, and adapters in its store."""

    def __init__(self, root: Path, native_cache: Path, store_url: str) -> None:
        self.model_dir = write_tiny_model(root / "model", TinyShape(num_layers=1))
        shape = ModelShape.from_config_json(self.model_dir / "config.json")
        store = AdapterStore(store_url)
        self.digests = []
        for seed in range(4):
            artifact = make_adapter(root / str(seed), shape, rank=4, seed=seed)
            store.put(root / str(seed), artifact.digest)
            self.digests.append(artifact.digest)
        self.native_cache = native_cache
        self.store_url = store_url

    def assemble(self, **config: Any) -> AssembledEngine:
        settings: dict[str, Any] = {
            "model_dir": self.model_dir,
            "base_model": "tiny",
            "dtype": "float32",
            "store_url": self.store_url,
            "max_loras": 1,
            "max_cpu_loras": 2,
            "num_threads": 1,
        }
        return assemble_engine(EngineConfig(**settings | config), cache=self.native_cache)


@pytest.fixture
def setting(tmp_path: Path, pytestconfig: pytest.Config) -> Setting:
    return Setting(tmp_path, native_cache_dir(pytestconfig), f"file://{tmp_path}/store")


class Loop:
    """A step loop, and what it said."""

    def __init__(self, engine: AssembledEngine) -> None:
        self.outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self.loads: list[tuple[str, float]] = []
        self.loop = StepLoop(
            lambda: engine,
            self.outputs.put,
            observe_load=lambda tier, seconds: self.loads.append((tier, seconds)),
        )
        self.loop.start()

    def run(self, request: Generate) -> None:
        self.loop.submit(request)
        give_up_s = time.monotonic() + DEADLINE_S
        while True:
            output = self.outputs.get(timeout=max(0.0, give_up_s - time.monotonic()))
            assert not isinstance(output, Failed), output
            if isinstance(output, StepOutput) and output.events[-1].finish_reason is not None:
                assert output.events[-1].finish_reason == "length"
                return


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that looks for work only when it is told to."""
    monkeypatch.setattr(step_loop, "BLOCKED_WAIT_S", DEADLINE_S * 10)
    monkeypatch.setattr(step_loop, "IDLE_WAIT_S", DEADLINE_S * 10)


@pytest.mark.usefixtures("patient")
def test_a_request_starts_when_its_adapter_is_loaded_not_when_somebody_looks(
    setting: Setting,
) -> None:
    loop = Loop(setting.assemble())
    try:
        for index, digest in enumerate(setting.digests):
            loop.run(make_request(f"r{index}", digest))
    finally:
        assert loop.loop.stop(DEADLINE_S)
    assert [tier for tier, _ in loop.loads] == ["store"] * 4


def test_an_idle_engine_lets_idle_adapters_go(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "IDLE_WAIT_S", 0.01)
    loop = Loop(setting.assemble(adapter_idle_s=0.01))
    try:
        loop.run(make_request("r", setting.digests[0]))
        give_up_s = time.monotonic() + DEADLINE_S
        while loop.loop.stats is None or loop.loop.stats.adapters_host:
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        assert loop.loop.stats.adapter_host_bytes == 0
        assert loop.loop.stats.adapter_evictions_total == 1
    finally:
        assert loop.loop.stop(DEADLINE_S)


@pytest.fixture
def remote_setting(tmp_path: Path, pytestconfig: pytest.Config) -> Setting:
    return Setting(tmp_path, native_cache_dir(pytestconfig), f"memory://{tmp_path.name}-loading")


def test_counters_and_metrics_tell_what_is_where(remote_setting: Setting, tmp_path: Path) -> None:
    remote_setting.native_cache = _own_copies(remote_setting.native_cache, tmp_path)
    engine = remote_setting.assemble(pinned_adapters=(remote_setting.digests[0],))
    metrics = EngineMetrics("tiny")
    engine.attach(lambda: None, metrics.observe_adapter_load)
    core = engine.core
    try:
        for index, digest in enumerate([*remote_setting.digests[:3], "sha256:" + "0" * 64]):
            core.add(make_request(f"r{index}", digest))
            run_to_end(engine.core)
        assert engine.lora is not None
        give_up_s = time.monotonic() + DEADLINE_S
        while engine.stats().adapters_loading:
            assert time.monotonic() < give_up_s
        stats = engine.stats()
        metrics.watch(lambda: stats, lambda: 0.0, lambda: 0)
        text = generate_latest(metrics.registry).decode()
    finally:
        engine.close()

    assert stats.adapters_pinned == [remote_setting.digests[0]]
    assert stats.adapter_loads_total == 3
    times = stats.adapter_load_times["store"]
    assert times.loads_total == 3
    assert 0 < times.p50_s <= times.p95_s
    assert stats.adapter_load_failures_total == 1
    assert stats.adapter_evictions_total >= 1
    assert stats.adapters_disk == 3
    assert stats.adapter_host_bytes > 0
    for line in (
        'loraplex:adapters{model_name="tiny",tier="disk"} 3.0',
        f'loraplex:adapters{{model_name="tiny",tier="host"}} {len(stats.adapters_host)}.0',
        'loraplex:adapter_load_seconds_count{model_name="tiny",tier="store"} 3.0',
        'loraplex:adapter_load_seconds_count{model_name="tiny",tier="disk"} 0.0',
        'loraplex:adapter_loads_total{model_name="tiny"} 3.0',
        'loraplex:adapter_load_failures_total{model_name="tiny"} 1.0',
        'loraplex:adapters_pinned{model_name="tiny"} 1.0',
    ):
        assert line in text, line


def _own_copies(native_cache: Path, root: Path) -> Path:
    """A cache folder with the compiled kernels, but without other tests' adapters."""
    (root / "cache").mkdir()
    (root / "cache" / "native").symlink_to(native_cache / "native")
    return root / "cache"


# ----------------------------------------------------------------------------------------- settings


def test_flags_and_variables_reach_the_settings(tmp_path: Path) -> None:
    arguments = [
        *("--model-dir", str(tmp_path), "--address", "ipc:///tmp/x/e.sock"),
        *("--journal-dir", str(tmp_path), "--store-url", f"file://{tmp_path}"),
        *("--max-cpu-lora-bytes", "1000000", "--adapter-idle-s", "30"),
        *("--adapter-cache-bytes", "2000000"),
    ]
    pins = ("--pin-adapter", DIGESTS[0], "--pin-adapter", f"{DIGESTS[1]}, {DIGESTS[2]}")

    _, config, _ = read_options([*arguments, *pins], {})
    _, from_variable, _ = read_options(
        arguments, {"LORAPLEX_ENGINE_PIN_ADAPTER": f"{DIGESTS[0]},{DIGESTS[1]}"}
    )
    _, plain, _ = read_options(arguments, {})

    assert config.max_cpu_lora_bytes == 1_000_000
    assert config.adapter_cache_bytes == 2_000_000
    assert config.adapter_idle_s == 30.0
    assert config.pinned_adapters == tuple(DIGESTS[:3])
    assert from_variable.pinned_adapters == tuple(DIGESTS[:2])
    assert plain.pinned_adapters == ()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"pinned_adapters": ("pirate",)}, "use digests"),
        ({"pinned_adapters": (DIGESTS[0],), "store_url": None}, "needs store_url"),
        ({"pinned_adapters": tuple(DIGESTS), "max_loras": 1, "max_cpu_loras": 4}, "3 places"),
        ({"max_cpu_lora_bytes": 0}, "max_cpu_lora_bytes is 0"),
        ({"adapter_cache_bytes": 0}, "adapter_cache_bytes is 0"),
        ({"adapter_idle_s": 0.0}, "adapter_idle_s is 0.0"),
        ({"adapter_idle_s": float("nan")}, "adapter_idle_s is nan"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], word: str) -> None:
    settings: dict[str, Any] = {
        "model_dir": Path("m"),
        "base_model": "m",
        "store_url": "file:///s",
    }
    with pytest.raises(ConfigError, match=word):
        EngineConfig(**settings | changes)
