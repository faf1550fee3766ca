"""Block events: what they say adds up to what is cached; and the socket that says it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from loraplex_engine.block_events import (
    TOPIC,
    BlockEvent,
    BlockEventBatch,
    BlockMirror,
    BlockRemoved,
    BlockStored,
    Cleared,
    decode_batch,
    encode_batch,
)
from loraplex_engine.curve import make_key_pair
from loraplex_engine.endpoint import EventsEndpoint
from loraplex_engine.errors import ConfigError
from loraplex_engine.event_publisher import BlockEventPublisher

from tests.support.engine_fakes import digest, make_engine, make_request

DEADLINE_S = 20


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a unix socket's path has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="lpx-") as name:
        yield Path(name)


def stored(index: int, parent: int | None = None) -> BlockStored:
    name = bytes([index]) * 32
    return BlockStored(
        name=name, parent=None if parent is None else bytes([parent]) * 32, num_tokens=4
    )


def batch(seq: int, *events: BlockEvent, incarnation: str = "i", kind: str = "events") -> object:
    return BlockEventBatch(
        replica_id="e0",
        incarnation=incarnation,
        seq=seq,
        kind="snapshot" if kind == "snapshot" else "events",
        events=list(events),
    )


def apply(mirror: BlockMirror, *batches: object) -> None:
    for item in batches:
        assert isinstance(item, BlockEventBatch)
        mirror.apply(item)


# ------------------------------------------------------------------ what the cache says


def test_events_replayed_are_the_indexs_content() -> None:
    events: list[BlockEvent] = []
    engine = make_engine(num_blocks=12, has_prefix_cache=True, publish=events.append)
    for index in range(30):
        request = make_request(
            f"r{index}",
            [1 + index % 3, *range(10, 20 + index % 5)],
            tenant="ab"[index % 2],
            adapter="x" if index % 4 == 0 else None,
        )
        engine.core.add(request)
        engine.run()
        if index == 15:
            engine.core.forget_cached()
    mirror = BlockMirror()

    apply(mirror, *(batch(seq, event) for seq, event in enumerate(events)))

    assert set(mirror.blocks) == engine.cache.names()
    assert len(mirror.blocks) > 5
    assert {type(event) for event in events} == {BlockStored, BlockRemoved, Cleared}
    assert {block.num_tokens for block in mirror.blocks.values()} == {4}
    assert {e.adapter_digest for e in events if isinstance(e, BlockStored)} == {None, digest("x")}


def test_a_blocks_parent_was_stored_before_it() -> None:
    events: list[BlockEvent] = []
    engine = make_engine(has_prefix_cache=True, publish=events.append)
    engine.core.add(make_request(prompt=list(range(1, 18))))
    engine.run()

    blocks = [event for event in events if isinstance(event, BlockStored)]

    assert [block.parent for block in blocks] == [None, *(block.name for block in blocks[:-1])]


def test_no_event_has_room_for_token_ids() -> None:
    """A prompt must not leave the engine in the clear; only its blocks' names do."""
    fields = {field.name for field in msgspec.structs.fields(BlockStored)}

    assert fields == {"name", "parent", "num_tokens", "adapter_digest"}


# ------------------------------------------------------------------ the subscriber's side


def test_a_mirror_that_misses_a_batch_knows_and_a_snapshot_mends_it() -> None:
    mirror = BlockMirror()
    apply(mirror, batch(0, Cleared()), batch(1, stored(1)))
    assert mirror.is_in_sync
    assert len(mirror.blocks) == 1

    apply(mirror, batch(3, stored(3)))
    assert (mirror.is_in_sync, mirror.num_gaps) == (False, 1)
    apply(mirror, batch(4, stored(4)), batch(5, stored(1), stored(2), kind="snapshot"))

    assert mirror.is_in_sync
    assert set(mirror.blocks) == {stored(1).name, stored(2).name}
    apply(mirror, batch(6, BlockRemoved(name=stored(1).name)))
    assert set(mirror.blocks) == {stored(2).name}


def test_a_mirror_that_comes_late_believes_nothing_before_a_snapshot() -> None:
    mirror = BlockMirror()

    apply(mirror, batch(17, stored(1)))

    assert not mirror.is_in_sync
    assert not mirror.blocks


def test_a_restarted_replica_begins_with_nothing() -> None:
    mirror = BlockMirror()
    apply(mirror, batch(0, stored(1)))

    apply(mirror, batch(0, Cleared(), incarnation="j"))

    assert mirror.is_in_sync
    assert not mirror.blocks
    assert mirror.num_gaps == 0


def test_batches_survive_the_wire() -> None:
    original = batch(7, Cleared(), stored(1), stored(2, 1), BlockRemoved(name=b"x" * 32))
    assert isinstance(original, BlockEventBatch)

    assert decode_batch(encode_batch(original)) == original


# ------------------------------------------------------------------ the socket


@pytest.fixture
def publisher(folder: Path) -> Iterator[BlockEventPublisher]:
    endpoint = EventsEndpoint(f"ipc://{folder}/run/events.sock")
    publisher = BlockEventPublisher(endpoint, replica_id="e0", incarnation="i")
    publisher.start()
    yield publisher
    publisher.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


class Subscriber:
    """A SUB socket and the mirror that it feeds."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.mirror = BlockMirror()
        self.socket = context.socket(zmq.SUB)
        self.socket.linger = 0
        self.socket.connect(address)
        self.subscribe()

    def subscribe(self) -> None:
        self.socket.subscribe(TOPIC)

    def resubscribe(self) -> None:
        self.socket.unsubscribe(TOPIC)
        self.socket.subscribe(TOPIC)

    def read_until_synced(self, names: set[bytes]) -> None:
        give_up_s = time.monotonic() + DEADLINE_S
        while not (self.mirror.is_in_sync and set(self.mirror.blocks) == names):
            assert time.monotonic() < give_up_s, "it never came to that"
            if self.socket.poll(1000):
                topic, frame = self.socket.recv_multipart()
                assert topic == TOPIC
                self.mirror.apply(decode_batch(frame))


def test_who_comes_late_gets_a_snapshot_and_then_what_changes(
    publisher: BlockEventPublisher, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    publisher.post(stored(1))
    publisher.post(stored(2, 1))
    late = Subscriber(context, publisher.address)
    late.read_until_synced({stored(1).name, stored(2).name})

    publisher.post(BlockRemoved(name=stored(2).name))
    publisher.post(stored(3))
    late.read_until_synced({stored(1).name, stored(3).name})
    publisher.post(Cleared())
    late.read_until_synced(set())
    late.socket.close()

    assert late.mirror.num_gaps == 0


def test_a_gap_is_mended_by_subscribing_again(
    publisher: BlockEventPublisher, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    subscriber = Subscriber(context, publisher.address)
    publisher.post(stored(1))
    subscriber.read_until_synced({stored(1).name})
    # As if the next batch had been dropped on the way.
    publisher.post(stored(2))
    give_up_s = time.monotonic() + DEADLINE_S
    dropped: set[BlockEvent] = set()
    while stored(2) not in dropped:  # what only says that it is alive may come before it
        assert time.monotonic() < give_up_s
        if subscriber.socket.poll(1000):
            dropped.update(decode_batch(subscriber.socket.recv_multipart()[1]).events)
    publisher.post(stored(3))
    while subscriber.mirror.is_in_sync:
        assert time.monotonic() < give_up_s
        if subscriber.socket.poll(1000):
            subscriber.mirror.apply(decode_batch(subscriber.socket.recv_multipart()[1]))

    subscriber.resubscribe()

    subscriber.read_until_synced({stored(index).name for index in (1, 2, 3)})
    subscriber.socket.close()


def test_an_idle_replica_sends_heartbeats_with_numbers(
    folder: Path, context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex_engine.event_publisher.HEARTBEAT_S", 0.02)
    endpoint = EventsEndpoint(f"ipc://{folder}/run/events.sock")
    publisher = BlockEventPublisher(endpoint, replica_id="e0", incarnation="i")
    publisher.start()
    subscriber = Subscriber(context, publisher.address)
    batches: list[BlockEventBatch] = []
    while len(batches) < 4:
        assert subscriber.socket.poll(DEADLINE_S * 1000)
        batches.append(decode_batch(subscriber.socket.recv_multipart()[1]))
    subscriber.socket.close()
    publisher.close()

    numbers = [item.seq for item in batches]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    assert all(not item.events for item in batches[1:])


def test_a_replica_that_publishes_nothing_blocks_nobody_and_closes(folder: Path) -> None:
    endpoint = EventsEndpoint(f"ipc://{folder}/run/events.sock")
    never_started = BlockEventPublisher(endpoint, replica_id="e0", incarnation="i")
    never_started.post(stored(1))

    never_started.close()
    never_started.post(stored(2))

    EventsEndpoint(f"ipc://{folder}/run/events.sock").close()  # the address is free again


# ------------------------------------------------------------------ its protection


def test_the_address_is_protected_as_the_engines_is(folder: Path) -> None:
    (folder / "open").mkdir(mode=0o755)
    for address, match in [
        (f"ipc://{folder}/open/e.sock", "--events-address .* closed to others"),
        ("ipc://relative.sock", "--events-address .* absolute path"),
        ("tcp://127.0.0.1:0", "TCP needs --curve-secret-key-file"),
        ("udp://127.0.0.1:0", "--events-address .* use ipc:///path or tcp"),
    ]:
        with pytest.raises(ConfigError, match=match):
            EventsEndpoint(address)


def test_two_engines_cannot_share_it(folder: Path) -> None:
    first = EventsEndpoint(f"ipc://{folder}/run/e.sock")
    with pytest.raises(ConfigError, match="another engine listens there"):
        EventsEndpoint(f"ipc://{folder}/run/e.sock")
    first.close()


def test_tcp_tells_only_listed_keys(folder: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    make_key_pair(folder / "engine.key")
    listed, stranger = make_key_pair(folder / "listed"), make_key_pair(folder / "stranger")
    (folder / "allowed").write_text(f"{listed.public_key.decode()} router\n")
    endpoint = EventsEndpoint(
        "tcp://127.0.0.1:0",
        curve_secret_key_file=folder / "engine.key",
        curve_allowed_keys_file=folder / "allowed",
    )
    assert endpoint.public_key is not None
    publisher = BlockEventPublisher(endpoint, replica_id="e0", incarnation="i")
    publisher.start()
    publisher.post(stored(1))
    sockets = {}
    for name, keys in (("listed", listed), ("stranger", stranger)):
        socket = context.socket(zmq.SUB)
        socket.linger = 0
        socket.curve_serverkey = endpoint.public_key.encode()
        socket.curve_publickey = keys.public_key
        socket.curve_secretkey = keys.secret_key
        socket.connect(publisher.address)
        socket.subscribe(TOPIC)
        sockets[name] = socket

    assert sockets["listed"].poll(DEADLINE_S * 1000)
    assert not sockets["stranger"].poll(200)
    for socket in sockets.values():
        socket.close()
    publisher.close()
