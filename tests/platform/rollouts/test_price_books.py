"""By which book is billed, the operator chooses: not by way of an old revision either."""

from __future__ import annotations

from typing import Any

import pytest

from tests.platform.control.people import member
from tests.platform.control.stand import error_of
from tests.platform.rollouts.stand import MODEL, NO_GATES, World, canary


def deployment_of(world: World) -> str:
    return f"/admin/v1/tenants/{world.tenant}/deployments/{MODEL}"


async def deploy(world: World, book: str | None) -> dict[str, Any]:
    """The operator has what answers billed by that book."""
    version = world.revisions[1]["version_id"]
    body = {"version_id": version, "price_book_id": book}
    answer = await world.stand.admin.put(deployment_of(world), json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["revision"]["price_book_id"] == book
    return dict(answer.json()["revision"])


async def published_book(world: World) -> str:
    books = (await world.stand.admin.get("/admin/v1/price-books")).json()["data"]
    [book] = [one["id"] for one in books if one["status"] == "published"]
    return str(book)


async def test_a_tenant_rolls_out_no_other_book(world: World) -> None:
    book = await published_book(world)
    old = await deploy(world, book)
    await deploy(world, None)
    developer = await member(world.stand, world.tenant, "developer", "dev@acme.example")
    body = {"deployment": MODEL, "gate": NO_GATES, "steps": [canary(500)], "canary": old["number"]}

    refused = error_of(await developer.post(world.path, json=body), 403, "permission_denied")
    assert refused["param"] == "canary"
    assert "only the operator chooses it" in refused["message"]
    draft = await world.call("POST", status=201, client=developer, json=body | {"canary": 1})
    changed = await developer.patch(f"{world.path}/{draft['id']}", json={"canary": old["number"]})
    assert error_of(changed, 403, "permission_denied")["param"] == "canary"

    # The operator's own: nobody else takes a step of it that chooses the book.
    await world.act(draft["id"], "abort")
    made = await world.made(canary=old["number"], gate=NO_GATES, steps=[canary(500, hold_s=3600)])
    assert made["changes"] == ["price_book"]
    path = f"{world.path}/{made['id']}"
    error_of(await developer.post(f"{path}/start"), 403, "permission_denied")
    await world.act(made["id"], "start")
    await world.look()
    error_of(await developer.post(f"{path}/promote"), 403, "permission_denied")
    await world.act(made["id"], "promote")
    error_of(await developer.post(f"{path}/rollback"), 403, "permission_denied")
    assert (await world.act(made["id"], "rollback"))["state"] == "rolled_back"


async def test_what_the_operator_started_the_worker_promotes(world: World) -> None:
    old = await deploy(world, await published_book(world))
    await deploy(world, None)
    await world.stepping(canary=old["number"], gate=NO_GATES, steps=[canary(500)])
    await world.look()
    assert await world.current_number() == old["number"]


@pytest.mark.parametrize("is_needed", [False, True])
async def test_a_tenant_pins_to_no_other_book(world: World, is_needed: bool) -> None:
    book = await published_book(world)
    old = await deploy(world, book)
    now = await deploy(world, None)
    if is_needed:  # the other way round: to the book in force, when another one was chosen
        old, now = now, await deploy(world, book)
    developer = await member(world.stand, world.tenant, "developer", "dev@acme.example")
    path = f"{deployment_of(world)}/pin"

    refused = await developer.put(path, json={"revision_id": old["id"], "reason": "cheaper"})
    assert error_of(refused, 403, "permission_denied")["param"] == "revision_id"
    assert "only the operator chooses it" in refused.json()["error"]["message"]
    error_of(await developer.get(path), 404, "not_found")
    body = {"revision_id": now["id"], "reason": "audit"}
    assert (await developer.put(path, json=body)).status_code == 200

    # Set elsewhere, the pin stays what it was, but is not made longer; the operator may do as it likes.
    await deploy(world, old["price_book_id"])
    error_of(await developer.put(path, json=body | {"until": 2**31}), 403, "permission_denied")
    assert (await developer.get(path)).json()["revision_id"] == now["id"]
    operators = await world.stand.admin.put(path, json=body | {"until": 2**31})
    assert operators.status_code == 200, operators.text
    assert (await developer.delete(path)).status_code == 204
