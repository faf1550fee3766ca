"""The self-check finds nothing on a sound runner and names what is broken on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from loraplex_engine.artifact import ModelShape
from loraplex_engine.attention.torch_attention import TorchAttention
from loraplex_engine.convert import cache_dir
from loraplex_engine.lora.seam import LoraSite
from loraplex_engine.lora.setup import open_lora
from loraplex_engine.lora.trial import LoraTrial, make_trial
from loraplex_engine.model.loading import load_decoder
from loraplex_engine.row_rule import ROW_COUNTS, check_row_rule
from loraplex_engine.runner import ModelRunner, RunnerLimits
from torch import Tensor

from tests.support.tiny_model import TinyShape, write_tiny_model

LIMITS = RunnerLimits(num_blocks=40, block_size=16, max_num_seqs=4, max_model_len=256)


@pytest.fixture
def dtype() -> torch.dtype:
    """Of the model; a test may ask for others."""
    return torch.float32


@pytest.fixture
def runner(tmp_path: Path, dtype: torch.dtype) -> ModelRunner:
    model = load_decoder(write_tiny_model(tmp_path, TinyShape(num_layers=1)), dtype)
    attention = TorchAttention(model.attention_shape, num_blocks=40, block_size=16)
    return ModelRunner(model, attention, LIMITS)


@pytest.fixture
def logged() -> Iterator[list[structlog.typing.EventDict]]:
    with structlog.testing.capture_logs() as events:
        yield events


def test_a_sound_runner_passes_without_a_word(
    runner: ModelRunner, logged: list[structlog.typing.EventDict]
) -> None:
    report = check_row_rule(runner)

    assert report.failures == ()
    assert report.holds
    assert report.num_checks > 5 * len(ROW_COUNTS)
    assert logged == []


class _Wrapped:
    """A linear whose last row is a little off when the row count is odd."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self._inner = inner

    def __call__(self, x: Tensor) -> Tensor:
        y = self._inner(x).clone()
        if x.shape[0] % 2:
            y[-1] += 1e-6
        return y


def test_a_row_that_depends_on_the_count_is_found_though_it_is_the_last(
    runner: ModelRunner, logged: list[structlog.typing.EventDict]
) -> None:
    runner.model.lm_head = _Wrapped(runner.model.lm_head)

    report = check_row_rule(runner)

    odd = [count for count in ROW_COUNTS if count % 2]
    assert list(report.failures) == [f"linear 48 -> 131 at {count} rows" for count in odd]
    assert not report.holds
    assert [event["event"] for event in logged] == ["row_rule_fails"]


def test_the_largest_step_is_tried_too(runner: ModelRunner) -> None:
    """Its last rows against those of fewer: rows of a step that small steps never have."""

    class OffWhenLarge(_Wrapped):
        def __call__(self, x: Tensor) -> Tensor:
            y = self._inner(x).clone()
            if x.shape[0] > 130:
                y[0] += 1e-6
            return y

    runner.model.lm_head = OffWhenLarge(runner.model.lm_head)

    assert check_row_rule(runner).holds
    assert not check_row_rule(runner, max_rows=160).holds


@pytest.fixture(params=["native", "torch"])
def trial(request: pytest.FixtureRequest, tmp_path: Path, dtype: torch.dtype) -> LoraTrial:
    write_tiny_model(tmp_path / "model", TinyShape(num_layers=1))
    shape = ModelShape.from_config_json(tmp_path / "model" / "config.json")
    lora = open_lora(
        store_url=f"file://{tmp_path}/store",
        shape=shape,
        cache_dir=cache_dir(),
        backend=request.param,
        dtype=dtype,
    )
    lora.pool.close()
    return make_trial(lora, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_are_tried_as_well(runner: ModelRunner, trial: LoraTrial) -> None:
    without, with_lora = check_row_rule(runner), check_row_rule(runner, lora=trial)

    assert with_lora.failures == ()
    assert with_lora.num_checks == without.num_checks + 6 * len(ROW_COUNTS)


def test_a_delta_that_depends_on_company_is_found(runner: ModelRunner, trial: LoraTrial) -> None:
    inner = trial.backend

    class Leaky:
        """The last row of some counts gets a whiff of another; the largest, the reference, does not."""

        prepare = staticmethod(inner.prepare)
        adapts_head = staticmethod(inner.adapts_head)

        def add(self, y_TN: Tensor, x_TK: Tensor, layer: int, site: LoraSite, batch: Any) -> None:
            inner.add(y_TN, x_TK, layer, site, batch)
            if site == "gate_up" and 2 < len(y_TN) < 130:
                y_TN[-1] += 1e-6 * y_TN[0]

        def add_embedding(self, y_TH: Tensor, token_T: Tensor, batch: Any) -> None:
            inner.add_embedding(y_TH, token_T, batch)
            if 16 < len(y_TH) < 130:
                y_TH[-1] += 1e-6 * y_TH[0]

        def add_head(self, y_RV: Tensor, x_RH: Tensor, batch: Any) -> None:
            inner.add_head(y_RV, x_RH, batch)
            if len(y_RV) == 33:
                y_RV[-1] += 1e-6 * y_RV[0]

    leaky = replace(trial, backend=Leaky())

    failures = check_row_rule(runner, lora=leaky).failures

    assert list(failures) == [
        *(f"lora gate_up at {count} rows" for count in ROW_COUNTS if 2 < count < 130),
        *(f"lora embed_tokens at {count} rows" for count in ROW_COUNTS if 16 < count < 130),
        "lora lm_head at 33 rows",
    ]


@pytest.mark.parametrize("kind", ["batch", "chunk"])
def test_attention_that_depends_on_company_is_found(runner: ModelRunner, kind: str) -> None:
    forward = runner.attention.forward

    def off(q: Tensor, kv: Tensor, plan: object) -> Tensor:
        out = forward(q, kv, plan)
        num_singles = sum(len(group.token_b) for group in plan.groups)
        if (kind == "batch" and num_singles > 3) or (kind == "chunk" and plan.sequences):
            out[0] *= 1 + 1e-6
        return out

    runner.attention.forward = off

    report = check_row_rule(runner)

    assert report.failures
    assert all(f"attention {kind}" in failure for failure in report.failures)
