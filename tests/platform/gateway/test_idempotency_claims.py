"""Whom an Idempotency-Key stands for, whatever becomes of gateways."""

from __future__ import annotations

from uuid import UUID

import pytest
from loraplex_platform.db import IdempotentRequest
from loraplex_platform.db.session import Database
from loraplex_platform.errors import ConflictError
from loraplex_platform.gateway.idempotency import KEEP, Retries
from loraplex_platform.gateway.idempotency_queries import Claim
from loraplex_platform.metering import service as metering
from pydantic import SecretStr
from sqlalchemy import func, select

from tests.support.metering import add_customer, reservation, run_sql, settlement


async def test_a_claim_follows_the_fate_of_its_request(db: Database) -> None:
    """Reserved, voided, absorbed, billed, expired; no gateway is there to let go of it."""
    customer = await add_customer(db)
    retries = Retries(db.sessions, SecretStr("salt"))
    claim = Claim(customer.tenant_id, customer.key_id, "completions", b"k" * 32, b"f" * 32)

    async def reserve() -> UUID:
        mine = reservation(customer)
        await metering.reserve(db.sessions, mine)
        return mine.request_id

    first, second, third, fourth = [await reserve() for _ in range(4)]
    await retries.claim(claim, first)
    await retries.claim(claim, first)  # as after a lost acknowledgement
    with pytest.raises(ConflictError) as running:
        await retries.claim(claim, second)
    assert running.value.error_code == "idempotency_in_progress"
    await metering.void(db.sessions, first, 1, voided_by="sweeper")
    await retries.claim(claim, second)
    await metering.settle(db.sessions, settlement(second, usage_outcome="fault"))
    await retries.claim(claim, third)
    await metering.settle(db.sessions, settlement(third))
    with pytest.raises(ConflictError) as billed:
        await retries.claim(claim, fourth)
    assert billed.value.error_code == "idempotency_completed"
    await run_sql(
        db,
        "update idempotent_requests set expires_at = now() where tenant_id = :tenant_id",
        tenant_id=customer.tenant_id,
    )
    await retries.claim(claim, fourth)
    async with db.sessions() as session:
        row = await session.get_one(
            IdempotentRequest, (customer.tenant_id, customer.key_id, "completions", b"k" * 32)
        )
        now = (await session.execute(select(func.now()))).scalar_one()
    assert row.request_id == fourth
    assert (
        KEEP.total_seconds() - 60 < (row.expires_at - now).total_seconds() <= KEEP.total_seconds()
    )
