"""The scripts on a server that refuses keys of different hash slots in one call, as clusters do."""

from __future__ import annotations

import socket
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
import redis
from loraplex_platform.ids import uuid7
from loraplex_platform.local import embedded
from loraplex_platform.outbox.queries import Message
from loraplex_platform.quotas.records import EffectiveLimits
from loraplex_platform.rates.admission import Claim, RateLimitedError, TokenUse
from loraplex_platform.rates.queries import Place
from loraplex_platform.rates.versions import version_topic

from tests.platform.rates.stand import (
    ACME,
    ACME_KEY,
    GLOBEX,
    World,
    admitted,
    claim,
    limit,
    never,
    shared,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NUM_SLOTS = 16384


def _free_port() -> int:
    """Low enough: the cluster's own port is 10,000 higher."""
    for port in range(21_000, 29_000):
        with socket.socket() as probe, socket.socket() as bus:
            try:
                probe.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


@pytest.fixture
def cluster_url(tmp_path: Path) -> Iterator[str]:
    """One node that holds all slots."""
    port = _free_port()
    command = [
        *(embedded._redis_binary(), "--port", str(port), "--bind", "127.0.0.1"),
        *("--cluster-enabled", "yes", "--dir", str(tmp_path), "--save", "", "--appendonly", "no"),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            with redis.Redis(port=port) as client:
                _until_it_serves(client)
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.kill()


def _until_it_serves(client: redis.Redis) -> None:
    deadline_s = time.monotonic() + 30
    has_slots = False
    while True:
        try:
            if not has_slots:
                client.execute_command(  # type: ignore[no-untyped-call]
                    "CLUSTER", "ADDSLOTS", *range(_NUM_SLOTS)
                )
                has_slots = True
            client.set("x", 1)
        except redis.RedisError:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        else:
            return


async def test_no_script_crosses_slots(cluster_url: str) -> None:
    with redis.Redis.from_url(cluster_url) as client, pytest.raises(redis.ResponseError):
        client.eval("return 1", 2, "a", "b")  # so it would be noticed
    world = World(cluster_url)
    gateway = world.gateway()
    limits = (
        limit("rpm", 1, burst=5),
        limit("tpm_total", 10**6, scope_kind="key", scope_id=ACME_KEY),
        limit("concurrency", 2),
        shared("rpm", 10**6),
        shared("concurrency", 3),
    )
    world.running = [Place(claim().request_id, "tenant", ACME)]

    # Filling, taking from both owners' limits, renewing, giving back, refusing, looking.
    first = await gateway.admit(claim(*limits), never)
    assert not first.is_degraded
    await gateway.renew([first])
    with pytest.raises(RateLimitedError) as refusal:
        await gateway.admit(claim(*limits), never)
    assert "x-loraplex-rate-limits" not in refusal.value.headers
    await gateway.release(first, TokenUse(1, 1))
    assert len(await admitted([gateway], [claim(*limits) for _ in range(9)])) == 1
    verdict, views = await gateway.look(claim(*limits))
    assert (verdict, len(views)) == ("OK", 3)  # those that tenants share are shown to nobody
    news = {"tenant_id": str(ACME), "key_id": str(ACME_KEY), "version": 7}
    await version_topic(world.client()).handle(Message(1, "x", news, 1))
    assert (await gateway.look(claim(*limits)))[0] == "STALE"
    await version_topic(world.client()).handle(Message(2, "y", {"limits_version": 3}, 1))
    limits_of_now = EffectiveLimits(version=1, shared_version=3)

    async def reload() -> Claim:
        return claim(limits=limits_of_now)

    passed = await gateway.admit(claim(tenant_id=GLOBEX, key_id=uuid7()), reload)
    assert passed.claim.limits is limits_of_now
    assert not passed.is_degraded
    await world.close()
