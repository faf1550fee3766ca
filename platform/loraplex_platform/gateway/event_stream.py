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
        on_end: called when the response is over, whether sent, broken off or cancelled.
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
        following: asyncio.Future[bytes | None] | None = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while True:
                if following is None:
                    following = asyncio.ensure_future(anext(self._chunks, None))
                done, _ = await asyncio.wait({following}, timeout=self._ping_interval_s)
                chunk = following.result() if done else PING
                if done:
                    following = None
                if chunk is None:
                    break
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_end()
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            await self._chunks.aclose()
