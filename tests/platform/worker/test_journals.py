from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loraplex_engine.protocol import JournalEntry, Usage
from loraplex_platform.db import EngineUsage, JournalCursor
from loraplex_platform.ids import uuid7
from loraplex_platform.worker import journals, queries
from loraplex_platform.worker.journals import JournalPuller
from sqlalchemy import exc, select

from tests.support.engines import connected
from tests.support.fake_engine import FakeEngine

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database


@pytest.fixture
async def engine(short_tmp_path: Path) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(short_tmp_path, replica_id="replica-1") as fake:
        yield fake


def write(engine: FakeEngine, count: int, **changes: object) -> None:
    for _ in range(count):
        values: dict[str, object] = {
            "seq": len(engine.journal) + 1,
            "request_id": str(uuid7()),
            "attempt": 1,
            "lease_token": 1,
            "tenant_id": str(uuid7()),
            "adapter_digest": None,
            "finish_reason": "length",
            "usage": Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=1),
            "ended_at_unix_s": 1_764_000_000.5,
        }
        engine.journal.append(JournalEntry(**values | changes))  # type: ignore[arg-type] # as said


async def landed(db: Database) -> list[EngineUsage]:
    async with db.sessions() as session:
        return list(await session.scalars(select(EngineUsage).order_by(EngineUsage.request_id)))


async def test_entries_land_once_over_several_pages_and_rounds(
    db: Database, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "PAGE", 4)
    write(engine, 10)

    async with connected(engine) as engines:
        puller = JournalPuller(db.sessions, engines)
        first = await puller.pull_once()
        write(engine, 3)
        rest = [await puller.pull_once(), await puller.pull_once()]
        # Another worker, or this one after a restart, goes on where the cursor is.
        again = await JournalPuller(db.sessions, engines).pull_once()

    rows = await landed(db)
    assert (first, rest, again, len(rows)) == (10, [3, 0], 0, 13)
    assert (rows[0].prompt_tokens, rows[0].cached_tokens, rows[0].completion_tokens) == (3, 1, 5)
    assert rows[0].ended_at.timestamp() == 1_764_000_000.5


async def test_a_new_journal_is_read_from_its_start(db: Database, engine: FakeEngine) -> None:
    write(engine, 5)
    async with connected(engine) as engines:
        puller = JournalPuller(db.sessions, engines)
        await puller.pull_once()
        engine.journal.clear()
        engine.journal_id = "another"
        write(engine, 2)

        await puller.pull_once()
        await puller.pull_once()

    assert len(await landed(db)) == 7
    async with db.sessions() as session:
        cursors = (await session.scalars(select(JournalCursor))).all()
    assert sorted(cursor.last_seq for cursor in cursors) == [2, 5]


async def test_a_malformed_entry_does_not_stop_those_behind_it(
    db: Database, engine: FakeEngine
) -> None:
    write(engine, 1)
    write(engine, 1, request_id="not-a-uuid")
    write(engine, 1, tenant_id="")
    write(engine, 1)

    async with connected(engine) as engines:
        assert await JournalPuller(db.sessions, engines).pull_once() == 4

    assert len(await landed(db)) == 2


@pytest.mark.parametrize(
    "bad",
    [
        {"usage": Usage(prompt_tokens=3, completion_tokens=2**63)},
        {"ended_at_unix_s": 1e20},
        {"adapter_digest": "x" * 100},
        {"adapter_digest": "x\0"},
        {"attempt": 2**40},
    ],
)
async def test_an_entry_that_postgres_refuses_stops_nothing_but_itself(
    db: Database, engine: FakeEngine, bad: dict[str, object]
) -> None:
    write(engine, 2)
    write(engine, 1, **bad)
    write(engine, 2)
    write(engine, 1, **bad)
    skipped: list[int] = []

    async with connected(engine) as engines:
        puller = JournalPuller(db.sessions, engines, on_skipped=lambda: skipped.append(1))
        await puller.pull_once()
        write(engine, 1)
        assert await puller.pull_once() == 1

    assert (len(await landed(db)), len(skipped)) == (5, 2)


async def test_a_failure_that_may_pass_skips_nothing(
    db: Database, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(engine, 3)

    async def fail(*_: object) -> None:
        raise exc.OperationalError("insert", {}, Exception("out of memory"))

    async with connected(engine) as engines:
        puller = JournalPuller(db.sessions, engines)
        with monkeypatch.context() as patch:
            patch.setattr(queries, "land_entries", fail)
            with pytest.raises(exc.OperationalError):
                await puller.pull_once()
        assert await puller.pull_once() == 3

    assert len(await landed(db)) == 3


async def test_two_pullers_at_once_land_everything_once(db: Database, engine: FakeEngine) -> None:
    write(engine, 50)

    async with connected(engine) as engines, connected(engine) as others:
        await asyncio.gather(
            JournalPuller(db.sessions, engines).pull_once(),
            JournalPuller(db.sessions, others).pull_once(),
        )

    assert len(await landed(db)) == 50


async def test_a_replica_that_does_not_answer_does_not_hold_up_the_others(
    db: Database, engine: FakeEngine, short_tmp_path: Path
) -> None:
    write(engine, 2)
    async with (
        FakeEngine(short_tmp_path, replica_id="replica-0") as silent,
        connected(silent, engine) as engines,
    ):
        await silent.crash()

        assert await JournalPuller(db.sessions, engines).pull_once() == 2
