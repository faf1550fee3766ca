"""Users and sessions on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal, cast
from uuid import UUID

from pydantic import AfterValidator, ConfigDict, Field

from loraplex_platform.control.permissions import PlatformRole, TenantRole, actions_of
from loraplex_platform.control.schemas import Body, CleanText, Resource, UnixSeconds
from loraplex_platform.db import User
from loraplex_platform.ids import format_id
from loraplex_platform.users.passwords import MAX_PASSWORD_CHARS, MIN_PASSWORD_CHARS

Role = Literal["admin", "viewer"]


def _email(text: str) -> str:
    local, at, domain = text.strip().lower().rpartition("@")
    if not at or not local or "." not in f".{domain}" or not domain or " " in local + domain:
        raise ValueError("it must be an e-mail address such as ada@example.com.")
    return f"{local}@{domain}"


Email = Annotated[CleanText, Field(min_length=3, max_length=254), AfterValidator(_email)]
NewPassword = Annotated[
    str,
    Field(
        min_length=MIN_PASSWORD_CHARS,
        max_length=MAX_PASSWORD_CHARS,
        description=f"At least {MIN_PASSWORD_CHARS} characters.",
    ),
]


class NewUser(Body):
    """A person who may log in to the console."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"email": "ada@example.com", "password": "correct horse battery", "role": "viewer"}
            ]
        },
    )

    email: Email
    password: NewPassword
    role: Role = Field(description="`viewer` may only read.")


class PasswordReset(Body):
    """A password that an operator hands to somebody."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"password": "correct horse battery"}]}
    )

    password: NewPassword


class Credentials(Body):
    """What a login needs."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"email": "ada@example.com", "password": "correct horse battery"}]
        },
    )

    email: CleanText = Field(max_length=254)
    password: str = Field(max_length=MAX_PASSWORD_CHARS)


class UserResource(Resource):
    """A user; the password hash is never shown."""

    object: Literal["user"] = "user"
    id: str
    email: str
    role: Role | None = Field(description="On the platform; null: only in tenants, as a member.")
    created_at: UnixSeconds
    disabled_at: UnixSeconds | None = None


class MembershipResource(Resource):
    """What a user is in one tenant."""

    tenant_id: str
    role: TenantRole
    actions: list[str] = Field(description="What the role allows in this tenant.")


class SessionResource(Resource):
    """A console login."""

    object: Literal["session"] = "session"
    user: UserResource
    memberships: list[MembershipResource] = Field(description="By tenant id.")
    actions: list[str] = Field(
        description="What the role on the platform allows, there and in every tenant."
    )
    expires_at: UnixSeconds


def show_user(user: User) -> UserResource:
    """The user as the API shows it."""
    return UserResource(
        id=format_id("user", user.id),
        email=user.email,
        role=user.platform_role,  # type: ignore[arg-type]  # checked by the table
        created_at=user.created_at,
        disabled_at=user.disabled_at,
    )


def show_session(
    user: User, expires_at: datetime, memberships: Mapping[UUID, TenantRole]
) -> SessionResource:
    """The login as the API shows it."""
    platform_role = cast(PlatformRole | None, user.platform_role)
    return SessionResource(
        user=show_user(user),
        memberships=[
            MembershipResource(
                tenant_id=format_id("tenant", tenant_id),
                role=memberships[tenant_id],
                actions=actions_of(None, memberships[tenant_id]),
            )
            for tenant_id in sorted(memberships)
        ],
        actions=actions_of(platform_role),
        expires_at=expires_at,
    )
