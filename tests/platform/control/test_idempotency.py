"""Idempotency-Key on POST."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from loraplex_platform.audit import queries
from loraplex_platform.db import IdempotencyRecord
from loraplex_platform.db.session import DatabaseUnavailableError
from loraplex_platform.tenancy import service as tenancy
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from tests.platform.control.stand import Stand, adapter, error_of
from tests.support.metering import run_sql

KEY = {"idempotency-key": "first-try"}


async def test_the_same_call_again_has_one_effect_and_no_secret(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/keys"

    first = await stand.admin.post(path, json={"name": "a"}, headers=KEY)
    again = await stand.admin.post(path, json={"name": "a"}, headers=KEY)

    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json()["secret"].startswith("lpx_sk_")
    assert again.json() == first.json() | {"secret": None}
    assert again.headers["idempotency-replayed"] == "true"
    assert len((await stand.admin.get(path)).json()["data"]) == 1
    async with stand.db.sessions() as session:
        [record] = (await session.scalars(select(IdempotencyRecord))).all()
    assert first.json()["secret"] not in str(record.response)


async def test_another_body_under_the_same_key_is_refused(stand: Stand) -> None:
    await stand.admin.post("/admin/v1/tenants", json={"slug": "acme"}, headers=KEY)

    refused = await stand.admin.post("/admin/v1/tenants", json={"slug": "b"}, headers=KEY)

    error_of(refused, 422, "idempotency_key_reuse")
    assert refused.headers["x-should-retry"] == "false"


async def test_a_copy_that_comes_while_the_first_runs_waits_its_turn(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()
    create = tenancy.create_tenant

    async def slow(*args: object) -> object:
        entered.set()
        await leave.wait()
        return await create(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(tenancy, "create_tenant", slow)
    body = {"slug": "acme"}
    first = asyncio.create_task(stand.admin.post("/admin/v1/tenants", json=body, headers=KEY))
    await entered.wait()

    second = await stand.admin.post("/admin/v1/tenants", json=body, headers=KEY)
    error_of(second, 409, "idempotency_in_progress")
    leave.set()
    assert (await first).status_code == 201

    third = await stand.admin.post("/admin/v1/tenants", json=body, headers=KEY)
    assert third.json() == (await first).json()


async def test_a_refused_call_leaves_its_key_free(stand: Stand) -> None:
    await stand.tenant("taken")

    for slug, status in (("taken", 409), ("BAD", 400), ("free", 201)):
        answer = await stand.admin.post("/admin/v1/tenants", json={"slug": slug}, headers=KEY)
        assert answer.status_code == status


async def test_a_commit_whose_acknowledgement_was_lost_is_not_done_again(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, commit = queries.finish, AsyncSession.commit
    to_be_lost: list[AsyncSession] = []
    lost: list[AsyncSession] = []

    async def note(session: AsyncSession, *args: Any, **named: Any) -> bool:
        if not lost:
            to_be_lost.append(session)
        return await finish(session, *args, **named)

    async def lose_the_answer(session: AsyncSession) -> None:
        await commit(session)
        if session in to_be_lost and not lost:
            lost.append(session)
            raise DatabaseUnavailableError

    monkeypatch.setattr(queries, "finish", note)
    monkeypatch.setattr(AsyncSession, "commit", lose_the_answer)
    body = {"slug": "acme"}

    first = await stand.admin.post("/admin/v1/tenants", json=body, headers=KEY)
    again = await stand.admin.post("/admin/v1/tenants", json=body, headers=KEY)

    assert len(lost) == 1
    error_of(first, 503, "database_unavailable")
    assert (again.status_code, again.json()["slug"]) == (201, "acme")
    assert again.headers["idempotency-replayed"] == "true"


async def test_a_call_that_lost_its_key_to_a_later_one_has_no_effect_and_leaves_that_one_be(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()
    create = tenancy.create_tenant

    async def slow(*args: object) -> object:
        if not entered.is_set():
            entered.set()
            await leave.wait()
        return await create(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(tenancy, "create_tenant", slow)
    path = "/admin/v1/tenants"
    first = asyncio.create_task(stand.admin.post(path, json={"slug": "first"}, headers=KEY))
    await entered.wait()
    await run_sql(stand.db, "update idempotency set expires_at = now()")
    second = await stand.admin.post(path, json={"slug": "second"}, headers=KEY)
    leave.set()

    error_of(await first, 409, "idempotency_in_progress")
    assert second.status_code == 201
    shown = (await stand.admin.get(path)).json()["data"]
    assert [tenant["slug"] for tenant in shown] == ["second"]
    replay = await stand.admin.post(path, json={"slug": "second"}, headers=KEY)
    assert replay.json() == second.json()


async def test_keys_are_the_callers_own_and_per_route_and_end(stand: Stand) -> None:
    user = await stand.login("admin")
    one = await stand.admin.post("/admin/v1/tenants", json={"slug": "one"}, headers=KEY)
    two = await user.post("/admin/v1/tenants", json={"slug": "two"}, headers=KEY)
    path = f"/admin/v1/tenants/{one.json()['id']}/keys"
    other = await stand.admin.post(path, json={"name": "a"}, headers=KEY)
    assert [a.status_code for a in (one, two, other)] == [201, 201, 201]

    await run_sql(stand.db, "update idempotency set expires_at = now()")
    late = await stand.admin.post("/admin/v1/tenants", json={"slug": "three"}, headers=KEY)
    assert late.status_code == 201
    for bad in ("", "x" * 256, "a\tb"):
        refused = await stand.admin.post(
            "/admin/v1/tenants", json={"slug": "x"}, headers={"idempotency-key": bad}
        )
        assert error_of(refused, 400, "invalid_request")["param"] == "Idempotency-Key"


async def test_an_upload_is_the_same_by_content_whatever_its_boundary(stand: Stand) -> None:
    tenant = await stand.tenant("acme")

    first = await stand.upload(tenant["id"], "a", adapter(), headers=KEY)
    again = await stand.upload(tenant["id"], "a", adapter(), headers=KEY)
    other = await stand.upload(tenant["id"], "b", adapter(), headers=KEY)

    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json()
    assert again.headers["idempotency-replayed"] == "true"
    error_of(other, 422, "idempotency_key_reuse")
