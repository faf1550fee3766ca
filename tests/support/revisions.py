"""Revisions, builds and rollouts as rows, and requests of another time: for tests of what the books say of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from loraplex_platform.ids import uuid7

from tests.support.billing import as_owner

SALT = b"salt-of-tests-01"
STEPS = (
    {"kind": "shadow", "share_bp": 1000, "hold_s": 60},
    {"kind": "canary", "weight_bp": 500, "hold_s": 60},
    {"kind": "canary", "weight_bp": 9900, "hold_s": 60},
)


def add_build(url: str, fingerprint: str, base_model_id: UUID | None = None, **facts: Any) -> UUID:
    """An engine build that has been seen."""
    build_id = uuid7()
    as_owner(
        url,
        "insert into engine_builds (id, fingerprint, base_model_id, base_model, facts)"
        " values (%s, %s, %s, 'base', %s)",
        build_id,
        fingerprint,
        base_model_id,
        json.dumps({"dtype": "float32", "device": "cpu"} | facts),
    )
    return build_id


def add_revision(
    url: str,
    deployment_id: UUID,
    *,
    price_book_id: UUID | None = None,
    engine_build_id: UUID | None = None,
    params: dict[str, Any] | None = None,
    is_current: bool = False,
) -> UUID:
    """The next one, of the same base and adapter as the current one."""
    revision_id = uuid7()
    as_owner(
        url,
        "insert into deployment_revisions (id, deployment_id, tenant_id, number, base_model_id,"
        " adapter_version_id, adapter_digest, engine_build_id, price_book_id, params, sha256)"
        " select %s, r.deployment_id, r.tenant_id, (select max(number) + 1 from deployment_revisions"
        " where deployment_id = d.id), r.base_model_id, r.adapter_version_id, r.adapter_digest, %s, %s,"
        " %s, repeat('7', 64) from deployments d"
        " join deployment_revisions r on r.id = d.current_revision_id where d.id = %s",
        revision_id,
        engine_build_id,
        price_book_id,
        json.dumps(params or {}),
        deployment_id,
    )
    if is_current:
        as_owner(
            url,
            "update deployments set current_revision_id = %s where id = %s",
            revision_id,
            deployment_id,
        )
    return revision_id


def add_rollout(
    url: str,
    deployment_id: UUID,
    canary_id: UUID,
    *,
    sticky_by: str = "key",
    step: int = 1,
    steps: Sequence[dict[str, Any]] = STEPS,
) -> UUID:
    """Under way, from the current revision to the canary; with one event."""
    rollout_id = uuid7()
    now = steps[step]
    with psycopg.connect(url) as owner:
        owner.execute(
            "insert into rollouts (id, tenant_id, deployment_id, stable_revision_id,"
            " canary_revision_id, state, step, steps, sticky_by, salt, weight_bp, shadow_bp, gate,"
            " changes, created_by, started_at)"
            " select %s, tenant_id, id, current_revision_id, %s, %s, %s, %s, %s, %s, %s, %s, '{}',"
            " '{params}', 'user usr_1', now() from deployments where id = %s",
            [
                rollout_id,
                canary_id,
                now["kind"],
                step,
                json.dumps(list(steps)),
                sticky_by,
                SALT,
                now.get("weight_bp", 0),
                now.get("share_bp", 0),
                deployment_id,
            ],
        )
        owner.execute(
            "insert into rollout_events (rollout_id, seq, tenant_id, kind, actor, message, detail)"
            " select id, 1, tenant_id, 'started', 'user usr_1', 'It began.', '{}' from rollouts"
            " where id = %s",
            [rollout_id],
        )
    return rollout_id


def age(url: str, request_id: UUID, at: datetime) -> UUID:
    """Make a settled request one that was admitted then, with all its rows in that month's partitions; its
    new id, which has the time in it."""
    aged = uuid7(int(at.timestamp() * 1000))
    with psycopg.connect(url) as owner:
        owner.execute("set session_replication_role = replica")
        for statement in (
            "update requests set id = %(id)s, admitted_at = %(at)s, settled_at = %(at)s"
            " where id = %(was)s",
            "update attempts set request_id = %(id)s, recorded_at = %(at)s where request_id = %(was)s",
            "update ledger set entry_id = %(id)s, occurred_at = %(at)s where entry_id = %(was)s",
            "update rollup_dirty set entry_id = %(id)s,"
            " day = (%(at)s::timestamptz at time zone 'UTC')::date where entry_id = %(was)s",
        ):
            owner.execute(statement, {"id": aged, "was": request_id, "at": at})
    return aged
