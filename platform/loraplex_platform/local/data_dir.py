"""The data directory of `loraplex up`: who may use it, and where each thing lies in it.

    secrets.json    pepper, salts, admin and session key; made once, 0600
    state.json      pid and addresses while the fleet runs (0600)
    demo.json       what `loraplex demo` and scripts need (0600), with --demo
    lock            held (flock) while a fleet runs; the kernel lets go of it when the holder dies
    logs/           one log per service, the earlier runs' as .1 to .5
    run/            unix sockets, port files, pid records
    postgres/ redis/ store/ journal/ spool/    the data itself

Everything is readable by its owner only. (As root, the embedded Postgres runs as a user of its own and
needs to pass through: then folders on its way are 0711, which lets nobody list or read them.)
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from loraplex_platform.local.errors import DataDirInUseError, SettingError

# sun_path is 108 bytes with its closing zero; redis and zmq both refuse longer ones.
MAX_SOCKET_PATH_BYTES = 107
LONGEST_SOCKET_NAME_BYTES = 32
LOGS_KEPT = 5


@dataclass(frozen=True, slots=True)
class DataDir:
    """Paths inside one data directory; `create` makes the folders."""

    root: Path

    @classmethod
    def create(cls, root: Path) -> DataDir:
        """The directory, made if needed, private to its owner.

        Raises:
            SettingError: it cannot be made or belongs to somebody else.
        """
        data_dir = cls(root.expanduser().resolve())
        try:
            make_private(data_dir.root)
            for folder in (
                data_dir.logs,
                data_dir.run,
                data_dir.pids,
                data_dir.store,
                data_dir.journal,
                data_dir.spool,
            ):
                make_private(folder)
        except OSError as error:
            raise SettingError(
                f"the data directory {data_dir.root} cannot be used ({error.strerror}): "
                "give another with --data-dir"
            ) from error
        return data_dir

    @property
    def logs(self) -> Path:
        """One log file per service."""
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """Port files and, where the path is short enough, sockets."""
        return self.root / "run"

    @property
    def pids(self) -> Path:
        """Records of the processes that this directory's fleet started."""
        return self.run / "pids"

    @property
    def store(self) -> Path:
        """The artifact store."""
        return self.root / "store"

    @property
    def journal(self) -> Path:
        """The engine's journal."""
        return self.root / "journal"

    @property
    def spool(self) -> Path:
        """What the gateway keeps while Postgres is away."""
        return self.root / "spool"

    @property
    def secrets_file(self) -> Path:
        """Pepper, salts, admin and session key."""
        return self.root / "secrets.json"

    @property
    def state_file(self) -> Path:
        """Pid and addresses while the fleet runs."""
        return self.root / "state.json"

    @property
    def demo_file(self) -> Path:
        """What scripts need to use the demo."""
        return self.root / "demo.json"

    @property
    def seed_file(self) -> Path:
        """The demo's keys and password, kept between runs (the database has only their hashes)."""
        return self.root / "demo-seed.json"

    def log_file(self, service: str) -> Path:
        """Where `service` logs."""
        return self.logs / f"{service}.log"

    def rotate_log(self, service: str) -> Path:
        """Move the last run's log out of the way and return the path of the new one."""
        log = self.log_file(service)
        if log.exists():
            for number in range(LOGS_KEPT - 1, 0, -1):
                older = log.with_name(f"{log.name}.{number}")
                if older.exists():
                    older.replace(log.with_name(f"{log.name}.{number + 1}"))
            log.replace(log.with_name(f"{log.name}.1"))
        return log

    def socket_dir(self) -> Path:
        """A private folder for unix sockets: `run/`, or a short one elsewhere if that path is too long.

        The short one's name follows from the data directory, so the next start finds the same, and it is
        used only if it is ours and closed to others.

        Raises:
            SettingError: the short folder exists and is not ours alone.
        """
        if len(os.fsencode(self.run)) + 1 + LONGEST_SOCKET_NAME_BYTES <= MAX_SOCKET_PATH_BYTES:
            return self.run
        base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        digest = sha256(os.fsencode(self.root)).hexdigest()[:12]
        folder = base / f"loraplex-{os.getuid()}-{digest}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o066:
            raise SettingError(
                f"{folder} is not a folder of ours alone (sockets go there because {self.run} is longer "
                "than a unix socket path may be): remove it, or give a shorter --data-dir"
            )
        return folder

    def lock(self) -> DataDirLock:
        """Hold the directory until the lock is closed or this process ends."""
        return DataDirLock(self)


class DataDirLock:
    """An flock on `lock`, with the holder's pid in the file for messages."""

    def __init__(self, data_dir: DataDir) -> None:
        self._data_dir = data_dir
        self._fd: int | None = None

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            DataDirInUseError: somebody else has it.
        """
        path = self._data_dir.root / "lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise DataDirInUseError(
                self._data_dir.root, int(text) if text.isdigit() else None
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let go. The file stays: removing it would let two holders lock two files of one name."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def make_private(folder: Path) -> None:
    """Make `folder` if needed; take reading and listing away from everybody else."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = folder.stat().st_mode & 0o777
    # Only passing through (0711) may have been given, to the embedded Postgres's own user.
    if mode & 0o066:
        folder.chmod(mode & 0o711)


def write_private(path: Path, content: Mapping[str, Any]) -> None:
    """Replace `path` by `content` as JSON, 0600, in one step."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        os.fchmod(fd, 0o600)
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(fd)
    new.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`, or None if there is no such file.

    Raises:
        SettingError: it is not a JSON object.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SettingError(f"{path} cannot be read ({error}): restore it or remove it") from error
    if not isinstance(content, dict):
        raise SettingError(f"{path} does not hold a JSON object: restore it or remove it")
    return content
