"""The adapter pool: slots, leases, eviction, failures; never a wait on the step thread."""

from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from loraplex_engine.artifact import (
    CONFIG_FILE,
    TENSORS_FILE,
    AdapterArtifact,
    AdapterLimits,
    AdapterNotStoredError,
    AdapterStore,
    ModelShape,
    read_adapter,
)
from loraplex_engine.errors import (
    AdapterInvalidError,
    AdapterUnavailableError,
    PinRefusedError,
)
from loraplex_engine.lora.pool import WANTED_GRACE_S, LoraPool
from loraplex_engine.lora.weights import pack_native

from tests.support.adapter_files import SMOLLM2_SHAPE, TINY_SHAPE, make_adapter
from tests.support.lora_pools import Clock, DeferredLoaders, Packed

DEADLINE_S = 20.0


@dataclass
class Packer:
    """Packs at once, or waits for the gate; counts."""

    gate: threading.Event = field(default_factory=threading.Event)
    count: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    def __call__(self, artifact: AdapterArtifact) -> Packed:
        assert self.gate.wait(DEADLINE_S)
        self.count += 1
        return Packed(artifact.digest)


@dataclass
class World:
    """A store with adapters, and a pool over it."""

    pool: LoraPool[Packed]
    store: AdapterStore
    store_folder: Path
    digests: list[str]
    clock: Clock
    packer: Packer

    def load(self, *digests: str) -> None:
        """Prefetch and wait until they are in host memory."""
        for digest in digests:
            self.pool.prefetch(digest)
        self.wait_until(lambda: set(digests) <= set(self.pool.stats().host))

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < give_up_s, "nothing happened"
            time.sleep(0.001)

    def lease(self, digest: str) -> int:
        """Lease with patience; the load happens meanwhile."""
        slots: list[int] = []

        def try_lease() -> bool:
            slot = self.pool.lease(digest)
            if slot is not None:
                slots.append(slot)
            return slot is not None

        self.wait_until(try_lease)
        return slots[0]

    def wait_for_failure(self) -> None:
        self.wait_until(lambda: self.pool.stats().load_failures_total == 1)

    def let_waits_end(self) -> None:
        self.clock.now_s += WANTED_GRACE_S + 0.1


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A store folder with eight tiny adapters."""
    root = tmp_path_factory.mktemp("adapters")
    store = AdapterStore(f"file://{root}/store")
    digests = []
    for seed in range(8):
        artifact = make_adapter(root / str(seed), rank=4, seed=seed)
        store.put(root / str(seed), artifact.digest)
        digests.append(artifact.digest)
    return root / "store", digests


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(stored: tuple[Path, list[str]], tmp_path: Path) -> Iterator[MakeWorld]:
    worlds: list[World] = []

    def make(
        max_loras: int = 2,
        max_cpu_loras: int = 4,
        shape: ModelShape = TINY_SHAPE,
        max_rank: int = 64,
        on_loaded: Callable[[], None] | None = None,
    ) -> World:
        folder = tmp_path / f"store{len(worlds)}"
        shutil.copytree(stored[0], folder)
        store, clock, packer = AdapterStore(f"file://{folder}"), Clock(), Packer()
        pool = LoraPool(
            store=store,
            shape=shape,
            limits=AdapterLimits(max_rank=max_rank),
            pack=packer,
            cache_dir=tmp_path / "cache",
            max_loras=max_loras,
            max_cpu_loras=max_cpu_loras,
            clock=clock,
            on_loaded=on_loaded,
        )
        worlds.append(World(pool, store, folder, list(stored[1]), clock, packer))
        return worlds[-1]

    yield make
    for world in worlds:
        world.packer.gate.set()
        world.pool.close()


def test_a_lease_does_not_wait_for_the_load(make_world: MakeWorld) -> None:
    world = make_world()
    world.packer.gate.clear()

    assert world.pool.lease(world.digests[0]) is None
    assert world.pool.stats().loading == (world.digests[0],)
    assert world.pool.lease(world.digests[0]) is None

    world.packer.gate.set()
    slot = world.lease(world.digests[0])
    assert world.pool.weights(slot).digest == world.digests[0]


def test_the_step_loop_is_woken_when_a_load_ends(make_world: MakeWorld) -> None:
    woken = threading.Event()
    world = make_world(on_loaded=woken.set)

    world.pool.prefetch(world.digests[0])

    assert woken.wait(DEADLINE_S)
    assert world.pool.lease(world.digests[0]) == 0


def test_one_digest_is_loaded_once_and_shares_a_slot(make_world: MakeWorld) -> None:
    """Ten tenants with the same adapter: one load, one copy, one slot, ten leases."""
    world = make_world()
    for _ in range(10):
        world.pool.prefetch(world.digests[0])

    slots = {world.lease(world.digests[0]) for _ in range(10)}

    assert slots == {0}
    assert world.packer.count == 1
    assert world.pool.stats().leases == 10
    assert world.pool.stats().host == (world.digests[0],)


def test_an_adapter_in_use_is_never_evicted(make_world: MakeWorld) -> None:
    world = make_world(max_loras=2, max_cpu_loras=2)
    first, second, third = world.digests[:3]
    world.lease(first)
    world.lease(second)

    for _ in range(50):
        assert world.pool.lease(third) is None
        world.let_waits_end()
    assert world.packer.count == 2, "a load that has no place to go is not begun"
    assert world.pool.stats().resident == (first, second)

    world.pool.release(first)
    assert world.lease(third) == 0
    assert world.pool.stats().resident == (third, second)
    world.pool.check()


def test_the_least_recently_used_goes_first(make_world: MakeWorld) -> None:
    world = make_world(max_loras=1, max_cpu_loras=3)
    a, b, c, d = world.digests[:4]
    for digest in (a, b, c):
        world.lease(digest)
        world.pool.release(digest)
    world.lease(a)
    world.pool.release(a)

    world.load(d)

    assert set(world.pool.stats().host) == {a, c, d}
    assert world.pool.stats().evictions_total == 1


def test_a_slot_is_taken_over_and_the_version_tells(make_world: MakeWorld) -> None:
    world = make_world(max_loras=1)
    a, b = world.digests[:2]
    slot = world.lease(a)
    version = world.pool.version
    assert world.pool.lease(a) == slot
    assert world.pool.version == version, "nothing changed in the slot"
    world.pool.release(a)
    world.pool.release(a)

    assert world.lease(b) == slot

    assert world.pool.version > version
    assert world.pool.weights(slot).digest == b
    assert set(world.pool.stats().host) == {a, b}, "a lost its slot, not its place in memory"


def test_those_who_wait_for_a_slot_are_not_evicted_by_those_who_wait_for_a_load(
    make_world: MakeWorld,
) -> None:
    """Without this, more waiting adapters than places would load and evict each other for ever."""
    world = make_world(max_loras=1, max_cpu_loras=3)
    world.lease(world.digests[0])

    for _ in range(300):
        for digest in world.digests[1:]:
            assert world.pool.lease(digest) is None
        time.sleep(0.0005)

    stats = world.pool.stats()
    assert stats.evictions_total == 0
    assert stats.loads_total == 3


def test_a_missing_adapter_is_unavailable_and_tried_again_later(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    world = make_world()
    artifact = make_adapter(tmp_path / "late", rank=4, seed=99)
    world.pool.prefetch(artifact.digest)
    world.wait_for_failure()

    with pytest.raises(AdapterUnavailableError, match="not in the store") as caught:
        world.pool.lease(artifact.digest)
    assert caught.value.retry_after_s is not None
    assert 0 < caught.value.retry_after_s <= 5

    world.store.put(tmp_path / "late", artifact.digest)
    world.clock.now_s += 1
    with pytest.raises(AdapterUnavailableError):
        world.pool.lease(artifact.digest)  # known to fail, not asked again yet
    assert world.pool.stats().load_failures_total == 1

    world.clock.now_s += 5
    assert world.lease(artifact.digest) == 0


def damage_tensor(folder: Path) -> None:
    content = bytearray((folder / TENSORS_FILE).read_bytes())
    content[-1] ^= 1
    (folder / TENSORS_FILE).write_bytes(content)


def damage_alpha(folder: Path) -> None:
    text = (folder / CONFIG_FILE).read_text()
    assert '"lora_alpha": 16' in text
    (folder / CONFIG_FILE).write_text(text.replace('"lora_alpha": 16', '"lora_alpha": 17'))


def damage_header(folder: Path) -> None:
    (folder / TENSORS_FILE).write_bytes((folder / TENSORS_FILE).read_bytes()[:-5])


def remove_file(folder: Path) -> None:
    (folder / CONFIG_FILE).unlink()


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (damage_tensor, "the stored adapter is sha256:"),
        (damage_alpha, "the stored adapter is sha256:"),
        (damage_header, "truncated"),
        (remove_file, "missing"),
    ],
)
def test_a_damaged_adapter_is_never_served(
    make_world: MakeWorld, damage: Callable[[Path], None], word: str
) -> None:
    world = make_world()
    digest = world.digests[0]
    damage(world.store.fetch(digest, Path("unused")))

    world.pool.prefetch(digest)
    world.wait_for_failure()

    with pytest.raises(AdapterInvalidError, match=word):
        world.pool.lease(digest)
    assert world.packer.count == 0


def test_the_digest_is_checked_at_each_load(make_world: MakeWorld) -> None:
    world = make_world(max_loras=1, max_cpu_loras=1)
    world.lease(world.digests[0])
    world.pool.release(world.digests[0])
    world.load(world.digests[1])
    assert world.pool.stats().host == (world.digests[1],)
    damage_tensor(world.store.fetch(world.digests[0], Path("unused")))

    world.let_waits_end()
    world.pool.prefetch(world.digests[0])
    world.wait_for_failure()

    with pytest.raises(AdapterInvalidError):
        world.pool.lease(world.digests[0])


def test_an_adapter_of_another_base_or_beyond_the_cap_is_invalid(make_world: MakeWorld) -> None:
    for changes, word in (({"shape": SMOLLM2_SHAPE}, "576"), ({"max_rank": 3}, "cap of 3")):
        world = make_world(**changes)
        world.pool.prefetch(world.digests[0])
        world.wait_for_failure()

        with pytest.raises(AdapterInvalidError, match=word):
            world.pool.lease(world.digests[0])


def test_a_loader_survives_whatever_goes_wrong(make_world: MakeWorld) -> None:
    world = make_world()

    def explode(_: AdapterArtifact) -> Packed:
        raise MemoryError

    world.pool.loader.pack = explode
    world.pool.prefetch(world.digests[0])
    world.wait_for_failure()
    with pytest.raises(AdapterUnavailableError, match="MemoryError"):
        world.pool.lease(world.digests[0])

    world.pool.loader.pack = world.packer
    world.load(world.digests[1])


def test_a_digest_that_is_a_path_reaches_no_file(make_world: MakeWorld) -> None:
    world = make_world()
    digests = ("../../etc", "sha256:../../../../etc/passwd", "sha256:" + "A" * 64, "")
    for digest in digests:
        world.pool.prefetch(digest)
    world.wait_until(lambda: world.pool.stats().load_failures_total == len(digests))

    with pytest.raises(AdapterUnavailableError, match="not an adapter digest"):
        world.pool.lease("../../etc")


def test_a_release_too_many_is_a_bug_that_shows(make_world: MakeWorld) -> None:
    world = make_world()
    world.lease(world.digests[0])
    world.pool.release(world.digests[0])

    with pytest.raises(AssertionError, match="more often"):
        world.pool.release(world.digests[0])


def test_capacity_can_shrink_and_grow(make_world: MakeWorld) -> None:
    world = make_world(max_loras=1, max_cpu_loras=4)
    world.load(*world.digests[:4])
    world.lease(world.digests[0])
    world.let_waits_end()

    world.pool.set_capacity(2)
    assert set(world.pool.stats().host) == {world.digests[0], world.digests[3]}

    world.pool.set_capacity(8)
    world.load(*world.digests)
    world.pool.check()
    with pytest.raises(ValueError, match="slots"):
        world.pool.set_capacity(0)


def test_evicted_memory_is_given_back(make_world: MakeWorld, tmp_path: Path) -> None:
    """The mapping itself goes, not only the pool's mention of it."""
    world = make_world(max_loras=1, max_cpu_loras=1)
    artifact = make_adapter(tmp_path / "big", rank=4, seed=77)
    packed = [pack_native(artifact, TINY_SHAPE)]
    mapping = weakref.ref(packed[0].memory.base)
    world.pool.loader.pack = lambda _: packed.pop()  # type: ignore[assignment,return-value]  # real weights
    world.load(world.digests[0])
    world.pool.loader.pack = world.packer
    assert mapping() is not None
    world.let_waits_end()

    world.load(world.digests[1])

    gc.collect()
    assert mapping() is None
    assert world.pool.stats().host_bytes == 1000


class PoolMachine(RuleBasedStateMachine):
    """Any order of prefetches, leases, releases and pins, by three tenants, keeps slots, leases, shares
    and bounds consistent.
    """

    stored: tuple[Path, list[str]]
    tenants = st.sampled_from(["", "a", "b"])

    def __init__(self) -> None:
        super().__init__()
        folder, self.digests = self.stored
        self.clock = Clock()
        self.leases: dict[tuple[str, str], int] = {}
        self.pool = LoraPool(
            store=AdapterStore(f"file://{folder}"),
            shape=TINY_SHAPE,
            limits=AdapterLimits(),
            pack=lambda artifact: Packed(artifact.digest),
            cache_dir=folder / "cache",
            max_loras=2,
            max_cpu_loras=3,
            idle_s=50.0,
            clock=self.clock,
        )
        self.pinned_and_here: set[str] = set()
        self.loaders = self.pool.loader.threads = DeferredLoaders()

    @rule(index=st.integers(0, 7), tenant=tenants)
    def prefetch(self, index: int, tenant: str) -> None:
        self.pool.prefetch(self.digests[index], tenant)

    @rule(index=st.integers(0, 7), tenant=tenants)
    def lease(self, index: int, tenant: str) -> None:
        digest = self.digests[index]
        slot = self.pool.lease(digest, tenant)
        if slot is None:
            leased = {digest for digest, _ in self.leases}
            assert digest not in leased, "a leased adapter can be leased again at once"
        else:
            key = (digest, tenant)
            self.leases[key] = self.leases.get(key, 0) + 1

    @rule(index=st.integers(0, 7))
    def pin(self, index: int) -> None:
        digest = self.digests[index]
        pinned = self.pool.stats().pinned
        if pinned in ((), (digest,)):
            self.pool.pin(digest)
        else:
            with pytest.raises(PinRefusedError, match="1 adapters can be pinned"):
                self.pool.pin(digest)

    @rule(index=st.integers(0, 7))
    def unpin(self, index: int) -> None:
        self.pinned_and_here.discard(self.digests[index])
        self.pool.unpin(self.digests[index])

    @rule()
    def tidy(self) -> None:
        self.pool.tidy()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.leases)))
        self.pool.release(*key)
        self.leases[key] -= 1
        if not self.leases[key]:
            del self.leases[key]

    @rule(seconds=st.one_of(st.floats(0, 3), st.just(100.0)))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def finish_loads(self) -> None:
        self.loaders.run()
        assert len(self.pool.stats().loading) <= 1, "one loader, one load"

    @invariant()
    def holds(self) -> None:
        self.pool.check()
        stats = self.pool.stats()
        assert stats.leases == sum(self.leases.values())
        leased = {digest for digest, _ in self.leases}
        assert leased <= set(stats.resident) <= set(stats.host)
        assert set(stats.host) >= self.pinned_and_here
        self.pinned_and_here = set(stats.host) & set(stats.pinned)
        assert len(stats.resident) <= 2
        # One load may land on a host tier that filled up with leases meanwhile.
        assert len(stats.host) <= 3 + 1
        for slot, digest in enumerate(self.pool._slots):
            assert digest is None or self.pool.weights(slot).digest == digest

    def teardown(self) -> None:
        self.pool.close()


def test_any_sequence_of_calls(stored: tuple[Path, list[str]]) -> None:
    machine = type("Machine", (PoolMachine,), {"stored": stored})

    # The machine's own settings: few examples, each of many steps.
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine, settings=settings(max_examples=25, stateful_step_count=40, deadline=None)
    )


# ------------------------------------------------------------------------------------------- store


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_what_is_put_is_what_is_fetched(tmp_path: Path, scheme: str) -> None:
    store = AdapterStore(f"file://{tmp_path}/store" if scheme == "file" else "memory://lpx-test")
    artifact = make_adapter(tmp_path / "a")
    assert not store.has(artifact.digest)
    with pytest.raises(AdapterNotStoredError):
        store.fetch(artifact.digest, tmp_path / "cache")

    store.put(tmp_path / "a", artifact.digest)
    store.put(tmp_path / "a", artifact.digest)

    assert store.has(artifact.digest)
    folder = store.fetch(artifact.digest, tmp_path / "cache")
    assert read_adapter(folder, limits=AdapterLimits()).digest == artifact.digest
    is_copied = folder.is_relative_to(tmp_path / "cache")
    assert is_copied == (scheme == "memory"), "a local store is read in place"
    assert store.fetch(artifact.digest, tmp_path / "cache") == folder


def test_a_damaged_local_copy_of_a_remote_adapter_is_fetched_anew(tmp_path: Path) -> None:
    store = AdapterStore("memory://lpx-test-2")
    artifact = make_adapter(tmp_path / "a")
    store.put(tmp_path / "a", artifact.digest)
    damage_tensor(store.fetch(artifact.digest, tmp_path / "cache"))

    with pytest.raises(Exception, match="the stored adapter is"):
        store.load(artifact.digest, tmp_path / "cache", limits=AdapterLimits())

    again = store.load(artifact.digest, tmp_path / "cache", limits=AdapterLimits())
    assert again.digest == artifact.digest


def test_publishing_is_atomic_under_a_race(tmp_path: Path) -> None:
    """Readers and eight writers: nobody ever sees half an adapter."""
    store = AdapterStore(f"file://{tmp_path}/store")
    artifact = make_adapter(tmp_path / "a")
    start = threading.Barrier(9)

    def write() -> None:
        start.wait(DEADLINE_S)
        store.put(tmp_path / "a", artifact.digest)

    def read() -> None:
        start.wait(DEADLINE_S)
        give_up_s = time.monotonic() + DEADLINE_S
        while not store.has(artifact.digest):
            assert time.monotonic() < give_up_s
        store.load(artifact.digest, tmp_path, limits=AdapterLimits())

    with ThreadPoolExecutor(9) as threads:
        for future in [threads.submit(job) for job in (*[write] * 8, read)]:
            future.result(DEADLINE_S)

    left = [path.name for path in (tmp_path / "store").rglob(".partial-*")]
    assert left == []


def test_store_urls_are_checked() -> None:
    for url in ("store", "file://host/path", "file:relative"):
        with pytest.raises(ValueError, match=r"file:///|URL"):
            AdapterStore(url)
