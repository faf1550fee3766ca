"""The engine's command line: flags, environment variables, and wrong settings."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import ConfigError
from loraplex_engine.server_cli import main, read_options


def test_flags_come_from_the_environment_too(folder: Path) -> None:
    environ = {
        "LORAPLEX_ENGINE_MODEL_DIR": "/m",
        "LORAPLEX_ENGINE_MAX_LORAS": "3",
        "LORAPLEX_ENGINE_DIE_WITH_PARENT": "true",
        "LORAPLEX_ENGINE_ADDRESS": "ipc:///x",
    }

    _, config, options = read_options(
        ["--journal-dir", "/j", "--address", "ipc:///flag/wins"], environ
    )

    assert (config.max_loras, config.model_dir, config.num_blocks) == (3, Path("/m"), None)
    assert options.die_with_parent
    assert options.address == "ipc:///flag/wins"


def test_the_prefix_caches_flags() -> None:
    usual = ["--model-dir", "/m", "--journal-dir", "/j", "--address", "ipc:///x"]

    _, default, options = read_options(usual, {})
    assert (default.prefix_cache, default.prefix_cache_tenant_share) == (True, None)
    assert options.events_address is None
    assert not read_options([*usual, "--no-prefix-cache"], {})[1].prefix_cache
    flags = ["--prefix-cache-tenant-share", "0.25", "--public-prefix-file", "/p.json"]
    _, config, options = read_options([*usual, *flags, "--events-address", "ipc:///e"], {})
    assert config.prefix_cache_tenant_share == 0.25
    assert config.public_prefix_file == Path("/p.json")
    assert options.events_address == "ipc:///e"


def test_the_schedulers_flags() -> None:
    usual = ["--model-dir", "/m", "--journal-dir", "/j", "--address", "ipc:///x"]
    names = ("policy", "aging_s", "admission", "kv_watermark", "long_prefill_token_threshold")
    names += ("max_partial_prefills", "waiting_served_ratio", "max_steps_closed")
    built = EngineConfig(model_dir=Path("/m"), base_model="smollm2-135m")

    _, default, _ = read_options(usual, {})
    assert [getattr(default, name) for name in names] == [getattr(built, name) for name in names]
    flags = ["--policy", "priority", "--aging-s", "5", "--admission", "reserve"]
    flags += ["--kv-watermark", "0.1", "--long-prefill-token-threshold", "64"]
    flags += ["--max-partial-prefills", "2", "--waiting-served-ratio", "1.2"]
    environ = {"LORAPLEX_ENGINE_MAX_STEPS_CLOSED": "7"}
    _, config, _ = read_options([*usual, *flags], environ)
    assert [getattr(config, name) for name in names] == [
        *("priority", 5.0, "reserve", 0.1, 64, 2, 1.2, 7)
    ]


def test_the_device_s_flags() -> None:
    usual = ["--model-dir", "/m", "--journal-dir", "/j", "--address", "ipc:///x"]
    names = (
        "device",
        "attention_backend",
        "lora_backend",
        "ops_backend",
        "batch_invariant",
        "cuda_graphs",
    )
    names += ("gpu_memory_utilization", "kv_cache_dtype")

    _, default, _ = read_options(usual, {})
    assert [getattr(default, name) for name in names] == [
        *("auto", "auto", "auto", "auto", False, True, None, "auto")
    ]
    flags = ["--device", "cuda", "--attention-backend", "triton", "--lora-backend", "triton"]
    flags += ["--batch-invariant", "--no-cuda-graphs", "--gpu-memory-utilization", "0.8"]
    flags += ["--kv-cache-dtype", "fp8"]
    _, config, _ = read_options([*usual, *flags], {})
    assert [getattr(config, name) for name in names] == [
        *("cuda", "triton", "triton", "auto", True, False, 0.8, "fp8")
    ]
    _, config, _ = read_options(usual, {"LORAPLEX_ENGINE_KV_CACHE_DTYPE": "int8"})
    assert config.kv_cache_dtype == "int8"
    _, config, _ = read_options(usual, {"LORAPLEX_ENGINE_CUDA_GRAPHS": "0"})
    assert not config.cuda_graphs
    _, config, _ = read_options([*usual, "--ops-backend", "torch"], {})
    assert config.ops_backend == "torch"


def test_the_linears_flags() -> None:
    usual = ["--model-dir", "/m", "--journal-dir", "/j", "--address", "ipc:///x"]

    def read(*flags: str, **environ: str) -> tuple[str, str]:
        _, config, _ = read_options([*usual, *flags], environ)
        return config.linear_backend, config.quantization

    assert read() == ("auto", "none")
    assert read("--linear-backend", "onednn") == ("onednn", "none")
    assert read("--quantization", "int4") == ("auto", "int4")
    assert read(LORAPLEX_ENGINE_QUANTIZATION="int8") == ("auto", "int8")
    with pytest.raises(ConfigError, match="quantization is 'int8', but linear_backend 'torch'"):
        read("--quantization", "int8", "--linear-backend", "torch")


def test_help_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])

    text = capsys.readouterr().out
    assert caught.value.code == 0
    for flag in ("--model-dir", "--address", "--journal-dir", "--max-loras", "--die-with-parent"):
        assert flag in text
    assert "(default: None)" not in text


@pytest.fixture
def process_restored() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    structlog.reset_defaults()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("process_restored")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--address", "tcp://127.0.0.1:0"], "--curve-secret-key-file"),
        (["--metrics-port", "70000"], "--metrics-port 70000"),
        (["--metrics-host", "no host"], "--metrics-port 0: cannot listen on no host"),
        (["--metrics-port-file", "/dev/null/port"], "--metrics-port-file /dev/null/port"),
        (["--redis-url", "nonsense"], "--redis-url"),
        (["--redis-url", "redis://host:port"], "--redis-url"),
        (["--events-address", "tcp://127.0.0.1:0"], "--curve-secret-key-file"),
        (["--events-address", "ipc://x"], "--events-address ipc://x"),
        (["--journal-dir", "/dev/null"], "--journal-dir /dev/null"),
        (["--journal-dir", "/dev/null/x"], "--journal-dir /dev/null/x"),
    ],
)
def test_wrong_settings_exit_2_and_say_what(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    usual = ["--model-dir", "/m", "--journal-dir", f"{folder}/j", "--address", f"ipc://{folder}/e"]

    code = main([*usual, *flags])

    assert code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("process_restored")
def test_a_folder_without_a_model_exits_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-dir", f"{folder}/none", "--journal-dir", f"{folder}/j"]

    code = main([*flags, "--address", f"ipc://{folder}/e"])

    assert code == 2
    assert f"{folder}/none" in capsys.readouterr().err


def test_a_steps_size_is_the_devices_to_decide_where_it_is_not_given() -> None:
    usual = ["--model-dir", "/m", "--journal-dir", "/j", "--address", "ipc:///x"]

    def sizes(config: EngineConfig) -> tuple[int, int]:
        return config.max_num_batched_tokens, config.max_num_seqs

    _, neither, _ = read_options(usual, {})
    _, one, _ = read_options([*usual, "--max-num-batched-tokens", "100"], {})
    _, other, _ = read_options([*usual, "--max-num-seqs", "1000"], {})

    assert sizes(neither.for_device(is_gpu=False)) == (512, 64)
    assert sizes(neither.for_device(is_gpu=True)) == (8192, 256)
    assert neither.most_seqs == 256
    assert sizes(one.for_device(is_gpu=False)) == (100, 64)
    assert sizes(one.for_device(is_gpu=True)) == (100, 100)
    assert sizes(other.for_device(is_gpu=True)) == (8192, 1000)
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 512, below max_num_seqs 1000"):
        other.for_device(is_gpu=False)
    # Where the device is known already, what is wrong is said at once; and 0 is not the same as nothing.
    with pytest.raises(ConfigError, match="below max_num_seqs 1000"):
        read_options([*usual, "--device", "cpu", "--max-num-seqs", "1000"], {})
    with pytest.raises(ConfigError, match="max_num_seqs is 0"):
        read_options([*usual, "--max-num-seqs", "0"], {})
