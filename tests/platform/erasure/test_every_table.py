"""Every table that knows a tenant is one of three kinds, and a new one is none until somebody has said so."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import psycopg
from loraplex_platform.ids import parse_id, uuid7
from psycopg import sql
from psycopg.types.json import Jsonb

from tests.support.billing import add_model, as_owner
from tests.support.metering import Customer
from tests.support.revisions import add_revision, add_rollout

if TYPE_CHECKING:
    from tests.platform.control.stand import Stand

# A word of the tenant's, in every column that holds words.
WORD = "xyzzy47"

# With the tenant every row of it goes.
GONE: Final = {
    "adapter_alias_events",
    "adapter_aliases",
    "adapter_imports",
    "adapter_uploads",
    "alerts",
    "eval_results",
    "eval_runs",
    "eval_schedules",
    "eval_suite_versions",
    "eval_suites",
    "idempotent_requests",
    "invitations",
    "key_model_grants",
    "memberships",
    "pin_events",
    "pins",
    "refusals",
    "resident_adapters",
    "rollout_events",
    "rollouts",
    "webhook_deliveries",
    "webhooks",
}
# What bills and requests name by its id stays, without a word of the tenant's.
EMPTIED: Final = {
    "adapter_versions",
    "adapters",
    "api_keys",
    "deployment_revisions",
    "deployments",
    "projects",
}
# What the law wants of a business, numbers, and the request log until retention drops its month.
KEPT: Final = {
    "adapter_hours_progress",
    "attempts",
    "audit_log",
    "billing_profiles",
    "deployment_events",
    "engine_usage",
    "invoice_lines",
    "invoices",
    "ledger",
    "ledger_reversals",
    "limits",
    "quota_windows",
    "requests",
    "rollup_dirty",
    "usage_daily",
}

_NOW = datetime.now(UTC)
_VERSION, _DIGEST = uuid7(), "sha256:" + "a" * 64
# Where not every word will do. Sums of digits are no words.
_VALUES: Final[dict[str, dict[str, Any]]] = {
    "adapter_imports": {
        "state": "failed",
        "version_id": None,
        "lease_token": None,
        "lease_until": None,
    },
    "adapter_uploads": {"state": "open", "version_id": None, "error": None},
    "adapter_versions": {
        "status": "ready",
        "digest": _DIGEST,
        "target_modules": ["q_proj"],
        "version": 9,
    },
    "api_keys": {
        "status": "active",
        "public_id": lambda: uuid7().hex[-16:],
        "last4": "l",
        "scopes": ["inference"],
        "ip_allow": ["10.0.0.0/8"],
        "revoked_at": None,
    },
    "deployment_revisions": {"adapter_digest": _DIGEST, "sha256": "s", "number": 9},
    "eval_results": {"status": "pass"},
    "eval_runs": {"state": "queued", "ended_at": None},
    "eval_schedules": {"every_hours": None, "revision_id": None},
    "eval_suites": {"kind": "checks"},
    "invitations": {"role": "viewer", "revoked_at": None},
    "key_model_grants": {"target_kind": "deployment"},
    "memberships": {"role": "viewer"},
    "rollouts": {
        "state": "draft",
        "sticky_by": "key",
        "ended_at": None,
        "weight_bp": 0,
        "shadow_bp": 0,
    },
    "webhook_deliveries": {"status": "failed", "delivered_at": None},
    "webhooks": {"status": "enabled"},
    "resident_adapters": {"digest": _DIGEST},
}
_BY_TYPE: Final[dict[str, Any]] = {
    "bool": False,
    "bytea": lambda: uuid7().bytes,
    "date": _NOW.date(),
    "float4": 0.5,
    "float8": 0.5,
    "int2": 0,
    "int4": 1,
    "int8": 1,
    "jsonb": Jsonb({"said": WORD}),
    "numeric": 1,
    "text": WORD,
    "timestamptz": _NOW,
    "_text": [WORD],
    "_varchar": [WORD],
    "uuid": uuid7,
    "_uuid": lambda: [uuid7()],
}


def tables(url: str) -> set[str]:
    """Those with a tenant_id."""
    rows = as_owner(
        url,
        "select c.relname from pg_class c join pg_attribute a on a.attrelid = c.oid"
        " and a.attname = 'tenant_id' and not a.attisdropped"
        " where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p')"
        " and not c.relispartition",
    )
    return {name for (name,) in rows}


def fill(url: str, table: str, tenant_id: UUID, refers: dict[str, UUID]) -> None:
    """A row of the tenant's in which every column that can says the word; what it refers to besides
    `refers` need not be there."""
    columns = as_owner(
        url,
        "select column_name, udt_name, character_maximum_length from information_schema.columns"
        " where table_schema = 'public' and table_name = %s and is_identity = 'NO'"
        " and is_generated = 'NEVER'",
        table,
    )
    values: dict[str, Any] = {}
    for name, kind, length in columns:
        value = _VALUES.get(table, {}).get(name, refers.get(name, _BY_TYPE.get(kind)))
        if name == "tenant_id":
            value = tenant_id
        elif kind == "varchar" and value is None and name not in _VALUES.get(table, {}):
            value = WORD[:length]
        values[name] = value() if callable(value) else value
    statement = sql.SQL("insert into {} ({}) values ({})").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, values)),
        sql.SQL(", ").join(sql.Placeholder() * len(values)),
    )
    with psycopg.connect(url) as owner:
        owner.execute("set session_replication_role = replica")
        owner.execute(statement, list(values.values()))


def rows(url: str, table: str, tenant_id: UUID) -> list[str]:
    query = sql.SQL("select t::text from {} t where tenant_id = %s").format(sql.Identifier(table))
    with psycopg.connect(url) as owner:
        return [text for (text,) in owner.execute(query, [tenant_id]).fetchall()]


def test_it_is_said_of_every_table_with_a_tenant_what_becomes_of_it(db_url: str) -> None:
    assert tables(db_url) == GONE | EMPTIED | KEPT, (
        "say here, and have loraplex_erase_tenant do, what becomes of it when its tenant is deleted"
    )


async def test_nothing_is_left_of_what_a_tenant_has_said(stand: Stand, db_url: str) -> None:
    tenants = [await stand.tenant(slug) for slug in ("acme", "globex")]
    acme, globex = (parse_id("tenant", tenant["id"]) for tenant in tenants)
    for tenant_id in (acme, globex):
        model = add_model(db_url, Customer(tenant_id, uuid7(), ""))
        refers = {"deployment_id": model.deployment_id, "adapter_id": model.adapter_id}
        for table in sorted(GONE | EMPTIED):
            fill(db_url, table, tenant_id, refers)
            assert any(WORD in row for row in rows(db_url, table, tenant_id)) or table in (
                "eval_runs",
                "key_model_grants",
                "memberships",
            ), f"{table} has no word of the tenant's to lose"
    before = {table: rows(db_url, table, globex) for table in GONE | EMPTIED}

    answer = await stand.admin.delete(
        f"/admin/v1/tenants/{tenants[0]['id']}", params={"confirm": "acme"}
    )

    assert answer.status_code == 200, answer.text
    left = {table: rows(db_url, table, acme) for table in GONE}
    assert {table: found for table, found in left.items() if found} == {}
    for table in EMPTIED:
        kept = rows(db_url, table, acme)
        assert kept, table
        assert [row for row in kept if WORD in row] == [], table
    # The other's are as they were.
    assert {table: rows(db_url, table, globex) for table in GONE | EMPTIED} == before


async def test_a_tenant_goes_in_the_midst_of_a_rollout(stand: Stand, db_url: str) -> None:
    """With everything that refers to each other, and what is told of it still on its way."""
    tenant = await stand.tenant("acme")
    tenant_id = parse_id("tenant", tenant["id"])
    model = add_model(db_url, Customer(tenant_id, uuid7(), ""))
    canary = add_revision(db_url, model.deployment_id, params={"system_prompt": WORD})
    rollout = add_rollout(db_url, model.deployment_id, canary)
    shown = "rol_" + rollout.hex
    statements: list[tuple[str, list[Any]]] = [
        (
            "insert into adapter_aliases (adapter_id, alias, tenant_id, version_id)"
            " values (%s, 'live', %s, %s)",
            [model.adapter_id, tenant_id, model.adapter_version_id],
        ),
        (
            "update deployments set followed_adapter_id = %s, followed_alias = 'live' where id = %s",
            [model.adapter_id, model.deployment_id],
        ),
        (
            "insert into pins (tenant_id, deployment_id, revision_id, reason, created_by)"
            " values (%s, %s, %s, 'r', 'c')",
            [tenant_id, model.deployment_id, canary],
        ),
        (
            "insert into resident_adapters select tenant_id, id, digest, 'r', 'c'"
            " from adapter_versions where id = %s",
            [model.adapter_version_id],
        ),
        (
            "insert into outbox (topic, dedupe_key, payload) values ('rollout', 'x', %s)",
            [Jsonb({"rollout_id": shown, "deployment": WORD})],
        ),
        (
            "insert into outbox (topic, dedupe_key, payload) values ('rollout', 'y', %s)",
            [Jsonb({"rollout_id": "rol_" + "0" * 32, "deployment": "another"})],
        ),
    ]
    for statement, parameters in statements:
        as_owner(db_url, statement, *parameters)

    answer = await stand.admin.delete(
        f"/admin/v1/tenants/{tenant['id']}", params={"confirm": "acme"}
    )

    assert answer.status_code == 200, answer.text
    removed = answer.json()["removed"]
    assert (removed["pins"], removed["adapter_aliases"], removed["rollouts"]) == (1, 1, 1)
    assert {table: rows(db_url, table, tenant_id) for table in GONE} == {
        table: [] for table in GONE
    }
    told = as_owner(db_url, "select dedupe_key from outbox where topic = 'rollout'")
    assert told == [("y",)]
    # What bills and requests name is there.
    assert len(rows(db_url, "deployment_revisions", tenant_id)) == 2
    assert all(WORD not in row for row in rows(db_url, "deployment_revisions", tenant_id))
