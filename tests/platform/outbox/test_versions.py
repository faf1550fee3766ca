"""Whatever changes a key or a tenant, the database itself raises the version and leaves the news."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from tests.support.metering import Customer, add_customer, run_sql

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database


async def news(db: Database) -> list[dict[str, Any]]:
    async with db.sessions() as session:
        statement = text("select payload from outbox where topic = 'version' order by id")
        return list((await session.scalars(statement)).all())


async def version_of(db: Database, customer: Customer) -> tuple[int, int]:
    statement = text(
        "select version, row_version from api_keys join tenants on tenants.id = tenant_id"
        " where api_keys.id = :id"
    )
    async with db.sessions() as session:
        row = (await session.execute(statement, {"id": customer.key_id})).one()
    return row[0], row[1]


@pytest.mark.parametrize(
    "change",
    [
        "status = 'revoked', revoked_at = now()",
        "expires_at = now()",
        "scopes = '{models.read}'",
        "name = 'another'",
        "status = 'revoked', revoked_at = now(), version = version + 1",
    ],
)
async def test_a_changed_key_has_a_new_version_and_is_news(db: Database, change: str) -> None:
    customer = await add_customer(db)
    before, tenant_before = await version_of(db, customer)

    await run_sql(db, f"update api_keys set {change}")

    assert await version_of(db, customer) == (before + 1, tenant_before)
    assert await news(db) == [
        {
            "tenant_id": str(customer.tenant_id),
            "key_id": str(customer.key_id),
            "version": before + 1,
        }
    ]


@pytest.mark.parametrize("change", ["last_used_at = now()", "name = name"])
async def test_what_no_gateway_remembers_is_no_news(db: Database, change: str) -> None:
    customer = await add_customer(db)
    before = await version_of(db, customer)

    await run_sql(db, f"update api_keys set {change}")

    assert await version_of(db, customer) == before
    assert await news(db) == []


@pytest.mark.parametrize("change", ["status = 'suspended'", "row_version = row_version + 1"])
async def test_a_changed_tenant_is_news(db: Database, change: str) -> None:
    customer = await add_customer(db)
    _, before = await version_of(db, customer)

    await run_sql(db, f"update tenants set {change}")

    assert (await version_of(db, customer))[1] == before + 1
    (payload,) = await news(db)
    assert payload == {
        "tenant_id": str(customer.tenant_id),
        "version": before + 1,
        "limits_version": 1,
    }


async def test_changed_limits_are_news_and_no_new_version_of_the_tenant(db: Database) -> None:
    customer = await add_customer(db)
    _, before = await version_of(db, customer)

    await run_sql(db, "update tenants set limits_version = limits_version + 1")

    assert (await version_of(db, customer))[1] == before
    assert [payload["limits_version"] for payload in await news(db)] == [2]
