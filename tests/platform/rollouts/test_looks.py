"""What SQL says of a step is what the requests themselves say."""

from __future__ import annotations

import math
import random
from typing import Any
from uuid import UUID

import pytest
from loraplex_platform.ids import parse_id
from loraplex_platform.metering import service as metering
from loraplex_platform.rollouts import looks
from loraplex_platform.rollouts.aggregates import Histogram, Latencies, Mix, SubjectSums
from loraplex_platform.rollouts.gates import GateSettings
from loraplex_platform.rollouts.records import StepKind
from loraplex_platform.rollouts.verdicts import GatePlan
from sqlalchemy import text

from tests.platform.rollouts.stand import World, canary, shadow
from tests.support.metering import reservation, run_sql

Row = dict[str, Any]


def plan_of(kind: StepKind) -> GatePlan:
    plan = GateSettings().plan(kind, 3)
    assert plan is not None
    return plan


async def rows_of(world: World, rollout_id: UUID, arm: str) -> list[Row]:
    async with world.db.sessions() as session:
        found = await session.execute(
            text(
                "select subject_key, completion_tokens, finish_reason, http_status, error_code,"
                " ttft_ms, itl_p95_ms, stable_logprob, state, checkpoint_tokens from requests"
                " where rollout_id = :id and arm = :arm"
            ),
            {"id": rollout_id, "arm": arm},
        )
        return [dict(row._mapping) for row in found]


def same(found: SubjectSums, wanted: SubjectSums) -> None:
    for field in SubjectSums.__slots__:
        assert getattr(found, field) == pytest.approx(getattr(wanted, field), rel=1e-9), field


async def test_sums_and_histograms_are_those_of_the_requests(world: World) -> None:
    rollout = await world.stepping(steps=[canary(500, hold_s=3600)], gate={})
    rollout_id = parse_id("rollout", rollout["id"])
    draw = random.Random(7)  # a test's
    for arm in ("stable", "canary"):
        for _ in range(40):
            await world.play(
                rollout["id"],
                arm,
                3,
                subjects=2,
                error=draw.random() < 0.1,
                finish_reason=draw.choice(["stop", "length", "abort"]),
                tokens=draw.randint(1, 300),
                ttft_ms=draw.randint(0, 900),
                itl_p95_ms=draw.choice([None, draw.uniform(5, 90)]),
                logprob=draw.choice([None, -math.inf, math.nan, draw.uniform(-3, 0)]),
            )
    # Of neither side: another step, a pin, and a probe.
    await world.play(rollout["id"], "canary", 5, step=1, error=True)
    await world.play(rollout["id"], "pinned", 5, error=True)

    plan = plan_of("canary")
    found = await looks.look(world.db.sessions, rollout_id, 0, "canary", plan)

    for arm, side in (("stable", found.stable), ("canary", found.canary)):
        rows = await rows_of(world, rollout_id, arm)
        rows = rows[: len(rows) - 5] if arm == "canary" else rows
        assert side.num_requests == 120
        good = [row for row in rows if row["finish_reason"] in ("stop", "length")]
        pick = "stable" if arm == "stable" else "canary"

        def of(name: str, pick: str = pick) -> Any:
            return getattr(found.observed[name], pick)

        same(
            of("error_rate"),
            SubjectSums.of((r["subject_key"], float(r["finish_reason"] == "error")) for r in rows),
        )
        same(
            of("abort_rate"),
            SubjectSums.of(
                (r["subject_key"], float(r["finish_reason"] == "abort"))
                for r in rows
                if r["finish_reason"] != "error"
            ),
        )
        mix = Mix.of(((r["subject_key"], r["finish_reason"]) for r in good), ("stop", "length"))
        for category in ("stop", "length"):
            same(of("finish_reason").shares[category], mix.shares[category])
        same(
            of("output_length"),
            SubjectSums.of((r["subject_key"], math.log(r["completion_tokens"])) for r in good),
        )
        scored = [r for r in good if r["stable_logprob"] is not None]
        same(
            of("logprob"),
            SubjectSums.of(
                (
                    r["subject_key"],
                    -20.0
                    if math.isnan(r["stable_logprob"])
                    else max(min(r["stable_logprob"], 0.0), -20.0),
                )
                for r in scored
            ),
        )
        for name, column in (("ttft", "ttft_ms"), ("itl", "itl_p95_ms")):
            known = [(r["subject_key"], float(r[column])) for r in good if r[column] is not None]
            wanted = Latencies.of(known, 0.95)
            got = of(name)
            assert isinstance(got.histogram, Histogram)
            assert dict(got.histogram.counts) == dict(wanted.histogram.counts)
            same(got.tail, wanted.tail)


async def test_which_requests_count_as_errors(world: World) -> None:
    rollout = await world.stepping(steps=[canary(500, hold_s=3600)], gate={})
    rollout_id = parse_id("rollout", rollout["id"])
    cases: list[tuple[dict[str, Any], float | None]] = [
        ({}, 0.0),
        ({"error": True}, 1.0),
        ({"http_status": 503, "error_code": "engine_unavailable"}, 1.0),
        ({"http_status": 503, "error_code": "adapter_unavailable"}, 1.0),
        ({"http_status": 504, "error_code": "deadline_exceeded"}, 1.0),
        ({"http_status": 400, "error_code": "grammar_invalid", "finish_reason": "error"}, None),
        ({"http_status": None, "error_code": "gateway_lost"}, None),
        ({"http_status": 503, "error_code": "database_unavailable"}, None),
        ({"http_status": 503, "error_code": "draining"}, None),
        ({"http_status": 499, "finish_reason": "abort"}, 0.0),
    ]
    wanted = []
    for changes, counts in cases:
        await world.play(rollout["id"], "canary", 1, **changes)
        if counts is not None:
            wanted.append(counts)
    # One that goes on, one that hangs, one that is refused, and one that is slow but says something.
    for kind in ("new", "hung", "slow", "refused"):
        asked = reservation(
            world.customer, rollout_id=rollout_id, rollout_step=0, arm="canary", subject_key=1
        )
        reserved = await metering.reserve(world.db.sessions, asked)
        if kind == "refused":
            await metering.void(
                world.db.sessions,
                asked.request_id,
                reserved.lease_token,
                voided_by="gw-1",
                http_status=503,
                error_code="overloaded",
            )
            wanted.append(1.0)
        elif kind != "new":
            await run_sql(
                world.db,
                "update requests set admitted_at = now() - interval '5 min', checkpoint_tokens = :n"
                " where id = :id",
                n=0 if kind == "hung" else 9,
                id=asked.request_id,
            )
            if kind == "hung":
                wanted.append(1.0)

    found = await looks.look(world.db.sessions, rollout_id, 0, "canary", plan_of("canary"))

    errors = found.canary.sum_of("error")
    assert (errors.num_requests, errors.total) == (len(wanted), sum(wanted))
    assert found.canary.sum_of("abort").total == 1


async def test_shadows_are_compared_in_what_does_not_depend_on_their_turn(world: World) -> None:
    rollout = await world.stepping(steps=[shadow(1000, hold_s=3600)], gate={})
    rollout_id = parse_id("rollout", rollout["id"])
    await world.play(rollout["id"], "stable", 30, tokens=50, logprob=-1.0)
    await world.play(rollout["id"], "shadow", 20, tokens=100, ttft_ms=9000, logprob=-2.0)
    # Given up under load: nobody's fault.
    await world.play(
        rollout["id"],
        "shadow",
        5,
        http_status=None,
        error_code="deadline_exceeded",
        finish_reason="error",
    )

    found = await looks.look(world.db.sessions, rollout_id, 0, "shadow", plan_of("shadow"))

    assert set(found.observed) == {"error_rate", "finish_reason", "output_length", "logprob"}
    assert (found.stable.num_requests, found.canary.num_requests) == (30, 25)
    assert found.canary.sum_of("error").num_requests == 20
    assert found.canary.share_of("logprob") == pytest.approx(-2.0)
    metrics = await world.call("GET", f"/{rollout['id']}/metrics")
    assert (metrics["kind"], metrics["canary"]["mean_output_tokens"]) == ("shadow", 100)
    assert metrics["stable"]["token_share"] + metrics["canary"]["token_share"] == pytest.approx(1)
    gates = {gate["gate"]: gate for gate in metrics["gates"]}
    assert "canary logprob -2 (" in gates["logprob"]["summary"]


async def test_a_step_without_requests_has_nothing_to_say(world: World) -> None:
    rollout = await world.stepping(steps=[canary(500, hold_s=3600)], gate={})

    metrics = await world.call("GET", f"/{rollout['id']}/metrics")

    assert metrics["verdict"] == "inconclusive"
    assert metrics["canary"]["error_rate"] is None
    assert all("nothing to compare yet" in gate["summary"] for gate in metrics["gates"])
    await world.call("GET", f"/{rollout['id']}/metrics", 404, params={"step": 1})
