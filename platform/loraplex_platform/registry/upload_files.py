"""The bytes of resumable uploads: one folder each, whose file sizes are the offsets.

    <quarantine>/uploads/<32 hex>/{adapter_config.json, adapter_model.safetensors}

Nothing beside the files says how far an upload is, so that nothing can be wrong about it after a crash:
what was written is there, and a client is told to go on behind it. A lock on the folder (flock) lets one
request at a time work on an upload, in this process and in all others that share the folder; a killed
process holds none.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import UUID

import structlog
from loraplex_engine.artifact import check_file_name

from loraplex_platform.errors import BodyTooLargeError, StorageFullError
from loraplex_platform.registry.errors import UploadBusyError, UploadGoneError

log = structlog.get_logger(__name__)

_Result = TypeVar("_Result")

_WRITE_BYTES: Final = 1 << 20
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# A folder whose row is in a transaction that is not committed yet is never so old.
_ORPHAN_AGE_S: Final = 3600.0
# Room that stays free for the process itself and for what lies beside.
_SPARE_BYTES: Final = 64 << 20


class LockedUpload:
    """One upload's folder, for whoever holds its lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def offset(self, file_name: str) -> int:
        """How many bytes of a file are here."""
        return _size_of(self.folder / file_name)

    async def append(self, file_name: str, chunks: AsyncIterator[bytes], *, size_bytes: int) -> int:
        """Write behind what is there; the new offset. Whatever ends it, what came is kept.

        Args:
            size_bytes: of the whole file.

        Raises:
            BodyTooLargeError: more than that came.
            StorageFullError: there is no room for it.
        """
        check_file_name(file_name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.folder / file_name, flags, 0o600)
        try:
            offset = os.fstat(descriptor).st_size
            pending = bytearray()
            try:
                async for chunk in chunks:
                    pending += chunk
                    if offset + len(pending) > size_bytes:
                        raise BodyTooLargeError(
                            f"{file_name}: more than the {size_bytes} bytes that were declared; begin a new"
                            " upload with its true size.",
                            param=file_name,
                        )
                    if len(pending) >= _WRITE_BYTES:
                        piece, pending = pending, bytearray()
                        offset += await _in_thread(_write, descriptor, piece)
            finally:
                # Also of a request that was cut: the sender need not send it again.
                piece = pending[: max(0, size_bytes - offset)]
                offset += await _in_thread(_write, descriptor, piece)
                await _in_thread(os.fsync, descriptor)
            return offset
        finally:
            os.close(descriptor)


class UploadFolders:
    """All unfinished uploads below one folder, which several processes may share."""

    def __init__(self, root: Path) -> None:
        """`root` is the quarantine's; nothing is made before the first upload."""
        self._root = root / "uploads"

    def make(self, upload_id: UUID, size_bytes: int) -> None:
        """A folder for a new upload.

        Raises:
            StorageFullError: there is no room for all of it now.
        """
        with _room():
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if shutil.disk_usage(self._root).free < size_bytes + _SPARE_BYTES:
                raise _full()
            self._folder(upload_id).mkdir(mode=0o700)

    def offset(self, upload_id: UUID, file_name: str) -> int:
        """How many bytes of a file are here; 0 also where the upload is not."""
        return _size_of(self._folder(upload_id) / file_name)

    @contextlib.contextmanager
    def locked(self, upload_id: UUID) -> Iterator[LockedUpload]:
        """The upload for this request alone.

        Raises:
            UploadBusyError: another one has it.
            UploadGoneError: its bytes are not here.
        """
        folder = self._folder(upload_id)
        try:
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise UploadGoneError(
                "The bytes of this upload are not here: it has ended, or another control process that does not"
                " share LORAPLEX_QUARANTINE_DIR began it. Begin a new one.",
                code="upload_not_here",
            ) from None
        try:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UploadBusyError from None
            yield LockedUpload(folder)
        finally:
            os.close(held)

    def remove(self, upload_id: UUID) -> bool:
        """Delete the bytes, unless a request is working on them; whether they are gone."""
        try:
            with self.locked(upload_id) as upload:
                shutil.rmtree(upload.folder, ignore_errors=True)
        except UploadBusyError:
            return False
        except UploadGoneError:
            pass
        return True

    def old_ones(self) -> list[UUID]:
        """Uploads that nothing was written to for an hour: without a row they are nobody's."""
        found = []
        now_s = time.time()
        for folder in self._root.glob("[0-9a-f]*"):
            with contextlib.suppress(FileNotFoundError, ValueError):
                newest_s = max(
                    path.stat().st_mtime for path in (folder, *folder.iterdir()) if path.exists()
                )
                if now_s - newest_s >= _ORPHAN_AGE_S:
                    found.append(UUID(hex=folder.name))
        return found

    def _folder(self, upload_id: UUID) -> Path:
        return self._root / upload_id.hex


async def _in_thread(work: Callable[..., _Result], *args: Any) -> _Result:  # noqa: ANN401 (the work's)
    """As `asyncio.to_thread`, but over when the thread is, also for who is cancelled meanwhile: what it works on
    is closed and unlocked behind it, and the number of a closed file is soon another file's.
    """
    running = asyncio.get_running_loop().run_in_executor(None, work, *args)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        running.exception()  # seen: who is cancelled is told that
        raise cancelled
    return running.result()


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _write(descriptor: int, data: bytearray) -> int:
    """All of it; what a full disk took before it was full stays, and counts as received."""
    with _room():
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
    return len(data)


@contextlib.contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        log.error("upload_storage_full", reason=str(error))
        raise _full() from error


def _full() -> StorageFullError:
    return StorageFullError(
        "The server has no room for this upload now; what it has of it is kept. Try again later.",
        retry_after_s=60,
    )
