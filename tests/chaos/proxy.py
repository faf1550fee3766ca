"""A unix socket between a process and a server, which can be cut like a cable or lose what it carries.

A cut is a network's: nobody is told, nothing is reset, connections can still be made, and what was said
meanwhile arrives when it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

_CHUNK = 64 * 1024


class Proxy:
    """Carries whatever is said on `path` to the server on `target`, and back.

    Attributes:
        num_lost: replies that were lost, see `lose_replies_to`.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self.path = path
        self.num_lost = 0
        self._target = target
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._words = b""
        self._every = 0
        self._num_asked = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._connected, self.path)
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.path.unlink(missing_ok=True)

    def cut(self) -> None:
        """From now on nothing comes through."""
        self._flowing.clear()

    def heal(self) -> None:
        """Everything comes through again, what was said meanwhile first."""
        self._flowing.set()

    def lose_replies_to(self, words: str, every: int) -> None:
        """Of Postgres: have every so-many-th statement done that has these words in its text or parameters,
        swallow its reply and break the connection: a COMMIT whose acknowledgement was lost. 0: no more."""
        self._words, self._every, self._num_asked = words.encode(), every, 0

    def _loses_this(self) -> bool:
        self._num_asked += 1
        return self._every > 0 and self._num_asked % self._every == 0

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        try:
            await self._flowing.wait()
            server_reader, server_writer = await asyncio.open_unix_connection(self._target)
            writers.append(server_writer)
            talk = _PostgresTalk(lambda: self._words if self._every else b"", self._loses_this)
            directions = [
                asyncio.create_task(self._carry(reader, server_writer, talk.asked)),
                asyncio.create_task(self._carry(server_reader, writer, talk.answered)),
            ]
            try:
                await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for direction in directions:
                    direction.cancel()
                await asyncio.gather(*directions, return_exceptions=True)
            self.num_lost += talk.is_lost
        except (OSError, asyncio.CancelledError):
            pass  # the server is away, or this is the end: nobody waits for this task
        finally:
            for each in writers:
                each.transport.abort()
            self._tasks.discard(task)

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        look: Callable[[bytes], bytes | None],
    ) -> None:
        """One direction; ends with it, or when `look` has nothing more to carry (None)."""
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._flowing.wait()
                carried = look(data)
                if carried is None:
                    return
                writer.write(carried)
                await writer.drain()
            await self._flowing.wait()


class _PostgresTalk:
    """What one connection says, followed far enough to know which statement is asked for.

    Source: https://www.postgresql.org/docs/current/protocol-message-formats.html
    """

    def __init__(self, words: Callable[[], bytes], loses_this: Callable[[], bool]) -> None:
        self._words = words
        self._loses_this = loses_this
        self._statements: dict[bytes, bytes] = {}  # prepared: name -> SQL
        self._asked = bytearray()
        self._reply: bytearray | None = None  # of what is to be lost
        self._has_started = False
        self.is_lost = False

    def asked(self, data: bytes) -> bytes:
        """What the client says, all of which is carried."""
        self._asked += data
        if not self._has_started:
            # A start-up message has a length and no type.
            if len(self._asked) < 4 or len(self._asked) < (size := _size(self._asked, 0)):
                return data
            del self._asked[:size]
            self._has_started = True
        for kind, body in _messages(self._asked):
            if kind == b"P":
                name, _, rest = body.partition(b"\0")
                self._statements[name] = rest.partition(b"\0")[0]
            elif kind == b"B" and (words := self._words()):
                name = body.partition(b"\0")[2].partition(b"\0")[0]
                is_meant = words in body or words in self._statements.get(name, b"")
                if is_meant and self._loses_this():
                    self._reply = bytearray()
        return data

    def answered(self, data: bytes) -> bytes | None:
        """What the server says; None: this was the reply that is lost, and now it is complete."""
        if self._reply is None:
            return data
        self._reply += data
        self.is_lost = any(kind == b"Z" for kind, _ in _messages(self._reply))
        return None if self.is_lost else b""


def _size(data: bytearray, at: int) -> int:
    size: int = struct.unpack_from(">I", data, at)[0]
    return size


def _messages(data: bytearray) -> Iterator[tuple[bytes, bytes]]:
    """The messages at the beginning of `data` that are complete, which are taken from it."""
    while len(data) >= 5 and len(data) >= (end := 1 + _size(data, 1)):
        message = bytes(data[:end])
        del data[:end]
        yield message[:1], message[5:]
