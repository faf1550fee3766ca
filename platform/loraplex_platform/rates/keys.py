"""Names of our keys in Redis. What one script touches has one hash tag: a tenant's, or the shared one.

Limits are named by their scope and metric, never by a secret or by the limit's own id: a rotated key
or a limit that is written anew keeps its use.
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from loraplex_platform.quotas.records import RateLimit

SHARED = "shared"


def tag_of(tenant_id: UUID | None) -> str:
    """The hash tag of what a tenant owns; None: of what several tenants share."""
    return SHARED if tenant_id is None else tenant_id.hex


def versions(tag: str) -> str:
    """The newest versions that were published: a hash."""
    return f"lpx:{{{tag}}}:versions"


def epoch(tag: str) -> str:
    """Which run of Redis the gauges of this tag were made for."""
    return f"lpx:{{{tag}}}:epoch"


def rebuild_lock(tag: str) -> str:
    """Who rebuilds them at present."""
    return f"lpx:{{{tag}}}:rebuild"


def admission(tag: str, request_id: UUID) -> str:
    """That a request has been admitted and not yet released."""
    return f"lpx:{{{tag}}}:admission:{request_id.hex}"


def unknown_keys(network: str) -> str:
    """How many keys that are nobody's were shown from there."""
    return f"lpx:{{{network}}}:unknown_keys"


def names_of(limits: Iterable[RateLimit]) -> dict[UUID, str]:
    """Where each limit's use is kept, by the limit's id.

    A second rate of one scope and metric (a raise for some time) has a bucket of its own; a place is
    the same place for all limits of its scope.
    """
    names: dict[UUID, str] = {}
    for limit in sorted(limits, key=lambda one: one.limit_id):
        tag = tag_of(limit.owner_tenant_id)
        name = scope(tag, limit.metric, limit.scope_kind, limit.scope_id)
        if limit.metric != "concurrency" and name in names.values():
            name = f"{name}:{limit.limit_id.hex}"
        names[limit.limit_id] = name
    return names


def scope(tag: str, metric: str, scope_kind: str, scope_id: UUID | None) -> str:
    """A bucket, or a gauge of places."""
    where = scope_kind if scope_id is None else f"{scope_kind}:{scope_id.hex}"
    return f"lpx:{{{tag}}}:{metric}:{where}"
