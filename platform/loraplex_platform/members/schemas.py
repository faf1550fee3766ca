"""Members and invitations on the wire."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StrictInt

from loraplex_platform.control.permissions import TenantRole
from loraplex_platform.control.schemas import Body, Resource, UnixSeconds
from loraplex_platform.db import Invitation, Membership
from loraplex_platform.ids import format_id
from loraplex_platform.members.queries import Person
from loraplex_platform.users.passwords import MAX_PASSWORD_CHARS
from loraplex_platform.users.schemas import Email

MAX_INVITATION_S = 30 * 86_400
DEFAULT_INVITATION_S = 7 * 86_400
MAX_TOKEN_CHARS = 100

_ROLE_TEXT = (
    "`owner`: everything. `admin`: everything but owners. `developer`: adapters, deployments, keys. "
    "`billing`: usage and invoices. `viewer`: reads."
)


class NewInvitation(Body):
    """Somebody to let in."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"email": "ada@example.com", "role": "developer"}]},
    )

    email: Email
    role: TenantRole = Field(description=_ROLE_TEXT)
    expires_in_s: Annotated[StrictInt, Field(ge=60, le=MAX_INVITATION_S)] = Field(
        default=DEFAULT_INVITATION_S, description="How long the token may be used, in seconds."
    )


class MemberChanges(Body):
    """What to change; what is not named stays."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"role": "developer"}]}
    )

    role: TenantRole = Field(description=_ROLE_TEXT)


class Acceptance(Body):
    """What turns an invitation into a membership."""

    token: str = Field(min_length=1, max_length=MAX_TOKEN_CHARS)
    password: str | None = Field(
        default=None,
        max_length=MAX_PASSWORD_CHARS,
        description="Of the account with the invited e-mail; for a new one, the password to give it. "
        "Not needed while logged in with that account.",
    )


class MemberResource(Resource):
    """Somebody who belongs to a tenant."""

    object: Literal["member"] = "member"
    id: str = Field(description="The user's, `usr_...`.")
    tenant_id: str
    email: str
    role: TenantRole
    version: int = Field(description="Its ETag, for If-Match.")
    created_at: UnixSeconds
    disabled_at: UnixSeconds | None = Field(description="Since when they cannot log in.")


class InvitationResource(Resource):
    """A membership that waits for its person."""

    object: Literal["invitation"] = "invitation"
    id: str
    tenant_id: str
    email: str
    role: TenantRole
    status: Literal["pending", "accepted", "revoked", "expired"]
    created_at: UnixSeconds
    expires_at: UnixSeconds


class InvitationWithToken(InvitationResource):
    """The answer to an invitation: the one time its token is shown."""

    token: str | None = Field(
        description="For the invited person, to use at /join. It is shown this once; a replay under "
        "the same Idempotency-Key has null here."
    )


def show_member(member: Membership, person: Person) -> MemberResource:
    """The member as the API shows them."""
    return MemberResource(
        id=format_id("user", member.user_id),
        tenant_id=format_id("tenant", member.tenant_id),
        email=person.email,
        role=member.role,  # type: ignore[arg-type]  # checked by the table
        version=member.row_version,
        created_at=member.created_at,
        disabled_at=person.disabled_at,
    )


def show_invitation(invitation: Invitation) -> InvitationResource:
    """The invitation as the API shows it."""
    status: Literal["pending", "accepted", "revoked", "expired"] = "pending"
    if invitation.accepted_at is not None:
        status = "accepted"
    elif invitation.revoked_at is not None:
        status = "revoked"
    elif invitation.expires_at <= datetime.now(UTC):
        status = "expired"
    return InvitationResource(
        id=format_id("invitation", invitation.id),
        tenant_id=format_id("tenant", invitation.tenant_id),
        email=invitation.email,
        role=invitation.role,  # type: ignore[arg-type]  # checked by the table
        status=status,
        created_at=invitation.created_at,
        expires_at=invitation.expires_at,
    )
