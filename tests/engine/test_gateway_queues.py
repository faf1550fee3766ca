"""Frames for gateways that do not read: in order, bounded in bytes, and nobody else's business."""

from __future__ import annotations

import zmq
from hypothesis import given
from hypothesis import strategies as st
from loraplex_engine.gateway_queues import GatewayQueues


class FakeRouter:
    """Takes `room` frames for each gateway; knows those in `known`."""

    def __init__(self, *known: bytes) -> None:
        self.room = dict.fromkeys(known, 0)
        self.sent: dict[bytes, list[bytes]] = {identity: [] for identity in known}

    def send_multipart(self, msg_parts: list[bytes], flags: int, /) -> None:
        assert flags == zmq.NOBLOCK
        identity, frame = msg_parts
        if identity not in self.room:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if self.room[identity] == 0:
            raise zmq.Again
        self.room[identity] -= 1
        self.sent[identity].append(frame)


def test_what_a_gateway_does_not_take_waits_and_keeps_its_order() -> None:
    router = FakeRouter(b"a")
    queues = GatewayQueues(router, limit_bytes=100)
    router.room[b"a"] = 1

    assert [queues.send(b"a", frame) for frame in (b"1", b"22", b"333")] == [
        "sent",
        "waits",
        "waits",
    ]
    assert queues.num_bytes == 5
    router.room[b"a"] = 1
    assert queues.send(b"a", b"4444") == "waits"  # behind the others, though there is room again
    assert queues.flush() == []
    assert router.sent[b"a"] == [b"1", b"22"]
    router.room[b"a"] = 9
    queues.flush()

    assert router.sent[b"a"] == [b"1", b"22", b"333", b"4444"]
    assert queues.is_empty
    assert queues.num_bytes == 0
    assert queues.send(b"a", b"5") == "sent"


def test_bytes_are_bounded_for_each_gateway_alone() -> None:
    router = FakeRouter(b"slow", b"fast")
    queues = GatewayQueues(router, limit_bytes=10)
    router.room[b"fast"] = 99

    assert queues.send(b"slow", b"x" * 10) == "waits"
    assert queues.send(b"slow", b"x") == "slow"
    assert queues.send(b"fast", b"y" * 50) == "sent"
    queues.forget(b"slow")

    assert queues.num_bytes == 0
    assert queues.is_empty


def test_who_is_gone_is_told_of() -> None:
    router = FakeRouter(b"a")
    queues = GatewayQueues(router, limit_bytes=100)
    assert queues.send(b"nobody", b"x") == "unreachable"
    queues.send(b"a", b"x")
    del router.room[b"a"]

    assert queues.flush() == [b"a"]


@given(
    st.lists(
        st.tuples(st.sampled_from([b"a", b"b"]), st.integers(0, 30), st.integers(0, 3)), max_size=40
    )
)
def test_whatever_happens_each_gateway_gets_a_prefix_of_what_was_sent_to_it(
    moves: list[tuple[bytes, int, int]],
) -> None:
    router = FakeRouter(b"a", b"b")
    queues = GatewayQueues(router, limit_bytes=60)
    sent: dict[bytes, list[bytes]] = {b"a": [], b"b": []}
    cut: set[bytes] = set()
    for number, (identity, size, room) in enumerate(moves):
        router.room[identity] = room
        if identity in cut:
            continue
        frame = f"{number}:".encode() + b"x" * size
        sent[identity].append(frame)
        if queues.send(identity, frame) == "slow":
            queues.forget(identity)
            cut.add(identity)
        queues.flush()
        assert queues.num_bytes <= 2 * 60
    for identity in (b"a", b"b"):
        received = router.sent[identity]
        assert received == sent[identity][: len(received)]
    router.room = {b"a": 99, b"b": 99}
    queues.flush()
    for identity in {b"a", b"b"} - cut:
        assert router.sent[identity] == sent[identity]
