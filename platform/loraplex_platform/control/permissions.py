"""Who may do what on the control API: the one table, and the rule that reads it.

Every route declares its action (`@requires("key.read")` below the router's decorator); a route without
one does not start. A role on the platform reaches every tenant, a membership only its own.

| kind | who |
|---|---|
| platform | platform admins; `.read` also platform viewers |
| tenant | the same, and members whose role is named here, in their tenants only |
| self | whoever is logged in, about their own login |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal, TypeVar, get_args
from uuid import UUID

PlatformRole = Literal["admin", "viewer"]
TenantRole = Literal["owner", "admin", "developer", "billing", "viewer"]
ActionKind = Literal["platform", "tenant", "self"]

TENANT_ROLES: Final[tuple[TenantRole, ...]] = get_args(TenantRole)

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
_MARK = "__loraplex_action__"


@dataclass(frozen=True, slots=True)
class Action:
    """Something that can be asked of the control API. `roles`: tenant roles that may, in their tenants."""

    name: str
    kind: ActionKind
    roles: frozenset[TenantRole] = frozenset()

    @property
    def is_read(self) -> bool:
        """Whether it changes nothing; platform viewers may then do it."""
        return self.name.endswith(".read")


_EVERYONE: Final = frozenset(TENANT_ROLES)
_MANAGERS: Final[frozenset[TenantRole]] = frozenset({"owner", "admin"})
_BUILDERS: Final[frozenset[TenantRole]] = _MANAGERS | {"developer"}
_PAYERS: Final[frozenset[TenantRole]] = _MANAGERS | {"billing"}

ACTIONS: Final[Mapping[str, Action]] = {
    action.name: action
    for action in (
        # What belongs to a tenant.
        Action("tenant.read", "tenant", _EVERYONE),
        Action("tenant.update", "tenant", _MANAGERS),
        Action("member.read", "tenant", _EVERYONE),
        Action("member.write", "tenant", _MANAGERS),
        Action("project.read", "tenant", _EVERYONE),
        Action("project.write", "tenant", _MANAGERS),
        Action("key.read", "tenant", _EVERYONE),
        Action("key.write", "tenant", _BUILDERS),
        Action("model.read", "tenant", _EVERYONE),
        Action("adapter.read", "tenant", _EVERYONE),
        Action("adapter.write", "tenant", _BUILDERS),
        Action("deployment.read", "tenant", _EVERYONE),
        Action("deployment.write", "tenant", _BUILDERS),
        Action("playground.use", "tenant", _BUILDERS),
        Action("eval.read", "tenant", _EVERYONE),
        Action("eval.write", "tenant", _BUILDERS),
        Action("rollout.read", "tenant", _EVERYONE),
        Action("rollout.write", "tenant", _BUILDERS),
        Action("request.read", "tenant", _EVERYONE),
        Action("limit.read", "tenant", _EVERYONE),
        Action("usage.read", "tenant", _EVERYONE),
        Action("invoice.read", "tenant", _PAYERS),
        Action("alert.read", "tenant", _EVERYONE),
        Action("webhook.read", "tenant", _MANAGERS),
        Action("webhook.write", "tenant", _MANAGERS),
        Action("audit.read", "tenant", _MANAGERS),
        # What belongs to the operator.
        Action("tenant.create", "platform"),
        Action("tenant.suspend", "platform"),
        Action("tenant.delete", "platform"),
        Action("user.read", "platform"),
        Action("user.write", "platform"),
        Action("fleet.read", "platform"),
        Action("fleet.write", "platform"),
        Action("metrics.read", "platform"),
        Action("limit.write", "platform"),
        Action("price.read", "platform"),
        Action("price.write", "platform"),
        Action("credit.write", "platform"),
        Action("invoice.write", "platform"),
        Action("invariant.read", "platform"),
        Action("invariant.write", "platform"),
        Action("retention.read", "platform"),
        Action("retention.write", "platform"),
        Action("platform_deployment.read", "platform"),
        Action("platform_deployment.write", "platform"),
        Action("platform_eval.read", "platform"),
        Action("platform_eval.write", "platform"),
        Action("platform_rollout.read", "platform"),
        Action("platform_rollout.write", "platform"),
        Action("platform_webhook.read", "platform"),
        Action("platform_webhook.write", "platform"),
        # One's own login.
        Action("session.read", "self"),
        Action("session.end", "self"),
    )
}


def requires(action: str) -> Callable[[Endpoint], Endpoint]:
    """Declare what a route's caller must be allowed to do.

    Raises:
        KeyError: there is no such action in the table: a mistake that must stop the start.
    """
    found = ACTIONS[action]

    def mark(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _MARK, found)
        return endpoint

    return mark


def action_of(endpoint: Callable[..., Any]) -> Action | None:
    """What `requires` declared."""
    found: Action | None = getattr(endpoint, _MARK, None)
    return found


class Refusal(StrEnum):
    """Why not."""

    FORBIDDEN = "forbidden"  # 403
    UNKNOWN = "unknown"  # 404: a tenant that one is no member of, as if it did not exist


@dataclass(frozen=True, slots=True)
class Reach:
    """Whose rows a caller may see in this request. None: everybody's."""

    tenant_ids: frozenset[UUID] | None


EVERYWHERE: Final = Reach(None)


def reach_of(
    action: Action,
    platform_role: PlatformRole | None,
    memberships: Mapping[UUID, TenantRole],
    tenant_id: UUID | None,
) -> Reach | Refusal:
    """What the caller may see while doing `action`, or why they may not do it.

    Args:
        action: of the route.
        platform_role: the caller's, if any.
        memberships: the caller's roles by tenant.
        tenant_id: which tenant the path or the query names, if it does.
    """
    if action.kind == "self" or platform_role == "admin":
        return EVERYWHERE
    if platform_role == "viewer" and action.is_read:
        return EVERYWHERE
    if action.kind == "platform":
        return Refusal.FORBIDDEN
    if tenant_id is None:
        allowed = frozenset(t for t, role in memberships.items() if role in action.roles)
        return Reach(allowed) if allowed else Refusal.FORBIDDEN
    role = memberships.get(tenant_id)
    if role is None:
        # A platform viewer knows all tenants: nothing to hide from them.
        return Refusal.UNKNOWN if platform_role is None else Refusal.FORBIDDEN
    return Reach(frozenset({tenant_id})) if role in action.roles else Refusal.FORBIDDEN


def actions_of(
    platform_role: PlatformRole | None, tenant_role: TenantRole | None = None
) -> list[str]:
    """Names of all that a role on the platform allows everywhere, or a membership in its tenant.

    So that whoever shows pages need not know the table.
    """
    if tenant_role is not None:
        return [action.name for action in ACTIONS.values() if tenant_role in action.roles]
    return [
        action.name
        for action in ACTIONS.values()
        if isinstance(reach_of(action, platform_role, {}, None), Reach)
    ]


def may_give(platform_role: PlatformRole | None, own: TenantRole | None, role: TenantRole) -> bool:
    """Whether someone may make, change or remove a member of this role: never one above their own."""
    if platform_role == "admin" or own == "owner":
        return True
    return own == "admin" and role != "owner"
