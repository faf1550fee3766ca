"""Users and sessions over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from loraplex_platform.audit.service import Actor
from loraplex_platform.control.auth import SESSION_COOKIE, CurrentPrincipal, check_origin
from loraplex_platform.control.context import Context, ControlContext, DbSession
from loraplex_platform.control.paging import Paging, Search, fetch, holding, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import PublicRoute, admin_router
from loraplex_platform.control.schemas import ERROR_RESPONSES, ListPage
from loraplex_platform.db import User
from loraplex_platform.errors import NotFoundError, PlatformError
from loraplex_platform.users import queries, service
from loraplex_platform.users.schemas import (
    Credentials,
    NewUser,
    PasswordReset,
    SessionResource,
    UserResource,
    show_session,
    show_user,
)
from loraplex_platform.users.visitor import visitor_address

UserId = Annotated[str, Path(description="The user's id, `usr_...`.")]

router = admin_router("/users", "Users")
sessions_router = admin_router("/sessions", "Sessions")
# Logging in is the one thing done without credentials.
login_router = APIRouter(
    prefix="/admin/v1/sessions",
    tags=["Sessions"],
    responses=ERROR_RESPONSES,
    route_class=PublicRoute,
)


@router.post("", status_code=201)
@requires("user.write")
async def create_user(
    body: NewUser, request: Request, context: Context, session: DbSession
) -> UserResource:
    """Add someone who may log in to the console."""
    actor: Actor = request.state.actor
    return show_user(await service.create_user(session, context.passwords, actor, body))


@router.get("")
@requires("user.read")
async def list_users(
    page: Paging, session: DbSession, search: Search = None
) -> ListPage[UserResource]:
    """Everyone who may log in, newest first. `search`: in the e-mail."""
    statement = holding(queries.all_users(), search, User.email)
    rows, has_more = await fetch(session, statement, User.id, page, "user")
    return to_list(rows, has_more, show_user)


@router.post("/{user_id}/disable")
@requires("user.write")
async def disable_user(user_id: UserId, request: Request, session: DbSession) -> UserResource:
    """Refuse somebody's logins and end their sessions at once. Not the last platform admin's."""
    changed = await service.set_enabled(session, request.state.actor, user_id, is_enabled=False)
    return show_user(changed)


@router.post("/{user_id}/enable")
@requires("user.write")
async def enable_user(user_id: UserId, request: Request, session: DbSession) -> UserResource:
    """Let somebody log in again."""
    changed = await service.set_enabled(session, request.state.actor, user_id, is_enabled=True)
    return show_user(changed)


@router.delete("/{user_id}/role")
@requires("user.write")
async def remove_user_role(user_id: UserId, request: Request, session: DbSession) -> UserResource:
    """Take a role on the platform away. Memberships stay. Not the last platform admin's."""
    return show_user(await service.remove_role(session, request.state.actor, user_id))


@router.post("/{user_id}/password")
@requires("user.write")
async def reset_user_password(
    user_id: UserId, body: PasswordReset, request: Request, context: Context, session: DbSession
) -> UserResource:
    """Give somebody another password. All their sessions and their identity at a login provider end; their
    role, their memberships and their own API keys stay."""
    actor: Actor = request.state.actor
    changed = await service.reset_password(
        session, context.passwords, actor, user_id, body.password
    )
    return show_user(changed)


@router.post("/{user_id}/logout", status_code=204)
@requires("user.write")
async def end_user_sessions(user_id: UserId, request: Request, session: DbSession) -> None:
    """End all of somebody's sessions."""
    await service.end_sessions(session, request.state.actor, user_id)


@login_router.post("", status_code=201)
async def create_session(
    body: Credentials, request: Request, response: Response, context: Context
) -> SessionResource:
    """Log in. The reply sets the HttpOnly cookie `loraplex_session`.

    Failed logins are throttled per address, and tighter per e-mail from one address.
    """
    check_origin(request, context)
    new = await attempt_login(request, context, body.email, body.password)
    set_session_cookie(response, context, new.token)
    async with context.sessions() as session:
        memberships = await service.memberships_of(session, new.login.user.id)
    return show_session(new.login.user, new.login.session.expires_at, memberships)


@sessions_router.get("/current")
@requires("session.read")
async def get_session(principal: CurrentPrincipal, session: DbSession) -> SessionResource:
    """Who is logged in. 404 when called with the admin key, which has no session."""
    if principal.user_id is None or principal.expires_at is None:
        raise NotFoundError("The admin key has no session; log in with e-mail and password.")
    user = await queries.get_user(session, principal.user_id)
    return show_session(user, principal.expires_at, principal.memberships)


@sessions_router.delete("/current", status_code=204)
@requires("session.end")
async def delete_session(
    principal: CurrentPrincipal, request: Request, response: Response, session: DbSession
) -> None:
    """Log out."""
    if principal.session_id is None:
        raise NotFoundError("The admin key has no session to end.")
    await service.log_out(session, request.state.actor, principal.session_id)
    clear_session_cookie(response)


def address_of(request: Request, context: ControlContext) -> str:
    """Where a request comes from, as far as our own proxies vouch for it."""
    return visitor_address(
        request.client.host if request.client else "unix",
        request.headers.getlist("x-forwarded-for"),
        context.trusted_proxies,
    )


async def attempt_login(
    request: Request, context: ControlContext, email: str, password: str
) -> service.NewLogin:
    """Log in, counted; shared by the API and the form."""
    try:
        new = await service.log_in(
            context.sessions,
            context.passwords,
            context.settings,
            email=email,
            password=password,
            address=address_of(request, context),
            request_id=request.state.request_id,
        )
    except PlatformError as error:
        context.metrics.logins.labels(error.error_code or "failed").inc()
        raise
    context.metrics.logins.labels("ok").inc()
    return new


def set_session_cookie(response: Response, context: ControlContext, token: str) -> None:
    """HttpOnly, so that no script reads it; Lax, so that the console's links keep the login."""
    response.set_cookie(
        SESSION_COOKIE,
        token,
        max_age=round(context.settings.session_hours * 3600),
        httponly=True,
        samesite="lax",
        secure=context.settings.console_url.startswith("https://"),
        path="/",
    )


def clear_session_cookie(response: Response) -> None:
    """Have the browser forget the cookie."""
    response.delete_cookie(SESSION_COOKIE, path="/", httponly=True, samesite="lax")
