"""Adapter memory, slots, loaders and disk between tenants: shares, turns, pins, budgets, idle time."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from loraplex_engine.artifact import AdapterArtifact, AdapterLimits, AdapterStore
from loraplex_engine.errors import AdapterInvalidError, PinRefusedError
from loraplex_engine.lora.disk_cache import PARTIAL_AGE_S, DiskCache
from loraplex_engine.lora.load_queue import MAX_QUEUED, LoadQueue
from loraplex_engine.lora.pool import ACTIVE_S, WANTED_GRACE_S, LoraPool
from loraplex_engine.lora.shares import Capacity, Shares
from loraplex_engine.request import BlockReason

from tests.support.adapter_files import TINY_SHAPE, make_adapter
from tests.support.lora_pools import Clock, DeferredLoaders, Packed

NUM_ADAPTERS = 16


@dataclass
class World:
    """A pool whose loads end when a test says so."""

    pool: LoraPool[Packed]
    clock: Clock
    loaders: DeferredLoaders
    digests: list[str]
    sizes: dict[str, int]
    order: list[str] = field(default_factory=list)  # of loads

    def finish_loads(self) -> None:
        """All that can be loaded."""
        while self.loaders.run():
            self.pool.check()
            self.pool.stats()

    def load(self, tenant: str, *digests: str) -> None:
        for digest in digests:
            self.pool.prefetch(digest, tenant)
            self.finish_loads()
            assert digest in self.host
            self.let_waits_end()

    def lease(self, tenant: str, digest: str) -> int | None:
        """Ask, and once more after the load: what a waiting request does."""
        slot = self.pool.lease(digest, tenant)
        if slot is None:
            self.finish_loads()
            slot = self.pool.lease(digest, tenant)
        return slot

    @property
    def host(self) -> set[str]:
        return set(self.pool.stats().host)

    def let_waits_end(self) -> None:
        self.clock.now_s += WANTED_GRACE_S + 0.1


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    root = tmp_path_factory.mktemp("stored")
    store = AdapterStore(f"file://{root}/store")
    digests = []
    for seed in range(NUM_ADAPTERS):
        artifact = make_adapter(root / str(seed), rank=1, linears=["k_proj"], seed=seed)
        store.put(root / str(seed), artifact.digest)
        digests.append(artifact.digest)
    return store.url, digests


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(stored: tuple[str, list[str]], tmp_path: Path) -> MakeWorld:
    def make(**settings: Any) -> World:
        sizes: dict[str, int] = {}
        order: list[str] = []

        def pack(artifact: AdapterArtifact) -> Packed:
            order.append(artifact.digest)
            return Packed(artifact.digest, sizes.get(artifact.digest, 1000))

        clock, loaders = Clock(), DeferredLoaders()
        pool = LoraPool(
            store=AdapterStore(stored[0]),
            shape=TINY_SHAPE,
            limits=AdapterLimits(),
            pack=pack,
            cache_dir=tmp_path / "cache",
            clock=clock,
            **{"max_loras": 2, "max_cpu_loras": 4} | settings,
        )
        pool.loader.threads = loaders
        return World(pool, clock, loaders, stored[1], sizes, order)

    return make


# ----------------------------------------------------------------------------------- host memory


def test_one_tenant_cannot_evict_anothers_share(make_world: MakeWorld) -> None:
    """However many adapters the noisy one loads: the quiet one's two of four places are its own."""
    world = make_world()
    quiet, noisy = world.digests[:2], world.digests[2:]
    world.load("quiet", *quiet)

    for digest in noisy:
        world.pool.prefetch(quiet[0], "quiet")  # it is active, if only by one of its two
        world.load("noisy", digest)
        assert set(quiet) <= world.host

    assert len(world.host) == 4
    assert world.pool.stats().evictions_total == len(noisy) - 2


def test_a_share_that_is_not_used_is_lent_and_comes_back(make_world: MakeWorld) -> None:
    world = make_world()
    world.load("noisy", *world.digests[:4])
    assert len(world.host) == 4, "alone, it has all of it"

    world.load("quiet", *world.digests[4:6])

    assert world.host == {*world.digests[2:6]}, (
        "of the noisy one's the two least recently used went"
    )


def test_who_is_silent_has_no_share(make_world: MakeWorld) -> None:
    world = make_world()
    world.load("silent", *world.digests[:2])
    world.clock.now_s += ACTIVE_S

    world.load("busy", *world.digests[2:6])

    assert world.host == {*world.digests[2:6]}


def test_more_tenants_than_places_take_turns(make_world: MakeWorld) -> None:
    world = make_world()
    for index, digest in enumerate(world.digests[:8]):
        assert world.lease(f"t{index}", digest) is not None, "nobody is shut out"
        world.pool.release(digest, f"t{index}")
        world.let_waits_end()
    assert len(world.host) == 4


def test_a_shared_adapter_counts_once_for_its_tenants_together(make_world: MakeWorld) -> None:
    """Two of three tenants share one: half a place each."""
    entries = [
        Held(1, {"a", "b"}),
        *(Held(1, {"a"}) for _ in range(2)),
        *(Held(1, {"c"}) for _ in range(1)),
    ]
    shares = Shares(entries, {"a", "b", "c"}, Capacity(6, 600))

    assert shares.is_over("a"), "2.5 of 2"
    assert not shares.is_over("b", places=1), "0.5 and one more"
    assert not shares.may_evict(entries[0]), "b is within its share"
    assert shares.may_evict(entries[1])
    shares.drop(entries[1])
    assert not shares.may_evict(entries[2]), "1.5 of 2 now"

    world = make_world()
    for tenant in ("a", "b", "a", "b"):
        assert world.lease(tenant, world.digests[0]) == 0
    assert world.order == [world.digests[0]]
    assert world.pool.stats().leases == 4
    for tenant in ("a", "b", "b", "a"):
        world.pool.release(world.digests[0], tenant)
    assert world.pool.stats().leases == 0


@dataclass(frozen=True)
class Held:
    """What `Shares` needs to know of an adapter."""

    size_bytes: int
    tenants: frozenset[str] | set[str]


def test_a_lease_is_given_back_by_who_took_it(make_world: MakeWorld) -> None:
    world = make_world()
    world.lease("a", world.digests[0])

    with pytest.raises(AssertionError, match="more often"):
        world.pool.release(world.digests[0], "b")


# ------------------------------------------------------------------------------------ byte budget


def test_bytes_are_bounded_too(make_world: MakeWorld) -> None:
    world = make_world(max_cpu_lora_bytes=2500)

    world.load("a", *world.digests[:3])

    assert world.host == {*world.digests[1:3]}
    assert world.pool.stats().host_bytes == 2000


def test_an_adapter_beyond_the_whole_budget_is_refused_and_harms_nobody(
    make_world: MakeWorld,
) -> None:
    world = make_world(max_cpu_lora_bytes=2500)
    world.load("a", *world.digests[:2])
    world.sizes[world.digests[2]] = 2501
    world.pool.prefetch(world.digests[2], "b")
    world.finish_loads()

    with pytest.raises(AdapterInvalidError, match="raise --max-cpu-lora-bytes"):
        world.pool.lease(world.digests[2], "b")

    assert world.host == {*world.digests[:2]}


def test_no_load_begins_without_room_for_its_bytes(make_world: MakeWorld) -> None:
    """Everything is leased: a known size that cannot be had is not loaded only to be dropped."""
    world = make_world(max_cpu_lora_bytes=2500)
    for digest in world.digests[:2]:
        world.lease("a", digest)

    for _ in range(5):
        assert world.lease("a", world.digests[2]) is None
        world.let_waits_end()
    assert len(world.order) == 2

    world.pool.release(world.digests[0], "a")
    assert world.lease("a", world.digests[2]) == 0
    assert world.pool.stats().host_bytes == 2000


# ------------------------------------------------------------------------------------------ slots


def test_one_tenant_does_not_keep_all_slots(make_world: MakeWorld) -> None:
    """Its requests keep coming and are always asked for first; the other one's turn comes all the same."""
    world = make_world(max_loras=2, max_cpu_loras=8)
    hot, cold = world.digests[:4], world.digests[4]
    for digest in hot[:2]:
        assert world.lease("noisy", digest) is not None
    assert world.lease("quiet", cold) is None
    assert world.pool.why_refused(cold, "quiet") is BlockReason.ADAPTER_SLOT

    world.pool.release(hot[0], "noisy")
    assert world.lease("noisy", hot[2]) is None, "the quiet one waits and holds less"
    # A slot is free, so nothing is to be drained for this; and it is not loading either.
    assert world.pool.why_refused(hot[2], "noisy") is BlockReason.ADAPTER_SHARE
    assert world.lease("quiet", cold) is not None

    # Neither holds less than the other now: who asks first gets what becomes free.
    assert world.lease("noisy", hot[2]) is None
    world.pool.release(cold, "quiet")
    assert world.lease("noisy", hot[2]) is not None
    world.pool.check()


def test_alone_a_tenant_may_have_every_slot(make_world: MakeWorld) -> None:
    world = make_world(max_loras=3, max_cpu_loras=4)

    assert {world.lease("a", digest) for digest in world.digests[:3]} == {0, 1, 2}


def test_who_gave_up_waiting_holds_nobody_back(make_world: MakeWorld) -> None:
    world = make_world(max_loras=2, max_cpu_loras=8)
    for digest in world.digests[:2]:
        world.lease("noisy", digest)
    assert world.lease("quiet", world.digests[2]) is None
    world.pool.release(world.digests[0], "noisy")

    world.let_waits_end()

    assert world.lease("noisy", world.digests[3]) is not None


# ---------------------------------------------------------------------------------------- loaders


def test_loads_take_turns_between_tenants(make_world: MakeWorld) -> None:
    """A dozen cold adapters of one tenant cost another's one load of waiting, not a dozen."""
    world = make_world(max_cpu_loras=NUM_ADAPTERS)
    noisy, quiet = world.digests[:12], world.digests[12:14]
    for digest in noisy:
        world.pool.prefetch(digest, "noisy")
    for digest in quiet:
        world.pool.prefetch(digest, "quiet")

    world.finish_loads()

    # One was loading already and the noisy one's next in line; then they take turns.
    assert [world.order.index(digest) for digest in quiet] == [2, 4]
    assert set(world.order) == {*noisy, *quiet}


def test_the_queue_is_fair_and_holds_each_digest_once() -> None:
    queue = LoadQueue()
    for digest in ("1", "2", "s"):
        queue.push("a", digest)
    for digest in ("s", "3"):
        queue.push("b", digest)
    queue.push("a", "1")
    assert set(queue) == {"1", "2", "3", "s"}

    taken = [queue.pop(lambda tenant, digest: True) for _ in range(4)]

    assert taken == ["1", "s", "2", "3"]
    assert not queue
    assert queue.pop(lambda tenant, digest: True) is None


def test_a_tenant_without_room_holds_no_other_one_up() -> None:
    queue = LoadQueue()
    queue.push("full", "1")
    queue.push("b", "2")

    assert queue.pop(lambda tenant, digest: tenant != "full") == "2"
    assert queue.pop(lambda tenant, digest: tenant != "full") is None
    assert "1" in queue


def test_the_queue_is_bounded_per_tenant() -> None:
    queue = LoadQueue()
    for index in range(MAX_QUEUED + 10):
        queue.push("a", str(index))
    queue.push("b", "x")

    assert len(set(queue)) == MAX_QUEUED + 1
    assert "x" in queue


# ------------------------------------------------------------------------------- pins, idle, tidy


def test_a_pinned_adapter_stays_and_others_share_the_rest(make_world: MakeWorld) -> None:
    world = make_world()
    pinned = world.digests[0]
    world.pool.pin(pinned)
    world.finish_loads()

    world.load("a", *world.digests[1:8])
    assert pinned in world.host
    assert len(world.host) == 4

    world.pool.unpin(pinned)
    world.load("a", *world.digests[8:12])
    assert pinned not in world.host


def test_pins_leave_the_slots_their_places(make_world: MakeWorld) -> None:
    world = make_world(max_loras=2, max_cpu_loras=4)
    world.pool.pin(world.digests[0])
    world.pool.pin(world.digests[1])
    world.pool.pin(world.digests[1])

    with pytest.raises(PinRefusedError, match="2 adapters can be pinned") as refused:
        world.pool.pin(world.digests[2])

    assert refused.value.code == "too_many_pins"
    assert world.pool.pinned == {*world.digests[:2]}
    world.pool.unpin(world.digests[0])
    world.pool.pin(world.digests[2])
    assert world.pool.pinned == {*world.digests[1:3]}


def test_pins_leave_half_of_the_bytes_to_others(make_world: MakeWorld) -> None:
    world = make_world(max_cpu_lora_bytes=3000)
    for digest in world.digests[:2]:
        world.pool.pin(digest)
        world.finish_loads()

    assert world.pool.stats().pinned == (world.digests[0],)
    assert world.host == {*world.digests[:2]}, "the second is there, but like any other"


def test_a_pin_of_what_is_here_is_refused_at_once_if_it_is_too_large(
    make_world: MakeWorld,
) -> None:
    world = make_world(max_cpu_lora_bytes=3000)
    world.load("a", *world.digests[:2])
    world.pool.pin(world.digests[0])

    with pytest.raises(PinRefusedError, match="half of max_cpu_lora_bytes") as refused:
        world.pool.pin(world.digests[1])

    assert refused.value.code == "pins_too_large"
    assert world.pool.pinned == {world.digests[0]}


def test_a_pin_that_failed_is_tried_again(make_world: MakeWorld, tmp_path: Path) -> None:
    world = make_world()
    late = make_adapter(tmp_path / "late", rank=2, seed=77)
    store = AdapterStore(f"file://{tmp_path}/late-store")
    world.pool.loader.store = store
    world.pool.pin(late.digest)
    world.finish_loads()
    assert world.pool.stats().load_failures_total == 1

    store.put(tmp_path / "late", late.digest)
    world.clock.now_s += 6
    world.pool.tidy()
    world.finish_loads()

    assert late.digest in world.host


def test_idle_adapters_leave_memory_but_not_those_in_use_or_pinned(make_world: MakeWorld) -> None:
    world = make_world(idle_s=30.0, max_cpu_loras=8)
    world.pool.pin(world.digests[0])
    world.load("a", *world.digests[1:4])
    world.lease("a", world.digests[1])
    world.clock.now_s += 25
    world.pool.prefetch(world.digests[2], "a")

    world.clock.now_s += 10
    world.pool.tidy()

    assert world.host == {*world.digests[:3]}
    world.pool.release(world.digests[1], "a")
    world.clock.now_s += 100
    world.pool.tidy()
    assert world.host == {world.digests[0]}
    assert world.pool.stats().resident == ()
    assert world.pool.stats().host_bytes == 1000
    world.pool.check()


# ------------------------------------------------------------------------------------- disk tier


@pytest.fixture
def remote(tmp_path: Path) -> tuple[AdapterStore, list[AdapterArtifact]]:
    store = AdapterStore(f"memory://{uuid.uuid4().hex}")
    artifacts = []
    for seed in range(4):
        artifact = make_adapter(tmp_path / "source" / str(seed), rank=2, seed=seed)
        store.put(tmp_path / "source" / str(seed), artifact.digest)
        artifacts.append(artifact)
    return store, artifacts


def test_copies_are_bounded_by_bytes_and_the_least_recently_used_goes(
    remote: tuple[AdapterStore, list[AdapterArtifact]], tmp_path: Path
) -> None:
    store, artifacts = remote
    root = tmp_path / "copies"
    clock = Clock()
    cache = DiskCache(root, max_bytes=artifacts[0].size_bytes * 2 + 100, clock=clock)
    for use in (0, 1, 0, 2):
        clock.now_s += 10
        digest = artifacts[use].digest
        is_new = not cache.has(digest)
        store.fetch(digest, root)
        cache.note_use(digest, is_new=is_new)

    assert [cache.has(artifact.digest) for artifact in artifacts] == [True, False, True, False]
    assert cache.num_adapters == 2
    assert cache.size_bytes == artifacts[0].size_bytes + artifacts[2].size_bytes
    assert list(root.rglob(".partial-*")) == []


def test_one_beyond_the_whole_bound_is_served_and_kept_until_the_next(
    remote: tuple[AdapterStore, list[AdapterArtifact]], tmp_path: Path
) -> None:
    store, artifacts = remote
    cache = DiskCache(tmp_path / "copies", max_bytes=1)
    for artifact in artifacts[:2]:
        store.fetch(artifact.digest, tmp_path / "copies")
        cache.note_use(artifact.digest, is_new=True)
        assert cache.has(artifact.digest)
    assert not cache.has(artifacts[0].digest)


def test_half_downloads_of_dead_processes_are_swept_at_start(tmp_path: Path) -> None:
    clock = Clock()
    old, fresh = (tmp_path / "ab" / f".partial-{name}" for name in ("old", "fresh"))
    for folder, age_s in ((old, PARTIAL_AGE_S + 1), (fresh, 5.0)):
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(b"half")
        for path in (folder / "adapter_model.safetensors", folder):
            os.utime(path, (clock() - age_s, clock() - age_s))

    DiskCache(tmp_path, max_bytes=1 << 20, clock=clock)

    assert not old.exists()
    assert fresh.exists(), "another process may be at it"


def test_the_second_load_comes_from_disk(
    make_world: MakeWorld, remote: tuple[AdapterStore, list[AdapterArtifact]], tmp_path: Path
) -> None:
    store, artifacts = remote
    loads: list[tuple[str, float]] = []
    clock, loaders = Clock(), DeferredLoaders()
    pool = LoraPool(
        store=store,
        shape=TINY_SHAPE,
        limits=AdapterLimits(),
        pack=lambda artifact: Packed(artifact.digest),
        cache_dir=tmp_path / "copies",
        max_loras=1,
        max_cpu_loras=1,
        clock=clock,
    )
    pool.loader.threads = loaders
    pool.observe_load = lambda tier, seconds: loads.append((tier, seconds))
    for index in (0, 1, 0):
        pool.prefetch(artifacts[index].digest, "a")
        loaders.run()
        pool.stats()
        clock.now_s += WANTED_GRACE_S + 0.1

    assert [tier for tier, _ in loads] == ["store", "store", "disk"]
    assert all(seconds > 0 for _, seconds in loads)
    assert pool.stats().disk_adapters == 2
    assert pool.stats().disk_bytes == artifacts[0].size_bytes + artifacts[1].size_bytes
