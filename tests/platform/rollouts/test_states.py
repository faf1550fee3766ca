"""From draft to its end: what each look does, what people may do when, and what is left of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from loraplex_platform.ids import parse_id
from sqlalchemy import text

from tests.platform.control.stand import error_of
from tests.platform.rollouts.stand import ERRORS_ONLY, MODEL, NO_GATES, World, canary, shadow
from tests.support.metering import run_sql


async def test_a_rollout_goes_step_by_step_and_is_promoted_by_itself(world: World) -> None:
    rollout = await world.started(steps=[shadow(2000), canary(500), canary(2500)])
    name = rollout["id"]
    assert (rollout["state"], rollout["step"], rollout["weight_bp"]) == ("evaluating", None, 0)
    assert rollout["changes"] == ["adapter"]
    assert rollout["warnings"] == []

    await world.look()
    now = await world.read(name)
    assert (now["state"], now["step"], now["shadow_bp"], now["weight_bp"]) == ("shadow", 0, 2000, 0)
    await world.play_equal(name, arm="shadow")
    await world.look()
    now = await world.read(name)
    assert (now["state"], now["step"], now["shadow_bp"], now["weight_bp"]) == ("canary", 1, 0, 500)
    assert await world.current_number() == 2
    await world.play_equal(name, step=1)
    await world.look()
    assert (await world.read(name))["weight_bp"] == 2500
    await world.play_equal(name, step=2)
    await world.look()

    ended = await world.read(name)
    assert (ended["state"], ended["weight_bp"], ended["end_reason"]) == (
        "promoted",
        0,
        "all 3 steps are passed",
    )
    assert await world.current_number() == 1
    kinds = await world.kinds(name)
    assert kinds == ["created", "started", *["step", "verdict"] * 3, "promoted"]
    await world.check_books()

    back = await world.act(name, "rollback", json={"reason": "not good"})
    assert (back["state"], back["end_reason"]) == ("rolled_back", "not good")
    assert await world.current_number() == 2
    error_of(await world.stand.admin.post(f"{world.path}/{name}/rollback"), 409, "rollout_state")


async def test_a_failing_gate_aborts_by_itself_and_says_why(world: World) -> None:
    rollout = await world.stepping(steps=[canary(500, hold_s=3600)])
    await world.play(rollout["id"], "stable", 60)
    await world.play(rollout["id"], "canary", 60, error=True)
    await world.look()

    ended = await world.read(rollout["id"])
    assert (ended["state"], ended["weight_bp"], ended["step"]) == ("aborted", 0, 0)
    assert ended["end_reason"].startswith("fail: canary error_rate 100 % (")
    assert "tolerated +30 points" in ended["end_reason"]
    assert await world.current_number() == 2
    async with world.db.sessions() as session:
        told = (
            await session.execute(
                text("select topic, payload ->> 'kind' from outbox where topic <> 'versions'")
            )
        ).all()
    assert ("alert", "rollout_aborted") in told
    assert ("rollout", "rollout_aborted") in told
    await world.look(3)
    assert (await world.kinds(rollout["id"]))[-1] == "aborted"


async def test_what_nobody_can_tell_yet_holds_and_says_so_once(world: World) -> None:
    rollout = await world.stepping(steps=[canary(500), canary(1000)])
    await world.play_equal(rollout["id"], 15)
    await world.look(4)

    now = await world.read(rollout["id"])
    assert (now["state"], now["step"]) == ("canary", 0)
    assert now["verdict"]["looks"] == 4
    assert now["verdict"]["waits_for"].startswith("the gates cannot tell yet: ")
    assert "at least 20 of each wanted" in now["verdict"]["waits_for"]
    assert (await world.kinds(rollout["id"])).count("hold") == 1

    # Of the first step's requests nothing is carried into the second.
    await world.play_equal(rollout["id"], 60)
    await world.look(2)
    now = await world.read(rollout["id"])
    assert (now["step"], now["verdict"]["canary"]["num_requests"]) == (1, 0)
    assert (await world.kinds(rollout["id"])).count("hold") == 2


async def test_the_hold_time_is_waited_for_whatever_the_gates_say(world: World) -> None:
    rollout = await world.stepping(steps=[canary(500, hold_s=60)])
    await world.play_equal(rollout["id"])
    await world.look(2)
    now = await world.read(rollout["id"])
    assert now["verdict"]["verdict"] == "pass"
    assert now["verdict"]["waits_for"].startswith("its step's time: ")

    await run_sql(world.db, "update rollouts set step_began_at = now() - interval '61 s'")
    await world.look()
    assert (await world.read(rollout["id"]))["state"] == "promoted"


async def test_a_paused_rollout_goes_no_step_further_but_is_still_guarded(world: World) -> None:
    rollout = await world.stepping(steps=[canary(500), canary(1000)])
    name = rollout["id"]
    await world.act(name, "pause")
    assert (await world.act(name, "pause", 409))["error"]["code"] == "rollout_state"
    await world.play_equal(name)
    await world.look(2)
    now = await world.read(name)
    assert (now["step"], now["is_paused"], now["weight_bp"]) == (0, True, 500)
    assert now["verdict"]["waits_for"] == "it is paused"

    await world.act(name, "resume")
    await world.look()
    assert (await world.read(name))["step"] == 1
    await world.act(name, "pause")
    await world.play(name, "stable", 60, step=1)
    await world.play(name, "canary", 60, step=1, error=True)
    await world.look()
    assert (await world.read(name))["state"] == "aborted"


async def test_approval_is_waited_for(world: World) -> None:
    rollout = await world.stepping(steps=[canary(500)], promotion="approval", gate=NO_GATES)
    assert "No gate is asked" in rollout["warnings"][0]
    await world.look(3)
    now = await world.read(rollout["id"])
    assert (now["state"], now["verdict"]["waits_for"]) == (
        "canary",
        "somebody's approval: promote it, or abort it",
    )
    assert (await world.kinds(rollout["id"])).count("hold") == 1

    promoted = await world.act(rollout["id"], "promote", json={"reason": "looks good"})
    assert (promoted["state"], promoted["end_reason"]) == ("promoted", "looks good")
    assert await world.current_number() == 1


@pytest.mark.parametrize("num_looks", [0, 1])
async def test_promoted_now_skips_the_rest(world: World, num_looks: int) -> None:
    rollout = await world.started(steps=[shadow(), canary()])
    await world.look(num_looks)
    await world.act(rollout["id"], "promote")
    assert await world.current_number() == 1
    await world.look()
    assert (await world.kinds(rollout["id"]))[-1] == "promoted"


async def test_what_cannot_be_served_waits_and_says_for_what(world: World) -> None:
    world.fleet.reason = (
        "it waits for a replica of tiny-base with the engine build x (none is there)"
    )
    rollout = await world.started(steps=[canary(500), canary(1000)])
    await world.look(3)
    now = await world.read(rollout["id"])
    assert (now["state"], now["verdict"]["waits_for"]) == ("evaluating", world.fleet.reason)
    assert (await world.kinds(rollout["id"])).count("hold") == 1

    world.fleet.reason = None
    await world.look()
    assert (await world.read(rollout["id"]))["state"] == "canary"
    # And no step begins before every replica that may serve it can.
    world.fleet.reason = "replica r-2 loads its adapter"
    await world.play_equal(rollout["id"])
    await world.look(2)
    now = await world.read(rollout["id"])
    assert (now["step"], now["verdict"]["waits_for"]) == (0, "replica r-2 loads its adapter")
    world.fleet.reason = None
    await world.look()
    assert (await world.read(rollout["id"]))["step"] == 1


async def test_one_rollout_of_a_deployment_is_under_way(world: World, db_url: str) -> None:
    first, second = await world.started(), await world.made()
    refused = await world.act(second["id"], "start", 409)
    assert refused["error"]["code"] == "rollout_active"
    assert first["id"] in refused["error"]["message"]
    # Whoever comes past the service meets the index.
    with pytest.raises(Exception, match="uq_rollouts_active"):
        await run_sql(
            world.db,
            "update rollouts set state = 'shadow' where id = :id",
            id=parse_id("rollout", second["id"]),
        )
    await world.act(first["id"], "abort")
    assert (await world.act(second["id"], "start"))["state"] == "evaluating"
    listed = await world.call("GET", params={"deployment": MODEL, "state": "evaluating"})
    assert [one["id"] for one in listed["data"]] == [second["id"]]


async def test_of_two_admins_at_once_one_wins(world: World) -> None:
    for _ in range(5):
        rollout = await world.stepping()
        verbs = ("promote", "abort")
        answers = await asyncio.gather(
            *(world.stand.admin.post(f"{world.path}/{rollout['id']}/{verb}") for verb in verbs)
        )
        assert sorted(answer.status_code for answer in answers) == [200, 409]
        winner = next(i for i, answer in enumerate(answers) if answer.status_code == 200)
        state = {"promote": "promoted", "abort": "aborted"}[verbs[winner]]
        loser = answers[1 - winner].json()["error"]
        assert loser["code"] == "rollout_state"
        assert f"It is {state}" in loser["message"]
        kinds = await world.kinds(rollout["id"])
        assert kinds.count("promoted") + kinds.count("aborted") == 1
        assert await world.current_number() == (1 if state == "promoted" else 2)
        if state == "promoted":
            await world.act(rollout["id"], "rollback")


async def test_a_stale_etag_is_refused_with_the_difference(world: World) -> None:
    rollout = await world.stepping(steps=[canary(500), canary(1000)])
    etag = f'"{rollout["version"]}"'
    await world.play_equal(rollout["id"])
    await world.look()  # it goes a step further by itself

    refused = await world.act(rollout["id"], "abort", 409, headers={"If-Match": etag})
    assert refused["error"]["code"] == "version_conflict"
    assert "state is 'canary'; step is 1; weight_bp is 1000" in refused["error"]["message"]
    now = await world.stand.admin.get(f"{world.path}/{rollout['id']}")
    done = await world.act(rollout["id"], "abort", headers={"If-Match": now.headers["etag"]})
    assert done["state"] == "aborted"


async def test_a_draft_is_changed_and_nothing_else_is(world: World) -> None:
    draft = await world.made()
    changed = await world.call(
        "PATCH", f"/{draft['id']}", json={"sticky_by": "user", "steps": [canary(100)]}
    )
    assert (changed["sticky_by"], changed["version"]) == ("user", 2)
    assert (await world.kinds(draft["id"])) == ["created", "changed"]
    stale = await world.call(
        "PATCH", f"/{draft['id']}", 409, json={"sticky_by": "key"}, headers={"If-Match": '"1"'}
    )
    assert "sticky_by is 'user'" in stale["error"]["message"]
    await world.act(draft["id"], "start")
    refused = await world.call("PATCH", f"/{draft['id']}", 409, json={"sticky_by": "key"})
    assert refused["error"]["code"] == "rollout_state"
    await world.act(draft["id"], "abort")
    assert (await world.act(draft["id"], "promote", 409))["error"]["code"] == "rollout_state"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"deployment": "nobody"}, "deployment"),
    ({"canary": 77}, "canary"),
    ({"canary": "rev_" + "0" * 32}, "canary"),
    ({"canary": 2}, "canary"),
    ({"steps": []}, "steps"),
    ({"steps": [canary(500), shadow()]}, "steps"),
    ({"steps": [canary(500), canary(100)]}, "steps"),
    ({"steps": [canary(10_000)]}, "steps.0.canary.weight_bp"),
    ({"sticky_by": "moon"}, "sticky_by"),
    ({"gate": {"alpha": 0.7}}, "gate.alpha"),
    ({"gate": {"ttft": {"max_ratio": 0.5}}}, "gate.ttft.max_ratio"),
    ({"gate": {"ttft": {"quantile": 0.999, "min_requests": 100}}}, "gate.ttft"),
    (
        {"gate": {"error_rate": {"max_increase": 0.1, "min_requests": 5}}},
        "gate.error_rate.min_requests",
    ),
    ({"gate": {"latency": {}}}, "gate.latency"),
    ({"gate": {"offline": {"suite_id": "evs_" + "0" * 32}}}, "gate.offline.suite_id"),
    ({"gate": {"golden": {"suite_id": "x", "every_s": 1}}}, "gate.golden.every_s"),
]


async def test_a_wrong_field_is_named(world: World) -> None:
    for fields, param in WRONG:
        body = {"deployment": MODEL, "canary": 1, **fields}
        answer = await world.stand.admin.post(world.path, json=body)
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["param"] == param, answer.text


async def test_what_answers_now_must_be_the_stable_side(world: World) -> None:
    draft = await world.made()
    await run_sql(
        world.db,
        "update deployments set current_revision_id = (select id from deployment_revisions r where"
        " r.deployment_id = deployments.id and number = 1) where public_name = :name",
        name=MODEL,
    )
    refused = await world.act(draft["id"], "start", 409)
    assert "answers with revision 1 now" in refused["error"]["message"]
    # And if it is pointed elsewhere under way, by whatever hand, there is nothing left to compare.
    await run_sql(
        world.db,
        "update deployments set current_revision_id = (select id from deployment_revisions r where"
        " r.deployment_id = deployments.id and number = 2) where public_name = :name",
        name=MODEL,
    )
    await world.act(draft["id"], "start")
    await run_sql(
        world.db, "update deployments set archived_at = now() where public_name = :n", n=MODEL
    )
    await world.look()
    assert (await world.read(draft["id"]))["end_reason"] == "its deployment was archived"


async def test_events_are_paged_and_another_tenant_has_none_of_it(world: World) -> None:
    rollout = await world.stepping(gate=ERRORS_ONLY)
    first = await world.call("GET", f"/{rollout['id']}/events", params={"limit": 2})
    assert ([one["id"] for one in first["data"]], first["has_more"]) == (["1", "2"], True)
    rest = await world.call("GET", f"/{rollout['id']}/events", params={"after": first["last_id"]})
    assert [one["kind"] for one in rest["data"]] == ["step"]
    await world.call("GET", f"/{rollout['id']}/events", 400, params={"after": "x"})
    other = (await world.stand.tenant("globex"))["id"]
    for path in ("", "/events", "/metrics"):
        answer = await world.stand.admin.get(
            f"/admin/v1/tenants/{other}/rollouts/{rollout['id']}{path}"
        )
        error_of(answer, 404, "not_found")
