"""What every request passes through: id, body cap, security headers, log line, last-resort 500.

Pure ASGI, so that streams are neither buffered nor detached from the client's disconnect.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex_platform.control.errors import error_body
from loraplex_platform.control.metrics import ControlMetrics
from loraplex_platform.errors import BodyTooLargeError
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.ids import format_id, uuid7

log = structlog.get_logger(__name__)

MAX_JSON_BYTES = 1 << 20
MAX_CLIENT_REQUEST_ID = 128

_HEADERS = {
    # The pages here are plain forms and text: no script, no outside asset, no framing.
    "content-security-policy": (
        "default-src 'none'; style-src 'self' 'unsafe-inline'; img-src data:; "
        "form-action 'self'{form_targets}; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not "no-referrer": a browser would then send the login form with "Origin: null", as a stranger's.
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-site",
    "cache-control": "no-store",
}


class RequestMiddleware:
    """See the module's header.

    Args:
        app: what to wrap.
        metrics: where requests are counted.
        max_upload_bytes: the cap for the paths that `is_upload` recognises; JSON has a small one.
        form_targets: origins that a form's redirect may lead to (the console).
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: ControlMetrics,
        max_upload_bytes: int,
        is_upload: Callable[[str], bool],
        form_targets: tuple[str, ...] = (),
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._max_upload_bytes = max_upload_bytes
        self._is_upload = is_upload
        targets = "".join(f" {target}" for target in form_targets)
        self._headers = {k: v.replace("{form_targets}", targets) for k, v in _HEADERS.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = format_id("request", uuid7())
        scope.setdefault("state", {})["request_id"] = request_id
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        status = 0
        started_s = time.perf_counter()

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            limit = self._limit_of(scope)
            declared = Headers(scope=scope).get("content-length", "0")
            if declared.isdigit() and int(declared) > limit:
                await _send_too_large(send_with_headers, limit)
                return
            try:
                await self._app(
                    _as_get(scope), _capped(receive, limit), _bodiless(scope, send_with_headers)
                )
            except BodyTooLargeError:
                if status:
                    raise
                await _send_too_large(send_with_headers, limit)
            except Exception as error:
                log_crash("request_crashed", error)
                if status:
                    raise
                body = error_body(
                    "Something went wrong on our side; the request id finds it in the log.",
                    "server_error",
                    None,
                    "internal_error",
                )
                await _send_json(send_with_headers, 500, body)
        finally:
            self._note(scope, status, time.perf_counter() - started_s)

    def _limit_of(self, scope: Scope) -> int:
        return self._max_upload_bytes if self._is_upload(scope["path"]) else MAX_JSON_BYTES

    def _note(self, scope: Scope, status: int, elapsed_s: float) -> None:
        # The template, never the path or the query: what a client typed may hold a secret.
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if status != 405 else "other"
        self._metrics.requests.labels(method, route, str(status or 499)).inc()
        self._metrics.seconds.labels(method, route).observe(elapsed_s)
        log.info(
            "request",
            method=scope["method"],
            route=route,
            status=status or 499,
            elapsed_ms=round(elapsed_s * 1000, 1),
        )


def _as_get(scope: Scope) -> Scope:
    """HEAD asks for the headers of GET: one route serves both."""
    if scope["method"] == "HEAD":
        scope["method"] = "GET"
        scope["state"]["is_head"] = True
    return scope


def _bodiless(scope: Scope, send: Send) -> Send:
    """`send` without the body, where HEAD asked."""
    if not scope["state"].get("is_head"):
        return send

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_head


def _capped(receive: Receive, limit: int) -> Receive:
    """`receive`, but a body beyond `limit` raises: a chunked body declares no length up front."""
    seen = 0

    async def receive_capped() -> Message:
        nonlocal seen
        message = await receive()
        if message["type"] == "http.request":
            seen += len(message.get("body", b""))
            if seen > limit:
                raise BodyTooLargeError(_too_large(limit))
        return message

    return receive_capped


def _too_large(limit: int) -> str:
    return f"The body is larger than the {limit} bytes allowed here."


async def _send_too_large(send: Send, limit: int) -> None:
    body = error_body(_too_large(limit), "invalid_request_error", None, BodyTooLargeError.code)
    await _send_json(send, BodyTooLargeError.status, body)


async def _send_json(send: Send, status: int, body: object) -> None:
    raw = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
