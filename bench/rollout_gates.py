"""`python -m bench.rollout_gates`: how often gates abort a rollout by error, and how soon they abort a bad one.

Rollouts whose truth is known (`bench.simulation.rollouts`), looked at after every few requests. False aborts: of equal
arms, under the usual margins and under none, and of a canary that is in everything as much worse as is tolerated; and
beside them what tests for a fixed number of independent requests do at the same levels when they are looked at as
often. Power: requests until a fault fails the rollout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

from loraplex_platform.rollouts.verdicts import GatePlan

from bench.simulation.rollouts import (
    FAULTS,
    Outcome,
    Truth,
    World,
    at_the_margin,
    margins,
    replay,
    replay_naively,
)


@dataclass(frozen=True, slots=True)
class Row:
    """Of one kind of rollout.

    Attributes:
        failed: rollouts that a gate ended; by: which.
        median_requests, median_canary: until it did.
        passed: rollouts in which all gates passed at some look before; median_until_pass: requests until they did.
    """

    name: str
    rollouts: int
    failed: int
    by: dict[str, int]
    median_requests: float | None
    median_canary: float | None
    p90_canary: float | None
    passed: int
    median_until_pass: float | None


Cases = dict[str, Callable[[int], Outcome]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables; exit status 1 where more than alpha of a kind of harmless rollouts was aborted.

    That many more by chance alone are allowed for: three standard errors of that many rollouts.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.rollout_gates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rollouts", type=int, default=200, help="of equal arms (%(default)s)")
    add("--bad-rollouts", type=int, default=50, help="of each fault (%(default)s)")
    add("--requests", type=int, default=5_000, help="of a rollout (%(default)s)")
    add("--every", type=int, default=10, help="requests between looks (%(default)s)")
    add("--weight", type=int, default=2_000, help="of the canary, basis points (%(default)s)")
    add("--subjects", type=int, default=1_000, help="%(default)s")
    add("--alpha", type=float, default=0.05, help="of a rollout (%(default)s)")
    add("--seed", type=int, default=1, help="of the first rollout (%(default)s)")
    add("--processes", type=int, default=1, help="(%(default)s)")
    add("--json", action="store_true", help="one JSON object instead of tables")
    values = parser.parse_args(arguments)
    began_s = time.perf_counter()
    with ProcessPoolExecutor(values.processes, mp_context=get_context("spawn")) as pool:

        def rows(cases: Cases, count: int) -> list[Row]:
            seeds = range(values.seed, values.seed + count)
            return [_row(name, list(pool.map(case, seeds))) for name, case in cases.items()]

        harmless = rows(_harmless(values), values.rollouts)
        peeking = rows(_peeking(values), values.rollouts)
        bad = rows(_bad(values), values.bad_rollouts)
    if values.json:
        tables = {"harmless": harmless, "peeking": peeking, "bad": bad}
        print(json.dumps({name: [asdict(row) for row in table] for name, table in tables.items()}))
    else:
        print(
            f"{values.requests} requests of {values.subjects} subjects, canary {values.weight / 100:g} %, a look"
            f" after each {values.every}, alpha {values.alpha:g}"
        )
        _print("harmless canaries: false aborts", harmless)
        _print("the same, by tests that are not made for looks", peeking)
        _print("bad canaries: until the abort", bad)
        print(f"\n{time.perf_counter() - began_s:.0f} s")
    spread = (values.alpha * (1 - values.alpha) / values.rollouts) ** 0.5
    most = values.rollouts * (values.alpha + 3 * spread)
    return 0 if all(row.failed <= most for row in harmless) else 1


def _world(values: argparse.Namespace, **given: Any) -> World:
    return World(
        num_requests=values.requests,
        num_subjects=given.pop("num_subjects", values.subjects),
        weight_bp=values.weight,
        **given,
    )


def _plan(values: argparse.Namespace, scale: float = 1.0) -> GatePlan:
    return GatePlan(gates=margins(scale), num_steps=1, alpha=values.alpha)


def _harmless(values: argparse.Namespace) -> Cases:
    equal = _world(values)
    at_margin = _world(values, canary=at_the_margin(Truth()))
    few = _world(values, num_subjects=12)
    usual, strict = _plan(values), _plan(values, 0.0)
    return {
        "equal": partial(replay, equal, usual, every=values.every),
        "equal, nothing tolerated": partial(replay, equal, strict, every=values.every),
        "all at the margin": partial(replay, at_margin, usual, every=values.every),
        "equal, 12 subjects, nothing tolerated": partial(replay, few, strict, every=values.every),
    }


def _peeking(values: argparse.Namespace) -> Cases:
    equal, strict = _world(values), _plan(values, 0.0)
    at_margin = _world(values, canary=at_the_margin(Truth()))
    return {
        "equal, nothing tolerated": partial(replay_naively, equal, strict, every=values.every),
        "the same, one look at the end": partial(replay_naively, equal, strict, is_once=True),
        "all at the margin": partial(replay_naively, at_margin, _plan(values), every=values.every),
    }


def _bad(values: argparse.Namespace) -> Cases:
    usual = _plan(values)
    return {
        name: partial(replay, _world(values, canary=fault(Truth())), usual, every=values.every)
        for name, fault in FAULTS.items()
    }


def _row(name: str, outcomes: Sequence[Outcome]) -> Row:
    failed = [outcome for outcome in outcomes if outcome.failed_by is not None]
    canary = sorted(outcome.num_canary for outcome in failed)
    passed = [outcome.passed_at for outcome in outcomes if outcome.passed_at is not None]
    return Row(
        name,
        len(outcomes),
        len(failed),
        dict(Counter(str(outcome.failed_by) for outcome in failed).most_common()),
        statistics.median(outcome.num_requests for outcome in failed) if failed else None,
        statistics.median(canary) if failed else None,
        canary[int(0.9 * (len(canary) - 1))] if failed else None,
        len(passed),
        statistics.median(passed) if passed else None,
    )


def _print(title: str, rows: Sequence[Row]) -> None:
    print(
        f"\n{title:44}{'aborted':>12}{'requests':>10}{'canary':>8}{'p90':>7}{'passed':>8}{'after':>7}"
    )
    for row in rows:
        numbers = (
            f"{row.failed:>5}/{row.rollouts:<4}{100 * row.failed / row.rollouts:>3.0f}%"
            f"{_shown(row.median_requests):>9}{_shown(row.median_canary):>8}"
            f"{_shown(row.p90_canary):>7}{row.passed:>8}{_shown(row.median_until_pass):>7}"
        )
        by = ", ".join(f"{gate} {count}" for gate, count in row.by.items())
        print(f"{row.name:44}{numbers}  {by}")


def _shown(number: float | None) -> str:
    return "-" if number is None else f"{number:.0f}"


if __name__ == "__main__":
    sys.exit(main())
