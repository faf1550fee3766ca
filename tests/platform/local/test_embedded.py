from __future__ import annotations

import os
import pwd
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import redis
from loraplex_platform.local import embedded
from loraplex_platform.local.embedded import (
    EmbeddedServerError,
    end_server,
    start_postgres,
    start_redis,
)
from loraplex_platform.local.server_process import EmbeddedServer


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
        # Should one have outlived its keeper, the next keeper has one of its own all the same.
        with postgres(folder) as another, psycopg.connect(another.url) as connection:
            assert not server.is_running
            assert connection.execute("select n from kept").fetchall() == [(1,)]

    with postgres(folder) as server:
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


def test_only_who_started_postgres_may_connect(short_tmp_path: Path) -> None:
    with postgres(short_tmp_path / "pg") as server, psycopg.connect(server.url) as connection:
        rules = connection.execute(
            "select type, database, user_name, auth_method from pg_hba_file_rules"
        ).fetchall()
        names = connection.execute("select sys_name from pg_ident_file_mappings").fetchall()

        assert rules == [("local", ["all"], ["all"], "peer")]
        assert names == [(pwd.getpwuid(os.geteuid()).pw_name,)]
        owner = embedded._postgres_owner()
        if owner is None:
            return  # as ourselves: there is no second user to try it with
        told = subprocess.run(
            [embedded.postgres_binaries() / "psql", server.url, "-c", "select 1"],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            user=owner.pw_uid,
            group=owner.pw_gid,
            extra_groups=[],
        )
        assert "Peer authentication failed" in told.stderr
        assert told.returncode != 0


def test_a_cluster_of_an_older_release_is_closed_at_the_next_start(short_tmp_path: Path) -> None:
    folder = short_tmp_path / "pg"
    with postgres(folder):
        (folder / "cluster" / "pg_hba.conf").write_text("local all all trust\n")

    with postgres(folder) as server, psycopg.connect(server.url) as connection:
        rules = connection.execute("select auth_method from pg_hba_file_rules").fetchall()

    assert rules == [("peer",)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to someone else")
@pytest.mark.parametrize("start", [start_postgres, start_redis])
def test_a_folder_that_someone_else_planted_is_refused(
    short_tmp_path: Path, start: Callable[[Path], EmbeddedServer]
) -> None:
    folder = short_tmp_path / "planted"
    folder.mkdir(mode=0o777)
    os.chown(folder, 12345, 12345)

    with pytest.raises(EmbeddedServerError, match="not a folder of ours"):
        start(folder)

    assert folder.stat().st_uid == 12345
    assert list(folder.iterdir()) == []


def test_a_planted_link_or_file_is_refused_and_what_it_names_stays_as_it_is(
    short_tmp_path: Path,
) -> None:
    target, link, plain = (short_tmp_path / name for name in ("target", "link", "plain"))
    target.mkdir(mode=0o755)
    target.chmod(0o755)
    link.symlink_to(target)
    plain.write_text("")
    owner = embedded._postgres_owner()

    for path in (link, plain):
        with pytest.raises(EmbeddedServerError, match="not a folder of ours"):
            embedded._make_private_folder(path, owner)

    assert stat.S_IMODE(target.stat().st_mode) == 0o755
    assert target.stat().st_uid == os.geteuid()


def test_redis_is_ended_when_found_restarted_after_a_crash_and_stopped(
    short_tmp_path: Path,
) -> None:
    folder = short_tmp_path / "redis"

    with running_redis(folder) as server:
        client = redis.Redis.from_url(server.url)
        client.set("key", "value")
        client.close()
        with running_redis(folder) as another:
            assert not server.is_running
            assert another.is_running
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
        end_server("redis", folder)
        assert not server.is_running
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
