"""What waits for gateways that do not read just now: in order, and bounded in bytes.

ZeroMQ bounds its own queues in frames, and a frame may be one token or a megabyte of log-probabilities. So
it is given few frames, and what it does not take waits here, where bytes are counted. A gateway for which
more waits than the limit is to be cut off: nothing is ever dropped from the middle of its stream.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, Protocol

import zmq

CutReason = Literal["silent", "slow", "unreachable"]
# What becomes of a frame. "slow": the gateway has too much waiting; "unreachable": there is no such peer.
SendOutcome = Literal["sent", "waits", "slow", "unreachable"]


class Router(Protocol):
    """A ROUTER socket that refuses what it cannot deliver."""

    def send_multipart(self, msg_parts: list[bytes], flags: int, /) -> object:
        """Raises `zmq.Again`: the peer's queue is full; another `ZMQError`: there is no such peer."""
        ...


@dataclass(slots=True)
class _Queue:
    frames: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0


class GatewayQueues:
    """Of all gateways; one thread.

    Args:
        limit_bytes: for each.
    """

    def __init__(self, router: Router, limit_bytes: int) -> None:
        self._router = router
        self._limit_bytes = limit_bytes
        self._queues: dict[bytes, _Queue] = {}  # none is empty

    @property
    def num_bytes(self) -> int:
        """Waiting, for all of them."""
        return sum(queue.num_bytes for queue in self._queues.values())

    @property
    def is_empty(self) -> bool:
        """Nothing waits."""
        return not self._queues

    def send(self, identity: bytes, frame: bytes) -> SendOutcome:
        """Send it, behind what waits for the same gateway."""
        queue = self._queues.get(identity)
        if queue is None:
            outcome = self._try(identity, frame)
            if outcome != "waits":
                return outcome
            queue = self._queues[identity] = _Queue()
        queue.frames.append(frame)
        queue.num_bytes += len(frame)
        return "slow" if queue.num_bytes > self._limit_bytes else "waits"

    def flush(self) -> list[bytes]:
        """Send what can be sent now; the gateways that have become unreachable."""
        lost = []
        for identity, queue in list(self._queues.items()):
            while queue.frames:
                outcome = self._try(identity, queue.frames[0])
                if outcome == "waits":
                    break
                if outcome == "unreachable":
                    lost.append(identity)
                    break
                queue.num_bytes -= len(queue.frames.popleft())
            if not queue.frames:
                del self._queues[identity]
        return lost

    def forget(self, identity: bytes) -> None:
        """Drop what waits for it: it is cut off."""
        self._queues.pop(identity, None)

    def _try(self, identity: bytes, frame: bytes) -> SendOutcome:
        try:
            self._router.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.Again:
            return "waits"
        except zmq.ZMQError:
            return "unreachable"
        return "sent"
