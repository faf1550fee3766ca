"""The worker as a process, killed in the middle of a run."""

from __future__ import annotations

from pathlib import Path

import psycopg
from sqlalchemy import text

from tests.platform.control.stand import BASE, Stand
from tests.platform.evals.stand import case, ended, read, results_of, started, suite_of
from tests.platform.gateway.stand import eventually
from tests.platform.worker.test_main import worker
from tests.support.fake_engine import Script
from tests.support.metering import run_sql
from tests.support.postgres import serving_url

# Two processes start here, perhaps on cores that others use.
DEADLINE_S = 120.0


async def test_a_worker_killed_in_the_middle_loses_no_result_and_no_token(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    is_first = True

    async with Stand.open(db_url, redis_url, short_tmp_path) as stand:
        stand.engine.script_for = lambda generate: (
            Script(token_delay_s=30.0)
            if is_first and generate.sampling.max_tokens == 7
            else Script(token_ids=[70, 71])
        )
        tenant = (await stand.tenant("acme"))["id"]
        suite = await suite_of(
            stand, tenant, case("a"), case("b", params={"max_tokens": 7}), case("c")
        )
        run_id = await started(stand, tenant, suite, concurrency=1)
        settings = {
            "database_url": serving_url(db_url),
            "redis_url": redis_url,
            "model_dir": str(stand.folder / "model"),
            "base_model": BASE,
            "lease_grace_s": "0.1",
        }
        (short_tmp_path / "one").mkdir()
        (short_tmp_path / "two").mkdir()
        with worker(short_tmp_path / "one", **settings) as process:

            async def is_in_the_middle() -> bool:
                assert process.poll() is None, (short_tmp_path / "one" / "log").read_text()
                counts = (await read(stand, tenant, run_id))["counts"]
                return counts == {"pass": 1} and stand.engine.num_running == 1

            await eventually(is_in_the_middle, "the second case", deadline_s=DEADLINE_S)
            process.kill()
            process.wait()
        before = (await results_of(stand, tenant, run_id))["a"]
        is_first = False
        # Its leases, of the run and of the request, run out.
        await run_sql(stand.db, "update eval_runs set lease_until = now() - interval '1 s'")
        await run_sql(
            stand.db,
            "update requests set lease_until = now() - interval '1 min' where state = 'reserved'",
        )

        with worker(short_tmp_path / "two", **settings):
            run = await ended(stand, tenant, run_id, deadline_s=DEADLINE_S)

            async def is_settled() -> bool:
                async with stand.db.sessions() as session:
                    statement = text("select count(*) from requests where state = 'reserved'")
                    return (await session.execute(statement)).scalar_one() == 0

            await eventually(is_settled, "the books are closed", deadline_s=DEADLINE_S)

        assert (run["state"], run["counts"]) == ("passed", {"pass": 3})
        assert (await results_of(stand, tenant, run_id))["a"] == before
    with psycopg.connect(db_url) as connection:
        rows = connection.execute(
            "select r.kind, l.account from requests r left join ledger l on l.entry_id = r.id"
        ).fetchall()
    # Three answers, and the one that was cut: all the platform's.
    assert sorted(rows) == [("probe", "absorbed")] * 4
