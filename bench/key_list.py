"""A page of a tenant's keys, when it has 400,000: `python -m bench.key_list [--keys N]`.

A throw-away Postgres of its own (fsync on), the control API in this process, pages from the first to one
deep in the list. Prints milliseconds per page and the plan of the query behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg
from loraplex_platform.db import migrate
from loraplex_platform.ids import format_id, uuid7
from loraplex_platform.local.embedded import start_postgres, start_redis
from loraplex_platform.logs import configure_logging
from loraplex_platform.settings import MigrationSettings

from tests.platform.control.stand import Stand
from tests.support.postgres import SERVE_ROLE, database_settings

TARGET_MS = 100.0
PAGES = 50

# UUIDv7 by the row's number, as keys that are made one after the other have; every fourth is revoked,
# every tenth in the project; a second tenant of the same size lies between them.
_FILL = """
insert into api_keys (id, tenant_id, name, public_id, last4, status, revoked_at, project_id)
select (lpad(to_hex(1700000000000 + n), 12, '0') || '7' || lpad(to_hex(n %% 4096), 3, '0') || '8'
        || lpad(to_hex(n), 15, '0'))::uuid,
    case when n %% 2 = 0 then %(mine)s::uuid else %(other)s::uuid end,
    'key ' || n, 'k' || lpad(n::text, 11, '0'), '0000',
    case when n %% 8 = 0 then 'revoked' else 'active' end,
    case when n %% 8 = 0 then now() end,
    case when n %% 2 = 0 and n %% 20 = 0 then %(project)s::uuid end
from generate_series(1, 2 * %(keys)s) n
"""
_PLAN = """
explain (analyze, buffers, costs off, timing off)
select * from api_keys where tenant_id = %(mine)s {more} order by id desc limit 101
"""


def fill(db_url: str, ids: dict[str, str], num_keys: int) -> None:
    """So many keys of the tenant `mine`, a tenth of them in its `project`, and as many of the `other`."""
    with psycopg.connect(db_url) as connection:
        connection.execute(_FILL, ids | {"keys": num_keys})
    with psycopg.connect(db_url, autocommit=True) as connection:
        connection.execute("vacuum analyze api_keys")


async def measure(num_keys: int) -> None:
    """Fill, page, print."""
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
                await _measure(stand, postgres.url, num_keys)
        finally:
            redis.stop()
            postgres.stop()


async def _measure(stand: Stand, db_url: str, num_keys: int) -> None:
    mine, other = [(await stand.tenant(slug))["id"] for slug in ("acme", "globex")]
    path = f"/admin/v1/tenants/{mine}"
    project = (await stand.admin.post(f"{path}/projects", json={"name": "p"})).json()["id"]
    ids = {
        "mine": mine.removeprefix("ten_"),
        "other": other.removeprefix("ten_"),
        "project": project.removeprefix("prj_"),
    }
    fill(db_url, ids, num_keys)
    client = stand.admin
    for title, params in (
        ("all", {}),
        ("active", {"status": "active"}),
        ("of a project", {"project_id": project}),
    ):
        times_ms, after, cpu_began = [], None, time.process_time()
        for _ in range(PAGES):
            query: dict[str, Any] = {"limit": 100, **params} | ({"after": after} if after else {})
            began = time.perf_counter()
            answer = await client.get(f"{path}/keys", params=query)
            times_ms.append(1000 * (time.perf_counter() - began))
            page = answer.json()
            after = page["last_id"]
            if not page["has_more"]:
                break
        print(
            f"{title}: {len(times_ms)} pages of 100 keys out of {num_keys}: median "
            f"{statistics.median(times_ms):.1f} ms, longest {max(times_ms):.1f} ms (page {times_ms.index(max(times_ms)) + 1}; target {TARGET_MS:g}), "
            f"{1000 * (time.process_time() - cpu_began) / len(times_ms):.1f} ms of Python's CPU each"
        )
    deep = {"limit": 100, "after": format_id("api_key", _id_at(num_keys // 50))}
    began = time.perf_counter()
    answer = await client.get(f"{path}/keys", params=deep)
    assert len(answer.json()["data"]) == 100
    print(f"a page near the end: {1000 * (time.perf_counter() - began):.1f} ms")
    with psycopg.connect(db_url) as connection:
        for more in ("", "and status = 'active'", "and project_id = %(project)s"):
            for page in ("", "and id < %(after)s"):
                query = _PLAN.format(more=f"{more} {page}")
                plan = connection.execute(query, ids | {"after": uuid7()}).fetchall()
                print("\n".join(row[0] for row in plan))


def _id_at(number: int) -> Any:
    from uuid import UUID

    tail = f"7{number % 4096:03x}8{number:015x}"
    return UUID(hex=f"{1_700_000_000_000 + number:012x}{tail}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=400_000, help="keys of the tenant")
    configure_logging("warning", "console")
    asyncio.run(measure(parser.parse_args().keys))


if __name__ == "__main__":
    main()
