"""Suites beside a rollout, asked by a real eval worker of a scripted engine: before it begins, and while it goes on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.platform.evals.stand import ANY, NEVER, case, ended, suite_of, working
from tests.platform.evals.test_runs import says
from tests.platform.rollouts.stand import ERRORS_ONLY, World, canary
from tests.support.metering import run_sql


async def _run_is_over(world: World, rollout_id: str, name: str) -> dict[str, Any]:
    asked = (await world.read(rollout_id))["verdict"][name]
    return await ended(world.stand, world.tenant, asked["run_id"])


def _gate(name: str, suite: str, **options: Any) -> dict[str, Any]:
    return {**ERRORS_ONLY, name: {"suite_id": suite, **options}}


async def test_a_golden_prompt_that_fails_under_way_aborts(world: World) -> None:
    stand = world.stand
    stand.engine.script = says("Paris")
    suite = await suite_of(
        stand,
        world.tenant,
        case("capital", {"type": "contains", "value": "Paris"}, required=True),
        case("any", ANY),
    )
    async with working(stand.db, stand.redis_url, stand.folder / "model"):
        rollout = await world.stepping(
            steps=[canary(500, hold_s=3600)], gate=_gate("golden", suite, every_s=10)
        )
        name = rollout["id"]
        await world.look()
        assert (await _run_is_over(world, name, "golden"))["state"] == "passed"
        await world.look()
        now = await world.read(name)
        assert (now["state"], now["verdict"]["golden"]["state"]) == ("canary", "passed")

        # It goes bad; the next run of the suite sees it.
        stand.engine.script = says("Rome")
        first = now["verdict"]["golden"]["run_id"]
        await run_sql(
            world.db,
            "update rollouts set verdict = jsonb_set(verdict, '{golden,asked_at}',"
            " to_jsonb(to_char(now() - interval '1 min', 'YYYY-MM-DD\"T\"HH24:MI:SSOF')))",
        )
        await world.look()
        assert (await world.read(name))["verdict"]["golden"]["run_id"] != first
        assert (await _run_is_over(world, name, "golden"))["state"] == "failed"
        await world.look()

    over = await world.read(name)
    assert (over["state"], over["weight_bp"]) == ("aborted", 0)
    assert over["end_reason"].startswith("the canary's golden eval golden version 1: failed")
    assert "not passed: capital" in over["end_reason"]
    assert "any" not in over["end_reason"].partition("not passed: ")[2]
    assert over["verdict"]["golden"]["cases"] == ["capital"]
    assert await world.current_number() == 2
    assert (await world.kinds(name))[-2:] == ["eval", "aborted"]
    await world.check_books()


@pytest.mark.parametrize("outcome", ["passed", "failed", "timeout", "error"])
async def test_nothing_is_sent_to_a_canary_that_its_offline_suite_does_not_pass(
    world: World, outcome: str
) -> None:
    stand = world.stand
    scripts = {
        "timeout": says("Paris", first_token_delay_s=60),
        "error": says("Paris", error_after=0),
    }
    stand.engine.script = scripts.get(outcome, says("Paris"))
    suite = await suite_of(
        stand,
        world.tenant,
        case("good", ANY),
        case("bad", NEVER if outcome == "failed" else ANY, required=True),
    )
    gate = _gate("offline", suite, run_timeout_s=3, concurrency=2)
    rollout = await world.started(steps=[canary(500, hold_s=3600)], gate=gate)
    name = rollout["id"]
    async with working(stand.db, stand.redis_url, stand.folder / "model"):
        await world.look()
        now = await world.read(name)
        assert (now["state"], now["verdict"]["waits_for"]) == (
            "evaluating",
            "its offline eval is queued",
        )
        run = await _run_is_over(world, name, "offline")
    assert run["state"] == outcome
    await world.look()
    over = await world.read(name)
    assert await world.current_number() == 2
    if outcome == "passed":
        assert (over["state"], over["step"]) == ("canary", 0)
        return
    assert (over["state"], over["step"], over["weight_bp"]) == ("aborted", None, 0)
    assert over["end_reason"].startswith(f"the canary's offline eval golden version 1: {outcome}")
    wanted = {"bad"} if outcome == "failed" else {"good", "bad"}
    assert set(over["verdict"]["offline"]["cases"]) == wanted
    what = "without an answer" if outcome == "timeout" else "not passed"
    assert f"{what}: {', '.join(over['verdict']['offline']['cases'])}" in over["end_reason"]
    assert (await world.kinds(name)).count("aborted") == 1
