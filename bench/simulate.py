"""`python -m bench.simulate`: what batching and scheduling do to latency, without a model or a minute's wait.

batching: one trace under static, dynamic and continuous batching, the last under each policy.
noisy: tenants at their usual load, then the same with one of them at `--noise` times its own; what that
does to the others under each policy, and the service gap beside its bounds.

Continuous batching is the real core and scheduler; static and dynamic are simulated beside it. Time is
what a roofline of the chosen machine says: see `bench.simulation.costs`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from loraplex_engine.config import Admission, PolicyName
from rich.console import Console
from rich.table import Table

from bench.simulation import batching, continuous
from bench.simulation.continuous import EngineSettings, Replay
from bench.simulation.costs import COST_MODELS, CostModel
from bench.simulation.outcomes import ALL_TENANTS, Objectives, TenantReport
from bench.simulation.traces import Arrival, Lengths, TenantLoad, generate, read

_NOISY = "noisy"
_POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
_COLUMNS = (
    *("sent", "refused", "expired", "served", "TTFT p50", "p95", "ITL p50", "p95"),
    *("tokens/s", "goodput/s"),
)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("scenario", nargs="?", choices=("batching", "noisy", "all"), default="all")
    add("--json", action="store_true", help="One JSON object instead of tables.")

    trace = parser.add_argument_group("trace")
    add = trace.add_argument
    add("--trace", type=Path, help="For `batching`: JSON lines; see bench.simulation.traces.")
    add("--arrivals", type=int, default=100_000, help="Requests of `noisy` (default: %(default)s).")
    add("--batching-arrivals", type=int, default=5_000, help="Of `batching` (%(default)s).")
    add("--tenants", type=int, default=16, help="Beside the noisy one (%(default)s).")
    add("--utilisation", type=float, default=0.6, help="Load before the noise (%(default)s).")
    add("--noise", type=float, default=20.0, help="Times its usual load (%(default)s).")
    add("--burst", type=float, default=1.0, help="Requests that come at once; 1: Poisson.")
    add("--prompt-tokens", type=float, default=512.0, help="Median (%(default)s).")
    add("--output-tokens", type=float, default=24.0, help="Median (%(default)s).")
    add("--seed", type=int, default=1, help="Of the trace (%(default)s).")

    engine = parser.add_argument_group("engine")
    add = engine.add_argument
    add("--cost", choices=sorted(COST_MODELS), default="cpu", help="Machine (%(default)s).")
    add("--policies", nargs="+", choices=_POLICIES, default=list(_POLICIES))
    add("--admission", choices=get_args(Admission), default="optimistic")
    add("--max-num-batched-tokens", type=int, default=128, help="%(default)s")
    add("--max-num-seqs", type=int, default=64, help="%(default)s")
    add("--max-waiting", type=int, default=256, help="%(default)s")
    add("--num-blocks", type=int, default=4096, help="Of 16 tokens (%(default)s).")
    add("--max-model-len", type=int, default=4096, help="%(default)s")
    add("--long-prefill-token-threshold", type=int)
    add("--max-partial-prefills", type=int)
    add("--waiting-served-ratio", type=float, default=0.0, help="%(default)s")
    add("--aging-s", type=float, default=30.0, help="%(default)s")
    add("--patience-s", type=float, help="A request that waits for longer expires.")
    add("--batch-size", type=int, default=16, help="Static and dynamic batches (%(default)s).")
    add("--window-s", type=float, default=0.1, help="Of dynamic batching (%(default)s).")
    add("--slo-ttft-s", type=float, default=2.0, help="Goodput counts what meets both.")
    add("--slo-itl-s", type=float, default=0.2, help="Mean gap between a request's tokens.")
    return parser


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What the command line says, checked."""

    values: argparse.Namespace
    costs: CostModel
    settings: EngineSettings
    objectives: Objectives

    def loads(self, noise: float, num_tenants: int) -> list[TenantLoad]:
        """The noisy tenant and the others; without noise all load the machine equally."""
        values = self.values
        prompt = Lengths(values.prompt_tokens, 0.5, 8, values.max_model_len // 2)
        output = Lengths(values.output_tokens, 0.5, 2, values.max_model_len // 4)
        rate = values.utilisation / (self._request_s(prompt, output) * (num_tenants + 1))

        def load(name: str, times: float) -> TenantLoad:
            return TenantLoad(name, rate * times, prompt, output, burst=values.burst)

        quiet = [load(f"tenant-{index + 1}", 1.0) for index in range(num_tenants)]
        return [*quiet, load(_NOISY, noise)]

    def _request_s(self, prompt: Lengths, output: Lengths) -> float:
        """What a request takes of the machine when full steps run back to back."""
        mean = 1.133  # of a log-normal with sigma 0.5, in medians
        num_tokens = mean * (prompt.median + output.median)
        budget = self.settings.max_num_batched_tokens
        step_s = self.costs.step_s(*_full_step(budget))
        return num_tokens / budget * step_s


def _full_step(budget: int) -> tuple[Any, Any]:
    import numpy as np

    return np.zeros(1, dtype=np.int64), np.array([budget])


def make_setup(values: argparse.Namespace) -> Setup:
    """Settings from parsed flags."""
    settings = EngineSettings(
        admission=values.admission,
        num_blocks=values.num_blocks,
        max_num_batched_tokens=values.max_num_batched_tokens,
        max_num_seqs=values.max_num_seqs,
        max_waiting=values.max_waiting,
        max_model_len=values.max_model_len,
        long_prefill_token_threshold=values.long_prefill_token_threshold,
        max_partial_prefills=values.max_partial_prefills,
        waiting_served_ratio=values.waiting_served_ratio,
        aging_s=values.aging_s,
        patience_s=values.patience_s,
    )
    return Setup(
        values,
        COST_MODELS[values.cost],
        settings,
        Objectives(values.slo_ttft_s, values.slo_itl_s),
    )


# ---------------------------------------------------------------------------- scenarios


def run_batching(setup: Setup) -> dict[str, Replay]:
    """One trace under each strategy."""
    values = setup.values
    arrivals: list[Arrival] = (
        read(values.trace)
        if values.trace
        else generate(
            setup.loads(1.0, values.tenants),
            num_arrivals=values.batching_arrivals,
            seed=values.seed,
        )
    )
    batches: dict[str, float | None] = {"static": None, "dynamic": values.window_s}
    replays = {
        name: batching.replay(
            arrivals,
            setup.costs,
            setup.objectives,
            batch_size=values.batch_size,
            max_waiting=values.max_waiting,
            window_s=window_s,
        )
        for name, window_s in batches.items()
    }
    for policy in values.policies:
        settings = dataclasses.replace(setup.settings, policy=policy)
        replays[f"continuous, {policy}"] = continuous.replay(
            arrivals, setup.costs, settings, setup.objectives
        )
    return replays


@dataclasses.dataclass(frozen=True, slots=True)
class Noise:
    """What one tenant's noise did to the others, under one policy."""

    policy: PolicyName
    usual: Replay
    noisy: Replay

    @property
    def ttft_p95_ratio(self) -> float:
        """The other tenants' TTFT p95 over what it is without the noise: the median tenant's."""
        return statistics.median(self._ratios())

    @property
    def worst_ttft_p95_ratio(self) -> float:
        """The same of the tenant who fares worst, by bad luck or because of the noise."""
        return max(self._ratios())

    def _ratios(self) -> list[float]:
        before = {report.tenant: report for report in self.usual.reports}
        return [
            report.ttft_p95_s / before[report.tenant].ttft_p95_s
            for report in self.noisy.reports
            if report.tenant not in (_NOISY, ALL_TENANTS)
        ]


def run_noisy(setup: Setup) -> list[Noise]:
    """Each policy without and with the noise. The other tenants send the same in both."""
    values = setup.values
    num_tenants, noise = values.tenants, values.noise
    num_usual = round(values.arrivals * (num_tenants + 1) / (num_tenants + noise))
    traces = {
        times: generate(
            setup.loads(times, num_tenants), num_arrivals=num_arrivals, seed=values.seed
        )
        for times, num_arrivals in ((1.0, num_usual), (noise, values.arrivals))
    }
    results = []
    for policy in values.policies:
        settings = dataclasses.replace(setup.settings, policy=policy)
        usual, noisy = (
            continuous.replay(traces[times], setup.costs, settings, setup.objectives)
            for times in (1.0, noise)
        )
        results.append(Noise(policy, usual, noisy))
    return results


# ---------------------------------------------------------------------------- output


def _row(report: TenantReport) -> list[str]:
    times = (report.ttft_p50_s, report.ttft_p95_s, report.itl_p50_s, report.itl_p95_s)
    counts = (report.sent, report.refused, report.expired, report.served)
    return [
        *(f"{count:,}" for count in counts),
        *(f"{seconds:.3f}" for seconds in times),
        f"{report.output_tokens_per_s:.1f}",
        f"{report.goodput_per_s:.2f}",
    ]


def _table(title: str, first: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in first:
        table.add_column(name)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    return table


def _print_batching(console: Console, setup: Setup, replays: dict[str, Replay]) -> None:
    table = _table(f"Batching, {setup.costs.name} (seconds)", ("strategy", "tenant"))
    for name, replay in replays.items():
        for index, report in enumerate(replay.reports):
            is_last = report.tenant == ALL_TENANTS
            table.add_row(
                name if index == 0 else "", report.tenant, *_row(report), end_section=is_last
            )
    console.print(table)


def _print_noisy(console: Console, setup: Setup, results: list[Noise]) -> None:
    noise = setup.values.noise
    table = _table(
        f"One tenant at {noise:g} times its load, {setup.costs.name} (seconds)",
        ("policy", "load", "tenant"),
    )
    for result in results:
        for name, replay in (("usual", result.usual), (f"noise x{noise:g}", result.noisy)):
            for index, report in enumerate(replay.reports):
                labels = (result.policy, name) if index == 0 else ("", "")
                is_last = report.tenant == ALL_TENANTS
                table.add_row(*labels, report.tenant, *_row(report), end_section=is_last)
    console.print(table)

    summary = Table(title="Noise", title_justify="left")
    summary.add_column("policy")
    for name in (
        "others' TTFT p95, times",
        "worst",
        "preemptions",
        "service gap seen",
        "2 x promised",
        "2 x bound",
    ):
        summary.add_column(name, justify="right")
    for result in results:
        gap = result.noisy.gap
        bounds = (
            ("-", "-") if gap is None else (f"{2 * gap.promised:,.0f}", f"{2 * gap.bound:,.0f}")
        )
        summary.add_row(
            result.policy,
            f"{result.ttft_p95_ratio:.2f}",
            f"{result.worst_ttft_p95_ratio:.2f}",
            f"{result.noisy.num_preemptions:,}",
            f"{result.noisy.service_gap:,.0f}",
            *bounds,
        )
    console.print(summary)


def _as_json(replay: Replay) -> dict[str, Any]:
    return {
        "tenants": [report.to_json() for report in replay.reports],
        "elapsed_s": replay.elapsed_s,
        "num_steps": replay.num_steps,
        "num_preemptions": replay.num_preemptions,
        "service_gap": replay.service_gap,
        "gap": None if replay.gap is None else dataclasses.asdict(replay.gap),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what was asked for and print it."""
    values = _make_parser().parse_args(arguments)
    setup = make_setup(values)
    started_s = time.monotonic()
    output: dict[str, Any] = {"cost_model": setup.costs.name}
    console = Console(width=None if Console().is_terminal else 160, quiet=values.json)
    if values.scenario in ("batching", "all"):
        replays = run_batching(setup)
        _print_batching(console, setup, replays)
        output["batching"] = {name: _as_json(replay) for name, replay in replays.items()}
    if values.scenario in ("noisy", "all"):
        results = run_noisy(setup)
        _print_noisy(console, setup, results)
        output["noisy"] = [
            {
                "policy": result.policy,
                "ttft_p95_ratio": result.ttft_p95_ratio,
                "worst_ttft_p95_ratio": result.worst_ttft_p95_ratio,
                "usual": _as_json(result.usual),
                "noisy": _as_json(result.noisy),
            }
            for result in results
        ]
    if values.json:
        print(json.dumps(output))
    else:
        console.print(f"simulated in {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
