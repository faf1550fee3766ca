"""The native linears in the engine: which method is taken, what it refuses, and that a model runs on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import ConfigError, ModelError
from loraplex_engine.model import native_linear
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.model.linear import PlainMethod, choose_method, has_fast_bf16
from loraplex_engine.model.native_linear import (
    NativeLinear,
    NativeMethod,
    QuantizedMethod,
    open_linear_method,
    tell_quantization,
)
from loraplex_engine.runner import load_model
from loraplex_kernels.cpu import build
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.linear import LinearKernel, list_arithmetics
from torch import Tensor
from torch.nn import functional

from tests.support.adapter_files import native_cache_dir
from tests.support.tiny_model import TinyShape, write_tiny_model

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def cache(pytestconfig: pytest.Config) -> Path:
    """Of compiled kernels; there is a compiler."""
    folder: Path = native_cache_dir(pytestconfig)
    try:
        LinearKernel(cache_dir=folder / "native", num_threads=1)
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")
    return folder


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: None)


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_a_native_linear_is_near_the_exact_one(
    cache: Path, dtype: torch.dtype, quantization: Any
) -> None:
    method = open_linear_method(
        dtype, cache_dir=cache, num_threads=2, backend="native", quantization=quantization
    )
    weight, bias = draw(48, 320).to(dtype), draw(48, seed=1).to(dtype)
    x = draw(7, 320, seed=2).to(dtype)
    linear = method.pack(weight, bias)

    y = linear(x, "decode")

    exact = functional.linear(x.double(), weight.double(), bias.double())
    # What the format loses of a normal weight: see test_cpu_quantize. A product of independent errors keeps the share.
    share = {"none": 1e-6, "int8": 0.012, "int4": 0.085}[quantization]
    if dtype is torch.bfloat16:
        share += 2**-8
    assert float((y.double() - exact).norm() / exact.norm()) < share
    assert y.dtype is dtype
    assert method.row_multiple == 1
    assert (linear.in_features, linear.out_features) == (320, 48)


def test_a_quantized_model_keeps_eight_bits_in_its_head(cache: Path) -> None:
    method = open_linear_method(torch.float32, cache_dir=cache, num_threads=1, quantization="int4")
    weight = draw(32, 64)

    body, head = method.pack(weight, None), method.pack_head(weight)

    assert isinstance(body, NativeLinear)
    assert isinstance(head, NativeLinear)
    assert (body.packed.weight_format, head.packed.weight_format) == ("int4", "int8")


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.011), ("int4", 0.08)])
def test_what_quantization_loses_is_told_once(cache: Path, quantization: Any, most: float) -> None:
    method = open_linear_method(
        torch.float32, cache_dir=cache, num_threads=1, quantization=quantization
    )
    assert isinstance(method, QuantizedMethod)
    # The second lies on the levels of both formats but for a scale's rounding.
    weights = [draw(32, 256), torch.arange(-7.0, 9.0).repeat(32, 16)]
    linears = [method.pack(weight, None) for weight in weights]

    with structlog.testing.capture_logs() as logs:
        tell_quantization(method)

    assert [entry["event"] for entry in logs] == ["quantized"]
    entry = logs[0]
    assert entry["linear"] == f"native_{quantization}"
    assert entry["weights"] == 2
    assert entry["weight_bytes"] == sum(linear.packed.num_bytes for linear in linears)
    assert 0.0 <= entry["mean_relative_error"] <= entry["worst_relative_error"] < most
    assert method.report.worst == max(method.report.errors)
    assert method.report.errors[1] < method.report.errors[0]


def test_progress_is_told_while_quantizing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = open_linear_method(torch.float32, cache_dir=cache, num_threads=1, quantization="int8")
    monkeypatch.setattr(native_linear, "_PROGRESS_S", -1.0)

    with structlog.testing.capture_logs() as logs:
        method.pack(draw(16, 32), None)
        method.pack(draw(16, 32), None)

    assert [(entry["event"], entry["weights"]) for entry in logs] == [
        *(("quantizing", 1), ("quantizing", 2))
    ]


def test_a_weight_that_is_not_finite_cannot_be_quantized(cache: Path) -> None:
    method = open_linear_method(torch.float32, cache_dir=cache, num_threads=1, quantization="int8")
    weight = draw(16, 32)
    weight[3, 5] = torch.nan

    with pytest.raises(ModelError, match=r"weight of \(16, 32\): .*; use quantization none"):
        method.pack(weight, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_every_backend_that_is_named_is_the_one_taken(cache: Path, dtype: torch.dtype) -> None:
    def name_of(backend: Any) -> str:
        return open_linear_method(dtype, cache_dir=cache, num_threads=1, backend=backend).name

    is_slow = dtype is torch.bfloat16 and not has_fast_bf16()
    suffix = "_fp32" if is_slow else ""
    assert name_of("native").startswith("native")
    assert name_of("torch") == f"torch{suffix}"
    assert name_of("onednn") == f"onednn{suffix}"
    assert name_of("auto") == name_of("native")


def test_rows_of_bf16_take_the_fastest_products_of_the_cpu(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache / "native"
    fastest = list_arithmetics(torch.bfloat16, folder)[0]

    def name_of(dtype: torch.dtype, quantization: Any = "none") -> str:
        return open_linear_method(
            dtype, cache_dir=cache, num_threads=1, quantization=quantization
        ).name

    suffix = "" if fastest == "fp32" else f"_{fastest}"
    assert name_of(torch.bfloat16) == f"native{suffix}"
    assert name_of(torch.bfloat16, "int8") == f"native_int8{suffix}"
    assert name_of(torch.bfloat16, "int4") == f"native_int4{suffix}"
    assert name_of(torch.float32) == "native"
    # A CPU without them.
    monkeypatch.setattr(native_linear, "list_arithmetics", lambda *_: ("fp32",))
    assert name_of(torch.bfloat16) == "native"
    assert name_of(torch.bfloat16, "int4") == "native_int4"


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_auto_says_what_it_costs_and_what_was_asked_for_fails(
    tmp_path: Path,
) -> None:
    def open_method(**settings: Any) -> str:
        return open_linear_method(torch.float32, cache_dir=tmp_path, num_threads=1, **settings).name

    with structlog.testing.capture_logs() as logs:
        assert open_method() == choose_method(torch.float32).name
    assert [entry["event"] for entry in logs] == ["native_linear_unavailable"]
    assert "AMX" not in logs[0]["effect"]
    with structlog.testing.capture_logs() as logs:
        open_linear_method(torch.bfloat16, cache_dir=tmp_path, num_threads=1)
    assert "on a CPU with AMX prompts take much longer" in logs[0]["effect"]
    with structlog.testing.capture_logs() as logs:
        assert open_method(backend="torch") == "torch"
    assert logs == []
    with pytest.raises(ConfigError, match=r"linear_backend is 'native', .*no C compiler.*: use"):
        open_method(backend="native")
    with pytest.raises(ConfigError, match=r"quantization is 'int4', .*: use quantization none"):
        open_method(quantization="int4")


def test_onednn_that_torch_does_not_have_is_an_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_linear, "can_pack", lambda _: False)

    with pytest.raises(ConfigError, match=r"linear_backend is 'onednn', .*: use auto or torch"):
        open_linear_method(torch.float32, cache_dir=cache, num_threads=1, backend="onednn")


def test_without_a_folder_there_is_nothing_native() -> None:
    def name_of(**settings: Any) -> str:
        return open_linear_method(torch.float32, cache_dir=None, num_threads=1, **settings).name

    assert name_of() == choose_method(torch.float32).name
    with pytest.raises(ConfigError, match=r"linear_backend is 'native', .*no folder"):
        name_of(backend="native")


def test_other_methods_have_nothing_to_tell(cache: Path) -> None:
    kernel = LinearKernel(cache_dir=cache / "native", num_threads=1)

    with structlog.testing.capture_logs() as logs:
        tell_quantization(NativeMethod(kernel))
        tell_quantization(PlainMethod())

    assert logs == []


def test_a_model_is_loaded_as_the_settings_say_and_needs_no_padded_rows(
    cache: Path, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path, TinyShape(num_layers=1))

    def load(**settings: Any) -> Decoder:
        config = EngineConfig(model_dir=folder, base_model="tiny", num_threads=1, **settings)
        return load_model(config, cache=cache)[0]

    native = load(linear_backend="native", ops_backend="native", dtype="float32")
    assert native.linear_name == "native"
    assert native.rows_for(3) == 3
    assert load(linear_backend="onednn", ops_backend="native").rows_for(3) == 4
    quantized = load(quantization="int8", dtype="float32")
    assert quantized.linear_name == "native_int8"
    layer = native.layers[0]
    assert isinstance(layer.qkv, NativeLinear)
    assert isinstance(quantized.layers[0].qkv, NativeLinear)
    assert quantized.layers[0].qkv.weight_bytes < layer.qkv.weight_bytes
