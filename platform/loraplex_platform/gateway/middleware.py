"""What happens around every request: its id, its count, its body limit, and the last safety net.

Pure ASGI: nothing here buffers a stream or ties work to the life of a response.
"""

from __future__ import annotations

import asyncio
import time

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex_platform.errors import BodyTooLargeError, PlatformError
from loraplex_platform.gateway.admissions import RATES
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.gateway.errors import envelope
from loraplex_platform.gateway.failpoints import INERT, Failpoints
from loraplex_platform.gateway.metrics import GatewayMetrics
from loraplex_platform.ids import uuid7

log = structlog.get_logger(__name__)

REQUEST_UUID = "loraplex.request_uuid"  # in the ASGI scope
ARRIVED_S = "loraplex.arrived_s"

# A client still sending gets to hear its 413 only if we go on reading for a while.
_DISCARD_BYTES = 64 * 1024 * 1024
_DISCARD_S = 5.0


def request_id_of(scope: Scope) -> str:
    """`req_...`, as the header `x-request-id` shows it and as the ledger knows it."""
    return f"req_{scope[REQUEST_UUID].hex}"


class RequestContext:
    """Gives each request its id, logs and counts its answer, and turns a crash into our 500."""

    def __init__(
        self, app: ASGIApp, *, metrics: GatewayMetrics, failpoints: Failpoints = INERT
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._failpoints = failpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Made here, never taken from the client: a chosen id could hide a request from the bill.
        is_post = scope["method"] == "POST"
        scope[REQUEST_UUID] = uuid7(self._failpoints.unix_ms() if is_post else None)
        scope[ARRIVED_S] = time.monotonic()
        request_id = request_id_of(scope)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        status = 0
        self._metrics.http_in_flight.inc()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers.setdefault("x-content-type-options", "nosniff")
                if RATES in scope:
                    for name, value in (await scope[RATES].headers()).items():
                        headers.setdefault(name, value)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
            if is_post:
                self._failpoints.hit("after_answer")
        except Exception as error:
            log_crash("request_crashed", error)
            if status:
                raise  # the answer has begun: all that is left is to cut it off
            crash = PlatformError("Something went wrong on our side; the request id finds it.")
            await send_error(send_with_id, crash, request_id)
        finally:
            self._metrics.http_in_flight.dec()
            # It knows the request, whose scope this is: a cycle, which would keep all that the request
            # made until the garbage collector stops everybody.
            scope.pop(RATES, None)
            self._note(scope, status)

    def _note(self, scope: Scope, status: int) -> None:
        # The route's own path, never what was typed: that may hold anything.
        route = getattr(scope.get("route"), "path", "unmatched")
        self._metrics.http_requests.labels(route, str(status or 499)).inc()
        elapsed_ms = round((time.monotonic() - scope[ARRIVED_S]) * 1000, 1)
        log.info("request", route=route, status=status or 499, elapsed_ms=elapsed_ms)


class BodyLimit:
    """Refuses bodies over `max_bytes` with our 413, declared or chunked."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        num_received = 0

        async def receive_within() -> Message:
            nonlocal num_received
            message = await receive()
            if message["type"] == "http.request":
                num_received += len(message.get("body", b""))
                if num_received > self._max_bytes:
                    raise _TooLargeSignal
            return message

        try:
            await self._app(scope, receive_within, send)
        except _TooLargeSignal:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _discard(receive)
        error = BodyTooLargeError(f"The body is over the limit of {self._max_bytes} bytes.")
        await send_error(send, error, request_id_of(scope), close=True)


class _TooLargeSignal(BaseException):
    """Passes through every `except Exception` between the reader of the body and `BodyLimit`."""


async def _discard(receive: Receive) -> None:
    num_discarded = 0
    try:
        async with asyncio.timeout(_DISCARD_S):
            while num_discarded < _DISCARD_BYTES:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                num_discarded += len(message.get("body", b""))
    except TimeoutError:
        return


async def send_error(
    send: Send, error: PlatformError, request_id: str, *, close: bool = False
) -> None:
    """Answer with an error, from outside the framework."""
    body = envelope(error, request_id)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.lower().encode(), value.encode()) for name, value in error.headers.items()),
    ]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
