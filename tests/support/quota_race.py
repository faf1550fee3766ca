"""Many clients of one process against one budget, for races between processes."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass
from uuid import UUID

from loraplex_platform.db.session import open_database
from loraplex_platform.metering import service
from loraplex_platform.quotas.errors import QuotaExceededError

from tests.support.metering import Customer, reservation, settlement
from tests.support.postgres import database_settings

_PATIENCE_S = 120.0  # a process may take its time to start


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one process."""

    admitted: int
    refused: int
    paid_pico: int


def race(
    url: str,
    tenant_id: UUID,
    key_id: UUID,
    num_clients: int,
    is_holding: bool,
    barrier: threading.Barrier,
) -> Outcome:
    """Each client asks once, those of all processes at the same time; holding ones settle only when
    everybody has asked."""
    customer = Customer(tenant_id, key_id, "")
    return asyncio.run(_race(url, customer, num_clients, is_holding, barrier))


async def _race(
    url: str, customer: Customer, num_clients: int, is_holding: bool, barrier: threading.Barrier
) -> Outcome:
    async with open_database(database_settings(url, database_pool_size=8)) as db:
        admitted: list[tuple[UUID, int]] = []
        paid: list[int] = []

        async def settle(request_id: UUID, max_tokens: int) -> None:
            generated = random.randint(0, max_tokens)  # not a secret
            result = await service.settle(
                db.sessions, settlement(request_id, usage_generated=generated)
            )
            assert result.applied
            paid.append(result.amount_pico)

        async def ask() -> bool:
            wanted = reservation(customer)
            try:
                reserved = await service.reserve(db.sessions, wanted)
            except QuotaExceededError:
                return False
            admitted.append((wanted.request_id, reserved.max_tokens))
            if not is_holding:
                await settle(wanted.request_id, reserved.max_tokens)
            return True

        await asyncio.to_thread(barrier.wait, _PATIENCE_S)
        answers = await asyncio.gather(*(ask() for _ in range(num_clients)))
        if is_holding:
            await asyncio.to_thread(barrier.wait, _PATIENCE_S)
            await asyncio.gather(*(settle(*one) for one in admitted))
        return Outcome(sum(answers), num_clients - sum(answers), sum(paid))
