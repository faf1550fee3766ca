"""The request log over HTTP: what a rollout did to each request, and finding those of one revision or side."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from loraplex_platform.ids import format_id, parse_id, uuid7
from loraplex_platform.metering import service

from tests.platform.control.people import member
from tests.platform.control.stand import error_of
from tests.support.billing import add_model
from tests.support.metering import Customer, reservation, settlement
from tests.support.revisions import add_revision, add_rollout

if TYPE_CHECKING:
    from tests.platform.control.stand import Stand

PATH = "/admin/v1/requests"


async def customer_of(stand: Stand, slug: str) -> Customer:
    tenant = await stand.tenant(slug)
    made = await stand.admin.post(f"/admin/v1/tenants/{tenant['id']}/keys", json={"name": "k"})
    return Customer(
        parse_id("tenant", tenant["id"]),
        parse_id("api_key", made.json()["id"]),
        made.json()["secret"],
    )


async def used(stand: Stand, wanted: Any, **ending: Any) -> str:
    await service.reserve(stand.db.sessions, wanted)
    closing = settlement(wanted.request_id, **{"kind": wanted.kind} | ending)
    await service.settle(stand.db.sessions, closing)
    return format_id("request", wanted.request_id)


async def ids(client: Any, **filters: Any) -> list[str]:
    answer = await client.get(PATH, params=filters)
    assert answer.status_code == 200, answer.text
    return [row["id"] for row in answer.json()["data"]]


async def test_what_a_rollout_did_to_a_request_is_in_the_log_and_finds_it(
    stand: Stand, db_url: str
) -> None:
    acme, globex = await customer_of(stand, "acme"), await customer_of(stand, "globex")
    model = add_model(db_url, acme)
    canary = add_revision(db_url, model.deployment_id)
    rollout = add_rollout(db_url, model.deployment_id, canary)
    side: dict[str, Any] = {
        "deployment_id": model.deployment_id,
        "adapter_version_id": model.adapter_version_id,
        "rollout_id": rollout,
        "rollout_step": 1,
    }
    first = await used(
        stand,
        reservation(
            acme,
            revision_id=canary,
            arm="canary",
            subject_key=-(2**62) - 1,
            sampling={"temperature": 0.25, "seed": 2**40},
            **side,
        ),
        fingerprint="fp-1",
        itl_mean_ms=3.25,
        itl_p95_ms=8.5,
    )
    shadow = await used(
        stand,
        reservation(
            acme,
            kind="shadow",
            key_id=None,
            revision_id=canary,
            arm="shadow",
            shadow_of=parse_id("request", first),
            **side,
        ),
    )
    stable = await used(stand, reservation(acme, arm="stable", **side))
    plain = await used(stand, reservation(globex))

    shown = (await stand.admin.get(PATH, params={"arm": "canary"})).json()["data"]

    assert len(shown) == 1
    expected = {
        "id": first,
        "kind": "user",
        "rollout_id": format_id("rollout", rollout),
        "rollout_step": 1,
        "arm": "canary",
        # More than JSON's numbers hold.
        "subject_key": str(-(2**62) - 1),
        "shadow_of": None,
        "sampling": {"temperature": 0.25, "seed": 2**40},
        "fingerprint": "fp-1",
        "itl_mean_ms": 3.25,
        "itl_p95_ms": 8.5,
        "stable_logprob": None,
        "revision_id": format_id("deployment_revision", canary),
    }
    assert {name: shown[0][name] for name in expected} == expected
    by_revision = {"revision_id": format_id("deployment_revision", canary)}
    by_rollout = {"rollout_id": format_id("rollout", rollout)}
    assert await ids(stand.admin) == [plain, stable, shadow, first]
    assert await ids(stand.admin, **by_revision) == [shadow, first]
    assert await ids(stand.admin, **by_rollout) == [stable, shadow, first]
    assert await ids(stand.admin, **by_rollout, arm="stable") == [stable]
    assert await ids(stand.admin, **by_revision, limit=1) == [shadow]
    assert await ids(stand.admin, **by_revision, limit=1, after=shadow) == [first]
    assert await ids(stand.admin, revision_id=format_id("deployment_revision", uuid7())) == []
    # A member finds its own tenant's, whatever it filters by.
    theirs = await member(stand, format_id("tenant", globex.tenant_id), "viewer", "g@x.example")
    assert await ids(theirs) == [plain]
    assert await ids(theirs, **by_revision) == await ids(theirs, **by_rollout) == []
    for name, value in (("revision_id", "rev_1"), ("rollout_id", first), ("arm", "left")):
        error = error_of(await stand.admin.get(PATH, params={name: value}), 400, "invalid_request")
        assert error["param"] == name


async def test_a_report_by_revision_covers_hours_and_says_so(stand: Stand, db_url: str) -> None:
    acme = await customer_of(stand, "acme")
    model = add_model(db_url, acme)
    revision = add_revision(db_url, model.deployment_id)
    for _ in range(2):
        await used(stand, reservation(acme, revision_id=revision))
    await used(stand, reservation(acme))
    shown = format_id("deployment_revision", revision)
    hours: dict[str, Any] = {"bucket_width": "1h", "group_by[]": "revision_id"}
    hours["start_time"] = int(time.time()) - 7200

    answer = await stand.admin.get("/admin/v1/usage", params=hours)
    only = await stand.admin.get("/admin/v1/usage", params=hours | {"revision_id": shown})
    days = await stand.admin.get("/admin/v1/usage", params=hours | {"bucket_width": "1d"})

    assert answer.status_code == 200, answer.text
    found: dict[Any, int] = {}
    for row in answer.json()["data"]:
        found[row["revision_id"]] = found.get(row["revision_id"], 0) + row["requests"]
    assert found == {shown: 2, None: 1}
    assert sum(row["requests"] for row in only.json()["data"]) == 2
    error = error_of(days, 400, "invalid_request")
    assert "at most 8 days" in error["message"]
