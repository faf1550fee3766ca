"""A golden suite lets a step pass only by a run that was asked in it and passed; what decides nothing holds."""

from __future__ import annotations

from typing import Any

from tests.platform.evals.stand import NEVER, case, suite_of
from tests.platform.rollouts.stand import NO_GATES, World, canary
from tests.support.metering import run_sql


async def test_a_step_waits_for_its_golden_run(world: World) -> None:
    rollout = await world.stepping(steps=[canary(500), canary(1000)], gate=await _golden(world))

    await world.look(3)

    now = await world.read(rollout["id"])
    assert (now["state"], now["step"], now["weight_bp"]) == ("canary", 0, 500)
    assert "golden" in now["verdict"]["waits_for"]
    [run] = await _runs(world)
    assert run["state"] == "queued"

    # Passed: the next step asks for itself, at once, and waits for its own.
    await _end(world, "passed")
    await world.look(2)
    now = await world.read(rollout["id"])
    assert (now["state"], now["step"]) == ("canary", 1)
    assert len(await _runs(world)) == 2
    await world.look(2)
    assert (await world.read(rollout["id"]))["state"] == "canary"

    await _end(world, "passed")
    await world.look()
    assert (await world.read(rollout["id"]))["state"] == "promoted"
    await world.check_books()


async def test_a_golden_run_that_ends_in_an_error_or_out_of_time_holds_and_is_asked_again(
    world: World,
) -> None:
    rollout = await world.stepping(steps=[canary(500)], gate=await _golden(world))
    for count, state in enumerate(("error", "timeout", "cancelled"), start=1):
        await world.look()
        assert len(await _runs(world)) == count
        await _end(world, state)
        await world.look(2)
        now = await world.read(rollout["id"])
        assert now["state"] == "canary"
        assert state in now["verdict"]["waits_for"]
        # Not before its time.
        assert len(await _runs(world)) == count
        await run_sql(
            world.db,
            "update rollouts set verdict = jsonb_set(verdict, '{golden,asked_at}', '\"2026-01-01T00:00:00+00:00\"')",
        )
    kinds = await world.kinds(rollout["id"])
    assert kinds.count("hold") == 3
    await world.look()
    await _end(world, "passed")
    await world.look()
    assert (await world.read(rollout["id"]))["state"] == "promoted"


async def test_a_golden_run_that_fails_aborts_whatever_the_step_waits_for(world: World) -> None:
    rollout = await world.stepping(steps=[canary(500, hold_s=3600)], gate=await _golden(world))
    await world.look()
    await _end(world, "failed")

    await world.look()

    now = await world.read(rollout["id"])
    assert (now["state"], now["weight_bp"]) == ("aborted", 0)
    assert "golden" in now["end_reason"]


async def test_what_cannot_be_served_is_told_at_once_and_never_promoted(world: World) -> None:
    rollout = await world.stepping(steps=[canary(500, hold_s=3600)], gate=NO_GATES)
    world.fleet.reason = "no replica of its build is ready"

    await world.look()
    assert ("hold", world.fleet.reason) in await world.events(rollout["id"])

    await run_sql(world.db, "update rollouts set step_began_at = now() - interval '2 hours'")
    await world.look(2)
    now = await world.read(rollout["id"])
    assert (now["state"], now["verdict"]["waits_for"]) == ("canary", world.fleet.reason)
    assert await world.current_number() == 2

    world.fleet.reason = None
    await world.look()
    assert (await world.read(rollout["id"]))["state"] == "promoted"


async def _golden(world: World) -> dict[str, Any]:
    suite = await suite_of(world.stand, world.tenant, case("a", NEVER))
    return {**NO_GATES, "golden": {"suite_id": suite, "every_s": 600}}


async def _runs(world: World) -> list[dict[str, Any]]:
    answer = await world.stand.admin.get(f"/admin/v1/tenants/{world.tenant}/eval-runs")
    return list(answer.json()["data"])


async def _end(world: World, state: str) -> None:
    """As the worker ends what is queued."""
    await run_sql(
        world.db,
        "update eval_runs set state = :state, started_at = now(), ended_at = now() where state = 'queued'",
        state=state,
    )


async def test_a_suite_that_no_worker_takes_is_told_of(world: World) -> None:
    suite = await suite_of(world.stand, world.tenant, case("a", NEVER))
    gate = {**NO_GATES, "offline": {"suite_id": suite}}
    rollout = await world.started(steps=[canary(500)], gate=gate)
    await world.look(2)
    assert "hold" not in await world.kinds(rollout["id"])

    await run_sql(world.db, "update eval_runs set created_at = now() - interval '2 minutes'")
    await world.look(2)

    holds = [words for kind, words in await world.events(rollout["id"]) if kind == "hold"]
    assert len(holds) == 1
    assert "LORAPLEX_MODEL_DIR" in holds[0]
