"""Backends that do not go with the device are refused; what a trial run takes is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loraplex_engine.compute import _TritonAssembly, open_compute, warm_up
from loraplex_engine.config import EngineConfig, EngineSizes
from loraplex_engine.device.graphs import DecodeGraphs, row_buckets
from loraplex_engine.device.inputs import StagedInputs
from loraplex_engine.device.memory_profile import MemoryUse, measure_use
from loraplex_engine.device.selection import EngineDevice
from loraplex_engine.device.staging import Staging
from loraplex_engine.errors import ConfigError
from loraplex_engine.model.linear import PlainMethod
from loraplex_engine.model.loading import load_decoder
from loraplex_engine.runner import ModelRunner, RunnerLimits
from loraplex_engine.step import Step
from loraplex_kernels.support import support_of_capability

from tests.support.recorded_graph import RecordingBackend
from tests.support.staged_backends import StagedAttention
from tests.support.tiny_model import TinyShape, write_tiny_model

GPU = EngineDevice(torch.device("cuda", 0), "NVIDIA H200", "sm_90")
_WIDE_HEADS = TinyShape(vocab_size=67, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16)


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model_dir=Path("none"), base_model="tiny", **settings)


@pytest.mark.parametrize("name", ["attention_backend", "lora_backend"])
def test_a_cpu_s_backend_is_refused_on_a_gpu(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"{name} is 'native', .* runs on NVIDIA H200: use triton"
    ):
        open_compute(config(**{name: "native"}), cache=tmp_path, device=GPU)


def test_a_quantized_cache_is_refused_where_a_cpu_computes(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype is 'int8', but on a CPU .*: use .* auto"
    ):
        open_compute(config(kv_cache_dtype="int8"), cache=tmp_path, device=EngineDevice())


def test_a_cpu_s_operations_are_refused_where_triton_has_its_own(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"ops_backend is 'torch', .* runs on NVIDIA H200: use auto"
    ):
        open_compute(config(ops_backend="torch"), cache=tmp_path, device=GPU)
    with pytest.raises(ConfigError, match="ops_backend is 'native', but with a backend of triton"):
        config(ops_backend="native", attention_backend="triton")
    with pytest.raises(
        ConfigError, match=r"ops_backend is 'native', .* device is 'cuda': use auto"
    ):
        config(ops_backend="native", device="cuda")


@pytest.mark.parametrize("minor", [0, 6])
def test_fp8_is_refused_on_a_gpu_that_lacks_it(minor: int, tmp_path: Path) -> None:
    support = support_of_capability(8, minor)
    gpu = EngineDevice(torch.device("cuda", 0), "NVIDIA A100", f"sm_8{minor}", support)

    with pytest.raises(
        ConfigError,
        match=r"kv_cache_dtype is 'fp8' and this is NVIDIA A100: .* 8\.\d: use int8, or auto",
    ):
        open_compute(config(kv_cache_dtype="fp8"), cache=tmp_path, device=gpu)


def test_the_cache_has_as_many_blocks_as_its_numbers_and_scales_leave_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    write_tiny_model(tmp_path, _WIDE_HEADS)
    # Keys and values of 16 tokens, each 16 numbers and a scale.
    block_bytes = _WIDE_HEADS.num_layers * 2 * 16 * (16 + 4)
    settings = EngineConfig(
        model_dir=tmp_path,
        base_model="tiny",
        attention_backend="triton",
        dtype="float32",
        kv_cache_dtype="int8",
        kv_memory_bytes=7 * block_bytes + block_bytes - 1,
        max_num_seqs=2,
        max_num_batched_tokens=16,
    )

    compute = open_compute(settings, cache=tmp_path, device=EngineDevice())

    assert compute.sizes == EngineSizes(block_bytes, num_blocks=7, max_model_len=7 * 16)
    tensors = [
        tensor for layer in compute.runner.kv_layers for tensor in (layer.numbers, layer.scale)
    ]
    assert sum(tensor.nbytes for tensor in tensors) == compute.sizes.kv_bytes


def test_triton_on_a_cpu_needs_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    with pytest.raises(ConfigError, match="attention_backend is 'triton', which needs a GPU"):
        open_compute(config(attention_backend="triton"), cache=tmp_path, device=EngineDevice())


def test_triton_adapters_on_a_cpu_need_triton_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    with pytest.raises(ConfigError, match="attention_backend must be 'triton' too"):
        open_compute(config(lora_backend="triton"), cache=tmp_path, device=EngineDevice())


def test_a_model_that_the_kernels_do_not_have_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # Heads of 8 numbers.
    folder = write_tiny_model(tmp_path, TinyShape(vocab_size=67, num_layers=1))
    settings = EngineConfig(
        model_dir=folder, base_model="tiny", attention_backend="triton", dtype="float32"
    )

    with pytest.raises(
        ConfigError, match="does not run on cpu: head_dim 8 is not a multiple of 16"
    ):
        open_compute(settings, cache=tmp_path, device=EngineDevice())


def test_running_out_of_memory_names_what_for_and_what_to_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    folder = write_tiny_model(tmp_path, _WIDE_HEADS)
    settings = EngineConfig(
        model_dir=folder, base_model="tiny", attention_backend="triton", dtype="float32"
    )

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModelRunner, "resize", fail)

    with pytest.raises(
        ConfigError, match="ran out of memory at the KV cache: lower gpu_memory_util"
    ):
        open_compute(settings, cache=tmp_path, device=EngineDevice())


class ScriptedMeter:
    """A device that fills as a script says; remembers what it was asked for."""

    def __init__(self, taken: list[int]) -> None:
        self._taken = iter(taken)
        self.num_tidied = 0
        self.has_peak = False

    def device_bytes(self) -> int:
        return 100_000

    def taken(self) -> int:
        return next(self._taken)

    def allocated(self) -> int:
        return 5_000

    def start_peak(self) -> None:
        self.has_peak = True

    def peak(self) -> int:
        assert self.has_peak
        return 8_500

    def tidy(self) -> None:
        self.num_tidied += 1


def new_runner(folder: Path) -> ModelRunner:
    shape = TinyShape(vocab_size=67, num_layers=1)
    model = load_decoder(write_tiny_model(folder, shape), torch.float32, method=PlainMethod())
    limits = RunnerLimits(num_blocks=1, block_size=16, max_num_seqs=3, max_model_len=16)
    staging = Staging(torch.device("cpu"))
    inputs = StagedInputs(staging, limits.max_num_seqs)
    attention = StagedAttention(
        model.attention_shape,
        staging,
        block_size=limits.block_size,
        max_tokens=24,
        max_rows=limits.max_num_seqs,
        max_blocks_per_row=1,
    )
    inputs.reserve_large(24)
    staging.seal()
    return ModelRunner(
        model,
        attention,
        limits,
        inputs=inputs,
        graphs=DecodeGraphs(RecordingBackend(), row_buckets(limits.max_num_seqs)),
    )


def test_what_a_runner_takes_is_measured_on_its_largest_step_and_two_graphs(tmp_path: Path) -> None:
    runner = new_runner(tmp_path)
    # Before and after the first graph, then the second; at the end, of which 5,000 are ours.
    meter = ScriptedMeter([6_000, 6_900, 6_900, 6_930, 5_700])

    launched: list[Step] = []
    launch = runner.launch

    def watched(step: Step) -> None:
        launched.append(step)
        launch(step)

    runner.launch = watched  # type: ignore[method-assign]

    use = measure_use(
        meter,
        runner,
        weights_bytes=4_000,
        lora_bytes=600,
        max_tokens=20,
        num_drafts=4,
        has_graphs=True,
    )

    # Three rows, each with four drafts: all logits but a row's may be copied.
    copied = (3 * 5 - 1) * 67 * 4
    assert use == MemoryUse(
        weights=4_000,
        lora=600,
        staging=400,
        activations=3_500 + copied,
        graphs=900 + 2 * 30,
        outside=700,
    )
    (step,) = launched
    assert (step.num_tokens, [*map(len, step.drafts.values())]) == (20, [4, 4, 4])
    assert runner.graphs is not None
    assert len(runner.graphs.keys) == 3
    # The trial's recordings read a cache that is about to move.
    assert runner.graphs.num_captured == 0


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"speculative": "ngram"}, 5),
        ({"speculative": "auto", "batch_invariant": True}, 5),
        # `auto` drafts only where the row rule holds, and `fast` plans do not promise it.
        ({"speculative": "auto"}, 0),
        ({"speculative": "off", "batch_invariant": True}, 0),
    ],
    ids=["always", "auto-invariant", "auto-fast", "off"],
)
def test_the_trial_has_drafts_where_there_may_be_some(
    settings: dict[str, Any], most: int, tmp_path: Path
) -> None:
    drafting = config(num_speculative_tokens=5, **settings)

    assert _TritonAssembly(drafting, EngineDevice(), tmp_path, None)._most_drafts() == most


def test_warming_up_runs_prefill_of_every_size_up_to_the_longest(tmp_path: Path) -> None:
    runner = new_runner(tmp_path)
    sizes: list[int] = []
    launch = runner.launch

    def watched(step: Step) -> None:
        sizes.append(step.num_tokens)
        launch(step)

    runner.launch = watched  # type: ignore[method-assign]
    copied: list[list[list[int]]] = []
    runner.forward_pass.copy_blocks = lambda copies: copied.append(copies.tolist())  # type: ignore[method-assign]

    assert warm_up(runner, 20) == 4
    # At last all rows, one token each, filtered.
    assert sizes == [2, 4, 8, 16, 3]
    assert runner._params[2] is not None
    assert runner._params[2].top_p < 1
    assert copied == [[[0, 0]]]


def test_without_graphs_none_is_recorded_for_trial(tmp_path: Path) -> None:
    runner = new_runner(tmp_path)

    use = measure_use(
        ScriptedMeter([5_700]),
        runner,
        weights_bytes=4_000,
        lora_bytes=0,
        max_tokens=20,
        num_drafts=0,
        has_graphs=False,
    )

    assert use.graphs == 0
    assert runner.graphs is not None
    assert runner.graphs.capture_s == 0.0
