"""What a data-plane key may do, apart from whose it is: scopes, models, networks.

Values only, without the database, so that they can be cached as they are and asked about in tests.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Final, Literal
from uuid import UUID

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
KeyScope = Literal["inference", "models.read"]
GrantKind = Literal["base", "adapter", "deployment"]

KEY_SCOPES: Final[tuple[KeyScope, ...]] = ("inference", "models.read")


@dataclass(frozen=True, slots=True)
class Grants:
    """The models that a key is limited to, by id. A key without grants has no such object."""

    base_models: frozenset[UUID] = field(default_factory=frozenset)
    adapters: frozenset[UUID] = field(default_factory=frozenset)
    deployments: frozenset[UUID] = field(default_factory=frozenset)

    def allows(self, *, deployment_id: UUID, base_model_id: UUID, adapter_id: UUID | None) -> bool:
        """Whether a deployment may be called.

        Granting an adapter grants every deployment that serves it at that moment, whatever version.
        Granting a base model grants it bare: not the adapters on it.
        """
        if deployment_id in self.deployments:
            return True
        if adapter_id is None:
            return base_model_id in self.base_models
        return adapter_id in self.adapters


def parse_grants(rows: list[str] | None) -> Grants | None:
    """From `kind:uuid` texts, as `authenticate` selects them; None: everything is allowed."""
    if not rows:
        return None
    found: dict[str, set[UUID]] = {"base": set(), "adapter": set(), "deployment": set()}
    for row in rows:
        kind, _, target_id = row.partition(":")
        found[kind].add(UUID(target_id))
    return Grants(
        base_models=frozenset(found["base"]),
        adapters=frozenset(found["adapter"]),
        deployments=frozenset(found["deployment"]),
    )


def is_address_allowed(networks: tuple[Network, ...], address: str) -> bool:
    """Whether a client's address is in one of `networks`; without any networks, all are.

    An IPv4 address written in IPv6 (::ffff:192.0.2.1) counts as the IPv4 address that it is. What
    is no address (a peer on a unix socket) is in no network.
    """
    if not networks:
        return True
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return any(ip in network for network in networks)
