"""Which adapters are in memory, which of them hold a step slot, and who may be evicted.

Owns slots, the host tier, leases and loading; what an adapter looks like in memory is the backend's
(`pack`), where it comes from is the store's. Keyed by digest alone: one content, one copy, whatever
tenants call it.

| state   | host memory | slot | may be evicted                                        |
|---------|-------------|------|-------------------------------------------------------|
| loading | no          | no   | -                                                     |
| host    | yes         | no   | least recently used first, unless someone waits for it |
| slot    | yes         | yes  | as host, with its slot                                |
| leased  | yes         | yes  | never                                                 |
| failed  | no          | no   | forgotten after `retry_after_s`: then tried again     |

Threads: every method is called from the step thread, except that loader threads put their results
into a queue which the step thread empties. So no step ever waits for a disk or a lock.
"""

from __future__ import annotations

import queue
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

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

log = structlog.get_logger(__name__)

RETRY_AFTER_S: Final = 5.0
# Someone who waits for a slot asks at every step; silent for this long, nobody waits.
WANTED_GRACE_S: Final = 1.0


class PackedAdapter(Protocol):
    """An adapter's weights as a backend wants them."""

    @property
    def size_bytes(self) -> int:
        """Memory it takes."""
        ...


Packed = TypeVar("Packed", bound=PackedAdapter)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A snapshot; counters are since the pool was made."""

    resident: tuple[str, ...]  # digests in slots
    host: tuple[str, ...]  # digests in host memory, those in slots included
    loading: tuple[str, ...]
    leases: int
    host_bytes: int
    loads_total: int
    load_failures_total: int
    evictions_total: int
    load_seconds_total: float


@dataclass(slots=True)
class _Entry(Generic[Packed]):
    """An adapter in host memory."""

    weights: Packed
    slot: int | None = None
    leases: int = 0
    wanted_at_s: float | None = None  # last asked for without getting a slot


@dataclass(frozen=True, slots=True)
class _Loaded(Generic[Packed]):
    """What a loader thread hands over."""

    digest: str
    outcome: Packed | RequestRejectedError
    load_s: float


@dataclass(frozen=True, slots=True)
class _Failure:
    error: RequestRejectedError
    until_s: float


class LoraPool(Generic[Packed]):
    """Implements `step.AdapterPool`, and gives the backend the weights of a slot."""

    def __init__(
        self,
        *,
        store: AdapterStore,
        shape: ModelShape,
        limits: AdapterLimits,
        pack: Callable[[AdapterArtifact], Packed],
        cache_dir: Path,
        max_loras: int,
        max_cpu_loras: int,
        num_loaders: int = 1,
        retry_after_s: float = RETRY_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
        on_loaded: Callable[[], None] | None = None,
    ) -> None:
        """Make an empty pool.

        Args:
            cache_dir: where adapters of a remote store are kept on disk.
            max_loras: step slots, the most distinct adapters in one step.
            max_cpu_loras: adapters in host memory, those in slots included.
            on_loaded: called from a loader thread when a load has ended, to wake the step loop.

        Raises:
            ValueError: fewer places in host memory than slots.
        """
        if not 1 <= max_loras <= max_cpu_loras:
            raise ValueError(f"need 1 <= max_loras <= max_cpu_loras: {max_loras}, {max_cpu_loras}")
        self._store = store
        self._shape = shape
        self._limits = limits
        self._pack = pack
        self._cache_dir = cache_dir
        self._max_cpu_loras = max_cpu_loras
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._on_loaded = on_loaded
        self._loaders = ThreadPoolExecutor(num_loaders, thread_name_prefix="lora-loader")
        self._results: queue.SimpleQueue[_Loaded[Packed]] = queue.SimpleQueue()
        self._loading: set[str] = set()
        self._failures: dict[str, _Failure] = {}
        self._host: OrderedDict[str, _Entry[Packed]] = OrderedDict()  # least recently used first
        self._slots: list[str | None] = [None] * max_loras
        self._version = 0
        self._loads = self._load_failures = self._evictions = 0
        self._load_seconds = 0.0

    # ------------------------------------------------------------------------- for the scheduler

    def prefetch(self, digest: str) -> None:
        """Start loading unless it is loaded or loading already."""
        self._take_results()
        entry = self._host.get(digest)
        if entry is not None:
            self._host.move_to_end(digest)
        elif self._failure_of(digest) is None:
            self._start_loading(digest)

    def lease(self, digest: str) -> int | None:
        """The step slot, now leased once more; None: still loading, or every slot is in use.

        Raises:
            AdapterUnavailableError: the store does not have it, or reading it failed.
            AdapterInvalidError: what the store has is not what the digest names, or does not fit.
        """
        self._take_results()
        entry = self._host.get(digest)
        if entry is None:
            failure = self._failure_of(digest)
            if failure is not None:
                raise failure
            self._start_loading(digest)
            return None
        self._host.move_to_end(digest)
        if entry.slot is None:
            entry.slot = self._free_slot()
            if entry.slot is None:
                entry.wanted_at_s = self._clock()
                return None
            self._slots[entry.slot] = digest
            self._version += 1
        entry.wanted_at_s = None
        entry.leases += 1
        return entry.slot

    def lacks_slot(self, digest: str) -> bool:
        """Whether it is loaded, and `lease` gave None only because every slot is leased."""
        entry = self._host.get(digest)
        return entry is not None and entry.slot is None

    def release(self, digest: str) -> None:
        """Give one lease back."""
        entry = self._host[digest]
        assert entry.leases > 0, f"{digest} was released more often than leased"
        entry.leases -= 1
        if entry.leases == 0:
            self._trim()

    @property
    def num_leases(self) -> int:
        """Leases not given back."""
        return sum(entry.leases for entry in self._host.values())

    # --------------------------------------------------------------------------- for the backend

    @property
    def version(self) -> int:
        """Grows whenever a slot's content changes."""
        return self._version

    def weights(self, slot: int) -> Packed:
        """The weights in `slot`; they stay valid for as long as someone holds them."""
        digest = self._slots[slot]
        assert digest is not None, f"slot {slot} is empty"
        return self._host[digest].weights

    # --------------------------------------------------------------------------- for the operator

    def set_capacity(self, max_cpu_loras: int) -> None:
        """Change the size of the host tier; what is beyond it is evicted as soon as it may be.

        Raises:
            ValueError: fewer places than slots.
        """
        if max_cpu_loras < len(self._slots):
            raise ValueError(f"{max_cpu_loras} places for {len(self._slots)} slots")
        self._max_cpu_loras = max_cpu_loras
        self._trim()

    def stats(self) -> PoolStats:
        """What is where right now."""
        self._take_results()
        return PoolStats(
            resident=tuple(digest for digest in self._slots if digest is not None),
            host=tuple(self._host),
            loading=tuple(sorted(self._loading)),
            leases=self.num_leases,
            host_bytes=sum(entry.weights.size_bytes for entry in self._host.values()),
            loads_total=self._loads,
            load_failures_total=self._load_failures,
            evictions_total=self._evictions,
            load_seconds_total=self._load_seconds,
        )

    def check(self) -> None:
        """Assert that slots and host tier agree and that bounds hold."""
        for slot, digest in enumerate(self._slots):
            assert digest is None or self._host[digest].slot == slot
        for digest, entry in self._host.items():
            assert entry.slot is None or self._slots[entry.slot] == digest
            assert entry.leases == 0 or entry.slot is not None
            assert entry.leases >= 0
        assert not self._loading & self._host.keys()

    def close(self) -> None:
        """Stop the loader threads; a load that has begun is waited for, its result dropped."""
        self._loaders.shutdown(wait=True, cancel_futures=True)

    # ---------------------------------------------------------------------------------- loading

    def _start_loading(self, digest: str) -> None:
        if digest in self._loading:
            return
        num_evictable = sum(1 for _ in self._evictable())
        if len(self._host) - num_evictable + len(self._loading) >= self._max_cpu_loras:
            return  # everything here is in use or about to be: whoever asks, asks again
        self._loading.add(digest)
        self._loaders.submit(self._load, digest)

    def _load(self, digest: str) -> None:
        """On a loader thread: store, checks, digest, fit, packing. Never raises."""
        started_s = time.monotonic()
        outcome: Packed | RequestRejectedError
        try:
            artifact = self._store.load(digest, self._cache_dir, limits=self._limits)
            check_fits(artifact, self._shape)
            outcome = self._pack(artifact)
        except ArtifactError as error:
            outcome = AdapterInvalidError(f"adapter {digest[:19]}: {error}")
        except AdapterNotStoredError as error:
            outcome = AdapterUnavailableError(str(error), retry_after_s=self._retry_after_s)
        except Exception as error:
            # Whatever went wrong, a request waits for an answer and the loader must live.
            log.exception("adapter_load_failed", digest=digest)
            outcome = AdapterUnavailableError(
                f"adapter {digest[:19]} could not be read: {type(error).__name__}",
                retry_after_s=self._retry_after_s,
            )
        self._results.put(_Loaded(digest, outcome, time.monotonic() - started_s))
        if self._on_loaded is not None:
            self._on_loaded()

    def _take_results(self) -> None:
        while not self._results.empty():
            loaded = self._results.get_nowait()
            self._loading.discard(loaded.digest)
            self._load_seconds += loaded.load_s
            if isinstance(loaded.outcome, RequestRejectedError):
                self._load_failures += 1
                self._remember_failure(loaded.digest, loaded.outcome)
                log.warning("adapter_refused", digest=loaded.digest, reason=str(loaded.outcome))
                continue
            self._loads += 1
            # Whoever asked for it is about to ask again: it must still be there then.
            self._host[loaded.digest] = _Entry(loaded.outcome, wanted_at_s=self._clock())
            self._trim()
            log.info(
                "adapter_loaded",
                digest=loaded.digest,
                size_bytes=loaded.outcome.size_bytes,
                load_ms=round(loaded.load_s * 1e3),
            )

    def _remember_failure(self, digest: str, error: RequestRejectedError) -> None:
        now_s = self._clock()
        fresh = {key: failure for key, failure in self._failures.items() if failure.until_s > now_s}
        self._failures = {**fresh, digest: _Failure(error, now_s + self._retry_after_s)}

    def _failure_of(self, digest: str) -> RequestRejectedError | None:
        """A fresh copy of the error of a failed load; None if there is none or it has expired."""
        failure = self._failures.get(digest)
        if failure is None:
            return None
        left_s = failure.until_s - self._clock()
        if left_s <= 0:
            del self._failures[digest]
            return None
        return type(failure.error)(str(failure.error), retry_after_s=left_s)

    # --------------------------------------------------------------------------------- eviction

    def _free_slot(self) -> int | None:
        """An empty slot, or that of the least recently used adapter without a lease."""
        for slot, digest in enumerate(self._slots):
            if digest is None:
                return slot
        for entry in self._host.values():
            if entry.slot is not None and entry.leases == 0:
                slot, entry.slot = entry.slot, None
                self._slots[slot] = None
                return slot
        return None

    def _evictable(self) -> Iterator[str]:
        """Digests nobody uses or waits for, least recently used first."""
        now_s = self._clock()
        for digest, entry in self._host.items():
            waits = entry.wanted_at_s is not None and now_s - entry.wanted_at_s <= WANTED_GRACE_S
            if entry.leases == 0 and not waits:
                yield digest

    def _trim(self) -> None:
        """Evict what is beyond the capacity, as far as it may be; the rest at a later release."""
        excess = len(self._host) - self._max_cpu_loras
        if excess > 0:
            for digest in list(islice(self._evictable(), excess)):
                self._evict(digest)

    def _evict(self, digest: str) -> None:
        entry = self._host.pop(digest)
        if entry.slot is not None:
            self._slots[entry.slot] = None
            self._version += 1
        self._evictions += 1
        log.info("adapter_evicted", digest=digest, size_bytes=entry.weights.size_bytes)
