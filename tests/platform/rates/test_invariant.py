"""I6 and what it compares: places in Redis, running requests in Postgres."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from loraplex_platform.ids import format_id, uuid7
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.invariants import Check
from loraplex_platform.rates.invariant import SLACK_S, checks_of_redis, places_check
from loraplex_platform.rates.queries import Place, running_places

from tests.platform.rates.stand import World, claim, limit, never
from tests.support.metering import add_customer, reservation, run_sql

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database
    from loraplex_platform.metering.records import Reservation
    from loraplex_platform.rates.admission import Claim

    from tests.support.metering import Customer


def claim_of(wanted: Reservation) -> Claim:
    one = limit("concurrency", 5, scope_id=wanted.tenant_id, owner_tenant_id=wanted.tenant_id)
    return claim(one, request_id=wanted.request_id, tenant_id=wanted.tenant_id)


async def look(db: Database, world: World) -> Check:
    async with db.sessions() as session:
        return await places_check(world.url)(session)


async def reserved(db: Database, customer: Customer, **changes: Any) -> Reservation:
    wanted = reservation(customer, **changes)
    await metering.reserve(db.sessions, wanted)
    return wanted


async def test_places_of_running_requests_are_as_they_should_be(db: Database, world: World) -> None:
    gateway = world.gateway()
    wanted = await reserved(db, await add_customer(db))
    await gateway.admit(claim_of(wanted), never)
    await gateway.admit(claim(limit("concurrency", 1)), never)  # about to be reserved

    found = await look(db, world)

    assert (found.ok, found.detail, found.code) == (True, "2 requests hold places", "I6")


async def test_a_place_that_outlives_its_request_is_found(db: Database, world: World) -> None:
    gateway = world.gateway()
    customer = await add_customer(db)
    wanted = await reserved(db, customer)
    await gateway.admit(claim_of(wanted), never)
    await metering.void(db.sessions, wanted.request_id, 1, voided_by="gw-1")
    assert (await look(db, world)).ok, "it may just be ending"

    await run_sql(
        db,
        "update requests set settled_at = now() - make_interval(secs => :age_s)",
        age_s=SLACK_S + 1,
    )
    found = await look(db, world)

    assert not found.ok
    assert found.offenders == [format_id("request", wanted.request_id)]


async def test_a_place_of_a_request_that_never_was_is_found(db: Database, world: World) -> None:
    old = uuid7(int((time.time() - SLACK_S - 10) * 1000))
    await world.gateway().admit(claim(limit("concurrency", 1), request_id=old), never)

    found = await look(db, world)

    assert (found.ok, found.offenders) == (False, [format_id("request", old)])


async def test_a_redis_that_is_away_breaks_no_books(db: Database) -> None:
    async with db.sessions() as session:
        found = await places_check("unix:///nowhere/redis.sock")(session)

    assert found.ok
    assert "not looked at" in found.detail
    assert checks_of_redis(None) == []


async def test_what_runs_counts_in_all_its_scopes(db: Database) -> None:
    customer, stranger = await add_customer(db), await add_customer(db, "globex")
    mine = await reserved(db, customer)
    theirs = await reserved(db, stranger)
    over = await reserved(db, customer)
    await metering.void(db.sessions, over.request_id, 1, voided_by="gw-1")

    async with db.sessions() as session:
        own = await running_places(session, customer.tenant_id)
        common = await running_places(session, None)

    assert set(own) == {
        Place(mine.request_id, "tenant", customer.tenant_id),
        Place(mine.request_id, "key", customer.key_id),
    }
    assert set(common) == {
        Place(mine.request_id, "platform", None),
        Place(theirs.request_id, "platform", None),
    }
