"""`loraplex reconcile` and the kept checks: what holds, what is broken, and what cannot be told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import psycopg
import pytest
from loraplex_platform.db.session import Database
from loraplex_platform.metering import service
from loraplex_platform.metering.invariant_runs import check_and_keep, find_last, report_of
from loraplex_platform.metering.invariants import check_invariants

from tests.support.metering import add_customer, reservation, settlement
from tests.support.postgres import serving_url

if TYPE_CHECKING:
    from tests.platform.control.stand import Stand
    from tests.support.postgres import PostgresServer


def reconcile(url: str, *arguments: str) -> tuple[int, str, str]:
    # A process of its own: it sets up logging for all of it.
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
    result = subprocess.run(
        [sys.executable, "-m", "loraplex_platform.cli", "reconcile", *arguments],
        env=clean | {"LORAPLEX_DATABASE_URL": url, "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout, result.stderr


async def settled(db: Database) -> None:
    wanted = reservation(await add_customer(db))
    await service.reserve(db.sessions, wanted)
    await service.settle(db.sessions, settlement(wanted.request_id))


async def test_sound_books_exit_with_zero_and_the_result_is_kept(db: Database, db_url: str) -> None:
    import asyncio

    await settled(db)

    code, out, _ = await asyncio.to_thread(reconcile, serving_url(db_url), "--json")

    found = json.loads(out)
    assert (code, found["ok"], found["identity"]["difference"]) == (0, True, 0)
    codes = {check["code"] for check in found["checks"]}
    assert {"I1", "I2", "I3", "I4", "I7", "I9", "I10"} <= codes
    async with db.sessions() as session:
        last = await find_last(session)
    assert last is not None
    assert (last.checked_by, last.is_ok) == ("reconcile", True)


async def test_a_break_exits_with_one_and_names_it(db: Database, db_url: str) -> None:
    import asyncio

    await settled(db)
    with psycopg.connect(db_url) as connection:
        connection.execute("delete from attempts")

    # Also with the owner's login, who may change the books but does not serve.
    code, out, _ = await asyncio.to_thread(reconcile, db_url)
    as_json, text, _ = await asyncio.to_thread(reconcile, db_url, "--json", "--no-keep")

    assert (code, as_json) == (1, 1)
    assert "1 broken: ledger_equals_attempts" in out
    assert [c["name"] for c in json.loads(text)["checks"] if not c["ok"]] == [
        "ledger_equals_attempts"
    ]
    async with db.sessions() as session:
        last = await find_last(session)
    assert last is not None
    assert not last.is_ok


def test_what_cannot_be_told_exits_with_two(postgres_server: PostgresServer) -> None:
    gone = reconcile("postgresql://x@/x?host=/nowhere")
    with postgres_server.empty() as url:
        behind = reconcile(url, "--json")

    assert gone[0] == behind[0] == 2
    assert "Cannot tell" in gone[2]
    assert json.loads(behind[1])["ok"] is None
    assert "loraplex migrate" in json.loads(behind[1])["error"]


def test_without_a_database_it_says_what_to_give(tmp_path: object) -> None:
    code, _, err = reconcile("", "--data-dir", str(tmp_path))

    assert code == 2
    assert "LORAPLEX_DATABASE_URL" in err


async def test_a_kept_report_reads_back_as_it_was(db: Database, db_url: str) -> None:
    await settled(db)
    with psycopg.connect(db_url) as connection:
        connection.execute("update ledger set amount_pico = amount_pico + 1")

    report = await check_and_keep(db.sessions, "worker")

    async with db.sessions() as session:
        last = await find_last(session)
    assert last is not None
    assert report_of(last) == report
    assert not last.is_ok


async def test_the_route_shows_the_last_kept_check(stand: Stand) -> None:
    path = "/admin/v1/invariants"
    none = await stand.admin.get(path, params={"run": "last"})
    await check_and_keep(stand.db.sessions, "worker")
    with_last = (await stand.admin.get(path)).json()
    last = (await stand.admin.get(path, params={"run": "last"})).json()

    assert none.status_code == 404
    assert with_last["last_run"]["checked_by"] == "worker"
    assert with_last["last_run"]["broken"] == []
    assert last["checks"] == with_last["checks"]
    assert last["checked_at"] == with_last["last_run"]["checked_at"]


async def test_i3_a_reservation_that_nobody_settles(db: Database, db_url: str) -> None:
    await service.reserve(db.sessions, reservation(await add_customer(db)))
    assert (await check_invariants(db.sessions)).ok

    with psycopg.connect(db_url) as connection:
        connection.execute("update requests set lease_until = now() - interval '1 minute'")

    report = await check_invariants(db.sessions)
    assert [check.code for check in report.checks if not check.ok] == ["I3"]


@pytest.mark.parametrize(
    "statement",
    [
        "alter table deployments drop constraint fk_deployments_own_revision;"
        " update deployments set current_revision_id = gen_random_uuid()",
        "update deployments set current_revision_id = null",
        "drop index uq_deployments_platform_public_name; insert into deployments (id, public_name,"
        " base_model_id, current_revision_id) select gen_random_uuid(), public_name, base_model_id,"
        " null from deployments",
    ],
)
async def test_i9_a_model_id_that_is_ambiguous_or_answers_with_nothing(
    postgres_server: PostgresServer, statement: str
) -> None:
    from loraplex_platform.db.session import open_database

    from tests.platform.gateway.stand import add_base, deploy
    from tests.support.postgres import database_settings

    with postgres_server.clone() as url:
        async with open_database(database_settings(serving_url(url))) as db:
            await deploy(db, await add_base(db), None, "base")
            assert (await check_invariants(db.sessions)).ok

            with psycopg.connect(url, autocommit=True) as connection:
                for part in statement.split(";"):
                    connection.execute(part.encode())

            report = await check_invariants(db.sessions)
    assert [check.code for check in report.checks if not check.ok] == ["I9"]
