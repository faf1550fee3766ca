"""Retention over HTTP."""

from __future__ import annotations

from fastapi import Request

from loraplex_platform.control.context import Context, DbSession
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.retention import service
from loraplex_platform.retention.schemas import (
    RetentionRule,
    RetentionRules,
    RetentionRun,
    RuleChange,
    show_rule,
)
from loraplex_platform.retention.service import RuleName

router = admin_router("/retention", "Retention and deletion")


@router.get("")
@requires("retention.read")
async def list_rules(session: DbSession) -> RetentionRules:
    """How long each thing is kept, and what would be deleted if the worker came by now."""
    return RetentionRules(data=[show_rule(due) for due in await service.look(session)])


@router.put("/{name}")
@requires("retention.write")
async def set_rule(
    name: RuleName, body: RuleChange, request: Request, session: DbSession
) -> RetentionRule:
    """Keep something longer or shorter. Holds from the worker's next round on, within the hour."""
    await service.set_rule(session, request.state.actor, name, body.keep_days)
    await session.flush()
    return next(show_rule(due) for due in await service.look(session) if due.name == name)


@router.post("/runs", status_code=201)
@requires("retention.write")
async def run_now(request: Request, context: Context) -> RetentionRun:
    """Delete what is due now, as the worker does every hour."""
    done = await service.clean(context.sessions, request.state.actor)
    return RetentionRun(deleted={str(name): count for name, count in done.items()})
