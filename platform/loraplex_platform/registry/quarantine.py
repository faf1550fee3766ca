"""Where uploads lie until they are checked: bounded in number, on disk, and empty after a crash.

A folder of the data volume, not of /tmp: that may be memory, and an upload may be half a gigabyte.
Each process has a folder of its own there and holds a lock in it, so that whoever starts next can
tell what a killed process left from what another one is working on.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import structlog

from loraplex_platform.errors import UnavailableError

log = structlog.get_logger(__name__)

MAX_UPLOADS = 4
# An upload that has to wait longer for its turn is told to come again.
WAIT_S = 30.0
_PREFIX = "process-"
_LOCK = "lock"


def default_root(store_url: str) -> Path:
    """Beside the adapters, if the store is a folder: that volume has room for them by definition."""
    parts = urlsplit(store_url)
    if parts.scheme == "file":
        return Path(unquote(parts.path)) / "quarantine"
    return Path(tempfile.gettempdir()) / f"loraplex-quarantine-{os.geteuid()}"


class Quarantine:
    """One process's part of the quarantine; made by `opened`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._turns = asyncio.Semaphore(MAX_UPLOADS)

    @classmethod
    @contextlib.contextmanager
    def opened(cls, root: Path) -> Iterator[Quarantine]:
        """The quarantine for as long as the block lasts; what dead processes left is deleted.

        Raises:
            OSError: the folder cannot be made or written.
        """
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(root / _LOCK):  # nobody looks at a folder between its making and its lock
            _delete_orphans(root)
            folder = root / f"{_PREFIX}{uuid.uuid4().hex}"
            folder.mkdir(mode=0o700)
            held = _lock(folder / _LOCK)
        try:
            yield cls(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)

    @contextlib.asynccontextmanager
    async def folder(self) -> AsyncIterator[Path]:
        """An empty folder for one upload, gone when the block ends.

        Raises:
            UnavailableError: too many uploads are being received.
        """
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turns.acquire()
        except TimeoutError:
            raise UnavailableError(
                "Too many uploads are being received; try again soon.",
                code="too_many_uploads",
                retry_after_s=10,
            ) from None
        try:
            made = await asyncio.to_thread(tempfile.mkdtemp, dir=self._folder)
            try:
                yield Path(made)
            finally:
                await asyncio.to_thread(shutil.rmtree, made, ignore_errors=True)
        finally:
            self._turns.release()


def _delete_orphans(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            held = _lock(folder / _LOCK, is_waiting=False)
        except BlockingIOError:
            continue  # its process lives
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)
        log.info("quarantine_emptied", folder=folder.name)


def _lock(path: Path, *, is_waiting: bool = True) -> int:
    """A descriptor that holds the lock until it is closed, by us or by our death."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if is_waiting else fcntl.LOCK_NB))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    held = _lock(path)
    try:
        yield
    finally:
        os.close(held)
