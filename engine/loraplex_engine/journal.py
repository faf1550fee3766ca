"""Terminal usage of every attempt, on disk before anybody is told: what bills are settled from.

Append-only segment files in one folder, one writer. A record is `length u32 | crc32 u32 | payload`
(little endian), the payload one msgpack `JournalEntry`. `append` takes all entries of a step (or of
several) and costs one write and one fsync. After a crash the torn tail of the last segment is cut
off: those entries were never acknowledged to a gateway. A bad record with whole ones behind it is no
torn tail: the segment is kept as it is, and numbers go on behind the highest in it.

| file | holds |
|---|---|
| `id` | the journal's id, made with the folder; sequence numbers are meaningful within it |
| `lock` | flock of the one process that writes |
| `<first seq, 20 digits>.log` | a segment; the oldest go when there are more than `max_segments` |

Not thread-safe: it belongs to the thread that speaks with the gateways.
Units: sequence numbers start at 1 and rise by 1.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import logging
import os
import struct
import uuid
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from loraplex_engine.errors import ConfigError, EngineError
from loraplex_engine.protocol import JournalEntry

log = structlog.get_logger(__name__)

SEGMENT_BYTES = 4 * 1024**2  # about 16,000 entries
MAX_SEGMENTS = 16
_HEADER = struct.Struct("<II")
_FIRST_KEY = msgspec.msgpack.encode("seq")
_MAX_RECORD_BYTES = 1 << 20  # a longer length field is garbage, not an entry


class JournalError(EngineError):
    """The journal could not be written; nothing may be acknowledged any more."""


@dataclass(slots=True)
class _Segment:
    path: Path
    first_seq: int
    offsets: array[int]  # offsets[i]: where entry first_seq + i starts
    size_bytes: int

    @property
    def end_seq(self) -> int:
        """One past the last entry."""
        return self.first_seq + len(self.offsets)


class Journal:
    """See the module's header.

    Args:
        folder: made (0700) when missing.
        segment_bytes: a segment is closed once it is this long.
        max_segments: how many are kept, the open one included.

    Raises:
        ConfigError: the folder cannot be used, another process has this journal open, or another
            version wrote it.
    """

    def __init__(
        self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES, max_segments: int = MAX_SEGMENTS
    ) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._max_segments = max(1, max_segments)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock_fd = _lock(folder / "lock")
        except OSError as error:
            raise ConfigError(f"--journal-dir {folder}: cannot be written ({error})") from error
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(JournalEntry)
        self._seqs: dict[bytes, int] = {}  # (request_id, attempt) -> seq of its entry
        try:
            self.journal_id = _read_or_make_id(folder)
            self._segments = self._recover()
            self._fd = os.open(self._segments[-1].path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            os.close(self._lock_fd)
            raise ConfigError(f"--journal-dir {folder}: cannot be used ({error})") from error
        except BaseException:
            os.close(self._lock_fd)
            raise

    @property
    def next_seq(self) -> int:
        """The sequence number that the next entry gets."""
        return self._segments[-1].end_seq

    @property
    def num_entries(self) -> int:
        """Entries that can still be read."""
        return len(self._seqs)

    def append(self, entries: Sequence[JournalEntry]) -> None:
        """Write entries (their `seq` is set here) and wait until they are on disk.

        Raises:
            JournalError: they may not be. The caller must not acknowledge them, and must stop:
                after a failed fsync nothing says what the disk holds.
        """
        if not entries:
            return
        if self._segments[-1].size_bytes >= self._segment_bytes:
            self._roll()
        segment = self._segments[-1]
        records: list[bytes] = []
        offsets: list[int] = []
        end = segment.size_bytes
        for seq, entry in enumerate(entries, segment.end_seq):
            payload = self._encoder.encode(msgspec.structs.replace(entry, seq=seq))
            if len(payload) > _MAX_RECORD_BYTES:  # it would be taken for garbage at the next start
                raise JournalError(f"an entry of {len(payload)} bytes; at most {_MAX_RECORD_BYTES}")
            records += (_HEADER.pack(len(payload), zlib.crc32(payload)), payload)
            offsets.append(end)
            end += _HEADER.size + len(payload)
        try:
            _write_all(self._fd, b"".join(records))
            os.fdatasync(self._fd)
        except OSError as error:
            raise JournalError(f"cannot write {segment.path}: {error}") from error
        for seq, entry in enumerate(entries, segment.end_seq):
            self._seqs[_key(entry.request_id, entry.attempt)] = seq
        segment.offsets.extend(offsets)
        segment.size_bytes = end

    def find(self, request_id: str, attempt: int) -> JournalEntry | None:
        """The entry of an attempt; None when it never ended here, or was dropped by retention."""
        seq = self._seqs.get(_key(request_id, attempt))
        if seq is None:
            return None
        entries = self.read(seq - 1, 1)
        return entries[0] if entries else None

    def read(self, after_seq: int, limit: int) -> list[JournalEntry]:
        """Up to `limit` entries with `seq > after_seq`, oldest first; dropped ones are skipped."""
        entries: list[JournalEntry] = []
        starts = [segment.first_seq for segment in self._segments]
        for segment in self._segments[max(0, bisect.bisect_right(starts, after_seq + 1) - 1) :]:
            first = max(0, after_seq + 1 - segment.first_seq)
            last = min(len(segment.offsets), first + limit - len(entries))
            if first >= last:
                continue
            start = segment.offsets[first]
            stop = segment.offsets[last] if last < len(segment.offsets) else segment.size_bytes
            with segment.path.open("rb") as file:
                file.seek(start)
                data = file.read(stop - start)
            for i in range(first, last):
                begin = segment.offsets[i] - start
                length, _crc = _HEADER.unpack_from(data, begin)
                begin += _HEADER.size
                entries.append(self._decoder.decode(data[begin : begin + length]))
        return entries

    def close(self) -> None:
        """Give the files and the lock back."""
        os.close(self._fd)
        os.close(self._lock_fd)

    # ------------------------------------------------------------------ insides

    def _recover(self) -> list[_Segment]:
        paths = sorted(self._folder.glob("[0-9]*.log"))
        segments = []
        next_seq = 1
        for path in paths:
            segment, end_seq = self._scan(path, is_last=path == paths[-1])
            segments.append(segment)
            next_seq = max(next_seq, end_seq)
        if not segments or next_seq != segments[-1].end_seq:
            segments.append(self._make_segment(next_seq))
        if not paths:
            return segments
        log.info(
            "journal_opened",
            journal_id=self.journal_id,
            num_entries=self.num_entries,
            next_seq=segments[-1].end_seq,
        )
        return segments

    def _scan(self, path: Path, *, is_last: bool) -> tuple[_Segment, int]:
        """Index a segment; also says one past the highest number it holds, readable or not."""
        segment = _Segment(path, int(path.stem), array("Q"), 0)
        data = path.read_bytes()
        at = 0
        while at + _HEADER.size <= len(data):
            length, crc = _HEADER.unpack_from(data, at)
            payload = data[at + _HEADER.size : at + _HEADER.size + length]
            if not _is_whole(payload, length, crc):
                break
            try:
                entry = self._decoder.decode(payload)
            except msgspec.MsgspecError as error:
                # Whole and not ours: cutting it off would throw away what another version wrote.
                raise ConfigError(
                    f"{path}: the record at byte {at} is not an entry that this version can read"
                    f" ({error}); start the version that wrote it, or another --journal-dir"
                ) from error
            self._seqs[_key(entry.request_id, entry.attempt)] = segment.end_seq
            segment.offsets.append(at)
            at += _HEADER.size + length
        segment.size_bytes = at
        end_seq = segment.end_seq
        if at < len(data):
            end_seq = max(end_seq, self._find_end_seq(data, at))
            is_torn = is_last and end_seq == segment.end_seq
            log.log(
                logging.WARNING if is_torn else logging.ERROR,
                "journal_torn_tail" if is_torn else "journal_corrupt",
                segment=path.name,
                num_bytes=len(data) - at,
                entries_before=len(segment.offsets),
                end_seq=end_seq,
            )
            if is_torn:  # the writer died in it, unacknowledged; elsewhere keep the evidence
                with path.open("r+b") as file:
                    file.truncate(at)
                    os.fsync(file.fileno())
        return segment, end_seq

    def _find_end_seq(self, data: bytes, at: int) -> int:
        """One past the highest number in whole records behind a bad one at `at`; 0: none."""
        end_seq = 0
        # A payload starts with a map's head, one byte, and its first key.
        while (at := data.find(_FIRST_KEY, at + 1)) >= 0:
            begin = at - 1
            if begin < _HEADER.size:
                continue
            length, crc = _HEADER.unpack_from(data, begin - _HEADER.size)
            payload = data[begin : begin + length] if length <= _MAX_RECORD_BYTES else b""
            if _is_whole(payload, length, crc):
                with contextlib.suppress(msgspec.MsgspecError):
                    end_seq = max(end_seq, self._decoder.decode(payload).seq + 1)
        return end_seq

    def _make_segment(self, first_seq: int) -> _Segment:
        path = self._folder / f"{first_seq:020d}.log"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        _sync_folder(self._folder)
        return _Segment(path, first_seq, array("Q"), 0)

    def _roll(self) -> None:
        try:
            segment = self._make_segment(self.next_seq)
            os.close(self._fd)
            self._fd = os.open(segment.path, os.O_WRONLY | os.O_APPEND)
            self._segments.append(segment)
            while len(self._segments) > self._max_segments:
                self._forget(self._segments.pop(0))
        except OSError as error:
            raise JournalError(f"cannot start a segment in {self._folder}: {error}") from error

    def _forget(self, segment: _Segment) -> None:
        segment.path.unlink()
        self._seqs = {key: seq for key, seq in self._seqs.items() if seq >= segment.end_seq}
        log.info("journal_segment_dropped", segment=segment.path.name, end_seq=segment.end_seq)


def _is_whole(payload: bytes, length: int, crc: int) -> bool:
    # A file system may leave zeros where a crash cut a write: length 0 with the right checksum.
    return 0 < length <= _MAX_RECORD_BYTES and len(payload) == length and zlib.crc32(payload) == crc


def _key(request_id: str, attempt: int) -> bytes:
    # Bytes, not a tuple: a quarter of the memory, at a hundred thousand entries.
    return b"%d/%s" % (attempt, request_id.encode())


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise ConfigError(
            f"another engine is writing the journal {path.parent}: stop it, or give this one"
            " another --journal-dir"
        ) from None
    return fd


def _read_or_make_id(folder: Path) -> str:
    path = folder / "id"
    if path.exists():
        return path.read_text().strip()
    journal_id = uuid.uuid4().hex
    temporary = folder / "id.tmp"
    with temporary.open("w") as file:
        file.write(journal_id)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    _sync_folder(folder)
    return journal_id


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
