"""A usage report over five million requests: `python -m bench.usage_report [--rows N]`.

A throw-away Postgres of its own (fsync on) with a thousand tenants and a month of settled requests,
rolled up as the worker does it; the control API in this process. Prints milliseconds per report, cold
and warm, also with a day that has changed since it was rolled up, and the plan of the query behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
from loraplex_platform.billing.rollups import RollupWorker
from loraplex_platform.db import migrate
from loraplex_platform.ids import format_id
from loraplex_platform.local.embedded import start_postgres, start_redis
from loraplex_platform.settings import MigrationSettings
from sqlalchemy import event

from tests.platform.control.stand import Stand
from tests.support.billing import add_model, set_zone
from tests.support.metering import Customer, add_customer
from tests.support.postgres import SERVE_ROLE, database_settings
from tests.support.traffic import Caller, add_traffic

TARGET_MS = 300.0
REPEATS = 20
NUM_TENANTS = 1000
BATCH = 1_000_000
START, DAYS = datetime(2026, 3, 1, tzinfo=UTC), 31
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Tokyo")


async def measure(num_rows: int) -> None:
    """Fill, roll up, report, print."""
    with tempfile.TemporaryDirectory(prefix="lpx-") as name:
        folder = Path(name)
        postgres = start_postgres(folder / "pg")
        redis = start_redis(folder / "redis")
        try:
            migrate.upgrade(database_settings(postgres.url))
            migrate.ensure_serving_role(
                MigrationSettings.model_validate(
                    {"database_url": postgres.url, "serve_role": SERVE_ROLE}
                )
            )
            async with Stand.open(postgres.url, redis.url, folder / "stand") as stand:
                tenant = await _fill(stand, postgres.url, num_rows)
                await _measure(stand, postgres.url, tenant)
        finally:
            redis.stop()
            postgres.stop()


async def _fill(stand: Stand, url: str, num_rows: int) -> Customer:
    began = time.perf_counter()
    callers = []
    for number in range(NUM_TENANTS):
        customer = await add_customer(stand.db, f"tenant-{number}")
        set_zone(url, customer, ZONES[number % len(ZONES)])
        callers.append(Caller(customer, None))
        if number % 4 == 0:
            callers.append(Caller(customer, add_model(url, customer, f"bot-{number}")))
    for seed, first in enumerate(range(0, num_rows, BATCH)):
        add_traffic(
            url,
            callers,
            rows=min(BATCH, num_rows - first),
            start=START,
            end=START + timedelta(days=DAYS),
            seed=seed,
        )
    print(f"{num_rows} requests made in {time.perf_counter() - began:.0f} s")
    began = time.perf_counter()
    worker, count = RollupWorker(stand.db.sessions), 0
    while made := await worker.run_once():
        count += made
    took_s = time.perf_counter() - began
    print(f"{count} days rolled up in {took_s:.0f} s, {1000 * took_s / count:.1f} ms each")
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute("vacuum analyze usage_daily, rollup_dirty")
        row = owner.execute("select count(*) from usage_daily").fetchone()
    print(f"{row[0] if row else 0} rows of usage_daily")
    return callers[0].customer


async def _measure(stand: Stand, url: str, customer: Customer) -> None:
    month: dict[str, Any] = {
        "start_time": int(START.timestamp()),
        "end_time": int((START + timedelta(days=DAYS)).timestamp()),
    }
    tenant = format_id("tenant", customer.tenant_id)
    everything = ["project_id", "key_id", "model", "adapter_version_id"]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("all tenants, by day", month),
        ("all tenants, by day and tenant, first page", month | {"group_by[]": ["tenant_id"]}),
        (
            "all tenants, by month and model",
            month | {"bucket_width": "1mo", "group_by[]": ["model"]},
        ),
        (
            "one tenant, by day and all it can be split by",
            month | {"tenant_id": tenant, "group_by[]": everything},
        ),
    ]
    for title, params in cases:
        await _time(stand, title, params)
    await _show_plan(stand, month | {"group_by[]": ["tenant_id"]})
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute(
            "insert into rollup_dirty values (%s, %s)",
            [customer.tenant_id, (START + timedelta(days=9)).date()],
        )
    await _time(stand, "the last one, with a day that has changed", cases[-1][1])


async def _time(stand: Stand, title: str, params: dict[str, Any]) -> None:
    client = stand.admin
    times_ms = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        answer = await client.get("/admin/v1/usage", params=params)
        times_ms.append(1000 * (time.perf_counter() - began))
        answer.raise_for_status()
    rows = len(answer.json()["data"])
    print(
        f"{title}: {rows} rows, median {statistics.median(times_ms):.1f} ms, longest "
        f"{max(times_ms):.1f} ms (target {TARGET_MS:g})"
    )


async def _show_plan(stand: Stand, params: dict[str, Any]) -> None:
    statements: list[tuple[str, Any]] = []

    def note(_c: Any, _k: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "usage_daily" in statement:
            statements.append((statement, parameters))

    engine = stand.app.state.context.sessions.kw["bind"]
    event.listen(engine.sync_engine, "before_cursor_execute", note)
    try:
        await stand.admin.get("/admin/v1/usage", params=params)
    finally:
        event.remove(engine.sync_engine, "before_cursor_execute", note)
    statement, parameters = statements[0]
    async with stand.db.engine.connect() as connection:
        explain = f"explain (analyze, buffers, costs off) {statement}"
        rows = await connection.exec_driver_sql(explain, parameters)
        print("\n".join(row[0] for row in rows))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000, help="settled requests")
    asyncio.run(measure(parser.parse_args().rows))


if __name__ == "__main__":
    main()
