"""What one look at a rollout's step costs: its time, by statement, and the plans, over a step of many requests.

    python -m bench.rollout_look                                a Postgres of its own, a million requests
    python -m bench.rollout_look --requests 100000 --subjects 500 --plans

Two arms of equal requests, which are inserted straight into the table: a look reads nothing else. The look is
the worker's own (`rollouts/looks.py`), in one snapshot, and then all gates are asked.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from uuid import UUID

from loraplex_platform.db import migrate
from loraplex_platform.db.session import Database, open_database
from loraplex_platform.ids import uuid7
from loraplex_platform.local.embedded import start_postgres
from loraplex_platform.rollouts import looks
from loraplex_platform.rollouts.gates import GateSettings
from loraplex_platform.settings import DatabaseSettings
from sqlalchemy import text

# Ids grow by the microsecond from the month's beginning on: all in one partition, as a step's are.
_FILL = text("""
insert into requests (id, tenant_id, price_book_id, kind, state, endpoint, model, is_stream, owner,
    lease_until, admitted_at, settled_at, est_prompt_tokens, est_completion_tokens, est_pico,
    prompt_tokens, completion_tokens, finish_reason, http_status, error_code, ttft_ms, itl_mean_ms,
    itl_p95_ms, stable_logprob, rollout_id, rollout_step, arm, subject_key)
select
    (lpad(to_hex((extract(epoch from now()) * 1000)::bigint), 12, '0') || '7000' || '8000'
        || lpad(to_hex(i), 12, '0'))::uuid,
    :tenant_id, :tenant_id, 'user', 'settled', 'chat.completions', 'm', true, 'gw',
    now(), now(), now(), 200, 200, 0, 200, 1 + (random() * 300)::int,
    case when random() < 0.3 then 'length' else 'stop' end, case when random() < 0.002 then 500 else 200 end,
    null, (exp(5 + random()))::int, exp(3 + random() / 2), exp(3 + random()),
    case when random() < 0.1 then -random() * 3 end, :rollout_id, 0,
    case when (i % :subjects) * 20 < :subjects then 'canary' else 'stable' end, i % :subjects
from generate_series(1, :count) i
""")


async def _measure(database: Database, arguments: argparse.Namespace) -> None:
    rollout_id, tenant_id = uuid7(), uuid7()
    await _fill(database, rollout_id, tenant_id, arguments)
    plan = GateSettings().plan("canary", 5)
    assert plan is not None  # the default gates
    times = []
    for _ in range(arguments.rounds):
        began_s = time.perf_counter()
        found = await looks.look(database.sessions, rollout_id, 0, "canary", plan)
        looked_s = time.perf_counter()
        decision = plan.decide(found.observed)
        times.append((looked_s - began_s, time.perf_counter() - looked_s))
    count = found.stable.num_requests + found.canary.num_requests
    print(f"{count} requests of {arguments.subjects} subjects, load {os.getloadavg()[0]:.1f}")
    print(f"{decision.verdict}; each round: look s, gates s")
    for looked, decided in times:
        print(f"  {looked:.3f}  {decided:.3f}")
    least = min(sum(one) for one in times)
    print(f"best {least:.3f} s: at a twentieth of the time, looked at every {20 * least:.1f} s")
    if arguments.plans:
        await _show_plans(database, rollout_id)


async def _fill(
    database: Database, rollout_id: UUID, tenant_id: UUID, arguments: argparse.Namespace
) -> None:
    async with database.transaction() as session:
        await session.execute(text("set local statement_timeout = 0"))
        await session.execute(
            _FILL,
            {
                "tenant_id": tenant_id,
                "rollout_id": rollout_id,
                "count": arguments.requests,
                "subjects": arguments.subjects,
            },
        )
    async with database.transaction() as session:
        # As autovacuum would have by then.
        await session.execute(text("analyze requests"))


async def _show_plans(database: Database, rollout_id: UUID) -> None:
    values = {"rollout_id": rollout_id, "step": 0, "arm": "canary", "ours": []}
    bounds = dict.fromkeys(("stable_ttft", "canary_ttft", "stable_itl", "canary_itl"), 90)
    for name, statement in looks.STATEMENTS["canary"].items():
        print(f"\n{name}")
        async with database.sessions() as session:
            rows = await session.execute(
                text(f"explain (analyze, buffers) {statement.text}").bindparams(*looks.PARAMETERS),
                values | (bounds if name == "tails" else {}),
            )
            print("\n".join(f"  {row[0]}" for row in rows))


def main() -> None:
    """Start a Postgres, fill it, look."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000, help="of both sides")
    parser.add_argument("--subjects", type=int, default=20_000, help="of both sides")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plans", action="store_true", help="EXPLAIN each statement")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lpx-look-") as folder:
        server = start_postgres(Path(folder))
        try:
            migrate.upgrade(DatabaseSettings.model_validate({"database_url": server.url}))
            asyncio.run(_run(server.url, arguments))
        finally:
            server.stop()


async def _run(url: str, arguments: argparse.Namespace) -> None:
    settings = DatabaseSettings.model_validate({"database_url": url, "database_role": None})
    async with open_database(settings) as database:
        await _measure(database, arguments)


if __name__ == "__main__":
    main()
