"""What a rollout's side cannot serve at all is on its books, and its gates hear of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import psycopg
import pytest
from loraplex_platform.db import Request, Rollout
from loraplex_platform.db.session import DatabaseUnavailableError
from loraplex_platform.gateway import unserved
from loraplex_platform.ids import uuid7
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.records import REFUSED_BY_REVISION, Refusal
from loraplex_platform.rollouts import looks
from loraplex_platform.rollouts.driver import RolloutDriver
from loraplex_platform.rollouts.gates import GateSettings
from sqlalchemy import select

from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import BASE, Stand
from tests.platform.gateway.test_rollouts import Deployed
from tests.platform.rollouts.stand import ERRORS_ONLY, Servable, canary
from tests.support import rollouts
from tests.support.limits import set_limit, use_of
from tests.support.metering import run_sql

pytestmark = pytest.mark.asyncio(loop_scope="package")

BUILD = "sha256:" + "b" * 64


async def unservable(stand: Stand, db_url: str, cause: str) -> dict[str, Any]:
    """What a revision says that no request can be served by."""
    if cause == "build gone":
        return {"engine_build_id": await rollouts.add_build(stand.db, BASE, BUILD)}
    if cause == "no price":
        book_id = uuid7()
        with psycopg.connect(db_url) as owner:
            # As one that was in force long ago: a trigger lets none begin but as a draft.
            owner.execute("set session_replication_role = replica")
            owner.execute(
                "insert into price_books (id, name, status, effective_from, effective_to, published_at) values"
                " (%s, 'without prices', 'published', '2010-01-01', '2010-01-02', '2010-01-01')",
                [book_id],
            )
        return {"price_book_id": book_id}
    return {"params": {"temperature": "hot"}}


async def without_build(stand: Stand, **values: Any) -> tuple[Deployed, UUID]:
    """A rollout to a build that no replica has."""
    build_id = await rollouts.add_build(stand.db, BASE, BUILD)
    deployed = await Deployed.make(stand, engine_build_id=build_id)
    return deployed, await deployed.roll_out(**values)


async def rows_of(stand: Stand, rollout_id: UUID) -> Sequence[Request]:
    await stand.settled()
    async with stand.db.sessions() as session:
        statement = select(Request).where(Request.rollout_id == rollout_id).order_by(Request.id)
        return (await session.scalars(statement)).all()


@pytest.mark.parametrize(
    ("cause", "status", "code"),
    [
        ("build gone", 503, "engine_unavailable"),
        ("no price", 503, "no_price"),
        pytest.param("params unreadable", 500, "revision_invalid", marks=pytest.mark.slow),
    ],
)
async def test_a_canary_that_can_serve_nobody_is_aborted(
    own_stand: Stand, db_url: str, cause: str, status: int, code: str
) -> None:
    stand = own_stand
    deployed = await Deployed.make(stand, **await unservable(stand, db_url, cause))
    rollout_id = await deployed.roll_out(weight_bp=5_000, step=0)
    gate = {
        "gates": GateSettings.model_validate(ERRORS_ONLY).model_dump(),
        "promotion": "automatic",
        "warnings": [],
    }
    await rollouts.change_rollout(
        stand.db, rollout_id, gate=gate, steps=[canary(5_000, hold_s=3_600)]
    )
    client = stand.http()
    statuses = [
        (await deployed.ask(client, user=f"user-{number}")).status_code for number in range(100)
    ]
    rows = await rows_of(stand, rollout_id)
    refused = [row for row in rows if row.state == "voided"]
    assert len(rows) == 100
    assert len(refused) == statuses.count(status) > 20
    assert {(row.arm, row.http_status, row.error_code) for row in refused} == {
        ("canary", status, code)
    }
    assert {row.arm for row in rows if row.state == "settled"} == {"stable"}
    plan = GateSettings.model_validate(ERRORS_ONLY).plan("canary", 1)
    found = await looks.look(stand.db.sessions, rollout_id, 0, "canary", plan)
    assert (found.canary.share_of("error"), found.stable.share_of("error")) == (1.0, 0.0)
    assert found.canary.num_subjects == len(refused)

    driver = RolloutDriver(
        stand.db.sessions, Servable(), least_interval_s=0.0, cost_share=math.inf, patience_s=0.0
    )
    await driver.run_once()

    async with stand.db.sessions() as session:
        rollout = await session.get_one(Rollout, rollout_id)
    assert (rollout.state, rollout.weight_bp) == ("aborted", 0)
    assert (await deployed.ask()).status_code == 200
    await stand.check_books()


async def test_the_note_says_whose_it_was_and_costs_nothing(own_stand: Stand) -> None:
    stand = own_stand
    deployed, rollout_id = await without_build(stand, weight_bp=10_000, step=3)
    limit_id = await set_limit(stand.db, stand.customer, "requests", "1")

    for stream in (False, True):
        assert (await deployed.ask(stream=stream)).status_code == 503

    rows = await rows_of(stand, rollout_id)
    assert [row.is_stream for row in rows] == [False, True]
    for row in rows:
        assert (row.state, row.kind, row.arm, row.rollout_step) == ("voided", "user", "canary", 3)
        assert (row.tenant_id, row.key_id) == (stand.customer.tenant_id, stand.customer.key_id)
        assert (row.revision_id, row.deployment_id) == (deployed.canary_id, deployed.id)
        assert (row.model, row.endpoint) == (deployed.name, "chat.completions")
        assert row.subject_key is not None
        assert (row.est_pico, row.windows, row.prompt_tokens) == (0, [], None)
    assert await use_of(stand.db, limit_id) == (0, 0)
    await stand.check_books()


async def test_refusals_that_only_the_canary_gives_are_its_errors(stand: Stand) -> None:
    deployed = await Deployed.make(stand, params={"system_prompt": "verse " * 2_000})
    rollout_id = await deployed.roll_out(weight_bp=10_000)

    own = await deployed.ask()
    both = [await deployed.ask(max_tokens=10**6), await deployed.ask(temperature=99)]

    assert (own.status_code, own.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert [answer.status_code for answer in both] == [400, 400]
    [row] = await rows_of(stand, rollout_id)
    assert (row.arm, row.state) == ("canary", "voided")
    assert (row.http_status, row.error_code) == (400, REFUSED_BY_REVISION)
    found = await looks.look(stand.db.sessions, rollout_id, 1, "canary", None)
    assert (found.canary.sum_of("error").num_requests, found.canary.share_of("error")) == (1, 1.0)


async def test_a_smaller_context_of_the_canarys_build_is_its_error(stand: Stand) -> None:
    """Without a replica of it the context is not known, so that it is its prompt that is too long here."""
    deployed = await Deployed.make(
        stand, params={"system_prompt": "a " * (tiny_model.CONTEXT_LENGTH // 4)}
    )
    rollout_id = await deployed.roll_out(weight_bp=10_000)

    fits = await deployed.ask(max_tokens=2)
    too_long = await deployed.ask(max_tokens=tiny_model.CONTEXT_LENGTH - 60)

    assert (fits.status_code, too_long.status_code) == (200, 400)
    rows = await rows_of(stand, rollout_id)
    assert [row.error_code for row in rows] == [None, REFUSED_BY_REVISION]


async def test_nothing_is_written_outside_of_a_rollout(stand: Stand) -> None:
    build_id = await rollouts.add_build(stand.db, BASE, "sha256:" + "e" * 64)
    deployed = await Deployed.make(stand, engine_build_id=build_id)
    await rollouts.add_pin(stand.db, stand.customer.tenant_id, deployed.id, deployed.canary_id)

    answer = await deployed.ask()

    assert answer.status_code == 503
    await stand.settled()
    async with stand.db.sessions() as session:
        rows = await session.scalars(select(Request).where(Request.deployment_id == deployed.id))
        assert rows.all() == []


async def test_a_failing_database_changes_nothing_for_the_client(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> bool:
        raise DatabaseUnavailableError

    monkeypatch.setattr(unserved.metering, "note_refusal", fails)
    build_id = await rollouts.add_build(stand.db, BASE, "sha256:" + "d" * 64)
    deployed = await Deployed.make(stand, engine_build_id=build_id)
    rollout_id = await deployed.roll_out(weight_bp=10_000)
    registry = stand.gateway.metrics.registry
    name, labels = "loraplex:gateway_rollout_unserved_total", {"outcome": "failed"}
    before = registry.get_sample_value(name, labels) or 0.0

    answer = await deployed.ask()

    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert await rows_of(stand, rollout_id) == []
    assert registry.get_sample_value(name, labels) == before + 1


async def test_a_key_that_would_not_be_admitted_leaves_no_note(own_stand: Stand) -> None:
    stand = own_stand
    deployed, rollout_id = await without_build(stand, weight_bp=10_000)
    await deployed.ask()
    [row] = await rows_of(stand, rollout_id)
    refusal = Refusal(
        request_id=uuid7(),
        **{
            field.name: getattr(row, field.name)
            for field in dataclasses.fields(Refusal)
            if field.name != "request_id"
        },
    )
    revoke = "update api_keys set status = 'revoked', revoked_at = now() where id = :id"

    assert await metering.note_refusal(stand.db.sessions, refusal)
    assert not await metering.note_refusal(stand.db.sessions, refusal)  # once is enough
    await run_sql(stand.db, revoke, id=stand.customer.key_id)
    again = dataclasses.replace(refusal, request_id=uuid7())
    assert not await metering.note_refusal(stand.db.sessions, again)
    assert len(await rows_of(stand, rollout_id)) == 2
