"""A whole step's layers in one call: taken where all parts are kernels, and with the bits of the loop."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from loraplex_engine.artifact import AdapterStore, ModelShape
from loraplex_engine.attention.native_attention import NativeAttention
from loraplex_engine.model.linear import PlainMethod
from loraplex_engine.model.loading import load_decoder
from loraplex_engine.model.native_layers import NativeLayers
from loraplex_engine.model.native_linear import NativeMethod
from loraplex_engine.runner import ModelRunner
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.linear import LinearKernel
from loraplex_kernels.cpu.ops import OpsKernel

from tests.support.adapter_files import ALL_LINEARS, make_adapter, native_cache_dir
from tests.support.core_driver import run_to_end
from tests.support.engine_fakes import make_request
from tests.support.model_stand import ModelStand
from tests.support.tiny_model import TinyShape, write_tiny_model

VOCAB = TinyShape().vocab_size


@pytest.fixture
def kernels(pytestconfig: pytest.Config) -> Path:
    cache = native_cache_dir(pytestconfig)
    try:
        OpsKernel(torch.float32, cache_dir=cache, num_threads=1)
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")
    return cache


@pytest.fixture
def digests(tmp_path: Path) -> list[str]:
    model = write_tiny_model(tmp_path / "model", TinyShape(has_bias=True))
    shape = ModelShape.from_config_json(model / "config.json")
    store = AdapterStore(f"file://{tmp_path}/store")
    made = []
    for name, rank, linears in (("all", 5, ALL_LINEARS), ("few", 8, ("q_proj", "down_proj"))):
        adapter = make_adapter(
            tmp_path / name, shape, rank=rank, linears=linears, size=0.1, dtype="F32"
        )
        store.put(tmp_path / name, adapter.digest)
        made.append(adapter.digest)
    return made


@pytest.fixture(params=["float32", "bfloat16"])
def stand(
    request: pytest.FixtureRequest, tmp_path: Path, digests: list[str], kernels: Path
) -> Iterator[ModelStand]:
    made = ModelStand(tmp_path, len(digests), "native", request.param, kernels, VOCAB)
    yield made
    made.close()


class Calls:
    """Counts what the layers' call answers."""

    def __init__(self, runner: ModelRunner, *, is_off: bool) -> None:
        self.num_taken = self.num_left = 0
        self.model = runner.model
        inner = runner.model._layer_call
        assert isinstance(inner, NativeLayers)
        forward = inner.forward

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            out = None if is_off else forward(*args, **kwargs)
            self.num_taken += out is not None
            self.num_left += out is None
            return out

        inner.forward = counted  # type: ignore[method-assign]


def answers(stand: ModelStand, digests: list[str], *, is_off: bool) -> tuple[Any, Calls]:
    """Texts and log-probabilities of base and adapter rows, prefilled in pieces, decoded together."""
    made: list[Calls] = []
    core = stand.core(
        max_num_batched_tokens=11,
        max_num_seqs=4,
        max_model_len=64,
        num_blocks=24,
        speculative="off",
        prepare=lambda runner: made.append(Calls(runner, is_off=is_off)),
    )
    for index, adapter in enumerate([None, digests[0], digests[1], digests[0]]):
        prompt = [(7 * index + i) % 120 + 3 for i in range(5 + 4 * index)]
        request = make_request(f"r{index}", prompt, max_tokens=9, logprobs=1)
        core.add(msgspec.structs.replace(request, adapter_digest=adapter))
    events = run_to_end(core)
    found: dict[str, list[Any]] = {}
    for event in events:
        found.setdefault(event.request_id, []).append((event.token_ids, event.logprobs))
    return found, made[0]


def test_texts_and_logprobs_have_the_bits_of_the_loop(
    stand: ModelStand, digests: list[str]
) -> None:
    whole, calls = answers(stand, digests, is_off=False)
    parts, loop = answers(stand, digests, is_off=True)

    assert whole == parts
    assert calls.num_taken > 9
    assert calls.num_left == 0
    assert calls.model.has_fused_layers
    assert not loop.model.has_fused_layers
    assert loop.num_taken == 0
    assert loop.num_left > 9
    assert len({str(rows) for rows in whole.values()}) == 4


@pytest.mark.slow
def test_it_stands_back_where_a_part_is_not_a_kernel(kernels: Path, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, TinyShape(num_layers=2))
    ops = OpsKernel(torch.float32, cache_dir=kernels, num_threads=1)
    native = NativeMethod(LinearKernel(cache_dir=kernels, num_threads=1))

    def forward(
        model: Any, attention: object, *, num_layers: int = 2, num_kv: int = 2
    ) -> torch.Tensor | None:
        hidden = torch.zeros(1, model.config.hidden_size)
        cos, sin = model._rotary.gather(torch.zeros(1, dtype=torch.int64))
        out: torch.Tensor | None = model._layer_call.forward(
            hidden,
            cos,
            sin,
            layers=model.layers[:num_layers],
            kv_layers=[torch.zeros(8, 2 * model.attention_shape.kv_size)] * num_kv,
            attention=attention,
            plan=None,
            lora=None,
            lora_batch=None,
        )
        assert not hidden.any(), "nothing was done"
        return out

    plain = load_decoder(folder, torch.float32, method=PlainMethod(), ops=ops)
    watched = load_decoder(folder, torch.float32, method=native, ops=ops)

    assert load_decoder(folder, torch.float32, method=native)._layer_call is None
    assert forward(watched, object()) is None
    attention = NativeAttention(
        plain.attention_shape, block_size=4, cache_dir=kernels, num_threads=1
    )
    assert forward(plain, attention) is None
    assert forward(watched, attention, num_layers=1, num_kv=1) is None
    assert forward(watched, attention, num_kv=1) is None
    # Somebody who looks at what passes puts layers of their own in place of the model's.
    watched.layers[1] = load_decoder(folder, torch.float32, method=native).layers[1]
    assert forward(watched, attention) is None


def test_a_new_cache_takes_the_place_of_the_old_one(stand: ModelStand) -> None:
    made: list[ModelRunner] = []
    core = stand.core(
        max_num_batched_tokens=11,
        max_num_seqs=2,
        max_model_len=32,
        num_blocks=8,
        speculative="off",
        prepare=made.append,
    )
    runner = made[0]
    core.add(make_request("a", [5, 6, 7], max_tokens=2))
    first = [event.token_ids for event in run_to_end(core)]
    assert runner.model.has_fused_layers
    old = [weakref.ref(kv) for kv in runner.kv_layers]

    runner.forward_pass.allocate_kv(8)

    assert [kv() for kv in old] == [None] * len(old)
    core.add(make_request("b", [5, 6, 7], max_tokens=2))
    assert [event.token_ids for event in run_to_end(core)] == first
