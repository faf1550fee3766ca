"""An HTTP server that plays the other side of a webhook: scripted, and it remembers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Received:
    """One request as it came."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """Answers with `statuses` in turn, the last one for ever.

    `hangs`: says nothing. `answer_bytes`: how long its answers are.
    """

    statuses: list[int] = field(default_factory=lambda: [204])
    location: str = ""
    hangs: bool = False
    answer_bytes: int = 0
    got: list[Received] = field(default_factory=list)
    port: int = 0
    sent_bytes: int = 0
    has_some: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @asynccontextmanager
    async def running(self, context: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self.has_ended.set()
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {
                name.lower(): value for name, value in (line.split(": ", 1) for line in lines)
            }
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.got.append(Received(first.split(" ")[1], headers, body))
            self.has_some.set()
            if self.hangs:
                await self.has_ended.wait()
                return
            status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
            location = f"location: {self.location}\r\n" if self.location else ""
            writer.write(
                f"HTTP/1.1 {status} X\r\n{location}content-length: {self.answer_bytes}\r\n\r\n".encode()
            )
            for _ in range(0, self.answer_bytes, 4096):
                writer.write(b"x" * 4096)
                await writer.drain()
                self.sent_bytes += 4096
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the sender has heard enough
        finally:
            writer.close()
