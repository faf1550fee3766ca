"""Who is logged in, and what they may do: as the control API's own table of permissions says.

Nothing is decided here. A page that is hidden is refused by the API as well; hiding it only spares its reader the
refusal.
"""

from __future__ import annotations

from dataclasses import dataclass

from loraplex_admin.api import Session, User


@dataclass(frozen=True, slots=True)
class Access:
    """What a login is allowed.

    Attributes:
        user: who it is.
        everywhere: actions on the platform and in every tenant.
        by_tenant: actions of a member, by tenant id.
    """

    user: User
    everywhere: frozenset[str]
    by_tenant: dict[str, frozenset[str]]

    @classmethod
    def of(cls, session: Session) -> Access:
        """As the API tells it."""
        return cls(
            user=session["user"],
            everywhere=frozenset(session["actions"]),
            by_tenant={
                member["tenant_id"]: frozenset(member["actions"])
                for member in session["memberships"]
            },
        )

    def may(self, action: str, tenant_id: str | None = None) -> bool:
        """Whether they may do it in this tenant; without one: anywhere at all."""
        if action in self.everywhere:
            return True
        if tenant_id is None:
            return any(action in actions for actions in self.by_tenant.values())
        return action in self.by_tenant.get(tenant_id, frozenset())

    @property
    def is_operator(self) -> bool:
        """Whether they see all tenants."""
        return self.user["role"] is not None

    @property
    def role(self) -> str:
        """In words, for the corner of the page."""
        if self.user["role"] is not None:
            return f"platform {self.user['role']}"
        num_tenants = len(self.by_tenant)
        return "no tenant yet" if not num_tenants else f"member of {num_tenants}"
