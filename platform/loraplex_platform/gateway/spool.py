"""Endings that Postgres could not take, on disk until it can: what an outage leaves of a bill.

A request that ends while Postgres is away is written here and fsynced before its client hears of the
end, and put on the books once Postgres answers: by this process, or by whichever gateway next finds
the folder's files without their owner. That is safe to do any number of times and at the same time as
the sweeper, since a settlement is a compare-and-set on the request's lease token.

| file in the folder | holds |
|---|---|
| `<name>.spool` | one gateway's records, under its flock; emptied whenever all of them are on the books |
| `<name>.rejected` | records that the books refuse whatever the time: for a person to look at |

A record is `length u32 | crc32 u32 | payload` (little endian), the payload msgpack. What is torn at
the end of a file was never acknowledged: its client heard nothing, and the sweeper settles it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import struct
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeVar
from uuid import UUID

import msgspec
import structlog

from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import UnavailableError
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.gateway.metrics import GatewayMetrics
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.records import Renewal, Settlement, SettleResult

log = structlog.get_logger(__name__)

SUFFIX: Final = ".spool"
REJECTED_SUFFIX: Final = ".rejected"
REPLAY_INTERVAL_S: Final = 0.5
ADOPT_INTERVAL_S: Final = 10.0
BATCH: Final = 100
_HEADER = struct.Struct("<II")
_MAX_RECORD_BYTES = 1 << 20

_Result = TypeVar("_Result")


class SpoolFolderError(Exception):
    """The folder cannot be used; the message says what to do."""


class SpoolError(Exception):
    """A record is not on disk: the spool is full, or its file cannot be written."""


class Void(msgspec.Struct, frozen=True, kw_only=True):
    """A request that no engine worked on, see `metering.void`."""

    request_id: UUID
    lease_token: int
    voided_by: str
    http_status: int | None
    error_code: str | None


class SpoolRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One ending: exactly one of the two."""

    settlement: Settlement | None = None
    void: Void | None = None

    @property
    def renewal(self) -> Renewal | None:
        """The lease that its settlement needs."""
        ending = self.settlement or self.void
        return None if ending is None else Renewal(ending.request_id, ending.lease_token)


async def write(sessions: SessionFactory, record: SpoolRecord) -> SettleResult:
    """Put an ending on the books; a second time it changes nothing.

    Raises:
        ValueError: the record is empty, or its token counts do not add up.
        DatabaseUnavailableError: try again later.
    """
    if record.settlement is not None:
        return await metering.settle(sessions, record.settlement)
    if record.void is None:
        raise ValueError("an empty record")
    return await metering.void(sessions, **msgspec.structs.asdict(record.void))


class SpoolFile:
    """One file of records, locked while it is open. Not thread-safe.

    Attributes:
        num_records: how many it holds.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._size = 0
        self._is_torn = False
        self.num_records = 0

    @classmethod
    def create(cls, folder: Path) -> SpoolFile:
        """A new one, ours alone.

        Raises:
            OSError: it cannot be made.
        """
        while True:
            path = folder / f"{uuid.uuid4().hex}{SUFFIX}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # Until it is locked it looks like a dead gateway's, and another may adopt and delete it.
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink > 0:
                    _sync_folder(folder)
                    return cls(path, fd)
            os.close(fd)

    @classmethod
    def adopt(cls, path: Path) -> tuple[SpoolFile, list[bytes]] | None:
        """A file whose owner is gone, and its records; None: it has an owner, or is gone itself.

        Raises:
            OSError: it cannot be read.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink == 0:  # another gateway was done with it in this moment
                os.close(fd)
                return None
        except BlockingIOError:
            os.close(fd)
            return None
        file = cls(path, fd)
        payloads = file._recover()
        return file, payloads

    def append(self, payloads: Sequence[bytes], max_bytes: int) -> None:
        """Add records and wait until they are on disk.

        Raises:
            SpoolError: none of them is.
        """
        if self._is_torn:
            raise SpoolError(f"{self.path} could not be written before")
        data = b"".join(
            _HEADER.pack(len(payload), zlib.crc32(payload)) + payload for payload in payloads
        )
        if self._size + len(data) > max_bytes:
            raise SpoolError(f"{self.path} has reached its bound of {max_bytes} bytes")
        try:
            _write_all(self._fd, data)
            os.fdatasync(self._fd)
        except OSError as error:
            self._cut_off()
            raise SpoolError(f"cannot write {self.path}: {error.strerror}") from error
        self._size += len(data)
        self.num_records += len(payloads)

    def clear(self) -> None:
        """Forget all records. A crash before that has reached the disk is a replay too many."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._size = self.num_records = 0
        self._is_torn = False

    def delete(self) -> None:
        """Give it up, empty as it is."""
        self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def close(self) -> None:
        """Give the lock back; the records stay for whoever comes next."""
        os.close(self._fd)

    def _recover(self) -> list[bytes]:
        data = self.path.read_bytes()
        payloads: list[bytes] = []
        at = num_skipped = 0
        while at + _HEADER.size <= len(data):
            payload = _whole_record_at(data, at)
            if payload is None:
                # As a rule the torn end. If a disk has spoilt a record, those behind it are good.
                at += 1
                num_skipped += 1
                continue
            payloads.append(payload)
            at += _HEADER.size + len(payload)
        num_skipped += len(data) - at
        if num_skipped:
            log.warning("spool_bytes_skipped", file=self.path.name, num_bytes=num_skipped)
        self._size = len(data)
        self.num_records = len(payloads)
        return payloads

    def _cut_off(self) -> None:
        """After half a write: leave no garbage that later records would lie behind."""
        try:
            os.ftruncate(self._fd, self._size)
            os.lseek(self._fd, self._size, os.SEEK_SET)
            os.fdatasync(self._fd)
        except OSError:
            self._is_torn = True


@dataclass(slots=True, eq=False)
class _Source:
    """A file and how many of its records are on the books."""

    file: SpoolFile
    num_done: int = 0

    @property
    def is_done(self) -> bool:
        """Nothing in it is needed any more."""
        return self.num_done == self.file.num_records


@dataclass(frozen=True, slots=True, eq=False)
class _Queued:
    """A record on its way to the disk."""

    record: SpoolRecord
    payload: bytes
    written: asyncio.Future[None]


class Spool:
    """See the module's header.

    Args:
        max_bytes: of this gateway's own file; beyond it `put` refuses.

    Raises:
        SpoolFolderError: the folder cannot be written.
    """

    def __init__(
        self, folder: Path, sessions: SessionFactory, metrics: GatewayMetrics, *, max_bytes: int
    ) -> None:
        self._folder = folder
        self._sessions = sessions
        self._metrics = metrics
        self._max_bytes = max_bytes
        self.is_writable = True  # as of the last time that it was tried
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._own = _Source(SpoolFile.create(folder))
        except OSError as error:
            raise SpoolFolderError(
                f"LORAPLEX_SPOOL_DIR={folder} cannot be written ({error.strerror}): give a folder that"
                " this process may write, on a disk that outlives it"
            ) from error
        self._adopted: list[_Source] = []
        self._waiting: deque[tuple[SpoolRecord, _Source]] = deque()
        self._queued: list[_Queued] = []
        self._late: set[asyncio.Task[object]] = set()
        self._wake = asyncio.Event()
        # One thread: appends, clears and adoptions never overlap, and appends that meet share an fsync.
        self._disk = ThreadPoolExecutor(1, "spool")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Records that are still here stay on disk for the next gateway."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self._on_disk_thread(self._release_files)
        self._disk.shutdown()

    @property
    def num_pending(self) -> int:
        """Records that are not on the books yet."""
        return len(self._waiting)

    async def put(self, record: SpoolRecord) -> None:
        """Keep a record; it is on disk when this returns.

        Raises:
            SpoolError: it is not.
        """
        loop = asyncio.get_running_loop()
        queued = _Queued(record, msgspec.msgpack.encode(record), loop.create_future())
        self._queued.append(queued)
        if len(self._queued) == 1:
            self.watch(loop.create_task(self._write_queued()))
        await queued.written

    def watch(self, task: asyncio.Task[object]) -> None:
        """Let a task end that nobody waits for, as an attempt at the books whose record is kept."""
        self._late.add(task)
        task.add_done_callback(self._forget)

    async def replay_forever(self) -> None:
        """Put records on the books once Postgres takes them; look for files without an owner."""
        while True:
            try:
                await self._adopt()
                await self.replay_once()
                if not self.is_writable:
                    await self.put(SpoolRecord())  # perhaps it is again: readiness shall say so
            except UnavailableError as error:
                log.info("spool_waits", num_pending=self.num_pending, reason=error.message)
            except SpoolError:
                pass  # noted where it was raised
            except Exception as error:  # noqa: BLE001 - other records still need replaying
                log_crash("spool_crashed", error)
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    REPLAY_INTERVAL_S if self._waiting else ADOPT_INTERVAL_S
                ):
                    await self._wake.wait()
                    await asyncio.sleep(REPLAY_INTERVAL_S)

    async def replay_once(self) -> int:
        """Put all records on the books; how many there were.

        Raises:
            DatabaseUnavailableError: some are left.
        """
        num_replayed = 0
        while self._waiting:
            if num_replayed % BATCH == 0:
                # What is due is the sweeper's for the taking, who knows less of it than we do.
                renewals = (record.renewal for record, _ in self._waiting)
                await metering.renew(self._sessions, [r for r in renewals if r is not None])
            record, source = self._waiting[0]
            outcome = await self._settle(record)
            self._metrics.spool_replayed.labels(outcome).inc()
            self._waiting.popleft()
            source.num_done += 1
            num_replayed += 1
            self._note_pending()
        if num_replayed:
            log.info("spool_replayed", num_records=num_replayed)
        await self._on_disk_thread(self._tidy)
        return num_replayed

    # ------------------------------------------------------------------ the books

    async def _settle(self, record: SpoolRecord) -> str:
        """Put a record on the books; what became of it."""
        if record == SpoolRecord():
            return "empty"
        try:
            result = await write(self._sessions, record)
        except UnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 - a record that never fits must not stop the others
            log_crash("spool_record_rejected", error)
            await self._on_disk_thread(self._reject, record)
            return "rejected"
        done = "voided" if record.settlement is None else "settled"
        return done if result.applied else "overtaken"

    # ------------------------------------------------------------------ the disk

    async def _write_queued(self) -> None:
        """Write what has come, and what comes while that is written, until there is nothing."""
        while self._queued:
            batch, self._queued = self._queued, []
            payloads = [queued.payload for queued in batch]
            try:
                await self._on_disk_thread(self._own.file.append, payloads, self._max_bytes)
            except SpoolError as error:
                self.is_writable = False
                self._metrics.spool_failures.inc()
                log.error("spool_refuses", reason=str(error))
                for queued in batch:
                    if not queued.written.done():
                        queued.written.set_exception(SpoolError(str(error)))
                continue
            self.is_writable = True
            self._waiting += [(queued.record, self._own) for queued in batch]
            self._note_pending()
            self._wake.set()
            for queued in batch:
                if not queued.written.done():
                    queued.written.set_result(None)

    async def _adopt(self) -> None:
        """Take over the records of gateways that are gone."""
        for source, payloads in await self._on_disk_thread(self._find_orphans):
            self._adopted.append(source)
            for payload in payloads:
                try:
                    record = msgspec.msgpack.decode(payload, type=SpoolRecord)
                except msgspec.MsgspecError:
                    # Whole, and of another version: the file stays for that one.
                    log.error("spool_record_unreadable", file=source.file.path.name)
                    self._metrics.spool_replayed.labels("unreadable").inc()
                else:
                    self._waiting.append((record, source))
            log.info("spool_adopted", file=source.file.path.name, num_records=len(payloads))
        self._note_pending()

    def _find_orphans(self) -> list[tuple[_Source, list[bytes]]]:
        found = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            # Those with an owner are locked, our own and what we have adopted as well.
            try:
                adopted = SpoolFile.adopt(path)
            except OSError as error:
                log.error("spool_file_unreadable", file=path.name, reason=error.strerror)
                continue
            if adopted is not None:
                found.append((_Source(adopted[0]), adopted[1]))
        return found

    def _tidy(self) -> None:
        """Empty our own file and delete those of others once all is on the books."""
        if self._own.is_done and self._own.num_done:
            self._own.file.clear()
            self._own.num_done = 0
        for source in [source for source in self._adopted if source.is_done]:
            source.file.delete()
            self._adopted.remove(source)

    def _release_files(self) -> None:
        for source in (self._own, *self._adopted):
            if source.is_done:
                source.file.delete()
            else:
                source.file.close()

    def _reject(self, record: SpoolRecord) -> None:
        path = self._own.file.path.with_suffix(REJECTED_SUFFIX)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, msgspec.json.encode(record) + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)

    # ------------------------------------------------------------------ small things

    def _note_pending(self) -> None:
        self._metrics.spool_pending.set(len(self._waiting))

    def _forget(self, task: asyncio.Task[object]) -> None:
        self._late.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, UnavailableError):
            log_crash("late_attempt_crashed", error)

    async def _on_disk_thread(
        self, function: Callable[..., _Result], *arguments: object
    ) -> _Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._disk, functools.partial(function, *arguments))


def _whole_record_at(data: bytes, at: int) -> bytes | None:
    """The payload of the record that begins there, if one does."""
    length, crc = _HEADER.unpack_from(data, at)
    if not 0 < length <= min(_MAX_RECORD_BYTES, len(data) - at - _HEADER.size):
        return None
    payload = data[at + _HEADER.size : at + _HEADER.size + length]
    return payload if zlib.crc32(payload) == crc else None


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
