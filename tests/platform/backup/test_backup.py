"""A backup made under load comes back whole: the books add up, keys work, requests are answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest
from loraplex_engine.artifact import ADAPTER_FILES, AdapterStore
from loraplex_platform.backup import manifest, postgres_tools
from loraplex_platform.backup.errors import BackupError
from loraplex_platform.backup.make import make_backup
from loraplex_platform.backup.manifest import Manifest
from loraplex_platform.backup.restore import restore_backup
from loraplex_platform.db.session import Database, open_database
from loraplex_platform.gateway.app import open_gateway
from loraplex_platform.metering import service
from loraplex_platform.metering.invariants import check_invariants

from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import (
    BASE,
    add_base,
    announce,
    deploy,
    eventually,
    serving,
    settings_for,
)
from tests.support.fake_engine import FakeEngine
from tests.support.metering import PEPPER, Customer, add_customer, reservation, settlement
from tests.support.postgres import database_settings, serving_url

if TYPE_CHECKING:
    from tests.support.postgres import PostgresServer

DIGESTS = ["sha256:" + letter * 64 for letter in "ab"]
SECRETS = {
    "key_pepper": PEPPER.get_secret_value(),
    "salt_key": "salt-for-tests-0123456789abcdefghij",
}


class World:
    """A database with tenants, keys and adapters; its store; one key that can be used."""

    def __init__(self, url: str, db: Database, folder: Path, customer: Customer) -> None:
        self.url = url
        self.db = db
        self.folder = folder
        self.store_url = f"file://{folder / 'store'}"
        self.customer = customer

    def back_up(self, name: str = "backup", **changes: Any) -> tuple[Path, Manifest]:
        to = self.folder / name
        options: dict[str, Any] = {"secrets": SECRETS, "secrets_file": None, "tell": lambda _: None}
        return to, make_backup(self.url, self.store_url, to, **(options | changes))

    async def request(self) -> None:
        wanted = reservation(self.customer)
        await service.reserve(self.db.sessions, wanted)
        await asyncio.sleep(0.01)
        await service.settle(self.db.sessions, settlement(wanted.request_id))


def restore(folder: Path, url: str, store: Path, **changes: Any) -> Manifest:
    options: dict[str, Any] = {
        "secrets": SECRETS,
        "allow_other_secrets": False,
        "tell": lambda _: None,
    }
    return restore_backup(folder, url, f"file://{store}", **(options | changes))


@pytest.fixture
async def world(postgres_server: PostgresServer, short_tmp_path: Path) -> AsyncIterator[World]:
    with postgres_server.clone() as url:
        async with open_database(database_settings(serving_url(url))) as db:
            customer = await add_customer(db)
            base_id = await add_base(db)
            await deploy(db, base_id, None, BASE)
            store = AdapterStore(f"file://{short_tmp_path / 'store'}")
            for number, digest in enumerate(DIGESTS):
                await deploy(db, base_id, customer.tenant_id, f"pirate{number}", digest=digest)
                files = short_tmp_path / f"files{number}"
                files.mkdir()
                for name in ADAPTER_FILES:
                    (files / name).write_bytes(os.urandom(10_000))
                store.put(files, digest)
            yield World(url, db, short_tmp_path, customer)


@contextlib.asynccontextmanager
async def load(world: World) -> AsyncIterator[list[int]]:
    """Requests all the time, from several clients; yields how many have been settled."""
    counted = [0]
    is_over = asyncio.Event()

    async def client() -> None:
        while not is_over.is_set():
            await world.request()
            counted[0] += 1

    tasks = [asyncio.create_task(client()) for _ in range(4)]
    await eventually(lambda: counted[0] > 20, "load")
    try:
        yield counted
    finally:
        is_over.set()
        await asyncio.gather(*tasks)


async def test_a_backup_under_load_restores_adds_up_and_serves(
    world: World, postgres_server: PostgresServer, redis_url: str
) -> None:
    async with load(world) as counted:
        before = counted[0]
        folder, made = await asyncio.to_thread(world.back_up)
        assert counted[0] > before, "everything went on meanwhile"
    assert made.counts["requests"] >= before
    assert made.adapters == DIGESTS
    assert made.missing_adapters == []
    _check_with_sha256sum(folder)

    with postgres_server.empty() as url:
        store = world.folder / "restored-store"
        await asyncio.to_thread(restore, folder, url, store)

        async with open_database(database_settings(serving_url(url))) as db:
            report = await check_invariants(db.sessions)
            assert [check.name for check in report.checks if not check.ok] == []
            assert report.identity.billed >= 20 * before
            assert report.identity.difference == 0
        for digest in DIGESTS:
            for name in ADAPTER_FILES:
                path = AdapterStore.folder_in(store / "adapters", digest) / name
                source = AdapterStore.folder_in(world.folder / "store" / "adapters", digest) / name
                assert path.read_bytes() == source.read_bytes()
        await _answers(url, redis_url, world)


def _check_with_sha256sum(folder: Path) -> None:
    subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=folder, check=True)


async def _answers(url: str, redis_url: str, world: World) -> None:
    """A gateway on the restored database answers the tenant's own key, and the books follow."""
    folder = world.folder / "gw"
    folder.mkdir()
    settings = settings_for(url, redis_url, folder)
    async with FakeEngine(
        folder, max_model_len=tiny_model.CONTEXT_LENGTH, vocab_size=400
    ) as engine:
        announce(redis_url, engine)
        async with (
            open_gateway(settings) as gateway,
            serving(gateway) as address,
            httpx.AsyncClient(base_url=address, timeout=60) as http,
        ):
            await eventually(lambda: gateway.router.num_ready > 0, "a ready engine")
            answer = await http.post(
                "/v1/completions",
                json={"model": BASE, "prompt": "hello", "max_tokens": 3},
                headers={"authorization": f"Bearer {world.customer.secret}"},
            )
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 3
    async with open_database(database_settings(serving_url(url))) as db:
        report = await check_invariants(db.sessions)
    assert [check.name for check in report.checks if not check.ok] == []


async def test_only_into_something_empty(world: World, postgres_server: PostgresServer) -> None:
    folder, _ = world.back_up()
    with pytest.raises(BackupError, match="not empty"):
        world.back_up()
    with postgres_server.empty() as url:
        with psycopg.connect(url) as connection:
            connection.execute("create table somebodys (id int)")
        with pytest.raises(BackupError, match=r"not empty \(it has public.somebodys\)"):
            restore(folder, url, world.folder / "s")
        with psycopg.connect(url) as connection:
            tables = connection.execute(
                "select tablename from pg_tables where schemaname = 'public'"
            ).fetchall()
    assert tables == [("somebodys",)]


async def test_a_damaged_or_unfinished_backup_is_refused_before_anything_is_touched(
    world: World, postgres_server: PostgresServer
) -> None:
    folder, _ = world.back_up()
    adapter = AdapterStore.folder_in(folder / "adapters", DIGESTS[0]) / ADAPTER_FILES[0]
    damages: list[tuple[Path, str]] = [
        (folder / "database.dump", "damaged"),
        (adapter, "damaged"),
        (folder / "manifest.json", "damaged|cannot be read"),
    ]
    with postgres_server.empty() as url:
        for path, told in damages:
            good = path.read_bytes()
            path.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
            with pytest.raises(BackupError, match=told):
                restore(folder, url, world.folder / "s")
            path.write_bytes(good)
        (folder / "extra").write_text("x")
        with pytest.raises(BackupError, match="too many or too few"):
            restore(folder, url, world.folder / "s")
        (folder / "extra").unlink()
        sums = (folder / "SHA256SUMS").read_text()
        (folder / "SHA256SUMS").unlink()
        with pytest.raises(BackupError, match="no finished backup"):
            restore(folder, url, world.folder / "s")
        (folder / "SHA256SUMS").write_text(sums)
        with psycopg.connect(url) as connection:
            row = connection.execute(
                "select count(*) from pg_tables where schemaname = 'public'"
            ).fetchone()
        assert row == (0,)
        restore(folder, url, world.folder / "s")


async def test_other_secrets_are_noticed(world: World, postgres_server: PostgresServer) -> None:
    folder, made = world.back_up()
    assert set(made.secrets) == set(SECRETS)
    other = SECRETS | {"key_pepper": "another-pepper-0123456789abcdefghij"}
    with postgres_server.empty() as url:
        with pytest.raises(BackupError, match="key_pepper: API keys are known"):
            restore(folder, url, world.folder / "s", secrets=other)
        restore(folder, url, world.folder / "s", secrets=other, allow_other_secrets=True)


async def test_no_secret_is_in_a_backup_unless_asked_for(world: World) -> None:
    secrets_file = world.folder / "secrets.json"
    secrets_file.write_text(json.dumps(SECRETS))
    without, _ = world.back_up("without")
    with_them, made = world.back_up("with", secrets_file=secrets_file)

    def holders(folder: Path) -> list[str]:
        return [
            path.name
            for path in folder.rglob("*")
            if path.is_file() and SECRETS["key_pepper"].encode() in path.read_bytes()
        ]

    assert holders(without) == []
    assert holders(with_them) == ["secrets.json"]
    assert made.has_secrets
    for folder in (without, with_them):
        for path in [folder, *folder.rglob("*")]:
            if path.is_file() or path == folder:
                assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


async def test_an_adapter_that_the_store_lost_is_told_of(world: World) -> None:
    import shutil

    shutil.rmtree(AdapterStore.folder_in(world.folder / "store" / "adapters", DIGESTS[0]))

    _, made = world.back_up()

    assert (made.adapters, made.missing_adapters) == ([DIGESTS[1]], [DIGESTS[0]])


async def test_a_login_that_may_not_read_everything_says_so(world: World) -> None:
    with pytest.raises(BackupError, match="owner's in LORAPLEX_DATABASE_URL"):
        make_backup(
            serving_url(world.url),
            world.store_url,
            world.folder / "b",
            secrets={},
            secrets_file=None,
            tell=lambda _: None,
        )


def test_a_pg_dump_older_than_the_server_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tool(version: str) -> Path:
        path = tmp_path / f"pg_dump-{version}"
        path.write_text(f"#!/bin/sh\necho 'pg_dump (PostgreSQL) {version}'\n")
        path.chmod(0o755)
        return path

    monkeypatch.setattr(postgres_tools, "_candidates", lambda name: [tool("14.9")])
    with pytest.raises(
        BackupError, match=r"pg_dump of Postgres 18 or newer .*14.*postgresql-client-18"
    ):
        postgres_tools.find_tool("pg_dump", 18)
    monkeypatch.setattr(postgres_tools, "_candidates", lambda name: [tmp_path / "missing"])
    with pytest.raises(BackupError, match="none found"):
        postgres_tools.find_tool("pg_dump", 18)
    monkeypatch.setattr(
        postgres_tools,
        "_candidates",
        lambda name: [tool("14.9"), tool("19.1"), tool("18.2")],
    )
    assert postgres_tools.find_tool("pg_dump", 18).major == 18


def test_a_password_goes_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "elsewhere")
    found = postgres_tools.environment_of("postgresql://me:s3cret@db:5433/x?sslmode=require")

    assert (found["PGPASSWORD"], found["PGHOST"], found["PGSSLMODE"]) == ("s3cret", "db", "require")
    with pytest.raises(BackupError, match="keepalives"):
        postgres_tools.environment_of("postgresql://me@db/x?keepalives=1")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql//me:hunter2@db/x",
        "postgresql://me:hunter2@[db/x",
        "postgresql://me:hunter2@db/x?password",
        "host=db password=hunter2 bogus",
    ],
)
def test_a_url_that_cannot_be_read_is_not_repeated(url: str) -> None:
    with pytest.raises(BackupError, match="cannot be read: write postgresql://") as caught:
        postgres_tools.environment_of(url)

    told = "".join(traceback.format_exception(caught.value))
    assert "hunter2" not in told


async def test_the_command_line_saves_a_fleet_and_builds_a_new_data_directory(
    world: World, short_tmp_path: Path
) -> None:
    from loraplex_platform.local import credentials
    from loraplex_platform.local.data_dir import write_private

    source = short_tmp_path / "old"
    source.mkdir()
    credentials.load_or_make(source / "secrets.json")
    kept = json.loads((source / "secrets.json").read_text())
    write_private(source / "secrets.json", kept | SECRETS)

    async def run(*arguments: str, **env: str) -> tuple[int | None, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loraplex_platform.cli", *arguments),
            env=clean | env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        return process.returncode, output.decode()

    to = short_tmp_path / "b"
    saved = await run(
        *("backup", "--to", str(to), "--store-url", world.store_url),
        *("--data-dir", str(source), "--include-secrets"),
        LORAPLEX_DATABASE_URL=world.url,
    )
    assert saved[0] == 0, saved
    assert "saved 1 tenants" in saved[1]

    new = short_tmp_path / "new"
    restored = await run("restore", str(to), "--data-dir", str(new))
    assert restored[0] == 0, restored
    assert "restored 1 tenants" in restored[1]
    assert json.loads((new / "secrets.json").read_text()) == kept | SECRETS
    assert (new / "postgres" / "cluster").is_dir()
    assert manifest.read(to).adapters == DIGESTS
    assert AdapterStore((new / "store").as_uri()).has(DIGESTS[0])
    again = await run("restore", str(to), "--data-dir", str(new))
    assert again[0] == 1
    assert "has a database already" in again[1]
    nowhere = await run("backup", "--to", str(short_tmp_path / "c"), "--data-dir", str(new))
    assert nowhere[0] == 1
    assert "loraplex up" in nowhere[1]
