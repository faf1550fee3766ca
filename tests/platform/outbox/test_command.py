from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from loraplex_platform.outbox import service

from tests.support.metering import run_sql
from tests.support.postgres import serving_url

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database


def outbox(url: str, *arguments: str) -> tuple[int, str, str]:
    """As a process of its own, as a person runs it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
    result = subprocess.run(
        [sys.executable, "-m", "loraplex_platform.cli", "outbox", *arguments],
        env=clean | {"LORAPLEX_DATABASE_URL": url, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout, result.stderr


async def test_what_waits_and_what_was_given_up_is_shown_and_revived(
    db: Database, db_url: str
) -> None:
    async with db.transaction() as session:
        for key in ("a", "b", "c"):
            await service.enqueue(session, "news", key, {})
    await run_sql(db, "update outbox set dead_at = now(), tries = 12 where dedupe_key <> 'c'")

    async def run(*arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(outbox, serving_url(db_url), *arguments)

    def topics(text: str) -> list[Any]:
        return [
            {k: v for k, v in one.items() if k != "oldest_s"} for one in json.loads(text)["topics"]
        ]

    code, shown, _ = await run()
    _, before, _ = await run("--json")
    _, revived, _ = await run("--revive", "news", "--json")

    assert code == 0
    assert shown.splitlines()[0].split() == ["TOPIC", "WAITING", "GIVEN", "UP", "OLDEST"]
    assert shown.splitlines()[1].split()[:3] == ["news", "1", "2"]
    assert topics(before) == [{"topic": "news", "waiting": 1, "dead": 2}]
    assert json.loads(revived)["revived"] == 2
    assert topics(revived) == [{"topic": "news", "waiting": 3, "dead": 0}]


def test_a_database_that_is_away_is_said_in_a_line() -> None:
    code, out, error = outbox("postgresql://x@/x?host=/nowhere")

    assert (code, out) == (1, "")
    assert "not available" in error
    assert "Traceback" not in error
