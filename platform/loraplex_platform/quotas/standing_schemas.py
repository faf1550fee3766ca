"""How limits stand, on the wire."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from loraplex_platform.control.schemas import Resource, UnixSeconds
from loraplex_platform.ids import format_id
from loraplex_platform.quotas.records import QuotaMetric, QuotaPeriod, RateMetric, ScopeKind
from loraplex_platform.quotas.schemas import Unit, show_amount, show_scope_id, unit_of
from loraplex_platform.quotas.standing import Standing

_SECONDS_PER_HOUR = 3600


class StandingResource(Resource):
    """A limit that binds the caller now. Amounts are in `unit`, as decimal text."""

    object: Literal["limit_standing"] = "limit_standing"
    id: str = Field(description="The limit's, `lim_...`.")
    scope_kind: ScopeKind
    scope_id: str | None = Field(description="null: the platform's own.")
    is_shared: bool = Field(description="It counts other tenants' requests too.")
    metric: QuotaMetric | RateMetric
    period: QuotaPeriod | Literal["minute"] | None
    window_hours: int | None
    value: str
    unit: Unit
    hard: bool
    used: str | None = Field(description="null: a rate, and Redis did not answer.")
    held: str | None = Field(description="By requests in progress, at their worst case.")
    remaining: str | None
    resets_at: UnixSeconds | None = Field(
        description="Of a quota the end of its period, of a rate when its bucket is full again."
    )


class StandingList(Resource):
    """All limits that bind a caller, narrowest scope first; there are few, so this is one page."""

    object: Literal["list"] = "list"
    data: list[StandingResource]
    has_more: Literal[False] = False


def show_standing(standing: Standing) -> StandingResource:
    """The limit as the API shows it."""
    limit = standing.limit

    def shown(amount: int | None) -> str | None:
        return None if amount is None else show_amount(limit.metric, amount)

    return StandingResource(
        id=format_id("limit", limit.id),
        scope_kind=limit.scope_kind,  # type: ignore[arg-type] # checked by the table
        scope_id=show_scope_id(limit),
        is_shared=limit.tenant_id is None,
        metric=limit.metric,  # type: ignore[arg-type] # as above
        period=None if limit.period == "none" else limit.period,  # type: ignore[arg-type] # as above
        window_hours=limit.window_s // _SECONDS_PER_HOUR or None,
        value=show_amount(limit.metric, int(limit.value)),
        unit=unit_of(limit.metric),
        hard=limit.is_hard,
        used=shown(standing.used),
        held=shown(standing.held),
        remaining=shown(standing.remaining),
        resets_at=standing.resets_at,
    )
