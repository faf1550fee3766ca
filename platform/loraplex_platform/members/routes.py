"""Members and invitations over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from loraplex_platform.control.auth import SESSION_COOKIE, CurrentPrincipal, check_origin
from loraplex_platform.control.context import Context, ControlContext, DbSession
from loraplex_platform.control.etag import IfMatch, set_etag
from loraplex_platform.control.paging import Paging, Search, fetch, holding, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import PublicRoute, admin_router
from loraplex_platform.control.schemas import ERROR_RESPONSES, ListPage
from loraplex_platform.db import Invitation, Membership, User
from loraplex_platform.members import queries, service
from loraplex_platform.members.schemas import (
    Acceptance,
    InvitationResource,
    InvitationWithToken,
    MemberChanges,
    MemberResource,
    NewInvitation,
    show_invitation,
    show_member,
)
from loraplex_platform.tenancy.routes import Owner
from loraplex_platform.users.routes import address_of
from loraplex_platform.users.service import find_session

router = admin_router("/tenants/{tenant_id}/members", "Members")
invitations_router = admin_router("/tenants/{tenant_id}/invitations", "Members")
# Whoever holds a token and the password proves who they are with those.
accept_router = APIRouter(
    prefix="/admin/v1/invitations",
    tags=["Members"],
    responses=ERROR_RESPONSES,
    route_class=PublicRoute,
)

UserId = Annotated[str, Path(description="The member's user id, `usr_...`.")]


@router.get("")
@requires("member.read")
async def list_members(
    owner: Owner, page: Paging, session: DbSession, search: Search = None
) -> ListPage[MemberResource]:
    """Who belongs to the tenant, newest account first. `search`: in the e-mail."""
    statement = queries.members_of(owner.id)
    if search:
        statement = holding(statement.join(User, User.id == Membership.user_id), search, User.email)
    rows, has_more = await fetch(session, statement, Membership.user_id, page, "user")
    people = await queries.people(session, [row.user_id for row in rows])
    return to_list(rows, has_more, lambda row: show_member(row, people[row.user_id]))


@router.get("/{user_id}")
@requires("member.read")
async def get_member(
    owner: Owner, user_id: UserId, response: Response, session: DbSession
) -> MemberResource:
    """One member."""
    return _shown(await service.get_member(session, owner.id, user_id), response)


@router.patch("/{user_id}")
@requires("member.write")
async def update_member(
    owner: Owner,
    user_id: UserId,
    body: MemberChanges,
    if_match: IfMatch,
    *,
    principal: CurrentPrincipal,
    request: Request,
    response: Response,
    session: DbSession,
) -> MemberResource:
    """Give a member another role, from their next request on. Only owners make and unmake owners."""
    changed = await service.set_role(
        session,
        principal,
        request.state.actor,
        owner.id,
        user_id=user_id,
        role=body.role,
        if_match=if_match,
    )
    return _shown(changed, response)


@router.delete("/{user_id}", status_code=204)
@requires("member.write")
async def remove_member(
    owner: Owner,
    user_id: UserId,
    if_match: IfMatch,
    *,
    principal: CurrentPrincipal,
    request: Request,
    session: DbSession,
) -> None:
    """End a membership at once, and revoke the keys that are this person's own."""
    await service.remove(
        session, principal, request.state.actor, owner.id, user_id=user_id, if_match=if_match
    )


@invitations_router.post("", status_code=201)
@requires("member.write")
async def create_invitation(
    owner: Owner,
    body: NewInvitation,
    *,
    principal: CurrentPrincipal,
    request: Request,
    context: Context,
    session: DbSession,
) -> InvitationWithToken:
    """Invite somebody by e-mail. `token` is in this answer and nowhere else: hand it to them.

    They use it at /join with the password of their account, or with one for a new account. An earlier
    invitation of the same e-mail ends.
    """
    made = await service.invite(
        session, principal, request.state.actor, context.settings.session_key, owner.id, body
    )
    return InvitationWithToken(**show_invitation(made.invitation).__dict__, token=made.token)


@invitations_router.get("")
@requires("member.read")
async def list_invitations(
    owner: Owner, page: Paging, session: DbSession
) -> ListPage[InvitationResource]:
    """Invitations, newest first, also those that are over."""
    statement = queries.invitations_of(owner.id)
    rows, has_more = await fetch(session, statement, Invitation.id, page, "invitation")
    return to_list(rows, has_more, show_invitation)


@invitations_router.delete("/{invitation_id}", status_code=204)
@requires("member.write")
async def revoke_invitation(
    owner: Owner,
    invitation_id: Annotated[str, Path(description="The invitation's id, `ivt_...`.")],
    *,
    principal: CurrentPrincipal,
    request: Request,
    session: DbSession,
) -> None:
    """Take an invitation back, an owner's only as an owner. One that is over stays so."""
    await service.withdraw(session, principal, request.state.actor, owner.id, invitation_id)


@accept_router.post("/accept")
async def accept_invitation(
    body: Acceptance, request: Request, response: Response, context: Context
) -> MemberResource:
    """Become a member: with the token, and the password of the account that has the invited e-mail.

    Without such an account one is made with this password. Throttled like logging in.
    """
    check_origin(request, context)
    return _shown(await attempt_accept(request, context, body.token, body.password), response)


async def attempt_accept(
    request: Request, context: ControlContext, token: str, password: str | None
) -> service.Member:
    """Accept an invitation; shared by the API and the form."""
    return await service.accept(
        context.sessions,
        context.passwords,
        context.settings.session_key,
        token=token,
        password=password,
        logged_in=await _logged_in(request, context),
        address=address_of(request, context),
        request_id=request.state.request_id,
    )


async def _logged_in(request: Request, context: ControlContext) -> User | None:
    cookie = request.cookies.get(SESSION_COOKIE)
    if not cookie:
        return None
    async with context.sessions() as session:
        login = await find_session(session, context.settings, cookie)
    return None if login is None else login.user


def _shown(member: service.Member, response: Response) -> MemberResource:
    set_etag(response, member.membership.row_version)
    return show_member(member.membership, member.person)
