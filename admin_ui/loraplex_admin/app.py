"""The console's server: Streamlit's own, with the control API's forms passed through.

Streamlit cannot set an HttpOnly cookie, so login form and session belong to the control API. Passing
them through makes the console one origin: the browser needs to reach nothing else, and the cookie
belongs to whatever host name the reader has typed. A visit without a session is sent to the form, and
from there, by whichever way the reader logs in, back to the page that was asked for.

`streamlit run app.py` (what `loraplex console` does) finds `app`; the pages are in `console.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

import httpx
import streamlit as st
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex_admin.api import SESSION_COOKIE
from loraplex_admin.warm_up import warm_up

LOGIN_PATH: Final = "/login"
JOIN_PATH: Final = "/join"
# Where a reader was going when the form came between; nothing secret, and only ever an address here.
BACK_COOKIE: Final = "loraplex_back"
_BACK_S: Final = 600
_MAX_BACK_CHARS: Final = 2000
# While the control API is away the form's address tries again by itself.
_RETRY_S: Final = 3
_MAX_FORM_BYTES: Final = 16 * 1024
_TIMEOUT_S: Final = 15.0
# Made once: reading the authorities takes longer than a visit otherwise does, and the event loop waits.
_TLS: Final = httpx.create_ssl_context(trust_env=False)
# What the form needs: who sends it from which page, and the throttle's idea of the visitor.
_REQUEST_HEADERS: Final = (
    "content-type",
    "cookie",
    "host",
    "origin",
    "sec-fetch-site",
    "user-agent",
)
_DROPPED_HEADERS: Final = frozenset(
    {"connection", "content-encoding", "content-length", "date", "server", "transfer-encoding"}
)


def _control_url() -> str:
    return os.environ.get("LORAPLEX_CONTROL_URL", "http://127.0.0.1:8001").rstrip("/")


def _client() -> httpx.AsyncClient:
    # trust_env off: passwords pass here, and a proxy of the environment must not see them.
    return httpx.AsyncClient(
        base_url=_control_url(), timeout=_TIMEOUT_S, trust_env=False, verify=_TLS
    )


async def pass_form(request: Request) -> Response:
    """The control API's /login or /join, as if it were here."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_FORM_BYTES:
            return PlainTextResponse("That is too long.", 413)
    headers = {k: request.headers[k] for k in _REQUEST_HEADERS if k in request.headers}
    if request.client is not None:
        # Last, as proxies do: what came before it is only as good as who sent it.
        before = request.headers.getlist("x-forwarded-for")
        headers["x-forwarded-for"] = ", ".join([*before, request.client.host])
    query = f"?{request.url.query}" if request.url.query else ""
    try:
        async with _client() as client:
            answer = await client.request(
                request.method, f"{request.url.path}{query}", headers=headers, content=body
            )
    except httpx.TransportError:
        retry = {"refresh": str(_RETRY_S)} if request.method == "GET" else {}
        return PlainTextResponse(
            "The control API does not answer. Is it running?", 503, headers=retry
        )
    passed = Response(answer.content, answer.status_code)
    for name, value in answer.headers.multi_items():
        if name not in _DROPPED_HEADERS:
            passed.headers.append(name, value)
    if answer.has_redirect_location:
        # It leads to LORAPLEX_CONSOLE_URL, which is here, under whatever name the reader uses.
        passed.headers["location"] = "/"
    return passed


class LoginRedirect:
    """Sends a browser that opens a page without a live session to the login form."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_page(request := Request(scope)):
            token = request.cookies.get(SESSION_COOKIE, "")
            answer: Response | None = None
            if not await _is_live(token):
                answer = RedirectResponse(LOGIN_PATH, 303)
                _remember(answer, request)
            elif request.url.path == "/" and (back := _back_of(request)) is not None:
                answer = RedirectResponse(back, 303)
                answer.delete_cookie(BACK_COOKIE)
            if answer is not None:
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _remember(answer: Response, request: Request) -> None:
    """Keep the address that was asked for, so that the login leads there."""
    query = f"?{request.url.query}" if request.url.query else ""
    address = quote(f"{request.url.path}{query}", safe="")
    if request.url.path != "/" and len(address) <= _MAX_BACK_CHARS:
        answer.set_cookie(
            BACK_COOKIE, address, max_age=_BACK_S, httponly=True, samesite="lax", path="/"
        )


def _back_of(request: Request) -> str | None:
    """What `_remember` kept, where it is an address here: cookies can be set by a neighbour's page."""
    address = unquote(request.cookies.get(BACK_COOKIE, ""))
    is_plain = address.isprintable() and "\\" not in address and len(address) <= _MAX_BACK_CHARS
    if not is_plain or not address.startswith("/") or address.startswith("//"):
        return None
    parts = urlsplit(address)
    is_here = not parts.scheme and not parts.netloc and parts.path not in ("/", LOGIN_PATH)
    return quote(address, safe="/?&=%+,:;@-._~") if is_here else None


def _is_page(request: Request) -> bool:
    """Whether a person opens a page, not a page one of its parts."""
    return (
        request.method == "GET"
        and request.url.path not in (LOGIN_PATH, JOIN_PATH)
        and "text/html" in request.headers.get("accept", "")
        and not request.url.path.startswith(("/_stcore/", "/static/", "/media/", "/component/"))
    )


async def _is_live(token: str) -> bool:
    """Whether the session is known; yes while that cannot be asked, for the page says so itself."""
    if not token:
        return False
    try:
        async with _client() as client:
            answer = await client.get(
                "/admin/v1/sessions/current", headers={"cookie": f"{SESSION_COOKIE}={token}"}
            )
    except httpx.TransportError:
        return True
    return answer.status_code != httpx.codes.UNAUTHORIZED


warm_up()
app = st.App(
    Path(__file__).with_name("console.py"),
    routes=[Route(path, pass_form, methods=["GET", "POST"]) for path in (LOGIN_PATH, JOIN_PATH)],
    middleware=[Middleware(LoginRedirect)],
)
