"""Which rates hold for whom."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from loraplex_platform.ids import uuid7
from loraplex_platform.quotas.effective import effective_limits
from loraplex_platform.quotas.records import EffectiveLimits, LimitScopes

from tests.support.limits import change_limit, remove_limit, set_limit
from tests.support.metering import Customer, add_customer

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database


async def limits_of(db: Database, customer: Customer) -> EffectiveLimits:
    scopes = LimitScopes(tenant_id=customer.tenant_id, key_id=customer.key_id)
    async with db.sessions() as session:
        return await effective_limits(session, scopes)


async def test_a_callers_rates_are_its_own_and_the_platforms(db: Database) -> None:
    acme, globex = await add_customer(db, "acme"), await add_customer(db, "globex")
    await set_limit(db, acme, "rpm", "60", None, scope_kind="platform", fail_mode="closed")
    await set_limit(db, acme, "tpm_total", "1000", None, burst=50)
    await set_limit(db, acme, "concurrency", "0", None, scope_kind="key")
    await set_limit(db, globex, "rpm", "7", None)
    await set_limit(db, acme, "requests", "5")  # a quota: not for Redis
    now = int(time.time())
    await set_limit(db, acme, "rpm", "1", None, valid_from=now + 3600)
    await set_limit(db, acme, "tpm_in", "1", None, valid_to=now - 3600)

    found = await limits_of(db, acme)

    assert {
        (rate.scope_kind, rate.metric): (rate.value, rate.burst, rate.fail_mode)
        for rate in found.rates
    } == {
        ("platform", "rpm"): (60, 60, "closed"),
        ("tenant", "tpm_total"): (1000, 50, "local"),
        ("key", "concurrency"): (0, 1, "local"),
    }
    assert {(rate.scope_id, rate.owner_tenant_id) for rate in found.rates} == {
        (None, None),
        (acme.tenant_id, acme.tenant_id),
        (acme.key_id, acme.tenant_id),
    }


async def test_every_change_raises_the_version_of_whom_it_concerns(db: Database) -> None:
    acme, globex = await add_customer(db, "acme"), await add_customer(db, "globex")
    versions = [((await limits_of(db, acme)).version, (await limits_of(db, globex)).version)]

    async def note() -> None:
        versions.append(
            ((await limits_of(db, acme)).version, (await limits_of(db, globex)).version)
        )

    limit_id = await set_limit(db, acme, "rpm", "60", None)
    await note()
    await change_limit(db, limit_id, value="61")
    await note()
    await remove_limit(db, limit_id)
    await note()
    await set_limit(db, acme, "rpm", "60", None, scope_kind="platform")
    await note()

    # A platform limit changes no tenant, of which there may be many: it has a version of its own.
    assert versions == [(1, 1), (2, 1), (3, 1), (4, 1), (4, 1)]
    seen = await limits_of(db, globex)
    assert [rate.scope_kind for rate in seen.rates] == ["platform"]
    assert seen.shared_version == (await limits_of(db, acme)).shared_version == 2


async def test_nobody_has_no_limits(db: Database) -> None:
    async with db.sessions() as session:
        found = await effective_limits(session, LimitScopes(tenant_id=uuid7()))

    assert found == EffectiveLimits(version=0)
