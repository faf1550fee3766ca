"""A profile of a tiny model: its parts add up, its JSON is the schema's, and nothing stays wrapped."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loraplex_engine.profiling.machine as machine_module
import msgspec
import pytest
import torch
from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import EngineError
from loraplex_engine.model.native_layers import NativeLayers
from loraplex_engine.profiling.clock import PartClock
from loraplex_engine.profiling.command import main
from loraplex_engine.profiling.figures import (
    DETOKENIZE,
    OTHER,
    RECEIVE,
    SSE,
    GatewayFigures,
    Profile,
    format_profile,
)
from loraplex_engine.profiling.floors import StepShape, step_work
from loraplex_engine.profiling.seams import (
    ATTENTION,
    DECODER,
    ENGINE_PARTS,
    HEAD,
    LINEAR,
    LORA,
    SAMPLING,
    SMALL,
    timed_engine,
)
from loraplex_engine.profiling.stand import Stand
from loraplex_kernels.cpu.build import NativeBuildError, load_library
from loraplex_kernels.cpu.linear import LinearKernel, PackedLinear

from tests.support.adapter_files import native_cache_dir
from tests.support.tiny_model import TinyShape, write_tiny_model

SHAPE = TinyShape(num_layers=2)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), SHAPE)
    (folder / "tokenizer.json").write_text("{}")  # looked for, not read
    return folder


@pytest.fixture(scope="module", autouse=True)
def no_self_check() -> Iterator[None]:
    """Whether the row rule holds is tried elsewhere, and takes longer than all of this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loraplex_engine.build.recall_or_check", lambda *_: True)
        yield


@pytest.fixture(scope="module")
def stand(model_dir: Path) -> Iterator[Stand]:
    def config(store_url: str | None) -> EngineConfig:
        return EngineConfig(
            model_dir=model_dir,
            base_model="tiny",
            device="cpu",
            dtype="float32",  # whose bytes are counted below
            attention_backend="torch",
            lora_backend="torch",
            linear_backend="torch",  # a native one pads its weights, and says so many bytes
            num_blocks=32,
            max_num_seqs=4,
            store_url=store_url,
            speculative="off",
        )

    with Stand(model_dir, config, [4, 8]) as opened:
        yield opened


def test_a_part_that_runs_inside_another_counts_once() -> None:
    now = iter([0.0, 1.0, 3.0, 7.0])
    clock = PartClock(lambda: next(now))
    inner = clock.timed("inner", lambda: None)

    clock.timed("outer", inner)()

    assert clock.seconds == {"outer": 1.0 + 4.0, "inner": 2.0}


def test_a_call_that_tells_its_own_parts_gives_them_up() -> None:
    now = iter([0.0, 7.0])
    clock = PartClock(lambda: next(now))
    call = clock.split(lambda: "answer", lambda: {"first": 1.0, "second": 2.0})

    answer = clock.timed("outer", call)()

    assert answer == "answer"
    assert clock.seconds == {"first": 1.0, "second": 2.0, "outer": 4.0}


def test_a_part_that_raises_is_left() -> None:
    clock = PartClock(iter(range(9)).__next__)

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        clock.timed("part", fail)()
    clock.clear()  # asserts that no part is under way

    assert clock.seconds == {}


def test_the_work_of_a_step_is_what_a_pencil_finds(stand: Stand) -> None:
    step = StepShape(num_computed=[9, 4], num_scheduled=[1, 1], adapter_ranks=[4], row_ranks=[4, 0])

    work = step_work(
        step, stand.engine.runner.model, stand.shape, kv_bytes_per_token=256, adapter_number_bytes=4
    )

    hidden, inner, vocab = SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.vocab_size
    q, kv = SHAPE.num_heads * SHAPE.head_dim, SHAPE.num_kv_heads * SHAPE.head_dim
    weights = 2 * (hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inner)  # of two layers
    assert (work[LINEAR].num_bytes, work[LINEAR].flops) == (4 * weights, 2 * 2 * weights)
    assert (work[HEAD].num_bytes, work[HEAD].flops) == (4 * vocab * hidden, 2 * 2 * vocab * hidden)
    assert work[ATTENTION].num_bytes == 256 * (10 + 5)
    assert work[ATTENTION].flops == 4 * 2 * q * (10 + 5)
    sides = 2 * (3 * hidden + q + 2 * kv + q + hidden + 2 * (hidden + inner) + inner + hidden)
    assert (work[LORA].num_bytes, work[LORA].flops) == (4 * 4 * sides, 2 * 4 * sides)
    assert work[SAMPLING].num_bytes == 2 * vocab * 4


def test_nothing_stays_wrapped(stand: Stand) -> None:
    runner, core = stand.engine.runner, stand.engine.core
    objects: list[object] = [runner, core, stand.loop, stand.port, runner.model, runner.model.ops]
    objects += (runner.attention, runner.forward_pass, runner.forward_pass._lora, runner._sampler)
    before = [dict(vars(one)) for one in objects]
    layers = list(runner.model.layers)

    with timed_engine(PartClock(), runner, core, stand.loop, stand.port):
        assert runner.model.layers[0] is not layers[0]
        assert "step" in vars(core)

    assert [vars(one) for one in objects] == before
    assert all(now is then for now, then in zip(runner.model.layers, layers, strict=True))


def test_a_timed_step_says_what_an_untimed_one_says(stand: Stand) -> None:
    def tokens(clock: PartClock | None) -> list[int]:
        stand._rng = type(stand._rng)(type(stand._rng.bit_generator)(7))
        request = stand.ask(12, 64, 1)
        stand.load_adapters()
        stand.turn_until(1)
        for _ in range(6):
            stand.turn(clock)
        row = stand.engine.runner._token_ids[0].copy()
        stand.end([request])
        return [int(token) for token in row[:18]]

    clock = PartClock()

    assert tokens(clock) == tokens(None)
    assert {LINEAR, HEAD, ATTENTION, LORA, SAMPLING} <= set(clock.seconds)


def test_a_profile_adds_up_and_is_shown(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    quick = partial(
        machine_module.measure_machine, read_bytes=1 << 16, gemm_sizes=(16,), seconds=0.001
    )
    monkeypatch.setattr(machine_module, "measure_machine", quick)
    gateway = GatewayFigures(batch=2, receive_ms=0.25, detokenize_ms=0.5, stream_ms=1.0)
    (tmp_path / "gateway.json").write_bytes(msgspec.json.encode([gateway]))
    flags = ["--batch", "2,1", "--adapters", "0,2", "--context", "24", "--prefill", "40"]
    flags += ["--steps", "2", "--threads", str(torch.get_num_threads()), "--rank", "4"]
    flags += ["--attention-backend", "torch", "--lora-backend", "torch"]
    flags += ["--gateway-figures", str(tmp_path / "gateway.json")]

    code = main(["--model", str(model_dir), "--json", str(tmp_path / "out.json"), *flags])

    assert code == 0
    profile = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=Profile)
    kinds = [(case.phase, case.batch, case.tokens, case.adapters) for case in profile.cases]
    assert kinds == [
        ("decode", 1, 1, 0),
        ("decode", 2, 2, 0),
        ("prefill", 1, 40, 0),
        ("decode", 1, 1, 1),
        ("decode", 2, 2, 2),
        ("prefill", 1, 40, 1),
    ]
    for case in profile.cases:
        names = [part.name for part in case.parts]
        assert set(ENGINE_PARTS) | {OTHER} <= set(names)
        assert sum(part.ms for part in case.parts) == pytest.approx(case.step_ms)
        assert sum(part.percent for part in case.parts) == pytest.approx(100)
        assert case.roofline_percent == pytest.approx(100 * case.floor_ms / case.step_ms)
        has_gateway = case.phase == "decode" and case.batch == 2
        assert ({RECEIVE, DETOKENIZE, SSE} <= set(names)) is has_gateway
        assert case.step_ms - case.engine_ms == pytest.approx(1.75 if has_gateway else 0)
    shown = format_profile(profile)
    assert capsys.readouterr().out == shown + "\n"
    assert "another process" in shown
    # torch's backends are not called all layers at once.
    assert not profile.has_fused_layers
    assert "one call" not in shown
    assert "All layers run in one call" in format_profile(
        msgspec.structs.replace(profile, has_fused_layers=True)
    )


def test_layers_in_one_call_are_timed_as_they_serve(
    model_dir: Path, pytestconfig: pytest.Config
) -> None:
    cache = native_cache_dir(pytestconfig)
    try:
        load_library("layers", cache)
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")

    def config(store_url: str | None) -> EngineConfig:
        return EngineConfig(
            model_dir=model_dir,
            base_model="tiny",
            device="cpu",
            attention_backend="native",
            lora_backend="native",
            linear_backend="native",
            ops_backend="native",
            num_blocks=32,
            max_num_seqs=4,
            store_url=store_url,
            speculative="off",
        )

    clock = PartClock()
    with Stand(model_dir, config, [4]) as native:
        runner = native.engine.runner
        native.load_adapters()
        request = native.ask(12, 64, 0)
        native.turn_until(1)
        assert runner.model.has_fused_layers
        layers, call = list(runner.model.layers), runner.model._layer_call
        assert isinstance(call, NativeLayers)
        seen: list[bool] = []

        with timed_engine(clock, runner, native.engine.core, native.loop, native.port):
            seen.append(call.part_seconds is not None)
            seen += [now is then for now, then in zip(runner.model.layers, layers, strict=True)]
        native.turn(clock)
        native.end([request])

        assert all(seen)
        assert call.part_seconds is None
        assert "forward" not in vars(call)
    assert min(clock.seconds[part] for part in (LINEAR, ATTENTION, LORA, SMALL, DECODER)) > 0


def test_of_two_measurements_the_better_figures_count() -> None:
    first = machine_module.MachineFigures(
        read_gb_s=3.0, gemm_gflop_s=900.0, gemm_dtype="bfloat16", num_threads=2
    )
    second = msgspec.structs.replace(first, read_gb_s=20.0, gemm_gflop_s=300.0)

    best = second.at_least(first)

    assert (best.read_gb_s, best.gemm_gflop_s) == (20.0, 900.0)
    assert (best.gemm_dtype, best.num_threads) == ("bfloat16", 2)


@pytest.mark.parametrize("ours_s", [0.25, 4.0])
def test_our_own_products_count_where_they_are_the_faster(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, ours_s: float
) -> None:
    """All that torch does takes a second here."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")  # or a child multiplies
    cache = native_cache_dir(pytestconfig)
    try:
        load_library("linear", cache)
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")
    products: list[torch.Tensor] = []
    forward = LinearKernel.forward

    def count(kernel: LinearKernel, x: torch.Tensor, linear: PackedLinear) -> torch.Tensor:
        products.append(forward(kernel, x, linear))
        return products[-1]

    def best(run: Callable[[], object], seconds: float) -> float:
        before = len(products)
        run()
        return ours_s if len(products) > before else 1.0

    monkeypatch.setattr(LinearKernel, "forward", count)
    monkeypatch.setattr(machine_module, "_best", best)
    monkeypatch.setattr(machine_module, "_PART_BYTES", 1 << 16)

    figures = machine_module.measure_machine(
        torch.bfloat16, kernel_dir=cache, read_bytes=1 << 18, gemm_sizes=(32,)
    )

    seconds = min(1.0, ours_s)
    assert figures.gemm_dtype == "bfloat16"
    assert figures.gemm_gflop_s == pytest.approx(2 * 32**3 / seconds / 1e9)
    assert figures.read_gb_s == pytest.approx((1 << 18) / seconds / 1e9)
    # Four parts of the weights, then the product of squares, and all of them right.
    assert [product.shape[0] for product in products] == [1, 1, 1, 1, 32]
    assert all(torch.equal(y, torch.full_like(y, 1024)) for y in products[:4])
    assert torch.equal(products[4], torch.full_like(products[4], 32))


def _measure_bf16() -> machine_module.MachineFigures:
    return machine_module.measure_machine(
        torch.bfloat16, read_bytes=1 << 16, gemm_sizes=(16,), seconds=0.001
    )


def test_torch_multiplies_where_nothing_keeps_it_from_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    children: list[tuple[dict[str, str], str]] = []
    run = subprocess.run

    def spy(command: list[str], **named: Any) -> subprocess.CompletedProcess[str]:
        done = run(command, **named)
        children.append((named["env"], done.stdout))
        return done

    monkeypatch.setattr(machine_module.subprocess, "run", spy)

    figures = _measure_bf16()

    ((environment, said),) = children
    assert "ONEDNN_MAX_CPU_ISA" not in environment
    assert figures.gemm_gflop_s == float(said) / 1e9 > 0


def test_a_child_that_cannot_multiply_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    monkeypatch.setattr(machine_module.sys, "executable", shutil.which("false"))

    with pytest.raises(EngineError, match="measuring torch's product in a process of its own"):
        _measure_bf16()


@pytest.mark.parametrize(("free_gib", "read_gib"), [(64, 0.5), (1, 0.25)])
def test_memory_is_read_past_the_caches_but_no_more_than_a_quarter_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, read_gib: float
) -> None:
    asked: list[int] = []

    def read_s(num_bytes: int, *_: object) -> float:
        asked.append(num_bytes)
        return 1.0

    monkeypatch.setattr(machine_module, "_read_s", read_s)
    monkeypatch.setattr(machine_module, "_cache_bytes", lambda: 2**28)
    free = SimpleNamespace(available=free_gib * 2**30)
    monkeypatch.setattr(machine_module.psutil, "virtual_memory", lambda: free)

    machine_module.measure_machine(torch.float32, gemm_sizes=(16,), seconds=0.001)

    assert asked == [int(read_gib * 2**30)]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "no/such/folder/here"], "neither a folder here"),
        (["--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json: there is no folder"),
    ],
)
def test_what_cannot_be_is_said_at_once(
    model_dir: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    code = main(["--model", str(model_dir), *flags])

    assert code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--batch", "0"], ["--batch", "1,x"], ["--context", "1"]])
def test_a_number_out_of_range_names_its_flag(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)

    assert ended.value.code == 2
    assert f"argument {flags[0]}" in capsys.readouterr().err
