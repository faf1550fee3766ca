"""A rollout on three real gateway processes: one answer for a subject, at once, and a quiet end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import httpx
from loraplex_platform.db import Request
from loraplex_platform.db.session import open_database
from loraplex_platform.gateway.copying import PRIORITY
from loraplex_platform.ids import parse_id
from loraplex_platform.rollouts.assignment import chooses_canary, subject_of
from sqlalchemy import select

from tests.platform.gateway import tiny_model
from tests.platform.gateway.gateway_process import GatewayProcess, gateway_process
from tests.platform.gateway.stand import (
    BASE,
    add_base,
    announce,
    check_invariants,
    deploy,
    eventually,
)
from tests.support import rollouts
from tests.support.fake_engine import FakeEngine, Script
from tests.support.metering import Customer, add_customer
from tests.support.postgres import database_settings, serving_url
from tests.support.rollouts import SALT

USERS = [f"user-{number}" for number in range(40)]


async def _revisions(
    gateway: GatewayProcess, customer: Customer, users: Sequence[str] = USERS
) -> list[UUID]:
    """Who answers each of them there."""
    async with httpx.AsyncClient(
        base_url=gateway.url, headers={"authorization": f"Bearer {customer.secret}"}, timeout=60
    ) as client:

        async def ask(user: str) -> UUID:
            body = {"model": BASE, "prompt": "x", "max_tokens": 1, "user": user}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return parse_id("deployment_revision", answer.headers["x-loraplex-revision"])

        return list(await asyncio.gather(*map(ask, users)))


async def test_gateways_agree_at_every_weight_and_after_a_restart(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        db = await enter(open_database(database_settings(serving_url(db_url))))
        engine = await enter(
            FakeEngine(short_tmp_path, max_model_len=tiny_model.CONTEXT_LENGTH, vocab_size=400)
        )
        customer = await add_customer(db)
        deployment_id = await deploy(db, await add_base(db), None, BASE)
        stable_id = await rollouts.current_revision(db, deployment_id)
        canary_id = await rollouts.add_revision(db, deployment_id)
        rollout_id = await rollouts.add_rollout(db, deployment_id, canary_id)
        announce(redis_url, engine)
        starting = [
            enter(gateway_process(db_url, redis_url, short_tmp_path / f"gw{number}"))
            for number in range(3)
        ]
        gateways = [await start for start in starting]

        def expected(weight_bp: int) -> list[UUID]:
            subjects = [
                subject_of("user", tenant_id=customer.tenant_id, key_id=customer.key_id, user=user)
                for user in USERS
            ]
            return [
                canary_id if chooses_canary(SALT, subject, weight_bp) else stable_id
                for subject in subjects
            ]

        for weight_bp in (0, 1_000, 5_000, 10_000):
            await rollouts.change_rollout(db, rollout_id, weight_bp=weight_bp)
            for gateway in gateways:
                assert await _revisions(gateway, customer) == expected(weight_bp)

        # A weight that was raised holds everywhere with the next request.
        await rollouts.change_rollout(db, rollout_id, weight_bp=0)
        await rollouts.change_rollout(db, rollout_id, weight_bp=10_000)
        began_s = time.monotonic()
        first = await asyncio.gather(
            *(_revisions(gateway, customer, USERS[:1]) for gateway in gateways)
        )
        took_s = time.monotonic() - began_s
        assert first == [[canary_id]] * 3
        assert took_s < 10, "an answer, and no waiting for news"

        await rollouts.change_rollout(db, rollout_id, weight_bp=5_000)
        gateways[0].process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(gateways[0].process.wait(), 60) == 0
        another = await enter(gateway_process(db_url, redis_url, short_tmp_path / "gw3"))
        assert await _revisions(another, customer) == expected(5_000)
        assert await _revisions(gateways[1], customer) == expected(5_000)
        await check_invariants(db, engine)


async def test_sigterm_gives_up_a_shadow_that_hangs_and_closes_its_books(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    async with (
        open_database(database_settings(serving_url(db_url))) as db,
        FakeEngine(
            short_tmp_path, max_model_len=tiny_model.CONTEXT_LENGTH, vocab_size=400
        ) as engine,
    ):
        customer = await add_customer(db)
        deployment_id = await deploy(db, await add_base(db), None, BASE)
        canary_id = await rollouts.add_revision(db, deployment_id)
        await rollouts.add_rollout(
            db, deployment_id, canary_id, state="shadow", shadow_bp=10_000, score_bp=10_000
        )
        announce(redis_url, engine)
        engine.script_for = lambda sent: Script(never_answers=sent.priority == PRIORITY)
        starting = gateway_process(db_url, redis_url, short_tmp_path / "gw", drain_grace_s=60)
        async with starting as gateway:
            await _revisions(gateway, customer, USERS[:1])
            # The shadow of the request, and the score of its answer.
            await eventually(lambda: engine.num_running == 2, "copies under way")

            began_s = time.monotonic()
            gateway.process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(gateway.process.wait(), 60) == 0

            assert time.monotonic() - began_s < 30  # it has not used up its grace
            async with db.sessions() as session:
                rows = list(await session.scalars(select(Request).order_by(Request.id)))
        assert [(row.kind, row.state) for row in rows] == [
            ("user", "settled"),
            ("shadow", "settled"),
            ("shadow", "settled"),
        ]
        assert engine.num_running == 0
        await check_invariants(db, engine)
