"""Aliases, the deployments that follow them, and retiring what nothing names any more."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.platform.control.stand import Stand, error_of
from tests.platform.control.test_revisions import add_rollout
from tests.support.metering import run_sql


async def make_adapter(stand: Stand, versions: int = 2) -> tuple[str, str, list[str]]:
    """A tenant's path, its adapter's path, and its versions, oldest first."""
    tenant = await stand.tenant("acme")
    ids = [await stand.version(tenant["id"], seed=seed) for seed in range(versions)]
    path = f"/admin/v1/tenants/{tenant['id']}"
    [adapter] = (await stand.admin.get(f"{path}/adapters")).json()["data"]
    return path, f"{path}/adapters/{adapter['id']}", ids


def following(adapter: str, alias: str = "production") -> dict[str, Any]:
    return {"follow": {"adapter_id": adapter.rsplit("/", 1)[-1], "alias": alias}}


async def test_deployments_follow_an_alias_and_its_history_is_kept(stand: Stand) -> None:
    path, adapter, (first, second) = await make_adapter(stand)
    alias = f"{adapter}/aliases/production"
    made = await stand.admin.put(alias, json={"version_id": first})
    assert (made.status_code, made.json()["moved"]) == (200, [])
    params = {"sampling": {"temperature": 0.0}}
    for name in ("support", "sales"):
        deployed = await stand.admin.put(
            f"{path}/deployments/{name}", json=following(adapter) | {"params": params}
        )
        assert deployed.json()["revision"]["version_id"] == first, deployed.text
    etag = (await stand.admin.get(alias)).headers["etag"]

    moved = await stand.admin.put(alias, json={"version_id": second}, headers={"if-match": etag})

    assert sorted(moved.json()["moved"]) == ["sales", "support"]
    for name in ("support", "sales"):
        shown = (await stand.admin.get(f"{path}/deployments/{name}")).json()
        assert (shown["revision"]["version_id"], shown["revision"]["params"]) == (second, params)
        assert shown["follow"] == following(adapter)["follow"]
    late = await stand.admin.put(alias, json={"version_id": first}, headers={"if-match": etag})
    assert second in error_of(late, 409, "version_conflict")["message"]
    back = await stand.admin.put(alias, json={"version_id": first})
    assert sorted(back.json()["moved"]) == ["sales", "support"]
    revisions = (await stand.admin.get(f"{path}/deployments/sales/revisions")).json()["data"]
    assert [item["number"] for item in revisions] == [2, 1]  # back is the first one again

    blocked = error_of(await stand.admin.delete(alias), 409, "in_use")
    assert "sales" in blocked["message"]
    for name in ("support", "sales"):
        await stand.admin.put(f"{path}/deployments/{name}", json={"version_id": None})
    assert (await stand.admin.delete(alias)).status_code == 204
    error_of(await stand.admin.get(alias), 404, "not_found")
    page = (await stand.admin.get(f"{alias}/events", params={"limit": 3})).json()
    assert [item["version_id"] for item in page["data"]] == [None, first, second]
    rest = await stand.admin.get(f"{alias}/events", params={"after": page["last_id"]})
    assert [item["version_id"] for item in rest.json()["data"]] == [first]


async def test_an_alias_has_a_form_and_names_its_own_adapters_versions(stand: Stand) -> None:
    path, adapter, (first,) = await make_adapter(stand, versions=1)
    other = await stand.version(path.rsplit("/", 1)[-1], name="other", seed=7)

    for name in ("-x", "Production", "a b", "é"):
        refused = await stand.admin.put(f"{adapter}/aliases/{name}", json={"version_id": first})
        assert error_of(refused, 400, "invalid_request")["param"] == "alias"
    refused = await stand.admin.put(f"{adapter}/aliases/ok", json={"version_id": other})
    assert error_of(refused, 400, "invalid_request")["param"] == "version_id"
    refused = await stand.admin.put(f"{path}/deployments/x", json=following(adapter, "none"))
    assert error_of(refused, 404, "not_found")["param"] == "follow"
    for name in ("b", "a"):
        await stand.admin.put(f"{adapter}/aliases/{name}", json={"version_id": first})
    page = (await stand.admin.get(f"{adapter}/aliases", params={"limit": 1})).json()
    assert ([item["alias"] for item in page["data"]], page["has_more"]) == (["a"], True)


async def test_nothing_moves_while_a_rollout_of_a_follower_is_on_its_way(stand: Stand) -> None:
    path, adapter, (first, second) = await make_adapter(stand)
    alias = f"{adapter}/aliases/production"
    await stand.admin.put(alias, json={"version_id": first})
    for name in ("support", "sales"):
        await stand.admin.put(f"{path}/deployments/{name}", json=following(adapter))
    shown = (await stand.admin.get(f"{path}/deployments/support")).json()
    canary = (
        await stand.admin.post(f"{path}/deployments/support/revisions", json={"version_id": None})
    ).json()
    await add_rollout(stand.db, shown["id"], shown["revision"]["id"], canary["id"], "shadow")

    error_of(await stand.admin.put(alias, json={"version_id": second}), 409, "rollout_active")

    assert (await stand.admin.get(alias)).json()["version_id"] == first
    sales = (await stand.admin.get(f"{path}/deployments/sales")).json()
    assert sales["revision"]["version_id"] == first


async def test_moves_and_deploys_at_once_end_in_one_order(stand: Stand) -> None:
    path, adapter, versions = await make_adapter(stand)
    alias = f"{adapter}/aliases/production"
    await stand.admin.put(alias, json={"version_id": versions[0]})
    await stand.admin.put(f"{path}/deployments/support", json=following(adapter))

    async def move(n: int) -> int:
        answer = await stand.admin.put(alias, json={"version_id": versions[n % 2]})
        return answer.status_code

    async def deploy(n: int) -> int:
        body = following(adapter) | {"params": {"sampling": {"top_k": 1 + n % 2}}}
        return (await stand.admin.put(f"{path}/deployments/support", json=body)).status_code

    statuses = await asyncio.gather(*(f(n) for n in range(4) for f in (move, deploy)))

    assert set(statuses) == {200}
    named = (await stand.admin.get(alias)).json()["version_id"]
    shown = (await stand.admin.get(f"{path}/deployments/support")).json()
    assert shown["revision"]["version_id"] == named


async def test_a_version_is_retired_when_nothing_names_it_and_not_before(stand: Stand) -> None:
    path, adapter, (first, second) = await make_adapter(stand)
    version = f"{adapter}/versions/{first}"
    support = f"{path}/deployments/support"
    await stand.admin.put(f"{adapter}/aliases/production", json={"version_id": first})
    deployed = (await stand.admin.put(support, json={"version_id": first})).json()
    pin = {"revision_id": deployed["revision"]["id"], "reason": "audit"}
    assert (await stand.admin.put(f"{support}/pin", json=pin)).status_code == 200
    await stand.admin.put(f"/admin/v1/fleet/residency/{first}", json={"reason": "launch"})

    uses = (await stand.admin.get(f"{version}/uses")).json()["uses"]
    refusal = error_of(await stand.admin.post(f"{version}/retire"), 409, "in_use")

    assert [use["kind"] for use in uses] == ["deployment", "pin", "alias", "residency"]
    for part in ("deployment support", "pin of support", "alias production", "launch"):
        assert part in refusal["message"]

    await stand.admin.put(support, json={"version_id": second})
    await stand.admin.delete(f"{support}/pin")
    await stand.admin.put(f"{adapter}/aliases/production", json={"version_id": second})
    await stand.admin.delete(f"/admin/v1/fleet/residency/{first}")
    for _ in range(2):
        retired = await stand.admin.post(f"{version}/retire")
        assert (retired.status_code, retired.json()["status"]) == (200, "retired")
    for refused in (
        await stand.admin.put(support, json={"version_id": first}),
        await stand.admin.put(f"{adapter}/aliases/production", json={"version_id": first}),
        await stand.admin.put(f"{support}/pin", json=pin),
        await stand.admin.put(f"/admin/v1/fleet/residency/{first}", json={"reason": "x"}),
    ):
        assert "retired" in error_of(refused, 409, "conflict")["message"]
    assert (await stand.admin.post(f"{version}/unretire")).json()["status"] == "ready"
    assert (await stand.admin.put(support, json={"version_id": first})).status_code == 200


async def test_a_draft_rollout_and_a_running_request_name_a_version_too(stand: Stand) -> None:
    path, adapter, (first, _) = await make_adapter(stand)
    support = f"{path}/deployments/support"
    deployed = (await stand.admin.put(support, json={"version_id": None})).json()
    canary = await stand.admin.post(f"{support}/revisions", json={"version_id": first})
    sides = (deployed["id"], deployed["revision"]["id"], canary.json()["id"])
    rollout = await add_rollout(stand.db, *sides, "draft")

    refusal = await stand.admin.post(f"{adapter}/versions/{first}/retire")

    assert rollout in error_of(refusal, 409, "in_use")["message"]
    await run_sql(stand.db, "delete from rollouts")
    assert (await stand.admin.post(f"{adapter}/versions/{first}/retire")).status_code == 200


async def test_retiring_and_deploying_at_once_never_leaves_a_retired_version_deployed(
    stand: Stand,
) -> None:
    path, adapter, versions = await make_adapter(stand, versions=3)
    for number, version_id in enumerate(versions):
        name = f"{path}/deployments/race-{number}"

        deployed, retired = await asyncio.gather(
            stand.admin.put(name, json={"version_id": version_id}),
            stand.admin.post(f"{adapter}/versions/{version_id}/retire"),
        )

        assert sorted((deployed.status_code, retired.status_code)) == [200, 409]
