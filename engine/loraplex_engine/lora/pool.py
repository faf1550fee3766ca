"""Which adapters are in memory, which of them hold a step slot, and who may be evicted.

Owns slots, the host tier, leases, pins and loading; what an adapter looks like in memory is the backend's
(`pack`), how it gets here `loader.py`'s, who gets how much is `shares.py`'s, who is loaded next
`load_queue.py`'s. Keyed by digest alone: one content, one copy, whatever tenants call it.

| state   | host memory | slot | may be evicted                                             |
|---------|-------------|------|------------------------------------------------------------|
| queued  | no          | no   | -                                                          |
| loading | no          | no   | -                                                          |
| host    | yes         | no   | unless pinned or waited for; see `shares.py` for whose first |
| slot    | yes         | yes  | as host, with its slot                                     |
| leased  | yes         | yes  | never                                                      |
| failed  | no          | no   | forgotten after `retry_after_s`: then tried again          |

Threads: every method is called from the step thread, except that loader threads put their results
into a queue which the step thread empties. So no step ever waits for a disk or a lock.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic

import structlog

from loraplex_engine.artifact import (
    AdapterArtifact,
    AdapterLimits,
    AdapterStore,
    ModelShape,
)
from loraplex_engine.errors import (
    PinRefusedError,
    RequestRejectedError,
)
from loraplex_engine.lora.load_meter import LoadMeter
from loraplex_engine.lora.load_queue import LoadQueue
from loraplex_engine.lora.loader import AdapterLoader, Loaded, LoadTier, Packed
from loraplex_engine.lora.shares import Capacity, Shares, fair_slots, split_slots
from loraplex_engine.protocol import AdapterLoadTimes
from loraplex_engine.request import BlockReason

log = structlog.get_logger(__name__)

RETRY_AFTER_S: Final = 5.0
# Someone who waits for a slot asks at every step; silent for this long, nobody waits.
WANTED_GRACE_S: Final = 1.0
# A tenant silent for this long has no share of the memory: what it has goes first.
ACTIVE_S: Final = 60.0
MAX_HOST_BYTES: Final = 1 << 30
MAX_DISK_BYTES: Final = 10 << 30
# Pins leave at least so much of the bytes to everybody else.
_UNPINNED_BYTES: Final = 0.5
_TIDY_EVERY_S: Final = 1.0
_MAX_SIZES_KNOWN: Final = 4096


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A snapshot; counters are since the pool was made."""

    resident: tuple[str, ...]  # digests in slots
    host: tuple[str, ...]  # digests in host memory, those in slots included
    loading: tuple[str, ...]
    queued: int  # waiting for a loader
    pinned: tuple[str, ...]
    pin_failures: dict[str, str]  # pinned, but not here: why the last try failed
    leases: int
    host_bytes: int
    disk_adapters: int  # copies of a remote store's
    disk_bytes: int
    loads_total: int
    load_failures_total: int
    evictions_total: int
    load_seconds_total: float
    load_times: dict[str, AdapterLoadTimes]  # by tier


@dataclass(slots=True)
class _Entry(Generic[Packed]):
    """An adapter in host memory; `shares.Held`."""

    weights: Packed
    tenants: set[str]  # that have asked for it since it was loaded
    used_at_s: float
    kept_until_s: float  # whoever asked for the load is about to ask again
    slot: int | None = None
    leases: dict[str, int] = field(default_factory=dict)  # by tenant
    wants_slot: dict[str, float] = field(default_factory=dict)  # tenant -> last asked in vain

    @property
    def size_bytes(self) -> int:
        return self.weights.size_bytes

    def wait_ends_s(self) -> float:
        """Until when somebody is taken to wait for it."""
        asked_s = max(self.wants_slot.values(), default=-math.inf)
        return max(self.kept_until_s, asked_s + WANTED_GRACE_S)


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
        max_cpu_lora_bytes: int = MAX_HOST_BYTES,
        max_disk_bytes: int = MAX_DISK_BYTES,
        idle_s: float | None = None,
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
            max_cpu_lora_bytes: memory they may take; one load may exceed it for as long as all else is
                in use.
            max_disk_bytes: of `cache_dir`.
            idle_s: an adapter unused for so long leaves host memory; None: never for that reason.
            on_loaded: called from a loader thread when a load has ended, to wake the step loop.

        Raises:
            ValueError: fewer places in host memory than slots, or no bytes.
        """
        _check_capacity(max_loras, max_cpu_loras, max_cpu_lora_bytes)
        self.loader = AdapterLoader(
            store=store,
            shape=shape,
            limits=limits,
            pack=pack,
            cache_dir=cache_dir,
            max_disk_bytes=max_disk_bytes,
            num_threads=num_loaders,
            retry_after_s=retry_after_s,
            on_loaded=on_loaded,
        )
        # (tier, seconds) of each load that succeeded; called on the step thread.
        self.observe_load: Callable[[LoadTier, float], None] | None = None
        self._capacity = Capacity(max_cpu_loras, max_cpu_lora_bytes)
        self._idle_s = idle_s
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._queue = LoadQueue()
        self._askers: dict[str, set[str]] = {}  # of what is queued or loading
        self._loading: set[str] = set()
        self._failures: dict[str, _Failure] = {}
        self._host: OrderedDict[str, _Entry[Packed]] = OrderedDict()  # least recently used first
        self._host_bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()  # of adapters seen lately
        self._pinned: set[str] = set()
        self._asked_at_s: dict[str, float] = {}  # by tenant
        self._slots: list[str | None] = [None] * max_loras
        self._version = 0
        self._num_leases = 0
        self._blocked_until_s = -math.inf  # before, no load can begin unless something changes
        self._tidied_at_s = -math.inf
        self._loads = self._load_failures = self._evictions = 0
        self._load_seconds = 0.0
        self._load_meter = LoadMeter()

    # ------------------------------------------------------------------------- for the scheduler

    def prefetch(self, digest: str, tenant_id: str = "") -> None:
        """Have it loaded unless it is here or on its way.

        Args:
            tenant_id: who asks; "": nobody in particular.
        """
        self._note_asker(tenant_id)
        self._take_results()
        entry = self._host.get(digest)
        if entry is not None:
            self._note_use(digest, entry, tenant_id)
        elif self._failure_of(digest) is None:
            self._ask_for(digest, tenant_id)

    def lease(self, digest: str, tenant_id: str = "") -> int | None:
        """The step slot, now leased once more; None: still loading, or no slot for this tenant now.

        Raises:
            AdapterUnavailableError: the store does not have it, or reading it failed.
            AdapterInvalidError: what the store has is not what the digest names, or does not fit.
        """
        self._note_asker(tenant_id)
        self._take_results()
        entry = self._host.get(digest)
        if entry is None:
            failure = self._failure_of(digest)
            if failure is not None:
                raise failure
            self._ask_for(digest, tenant_id)
            return None
        self._note_use(digest, entry, tenant_id)
        if not entry.leases and self._must_let_others_first(tenant_id):
            entry.wants_slot.pop(tenant_id, None)
            entry.kept_until_s = self._clock() + WANTED_GRACE_S
            return None
        if entry.slot is None:
            entry.slot = self._free_slot()
            if entry.slot is None:
                entry.wants_slot[tenant_id] = self._clock()
                return None
            self._slots[entry.slot] = digest
            self._version += 1
        entry.wants_slot.clear()
        entry.kept_until_s = -math.inf
        entry.leases[tenant_id] = entry.leases.get(tenant_id, 0) + 1
        self._num_leases += 1
        return entry.slot

    def is_loaded(self, digest: str) -> bool:
        """Whether it is in host memory or a slot."""
        self._take_results()
        return digest in self._host

    def why_refused(self, digest: str, tenant_id: str = "") -> BlockReason:
        """Why `lease` has just given this tenant None."""
        entry = self._host.get(digest)
        if entry is None:
            return BlockReason.ADAPTER_LOADING
        is_wanted = tenant_id in entry.wants_slot
        return BlockReason.ADAPTER_SLOT if is_wanted else BlockReason.ADAPTER_SHARE

    def release(self, digest: str, tenant_id: str = "") -> None:
        """Give one lease back."""
        entry = self._host.get(digest)
        left = 0 if entry is None else entry.leases.get(tenant_id, 0)
        assert entry is not None, f"{digest} was released but is not here"
        assert left > 0, f"{digest} was released more often than leased"
        self._num_leases -= 1
        entry.used_at_s = self._clock()
        if left > 1:
            entry.leases[tenant_id] = left - 1
            return
        del entry.leases[tenant_id]
        if not entry.leases:
            self._changed()
            self._trim()

    @property
    def pinned(self) -> frozenset[str]:
        """Digests that are kept, here or on their way."""
        return frozenset(self._pinned)

    @property
    def num_leases(self) -> int:
        """Leases not given back."""
        return self._num_leases

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

    def pin(self, digest: str) -> None:
        """Load it and keep it in host memory, whoever uses it and however seldom.

        One that fails to load is tried again. Pins may take half of the bytes; what is pinned beyond
        is loaded as any other.

        Raises:
            PinRefusedError: pins would leave fewer places than slots to everybody else; or it is here
                already, and they would leave less than half of the bytes.
        """
        if digest not in self._pinned:
            self._add_pin(digest)
        self.prefetch(digest)

    def _add_pin(self, digest: str) -> None:
        max_pins = self._capacity.places - len(self._slots)
        if len(self._pinned) >= max_pins:
            raise PinRefusedError(
                "too_many_pins",
                f"{max_pins} adapters can be pinned: max_cpu_loras {self._capacity.places} less "
                f"max_loras {len(self._slots)}; unpin one or raise max_cpu_loras",
            )
        self._pinned.add(digest)
        if not self._check_pinned_bytes(digest):
            raise PinRefusedError(
                "pins_too_large",
                "pinned adapters may take half of max_cpu_lora_bytes "
                f"{self._capacity.size_bytes}: unpin one or raise it",
            )

    def unpin(self, digest: str) -> None:
        """Let it be evicted like any other; not pinned: no-op."""
        self._pinned.discard(digest)
        self._changed()
        self._trim()

    def set_capacity(self, max_cpu_loras: int, max_cpu_lora_bytes: int | None = None) -> None:
        """Change the size of the host tier; what is beyond it is evicted as soon as it may be.

        Raises:
            ValueError: fewer places than slots, or no bytes.
        """
        size_bytes = max_cpu_lora_bytes or self._capacity.size_bytes
        _check_capacity(len(self._slots), max_cpu_loras, size_bytes)
        self._capacity = Capacity(max_cpu_loras, size_bytes)
        self._changed()
        self._trim()

    def tidy(self) -> None:
        """Take over what was loaded and let idle adapters go; call it now and then, also when idle."""
        self._take_results()
        now_s = self._clock()
        if now_s - self._tidied_at_s < _TIDY_EVERY_S:
            return
        self._tidied_at_s = now_s
        self._asked_at_s = {
            tenant: at_s for tenant, at_s in self._asked_at_s.items() if now_s - at_s <= ACTIVE_S
        }
        if self._idle_s is not None:
            for digest, entry in list(self._evictable()):
                if now_s - entry.used_at_s > self._idle_s:
                    self._evict(digest)
        for digest in self._pinned - self._host.keys() - self._loading:
            if self._failure_of(digest) is None:
                self._ask_for(digest, "")

    def stats(self) -> PoolStats:
        """What is where right now."""
        self._take_results()
        return PoolStats(
            resident=tuple(digest for digest in self._slots if digest is not None),
            host=tuple(self._host),
            loading=tuple(sorted(self._loading)),
            queued=len(self._askers) - len(self._loading),
            pinned=tuple(sorted(self._pinned)),
            pin_failures={
                digest: str(self._failures[digest].error)
                for digest in sorted(self._pinned - self._host.keys())
                if digest in self._failures
            },
            leases=self._num_leases,
            host_bytes=self._host_bytes,
            disk_adapters=self.loader.num_on_disk,
            disk_bytes=self.loader.disk_bytes,
            loads_total=self._loads,
            load_failures_total=self._load_failures,
            evictions_total=self._evictions,
            load_seconds_total=self._load_seconds,
            load_times=self._load_meter.read(),
        )

    def check(self) -> None:
        """Assert that slots and host tier agree and that counts hold."""
        for slot, digest in enumerate(self._slots):
            assert digest is None or self._host[digest].slot == slot
        for digest, entry in self._host.items():
            assert entry.slot is None or self._slots[entry.slot] == digest
            assert not entry.leases or entry.slot is not None
            assert all(count > 0 for count in entry.leases.values())
            assert entry.leases.keys() <= entry.tenants
        leases = sum(sum(entry.leases.values()) for entry in self._host.values())
        assert leases == self._num_leases
        assert self._host_bytes == sum(entry.size_bytes for entry in self._host.values())
        assert not self._loading & self._host.keys()
        queued = set(self._queue)
        assert not queued & (self._loading | self._host.keys())
        assert self._askers.keys() == queued | self._loading

    def close(self) -> None:
        """Stop the loader threads; a load that has begun is waited for, its result dropped."""
        self.loader.close()

    # ---------------------------------------------------------------------------------- loading

    def _note_asker(self, tenant_id: str) -> None:
        # Nobody has no share: what a gateway or the operator has loaded is lent to all.
        if tenant_id:
            self._asked_at_s[tenant_id] = self._clock()

    def _note_use(self, digest: str, entry: _Entry[Packed], tenant_id: str) -> None:
        self._host.move_to_end(digest)
        entry.tenants.add(tenant_id)
        entry.used_at_s = self._clock()

    def _changed(self) -> None:
        """Something that a queued load may have waited for."""
        self._blocked_until_s = -math.inf

    def _ask_for(self, digest: str, tenant_id: str) -> None:
        """Have it loaded, in turn."""
        askers = self._askers.setdefault(digest, set())
        if tenant_id not in askers:
            askers.add(tenant_id)
            if digest not in self._loading:
                self._queue.push(tenant_id, digest)
                self._changed()
            if digest not in self._loading and digest not in self._queue:
                del self._askers[digest]  # the tenant's line is full
        self._begin_loads()

    def _begin_loads(self) -> None:
        """Give queued loads to idle loaders, as far as there is or can be made room for them."""
        now_s = self._clock()
        while (
            self._queue
            and len(self._loading) < self.loader.num_threads
            and now_s >= self._blocked_until_s
        ):
            shares, evictable = self._shares(), [entry for _, entry in self._evictable()]

            def has_room(
                tenant_id: str,
                digest: str,
                shares: Shares = shares,
                evictable: list[_Entry[Packed]] = evictable,
            ) -> bool:
                return self._has_room(tenant_id, digest, shares, evictable)

            digest = self._queue.pop(has_room)
            if digest is None:
                self._blocked_until_s = self._next_wait_end_s(now_s)
                return
            self._loading.add(digest)
            self.loader.begin(digest, self._capacity.size_bytes)

    def _has_room(
        self, tenant_id: str, digest: str, shares: Shares, evictable: list[_Entry[Packed]]
    ) -> bool:
        """Whether there is room for what loads and one more, or what that would push out may go."""
        size_bytes = self._expected_bytes(digest)
        coming_bytes = sum(self._expected_bytes(other) for other in self._loading) + size_bytes
        missing_places = len(self._host) + len(self._loading) + 1 - self._capacity.places
        missing_bytes = self._host_bytes + coming_bytes - self._capacity.size_bytes
        for entry in evictable:
            if missing_places <= 0 and missing_bytes <= 0:
                break
            if shares.may_evict(entry, asking=tenant_id, size_bytes=size_bytes):
                missing_places -= 1
                missing_bytes -= entry.size_bytes
        return missing_places <= 0 and missing_bytes <= 0

    def _expected_bytes(self, digest: str) -> int:
        """Its size when it was last here, or that of an average one."""
        return self._sizes.get(digest, self._host_bytes // max(1, len(self._host)))

    def _next_wait_end_s(self, now_s: float) -> float:
        """When the first adapter that is waited for will not be any more, should nobody ask again."""
        ends = [entry.wait_ends_s() for entry in self._host.values()]
        return min((end_s for end_s in ends if end_s > now_s), default=now_s + WANTED_GRACE_S)

    def _take_results(self) -> None:
        for loaded in self.loader.results():
            self._take_over(loaded)
            self._begin_loads()

    def _take_over(self, loaded: Loaded[Packed]) -> None:
        self._changed()
        self._loading.discard(loaded.digest)
        askers = self._askers.pop(loaded.digest, set())
        self._load_seconds += loaded.load_s
        if isinstance(loaded.outcome, RequestRejectedError):
            self._load_failures += 1
            self._remember_failure(loaded.digest, loaded.outcome)
            log.warning("adapter_refused", digest=loaded.digest, reason=str(loaded.outcome))
            return
        self._loads += 1
        now_s = self._clock()
        size_bytes = loaded.outcome.size_bytes
        self._host[loaded.digest] = _Entry(
            loaded.outcome,
            tenants=askers,
            used_at_s=now_s,
            kept_until_s=now_s + WANTED_GRACE_S,
        )
        self._host_bytes += size_bytes
        self._sizes[loaded.digest] = size_bytes
        if len(self._sizes) > _MAX_SIZES_KNOWN:
            self._sizes.popitem(last=False)
        self._check_pinned_bytes(loaded.digest)
        self._trim()
        self._load_meter.note(loaded.tier, loaded.load_s)
        if self.observe_load is not None:
            self.observe_load(loaded.tier, loaded.load_s)
        log.info(
            "adapter_loaded",
            digest=loaded.digest,
            size_bytes=size_bytes,
            tier=loaded.tier,
            load_ms=round(loaded.load_s * 1e3),
        )

    def _check_pinned_bytes(self, digest: str) -> bool:
        """Whether an adapter may stay pinned, as far as its size is known; if not, it is not any more."""
        pinned = sum(self._host[pin].size_bytes for pin in self._pinned & self._host.keys())
        limit = self._capacity.size_bytes * (1 - _UNPINNED_BYTES)
        if digest in self._pinned and pinned > limit:
            self._pinned.discard(digest)
            log.warning(
                "adapter_pin_dropped", digest=digest, pinned_bytes=pinned, limit_bytes=int(limit)
            )
            return False
        return True

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

    # ------------------------------------------------------------------------------------ slots

    def _must_let_others_first(self, tenant_id: str) -> bool:
        """Whether a tenant that has its share of slots wants one more while another waits for fewer.

        Whoever waits and holds least is never held back, so somebody always goes on.
        """
        now_s = self._clock()
        waiting = {
            user
            for entry in self._host.values()
            if entry.slot is None
            for user, asked_s in entry.wants_slot.items()
            if user != tenant_id and now_s - asked_s <= WANTED_GRACE_S
        }
        if not waiting:
            return False
        held = split_slots(entry.leases for entry in self._host.values() if entry.leases)
        num_active = len(waiting | held.keys() | {tenant_id})
        ours = held.get(tenant_id, 0.0)
        is_ahead = any(held.get(user, 0.0) < ours for user in waiting)
        return is_ahead and ours >= fair_slots(len(self._slots), num_active)

    def _free_slot(self) -> int | None:
        """An empty slot, or that of the least recently used adapter without a lease."""
        for slot, digest in enumerate(self._slots):
            if digest is None:
                return slot
        for entry in self._host.values():
            if entry.slot is not None and not entry.leases:
                slot, entry.slot = entry.slot, None
                self._slots[slot] = None
                return slot
        return None

    # --------------------------------------------------------------------------------- eviction

    def _evictable(self) -> Iterator[tuple[str, _Entry[Packed]]]:
        """What nobody uses, waits for or has pinned, least recently used first."""
        now_s = self._clock()
        for digest, entry in self._host.items():
            if not entry.leases and digest not in self._pinned and entry.wait_ends_s() < now_s:
                yield digest, entry

    def _shares(self) -> Shares:
        """Of what is not pinned: pins are the operator's, not a tenant's."""
        now_s = self._clock()
        held = [entry for digest, entry in self._host.items() if digest not in self._pinned]
        active = [t for t, asked_s in self._asked_at_s.items() if now_s - asked_s <= ACTIVE_S]
        return Shares(held, active, self._unpinned_capacity())

    def _unpinned_capacity(self) -> Capacity:
        pinned = self._pinned & self._host.keys()
        return Capacity(
            self._capacity.places - len(pinned),
            self._capacity.size_bytes - sum(self._host[digest].size_bytes for digest in pinned),
        )

    def _is_over(self) -> bool:
        return (
            len(self._host) > self._capacity.places or self._host_bytes > self._capacity.size_bytes
        )

    def _trim(self) -> None:
        """Evict what is beyond the capacity, as far as it may be; the rest at a later release.

        Adapters that no active tenant uses go first, then those of tenants beyond their share. As all
        shares together are the capacity, somebody is beyond.
        """
        if not self._is_over():
            return
        shares = self._shares()
        candidates = list(self._evictable())
        for digest, entry in sorted(candidates, key=lambda item: not shares.is_unused(item[1])):
            if not self._is_over():
                return
            if shares.may_evict(entry):
                shares.drop(entry)
                self._evict(digest)

    def _evict(self, digest: str) -> None:
        entry = self._host.pop(digest)
        self._host_bytes -= entry.size_bytes
        if entry.slot is not None:
            self._slots[entry.slot] = None
            self._version += 1
        self._evictions += 1
        self._changed()
        log.info("adapter_evicted", digest=digest, size_bytes=entry.size_bytes)


def _check_capacity(max_loras: int, max_cpu_loras: int, max_cpu_lora_bytes: int) -> None:
    if not 1 <= max_loras <= max_cpu_loras:
        raise ValueError(
            f"need 1 <= max_loras <= max_cpu_loras: {max_cpu_loras} places for {max_loras} slots"
        )
    if max_cpu_lora_bytes < 1:
        raise ValueError(f"max_cpu_lora_bytes is {max_cpu_lora_bytes}: use 1 or more")
