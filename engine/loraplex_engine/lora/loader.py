"""Brings an adapter from its store to host memory, on threads of its own: read, checked, packed.

Owns the threads, the copies on disk and the errors; when something is loaded, and what becomes of it, is
the pool's. `begin` and `results` are called from the step thread and never wait.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

import structlog

from loraplex_engine.artifact import (
    AdapterArtifact,
    AdapterLimits,
    AdapterNotStoredError,
    AdapterStore,
    ArtifactError,
    ModelShape,
    check_fits,
)
from loraplex_engine.errors import (
    AdapterInvalidError,
    AdapterUnavailableError,
    RequestRejectedError,
)
from loraplex_engine.lora.disk_cache import DiskCache

log = structlog.get_logger(__name__)

LoadTier = Literal["disk", "store"]


class PackedAdapter(Protocol):
    """An adapter's weights as a backend wants them."""

    @property
    def size_bytes(self) -> int:
        """Memory it takes."""
        ...


Packed = TypeVar("Packed", bound=PackedAdapter)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Packed]):
    """What a load came to: weights, or why there are none."""

    digest: str
    outcome: Packed | RequestRejectedError
    tier: LoadTier
    load_s: float


class AdapterLoader(Generic[Packed]):
    """See the module's header; the arguments are `LoraPool`'s."""

    def __init__(
        self,
        *,
        store: AdapterStore,
        shape: ModelShape,
        limits: AdapterLimits,
        pack: Callable[[AdapterArtifact], Packed],
        cache_dir: Path,
        max_disk_bytes: int,
        num_threads: int,
        retry_after_s: float,
        on_loaded: Callable[[], None] | None,
    ) -> None:
        self.num_threads = num_threads  # that may load at once
        self.on_loaded = on_loaded
        self.store = store
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix="lora-loader")
        self._shape = shape
        self._limits = limits
        self.pack = pack
        self._cache_dir = cache_dir
        self._disk = None if store.is_local else DiskCache(cache_dir, max_disk_bytes)
        self._retry_after_s = retry_after_s
        self._results: queue.SimpleQueue[Loaded[Packed]] = queue.SimpleQueue()

    @property
    def num_on_disk(self) -> int:
        """Copies of a remote store's adapters."""
        return self._disk.num_adapters if self._disk else 0

    @property
    def disk_bytes(self) -> int:
        """What they take."""
        return self._disk.size_bytes if self._disk else 0

    def begin(self, digest: str, max_bytes: int) -> None:
        """Load it on a thread that is free; one that takes more than `max_bytes` of memory is refused."""
        self.threads.submit(self._load, digest, max_bytes)

    def results(self) -> Iterator[Loaded[Packed]]:
        """Loads that have ended since the last call, in order."""
        while not self._results.empty():
            yield self._results.get_nowait()

    def close(self) -> None:
        """Stop the threads; a load that has begun is waited for, its result dropped."""
        self.threads.shutdown(wait=True, cancel_futures=True)

    def _load(self, digest: str, max_bytes: int) -> None:
        """On a loader thread: store, checks, digest, fit, packing. Never raises."""
        started_s = time.monotonic()
        outcome: Packed | RequestRejectedError
        tier: LoadTier = "store"
        try:
            if self._disk is not None and self._disk.has(digest):
                tier = "disk"
            outcome = self._read(digest, max_bytes, is_new=tier == "store")
        except ArtifactError as error:
            outcome = AdapterInvalidError(f"adapter {digest[:19]}: {error}")
        except AdapterNotStoredError as error:
            outcome = AdapterUnavailableError(str(error), retry_after_s=self._retry_after_s)
        except RequestRejectedError as error:
            outcome = error
        except Exception as error:
            # Whatever went wrong, a request waits for an answer and the loader must live.
            log.exception("adapter_load_failed", digest=digest)
            outcome = AdapterUnavailableError(
                f"adapter {digest[:19]} could not be read: {type(error).__name__}",
                retry_after_s=self._retry_after_s,
            )
        self._results.put(Loaded(digest, outcome, tier, time.monotonic() - started_s))
        if self.on_loaded is not None:
            self.on_loaded()

    def _read(self, digest: str, max_bytes: int, *, is_new: bool) -> Packed:
        artifact = self.store.load(digest, self._cache_dir, limits=self._limits)
        if self._disk is not None:
            self._disk.note_use(digest, is_new=is_new)
        check_fits(artifact, self._shape)
        packed = self.pack(artifact)
        if packed.size_bytes > max_bytes:
            raise AdapterInvalidError(
                f"adapter {digest[:19]} takes {packed.size_bytes} bytes of memory, all adapters together "
                f"have {max_bytes}: raise --max-cpu-lora-bytes, or train with a smaller rank"
            )
        return packed
