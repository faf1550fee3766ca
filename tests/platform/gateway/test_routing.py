"""Where replicas are found, and which one is chosen."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import redis
from loraplex_engine.protocol import REPLICA_KEY_PREFIX
from loraplex_platform.db import Replica
from loraplex_platform.db.session import Database
from loraplex_platform.errors import EngineUnavailableError
from loraplex_platform.gateway.routing import Router

from tests.platform.gateway.stand import BASE, announce, eventually
from tests.support.fake_engine import FakeEngine


def _router(db: Database, redis_url: str | None) -> Router:
    return Router(db.sessions, gateway_id="gw-test", redis_url=redis_url, poll_interval_s=0.05)


async def test_replicas_come_and_go(db: Database, redis_url: str, short_tmp_path: Path) -> None:
    async with _router(db, redis_url) as router:
        assert router.num_ready == 0
        async with FakeEngine(short_tmp_path, max_model_len=100) as engine:
            announce(redis_url, engine)
            await eventually(lambda: router.num_ready == 1)
            assert router.choose(BASE, 100).record.replica_id == "fake-0"
            for base, num_tokens, exclude in (
                (BASE, 101, ()),
                ("other", 1, ()),
                (BASE, 1, ("fake-0",)),
            ):
                with pytest.raises(EngineUnavailableError):
                    router.choose(base, num_tokens, exclude)
            assert router.max_model_len(BASE, 4096) == 100
            assert router.max_model_len(BASE, 50) == 50

            announce(redis_url, engine, state="draining")
            await eventually(lambda: router.num_ready == 0)
        connection = redis.Redis.from_url(redis_url)
        connection.delete(REPLICA_KEY_PREFIX + "fake-0")
        connection.close()
        await eventually(lambda: not router._replicas)


async def test_a_flushed_redis_does_not_disconnect_a_living_replica(
    db: Database, redis_url: str, short_tmp_path: Path
) -> None:
    async with _router(db, redis_url) as router, FakeEngine(short_tmp_path) as engine:
        announce(redis_url, engine)
        await eventually(lambda: router.num_ready == 1)

        connection = redis.Redis.from_url(redis_url)
        connection.flushall()
        connection.close()
        for _ in range(3):
            await router.refresh()

        assert router.num_ready == 1


async def test_without_redis_the_mirror_in_postgres_stands_in(
    db: Database, redis_url: str, short_tmp_path: Path
) -> None:
    async with FakeEngine(short_tmp_path) as engine:
        announce(redis_url, engine)
        connection = redis.Redis.from_url(redis_url)
        raw = connection.get(REPLICA_KEY_PREFIX + "fake-0")
        connection.close()
        assert isinstance(raw, bytes)
        async with db.transaction() as session:
            session.add(Replica(replica_id="fake-0", record=msgspec.json.decode(raw)))
            session.add(Replica(replica_id="odd", record={"not": "a record"}))

        dead = f"unix://{short_tmp_path}/nobody.sock"
        async with _router(db, dead) as router:
            await eventually(lambda: router.num_ready == 1)
        async with _router(db, None) as router:
            await eventually(lambda: router.num_ready == 1)


async def test_a_malformed_record_hides_only_itself(
    db: Database, redis_url: str, short_tmp_path: Path
) -> None:
    async with _router(db, redis_url) as router, FakeEngine(short_tmp_path) as engine:
        connection = redis.Redis.from_url(redis_url)
        connection.set(REPLICA_KEY_PREFIX + "odd", b"{")
        connection.close()
        announce(redis_url, engine)

        await eventually(lambda: router.num_ready == 1)


async def test_a_replica_on_tcp_without_our_key_is_left_alone(
    db: Database, redis_url: str, short_tmp_path: Path
) -> None:
    async with _router(db, redis_url) as router, FakeEngine(short_tmp_path) as engine:
        announce(redis_url, engine, address="tcp://127.0.0.1:1")
        await router.refresh()

        assert router.num_ready == 0
