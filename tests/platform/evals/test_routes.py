"""Suites, runs and schedules over HTTP; nobody works on the runs here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from loraplex_platform.evals import service
from loraplex_platform.ids import parse_id
from loraplex_platform.metering import service as metering
from sqlalchemy import text

from tests.platform.control.people import member
from tests.platform.control.stand import BASE, Stand, error_of
from tests.platform.evals.stand import ANY, case, ended, made, read, started, suite_of
from tests.support.metering import Customer, reservation, settlement


@pytest.fixture
async def stand(db_url: str, redis_url: str, short_tmp_path: Path) -> AsyncIterator[Stand]:
    async with Stand.open(db_url, redis_url, short_tmp_path) as opened:
        yield opened


async def test_the_same_lines_are_the_same_version_and_others_the_next(stand: Stand) -> None:
    tenant = (await stand.tenant("acme"))["id"]
    path = f"/tenants/{tenant}/eval-suites"
    body = {"name": "golden", "lines": [case("a"), None, case("b")]}

    first = await made(stand.admin, path, body)
    again = await made(stand.admin, path, body | {"lines": [case("a"), case("b")]}, status=200)
    second = await made(stand.admin, path, body | {"threshold": {"share": 0.5}})

    assert (first["version"], first["num_cases"], again["version"], second["version"]) == (
        1,
        2,
        1,
        2,
    )
    assert first["id"] == second["id"]
    listed = (await stand.admin.get(f"/admin/v1{path}")).json()["data"]
    assert [(row["name"], row["version"]) for row in listed] == [("golden", 2)]
    old = await stand.admin.get(f"/admin/v1{path}/{first['id']}/versions/1")
    assert old.json()["sha256"] == first["sha256"]
    again = await made(stand.admin, path, body | {"lines": old.json()["lines"]}, status=200)
    assert again["sha256"] == first["sha256"]


async def test_a_wrong_line_is_named_and_nothing_is_kept(stand: Stand) -> None:
    tenant = (await stand.tenant("acme"))["id"]
    path = f"/admin/v1/tenants/{tenant}/eval-suites"
    bad = case("b", {"type": "regex", "pattern": "(a)\\1"})

    answer = await stand.admin.post(path, json={"name": "golden", "lines": [case("a"), bad]})

    error = error_of(answer, 400, "invalid_suite")
    assert error["message"].startswith("line 2: checks[0].pattern: ")
    assert error["param"] == "lines[1]"
    assert (await stand.admin.get(path)).json()["data"] == []


async def test_a_tenant_runs_the_platforms_suites_and_nobody_elses(stand: Stand) -> None:
    mine, theirs = (await stand.tenant("acme"))["id"], (await stand.tenant("globex"))["id"]
    platforms = (await made(stand.admin, "/eval-suites", {"name": "p", "lines": [case("a")]}))["id"]
    foreign = await suite_of(stand, theirs, case("a"), name="theirs")
    owner = await member(stand, mine, "developer", "dev@acme.example")

    listed = (await owner.get(f"/admin/v1/tenants/{mine}/eval-suites")).json()["data"]
    assert [(row["name"], row["owner"]) for row in listed] == [("p", "platform")]
    run = await made(
        owner, f"/tenants/{mine}/eval-runs", {"suite_id": platforms, "deployment": BASE}
    )
    assert (run["state"], run["suite"]) == ("queued", "p")
    for path in (f"eval-suites/{foreign}", f"eval-suites/{foreign}/versions/1"):
        answer = await owner.get(f"/admin/v1/tenants/{mine}/{path}")
        error_of(answer, 404, "not_found")
    answer = await owner.post(
        f"/admin/v1/tenants/{mine}/eval-runs", json={"suite_id": foreign, "deployment": BASE}
    )
    error_of(answer, 404, "not_found")
    # The platform's suites are its own to change.
    answer = await owner.delete(f"/admin/v1/tenants/{mine}/eval-suites/{platforms}")
    error_of(answer, 404, "not_found")
    answer = await owner.post("/admin/v1/eval-suites", json={"name": "q", "lines": [case("a")]})
    assert answer.status_code == 403


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({}, 400, "deployment or revision_id"),
        ({"deployment": BASE, "revision_id": f"rev_{'0' * 32}"}, 400, "deployment or revision_id"),
        ({"deployment": "nobody"}, 404, "No such deployment"),
        ({"revision_id": f"rev_{'0' * 32}"}, 404, "No such deployment revision"),
        ({"deployment": BASE, "suite_version": 9}, 404, "No such version"),
        ({"deployment": BASE, "concurrency": 65}, 400, "concurrency"),
        ({"deployment": BASE, "case_timeout_s": 0}, 400, "case_timeout_s"),
        ({"deployment": BASE}, 400, "the case pair compares with a baseline"),
    ],
)
async def test_a_run_that_cannot_be_is_refused(
    stand: Stand, fields: dict[str, Any], status: int, said: str
) -> None:
    tenant = (await stand.tenant("acme"))["id"]
    suite = await suite_of(stand, tenant, case("pair", {"type": "pairwise"}))

    answer = await stand.admin.post(
        f"/admin/v1/tenants/{tenant}/eval-runs", json={"suite_id": suite, **fields}
    )

    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]


async def test_a_run_that_waits_is_cancelled_at_once_and_only_once(stand: Stand) -> None:
    tenant = (await stand.tenant("acme"))["id"]
    run = await started(stand, tenant, await suite_of(stand, tenant, case("a")))

    cancelled = await made(stand.admin, f"/tenants/{tenant}/eval-runs/{run}/cancel", {}, 200)

    assert cancelled["state"] == "cancelled"
    answer = await stand.admin.post(f"/admin/v1/tenants/{tenant}/eval-runs/{run}/cancel")
    error_of(answer, 409, "conflict")
    assert (await ended(stand, tenant, run))["error"] == "cancelled before it began"


async def test_a_schedule_is_changed_by_who_has_read_it(stand: Stand) -> None:
    tenant = (await stand.tenant("acme"))["id"]
    suite = await suite_of(stand, tenant, case("a"))
    path = f"/tenants/{tenant}/eval-schedules"
    body = {"name": "nightly", "suite_id": suite, "deployment": BASE, "cron": "0 3 * * *"}

    schedule = await made(stand.admin, path, body | {"zone": "Europe/Berlin"})

    one = f"/admin/v1{path}/{schedule['id']}"
    etag = (await stand.admin.get(one)).headers["etag"]
    changed = await stand.admin.patch(one, json={"every_hours": 6}, headers={"if-match": etag})
    assert changed.status_code == 200, changed.text
    assert (changed.json()["cron"], changed.json()["every_hours"]) == (None, 6)
    late = await stand.admin.patch(one, json={"is_enabled": False}, headers={"if-match": etag})
    error_of(late, 409, "version_conflict")
    taken = await stand.admin.post(f"/admin/v1{path}", json=body)
    error_of(taken, 409, "conflict")
    for wrong, said in (
        ({"cron": "* * * * *"}, "every 5 minutes"),
        ({"cron": "0 3 * * *", "zone": "Mars/Olympus"}, "zone"),
        ({"cron": "0 3 * * *", "every_hours": 1}, "cron or every_hours"),
    ):
        answer = await stand.admin.patch(one, json=wrong)
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["error"]["message"]
    # A suite that is run by itself is not taken away under it.
    kept = await stand.admin.delete(f"/admin/v1/tenants/{tenant}/eval-suites/{suite}")
    error_of(kept, 409, "conflict")
    assert (await stand.admin.delete(one)).status_code == 204
    gone = await stand.admin.delete(f"/admin/v1/tenants/{tenant}/eval-suites/{suite}")
    assert gone.status_code == 204


async def test_a_schedule_that_is_due_queues_one_run_whatever_it_missed(stand: Stand) -> None:
    tenant = (await stand.tenant("acme"))["id"]
    suite = await suite_of(stand, tenant, case("a"))
    body = {"name": "hourly", "suite_id": suite, "deployment": BASE, "every_hours": 1}
    schedule = await made(stand.admin, f"/tenants/{tenant}/eval-schedules", body)
    later = datetime.now(UTC) + timedelta(days=3)

    async with stand.db.transaction() as session:
        assert await service.start_due(session, later)
    async with stand.db.transaction() as session:
        assert not await service.start_due(session, later)

    path = f"/admin/v1/tenants/{tenant}"
    runs = (await stand.admin.get(f"{path}/eval-runs", params={"state": "queued"})).json()["data"]
    assert [run["schedule_id"] for run in runs] == [schedule["id"]]
    shown = (await stand.admin.get(f"{path}/eval-schedules/{schedule['id']}")).json()
    assert shown["last_run_id"] == runs[0]["id"]
    assert shown["next_at"] == int((later + timedelta(hours=1)).timestamp())


async def test_a_schedule_whose_deployment_is_gone_says_so_and_goes_on(stand: Stand) -> None:
    tenant = (await stand.tenant("acme"))["id"]
    suite = await suite_of(stand, tenant, case("a"))
    await stand.admin.put(f"/admin/v1/tenants/{tenant}/deployments/mine", json={"version_id": None})
    body = {"name": "hourly", "suite_id": suite, "deployment": "mine", "every_hours": 1}
    schedule = await made(stand.admin, f"/tenants/{tenant}/eval-schedules", body)
    await stand.admin.delete(f"/admin/v1/tenants/{tenant}/deployments/mine")

    async with stand.db.transaction() as session:
        assert await service.start_due(session, datetime.now(UTC) + timedelta(hours=2))

    shown = (
        await stand.admin.get(f"/admin/v1/tenants/{tenant}/eval-schedules/{schedule['id']}")
    ).json()
    assert (shown["last_run_id"], shown["last_error"]) == (None, "No such deployment.")


async def test_a_trace_is_numbers_of_ones_own_requests(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    other = await stand.tenant("globex")
    for owner in (tenant, other):
        path = f"/admin/v1/tenants/{owner['id']}/keys"
        key = (await stand.admin.post(path, json={"name": "k"})).json()
        customer = Customer(
            parse_id("tenant", owner["id"]), parse_id("api_key", key["id"]), key["secret"]
        )
        wanted = reservation(customer)
        await metering.reserve(stand.db.sessions, wanted)
        await metering.settle(stand.db.sessions, settlement(wanted.request_id))
    now = int(datetime.now(UTC).timestamp())
    path = f"/admin/v1/tenants/{tenant['id']}/eval-trace"

    answer = await stand.admin.get(
        path, params={"start_time": now - 600, "end_time": now + 60, "keep_models": True}
    )

    assert answer.status_code == 200, answer.text
    [line] = answer.json()["lines"]
    assert set(line) == {"at_s", "prompt_tokens", "completion_tokens", "model"}
    assert line["at_s"] == 0
    body = {"name": "replay", "kind": "performance", "lines": [line], "pace": "none"}
    await made(stand.admin, f"/tenants/{tenant['id']}/eval-suites", body)
    wrong = await stand.admin.get(path, params={"start_time": now, "end_time": now})
    error_of(wrong, 400, "invalid_request")


async def test_what_a_deleted_tenant_asked_is_gone(stand: Stand) -> None:
    tenant = (await stand.tenant("acme"))["id"]
    other = (await stand.tenant("globex"))["id"]
    kept = await suite_of(stand, other, case("a"))
    suite = await suite_of(stand, tenant, case("secret-word", ANY))
    run = await started(stand, tenant, suite)
    body = {"name": "hourly", "suite_id": suite, "deployment": BASE, "every_hours": 1}
    await made(stand.admin, f"/tenants/{tenant}/eval-schedules", body)
    assert (await read(stand, tenant, run))["num_cases"] == 1

    answer = await stand.admin.delete(f"/admin/v1/tenants/{tenant}", params={"confirm": "acme"})

    assert answer.status_code == 200, answer.text
    removed = answer.json()["removed"]
    assert removed["eval_suites"] == removed["eval_runs"] == removed["eval_schedules"] == 1
    async with stand.db.sessions() as session:
        for table in ("eval_suites", "eval_suite_versions", "eval_runs", "eval_schedules"):
            owners = (await session.scalars(text(f"select tenant_id from {table}"))).all()
            assert UUID(hex=tenant.removeprefix("ten_")) not in owners
    shown = await stand.admin.get(f"/admin/v1/tenants/{other}/eval-suites/{kept}")
    assert shown.status_code == 200
