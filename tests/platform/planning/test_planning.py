"""The sums of `loraplex plan`, done again by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loraplex_engine.artifact import ModelShape
from loraplex_engine.config import DEFAULT_GPU_SEQS, DEFAULT_SEQS, EngineConfig
from loraplex_platform.cli.plan_commands import plan
from loraplex_platform.planning.capacity import (
    DEFAULT_MAX_LORAS,
    DEFAULT_ROWS,
    GPUS,
    Capacity,
    Machine,
    Model,
    PlanError,
    Workload,
    plan_capacity,
)
from loraplex_platform.planning.cost import Prices, judge, plan_cost

from tests.support.command_tree import invoke

# Llama 3 8B, from its published config.json.
SHAPE = ModelShape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)
MODEL = Model(SHAPE, "bfloat16")
LOAD = Workload(
    output_tokens_per_s=4000,
    mean_share=0.25,
    prompt_tokens=600,
    output_tokens=200,
    cached_share=0.0,
    adapters=0,
    registered=0,
    ranks=(),
)


def test_the_memory_of_a_known_model() -> None:
    found = plan_capacity(MODEL, LOAD, GPUS["a100"], rows=100)

    # 8.03 billion parameters, of which the norms' 266,240 are left out.
    assert found.memory.weights == 2 * (8_030_261_248 - 266_240)
    # Two (keys, values) x 8 heads x 128 numbers x 2 bytes x 32 layers.
    assert found.memory.kv_per_token == 131_072
    assert found.memory.kv == 100 * 131_072 * 800
    assert found.memory.total < found.memory.available


def test_an_int8_cache_has_scales_and_holds_about_twice_as_many() -> None:
    found = plan_capacity(replace(MODEL, kv_dtype="int8"), LOAD, GPUS["a100"], rows=1)

    assert found.memory.kv_per_token == 32 * 2 * 8 * (128 + 4)


def test_rows_are_what_memory_holds() -> None:
    whole = plan_capacity(MODEL, LOAD, GPUS["l4"], rows=1000)

    assert whole.memory.rows < 1000
    assert whole.memory.total <= whole.memory.available
    one_more = whole.memory.total + whole.memory.kv_per_request
    assert one_more > whole.memory.available


def test_adapters_take_their_ranks() -> None:
    machine = Machine("cpu", 2**40, 100.0, 10.0, is_gpu=False)
    load = replace(LOAD, adapters=10, registered=50, ranks=(8, 24), modules=frozenset({"q_proj"}))

    found = plan_capacity(MODEL, load, machine)

    # Mean rank 16, on q_proj of 32 layers: 4096 in, 4096 out, two bytes.
    assert found.adapter_bytes == 16 * 32 * 8192 * 2
    assert found.memory.adapters == 10 * found.adapter_bytes
    assert found.store_bytes == 50 * found.adapter_bytes


def test_speed_is_the_rooflines_or_what_was_measured() -> None:
    machine = Machine("gpu", 80 * 10**9, 2000.0, 1e6, is_gpu=True)  # reads bound it
    estimated = plan_capacity(MODEL, LOAD, machine, rows=10, efficiency=0.5)
    measured = plan_capacity(MODEL, LOAD, machine, rows=10, measured_tokens_per_s=1500)

    reads = estimated.memory.weights + 10 * 131_072 * (600 + 100)
    assert estimated.step_s == pytest.approx(reads / 2e12 / 0.5)
    assert estimated.output_tokens_per_s == pytest.approx(10 / estimated.step_s, rel=0.01)
    assert (measured.output_tokens_per_s, measured.is_measured) == (1500, True)
    # 4,000 tokens/s of 1,500 each, and one to spare; a quarter of the peak on the average.
    assert (measured.machines, measured.total_machines) == (3, 4)
    assert measured.utilization == pytest.approx(1000 / 4500)


def test_what_cannot_be_is_named_with_its_flag() -> None:
    wrong = [
        (replace(LOAD, output_tokens_per_s=0), "--tokens-per-second"),
        (replace(LOAD, mean_share=1.5), "--mean-share"),
        (replace(LOAD, cached_share=1.0), "--cached-share"),
        (replace(LOAD, adapters=3, registered=2, ranks=(8,)), "--active-adapters"),
        (replace(LOAD, adapters=1, registered=1, ranks=(0,)), "--ranks"),
    ]
    for load, flag in wrong:
        with pytest.raises(PlanError, match=flag):
            plan_capacity(MODEL, load, GPUS["h100"])
    small = Machine("small", 8 * 2**30, 100.0, 10.0, is_gpu=True)
    with pytest.raises(PlanError, match=r"a small has 7\.2 GiB .* weights take 15\.0"):
        plan_capacity(MODEL, LOAD, small)


def capacity_of(speed: float, load: Workload = LOAD, spare: int = 1) -> Capacity:
    return plan_capacity(MODEL, load, GPUS["h100"], measured_tokens_per_s=speed, spare=spare)


def test_the_bill_of_a_month() -> None:
    prices = Prices(
        machine_hour=Decimal("2.00"),
        operations_month=Decimal(100),
        api_input=Decimal("0.20"),
        api_output=Decimal("0.60"),
    )

    found = plan_cost(capacity_of(2000), LOAD, prices)

    # 1,000 tokens/s on the average, for 730 hours; three prompt tokens to each.
    assert found.output_tokens == 1000 * 730 * 3600
    assert found.prompt_tokens == 3 * found.output_tokens
    assert found.machines_usd == 3 * 730 * 2
    assert found.self_hosted_usd == found.machines_usd + 100
    assert found.api_usd == found.output_tokens * (Decimal("0.60") + 3 * Decimal("0.20")) / 10**6
    # At the break-even both cost the same.
    assert found.break_even_tokens_per_s is not None
    at_even = found.break_even_tokens_per_s * 730 * 3600 * 1.2 / 1e6
    assert at_even == pytest.approx(float(found.self_hosted_usd))


def test_when_not_to_self_host() -> None:
    cheap = Prices(Decimal(2), api_input=Decimal("0.02"), api_output=Decimal("0.05"))
    dear = Prices(Decimal(2), api_input=Decimal(3), api_output=Decimal(15))
    few = replace(LOAD, output_tokens_per_s=20, adapters=1, registered=1, ranks=(8,))
    capacity, idle = capacity_of(2000), capacity_of(2000, few, spare=0)

    against = judge(capacity, LOAD, plan_cost(capacity, LOAD, cheap))
    for_it = judge(capacity, LOAD, plan_cost(capacity, LOAD, dear))
    alone = judge(idle, few, plan_cost(idle, few, Prices(Decimal(2))))

    assert against.advice == "use_an_api"
    assert "even full (4,000 output tokens/s) these machines cost more" in against.reasons[1]
    assert for_it.advice == "self_host"
    assert alone.advice == "no_comparison"
    texts = " ".join(alone.reasons)
    assert "0% of the time" in texts
    assert "without a spare machine" in texts
    assert "merge it (loraplex adapters merge)" in texts


def test_an_api_that_asks_for_each_adapter_turns_the_verdict() -> None:
    load = replace(LOAD, adapters=50, registered=500, ranks=(16,))
    capacity = capacity_of(2000, load)
    prices = Prices(Decimal(2), api_input=Decimal("0.02"), api_output=Decimal("0.05"))

    without = plan_cost(capacity, load, prices)
    hosted = plan_cost(capacity, load, replace(prices, api_adapter_hour=Decimal("0.05")))

    assert hosted.api_usd is not None
    assert without.api_usd is not None
    assert hosted.api_usd - without.api_usd == 500 * 730 * Decimal("0.05")
    assert judge(capacity, load, without).advice == "use_an_api"
    assert judge(capacity, load, hosted).advice == "self_host"


@given(
    speed=st.floats(1, 1e5),
    peak=st.floats(0.1, 1e6),
    mean=st.floats(0.01, 1),
    spare=st.integers(0, 5),
)
def test_any_plan_serves_its_peak(speed: float, peak: float, mean: float, spare: int) -> None:
    load = replace(LOAD, output_tokens_per_s=peak, mean_share=mean)

    found = capacity_of(speed, load, spare)

    assert found.machines * speed >= peak * (1 - 1e-6)
    assert (found.machines - 1) * speed <= peak * (1 + 1e-6)
    assert 0 < found.utilization <= 1 + 1e-6
    assert found.total_machines == found.machines + spare


def test_defaults_are_the_engines() -> None:
    assert {False: DEFAULT_SEQS, True: DEFAULT_GPU_SEQS} == DEFAULT_ROWS
    assert EngineConfig.__dataclass_fields__["max_loras"].default == DEFAULT_MAX_LORAS


# ------------------------------------------------------------------------------------ the command


@pytest.fixture
def folder(tmp_path: Path) -> str:
    config = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def run(*arguments: str) -> tuple[int, str, str]:
    done = invoke(["plan", *arguments], {"COLUMNS": "200"})
    return done.exit_code, done.stdout, done.stderr


def test_the_command_tells_and_prints_json(folder: str) -> None:
    flags = ("--machine-price", "2", "--api-input-price", "0.02", "--api-output-price", "0.05")

    code, text, _ = run(folder, *flags)
    code_json, out, _ = run(folder, *flags, "--json")

    found = json.loads(out)
    assert (code, code_json) == (0, 0)
    assert "Do not self-host." in text
    assert "estimated: measure it" in text
    assert found["verdict"]["advice"] == "use_an_api"
    assert found["capacity"]["memory"]["kv_per_token"] == 131_072
    assert (
        Decimal(found["cost"]["self_hosted_usd"]) == 2 * 730 * found["capacity"]["total_machines"]
    )


def test_without_prices_nothing_is_said_of_money(folder: str) -> None:
    code, text, _ = run(folder)

    assert code == 0
    assert "$" not in text
    assert "No price given" in text


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--machine", "z80"), "--machine is 'z80'"),
        (("--machine", "cpu"), "needs --memory-gib"),
        (("--machine", "cpu", "--memory-gib", "-1"), "--memory-gib is -1: give"),
        (("--ranks", "a"), "--ranks is 'a'"),
        (("--measured-tokens-per-second", "0"), "--measured-tokens-per-second is 0: give"),
        (("--operations", "100"), "--operations needs --machine-price"),
        (("--api-adapter-price", "1"), "give --api-input-price and --api-output-price too"),
        (
            (
                *("--machine", "cpu", "--memory-gib", "24", "--read-gb-s", "40", "--tflops", "2"),
                *("--kv-cache-dtype", "fp8"),
            ),
            "--kv-cache-dtype is fp8, but on a CPU",
        ),
        (("--modules", "w_proj"), "no module w_proj"),
        (("--api-input-price", "1"), "go together"),
        (("--quantization", "int8"), "int8 is of a CPU"),
        (("--machine", "l4", "--memory-gib", "8"), "a l4 has 7.2 GiB"),
    ],
)
def test_bad_input_names_the_flag(folder: str, flags: tuple[str, ...], told: str) -> None:
    code, _, err = run(folder, *flags)

    assert code == 1
    assert told in err


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_every_number_is_finite_and_in_its_range(folder: str, value: str) -> None:
    hints = get_type_hints(plan).items()
    flags = [f"--{name.replace('_', '-')}" for name, kind in hints if kind in (float, float | None)]
    assert len(flags) >= 16

    for flag in flags:
        code, _, err = run(folder, flag, value)
        assert code == 1
        assert f"{flag} is {value}: give a " in err


def test_a_measurement_of_nothing_is_none() -> None:
    for speed in (0.0, math.nan, math.inf):
        with pytest.raises(PlanError, match="--measured-tokens-per-second is"):
            plan_capacity(MODEL, LOAD, GPUS["a100"], measured_tokens_per_s=speed)


def test_a_model_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    code, _, err = run(str(tmp_path / "none"))

    assert code == 1
    assert "loraplex models pull" in err
