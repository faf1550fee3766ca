"""Whole rollouts whose truth is known: harmless canaries live, bad ones do not, and peeking would have it otherwise.

Seeds are fixed, so each count is the same in every run. `python -m bench.rollout_gates` prints the whole table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json

import pytest
from loraplex_platform.rollouts.verdicts import GatePlan

from bench import rollout_gates
from bench.simulation.rollouts import (
    FAULTS,
    Truth,
    World,
    at_the_margin,
    draw,
    looks,
    margins,
    replay,
    replay_naively,
)

ALPHA = 0.05
USUAL = GatePlan(gates=margins(), num_steps=1, alpha=ALPHA)
STRICT = GatePlan(gates=margins(0), num_steps=1, alpha=ALPHA)  # no difference is tolerated
SMALL = 1_500  # requests

HARMLESS = [
    pytest.param(World(), USUAL, id="equal"),
    pytest.param(World(), STRICT, id="equal, nothing tolerated"),
    pytest.param(World(canary=at_the_margin(Truth())), USUAL, id="all at the margin"),
    pytest.param(World(num_subjects=12), STRICT, id="12 subjects"),
    pytest.param(World(num_subjects=60), STRICT, id="60 subjects"),
    pytest.param(World(weight_bp=9_000), STRICT, id="canary has most"),
    pytest.param(World(outage=0.05), STRICT, id="an outage of both"),
]


def of_size(world: World, num_requests: int) -> World:
    return dataclasses.replace(world, num_requests=num_requests)


@pytest.mark.parametrize(("world", "plan"), HARMLESS)
def test_harmless_canaries_live(world: World, plan: GatePlan) -> None:
    outcomes = [replay(of_size(world, SMALL), plan, seed, every=50) for seed in range(12)]

    assert (
        sum(outcome.failed_by is not None for outcome in outcomes) <= 2
    )  # of 0.6 at most expected


@pytest.mark.slow
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize(("world", "plan"), HARMLESS)
def test_of_two_hundred_harmless_canaries_no_more_than_alpha_are_aborted(
    world: World, plan: GatePlan
) -> None:
    """5,000 requests each, and a look after each 10."""
    outcomes = [replay(world, plan, seed) for seed in range(200)]

    assert sum(outcome.failed_by is not None for outcome in outcomes) <= ALPHA * 200


def test_tests_for_one_look_abort_harmless_canaries() -> None:
    """The same rollouts as above, of which evidence aborts no more than two."""
    world = of_size(World(num_subjects=60), SMALL)

    naive = [replay_naively(world, STRICT, seed, every=25) for seed in range(12)]

    assert sum(outcome.failed_by is not None for outcome in naive) >= 6


@pytest.mark.parametrize(
    ("fault", "gate", "most"),
    [
        ("errors +5 points", "errors", 2_500),
        ("time to first token x1.5", "ttft", 6_000),
        ("inter-token x1.5", "inter-token", 2_500),
        ("log-probability -0.5 nat", "log-probability", 700),
        ("fluent garbage (-4 nat)", "log-probability", 500),
        ("ended by limit +15 points", "finish_reason", 6_000),
        ("output x3", "output tokens", 700),
    ],
)
def test_bad_canaries_are_aborted_by_their_gate(fault: str, gate: str, most: int) -> None:
    world = of_size(World(canary=FAULTS[fault](Truth())), most)

    outcomes = [replay(world, USUAL, seed, every=50) for seed in range(3)]

    assert [outcome.failed_by for outcome in outcomes].count(gate) >= 2


def test_a_good_canary_passes_in_time() -> None:
    """That it is not a tenth slower in the slowest twentieth takes more requests than most aborts."""
    world = World(num_requests=20_000, num_subjects=20_000, weight_bp=5_000)

    assert replay(world, USUAL, 2, every=10_000).passed_at is not None


def test_looks_see_the_requests_so_far_and_the_same_ones_in_every_gate() -> None:
    requests = draw(of_size(World(), 300), seed=4)

    seen = list(looks(requests, USUAL.gates, every=50))

    assert [num for num, _, _ in seen] == [50, 100, 150, 200, 250, 300]
    for num, num_canary, observed in seen:
        assert num_canary == int(requests.is_canary[:num].sum())
        for gate in USUAL.gates:
            evidence = USUAL.ask(gate, observed[gate.name])
            assert (evidence.num_stable, evidence.num_canary) == (num - num_canary, num_canary)


def test_the_bench_prints_its_table() -> None:
    arguments = ["--rollouts", "2", "--bad-rollouts", "2", "--requests", "400", "--every", "100"]
    printed = io.StringIO()

    with contextlib.redirect_stdout(printed):
        status = rollout_gates.main([*arguments, "--json"])

    tables = json.loads(printed.getvalue())
    assert status == 0
    assert [row["name"] for row in tables["bad"]] == list(FAULTS)
    assert all(row["rollouts"] == 2 for table in tables.values() for row in table)
    garbage = next(row for row in tables["bad"] if row["name"].startswith("fluent garbage"))
    assert garbage["by"] == {"log-probability": 2}
