"""What one look at a rollout's step costs: its time, by statement, and the plans, over a step of many requests.

    python -m bench.rollout_look                    a Postgres of its own, steps of 1,000 to a million requests
    python -m bench.rollout_look --requests 100000 --every 20 --subjects 500 --plans

Two arms of alike requests, a twentieth in the canary, which are inserted straight into the table: a look reads
nothing else. With --every they are one in so many of their month's. The look is the worker's own
(`rollouts/looks.py`), in one snapshot, and then all gates are asked.
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
from loraplex_platform.rollouts.driver import MOST_INTERVAL_S
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
    case when random() < 0.1 then -random() * 3 end,
    case when i % :every = 0 then cast(:rollout_id as uuid) end, 0,
    case when (i / :every % :subjects) * 20 < :subjects then 'canary' else 'stable' end,
    hashtextextended((i / :every % :subjects)::text, 0)
from generate_series(cast(:first as int), :last) i
""")


_BATCH = 50_000


async def _measure(database: Database, arguments: argparse.Namespace) -> None:
    plan = GateSettings().plan("canary", 5)
    assert plan is not None  # the default gates
    print(f"{arguments.subjects} subjects, one in {arguments.every} of the month's requests")
    for count in arguments.requests:
        rollout_id = uuid7()
        await _fill(database, rollout_id, count, arguments)
        times, decided = [], []
        kept = (1, 1)
        for _ in range(arguments.rounds):
            began_s = time.perf_counter()
            found = await looks.look(
                database.sessions, rollout_id, 0, "canary", plan, at_least=kept
            )
            kept = (found.stable.one_in, found.canary.one_in)
            looked_s = time.perf_counter()
            decision = plan.decide(found.observed)
            times.append(looked_s - began_s)
            decided.append(time.perf_counter() - looked_s)
        print(
            f"{count} requests, {found.num_read} read {found.sample or '(all)'}: {decision.verdict}"
        )
        took = ", ".join(f"{one:.3f}" for one in times)
        share = (min(times) + min(decided)) / MOST_INTERVAL_S
        print(
            f"  looks {took} s, gates {min(decided):.3f} s, load {os.getloadavg()[0]:.1f};", end=" "
        )
        print(f"every {MOST_INTERVAL_S:g} s: {100 * share:.1f} % of a core")
        if arguments.plans:
            await _show_plans(database, rollout_id, found)


async def _fill(
    database: Database, rollout_id: UUID, count: int, arguments: argparse.Namespace
) -> None:
    total = count * arguments.every
    values = {"tenant_id": uuid7(), "rollout_id": rollout_id}
    values |= {"every": arguments.every, "subjects": arguments.subjects}
    for first in range(1, total + 1, _BATCH):
        numbers = {"first": first, "last": min(total, first + _BATCH - 1)}
        async with database.transaction() as session:
            await session.execute(_FILL, values | numbers)
    async with database.transaction() as session:
        # As autovacuum would have by then.
        await session.execute(text("analyze requests"))


async def _show_plans(database: Database, rollout_id: UUID, found: looks.Look) -> None:
    values = {"rollout_id": rollout_id, "step": 0, "arm": "canary", "ours": []}
    values |= {"ttft_quantile": 0.95, "itl_quantile": 0.95}
    values |= {"most_stable": looks.MOST_REQUESTS + 1, "most_canary": looks.MOST_REQUESTS + 1}
    values["last_stable_key"] = looks.last_key(found.stable.one_in)
    values["last_canary_key"] = looks.last_key(found.canary.one_in)
    sql = f"explain (analyze, buffers) {looks.STATEMENTS['canary'].text}"
    async with database.sessions() as session:
        for setting in looks.SETTINGS:
            await session.execute(setting)
        rows = await session.execute(text(sql).bindparams(*looks.PARAMETERS), values)
        print("\n".join(f"  {row[0]}" for row in rows))


def main() -> None:
    """Start a Postgres, fill it, look."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--every", type=int, default=1, help="request of the month is the step's")
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
