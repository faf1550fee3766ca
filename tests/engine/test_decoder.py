"""The decoder against transformers: rotary embedding, logits, greedy tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from loraplex_engine.attention.torch_attention import TorchAttention
from loraplex_engine.convert import cache_dir
from loraplex_engine.model.linear import LinearMethod, choose_method
from loraplex_engine.model.loading import load_decoder
from loraplex_engine.model.native_linear import NativeMethod
from loraplex_engine.model.ops import TorchOps, padded_rows
from loraplex_engine.model.rope import RotaryTable, rotate_
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.runner import ModelRunner, RunnerLimits
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.linear import LinearKernel
from loraplex_kernels.cpu.ops import OpsKernel
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from tests.support.adapter_files import native_cache_dir
from tests.support.step_driver import StepDriver, driven
from tests.support.tiny_model import TinyShape, load_oracle, write_tiny_model

LIMITS = RunnerLimits(num_blocks=64, block_size=16, max_num_seqs=8, max_model_len=512)
SHAPES = {
    "llama": TinyShape(),
    "llama-bias-untied": TinyShape(has_bias=True, is_tied=False, rope_theta=500_000.0),
    "llama-one-kv-head": TinyShape(num_heads=8, num_kv_heads=1, head_dim=16, hidden_size=64),
    "llama-no-groups-wide-heads": TinyShape(num_heads=2, num_kv_heads=2, head_dim=64),
    "llama-bf16-file": TinyShape(dtype=torch.bfloat16),
    "mistral": TinyShape(kind="mistral", intermediate_size=33),
    "qwen2": TinyShape(kind="qwen2"),
}
PROMPTS = [[5, 17, 99, 23, 41, 5, 5, 64], [8], list(range(3, 130))]
NUM_TOKENS = 16


class Routines(NamedTuple):
    """What a decoder computes with but attention: torch's, or the CPU's own kernels."""

    ops: OpsKernel | None
    method: LinearMethod


OpenOps = Callable[[torch.dtype], Routines]


@pytest.fixture(params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> OpenOps:
    """The kernels of the linears and between them, by dtype."""

    def open_(dtype: torch.dtype) -> Routines:
        if request.param == "torch":
            return Routines(None, choose_method(dtype))
        cache, num_threads = native_cache_dir(request.config), torch.get_num_threads()
        try:
            return Routines(
                OpsKernel(dtype, cache_dir=cache / "native", num_threads=num_threads),
                NativeMethod(LinearKernel(cache_dir=cache / "native", num_threads=num_threads)),
            )
        except NativeBuildError as error:
            pytest.skip(f"no C compiler here: {error}")

    return open_


def open_runner(
    folder: Path, dtype: torch.dtype, routines: Routines, limits: RunnerLimits = LIMITS
) -> ModelRunner:
    model = load_decoder(folder, dtype, ops=routines.ops, method=routines.method)
    attention = TorchAttention(
        model.attention_shape, num_blocks=limits.num_blocks, block_size=limits.block_size
    )
    return ModelRunner(model, attention, limits)


def our_logits(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """(len(tokens), V): every position's, from one prefill."""
    seen: list[torch.Tensor] = []
    model = runner.model
    forward = model.forward

    def keep(*args: object, **kwargs: object) -> torch.Tensor:
        hidden = forward(*args, **kwargs)
        seen.append(model.logits(hidden, torch.arange(len(tokens))))
        return hidden

    model.forward = keep
    StepDriver(runner).prefill(driven(tokens), len(tokens))
    model.forward = forward
    return seen[0].float()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_fp32_logits_and_greedy_tokens_equal_transformers(
    shape: TinyShape, ops: OpenOps, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path, shape)
    runner = open_runner(folder, torch.float32, ops(torch.float32))
    oracle = load_oracle(folder, torch.float32)

    for tokens in PROMPTS:
        with torch.inference_mode():
            expected = oracle(torch.tensor([tokens])).logits[0]
            greedy = oracle.generate(
                torch.tensor([tokens]),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
            )[0, len(tokens) :]
        torch.testing.assert_close(our_logits(runner, tokens), expected, atol=2e-4, rtol=1e-4)

        driver, request = StepDriver(runner), driven(tokens)
        driver.prefill(request, 50)
        driver.decode([request], NUM_TOKENS - 1)

        assert request.output == greedy.tolist()


# Random weights at initializer_range 0.2 give logits of several units; bf16 keeps 8 bits, and after
# three layers the error of transformers' own bf16 against fp32 is of this size.
BF16_BOUND = 0.35


@pytest.mark.parametrize("shape", [SHAPES["llama"], SHAPES["qwen2"]], ids=["llama", "qwen2"])
def test_bf16_logits_are_within_the_bound(shape: TinyShape, ops: OpenOps, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, shape)
    oracle = load_oracle(folder, torch.bfloat16)

    for tokens in PROMPTS:
        with torch.inference_mode():
            expected = oracle(torch.tensor([tokens])).logits[0].float()
        logits = our_logits(open_runner(folder, torch.bfloat16, ops(torch.bfloat16)), tokens)

        assert (logits - expected).abs().max() < BF16_BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    num_tokens, heads, width = 9, 3, 16
    config = LlamaConfig(
        hidden_size=heads * width,
        num_attention_heads=heads,
        head_dim=width,
        rope_parameters={"rope_type": "default", "rope_theta": 75_000.0},
    )
    position = torch.tensor([0, 1, 2, 77, 500, 501, 1023, 3, 64])
    # A slice of a wider row, as the merged projection gives it.
    x = torch.randn(num_tokens, heads * width + 24).to(dtype)
    x_THD = x[:, : heads * width].view(num_tokens, heads, width)
    cos, sin = LlamaRotaryEmbedding(config)(x, position[None])
    expected, _ = apply_rotary_pos_emb(
        x_THD.transpose(0, 1)[None], x_THD.transpose(0, 1)[None], cos, sin
    )
    rest = x[:, heads * width :].clone()

    rotate_(x_THD, *RotaryTable(width, 1024, 75_000.0, dtype).gather(position))

    assert torch.equal(x_THD, expected[0].transpose(0, 1))
    assert torch.equal(x[:, heads * width :], rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(52, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x = torch.randn(12, 52).to(dtype)

    with torch.inference_mode():
        assert torch.equal(TorchOps().rms_norm(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("width", [100, 1536, 11_008])
def test_padded_rows_give_every_thread_whole_vectors(width: int, num_threads: int) -> None:
    for num_tokens in (1, 4, 5, 21, 22, 43, 130, 511):
        rows = padded_rows(num_tokens, width, num_threads)

        numbers = rows * (width + -width % 32)
        threads = min(num_threads, -(-numbers // 32_768))
        assert rows % 4 == 0
        assert num_tokens <= rows < num_tokens + 4 + 128
        assert threads <= 1 or -(-numbers // threads) % 32 == 0


@pytest.fixture
def smollm2_dir() -> Path:
    folder = cache_dir() / "models" / "smollm2-135m"
    if not (folder / "config.json").exists():
        pytest.skip("run `loraplex models pull smollm2-135m` first")
    return folder


@pytest.mark.model
def test_smollm2_equals_transformers(smollm2_dir: Path, ops: OpenOps) -> None:
    from transformers import AutoTokenizer

    limits = RunnerLimits(num_blocks=64, block_size=16, max_num_seqs=8, max_model_len=256)
    runner = open_runner(smollm2_dir, torch.float32, ops(torch.float32), limits)
    oracle = load_oracle(smollm2_dir, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    questions = [
        "What is the capital of France?",
        "Write a haiku about the sea.",
        "Why is the sky blue? Answer in one sentence.",
    ]
    requests, expected = [], []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        with torch.inference_mode():
            out = oracle.generate(
                torch.tensor([tokens]),
                # Else transformers takes <|im_end|> in the prompt, which is also the pad id, for padding.
                attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                max_new_tokens=8,
                do_sample=False,
                eos_token_id=None,
            )
            logits = oracle(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(our_logits(runner, tokens), logits, atol=2e-3, rtol=1e-3)
        requests.append(driven(tokens, SamplingParams(max_tokens=8, temperature=0.0)))
        expected.append(out[0, len(tokens) :].tolist())
    driver = StepDriver(runner)

    driver.step([(request, len(request.token_ids)) for request in requests])
    driver.decode(requests, 7)

    assert [request.output for request in requests] == expected
