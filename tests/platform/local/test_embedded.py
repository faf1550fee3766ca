from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import redis
from loraplex_platform.local import embedded
from loraplex_platform.local.embedded import (
    EmbeddedServer,
    EmbeddedServerError,
    start_postgres,
    start_redis,
)


@contextmanager
def postgres(folder: Path) -> Iterator[EmbeddedServer]:
    server = start_postgres(folder)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def running_redis(folder: Path) -> Iterator[EmbeddedServer]:
    server = start_redis(folder)
    try:
        yield server
    finally:
        server.stop()


def _kill(server: EmbeddedServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    if server.process is not None:
        server.process.wait()


def test_postgres_keeps_its_data_over_stop_crash_and_stale_files(short_tmp_path: Path) -> None:
    folder = short_tmp_path / "pg"
    # What a start that was killed in the middle of initdb leaves.
    (folder / "cluster.new" / "base").mkdir(parents=True)
    (folder / "cluster.new" / "PG_VERSION").write_text("18\n")

    with postgres(folder) as server:
        with psycopg.connect(server.url) as connection:
            connection.execute("create table kept (n int)")
            connection.execute("insert into kept values (1)")
        with postgres(folder) as found:
            assert (found.was_adopted, found.pid) == (True, server.pid)
        assert not server.is_running, "an adopted server is stopped like any other"

    with postgres(folder) as server:
        assert not server.was_adopted
        _kill(server)
        # A pid that now belongs to another program must not pass for a server, nor be signalled.
        pid_file = folder / "cluster" / "postmaster.pid"
        lines = pid_file.read_text().splitlines(keepends=True)
        pid_file.write_text("".join([f"{os.getpid()}\n", *lines[1:]]))
        (folder / "run" / ".s.PGSQL.5432.lock").write_text(f"{os.getpid()}\n")

        with postgres(folder) as again, psycopg.connect(again.url) as connection:
            assert connection.execute("select n from kept").fetchall() == [(1,)]
            assert connection.execute("show listen_addresses").fetchone() == ("",)
    assert stat.S_IMODE((folder / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_server_that_cannot_start_says_why(short_tmp_path: Path) -> None:
    folder = short_tmp_path / "pg"
    (folder / "cluster").mkdir(parents=True)

    with pytest.raises(EmbeddedServerError, match="--database-url"):
        start_postgres(folder, is_durable=False)


def test_redis_is_found_again_restarted_after_a_crash_and_stopped(short_tmp_path: Path) -> None:
    folder = short_tmp_path / "redis"

    with running_redis(folder) as server:
        client = redis.Redis.from_url(server.url)
        client.set("key", "value")
        with running_redis(folder) as found:
            assert (found.was_adopted, found.pid) == (True, server.pid)
            assert found.is_running
        client.close()
    with running_redis(folder) as server:
        _kill(server)
        with running_redis(folder) as again:
            client = redis.Redis.from_url(again.url)
            assert client.get("key") is None, "nothing is kept"
            assert client.config_get("port") == {"port": "0"}
            client.close()
    assert not again.socket_path.exists()


def test_a_folder_with_a_long_name_gets_a_short_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25) / "redis"

    with running_redis(folder) as server:
        assert len(os.fsencode(server.socket_path)) <= embedded.MAX_SOCKET_PATH_BYTES
        assert stat.S_IMODE(server.socket_path.parent.stat().st_mode) == 0o700
        with running_redis(folder) as found:
            assert found.was_adopted
    server.socket_path.parent.rmdir()


def test_without_a_redis_anywhere_the_message_says_what_to_do(
    short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")

    with pytest.raises(EmbeddedServerError, match="--redis-url"):
        start_redis(short_tmp_path)
    with pytest.raises(EmbeddedServerError, match="--database-url"):
        start_postgres(short_tmp_path)
