"""Names of our keys in Redis. What one script touches has one hash tag: a tenant's, or the shared one.

Limits are named by their scope and metric, never by a secret or by the limit's own id: a rotated key
or a limit that is written anew keeps its use.
"""

from __future__ import annotations

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


def limit(tag: str, limit: RateLimit) -> str:
    """A bucket, or a gauge of places."""
    return scope(tag, limit.metric, limit.scope_kind, limit.scope_id)


def scope(tag: str, metric: str, scope_kind: str, scope_id: UUID | None) -> str:
    """The same by its parts."""
    where = scope_kind if scope_id is None else f"{scope_kind}:{scope_id.hex}"
    return f"lpx:{{{tag}}}:{metric}:{where}"
