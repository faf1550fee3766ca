"""The simulator: its costs, its traces, the three batching strategies, and the noisy tenant."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bench import simulate
from bench.simulation import batching, continuous, traces
from bench.simulation.continuous import EngineSettings, Replay, ServiceWatch
from bench.simulation.costs import COST_MODELS, CostModel
from bench.simulation.outcomes import ALL_TENANTS, Objectives, Recorder, TenantReport
from bench.simulation.traces import Arrival, Lengths, TenantLoad

OBJECTIVES = Objectives(ttft_s=2.0, itl_s=0.2)
# 10 ms a step, and 1 ms a token: times that can be added up by hand.
PLAIN = CostModel("plain", 0.5, 0.0, 0.0, 0.0, 1.0, 1e3, 0.01)


def report(replay: Replay, tenant: str = ALL_TENANTS) -> TenantReport:
    return next(report for report in replay.reports if report.tenant == tenant)


# ------------------------------------------------------------------ costs and traces


def test_a_decode_is_bound_by_memory_and_a_prefill_by_arithmetic() -> None:
    cpu = COST_MODELS["cpu"]
    one, many = np.array([1]), np.array([512])

    decode_s = cpu.step_s(np.array([1000]), one)
    prefill_s = cpu.step_s(np.array([0]), many)

    read = 134.5e6 * 2 + 23_040 * 1_001
    assert decode_s == pytest.approx(4e-3 + read / 25e9)
    flops = 2 * 134.5e6 * 512 + 4 * 30 * 9 * 64 * 512 * 513 / 2
    assert prefill_s == pytest.approx(4e-3 + flops / 250e9)
    # What a chunk attends to counts, however it is cut.
    chunks = cpu.step_s(np.array([0]), np.array([256])) + cpu.step_s(
        np.array([256]), np.array([256])
    )
    assert chunks == pytest.approx(prefill_s + 4e-3)


def test_a_tenants_arrivals_do_not_depend_on_the_others() -> None:
    lengths = Lengths(50, 0.5, 5, 200)
    quiet, other = (TenantLoad(name, 2.0, lengths, lengths) for name in ("quiet", "other"))
    noisy = dataclasses.replace(other, requests_per_s=40.0)

    usual = traces.generate([quiet, other], num_arrivals=400, seed=3)
    flooded = traces.generate([quiet, noisy], num_arrivals=4_200, seed=3)

    def of(arrivals: list[Arrival]) -> list[Arrival]:
        return [arrival for arrival in arrivals if arrival.tenant == "quiet"]

    common = min(len(of(usual)), len(of(flooded)))
    assert common > 150
    assert of(usual)[:common] == of(flooded)[:common]
    assert len(flooded) == 4_200
    assert all(one.at_s <= two.at_s for one, two in pairwise(flooded))


def test_bursts_keep_the_rate() -> None:
    lengths = Lengths(50, 0.5, 5, 200)
    for burst in (1.0, 8.0):
        load = TenantLoad("t", 10.0, lengths, lengths, burst=burst)
        arrivals = traces.generate([load], num_arrivals=5_000, seed=1)
        at_once = sum(one.at_s == two.at_s for one, two in pairwise(arrivals))

        assert arrivals[-1].at_s == pytest.approx(500.0, rel=0.15)
        assert at_once == pytest.approx(5_000 * (1 - 1 / burst), rel=0.1, abs=1)


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    arrivals = [Arrival(0.5, "a", 10, 3), Arrival(1.0, "b", 7, 1, weight=2.0, priority=1)]
    traces.write(arrivals, tmp_path / "trace.jsonl")

    assert traces.read(tmp_path / "trace.jsonl") == arrivals


# ------------------------------------------------------------------ strategies


def test_static_batches_wait_until_full_and_run_until_the_longest_answer() -> None:
    arrivals = [Arrival(0.0, "a", 10, 1), Arrival(1.0, "b", 20, 3), Arrival(1.01, "c", 5, 1)]

    replay = batching.replay(
        arrivals, PLAIN, OBJECTIVES, batch_size=2, max_waiting=9, window_s=None
    )

    # a and b begin at 1.0: both prompts padded to 20, then two steps of two rows; c comes after.
    assert report(replay, "a").ttft_p50_s == pytest.approx(1.0 + 0.05)
    assert report(replay, "b").ttft_p50_s == pytest.approx(0.05)
    assert report(replay, "b").itl_p50_s == pytest.approx(0.012)
    assert report(replay, "c").ttft_p50_s == pytest.approx(0.05 + 2 * 0.012 - 0.01 + 0.015)
    assert replay.num_steps == 4


def test_dynamic_batches_wait_for_the_window_at_most() -> None:
    arrivals = [Arrival(0.0, "a", 10, 1), Arrival(1.0, "b", 20, 1)]

    replay = batching.replay(arrivals, PLAIN, OBJECTIVES, batch_size=2, max_waiting=9, window_s=0.1)

    assert report(replay, "a").ttft_p50_s == pytest.approx(0.1 + 0.02)
    assert report(replay, "b").ttft_p50_s == pytest.approx(0.1 + 0.03)


def test_continuous_batching_runs_the_real_scheduler() -> None:
    """A request joins the batch that runs, and leaves it when it is done."""
    arrivals = [Arrival(0.0, "a", 10, 5), Arrival(0.025, "b", 20, 1)]
    settings = EngineSettings(max_num_batched_tokens=64, max_num_seqs=4)

    replay = continuous.replay(arrivals, PLAIN, settings, OBJECTIVES)

    # a: prefill ends at 0.020, a decode at 0.031; b joins the next step, of 21 tokens.
    assert report(replay, "b").ttft_p50_s == pytest.approx(0.031 + 0.031 - 0.025)
    assert replay.num_steps == 5
    assert replay.elapsed_s == pytest.approx(0.062 + 2 * 0.011)
    assert report(replay).served == 2


def test_continuous_batching_beats_both() -> None:
    lengths = Lengths(100, 0.5, 10, 400)
    load = TenantLoad("t", 1.2, lengths, Lengths(24, 0.8, 2, 128))
    arrivals = traces.generate([load], num_arrivals=150, seed=2)
    costs = COST_MODELS["cpu"]

    replays = {
        name: batching.replay(
            arrivals, costs, OBJECTIVES, batch_size=16, max_waiting=256, window_s=window_s
        )
        for name, window_s in (("static", None), ("dynamic", 0.1))
    }
    replays["continuous"] = continuous.replay(arrivals, costs, EngineSettings(), OBJECTIVES)

    ttft = {name: report(replay).ttft_p95_s for name, replay in replays.items()}
    good = {name: report(replay).goodput_per_s for name, replay in replays.items()}
    assert ttft["continuous"] < ttft["dynamic"] < ttft["static"]
    assert good["continuous"] > 1.1 * max(good["dynamic"], good["static"])
    assert all(report(replay).served == 150 for replay in replays.values())


def test_refusals_and_expiries_are_told_apart() -> None:
    arrivals = [Arrival(0.0, "t", 100, 50) for _ in range(10)]
    settings = EngineSettings(
        policy="fcfs",
        max_num_batched_tokens=100,
        max_num_seqs=1,
        max_waiting=6,
        patience_s=0.1,
    )

    got = report(continuous.replay(arrivals, PLAIN, settings, OBJECTIVES))

    assert (got.sent, got.refused, got.expired, got.served) == (10, 4, 5, 1)


def test_the_recorder_counts_goodput_by_both_objectives() -> None:
    recorder = Recorder(Objectives(ttft_s=1.0, itl_s=0.1))
    for key, (first, gap) in enumerate([(0.5, 0.05), (1.5, 0.05), (0.5, 0.2)]):
        recorder.sent(key, "t", 0.0)
        recorder.token(key, first, is_last=False)
        recorder.token(key, first + gap, is_last=True)

    got = recorder.reports(elapsed_s=2.0)[0]

    assert (got.served, got.goodput_per_s, got.output_tokens_per_s) == (3, 0.5, 3.0)


# ------------------------------------------------------------------ the noisy tenant


def test_the_watch_measures_only_while_both_wait() -> None:
    watch = ServiceWatch({"a": 1.0, "b": 2.0})
    watch.look({"a", "b"})
    watch.served("a", 10)
    watch.look({"a", "b"})
    watch.served("b", 60)
    watch.look({"a", "b"})
    assert watch.widest == 30  # from +10 to -20

    watch.look({"a"})
    watch.served("a", 1_000)
    watch.look({"a", "b"})
    assert watch.widest == 30


def check_noise(*flags: str) -> dict[str, simulate.Noise]:
    values = simulate._make_parser().parse_args(["noisy", "--policies", "fair", "fcfs", *flags])
    results = {noise.policy: noise for noise in simulate.run_noisy(simulate.make_setup(values))}
    fair = results["fair"].noisy
    assert fair.gap is not None
    assert 0 < fair.service_gap <= 2 * fair.gap.promised <= 2 * fair.gap.bound
    assert 0 < fair.gap.widest <= fair.gap.promised
    assert results["fcfs"].noisy.service_gap > 20 * fair.service_gap
    quiet = [one for one in fair.reports if one.tenant.startswith("tenant")]
    assert all(one.refused == 0 for one in quiet)
    assert report(fair, "noisy").refused > 0
    return results


def test_a_noisy_tenant_hardly_delays_the_others_under_fair_shares() -> None:
    results = check_noise("--arrivals", "500", "--tenants", "8")

    # Few requests each: p95 is one of the worst, so the long run's 1.5 has some slack here.
    assert results["fair"].ttft_p95_ratio < 2.0
    assert results["fcfs"].ttft_p95_ratio > 5.0


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_100_000_arrivals() -> None:
    results = check_noise("--arrivals", "100000")

    assert results["fair"].ttft_p95_ratio < 1.5
    assert results["fcfs"].ttft_p95_ratio > 20.0


def test_the_command_line_prints_tables_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--arrivals", "40", "--batching-arrivals", "20", "--tenants", "2"]

    simulate.main(["all", *flags, "--policies", "fair"])
    tables = capsys.readouterr().out
    simulate.main(["all", *flags, "--json"])
    output = json.loads(capsys.readouterr().out)

    assert "continuous, fair" in tables
    assert "2 x promised" in tables
    assert set(output["batching"]) == {
        "static",
        "dynamic",
        "continuous, fair",
        "continuous, priority",
        "continuous, fcfs",
    }
    assert [entry["policy"] for entry in output["noisy"]] == ["fair", "priority", "fcfs"]
    assert len(output["noisy"][0]["usual"]["tenants"]) == 4
