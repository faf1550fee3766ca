"""Who calls, and may they: the admin key or a console session, then the route's action.

`authorize` is the only place that lets a request through to /admin/v1; every route there is an
`AdminRoute` (routing.py), which calls it before the body is even read. What decides is the route and
its action (permissions.py), never the Host header or the raw path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit
from uuid import UUID

from fastapi import Depends, Request

from loraplex_platform.control.context import ControlContext
from loraplex_platform.control.permissions import (
    Action,
    PlatformRole,
    Reach,
    Refusal,
    TenantRole,
    reach_of,
)
from loraplex_platform.errors import InvalidApiKeyError, NotFoundError, PermissionDeniedError
from loraplex_platform.ids import MalformedIdError, format_id, parse_id
from loraplex_platform.tenancy import keys
from loraplex_platform.users import service as users

SESSION_COOKIE = "loraplex_session"

_READ_METHODS = frozenset({"GET", "HEAD"})
# What a tenant id that is none is taken for: nobody's.
_NO_TENANT: Final = UUID(int=0)


class NotAuthenticatedError(InvalidApiKeyError):
    """No credentials, or a session that is over."""

    code = "not_authenticated"


class CrossOriginError(PermissionDeniedError):
    """A browser sent the session cookie along with a write from a page that is not ours."""

    code = "cross_origin"


@dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated caller.

    Attributes:
        platform_role: what they are in every tenant, if anything.
        memberships: what they are in which tenant.
    """

    kind: Literal["admin_key", "user"]
    platform_role: PlatformRole | None
    memberships: Mapping[UUID, TenantRole] = field(default_factory=dict)
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


async def authorize(
    request: Request, context: ControlContext, action: Action
) -> tuple[Principal, Reach]:
    """The caller, allowed to do this, and whose rows they may see while they do.

    Raises:
        InvalidApiKeyError: no credentials, or none that we know.
        PermissionDeniedError: their role does not allow it, or a cookie-borne write comes from a
            foreign page.
        NotFoundError: the tenant that path or query name is none of theirs, or nobody's.
    """
    principal = await _authenticate(request, context)
    reach = reach_of(action, principal.platform_role, principal.memberships, _named_tenant(request))
    if reach is Refusal.UNKNOWN:
        raise NotFoundError("No such tenant.")
    if reach is Refusal.FORBIDDEN:
        if principal.platform_role == "viewer":
            raise PermissionDeniedError("Viewers may only read; ask an admin to make this change.")
        raise PermissionDeniedError(
            f"Your role does not allow this ({action.name}). Ask an owner of the tenant, or the "
            "operator of this service."
        )
    return principal, reach


def _named_tenant(request: Request) -> UUID | None:
    text = request.path_params.get("tenant_id") or request.query_params.get("tenant_id")
    if text is None:
        return None
    try:
        return parse_id("tenant", text)
    except MalformedIdError:
        return _NO_TENANT


async def _authenticate(request: Request, context: ControlContext) -> Principal:
    headers = request.headers.getlist("authorization")
    if headers:
        # A bad header is refused even beside a good cookie: falling through would hide mistakes.
        # So is a second one: a proxy may have looked at the other.
        return _check_admin_key(headers[0] if len(headers) == 1 else "", context)
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
        memberships = await users.memberships_of(session, login.user.id)
    return Principal(
        kind="user",
        platform_role=login.user.platform_role,  # type: ignore[arg-type]  # checked by the table
        memberships=memberships,
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
    return Principal(kind="admin_key", platform_role="admin")


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


async def get_principal(request: Request) -> Principal:
    """Set by `AdminRoute`; a route of another class has none and fails."""
    principal: Principal = request.state.principal
    return principal


CurrentPrincipal = Annotated[Principal, Depends(get_principal)]
