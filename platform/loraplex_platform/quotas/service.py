"""Setting limits. A quota counts from the beginning of its period, whenever it is set (opening.py).

Changes of limits wait for the admissions under way and hold new ones of the tenant (of everybody, where
they concern everybody's requests) for as long as it takes to write them down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, get_args
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.billing.money import parse_usd
from loraplex_platform.control.etag import check_version
from loraplex_platform.db import Limit, Tenant
from loraplex_platform.db.quotas import NO_SCOPE_ID
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import ConflictError, InvalidRequestError, NotFoundError
from loraplex_platform.ids import PREFIXES, MalformedIdError, format_id, parse_id, uuid7
from loraplex_platform.quotas import opening, queries
from loraplex_platform.quotas.queries import Use
from loraplex_platform.quotas.records import RateMetric
from loraplex_platform.quotas.schemas import (
    ID_KINDS,
    LimitChanges,
    NewLimit,
    SchedulingChanges,
    show_amount,
    show_scope_id,
    time_of,
)

RATE_METRICS = frozenset(get_args(RateMetric))
_COUNTED = [field.name for field in fields(opening.Counted)]


@dataclass(frozen=True, slots=True)
class CountedLimit:
    """A limit and, of a quota, its use."""

    limit: Limit
    use: Use | None

    @property
    def id(self) -> UUID:
        """The limit's."""
        return self.limit.id


async def create_limit(
    session: AsyncSession, actor: Actor, new: NewLimit, *, sessions: SessionFactory
) -> CountedLimit:
    """Set a limit. Of a quota it takes as long as counting what has been used of its period.

    Args:
        sessions: of the same database, for what must be committed before the counting begins.

    Raises:
        InvalidRequestError: a field does not fit the metric or the scope.
        NotFoundError: there is nothing of that id.
        ConflictError: there is a limit of that scope, metric and period already, or counting took
            longer than anybody waits.
    """
    scope_id, tenant_id = await _find_scope(session, new)
    values = _checked(new) | {
        "id": uuid7(),
        "tenant_id": tenant_id,
        "scope_kind": new.scope_kind,
        "scope_id": scope_id,
    }
    is_quota = new.metric not in RATE_METRICS
    opened, used = None, {}
    if is_quota:
        what = opening.Counted(**{name: values[name] for name in _COUNTED})
        await opening.lock(session, what)
        if not await opening.is_counted(session, what):
            opened = await opening.open_windows(sessions, what)
            used = await opening.count(session, opened)
    # Before the insert, which locks the tenant: all changes of limits lock in one order.
    await queries.wait_for_admissions(session, tenant_id)
    if opened is not None:
        await opening.close(session, opened, used)
    if not await queries.insert_limit(session, values):
        raise ConflictError(
            "There is a limit of this scope, metric and period already"
            f" ({'hard' if new.hard else 'soft'}): change that one, or remove it first."
        )
    limit_id: UUID = values["id"]
    if is_quota:
        await queries.note_use(session, limit_id)
    made = await get_limit(session, format_id("limit", limit_id))
    record(
        session,
        actor,
        "limit.create",
        "limit",
        format_id("limit", limit_id),
        tenant_id=tenant_id,
        after=_shown(made.limit),
    )
    return made


async def get_limit(session: AsyncSession, limit_id: str) -> CountedLimit:
    """By id.

    Raises:
        NotFoundError: there is none.
    """
    limit = await _find(session, limit_id)
    [counted] = await with_uses(session, [limit])
    return counted


async def with_uses(session: AsyncSession, limits: Sequence[Limit]) -> list[CountedLimit]:
    """The limits and what is used of them."""
    uses = await queries.uses_of(session, [limit.id for limit in limits])
    return [CountedLimit(limit, uses.get(limit.id)) for limit in limits]


async def update_limit(
    session: AsyncSession, actor: Actor, limit_id: str, changes: LimitChanges, if_match: int | None
) -> CountedLimit:
    """Change a limit: a new value holds from the next request on, and what is used stays used.

    Raises:
        NotFoundError: there is none.
        InvalidRequestError: a field does not fit the metric.
        VersionConflictError: it is not the version of If-Match.
    """
    limit = await _find(session, limit_id, is_locked=True)
    wanted = changes.model_dump(exclude_unset=True)
    before = _shown(limit)
    check_version(if_match, limit.row_version, wanted, before)
    values = _checked_changes(limit, wanted)
    # Nobody is admitted by the old value any more once this is answered.
    await queries.wait_for_admissions(session, limit.tenant_id)
    await queries.update_limit(session, limit.id, values)
    changed = await _find(session, limit_id, is_locked=True)
    after = _shown(changed)
    record(
        session,
        actor,
        "limit.update",
        "limit",
        limit_id,
        tenant_id=limit.tenant_id,
        before={field: before[field] for field in wanted},
        after={field: after[field] for field in wanted},
    )
    [counted] = await with_uses(session, [changed])
    return counted


async def delete_limit(
    session: AsyncSession, actor: Actor, limit_id: str, if_match: int | None
) -> None:
    """Remove a limit. Set again within its period it finds what was used.

    Raises:
        NotFoundError: there is none.
        VersionConflictError: it is not the version of If-Match.
    """
    limit = await _find(session, limit_id, is_locked=True)
    check_version(if_match, limit.row_version, {}, {})
    # Who sets another one of its windows must know whether this one counted them.
    await opening.lock(
        session, opening.Counted(**{name: getattr(limit, name) for name in _COUNTED})
    )
    await queries.wait_for_admissions(session, limit.tenant_id)
    await queries.delete_limit(session, limit.id)
    record(
        session,
        actor,
        "limit.delete",
        "limit",
        limit_id,
        tenant_id=limit.tenant_id,
        before=_shown(limit),
    )


_MAY_BE_NULL = ("memory_weight", "max_adapters")


async def update_scheduling(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID,
    changes: SchedulingChanges,
    if_match: int | None,
) -> Tenant:
    """Set how urgent a tenant's requests are; from its next request on.

    Raises:
        NotFoundError: no such tenant.
        VersionConflictError: it is not the version of If-Match.
    """
    tenant = await _lock_tenant(session, tenant_id)
    given = changes.model_dump(exclude_unset=True)
    wanted = {k: v for k, v in given.items() if v is not None or k in _MAY_BE_NULL}
    before = {field: getattr(tenant, field) for field in ("priority", "weight", *_MAY_BE_NULL)}
    check_version(if_match, tenant.row_version, wanted, before)
    wanted = {field: value for field, value in wanted.items() if before[field] != value}
    if not wanted:
        return tenant
    await queries.update_scheduling(session, tenant_id, wanted)
    record(
        session,
        actor,
        "tenant.schedule",
        "tenant",
        format_id("tenant", tenant_id),
        tenant_id=tenant_id,
        before={field: before[field] for field in wanted},
        after=wanted,
    )
    return await _lock_tenant(session, tenant_id)


async def _lock_tenant(session: AsyncSession, tenant_id: UUID) -> Tenant:
    tenant = await queries.lock_tenant(session, tenant_id)
    if tenant is None:
        raise NotFoundError("No such tenant.")
    return tenant


async def _find(session: AsyncSession, limit_id: str, *, is_locked: bool = False) -> Limit:
    try:
        limit_uuid = parse_id("limit", limit_id)
    except MalformedIdError:
        raise NotFoundError("No such limit.") from None
    limit = await queries.find_limit(session, limit_uuid, is_locked=is_locked)
    if limit is None:
        raise NotFoundError("No such limit.")
    return limit


async def _find_scope(session: AsyncSession, new: NewLimit) -> tuple[UUID, UUID | None]:
    """The scope's id, and whose requests it counts."""
    if new.scope_kind == "platform":
        if new.scope_id is not None:
            raise InvalidRequestError(
                "scope_id: the platform is one, leave it out.", param="scope_id"
            )
        return NO_SCOPE_ID, None
    kind = ID_KINDS[new.scope_kind]
    if new.scope_id is None:
        raise InvalidRequestError(
            f"scope_id: name the {new.scope_kind} by its id ({PREFIXES[kind]}_...).",
            param="scope_id",
        )
    try:
        scope_id = parse_id(kind, new.scope_id)
    except MalformedIdError:
        raise NotFoundError(f"No such {new.scope_kind}.", param="scope_id") from None
    is_known, tenant_id = await queries.find_owner(session, new.scope_kind, scope_id)
    if not is_known:
        raise NotFoundError(f"No such {new.scope_kind}.", param="scope_id")
    return scope_id, tenant_id


def _checked(new: NewLimit) -> dict[str, Any]:
    """The columns, if the fields fit each other."""
    if new.metric in RATE_METRICS:
        _refuse(new.period is not None, "period", "rates are per minute, leave it out.")
        _refuse(bool(new.alert_pct), "alert_pct", "alerts are of quotas, leave it out.")
        _refuse(not new.hard, "hard", "a rate always refuses, leave it out.")
        period = "none" if new.metric == "concurrency" else "minute"
    else:
        _refuse(
            new.period is None,
            "period",
            f"{new.metric} is counted per day, month, in total or rolling: say which.",
        )
        _refuse(new.burst is not None, "burst", "only rates have one, leave it out.")
        _refuse(new.fail_mode is not None, "fail_mode", "only rates have one, leave it out.")
        period = new.period or "none"
    is_rolling = period == "rolling"
    _refuse(
        is_rolling == (new.window_hours is None),
        "window_hours",
        "say how long the rolling period is." if is_rolling else "only a rolling period has one.",
    )
    return {
        "metric": new.metric,
        "period": period,
        "window_s": (new.window_hours or 0) * 3600,
        "value": parse_value(new.metric, new.value),
        "is_hard": new.hard,
        "burst": _checked_burst(new.metric, new.burst),
        "fail_mode": new.fail_mode or "local",
        "alert_pct": sorted(set(new.alert_pct)),
    } | _checked_times(time_of(new.valid_from), time_of(new.valid_to))


def _checked_changes(limit: Limit, wanted: dict[str, Any]) -> dict[str, Any]:
    is_rate = limit.metric in RATE_METRICS
    values: dict[str, Any] = {}
    if "value" in wanted:
        _refuse(wanted["value"] is None, "value", "a limit has one: remove the limit instead.")
        values["value"] = parse_value(limit.metric, wanted["value"])
    if "burst" in wanted:
        _refuse(not is_rate, "burst", "only rates have one, leave it out.")
        values["burst"] = _checked_burst(limit.metric, wanted["burst"])
    if "fail_mode" in wanted:
        _refuse(not is_rate, "fail_mode", "only rates have one, leave it out.")
        values["fail_mode"] = wanted["fail_mode"] or "local"
    if "alert_pct" in wanted:
        alerts = sorted(set(wanted["alert_pct"] or ()))
        _refuse(is_rate and bool(alerts), "alert_pct", "alerts are of quotas, leave it out.")
        values["alert_pct"] = alerts
    times = {"valid_from": limit.valid_from, "valid_to": limit.valid_to} | {
        field: time_of(wanted[field]) for field in ("valid_from", "valid_to") if field in wanted
    }
    return values | _checked_times(times["valid_from"], times["valid_to"])


def _checked_burst(metric: str, burst: int | None) -> int | None:
    _refuse(
        metric == "concurrency" and burst is not None,
        "burst",
        "what runs at a time has none, leave it out.",
    )
    return burst


def _checked_times(valid_from: datetime | None, valid_to: datetime | None) -> dict[str, Any]:
    is_empty = valid_from is not None and valid_to is not None and valid_from >= valid_to
    _refuse(is_empty, "valid_to", "it must be later than valid_from.")
    return {"valid_from": valid_from, "valid_to": valid_to}


def parse_value(metric: str, value: str) -> int:
    """In the metric's unit; dollars as pico-USD.

    Raises:
        InvalidRequestError: a part of a token or request.
    """
    if metric == "cost":
        return parse_usd(value)
    _refuse("." in value, "value", f"{metric} are counted whole: leave the point out.")
    return int(value)


def _refuse(is_wrong: bool, param: str, remedy: str) -> None:
    if is_wrong:
        raise InvalidRequestError(f"{param}: {remedy}", param=param)


def _shown(limit: Limit) -> dict[str, Any]:
    """For the audit log, and for who compares: as the API shows it."""

    def seconds(at: datetime | None) -> int | None:
        return None if at is None else int(at.timestamp())

    return {
        "scope_kind": limit.scope_kind,
        "scope_id": show_scope_id(limit),
        "metric": limit.metric,
        "period": limit.period,
        "window_s": limit.window_s,
        "value": show_amount(limit.metric, int(limit.value)),
        "hard": limit.is_hard,
        "burst": limit.burst,
        "fail_mode": limit.fail_mode,
        "alert_pct": limit.alert_pct,
        "valid_from": seconds(limit.valid_from),
        "valid_to": seconds(limit.valid_to),
    }
