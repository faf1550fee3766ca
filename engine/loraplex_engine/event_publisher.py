"""Publishes block events on a socket of its own: `--events-address`, off by default.

A thread of its own does the sending, so that the step thread, which only appends to a queue, never waits.
A subscriber that does not keep up loses messages, which it can tell by their numbers; to make it wait
instead would let it hold up the replica. Everyone who subscribes gets a snapshot.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import structlog
import zmq

from loraplex_engine.block_events import (
    TOPIC,
    BlockEvent,
    BlockEventBatch,
    BlockRemoved,
    BlockStored,
    Cleared,
    encode_batch,
)
from loraplex_engine.endpoint import EventsEndpoint

log = structlog.get_logger(__name__)

HEARTBEAT_S = 2  # so long it takes at most to notice that the last batch was lost
MAX_EVENTS_PER_BATCH = 4096
_SUBSCRIBE = b"\x01"


class BlockEventPublisher:
    """See the module's header. `post` may be called from any thread, the rest from the owner's."""

    def __init__(
        self,
        endpoint: EventsEndpoint,
        *,
        replica_id: str,
        incarnation: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = endpoint.address
        self.public_key = endpoint.public_key
        self._endpoint = endpoint
        self._replica_id = replica_id
        self._incarnation = incarnation
        self._clock = clock
        self._queue: deque[BlockEvent] = deque([Cleared()])  # whatever was here before is gone
        self._stored: dict[bytes, BlockStored] = {}
        self._next_seq = 0
        self._sent_at_s = 0.0
        self._is_open = True
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="block-events", daemon=True)

    def start(self) -> None:
        """Begin to publish."""
        self._thread.start()

    def post(self, event: BlockEvent) -> None:
        """Have an event published, soon and in order; never blocks."""
        if not self._is_open:
            return
        self._queue.append(event)
        if len(self._queue) == 1:
            self._wake()

    def close(self) -> None:
        """Send what is queued and stop listening."""
        self._is_open = False
        if self._thread.ident is None:
            self._endpoint.close()
        else:
            self._wake()
            self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self._wake_write, b"!")

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            # Routers do without; requests do not.
            log.exception("block_events_failed")
            self._is_open = False
            self._queue.clear()
        finally:
            self._endpoint.close()

    def _serve(self) -> None:
        socket = self._endpoint.socket
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while True:
            is_last_turn = not self._is_open
            ready = dict(poller.poll(0 if is_last_turn else HEARTBEAT_S * 1000))
            if self._wake_read in ready:
                os.read(self._wake_read, 65536)
            has_newcomer = socket in ready and self._take_subscriptions()
            while self._queue:
                self._send_batch()
            if has_newcomer:
                self._send("snapshot", list(self._stored.values()))
            elif self._clock() - self._sent_at_s >= HEARTBEAT_S:
                self._send("events", [])
            if is_last_turn:
                return

    def _take_subscriptions(self) -> bool:
        """Whether somebody subscribed to what we send."""
        has_newcomer = False
        while True:
            try:
                frame = self._endpoint.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return has_newcomer
            has_newcomer |= frame[:1] == _SUBSCRIBE and TOPIC.startswith(frame[1:])

    def _send_batch(self) -> None:
        count = min(len(self._queue), MAX_EVENTS_PER_BATCH)
        events = [self._queue.popleft() for _ in range(count)]
        for event in events:
            match event:
                case BlockStored():
                    self._stored[event.name] = event
                case BlockRemoved():
                    del self._stored[event.name]
                case Cleared():
                    self._stored.clear()
        self._send("events", events)

    def _send(self, kind: str, events: list[BlockEvent] | list[BlockStored]) -> None:
        batch = BlockEventBatch(
            replica_id=self._replica_id,
            incarnation=self._incarnation,
            seq=self._next_seq,
            kind="snapshot" if kind == "snapshot" else "events",
            events=[*events],
        )
        self._next_seq += 1
        self._sent_at_s = self._clock()
        # Drops it for subscribers whose queue is full, never blocks: see the header.
        self._endpoint.socket.send_multipart([TOPIC, encode_batch(batch)], zmq.NOBLOCK)
