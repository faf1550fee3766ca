"""The login form, and the one to accept an invitation with.

Streamlit cannot set an HttpOnly cookie; this can, and then leads to the console. Plain HTML, no script, no outside asset; light or dark as the system is.
"""

from __future__ import annotations

import html
from typing import Any, Final
from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from loraplex_platform.audit.service import Actor
from loraplex_platform.control.auth import SESSION_COOKIE, CrossOriginError, check_origin
from loraplex_platform.control.context import Context, ControlContext
from loraplex_platform.control.style import STYLE
from loraplex_platform.errors import PlatformError
from loraplex_platform.ids import format_id
from loraplex_platform.members.routes import attempt_accept
from loraplex_platform.members.schemas import MAX_TOKEN_CHARS
from loraplex_platform.users import service
from loraplex_platform.users.passwords import MAX_PASSWORD_CHARS
from loraplex_platform.users.routes import (
    attempt_login,
    clear_session_cookie,
    set_session_cookie,
)

router = APIRouter(tags=["Login"])

MAX_FORM_BYTES = 8192

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="robots" content="noindex">
<title>Log in - Loraplex</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body class="centred">
<main class="card">
<h1>Loraplex</h1>
<p class="quiet">Log in to the console</p>
{notice}
<form method="post" action="/login">
<label for="email">E-mail</label>
<input id="email" name="email" type="email" autocomplete="username" required maxlength="254"
 value="{email}"{email_focus}>
<label for="password">Password</label>
<input id="password" name="password" type="password" autocomplete="current-password" required
 maxlength="256"{password_focus}>
<button type="submit">Log in</button>
</form>
{others}
</main>
</body>
</html>
"""

_JOIN_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="robots" content="noindex">
<title>Join - Loraplex</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body class="centred">
<main class="card">
<h1>Loraplex</h1>
<p class="quiet">Accept an invitation</p>
{notice}
<form method="post" action="/join">
<label for="token">Invitation</label>
<input id="token" name="token" type="text" autocomplete="off" spellcheck="false" required
 maxlength="100" autofocus>
<label for="password">Password of your account, or for a new one</label>
<input id="password" name="password" type="password" autocomplete="current-password" required
 maxlength="256">
<button type="submit">Join</button>
</form>
</main>
</body>
</html>
"""


def login_page(
    status: int,
    notice: str = "",
    email: str = "",
    *,
    is_error: bool = True,
    provider_url: str | None = None,
) -> HTMLResponse:
    """The login form with a notice above it, and below it the way to the provider if there is one."""
    kind = "error" if is_error else "note"
    shown = f'<p class="{kind}" role="alert">{html.escape(notice)}</p>' if notice else ""
    others = ""
    if provider_url is not None:
        link = html.escape(provider_url, quote=True)
        others = f'<p class="quiet"><a href="{link}">Log in with your organisation</a></p>'
    body = _PAGE.format(
        style=STYLE,
        notice=shown,
        email=html.escape(email, quote=True),
        email_focus="" if email else " autofocus",
        password_focus=" autofocus" if email else "",
        others=others,
    )
    return HTMLResponse(body, status)


def _join_page(status: int, notice: str = "") -> HTMLResponse:
    shown = f'<p class="error" role="alert">{html.escape(notice)}</p>' if notice else ""
    return HTMLResponse(_JOIN_PAGE.format(style=STYLE, notice=shown), status)


def _form_docs(**max_chars: int) -> dict[str, Any]:
    """What the API's page says of a form: its fields, all required, and how long each may be."""
    fields = {name: {"type": "string", "maxLength": most} for name, most in max_chars.items()}
    schema = {"type": "object", "required": list(fields), "properties": fields}
    content = {"application/x-www-form-urlencoded": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


async def _read_form(request: Request) -> dict[str, str] | None:
    """The first value of each field; None: the body is too long."""
    body = await request.body()
    if len(body) > MAX_FORM_BYTES:
        return None
    fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=None)
    return {name: values[0] for name, values in fields.items()}


@router.get("/join", response_class=HTMLResponse)
async def show_invitation_form() -> Response:
    """The form for a token. It is typed or pasted: in an address it would end up in logs."""
    return _join_page(200)


@router.post(
    "/join",
    response_class=RedirectResponse,
    status_code=303,
    openapi_extra=_form_docs(token=100, password=256),
)
async def join(request: Request, context: Context) -> Response:
    """Accept an invitation, log in with the account that it became, go to the console (303)."""
    try:
        check_origin(request, context)
    except CrossOriginError:
        return _join_page(403, "This form was sent from another site. Please join here.")
    fields = await _read_form(request)
    if fields is None:
        return _join_page(413, "That is too long.")
    token = fields.get("token", "").strip()[:MAX_TOKEN_CHARS]
    password = fields.get("password", "")[:MAX_PASSWORD_CHARS]
    if not token or not password:
        return _join_page(400, "Enter the invitation and a password.")
    try:
        member = await attempt_accept(request, context, token, password)
        new = await attempt_login(request, context, member.person.email, password)
    except PlatformError as error:
        page = _join_page(error.status, error.message)
        page.headers.update(error.headers)
        return page
    response = _to_console(context)
    set_session_cookie(response, context, new.token)
    return response


@router.get("/login", response_class=HTMLResponse)
async def show_form(request: Request, context: Context) -> Response:
    """The form; leads straight to the console if the browser is logged in already."""
    cookie = request.cookies.get(SESSION_COOKIE)
    if cookie:
        async with context.sessions() as session:
            if await service.find_session(session, context.settings, cookie) is not None:
                return _to_console(context)
    notice = "You are logged out." if "logged_out" in request.query_params else ""
    provider_url = None
    if context.oidc is not None:
        provider_url = f"{(context.settings.control_public_url or '').rstrip('/')}/login/oidc"
    return login_page(200, notice, is_error=False, provider_url=provider_url)


@router.post(
    "/login",
    response_class=RedirectResponse,
    status_code=303,
    openapi_extra=_form_docs(email=254, password=256),
)
async def log_in(request: Request, context: Context) -> Response:
    """Check the form, set the session cookie, go to the console (303). A refusal is a page."""
    try:
        check_origin(request, context)
    except CrossOriginError:
        return login_page(403, "This form was sent from another site. Please log in here.")
    fields = await _read_form(request)
    if fields is None:
        return login_page(413, "That is too long.")
    email = fields.get("email", "")[:254]
    password = fields.get("password", "")
    if not email or not password or "\0" in email:
        return login_page(400, "Enter your e-mail and your password.", email.replace("\0", ""))
    try:
        new = await attempt_login(request, context, email, password)
    except PlatformError as error:
        page = login_page(error.status, error.message, email)
        page.headers.update(error.headers)
        return page
    response = _to_console(context)
    set_session_cookie(response, context, new.token)
    return response


@router.post("/logout", response_class=RedirectResponse, status_code=303)
async def log_out(request: Request, context: Context) -> Response:
    """End the session and show the form again; harmless without one."""
    check_origin(request, context)
    cookie = request.cookies.get(SESSION_COOKIE)
    if cookie:
        async with context.sessions() as session:
            login = await service.find_session(session, context.settings, cookie)
            if login is not None:
                user = format_id("user", login.user.id)
                actor = Actor("user", user, request.state.request_id)
                await service.log_out(session, actor, login.session.id)
                await session.commit()
    response = RedirectResponse("/login?logged_out", 303)
    clear_session_cookie(response)
    return response


def _to_console(context: ControlContext) -> RedirectResponse:
    return RedirectResponse(context.settings.console_url, 303)
