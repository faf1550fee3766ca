from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import msgspec
import psycopg
import pytest
import redis
from loraplex_engine.client import EngineClient
from loraplex_engine.protocol import REPLICA_KEY_PREFIX, Generate, SamplingParams
from loraplex_platform.db.session import DatabaseUnavailableError
from loraplex_platform.metering import service
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.settings import WorkerSettings
from loraplex_platform.worker import main
from loraplex_platform.worker.loops import Loop, LoopMetrics
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from sqlalchemy import text
from structlog.testing import capture_logs

from tests.support.engines import replica_record
from tests.support.fake_engine import FakeEngine, Script
from tests.support.metering import add_customer, reservation, run_sql
from tests.support.postgres import serving_url, until_in_statement

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database

    from tests.support.postgres import PostgresServer

_RUN = """
import sys
from pathlib import Path
from loraplex_platform.settings import WorkerSettings
from loraplex_platform.worker.main import run
code = run(WorkerSettings(), port_file=Path(sys.argv[1]))
assert not {"torch", "transformers", "peft"} & set(sys.modules)
sys.exit(code)
"""


@contextmanager
def worker(folder: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process; its log is in `folder/log`, its port in `folder/port`."""
    variables = {f"LORAPLEX_{name.upper()}": value for name, value in env.items()}
    with (folder / "log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN, str(folder / "port")],
            env={**os.environ, **variables},
            stderr=output,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, "the worker has ended"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def events(folder: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (folder / "log").read_text().splitlines()]


async def test_a_worker_finds_the_engine_settles_and_ends_in_order(
    db: Database, db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    customer = await add_customer(db)
    wanted = reservation(customer)
    await service.reserve(db.sessions, wanted)
    async with FakeEngine(
        short_tmp_path, replica_id="replica-1", script=Script(token_ids=range(7))
    ) as engine:
        async with EngineClient(engine.address, gateway_id="gw-1") as client:
            await client.connect()
            request = Generate(
                request_id=str(wanted.request_id),
                attempt=1,
                lease_token=1,
                tenant_id=str(customer.tenant_id),
                tenant_salt=b"salt",
                prompt_token_ids=list(range(10)),
                sampling=SamplingParams(max_tokens=100),
            )
            async for _ in await client.generate(request):
                pass
        await run_sql(db, "update requests set lease_until = now() - interval '1 min'")
        notices = redis.Redis.from_url(redis_url)
        notices.set(
            REPLICA_KEY_PREFIX + "replica-1", msgspec.json.encode(replica_record(engine)), ex=60
        )
        notices.close()

        with (
            worker(
                short_tmp_path, database_url=serving_url(db_url), redis_url=redis_url
            ) as process,
            psycopg.connect(db_url, autocommit=True) as owner,
        ):
            # The engine lives in this event loop: waiting must not block it.
            def is_done() -> bool:
                found = owner.execute(
                    "select (select state from requests), (select count(*) from engine_usage),"
                    " (select count(*) from replicas),"
                    " (select count(last_used_at) from api_keys)"
                ).fetchone()
                return found == ("settled", 1, 1, 1)

            await asyncio.to_thread(until, is_done, process)
            port = (short_tmp_path / "port").read_text().strip()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                live = await http.get("/live")
                metrics = (await http.get("/metrics")).text
            process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(process.wait, 30)

    report = await check_invariants(db.sessions)
    assert (live.status_code, live.json()) == (200, {"status": "ok", "stuck": []})
    assert 'loraplex:worker_swept_total{verdict="settled"} 1.0' in metrics
    assert "loraplex:worker_journal_entries_total 1.0" in metrics
    assert (code, report.ok, report.identity.absorbed) == (0, True, 7)
    assert "loop_failed" not in events(short_tmp_path)
    assert events(short_tmp_path)[-1] == "worker_stopped"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_worker_refuses_a_database_that_is_down_or_not_migrated(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setattr(main, "configure_logging", lambda *_: None)
    monkeypatch.setattr(main, "PATIENCE_S", 0.0)
    with postgres_server.empty() as url, capture_logs() as logs:
        settings = WorkerSettings(
            database_url=SecretStr(url if is_there else "postgresql://x@/x?host=/nowhere")
        )
        assert main.run(settings) == 2

    assert logs[-1]["event"] == "worker_cannot_start"
    assert ("loraplex migrate" if is_there else "not available") in logs[-1]["reason"]


async def test_a_loop_outlives_failures_and_counts_them() -> None:
    errors: list[Exception | None] = [DatabaseUnavailableError(), ValueError("odd row"), None]
    has_recovered = asyncio.Event()

    async def work() -> None:
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error
        has_recovered.set()

    registry = CollectorRegistry()
    loop = Loop("odd", 0.001, work, LoopMetrics(registry))
    task = asyncio.create_task(loop.run())
    await asyncio.wait_for(has_recovered.wait(), 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert registry.get_sample_value("loraplex:worker_failures_total", {"loop": "odd"}) == 2
    loop.stuck_after_s = -1.0
    assert not loop.is_stuck, "between rounds"


async def test_a_hanging_round_is_called_stuck() -> None:
    began = asyncio.Event()

    async def hang() -> None:
        began.set()
        await asyncio.Event().wait()

    loop = Loop("hangs", 0.001, hang, LoopMetrics(CollectorRegistry()))
    task = asyncio.create_task(loop.run())
    await began.wait()

    assert not loop.is_stuck
    loop.stuck_after_s = -1.0
    assert loop.is_stuck
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_loop_ends_although_its_work_calls_the_cancellation_something_else() -> None:
    began = asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise DatabaseUnavailableError from None

    loop = Loop("stubborn", 0.001, work, LoopMetrics(CollectorRegistry()))
    task = asyncio.create_task(loop.run())
    await began.wait()
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=10)

    assert done == {task}
    assert task.cancelled()


async def test_a_cancelled_statement_stays_cancelled(db: Database, db_url: str) -> None:
    async def sleep() -> None:
        async with db.sessions() as session:
            await session.execute(text("select pg_sleep(30)"))

    task = asyncio.create_task(sleep())
    await until_in_statement(db_url, "pg_sleep(30)")
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
