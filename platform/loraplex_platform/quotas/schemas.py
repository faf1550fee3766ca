"""Limits and explanations on the wire.

Amounts are decimal text, with their unit beside it: whole requests or tokens, or dollars to the
pico-dollar. Nothing is rounded.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt

from loraplex_platform.billing.money import format_usd
from loraplex_platform.control.schemas import Body, Resource, UnixSeconds, UnixTime
from loraplex_platform.db import Limit
from loraplex_platform.db.quotas import NO_SCOPE_ID
from loraplex_platform.ids import format_id
from loraplex_platform.metering.provenance_schemas import AnsweredBy
from loraplex_platform.quotas.queries import Use
from loraplex_platform.quotas.records import (
    FailMode,
    QuotaMetric,
    QuotaPeriod,
    RateMetric,
    ScopeKind,
)

ID_KINDS: dict[ScopeKind, str] = {
    "tenant": "tenant",
    "project": "project",
    "key": "api_key",
    "adapter": "adapter",
    "deployment": "deployment",
}
Unit = Literal["requests", "tokens", "USD"]
_UNITS: dict[str, Unit] = {
    "requests": "requests",
    "rpm": "requests",
    "concurrency": "requests",
    "cost": "USD",
}
_SECONDS_PER_HOUR = 3600

Value = Annotated[
    str,
    Field(
        pattern=r"^[0-9]{1,15}(\.[0-9]{1,12})?$",
        description="Requests, tokens, or dollars where the metric is `cost`. 0 refuses everything.",
        examples=["1000000", "25.00"],
    ),
]
Burst = Annotated[
    StrictInt,
    Field(
        ge=1, le=10**12, description="Of a rate: how much may come at once; `value` if not given."
    ),
]
AlertPct = Annotated[
    list[Annotated[StrictInt, Field(ge=1, le=100)]],
    Field(
        max_length=10,
        description="Of a quota: an alert when so many percent are used, each once a period.",
        examples=[[50, 80, 100]],
    ),
]


class NewLimit(Body):
    """A limit to set. What it counts is fixed; its value and the rest may change later."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "scope_kind": "tenant",
                    "scope_id": "ten_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f",
                    "metric": "cost",
                    "period": "month",
                    "value": "100.00",
                    "alert_pct": [50, 80],
                },
                {
                    "scope_kind": "key",
                    "scope_id": "key_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f",
                    "metric": "rpm",
                    "value": "60",
                },
            ]
        },
    )

    scope_kind: ScopeKind
    scope_id: str | None = Field(
        default=None,
        max_length=80,
        description="Id of the tenant, project, key, adapter or deployment; none for the platform.",
    )
    metric: QuotaMetric | RateMetric = Field(
        description="Rates are per minute (`concurrency`: at a time); the others need a `period`."
    )
    period: QuotaPeriod | None = Field(
        default=None,
        description="Of a quota. Days and months are those of the tenant's time zone (of the platform"
        " and its own deployments: UTC); `rolling` is any `window_hours`.",
    )
    window_hours: StrictInt | None = Field(
        default=None, ge=1, le=8784, description="Of a rolling period: 24 is a day, 720 are 30."
    )
    value: Value
    hard: StrictBool = Field(
        default=True, description="Refuse, or cut `max_tokens`. A soft quota only alerts."
    )
    burst: Burst | None = None
    fail_mode: FailMode | None = Field(
        default=None, description="Of a rate, while Redis is away; `local` if not given."
    )
    alert_pct: AlertPct = Field(default_factory=list)
    valid_from: UnixTime | None = Field(
        default=None, description="In force from then on. It counts from its creation."
    )
    valid_to: UnixTime | None = Field(default=None, description="Not in force from then on.")


class LimitChanges(Body):
    """What to change; what is not named stays."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"value": "250.00"}]})

    value: Value | None = None
    burst: Burst | None = None
    fail_mode: FailMode | None = None
    alert_pct: AlertPct | None = None
    valid_from: UnixTime | None = None
    valid_to: UnixTime | None = None


class UseResource(Resource):
    """What is used of a quota in its period of now."""

    used: str
    held: str = Field(description="Reserved by requests in progress, at their worst case.")
    remaining: str
    period_start: UnixSeconds
    period_end: UnixSeconds | None = Field(description="When it begins anew; null: never.")


class LimitResource(Resource):
    """A limit, and what is used of it."""

    object: Literal["limit"] = "limit"
    id: str
    tenant_id: str | None = Field(description="Whose requests it counts; null: everybody's.")
    scope_kind: ScopeKind
    scope_id: str | None
    metric: QuotaMetric | RateMetric
    period: QuotaPeriod | Literal["minute"] | None
    window_hours: int | None
    value: str
    unit: Unit
    hard: bool
    burst: int | None
    fail_mode: FailMode | None
    alert_pct: list[int]
    valid_from: UnixSeconds | None
    valid_to: UnixSeconds | None
    use: UseResource | None = Field(description="null for rates: those are counted in Redis.")
    version: int = Field(description="Its ETag, for If-Match.")
    created_at: UnixSeconds


class ExplanationResource(Resource):
    """What became of a request and which limits had a part in it, in words."""

    object: Literal["explanation"] = "explanation"
    request_id: str
    tenant_id: str
    outcome: Literal[
        "refused", "running", "completed", "aborted", "failed", "not_run", "archived"
    ] = Field(description="archived: its month in the request log is gone, the ledger is not.")
    summary: str
    details: list[str]
    limit_ids: list[str] = Field(description="The limits that refused it or cut its max_tokens.")
    at: UnixSeconds
    answered_by: AnsweredBy | None = Field(description="null: it was refused, nothing answered.")


class SchedulingChanges(Body):
    """How urgent a tenant's requests are at the engines, and what memory is theirs there; what is not named
    stays."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"priority": 0, "weight": 2.0, "memory_weight": 4.0, "max_adapters": 2}]
        },
    )

    priority: StrictInt | None = Field(
        default=None,
        ge=-100,
        le=100,
        description="Of a larger one requests are served first (see the engine's --policy).",
    )
    weight: StrictFloat | StrictInt | None = Field(
        default=None,
        ge=0.001,
        le=1000,
        description="Its share of what its priority gets: twice the weight, twice the tokens.",
    )
    memory_weight: StrictFloat | StrictInt | None = Field(
        default=None,
        ge=0.001,
        le=1000,
        description="Its share of an engine's KV cache beside other tenants': what is cached within it is not "
        "evicted for others; beyond it, a tenant has what nobody needs. null: its weight.",
    )
    max_adapters: StrictInt | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="How many of its adapters may be in use on an engine at a time; requests for more wait. "
        "null: as many as there is room for.",
    )


class SchedulingResource(Resource):
    """How urgent a tenant's requests are at the engines."""

    object: Literal["scheduling"] = "scheduling"
    tenant_id: str
    priority: int
    weight: float
    memory_weight: float | None
    max_adapters: int | None
    version: int = Field(description="Its ETag, for If-Match; the tenant's.")


def unit_of(metric: str) -> Unit:
    """Of a metric's amounts."""
    return _UNITS.get(metric, "tokens")


def show_amount(metric: str, value: int) -> str:
    """In the metric's unit, exactly."""
    if metric != "cost":
        return str(value)
    whole, _, fraction = format_usd(value).partition(".")
    return f"{whole}.{fraction.rstrip('0').ljust(2, '0')}"


def show_limit(limit: Limit, use: Use | None) -> LimitResource:
    """The limit as the API shows it. `use` None: it is a rate."""
    is_quota = use is not None
    fields: dict[str, Any] = {
        "id": format_id("limit", limit.id),
        "tenant_id": None if limit.tenant_id is None else format_id("tenant", limit.tenant_id),
        "scope_kind": limit.scope_kind,
        "scope_id": show_scope_id(limit),
        "metric": limit.metric,
        "period": None if limit.period == "none" else limit.period,
        "window_hours": limit.window_s // _SECONDS_PER_HOUR or None,
        "value": show_amount(limit.metric, int(limit.value)),
        "unit": unit_of(limit.metric),
        "hard": limit.is_hard,
        "burst": limit.burst,
        "fail_mode": None if is_quota else limit.fail_mode,
        "alert_pct": limit.alert_pct,
        "valid_from": limit.valid_from,
        "valid_to": limit.valid_to,
        "version": limit.row_version,
        "created_at": limit.created_at,
    }
    shown = None
    if use is not None:
        remaining = max(0, int(limit.value) - use.committed - use.held)
        shown = UseResource(
            used=show_amount(limit.metric, use.committed),
            held=show_amount(limit.metric, use.held),
            remaining=show_amount(limit.metric, remaining),
            period_start=use.period_start,
            period_end=use.period_end,
        )
    return LimitResource(**fields, use=shown)


def show_scope_id(limit: Limit) -> str | None:
    """As an id of its kind."""
    if limit.scope_id == NO_SCOPE_ID:
        return None
    return format_id(ID_KINDS[limit.scope_kind], limit.scope_id)  # type: ignore[index] # checked by the table


def time_of(unix_s: int | None) -> datetime | None:
    """A Unix time."""
    return None if unix_s is None else datetime.fromtimestamp(unix_s, UTC)
