"""The operations between linears: which are taken, what rows they want, and that the model runs on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
import torch
from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import ConfigError
from loraplex_engine.model.native_ops import NativeOps, open_ops_kernel
from loraplex_engine.runner import load_model
from loraplex_kernels.cpu import build
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.ops import OpsKernel

from tests.support.adapter_files import native_cache_dir
from tests.support.tiny_model import TinyShape, write_tiny_model


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: None)


@pytest.fixture
def kernel(pytestconfig: pytest.Config) -> OpsKernel:
    try:
        return OpsKernel(torch.float32, cache_dir=native_cache_dir(pytestconfig), num_threads=1)
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_auto_says_what_it_costs_and_native_fails(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        found = open_ops_kernel(torch.float32, cache_dir=tmp_path, num_threads=1)

    assert found is None
    assert [entry["event"] for entry in logs] == ["native_ops_unavailable"]
    assert logs[0]["fallback"] == "torch"
    with pytest.raises(NativeBuildError, match="no C compiler"):
        open_ops_kernel(torch.float32, cache_dir=tmp_path, num_threads=1, backend="native")


@pytest.mark.usefixtures("no_compiler")
def test_torch_asks_for_no_compiler(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        assert (
            open_ops_kernel(torch.float32, cache_dir=tmp_path, num_threads=1, backend="torch")
            is None
        )

    assert logs == []


@pytest.mark.parametrize("multiple", [1, 4])
def test_rows_are_padded_as_the_linears_ask_and_no_further(
    kernel: OpsKernel, multiple: int
) -> None:
    ops = NativeOps(kernel, row_multiple=multiple)

    for count in (1, 4, 5, 33):
        rows = -(-count // multiple) * multiple
        assert ops.rows_for(count, 1536) == ops.head_rows_for(count) == rows


def test_a_model_is_loaded_with_the_operations_that_the_settings_name(
    kernel: OpsKernel, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    del kernel  # there is a compiler
    folder, cache = (
        write_tiny_model(tmp_path, TinyShape(num_layers=1)),
        native_cache_dir(pytestconfig),
    )

    def ops_of(backend: str, cache: Path | None) -> str:
        config = EngineConfig(
            model_dir=folder, base_model="tiny", num_threads=1, ops_backend=backend
        )
        return load_model(config, cache=cache)[0].ops.name

    assert [ops_of(backend, cache) for backend in ("auto", "native", "torch")] == [
        *("native", "native", "torch")
    ]
    assert ops_of("auto", None) == "torch"
    with pytest.raises(ConfigError, match="ops_backend is 'native', which needs a folder"):
        ops_of("native", None)
