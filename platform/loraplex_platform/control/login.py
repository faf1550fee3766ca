"""The login form. Streamlit cannot set an HttpOnly cookie; this can, and then leads to the console.

Plain HTML, no script, no outside asset; light or dark as the system is.
"""

from __future__ import annotations

import html
from typing import Final
from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from loraplex_platform.audit.service import Actor
from loraplex_platform.control.auth import SESSION_COOKIE, CrossOriginError, check_origin
from loraplex_platform.control.context import Context, ControlContext
from loraplex_platform.control.style import STYLE
from loraplex_platform.errors import PlatformError
from loraplex_platform.ids import format_id
from loraplex_platform.users import service
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
</main>
</body>
</html>
"""


def _page(status: int, notice: str = "", email: str = "", *, is_error: bool = True) -> HTMLResponse:
    kind = "error" if is_error else "note"
    shown = f'<p class="{kind}" role="alert">{html.escape(notice)}</p>' if notice else ""
    body = _PAGE.format(
        style=STYLE,
        notice=shown,
        email=html.escape(email, quote=True),
        email_focus="" if email else " autofocus",
        password_focus=" autofocus" if email else "",
    )
    return HTMLResponse(body, status)


@router.get("/login", response_class=HTMLResponse)
async def show_form(request: Request, context: Context) -> Response:
    """The form; leads straight to the console if the browser is logged in already."""
    cookie = request.cookies.get(SESSION_COOKIE)
    if cookie:
        async with context.sessions() as session:
            if await service.find_session(session, context.settings, cookie) is not None:
                return _to_console(context)
    notice = "You are logged out." if "logged_out" in request.query_params else ""
    return _page(200, notice, is_error=False)


@router.post(
    "/login",
    response_class=RedirectResponse,
    status_code=303,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/x-www-form-urlencoded": {
                    "schema": {
                        "type": "object",
                        "required": ["email", "password"],
                        "properties": {
                            "email": {"type": "string", "maxLength": 254},
                            "password": {"type": "string", "maxLength": 256},
                        },
                    }
                }
            },
        }
    },
)
async def log_in(request: Request, context: Context) -> Response:
    """Check the form, set the session cookie, go to the console (303). A refusal is a page."""
    try:
        check_origin(request, context)
    except CrossOriginError:
        return _page(403, "This form was sent from another site. Please log in here.")
    body = await request.body()
    if len(body) > MAX_FORM_BYTES:
        return _page(413, "That is too long.")
    fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=None)
    email = fields.get("email", [""])[0][:254]
    password = fields.get("password", [""])[0]
    if not email or not password or "\0" in email:
        return _page(400, "Enter your e-mail and your password.", email.replace("\0", ""))
    try:
        new = await attempt_login(request, context, email, password)
    except PlatformError as error:
        page = _page(error.status, error.message, email)
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
