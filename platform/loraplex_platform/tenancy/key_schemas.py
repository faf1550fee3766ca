"""API keys on the wire."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StrictInt

from loraplex_platform.control.schemas import Body, CleanText, Resource, UnixSeconds
from loraplex_platform.db import ApiKey, KeyModelGrant
from loraplex_platform.ids import PREFIXES, format_id
from loraplex_platform.tenancy.access import KEY_SCOPES, GrantKind, KeyScope

MAX_GRANTS = 100
MAX_NETWORKS = 100
MAX_GRACE_S = 30 * 86_400
DEFAULT_GRACE_S = 86_400
_MAX_UNIX_S = 253_402_300_799  # the end of the year 9999, as far as Postgres and datetime agree

# What a grant names, and whose id that is.
ID_KINDS: dict[GrantKind, str] = {
    "base": "base_model",
    "adapter": "adapter",
    "deployment": "deployment",
}


def _in_future(unix_s: int) -> int:
    if not time.time() < unix_s <= _MAX_UNIX_S:
        raise ValueError("it must be a Unix time in seconds, in the future.")
    return unix_s


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        raise ValueError(
            "it must be a network such as 203.0.113.0/24 or 2001:db8::/32, or an address. Bits beyond "
            "the prefix must be zero."
        ) from None


KeyName = Annotated[CleanText, Field(min_length=1, max_length=80)]
ExpiresAt = Annotated[StrictInt, AfterValidator(_in_future)]
Networks = Annotated[
    list[Annotated[str, Field(max_length=49), AfterValidator(_network)]],
    Field(max_length=MAX_NETWORKS),
    AfterValidator(lambda networks: list(dict.fromkeys(networks))),
]
Scopes = Annotated[
    list[KeyScope],
    Field(min_length=1, max_length=len(KEY_SCOPES)),
    AfterValidator(lambda scopes: sorted(set(scopes))),
]


class Grant(Body):
    """One thing that the key may call."""

    kind: GrantKind = Field(
        description="`deployment`: one model id. `adapter`: every model id that serves it. `base`: the "
        "base model without an adapter."
    )
    id: str = Field(
        max_length=80,
        description=f"Its id: {', '.join(f'`{PREFIXES[kind]}_...`' for kind in ID_KINDS.values())}.",
    )


# An empty list would be a key that may call nothing, which nobody means.
Grants = Annotated[list[Grant], Field(min_length=1, max_length=MAX_GRANTS)]

_SCOPES_TEXT = "`inference`: completions. `models.read`: the list of models."
_NETWORKS_TEXT = (
    "Networks that the key may be used from; empty: any. A gateway sees clients through its trusted "
    "proxies only (LORAPLEX_GATEWAY_TRUSTED_PROXIES)."
)
_GRANTS_TEXT = "What the key may call; null: all that the tenant may."
_OWNER_TEXT = "The member whose key it is (`usr_...`); null: a service's, which outlives people."


class NewKey(Body):
    """A data-plane key to make."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"name": "production"},
                {
                    "name": "batch jobs",
                    "scopes": ["inference"],
                    "ip_allow": ["203.0.113.0/24"],
                },
            ]
        },
    )

    name: KeyName
    expires_at: ExpiresAt | None = Field(
        default=None, description="Unix seconds; never if not given."
    )
    project_id: str | None = Field(default=None, max_length=80, description="`prj_...`, or none.")
    owner_id: str | None = Field(default=None, max_length=80, description=_OWNER_TEXT)
    scopes: Scopes = Field(default=list(KEY_SCOPES), description=_SCOPES_TEXT)
    ip_allow: Networks = Field(default=[], description=_NETWORKS_TEXT)
    grants: Grants | None = Field(default=None, description=_GRANTS_TEXT)

    @property
    def expires_at_time(self) -> datetime | None:
        """`expires_at` as a time."""
        return to_time(self.expires_at)


class KeyChanges(Body):
    """What to change; what is not named stays. It holds from the key's next request on."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"status": "disabled"}, {"scopes": ["models.read"]}]},
    )

    name: KeyName = Field(default_factory=str)
    status: Literal["active", "disabled"] = Field(
        default_factory=lambda: "active",  # never read: a field that is not sent is no change
        description="`disabled` switches the key off until it is `active` again.",
    )
    expires_at: ExpiresAt | None = Field(default=None, description="Unix seconds; null: never.")
    project_id: str | None = Field(default=None, max_length=80, description="null: none.")
    owner_id: str | None = Field(default=None, max_length=80, description=_OWNER_TEXT)
    scopes: Scopes = Field(default_factory=list, description=_SCOPES_TEXT)
    ip_allow: Networks = Field(default_factory=list, description=_NETWORKS_TEXT)
    grants: Grants | None = Field(default=None, description=_GRANTS_TEXT)


class Rotation(Body):
    """How to change over to a new secret."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"grace_s": DEFAULT_GRACE_S}]}
    )

    grace_s: Annotated[StrictInt, Field(ge=0, le=MAX_GRACE_S)] = Field(
        default=DEFAULT_GRACE_S,
        description="Seconds for which the secret of before still works beside the new one; 0: it "
        "ends now. Secrets from before that one end now in any case.",
    )


KeyStatus = Literal["active", "disabled", "revoked", "expired"]


class KeyResource(Resource):
    """An API key, without its secret: that is not stored anywhere."""

    object: Literal["api_key"] = "api_key"
    id: str
    tenant_id: str
    project_id: str | None
    owner_id: str | None
    name: str
    public_id: str
    redacted: str = Field(examples=["lpx_sk_…9aZ3"])
    status: KeyStatus
    scopes: list[str]
    ip_allow: list[str]
    grants: list[Grant] | None = Field(description=_GRANTS_TEXT)
    version: int = Field(description="Its ETag, for If-Match.")
    created_at: UnixSeconds
    created_by: str | None
    expires_at: UnixSeconds | None
    revoked_at: UnixSeconds | None
    revoke_reason: str | None
    last_used_at: UnixSeconds | None = Field(description="To about a minute.")


class KeyWithSecret(KeyResource):
    """The answer to making or rotating a key: the one time its secret is shown."""

    secret: str | None = Field(
        description="The whole key. It is shown this once; a replay under the same "
        "Idempotency-Key has null here."
    )


def to_time(unix_s: int | None) -> datetime | None:
    """Unix seconds as a time."""
    return None if unix_s is None else datetime.fromtimestamp(unix_s, UTC)


def show_fields(key: ApiKey, grants: Sequence[KeyModelGrant]) -> dict[str, Any]:
    """What `KeyChanges` can change, as the API shows it."""
    return {
        "name": key.name,
        "status": key.status,
        "expires_at": None if key.expires_at is None else int(key.expires_at.timestamp()),
        "project_id": None if key.project_id is None else format_id("project", key.project_id),
        "owner_id": None if key.owner_user_id is None else format_id("user", key.owner_user_id),
        "scopes": sorted(key.scopes),
        "ip_allow": [str(network) for network in key.ip_allow],
        "grants": [show_grant(grant) for grant in grants] or None,
    }


def show_grant(grant: KeyModelGrant) -> dict[str, str]:
    """A grant as the API shows it."""
    kind: GrantKind = grant.target_kind  # type: ignore[assignment]  # checked by the table
    return {"kind": kind, "id": format_id(ID_KINDS[kind], grant.target_id)}


def show_key(key: ApiKey, grants: Sequence[KeyModelGrant]) -> KeyResource:
    """The key as the API shows it."""
    fields = show_fields(key, grants)
    if key.status == "active" and key.expires_at is not None:
        fields["status"] = "expired" if key.expires_at <= datetime.now(UTC) else "active"
    return KeyResource(
        **fields
        | {
            "id": format_id("api_key", key.id),
            "tenant_id": format_id("tenant", key.tenant_id),
            "public_id": key.public_id,
            "redacted": f"lpx_sk_…{key.last4}",
            "version": key.version,
            "created_at": key.created_at,
            "created_by": key.created_by,
            "expires_at": key.expires_at,
            "revoked_at": key.revoked_at,
            "revoke_reason": key.revoke_reason,
            "last_used_at": key.last_used_at,
        }
    )
