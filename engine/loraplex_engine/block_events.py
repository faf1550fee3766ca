"""What a replica says of its prefix cache, so that a router can send a prompt to where its prefix lies.

Owns the messages and the subscriber's side of them; `event_publisher.py` sends them. No torch.

One message is two ZeroMQ frames: the topic `TOPIC`, then a `BlockEventBatch`. Batches are numbered per
incarnation without gaps, so a subscriber that misses one knows. Subscribing (again) makes the replica
send a snapshot of everything it holds, which is how one starts late or mends a gap: `BlockMirror`.

Blocks go by their names (`kv.hashing`): only who knows a tenant's salt can tell what one stands for. Token
ids are never sent, because they are the tenant's prompt in the clear.
"""

from __future__ import annotations

from typing import Literal

import msgspec

TOPIC = b"loraplex.kv.1"


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored", omit_defaults=True):
    """A block can be found."""

    name: bytes
    parent: bytes | None = None  # the block before it in the sequence; None: it is the first
    num_tokens: int
    adapter_digest: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    """A block cannot be found any more."""

    name: bytes


class Cleared(msgspec.Struct, frozen=True, kw_only=True, tag="cleared"):
    """No block can be found: the replica started, or its cache was emptied."""


BlockEvent = BlockStored | BlockRemoved | Cleared


class BlockEventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Events in order. `seq` starts at 0 and grows by one a batch, also over empty (heartbeat) ones.

    A snapshot lists all that is stored after the batches before it; who has followed so far may skip
    it. It has a number of its own like any other batch.
    """

    replica_id: str
    incarnation: str  # new at each start; numbers begin again
    seq: int
    kind: Literal["events", "snapshot"] = "events"
    events: list[BlockEvent] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BlockEventBatch)


def encode_batch(batch: BlockEventBatch) -> bytes:
    """A batch as the message's second frame."""
    return _encoder.encode(batch)


def decode_batch(frame: bytes) -> BlockEventBatch:
    """The second frame of a message. Raises `msgspec.MsgspecError`."""
    return _decoder.decode(frame)


class BlockMirror:
    """What one replica holds, as far as its events tell.

    `blocks` may be believed while `is_in_sync`; without it, subscribe again and feed what comes.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, BlockStored] = {}
        self.is_in_sync = False
        self.num_gaps = 0
        self._incarnation: str | None = None
        self._next_seq = 0

    def apply(self, batch: BlockEventBatch) -> None:
        """Take over one batch, in the order of arrival."""
        if batch.incarnation != self._incarnation:
            # The first batch of a replica is the whole truth: it starts with nothing.
            self._incarnation = batch.incarnation
            self.is_in_sync = batch.seq == 0
            self.blocks = {}
        elif batch.seq != self._next_seq:
            self.num_gaps += 1
            self.is_in_sync = False
        self._next_seq = batch.seq + 1
        if batch.kind == "snapshot":
            self.blocks = {}
            self.is_in_sync = True
        if not self.is_in_sync:
            return
        for event in batch.events:
            match event:
                case BlockStored():
                    self.blocks[event.name] = event
                case BlockRemoved():
                    self.blocks.pop(event.name, None)
                case Cleared():
                    self.blocks.clear()
