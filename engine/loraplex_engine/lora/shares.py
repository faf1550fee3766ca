"""Who may have how much of the adapter memory, and whose adapter has to go.

Every tenant that is active has the same share of places and bytes. An adapter that several of them use
counts once: it is split among them. What is within a tenant's share is never evicted for another tenant;
what a tenant has beyond its share, and what nobody active uses, is lent until it is needed.
Pure arithmetic over a snapshot; the pool asks at each load, never at each step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol


class Held(Protocol):
    """An adapter in memory, as far as shares are concerned."""

    @property
    def size_bytes(self) -> int:
        """Memory it takes."""
        ...

    @property
    def tenants(self) -> Collection[str]:
        """Who has asked for it since it was loaded."""
        ...


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of the host tier: adapters and bytes."""

    places: int
    size_bytes: int


class Shares:
    """What each active tenant holds, as a fraction of the whole."""

    def __init__(
        self, entries: Iterable[Held], active: Collection[str], capacity: Capacity
    ) -> None:
        self._active = frozenset(active)
        self._capacity = capacity
        self._used: dict[str, list[float]] = {tenant: [0.0, 0.0] for tenant in self._active}
        for entry in entries:
            self._count(entry, 1)

    @property
    def fair(self) -> float:
        """The share of one active tenant."""
        return 1.0 / max(1, len(self._active))

    def is_over(self, tenant_id: str, *, places: int = 0, size_bytes: int = 0) -> bool:
        """Whether the tenant, with so much more, holds more than its share of places or bytes."""
        used_places, used_bytes = self._used.get(tenant_id, (0.0, 0.0))
        # Where shares are less than one adapter, everybody with one is over, and all take turns.
        return (
            used_places + places > self.fair * self._capacity.places + 1e-9
            or used_bytes + size_bytes > self.fair * self._capacity.size_bytes + 1e-6
        )

    def may_evict(self, entry: Held, *, asking: str | None = None, size_bytes: int = 0) -> bool:
        """Whether `entry`, which nobody uses now, may go: all its active users are beyond their share.

        Args:
            asking: a tenant that is about to get one more, of `size_bytes`; None: all is counted already.
        """
        return all(
            self.is_over(user, places=1, size_bytes=size_bytes)
            if user == asking
            else self.is_over(user)
            for user in self._active.intersection(entry.tenants)
        )

    def is_unused(self, entry: Held) -> bool:
        """Whether no active tenant uses `entry`."""
        return self._active.isdisjoint(entry.tenants)

    def drop(self, entry: Held) -> None:
        """`entry` is gone."""
        self._count(entry, -1)

    def _count(self, entry: Held, sign: int) -> None:
        users = self._active.intersection(entry.tenants)
        for user in users:
            self._used[user][0] += sign / len(users)
            self._used[user][1] += sign * entry.size_bytes / len(users)


def fair_slots(num_slots: int, num_active: int) -> int:
    """Step slots that a tenant may hold while others want some."""
    return max(1, num_slots // max(1, num_active))


def split_slots(users_by_slot: Iterable[Collection[str]]) -> Mapping[str, float]:
    """Slots held by tenant; one that several tenants lease is split among them."""
    held: dict[str, float] = {}
    for users in users_by_slot:
        for user in users:
            held[user] = held.get(user, 0.0) + 1.0 / len(users)
    return held
