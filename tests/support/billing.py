"""Usage, prices and months for tests of what is billed, written as the owner: also into the past."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
from loraplex_platform.ids import uuid7
from loraplex_platform.settings import IssuerSettings
from psycopg import sql

from tests.support.metering import Customer

STANDARD_BOOK = UUID("00000000-0000-7000-8000-000000000001")
NIL = UUID(int=0)
ISSUER = IssuerSettings(
    issuer_name="Loraplex Hosting Ltd.",
    issuer_address="1 Server Lane|Dublin|Ireland",
    issuer_email="billing@host.example",
    issuer_tax_id="IE1234567X",
    issuer_payment="IBAN IE00 0000 0000 0000",
)

# Settled like any other: the ledger's row and the day's mark are the real function's.
_USAGE = """
with made as (
    insert into requests (id, tenant_id, project_id, key_id, deployment_id, adapter_version_id,
        price_book_id, kind, state, endpoint, model, is_stream, owner, lease_until, admitted_at,
        settled_at, est_prompt_tokens, est_completion_tokens, est_pico, prompt_tokens, cached_tokens,
        completion_tokens)
    values (%(id)s, %(tenant_id)s, %(project_id)s, %(key_id)s, %(deployment_id)s,
        %(adapter_version_id)s, %(book_id)s, %(kind)s, 'settled', 'chat.completions', %(model)s,
        false, 'gw-1', %(at)s, %(at)s, %(settled_at)s, %(prompt)s, %(completion)s, 0, %(prompt)s,
        %(cached)s, case when %(account)s = 'revenue' then %(completion)s else 0 end)
    returning *
), attempt as (
    insert into attempts (request_id, attempt, tenant_id, outcome, source, prompt_tokens,
        cached_tokens, generated, billed, absorbed, discarded_past_stop, discarded_past_abort)
    select id, 1, tenant_id, case when %(account)s = 'revenue' then 'completed' else 'fault' end,
        'observed', %(prompt)s, %(cached)s, %(completion)s,
        case when %(account)s = 'revenue' then %(completion)s else 0 end,
        case when %(account)s = 'revenue' then 0 else %(completion)s end, 0, 0
    from made
)
select loraplex_charge(made::requests, 'usage', 0::smallint, %(account)s, %(prompt)s, %(cached)s,
    %(completion)s)
from made
"""


@dataclass(frozen=True, slots=True)
class Model:
    """A deployment of a tenant with an adapter version behind it."""

    name: str
    deployment_id: UUID
    adapter_id: UUID
    adapter_version_id: UUID
    base_model_id: UUID


def as_owner(url: str, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """One statement, committed; its rows if it has any."""
    with psycopg.connect(url) as connection:
        cursor = connection.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []


def set_zone(url: str, customer: Customer, zone: str) -> None:
    """The tenant's billing time zone, before its first request."""
    as_owner(url, "update tenants set billing_tz = %s where id = %s", zone, customer.tenant_id)


def add_model(url: str, customer: Customer, name: str = "support-bot") -> Model:
    """A deployment with an adapter."""
    model = Model(name, uuid7(), uuid7(), uuid7(), uuid7())
    digest = "sha256:" + model.adapter_version_id.hex * 2
    revision = uuid7()
    with psycopg.connect(url) as owner:
        owner.execute(
            "insert into base_models (id, name, revision, tokenizer_sha256, chat_template_sha256,"
            " architecture) values (%s, %s, 'r', 't', 'c', '{}')",
            [model.base_model_id, f"base-of-{model.base_model_id}"],
        )
        owner.execute(
            "insert into adapters (id, tenant_id, name, base_model_id) values (%s, %s, %s, %s)",
            [model.adapter_id, customer.tenant_id, f"{name}-adapter", model.base_model_id],
        )
        owner.execute(
            "insert into adapter_versions (id, tenant_id, adapter_id, version, digest, status,"
            " size_bytes, rank, target_modules, report)"
            " values (%s, %s, %s, 3, %s, 'ready', 1, 8, '{}', '{}')",
            [model.adapter_version_id, customer.tenant_id, model.adapter_id, digest],
        )
        owner.execute(
            "insert into deployments (id, tenant_id, public_name, base_model_id)"
            " values (%s, %s, %s, %s)",
            [model.deployment_id, customer.tenant_id, name, model.base_model_id],
        )
        owner.execute(
            "insert into deployment_revisions (id, deployment_id, tenant_id, number, base_model_id,"
            " adapter_version_id, adapter_digest, params, sha256)"
            " values (%s, %s, %s, 1, %s, %s, %s, '{}', 'x')",
            [
                revision,
                model.deployment_id,
                customer.tenant_id,
                model.base_model_id,
                model.adapter_version_id,
                digest,
            ],
        )
        owner.execute(
            "update deployments set current_revision_id = %s where id = %s",
            [revision, model.deployment_id],
        )
    return model


def add_usage(
    url: str,
    customer: Customer,
    at: datetime,
    *,
    prompt: int = 10,
    cached: int = 0,
    completion: int = 20,
    account: str = "revenue",
    kind: str = "user",
    model: Model | str = "smollm2-135m",
    book_id: UUID = STANDARD_BOOK,
    project_id: UUID | None = None,
    key_id: UUID | None = None,
    settled_at: datetime | None = None,
) -> UUID:
    """A request that was admitted at `at` and settled."""
    request_id = uuid7(int(at.timestamp() * 1000))
    is_adapter = isinstance(model, Model)
    values = {
        "id": request_id,
        "tenant_id": customer.tenant_id,
        "project_id": project_id,
        "key_id": None if kind == "probe" else key_id or customer.key_id,
        "deployment_id": model.deployment_id if is_adapter else None,
        "adapter_version_id": model.adapter_version_id if is_adapter else None,
        "model": model.name if is_adapter else model,
        "book_id": book_id,
        "kind": kind,
        "at": at,
        "settled_at": settled_at or at,
        "prompt": prompt,
        "cached": cached,
        "completion": completion,
        "account": account,
    }
    with psycopg.connect(url) as owner:
        owner.execute(_USAGE, values)
    return request_id


def add_book(
    url: str,
    name: str,
    begins: datetime,
    prices: Mapping[tuple[str, UUID, str], int],
) -> UUID:
    """A published book with a beginning in the past, which ends the one before it there.

    Only the owner can: the triggers are off meanwhile.
    """
    book_id = uuid7()
    with psycopg.connect(url) as owner:
        owner.execute("set session_replication_role = replica")
        owner.execute(
            "update price_books set effective_to = %s"
            " where status <> 'draft' and effective_from < %s"
            " and (effective_to is null or effective_to > %s)",
            [begins, begins, begins],
        )
        owner.execute(
            "insert into price_books (id, name, status, effective_from, published_at)"
            " values (%s, %s, 'published', %s, %s)",
            [book_id, name, begins, begins],
        )
        for (kind, target, price_class), pico in prices.items():
            owner.execute(
                "insert into price_items (price_book_id, target_kind, target_id, price_class,"
                " price_pico) values (%s, %s, %s, %s, %s)",
                [book_id, kind, target, price_class, pico],
            )
    return book_id


def count(url: str, table: str) -> int:
    """Rows of a table."""
    with psycopg.connect(url) as owner:
        query = sql.SQL("select count(*) from {}").format(sql.Identifier(table))
        row = owner.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def month_ago(months: int, *, day: int = 10, hour: int = 12) -> datetime:
    """A time in a month that is over, however the test's clock stands."""
    month = datetime.now(UTC).replace(day=1)
    for _ in range(months):
        month = (month - timedelta(days=1)).replace(day=1)
    return month.replace(day=day, hour=hour, minute=0, second=0, microsecond=0)


def first_of(at: datetime) -> date:
    """The month, as invoices name it."""
    return at.date().replace(day=1)
