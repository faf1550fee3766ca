"""Limits as those who enforce them see them: rates in Redis (`rates/`), quotas in Postgres.

Units: requests and tokens; rates are per minute, concurrency is a number of requests at a time. Money
is pico-USD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

ScopeKind = Literal["platform", "tenant", "project", "key", "adapter", "deployment"]
QuotaMetric = Literal["requests", "tokens_in", "tokens_out", "tokens_total", "cost"]
QuotaPeriod = Literal["day", "month", "total", "rolling"]
RateMetric = Literal["rpm", "tpm_in", "tpm_out", "tpm_total", "concurrency"]
# What a limit does while Redis cannot be asked: let everything pass, refuse, or let every gateway
# enforce its share (limit / number of live gateways) from its own memory.
FailMode = Literal["open", "closed", "local"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitScopes:
    """All scopes that one request falls under. None: it has no such scope (a base has no adapter)."""

    tenant_id: UUID
    key_id: UUID | None = None
    project_id: UUID | None = None
    deployment_id: UUID | None = None
    adapter_id: UUID | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """One rate or concurrency limit.

    Attributes:
        scope_id: None exactly for the platform's own scope.
        owner_tenant_id: whose requests it counts; None: everybody's (platform, and a deployment or
            adapter that several tenants use).
        value: requests or tokens a minute, or requests at a time; 0 refuses everything.
        burst: how much may come at once, at least 1; `value` (a minute's worth) unless set. Without
            meaning for concurrency.
    """

    limit_id: UUID
    scope_kind: ScopeKind
    scope_id: UUID | None
    owner_tenant_id: UUID | None
    metric: RateMetric
    value: int
    burst: int
    fail_mode: FailMode = "local"

    @property
    def capacity(self) -> int:
        """How much may be taken at once."""
        return self.value if self.metric == "concurrency" else self.burst


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveLimits:
    """What holds for one `LimitScopes`.

    Attributes:
        version: the tenant's `limits_version` when it was read.
        shared_version: that of the limits that tenants share.
    """

    version: int
    shared_version: int = 0
    rates: tuple[RateLimit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocking:
    """The quota that refuses a request, and why.

    Attributes:
        asked: the least that this request needs of it.
        resets_at_s: Unix time; of a rolling period when the first of it falls out; None: never.
        zone: in which the period is counted.
    """

    limit_id: UUID
    scope_kind: ScopeKind
    scope_id: UUID
    is_shared: bool
    metric: QuotaMetric
    period: QuotaPeriod
    window_s: int
    value: int
    committed: int
    held: int
    asked: int
    resets_at_s: float | None
    zone: str
