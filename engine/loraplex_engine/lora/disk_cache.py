"""The disk tier: copies of a remote store's adapters, bounded by bytes, least recently used first out.

Owns which copies stay; `AdapterStore.fetch` puts them there. Several engines of one machine may share the
folder: a copy that goes while another process reads it is fetched again. Nothing here is trusted: the
digest is checked at each load, whichever tier it comes from.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from loraplex_engine.artifact import AdapterStore

log = structlog.get_logger(__name__)

# A download writes all the time; one that has not for so long was left by a process that died.
PARTIAL_AGE_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class _Copy:
    folder: Path
    size_bytes: int
    used_at_unix_s: float


class DiskCache:
    """Safe to use from several threads. `size_bytes` and `num_adapters` are as of the last look."""

    def __init__(self, root: Path, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        """Look what is there, and remove what dead processes left half downloaded."""
        self.num_adapters = 0
        self.size_bytes = 0
        self._root = root
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self.trim()

    def has(self, digest: str) -> bool:
        """Whether it need not be downloaded.

        Raises:
            AdapterNotStoredError: not a digest.
        """
        return AdapterStore.folder_in(self._root, digest).is_dir()

    def note_use(self, digest: str, *, is_new: bool) -> None:
        """It was read just now; a new one may push others out, but never itself."""
        folder = AdapterStore.folder_in(self._root, digest)
        now_unix_s = self._clock()
        try:
            os.utime(folder, (now_unix_s, now_unix_s))
        except FileNotFoundError:
            return  # another process was short of room
        if is_new:
            self.trim(keep=folder)

    def trim(self, keep: Path | None = None) -> None:
        """Remove stale downloads, and copies beyond the bound, least recently used first."""
        with self._lock:
            for partial in self._root.glob("[0-9a-f][0-9a-f]/.partial-*"):
                if self._clock() - _newest_change(partial) > PARTIAL_AGE_S:
                    shutil.rmtree(partial, ignore_errors=True)
                    log.info("adapter_download_swept", folder=partial.name)
            copies = sorted(self._copies(), key=lambda copy: copy.used_at_unix_s)
            total = sum(copy.size_bytes for copy in copies)
            num_left = len(copies)
            for copy in copies:
                if total <= self._max_bytes:
                    break
                if copy.folder == keep:
                    continue
                self._remove(copy.folder)
                total -= copy.size_bytes
                num_left -= 1
            self.num_adapters, self.size_bytes = num_left, total

    def _copies(self) -> Iterator[_Copy]:
        for folder in self._root.glob("[0-9a-f][0-9a-f]/*"):
            if folder.name.startswith("."):
                continue
            try:
                used_at = folder.stat().st_mtime
                size = sum(file.stat().st_size for file in folder.iterdir())
            except (FileNotFoundError, NotADirectoryError):
                continue  # gone meanwhile, or none of ours
            yield _Copy(folder, size, used_at)

    @staticmethod
    def _remove(folder: Path) -> None:
        """In one step for readers: never half a copy."""
        gone = folder.parent / f".partial-evicted-{folder.name}"
        try:
            os.rename(folder, gone)
        except OSError:
            return  # another process removes it
        shutil.rmtree(gone, ignore_errors=True)
        log.info("adapter_copy_evicted", digest=f"sha256:{folder.name}")


def _newest_change(partial: Path) -> float:
    """When anything in an unfinished download last changed; infinity: it is gone."""
    try:
        return max(path.stat().st_mtime for path in (partial, *partial.iterdir()))
    except FileNotFoundError:
        return float("inf")
