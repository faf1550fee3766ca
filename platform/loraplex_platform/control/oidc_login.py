"""The way to the login provider and back. Both are pages for browsers; there is no API to this."""

from __future__ import annotations

import hmac
import html
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from loraplex_platform.control.auth import SESSION_COOKIE, check_origin
from loraplex_platform.control.context import Context, ControlContext
from loraplex_platform.control.login import login_page
from loraplex_platform.control.style import STYLE
from loraplex_platform.errors import NotFoundError, PlatformError
from loraplex_platform.ids import format_id
from loraplex_platform.users import service
from loraplex_platform.users.oidc import ATTEMPT_S, Attempt, OidcLoginError, OidcProvider
from loraplex_platform.users.routes import set_session_cookie

router = APIRouter(tags=["Login"])

ATTEMPT_COOKIE = "loraplex_oidc"
PATH = "/login/oidc"

_LINK_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="robots" content="noindex">
<title>Your organisation's login - Loraplex</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body class="centred">
<main class="card">
<h1>Loraplex</h1>
{content}
</main>
</body>
</html>
"""
_LINK_FORM: Final = """<p class="quiet">Log in with your organisation from now on</p>
<form method="post" action="/login/oidc/link">
<button type="submit">Connect this account</button>
</form>"""
_ONWARD: Final = """<meta http-equiv="refresh" content="0; url={url}">
<p><a href="{url}">Continue to your organisation's login</a></p>"""


@router.get(PATH, response_class=RedirectResponse, status_code=303)
async def go_to_provider(request: Request, context: Context) -> Response:
    """Lead to the login provider (303)."""
    provider = _provider(context)
    attempt = Attempt.new()
    try:
        url = await provider.url_for(attempt)
    except PlatformError as error:
        return _refusal(error)
    response = RedirectResponse(url, 303)
    _keep(attempt, response, context)
    return response


@router.get(f"{PATH}/link", response_class=HTMLResponse)
async def show_link_form(context: Context) -> Response:
    """The form that ties whoever is logged in to their identity at the login provider."""
    _provider(context)
    return HTMLResponse(_LINK_PAGE.format(style=STYLE, content=_LINK_FORM))


@router.post(f"{PATH}/link", response_class=HTMLResponse)
async def link_at_provider(request: Request, context: Context) -> Response:
    """Lead whoever is logged in to the login provider, to be tied to their identity there.

    A page that leads on, not a redirect: a form of ours may only be sent to ourselves.
    """
    provider = _provider(context)
    check_origin(request, context)
    async with context.sessions() as session:
        cookie = request.cookies.get(SESSION_COOKIE, "")
        login = await service.find_session(session, context.settings, cookie)
    if login is None:
        return login_page(403, "Log in, then start again.")
    attempt = Attempt.new(linking_session_id=format_id("session", login.session.id))
    try:
        url = html.escape(await provider.url_for(attempt), quote=True)
    except PlatformError as error:
        return _refusal(error)
    response = HTMLResponse(_LINK_PAGE.format(style=STYLE, content=_ONWARD.format(url=url)))
    _keep(attempt, response, context)
    return response


def _keep(attempt: Attempt, response: Response, context: ControlContext) -> None:
    response.set_cookie(
        ATTEMPT_COOKIE,
        attempt.sealed(context.settings.session_key),
        max_age=ATTEMPT_S,
        path=PATH,
        httponly=True,
        samesite="lax",  # the provider's page leads back here
        secure=_is_https(context),
    )


@router.get(f"{PATH}/callback", response_class=RedirectResponse, status_code=303)
async def come_back(request: Request, context: Context) -> Response:
    """Where the provider leads back to: check who came, set the session cookie, go to the console (303)."""
    provider = _provider(context)
    try:
        response = await _log_in(request, context, provider)
    except PlatformError as error:
        context.metrics.logins.labels(error.error_code or "failed").inc()
        response = _refusal(error)
    response.delete_cookie(ATTEMPT_COOKIE, path=PATH)  # one attempt, one answer
    return response


async def _log_in(request: Request, context: ControlContext, provider: OidcProvider) -> Response:
    cookie = request.cookies.get(ATTEMPT_COOKIE, "")
    attempt = Attempt.opened(cookie, context.settings.session_key)
    state = request.query_params.get("state", "")
    if attempt is None or not hmac.compare_digest(state.encode(), attempt.state.encode()):
        raise OidcLoginError("This login was not begun here, or too long ago. Please start again.")
    code = request.query_params.get("code", "")
    if not code or "error" in request.query_params:
        raise OidcLoginError("Your login provider did not let you in.")
    identity = await provider.redeem(code, attempt)
    if attempt.linking_session_id is not None:
        await service.link_identity(
            context.sessions,
            context.settings,
            identity,
            token=request.cookies.get(SESSION_COOKIE, ""),
            session_id=attempt.linking_session_id,
            request_id=request.state.request_id,
        )
        return RedirectResponse(context.settings.console_url, 303)
    new = await service.log_in_as(
        context.sessions, context.settings, identity, request.state.request_id
    )
    context.metrics.logins.labels("ok").inc()
    response = RedirectResponse(context.settings.console_url, 303)
    set_session_cookie(response, context, new.token)
    return response


def _provider(context: ControlContext) -> OidcProvider:
    if context.oidc is None:
        raise NotFoundError("There is no login provider here; log in at /login.")
    return context.oidc


def _refusal(error: PlatformError) -> HTMLResponse:
    page = login_page(error.status, error.message)
    page.headers.update(error.headers)
    return page


def _is_https(context: ControlContext) -> bool:
    return (context.settings.control_public_url or "").startswith("https://")
