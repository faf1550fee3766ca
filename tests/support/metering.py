"""Tenants, keys and requests for tests of what meters, bills and sweeps."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from loraplex_platform.db import ApiKey, ApiKeySecret, Attempt, LedgerEntry, Request, Tenant
from loraplex_platform.db.session import Database
from loraplex_platform.ids import uuid7
from loraplex_platform.metering.policy import AttemptUsage
from loraplex_platform.metering.records import Reservation, Settlement
from loraplex_platform.tenancy import keys
from pydantic import SecretStr
from sqlalchemy import select, text

PEPPER = SecretStr("pepper-for-tests-0123456789abcdefgh")


@dataclass(frozen=True, slots=True)
class Customer:
    """A tenant with one key."""

    tenant_id: UUID
    key_id: UUID
    secret: str


async def add_customer(
    db: Database, slug: str = "acme", *, expires_at: datetime | None = None
) -> Customer:
    """A tenant and its key, committed."""
    minted = keys.mint()
    tenant = Tenant(id=uuid7(), slug=slug, name=slug)
    key = ApiKey(
        id=uuid7(),
        tenant_id=tenant.id,
        name="test",
        public_id=minted.public_id,
        last4=minted.last4,
        expires_at=expires_at,
    )
    async with db.transaction() as session:
        session.add(tenant)
        await session.flush()
        session.add(key)
        await session.flush()
        session.add(ApiKeySecret(id=uuid7(), key_id=key.id, mac=keys.mac(PEPPER, minted.secret)))
    return Customer(tenant.id, key.id, minted.secret)


async def run_sql(db: Database, statement: str, **parameters: Any) -> None:
    """One statement, as the runtime role, committed."""
    async with db.transaction() as session:
        await session.execute(text(statement), parameters)


async def rows_of(
    db: Database, request_id: UUID
) -> tuple[Request, list[Attempt], list[LedgerEntry]]:
    """Everything there is about a request."""
    async with db.sessions() as session:
        request = await session.get_one(Request, request_id)
        attempts = await session.scalars(
            select(Attempt).where(Attempt.request_id == request_id).order_by(Attempt.attempt)
        )
        ledger = await session.scalars(
            select(LedgerEntry).where(LedgerEntry.entry_id == request_id).order_by(LedgerEntry.kind)
        )
        return request, list(attempts), list(ledger)


def reservation(customer: Customer, **changes: Any) -> Reservation:
    """A plausible request of the customer's."""
    values: dict[str, Any] = {
        "request_id": uuid7(),
        "tenant_id": customer.tenant_id,
        "key_id": customer.key_id,
        "endpoint": "chat.completions",
        "model": "smollm2-135m",
        "owner": "gw-1",
        "replica_id": "replica-1",
        "est_prompt_tokens": 10,
        "est_completion_tokens": 100,
    }
    return Reservation(**values | changes)


def settlement(request_id: UUID, lease_token: int = 1, **changes: Any) -> Settlement:
    """Ten prompt tokens in, twenty out, all of them delivered; `usage_*` changes the usage."""
    usage: dict[str, Any] = {
        "outcome": "completed",
        "source": "terminal",
        "prompt_tokens": 10,
        "generated": 20,
    }
    usage |= {k.removeprefix("usage_"): v for k, v in changes.items() if k.startswith("usage_")}
    rest = {k: v for k, v in changes.items() if not k.startswith("usage_")}
    return Settlement(
        request_id=request_id,
        lease_token=lease_token,
        usage=AttemptUsage(**usage),
        **{"settled_by": "gw-1", "finish_reason": "stop", "http_status": 200} | rest,
    )
