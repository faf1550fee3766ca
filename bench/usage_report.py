"""Big tables: `python -m bench.usage_report [--rows N] [--only reports|quotas|books ...]`.

A throw-away Postgres of its own (fsync on) with a thousand tenants, of which one has a quarter of the
traffic and a hundred keys; a month of settled requests, five million by default (8 GB of disk), rolled up,
and 5,000 more that have been settled since. The control API in this process.

| part | what is measured |
|---|---|
| reports | the usage report as the console and its CSV ask for it, and the slowest one's plan |
| quotas | setting a quota, and how long admissions of its tenant wait meanwhile |
| books | `loraplex reconcile` over all of it: seconds, and memory of its process |
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import psycopg
from loraplex_platform.billing.rollups import RollupWorker
from loraplex_platform.db import migrate
from loraplex_platform.ids import format_id, uuid7
from loraplex_platform.local.embedded import start_postgres, start_redis
from loraplex_platform.logs import configure_logging
from loraplex_platform.metering import service
from loraplex_platform.settings import MigrationSettings
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from sqlalchemy import event

from tests.platform.control.stand import Stand
from tests.support.billing import add_model
from tests.support.metering import Customer, reservation, settlement
from tests.support.postgres import SERVE_ROLE, database_settings
from tests.support.traffic import Caller, add_traffic

PARTS = ("reports", "quotas", "books")
TARGET_MS = 300.0
REPEATS, FILE_REPEATS = 20, 3
NUM_TENANTS, NUM_LARGE_KEYS = 1000, 100
BATCH = 500_000
# Settled since their days were rolled up: at ten times the month's mean rate, in four minutes.
NUM_FRESH = 5_000
BYTES_PER_ROW = 1_600
DAYS = 31
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Tokyo")


_ROLL_UP = """
insert into usage_daily (tenant_id, day, row_no, project_id, key_id, deployment_id, model,
    adapter_version_id, price_book_id, requests, billed_requests, prompt_tokens, cached_tokens,
    completion_tokens, absorbed_tokens, amount_pico, absorbed_pico)
select r.tenant_id, (r.admitted_at at time zone t.billing_tz)::date as day,
    row_number() over (partition by r.tenant_id, (r.admitted_at at time zone t.billing_tz)::date),
    l.project_id, l.key_id, l.deployment_id, r.model, l.adapter_version_id, l.price_book_id,
    count(*), count(*) filter (where l.account = 'revenue'),
    coalesce(sum(l.prompt_tokens) filter (where l.account = 'revenue'), 0),
    coalesce(sum(l.cached_tokens) filter (where l.account = 'revenue'), 0),
    coalesce(sum(l.completion_tokens) filter (where l.account = 'revenue'), 0),
    coalesce(sum(a.absorbed), 0),
    coalesce(sum(l.amount_pico) filter (where l.account = 'revenue'), 0),
    coalesce(sum(l.amount_pico) filter (where l.account = 'absorbed'), 0)
from requests r
join tenants t on t.id = r.tenant_id
join ledger l on l.entry_id = r.id and l.kind = 'usage'
join attempts a on a.request_id = r.id
where r.kind = 'user' and r.state = 'settled'
group by r.tenant_id, 2, l.project_id, l.key_id, l.deployment_id, r.model, l.adapter_version_id,
    l.price_book_id
"""


def first_day() -> datetime:
    """A month that ends with today, so that a quota of now has something to count."""
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight - timedelta(days=DAYS - 1)


async def measure(num_rows: int, parts: list[str]) -> None:
    """Fill, then the parts.

    Raises:
        SystemExit: there is too little disk for so many rows.
    """
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < 2 * BYTES_PER_ROW * num_rows:
        raise SystemExit(
            f"--rows: {num_rows} rows need {2 * BYTES_PER_ROW * num_rows >> 30} GiB of disk in "
            f"{tempfile.gettempdir()}, there are {free >> 30}; take fewer, or set TMPDIR"
        )
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
                large = await fill(stand, postgres.url, num_rows)
                if "reports" in parts:
                    await _reports(stand, postgres.url, large)
                if "quotas" in parts:
                    await _quotas(stand, large)
                if "books" in parts:
                    _books(postgres.url)
        finally:
            redis.stop()
            postgres.stop()


# ---------------------------------------------------------------------- the tables


# While the tables are filled; afterwards the server is as anybody's.
_FILLING = {"max_wal_size": "16GB", "checkpoint_timeout": "1h", "autovacuum": "off"}


def _configure(url: str, *, is_filling: bool) -> None:
    with psycopg.connect(url, autocommit=True) as owner:
        for name, value in _FILLING.items():
            change = f"set {name} = '{value}'" if is_filling else f"reset {name}"
            owner.execute(f"alter system {change}")
        owner.execute("select pg_reload_conf()")


async def fill(stand: Stand, url: str, num_rows: int) -> Customer:
    """A thousand tenants' month, rolled up; the large one of them, which is called tenant-0."""
    callers = _callers(url)
    _configure(url, is_filling=True)
    start = first_day()
    end = datetime.now(UTC) - timedelta(minutes=30)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as progress:
        requests = progress.add_task("requests", total=num_rows)
        for seed, first in enumerate(range(0, num_rows, BATCH)):
            rows = min(BATCH, num_rows - first)
            await asyncio.to_thread(
                add_traffic, url, callers, rows=rows, start=start, end=end, seed=seed
            )
            progress.advance(requests, rows)
        rollups = progress.add_task("rolling up", total=1)
        await asyncio.to_thread(_roll_up, url)
        progress.advance(rollups)
    _configure(url, is_filling=False)
    took_ms = await _time_worker(stand, url)
    await asyncio.to_thread(
        add_traffic,
        url,
        callers,
        rows=NUM_FRESH,
        start=end - timedelta(hours=1),
        end=end,
        seed=-1,
        marks_requests=True,
    )
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute("vacuum analyze")
        row = owner.execute(
            "select (select count(*) from requests), (select count(*) from usage_daily),"
            " (select count(*) from rollup_dirty),"
            " (select count(distinct tenant_id) from rollup_dirty),"
            " pg_size_pretty(pg_database_size(current_database()))"
        ).fetchone()
    assert row is not None
    print(
        f"{row[0]} requests, {row[1]} rows of usage_daily ({took_ms:.1f} ms to make one's day again), "
        f"{row[2]} marked requests of {row[3]} tenants; {row[4]}"
    )
    return callers[0].customer


def _roll_up(url: str) -> None:
    """All days at once, for the worker makes them one by one, each in a transaction: of 31,000 days that
    takes its time. Whether it comes to the same is what `books` finds."""
    with psycopg.connect(url) as owner:
        owner.execute("set work_mem = '256MB'")
        owner.execute(_ROLL_UP)
        owner.execute("delete from rollup_dirty")
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute("vacuum analyze")


async def _time_worker(stand: Stand, url: str) -> float:
    """Milliseconds to make a small tenant's day again, as the worker does it."""
    with psycopg.connect(url) as owner:
        owner.execute(
            "insert into rollup_dirty select distinct tenant_id, day from usage_daily"
            " where day = (select max(day) - 3 from usage_daily) limit 100"
        )
    began_s = time.perf_counter()
    made = await RollupWorker(stand.db.sessions).run_once()
    return 1000 * (time.perf_counter() - began_s) / max(1, made)


def _add_customers(url: str) -> list[Customer]:
    customers = [Customer(uuid7(), uuid7(), "") for _ in range(NUM_TENANTS)]
    with psycopg.connect(url) as owner, owner.cursor() as cursor:
        cursor.executemany(
            "insert into tenants (id, slug, name, billing_tz) values (%s, %s, 'n', %s)",
            [
                (customer.tenant_id, f"tenant-{number}", ZONES[number % len(ZONES)])
                for number, customer in enumerate(customers)
            ],
        )
        cursor.executemany(
            "insert into api_keys (id, tenant_id, name, public_id, last4)"
            " values (%s, %s, 'n', %s, '0000')",
            [
                (customer.key_id, customer.tenant_id, f"{number:012}")
                for number, customer in enumerate(customers)
            ],
        )
    return customers


def _callers(url: str) -> list[Caller]:
    """Of the large tenant first. Requests are spread evenly over callers."""
    callers: list[Caller] = []
    for number, customer in enumerate(_add_customers(url)):
        callers.append(Caller(customer, None))
        if number % 4 == 0:
            callers.append(Caller(customer, add_model(url, customer, f"bot-{number}")))
        if number == 0:
            models = (None, callers[-1].model)
            callers += [
                Caller(Customer(customer.tenant_id, uuid7(), ""), models[key % 2])
                for key in range(NUM_LARGE_KEYS)
            ] * 4
    return callers


# ---------------------------------------------------------------------- reports


async def _reports(stand: Stand, url: str, customer: Customer) -> None:
    start = int(first_day().timestamp())
    month: dict[str, Any] = {"start_time": start, "end_time": start + DAYS * 86400}
    tenant = {"tenant_id": format_id("tenant", customer.tenant_id)}
    everything = ["project_id", "key_id", "model", "adapter_version_id"]

    def by(*groups: str) -> dict[str, Any]:
        return month | {"group_by[]": list(groups)}

    cases: list[tuple[str, dict[str, Any]]] = [
        ("all tenants, by day", month),
        ("all tenants, by day and model", by("model")),
        ("all tenants, by day and tenant", by("tenant_id")),
        ("all tenants, by day and key", by("key_id")),
        ("all tenants, by day and deployment", by("deployment_id")),
        ("all tenants, by month and tenant", by("tenant_id") | {"bucket_width": "1mo"}),
        ("large tenant, by day", month | tenant),
        ("large tenant, by day and key", by("key_id") | tenant),
        ("large tenant, by day and all it can be split by", by(*everything) | tenant),
        ("large tenant, by month and key", by("key_id") | tenant | {"bucket_width": "1mo"}),
    ]
    files: list[tuple[str, dict[str, Any]]] = [
        ("CSV, large tenant, by day and key", by("key_id") | tenant | {"format": "csv"}),
        ("CSV, all tenants, by day and tenant", by("tenant_id") | {"format": "csv"}),
    ]
    results = [(await _time(stand, title, params), title, params) for title, params in cases]
    for title, params in files:
        await _time(stand, title, params)
    _, title, params = max(results, key=lambda result: result[0])
    print(f"\nThe slowest, {title}:")
    await _show_plan(stand, params)
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute(
            "insert into rollup_dirty values (%s, %s)",
            [customer.tenant_id, (first_day() + timedelta(days=9)).date()],
        )
    print()
    await _time(stand, "large tenant, by day and key, one day to be made anew", cases[7][1])


async def _time(stand: Stand, title: str, params: dict[str, Any]) -> float:
    """Milliseconds, the longest of some."""
    client = stand.admin
    times_ms: list[float] = []
    cpu_began_s, server_began_s = time.process_time(), server_cpu_s(stand)
    is_file = params.get("format") == "csv"
    repeats = FILE_REPEATS if is_file else REPEATS
    for _ in range(repeats):
        began_s = time.perf_counter()
        answer = await client.get("/admin/v1/usage", params=params)
        times_ms.append(1000 * (time.perf_counter() - began_s))
        answer.raise_for_status()
    cpu_ms = 1000 * (time.process_time() - cpu_began_s) / repeats
    server_ms = 1000 * (server_cpu_s(stand) - server_began_s) / repeats
    rows = answer.text.count("\n") - 1 if is_file else len(answer.json()["data"])
    print(
        f"{title}: {rows} rows, median {statistics.median(times_ms):.0f} ms, longest "
        f"{max(times_ms):.0f} ms"
        + ("" if is_file else f" (target {TARGET_MS:g})")
        + f"; CPU: Postgres {server_ms:.0f} ms, Python {cpu_ms:.0f} ms"
    )
    return max(times_ms)


def server_cpu_s(stand: Stand) -> float:
    """CPU seconds of the Postgres whose socket lies beside the stand's folder, all its processes."""
    pid = int((stand.folder.parent / "pg/cluster/postmaster.pid").read_text().split()[0])
    server = psutil.Process(pid)
    return sum(
        sum(process.cpu_times()[:2]) for process in [server, *server.children(recursive=True)]
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


# ---------------------------------------------------------------------- quotas


async def _quotas(stand: Stand, customer: Customer) -> None:
    """Requests of the large tenant come one after the other while a quota is set."""
    print()
    tenant = format_id("tenant", customer.tenant_id)
    for title, body in (
        ("tenant, this month", {"scope_kind": "tenant", "scope_id": tenant, "period": "month"}),
        ("tenant, in total", {"scope_kind": "tenant", "scope_id": tenant, "period": "total"}),
        (
            "tenant, any 30 days",
            {"scope_kind": "tenant", "scope_id": tenant, "period": "rolling", "window_hours": 720},
        ),
        ("platform, in total", {"scope_kind": "platform", "period": "total"}),
    ):
        setting = asyncio.create_task(_set(stand, body))
        waits_ms = await _admit_until(stand, customer, setting.done)
        took_ms, used = await setting
        print(
            f"quota of cost, {title}: set in {took_ms:.0f} ms ({used} used); of {len(waits_ms)} "
            f"admissions meanwhile the median took {statistics.median(waits_ms):.1f} ms, the longest "
            f"{max(waits_ms):.0f} ms"
        )


async def _set(stand: Stand, body: dict[str, Any]) -> tuple[float, str]:
    began_s = time.perf_counter()
    answer = await stand.admin.post(
        "/admin/v1/limits", json=body | {"metric": "cost", "value": "1000000"}
    )
    answer.raise_for_status()
    return 1000 * (time.perf_counter() - began_s), str(answer.json()["use"]["used"])


async def _admit_until(
    stand: Stand, customer: Customer, is_over: Callable[[], bool]
) -> list[float]:
    waits_ms = []
    while not is_over():
        wanted = reservation(customer)
        began_s = time.perf_counter()
        await service.reserve(stand.db.sessions, wanted)
        waits_ms.append(1000 * (time.perf_counter() - began_s))
        await service.settle(stand.db.sessions, settlement(wanted.request_id))
    return waits_ms


# ---------------------------------------------------------------------- the books


def _books(url: str) -> None:
    print()
    command = [sys.executable, "-m", "loraplex_platform.cli", "reconcile", "--json", "--no-keep"]
    for title, options in (("all of it", []), ("two days", ["--since-days", "2"])):
        began_s = time.perf_counter()
        process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            env=os.environ | {"LORAPLEX_DATABASE_URL": url},
        )
        assert process.stdout is not None
        report = json.loads(process.stdout.read())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        broken = [check["name"] for check in report.get("checks", []) if not check["ok"]]
        print(
            f"reconcile, {title}: {time.perf_counter() - began_s:.0f} s, {usage.ru_maxrss >> 10} MiB "
            f"resident at most, exit code {process.returncode}, broken: {broken or 'none'}"
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000, help="settled requests")
    configure_logging("warning", "console")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.rows, arguments.only))


if __name__ == "__main__":
    main()
