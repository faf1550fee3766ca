"""Server-sent events: frames of one line, pings while nothing happens, `[DONE]` on success only.

The absence of `[DONE]` is how a client knows that a stream is incomplete, whatever cut it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
PING: Final = b": ping\n\n"
DONE: Final = b"data: [DONE]\n\n"


def frame(json: bytes) -> bytes:
    """One event. msgspec's JSON has no raw line breaks, so it is one line."""
    return b"data: " + json + b"\n\n"


class EventStream(Response):
    """Sends chunks as they come, and a ping whenever none has come for `ping_interval_s`.

    Args:
        chunks: ends the response when it ends.
        on_end: called when the response is over, whether sent, broken off or cancelled; once more where a
            ping had broken it.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        headers: dict[str, str],
        ping_interval_s: float,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(headers={**headers, **HEADERS})
        del self.headers["content-length"]
        self._chunks = chunks
        self._ping_interval_s = ping_interval_s
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; `receive` belongs to whoever watches for the client's going."""
        pings = _Pings(send, self._ping_interval_s, self._on_end)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            pings.start()
            async for chunk in self._chunks:
                if chunk:
                    pings.is_sending = True
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    pings.note_sent()
            await pings.stop()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_end()
            await pings.stop()
            await self._chunks.aclose()


class _Pings:
    """Sends a ping whenever nothing was sent for `interval_s`.

    One timer for the whole stream, which looks now and then how long ago that was: a chunk costs no timer.
    `on_broken` is called when one cannot be sent; none follows.
    """

    def __init__(self, send: Send, interval_s: float, on_broken: Callable[[], object]) -> None:
        self._on_broken = on_broken
        self.is_sending = False  # a chunk is on its way, perhaps to a client that reads slowly
        self._send = send
        self._interval_s = interval_s
        self._sent_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._ping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """The clock runs from now on."""
        self.note_sent()
        self._wait(self._interval_s)

    def note_sent(self) -> None:
        """A chunk is out."""
        self.is_sending = False
        self._sent_s = asyncio.get_running_loop().time()

    async def stop(self) -> None:
        """No more pings; one that is stuck is given up."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ping is not None:
            ping, self._ping = self._ping, None
            ping.cancel()
            # What broke it breaks the next chunk, too.
            await asyncio.gather(ping, return_exceptions=True)

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        idle_s = asyncio.get_running_loop().time() - self._sent_s
        # Timers have a resolution: one that fires early by less than it is not made to wait again.
        if idle_s < self._interval_s - 0.001:
            self._wait(self._interval_s - idle_s)
            return
        if not self.is_sending and (self._ping is None or self._ping.done()):
            self._ping = asyncio.ensure_future(self._send_ping())
            self._ping.add_done_callback(self._note_broken)
        self._wait(self._interval_s)

    def _note_broken(self, ping: asyncio.Task[None]) -> None:
        """A ping that cannot be sent tells that the client is gone, and nothing else may for long."""
        if ping.cancelled() or ping.exception() is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_broken()

    async def _send_ping(self) -> None:
        await self._send({"type": "http.response.body", "body": PING, "more_body": True})
        self._sent_s = asyncio.get_running_loop().time()
