"""An engine's own server process behind gateways of this process, and the books of both when all is quiet."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

from loraplex_engine.client import EngineClient
from loraplex_engine.protocol import EngineStats
from loraplex_platform.db import EngineUsage, Request
from loraplex_platform.db.session import Database
from loraplex_platform.gateway.context import Gateway
from loraplex_platform.metering.invariants import check_invariants
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert

from tests.platform.gateway.stand import BASE, eventually

REPLICA = "engine-tests"


@contextlib.asynccontextmanager
async def engine_process(
    folder: Path, model: Path, redis_url: str, *flags: str
) -> AsyncIterator[str]:
    """A running engine; its address. It must end well."""
    async with start_engine(folder, model, redis_url, *flags) as engine:
        yield engine.address
        assert engine.process.returncode is None, engine.last_words


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine's process. Started again in the same folder it has the same journal."""

    process: asyncio.subprocess.Process
    address: str
    log: Path

    @property
    def last_words(self) -> str:
        return self.log.read_text()[-3_000:]

    async def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        await self.process.wait()


@contextlib.asynccontextmanager
async def start_engine(
    folder: Path, model: Path, redis_url: str, *flags: str, replica_id: str = REPLICA
) -> AsyncIterator[RunningEngine]:
    """A running engine that must end well, unless it was killed."""
    await asyncio.to_thread(folder.mkdir, mode=0o700, exist_ok=True)
    address = f"ipc://{folder}/engine.sock"
    log = folder / "engine.log"
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loraplex_engine.server"),
            *("--model-dir", str(model), "--base-model", BASE, "--replica-id", replica_id),
            *("--address", address, "--journal-dir", str(folder / "journal")),
            *("--redis-url", redis_url, "--num-threads", "1", "--die-with-parent", *flags),
            stdout=output,
            stderr=output,
        )
    engine = RunningEngine(process, address, log)
    try:
        yield engine
    finally:
        if process.returncode is None:
            process.terminate()
        assert await process.wait() in (0, -signal.SIGKILL), engine.last_words


async def check_quiet(
    db: Database, gateways: Sequence[Gateway], engine: EngineClient
) -> EngineStats:
    """Nothing runs, nothing is held, and the books balance to the token."""
    for gateway in gateways:
        await eventually(
            lambda gateway=gateway: gateway.pumps.num_live == 0,
            "every request ended",
            deadline_s=60,
        )

    async def is_idle() -> bool:
        stats = await engine.stats()
        return stats.num_running == stats.num_waiting == 0

    await eventually(is_idle, "the engine is idle", deadline_s=60)
    stats = await engine.stats()
    assert stats.kv_blocks_free == stats.kv_blocks_total
    assert stats.adapter_leases == 0
    async with db.sessions() as session:
        states = set((await session.scalars(select(Request.state))).all())
    assert states <= {"settled", "voided"}
    await _land_journal(db, engine)
    report = await check_invariants(db.sessions)
    assert report.ok, [check for check in report.checks if not check.ok]
    assert report.identity.difference == 0
    return stats


async def _land_journal(db: Database, engine: EngineClient) -> None:
    """As the worker does."""
    last_seq = 0
    while entries := (await engine.read_journal(last_seq)).entries:
        last_seq = entries[-1].seq
        rows = [
            {
                "request_id": UUID(entry.request_id),
                "attempt": entry.attempt,
                "replica_id": REPLICA,
                "tenant_id": UUID(entry.tenant_id),
                "adapter_digest": entry.adapter_digest,
                "finish_reason": entry.finish_reason,
                "prompt_tokens": entry.usage.prompt_tokens,
                "cached_tokens": entry.usage.cached_tokens,
                "completion_tokens": entry.usage.completion_tokens,
                "ended_at": datetime.fromtimestamp(entry.ended_at_unix_s, UTC),
            }
            for entry in entries
        ]
        async with db.transaction() as session:
            await session.execute(insert(EngineUsage).values(rows))
