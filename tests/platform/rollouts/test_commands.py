"""`loraplex rollouts` against a control API that serves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.platform.rollouts.stand import ERRORS_ONLY, NO_GATES, World
from tests.support.command_line import commands


async def test_a_rollout_from_the_command_line(world: World, tmp_path: Path) -> None:
    gates = tmp_path / "gates.json"
    gates.write_text(json.dumps(ERRORS_ONLY))
    on = ("-t", "acme")
    async with commands(world.stand) as run:
        arguments = ("--canary", "1", "--weights", "5,25", "--shadow", "0", "--hold-s", "0")
        made = await run(
            "rollouts", "create", "capitals", *on, *arguments, "--gate", str(gates), "--json"
        )
        assert made.code == 0, made
        rollout = json.loads(made.out)
        name = rollout["id"]
        assert [step["weight_bp"] for step in rollout["steps"]] == [500, 2500]
        listed = await run("rollouts", "list", *on, "--state", "draft")
        assert name in listed.out
        started = await run("rollouts", "start", name, *on)
        assert started.out.strip() == f"{name}  capitals 2 -> 1: evaluating"
        await world.look()
        await world.play_equal(name)
        await world.look()
        await world.play_equal(name, step=1)
        shown = await run("rollouts", "show", name, *on)
        assert shown.code == 0, shown
        assert "canary, step 2 of 2: canary 25 %" in shown.out
        assert "error_rate" in shown.out
        both = json.loads((await run("rollouts", "show", name, *on, "--json")).out)
        assert both["metrics"]["canary"]["num_requests"] == 60
        stale = await run("rollouts", "abort", name, *on, "--if-version", "1")
        assert (stale.code, "It has changed since you read it" in stale.err) == (1, True)
        late = await run("rollouts", "watch", name, *on, "--timeout-s", "0")
        assert (late.code, f"{name} is still canary" in late.err) == (5, True)

        watching = asyncio.create_task(
            run("rollouts", "watch", name, *on, "--every-s", "0.1", "--json")
        )
        await world.look()
        watched = await watching
        assert watched.code == 0, watched
        lines = [json.loads(line) for line in watched.out.splitlines()]
        assert [line["kind"] for line in lines[:-1]] == await world.kinds(name)
        assert lines[-1]["state"] == "promoted"
        back = await run("rollouts", "rollback", name, *on, "--reason", "again")
        assert back.out.strip().endswith("rolled back")
        assert (await run("rollouts", "watch", name, *on)).code == 4
        told = await run("rollouts", "events", name, *on)
        assert "all 2 steps are passed" in told.out


async def test_an_aborted_one_has_an_exit_status_of_its_own(world: World, tmp_path: Path) -> None:
    gates = tmp_path / "gates.json"
    gates.write_text(json.dumps(NO_GATES))
    on = ("-t", "acme")
    async with commands(world.stand) as run:
        made = await run(
            "rollouts", "create", "capitals", *on, "--canary", "1", "--gate", str(gates), "--start"
        )
        assert made.code == 0, made
        assert "warning: No gate is asked" in made.err
        name = made.out.split()[0]
        for verb in ("pause", "resume", "abort"):
            done = await run("rollouts", verb, name, *on, "--json")
            assert done.code == 0, done
        watched = await run("rollouts", "watch", name, *on)
        assert (watched.code, watched.out.splitlines()[-1].split()[-3:]) == (
            3,
            ["aborted", "by", "hand"][-3:],
        )
        again = await run("rollouts", "promote", name, *on)
        assert (again.code, "It is aborted: aborted by hand" in again.err) == (1, True)
        for wrong, said in (
            (("--weights", "x"), "--weights: x is no percentage"),
            (("--gate", "nowhere.json"), "nowhere.json"),
            (("--offline", "none"), "there is no eval suite none"),
        ):
            refused = await run("rollouts", "create", "capitals", *on, *wrong)
            assert (refused.code, said in refused.err) == (1, True)
