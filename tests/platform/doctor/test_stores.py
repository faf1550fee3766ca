"""Redis, the adapter store, the model's folder, secrets and spool, broken in each way that a check knows."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from loraplex_engine.protocol import ReplicaRecord
from loraplex_engine.registry import ReplicaRegistry
from loraplex_platform.doctor.stores import judge_redis
from loraplex_platform.gateway.spool import SpoolFile
from loraplex_platform.local.credentials import load_or_make
from loraplex_platform.tenancy.keys import mint

from tests.platform.doctor.conftest import Ask
from tests.support.postgres import serving_url
from tests.support.processes import until
from tests.support.tiny_fleet import write_model

GOOD = {
    "LORAPLEX_KEY_PEPPER": "pepper-0123456789abcdefghijklmnop",
    "LORAPLEX_SALT_KEY": "salting-0123456789abcdefghijklmno",
    "LORAPLEX_SESSION_KEY": "session-0123456789abcdefghijklmno",
    "LORAPLEX_WEBHOOK_KEY": "webhook-0123456789abcdefghijklmno",
}


@pytest.fixture
def settings_of(redis_url: str) -> Iterator[redis.Redis]:
    """A client that may change the server's configuration, which is as it was afterwards."""
    client = redis.Redis.from_url(redis_url)
    names = ("maxmemory", "maxmemory-policy", "appendonly", "save")
    before: dict[str, Any] = {}
    for name in names:
        before |= client.config_get(name)
    yield client
    for name, value in before.items():
        client.config_set(name, value)
    client.close()


async def test_a_sound_redis(ask: Ask, redis_url: str) -> None:
    for name in ("reachable", "version", "eviction", "persistence"):
        found = await ask(f"redis.{name}", LORAPLEX_REDIS_URL=redis_url)
        assert found.status == "ok", (name, found)


async def test_a_redis_that_is_not_there(ask: Ask) -> None:
    url = "redis://127.0.0.1:1/0"

    reachable = await ask("redis.reachable", LORAPLEX_REDIS_URL=url)
    policy = await ask("redis.eviction", LORAPLEX_REDIS_URL=url)

    assert (reachable.status, policy.status) == ("fail", "skipped")
    assert "see redis.reachable" in policy.found


async def test_a_redis_that_throws_away_what_counts(
    ask: Ask, redis_url: str, settings_of: redis.Redis
) -> None:
    settings_of.config_set("maxmemory-policy", "allkeys-lru")
    found = await ask("redis.eviction", LORAPLEX_REDIS_URL=redis_url)
    settings_of.config_set("maxmemory-policy", "noeviction")
    settings_of.config_set("maxmemory", 600_000)
    full = await ask("redis.eviction", LORAPLEX_REDIS_URL=redis_url)

    assert found.status == "warn"
    assert found.remedy is not None
    assert "maxmemory-policy noeviction" in found.remedy
    assert full.status == "fail"
    assert "about to refuse writes" in full.found


async def test_a_redis_that_saves_and_one_that_fails_to(
    ask: Ask, redis_url: str, settings_of: redis.Redis, tmp_path: Path
) -> None:
    settings_of.config_set("appendonly", "yes")
    saves = await ask("redis.persistence", LORAPLEX_REDIS_URL=redis_url)
    settings_of.config_set("appendonly", "no")
    # A dump whose place is taken by a folder cannot be written.
    name = settings_of.config_get("dbfilename")["dbfilename"]
    blocked = Path(settings_of.config_get("dir")["dir"]) / name
    was = blocked.with_suffix(".was")
    if blocked.exists():
        blocked.rename(was)
    blocked.mkdir()
    settings_of.bgsave()
    await until(lambda: settings_of.info()["rdb_last_bgsave_status"] == "err")
    failed = await ask("redis.persistence", LORAPLEX_REDIS_URL=redis_url)
    blocked.rmdir()
    settings_of.bgsave()
    await until(lambda: settings_of.info()["rdb_last_bgsave_status"] == "ok")

    assert saves.status == "warn"
    assert "appendonly" in saves.found
    assert failed.status == "fail"
    assert "rdb_last_bgsave_status" in failed.found


def test_an_old_redis() -> None:
    assert judge_redis("6.0.16").status == "fail"
    assert judge_redis("6.2.7").status == judge_redis("7.4.1").status == "ok"


# ------------------------------------------------------------------------------------ engines


async def test_engines_say_in_redis_that_they_are_ready(
    ask: Ask, redis_url: str, db_url: str
) -> None:
    record: dict[str, Any] = {
        "replica_id": "engine-1",
        "incarnation": "1",
        "address": "ipc:///tmp/x",
        "curve_public_key": None,
        "base_model": "tiny",
        "model_fingerprint": "f",
        "kv_format": "k",
        "device": "cpu",
        "isa": "AVX2",
        "dtype": "float32",
        "torch_version": "2",
        "backends": {},
        "max_model_len": 1,
        "max_loras": 1,
        "max_lora_rank": 8,
        "state": "ready",
        "started_at_unix_s": 1.0,
        "row_rule_holds": False,
    }
    registry = ReplicaRegistry(redis_url, lambda: ReplicaRecord(**record))
    registry.start()
    client = redis.Redis.from_url(redis_url)
    try:
        await until(lambda: bool(client.keys("loraplex:replica:*")))
        ready = await ask("fleet.engines", LORAPLEX_REDIS_URL=redis_url)
        record["state"] = "starting"
        registry.notify()
        await until(lambda: b'"starting"' in client.get("loraplex:replica:engine-1"))
        starting = await ask("fleet.engines", LORAPLEX_REDIS_URL=redis_url)
    finally:
        await asyncio.to_thread(registry.stop)
        client.close()
    with psycopg.connect(db_url, autocommit=True) as connection:
        connection.execute("insert into replicas (replica_id, record) values ('engine-1', '{}')")
    database = {"LORAPLEX_DATABASE_URL": serving_url(db_url)}
    gone = await ask("fleet.engines", LORAPLEX_REDIS_URL=redis_url, **database)
    redis_away = await ask("fleet.engines", LORAPLEX_REDIS_URL="redis://127.0.0.1:1/0", **database)

    # It took its record down, though the worker has seen it just now.
    assert (gone.status, redis_away.status) == ("fail", "warn")
    assert (ready.status, ready.found) == ("ok", "ready: engine-1")
    assert (starting.status, starting.found) == ("warn", "engine-1 is starting")


# ------------------------------------------------------------------------------------ HTTP


@pytest.mark.parametrize("process", ["gateway", "worker", "control", "console"])
async def test_a_process_that_does_not_answer(ask: Ask, process: str) -> None:
    name = f"fleet.{process}s" if process == "gateway" else f"fleet.{process}"
    url = "http://127.0.0.1:1"

    found = await ask(name, **{f"LORAPLEX_{process.upper()}_URL": url})

    assert found.status == "fail"
    assert "127.0.0.1:1 does not answer" in found.found


async def test_a_console_address_that_is_none(ask: Ask) -> None:
    found = await ask("fleet.console", LORAPLEX_CONSOLE_URL="console.example.com")

    assert found.status == "fail"
    assert found.remedy is not None
    assert "https://" in found.remedy


# ------------------------------------------------------------------------------------ store, model


async def test_stores(ask: Ask, tmp_path: Path) -> None:
    sound = await ask("store.reachable", LORAPLEX_STORE_URL=(tmp_path / "store").as_uri())
    (tmp_path / "a-file").write_text("")
    blocked = await ask("store.reachable", LORAPLEX_STORE_URL=(tmp_path / "a-file").as_uri())
    wrong = await ask("store.reachable", LORAPLEX_STORE_URL="/var/lib/store")

    assert [one.status for one in (sound, blocked, wrong)] == ["ok", "fail", "fail"]
    assert blocked.remedy is not None
    assert blocked.remedy.startswith("install -d")
    assert "file:///absolute/path" in wrong.found


@pytest.mark.slow
async def test_a_bucket_that_is_not_there(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")

    found = await ask("store.reachable", LORAPLEX_STORE_URL="s3://nowhere/adapters")

    assert found.status == "fail"
    assert found.remedy is not None
    assert "AWS_ENDPOINT_URL" in found.remedy


async def test_a_model_folder_that_lacks_something(ask: Ask, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    variables = {"LORAPLEX_MODEL_DIR": str(folder), "LORAPLEX_BASE_MODEL": "tiny"}
    whole = await ask("model.files", **variables)
    weights = next(folder.glob("*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    cut = await ask("model.files", **variables)
    weights.write_bytes(b"not one")
    garbled = await ask("model.files", **variables)
    weights.write_bytes(content)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": weights.name, "b": "model-2.safetensors"}}))
    sharded = await ask("model.files", **variables)
    index.unlink()
    (folder / "tokenizer.json").unlink()
    without = await ask("model.files", **variables)
    shutil.rmtree(folder)
    gone = await ask("model.files", **variables)

    assert whole.status == "ok"
    assert {one.status for one in (cut, garbled, sharded, without, gone)} == {"fail"}
    assert "cut off" in cut.found
    assert "no whole safetensors file" in garbled.found
    assert "lacks model-2.safetensors" in sharded.found
    assert "lacks tokenizer.json" in without.found
    assert gone.remedy == "loraplex models pull tiny"


# ------------------------------------------------------------------------------------ secrets


async def test_secrets_that_are_well(ask: Ask) -> None:
    given = GOOD | {"LORAPLEX_ADMIN_KEY": mint("ak").secret}

    for name in ("present", "strong", "distinct", "own", "closed"):
        found = await ask(f"secrets.{name}", **given)
        assert found.status == "ok", (name, found)


async def test_secrets_that_are_not(ask: Ask, tmp_path: Path) -> None:
    salt = "LORAPLEX_SALT_KEY"
    short = await ask("secrets.strong", **GOOD | {salt: "short"})
    monotone = await ask("secrets.strong", **GOOD | {salt: "ab" * 20})
    admin = await ask("secrets.strong", **GOOD | {"LORAPLEX_ADMIN_KEY": "lpx_ak_made-up"})
    tenants = await ask("secrets.strong", **GOOD | {"LORAPLEX_ADMIN_KEY": mint().secret})
    same = await ask("secrets.distinct", **GOOD | {salt: GOOD["LORAPLEX_KEY_PEPPER"]})
    example = await ask("secrets.own", **GOOD | {salt: "changeme-changeme-changeme-changeme"})
    none = await ask("secrets.present")
    few = await ask("secrets.present", **{salt: GOOD[salt]})

    assert {one.status for one in (short, monotone, admin, same, example)} == {"fail"}
    assert all("LORAPLEX_SALT_KEY" in one.found for one in (short, monotone, same, example))
    assert admin.remedy == tenants.remedy == "loraplex keys mint-admin"
    assert "LORAPLEX_KEY_PEPPER = LORAPLEX_SALT_KEY" in same.found
    assert (none.status, few.status) == ("skipped", "warn")
    for one in (short, monotone, admin, same, example):
        assert GOOD["LORAPLEX_KEY_PEPPER"] not in f"{one.found}{one.remedy}"


async def test_production_with_the_secrets_of_a_local_fleet(ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    made = load_or_make(folder / "secrets.json")
    given = GOOD | {"LORAPLEX_KEY_PEPPER": made.key_pepper}

    shared = await ask("secrets.own", **given)
    local = await ask("secrets.own", is_local=True, **given)
    closed = await ask("secrets.closed", is_local=True, **given)
    (folder / "secrets.json").chmod(0o644)
    opened = await ask("secrets.closed", is_local=True, **given)
    (folder / "secrets.json").write_text("{")
    damaged = await ask("secrets.present", is_local=True)

    assert shared.status == "fail"
    assert shared.found.startswith("LORAPLEX_KEY_PEPPER are those of the local fleet")
    assert (local.status, closed.status) == ("ok", "ok")
    assert opened.status == "fail"
    assert opened.remedy == f"chmod 600 {folder / 'secrets.json'}"
    assert damaged.status == "fail"


# ------------------------------------------------------------------------------------ spool


async def test_a_spool_with_bills_in_it(ask: Ask, tmp_path: Path) -> None:
    import os

    folder = tmp_path / "spool"
    variables = {"LORAPLEX_SPOOL_DIR": str(folder)}
    none = await ask("books.spool", **variables)
    folder.mkdir()
    file = SpoolFile.create(folder)
    empty = await ask("books.spool", **variables)
    file.append([b"a record"], 4096)
    fresh = await ask("books.spool", **variables)
    os.utime(file.path, (1, 1))
    old = await ask("books.spool", **variables)
    file.close()
    file.path.with_suffix(".rejected").write_bytes(b"refused")
    rejected = await ask("books.spool", **variables)

    assert [one.status for one in (none, empty, fresh, old, rejected)] == [
        *("ok", "ok", "warn", "fail", "fail"),
    ]
    assert "hold bills that the books refuse" in rejected.found
