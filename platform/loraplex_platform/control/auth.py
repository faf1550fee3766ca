"""Who calls, and may they: the admin key or a console session, then the role.

`authorize` is the only place that lets a request through to /admin/v1; every route there is an
`AdminRoute` (routing.py), which calls it before the body is even read. What decides is the ASGI
method and the route, never the Host header or the raw path.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal
from urllib.parse import urlsplit
from uuid import UUID

from fastapi import Depends, Request

from loraplex_platform.control.context import ControlContext
from loraplex_platform.errors import InvalidApiKeyError, PermissionDeniedError
from loraplex_platform.ids import format_id
from loraplex_platform.tenancy import keys
from loraplex_platform.users import service as users

SESSION_COOKIE = "loraplex_session"
Role = Literal["admin", "viewer"]

_READ_METHODS = frozenset({"GET", "HEAD"})
# What a viewer may do to their own login.
_OWN_SESSION_PATH = "/admin/v1/sessions/current"


class NotAuthenticatedError(InvalidApiKeyError):
    """No credentials, or a session that is over."""

    code = "not_authenticated"


class CrossOriginError(PermissionDeniedError):
    """A browser sent the session cookie along with a write from a page that is not ours."""

    code = "cross_origin"


@dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated caller."""

    kind: Literal["admin_key", "user"]
    role: Role
    user_id: UUID | None = None
    session_id: UUID | None = None
    expires_at: datetime | None = None

    @property
    def actor_id(self) -> str | None:
        """As the audit log names them."""
        return None if self.user_id is None else format_id("user", self.user_id)

    @property
    def name(self) -> str:
        """The scope of idempotency keys."""
        return self.kind if self.user_id is None else f"{self.kind}:{self.actor_id}"


async def authorize(request: Request, context: ControlContext) -> Principal:
    """The caller, allowed to use this method here.

    Raises:
        InvalidApiKeyError: no credentials, or none that we know.
        PermissionDeniedError: a viewer writes, or a cookie-borne write comes from a foreign page.
    """
    principal = await _authenticate(request, context)
    is_read = request.method in _READ_METHODS
    if principal.role != "admin" and not is_read and request.url.path != _OWN_SESSION_PATH:
        raise PermissionDeniedError("Viewers may only read; ask an admin to make this change.")
    return principal


async def _authenticate(request: Request, context: ControlContext) -> Principal:
    header = request.headers.get("authorization")
    if header is not None:
        # A bad header is refused even beside a good cookie: falling through would hide mistakes.
        return _check_admin_key(header, context)
    cookie = request.cookies.get(SESSION_COOKIE)
    if not cookie:
        raise NotAuthenticatedError(
            "No credentials. Send 'Authorization: Bearer lpx_ak_...' or log in at /login."
        )
    if request.method not in _READ_METHODS:
        check_origin(request, context)
    async with context.sessions() as session:
        login = await users.find_session(session, context.settings, cookie)
    if login is None:
        raise NotAuthenticatedError("The session is over; log in again at /login.")
    return Principal(
        kind="user",
        role="admin" if login.user.platform_role == "admin" else "viewer",
        user_id=login.user.id,
        session_id=login.session.id,
        expires_at=login.session.expires_at,
    )


def _check_admin_key(header: str, context: ControlContext) -> Principal:
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise InvalidApiKeyError("Send the admin key as 'Authorization: Bearer lpx_ak_...'.")
    token = token.strip()
    if token.startswith("lpx_sk_"):
        raise InvalidApiKeyError(
            "This is a tenant's API key, for the gateway. The control API takes an admin key "
            "(lpx_ak_...)."
        )
    if not keys.is_same_secret(context.settings.key_pepper, token, context.settings.admin_key):
        raise InvalidApiKeyError("Unknown admin key. It is LORAPLEX_ADMIN_KEY of this deployment.")
    return Principal(kind="admin_key", role="admin")


def check_origin(request: Request, context: ControlContext) -> None:
    """Refuse a browser's cross-site write. Programs send no Origin and carry no ambient cookie.

    Raises:
        CrossOriginError: the page that sent it is neither ours nor the console.
    """
    origin = request.headers.get("origin")
    if origin is None:
        if request.headers.get("sec-fetch-site", "none") in ("none", "same-origin", "same-site"):
            return
    elif origin in context.origins or _is_own(origin, request):
        return
    raise CrossOriginError(
        "This write came from a page that is neither this API's nor the console."
    )


def _is_own(origin: str, request: Request) -> bool:
    return urlsplit(origin).netloc == request.headers.get("host", "")


def get_principal(request: Request) -> Principal:
    """Set by `AdminRoute`; a route of another class has none and fails."""
    principal: Principal = request.state.principal
    return principal


CurrentPrincipal = Annotated[Principal, Depends(get_principal)]
