"""Drift: where a replica is not as it is desired. Pure.

What is desired is in Postgres (`resident_adapters`), what is there in the engine's statistics. The worker's
residency loop makes the one the other; what it cannot, both say, with the engine's own reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from loraplex_engine.protocol import EngineStats

from loraplex_platform.fleet.residency_queries import Desired


@dataclass(frozen=True, slots=True)
class Missing:
    """A desired adapter that is not in the replica's memory.

    Attributes:
        since: when it was desired, or when the replica started, whichever was later.
        is_pinned: the replica knows, and loads it or tries to.
        reason: the engine's, of the last try; None: there was none yet, or it is loading.
    """

    digest: str
    desired: Desired
    since: datetime
    is_pinned: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class Drift:
    """Of one replica. `extra`: pinned, but not desired, and not by the replica's own flag."""

    desired: list[str] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)


def drift_of(
    stats: EngineStats, base_model: str, started_at_unix_s: float, desired: Sequence[Desired]
) -> Drift:
    """What is missing and what is too much.

    Args:
        stats: of the replica, now.
        base_model: that it serves: adapters of others are nothing to it.
        started_at_unix_s: its start.
        desired: of the whole fleet.
    """
    # One copy serves all tenants that have this content; the first who wanted it says since when.
    own: dict[str, Desired] = {}
    for item in desired:
        if item.base_model == base_model:
            own.setdefault(item.digest, item)
    started_at = datetime.fromtimestamp(started_at_unix_s, UTC)
    pinned, here = set(stats.adapters_pinned), set(stats.adapters_host)
    missing = [
        Missing(
            digest,
            item,
            max(item.since, started_at),
            digest in pinned,
            stats.adapters_pin_failed.get(digest),
        )
        for digest, item in own.items()
        if digest not in pinned & here
    ]
    at_start = stats.adapters_pinned_at_start
    # A release that does not say which pins are its own keeps them all.
    extra = [] if at_start is None else sorted(pinned - own.keys() - set(at_start))
    return Drift(list(own), missing, extra)
