"""Many clients of one process against one budget, for races between processes (see `Peer`).

It is told a `Race`, says "ready", is told to ask; if it holds, says "asked" and is told to settle; and says
its `Outcome`.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any
from uuid import UUID

import msgspec
from loraplex_platform.db.session import open_database
from loraplex_platform.logs import configure_logging
from loraplex_platform.metering import service
from loraplex_platform.quotas.errors import QuotaExceededError

from tests.support.metering import Customer, reservation, settlement
from tests.support.postgres import database_settings


class Race(msgspec.Struct, frozen=True):
    """What one process does: each client asks once, those of all processes at the same time; holding
    ones settle only when everybody has asked."""

    database_url: str
    tenant_id: UUID
    key_id: UUID
    num_clients: int
    is_holding: bool


class Outcome(msgspec.Struct, frozen=True):
    """Of one process."""

    admitted: int
    refused: int
    paid_pico: int


async def _say(value: Any) -> None:
    """One line out; returns at the next one in."""
    print(msgspec.json.encode(value).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.readline)


async def _run(race: Race) -> Outcome:
    customer = Customer(race.tenant_id, race.key_id, "")
    async with open_database(database_settings(race.database_url, database_pool_size=8)) as db:
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
            if not race.is_holding:
                await settle(wanted.request_id, reserved.max_tokens)
            return True

        await _say("ready")
        answers = await asyncio.gather(*(ask() for _ in range(race.num_clients)))
        if race.is_holding:
            await _say("asked")
            await asyncio.gather(*(settle(*one) for one in admitted))
        return Outcome(sum(answers), race.num_clients - sum(answers), sum(paid))


if __name__ == "__main__":
    configure_logging("info", "json")  # to stderr: stdout is for the lines
    told = msgspec.json.decode(sys.stdin.readline(), type=Race)
    print(msgspec.json.encode(asyncio.run(_run(told))).decode(), flush=True)
