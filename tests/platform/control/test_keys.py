"""The life of API keys: made, changed, rotated, switched off, revoked."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from loraplex_platform.errors import (
    DisabledKeyError,
    ExpiredKeyError,
    InvalidApiKeyError,
    RevokedKeyError,
)
from loraplex_platform.ids import format_id, uuid7
from loraplex_platform.tenancy.authentication import authenticate
from loraplex_platform.tenancy.key_uses import EVERY_S, KeyUses

from tests.platform.control.stand import Stand, error_of
from tests.support.metering import PEPPER, run_sql


async def make(stand: Stand, slug: str = "acme", **fields: Any) -> tuple[str, dict[str, Any]]:
    """The path of a tenant's keys, and a new one."""
    tenant = await stand.tenant(slug)
    path = f"/admin/v1/tenants/{tenant['id']}/keys"
    made = await stand.admin.post(path, json={"name": "production", **fields})
    assert made.status_code == 201, made.text
    return path, made.json()


async def test_a_key_works_until_it_is_revoked_and_its_secret_is_shown_once(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/keys"

    made = await stand.admin.post(path, json={"name": "production"})

    assert made.status_code == 201
    key = made.json()
    secret = key.pop("secret")
    assert key["redacted"] == f"lpx_sk_…{secret[-4:]}"
    assert (key["status"], key["revoked_at"], key["expires_at"]) == ("active", None, None)
    assert (await stand.admin.get(path)).json()["data"] == [key]
    holder = await authenticate(stand.db.sessions, PEPPER, secret)
    assert holder.tenant_slug == "acme"

    for _ in range(2):
        assert (await stand.admin.delete(f"{path}/{key['id']}")).status_code == 204
    with pytest.raises(RevokedKeyError):
        await authenticate(stand.db.sessions, PEPPER, secret)
    [listed] = (await stand.admin.get(path)).json()["data"]
    assert listed["status"] == "revoked"
    assert listed["revoked_at"] >= listed["created_at"]


async def test_a_key_may_expire_but_not_in_the_past(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/keys"

    soon = int(time.time()) + 3600
    made = await stand.admin.post(path, json={"name": "a", "expires_at": soon})

    assert made.json()["expires_at"] == soon
    for bad in (int(time.time()) - 1, 0, -1, 10**15, 1.5, "soon", True):
        refused = await stand.admin.post(path, json={"name": "a", "expires_at": bad})
        assert error_of(refused, 400, "invalid_request")["param"] == "expires_at"


async def test_a_stored_mac_is_no_credential(stand: Stand) -> None:
    from loraplex_platform.db import ApiKeySecret
    from sqlalchemy import select

    tenant = await stand.tenant("acme")
    await stand.admin.post(f"/admin/v1/tenants/{tenant['id']}/keys", json={"name": "a"})
    async with stand.db.sessions() as session:
        mac = (await session.scalars(select(ApiKeySecret.mac))).one()

    with pytest.raises(InvalidApiKeyError):
        await authenticate(stand.db.sessions, PEPPER, mac.hex())
    assert (await stand.client(mac.hex()).get("/admin/v1/tenants")).status_code == 401


async def test_a_key_that_says_nothing_more_may_everything_from_everywhere(stand: Stand) -> None:
    path, key = await make(stand)

    assert key["scopes"] == ["inference", "models.read"]
    assert (key["ip_allow"], key["grants"], key["project_id"], key["owner_id"]) == ([],) + (
        None,
    ) * 3
    assert (key["created_by"], key["version"]) == ("admin_key", 1)
    holder = await authenticate(stand.db.sessions, PEPPER, key["secret"])
    assert holder.scopes == {"inference", "models.read"}
    assert (holder.grants, holder.networks, holder.valid_until) == (None, (), None)
    one = await stand.admin.get(f"{path}/{key['id']}")
    assert one.headers["etag"] == '"1"'
    assert one.json() == {name: value for name, value in key.items() if name != "secret"}


async def test_a_rotated_key_keeps_its_id_and_the_old_secret_its_grace(stand: Stand) -> None:
    path, key = await make(stand)

    rotated = (await stand.admin.post(f"{path}/{key['id']}/rotate", json={"grace_s": 600})).json()

    assert (rotated["id"], rotated["public_id"]) == (key["id"], key["public_id"])
    assert rotated["secret"] != key["secret"]
    assert rotated["redacted"] == f"lpx_sk_…{rotated['secret'][-4:]}"
    old = await authenticate(stand.db.sessions, PEPPER, key["secret"])
    new = await authenticate(stand.db.sessions, PEPPER, rotated["secret"])
    assert old.key_id == new.key_id
    assert old.key_version == new.key_version == 2
    assert new.valid_until is None
    assert old.valid_until is not None
    assert abs(old.valid_until.timestamp() - time.time() - 600) < 60

    await run_sql(
        stand.db,
        "update api_key_secrets set valid_until = now() - interval '1 s' where valid_until is not null",
    )
    with pytest.raises(ExpiredKeyError, match="replaced"):
        await authenticate(stand.db.sessions, PEPPER, key["secret"])
    await authenticate(stand.db.sessions, PEPPER, rotated["secret"])


async def test_a_rotation_without_grace_ends_the_old_secret_at_once(stand: Stand) -> None:
    path, key = await make(stand)

    rotated = (await stand.admin.post(f"{path}/{key['id']}/rotate", json={"grace_s": 0})).json()

    with pytest.raises(ExpiredKeyError):
        await authenticate(stand.db.sessions, PEPPER, key["secret"])
    await authenticate(stand.db.sessions, PEPPER, rotated["secret"])


async def test_at_most_two_secrets_of_a_key_work_whatever_is_rotated_at_once(stand: Stand) -> None:
    path, key = await make(stand)

    answers = await asyncio.gather(
        *(stand.admin.post(f"{path}/{key['id']}/rotate", json={}) for _ in range(5))
    )

    secrets = [key["secret"], *(answer.json()["secret"] for answer in answers)]
    assert len(set(secrets)) == 6
    working = 0
    for secret in secrets:
        try:
            await authenticate(stand.db.sessions, PEPPER, secret)
        except ExpiredKeyError:
            continue
        working += 1
    assert working == 2


async def test_a_rotation_is_replayed_without_the_secret(stand: Stand) -> None:
    path, key = await make(stand)
    once = {"idempotency-key": "rotation-1"}

    first = await stand.admin.post(f"{path}/{key['id']}/rotate", json={}, headers=once)
    again = await stand.admin.post(f"{path}/{key['id']}/rotate", json={}, headers=once)

    assert again.json() == first.json() | {"secret": None}
    assert (await stand.admin.get(f"{path}/{key['id']}")).json()["version"] == 2


async def test_bad_rotations_name_the_field(stand: Stand) -> None:
    path, key = await make(stand)

    for bad in (-1, 31 * 86_400, 1.5, "soon", True, None):
        refused = await stand.admin.post(f"{path}/{key['id']}/rotate", json={"grace_s": bad})
        assert error_of(refused, 400, "invalid_request")["param"] == "grace_s"
    await run_sql(stand.db, "update api_keys set expires_at = now() - interval '1 s'")
    refused = await stand.admin.post(f"{path}/{key['id']}/rotate", json={})
    assert "expires_at" in error_of(refused, 409, "conflict")["message"]


async def test_a_disabled_key_is_refused_until_it_is_enabled(stand: Stand) -> None:
    path, key = await make(stand)

    disabled = await stand.admin.patch(f"{path}/{key['id']}", json={"status": "disabled"})

    assert (disabled.json()["status"], disabled.json()["version"]) == ("disabled", 2)
    with pytest.raises(DisabledKeyError) as refused:
        await authenticate(stand.db.sessions, PEPPER, key["secret"])
    assert (refused.value.status, refused.value.error_code) == (401, "disabled_api_key")
    active = await stand.admin.get(path, params={"status": "active"})
    assert active.json()["data"] == []
    await stand.admin.patch(f"{path}/{key['id']}", json={"status": "active"})
    assert (await authenticate(stand.db.sessions, PEPPER, key["secret"])).key_version == 3


async def test_every_change_raises_the_version_once_and_is_announced(
    stand: Stand, db_url: str
) -> None:
    path, key = await make(stand)
    project = (
        await stand.admin.post(path.replace("/keys", "/projects"), json={"name": "p"})
    ).json()
    soon = int(time.time()) + 3600
    base = (await stand.admin.get("/admin/v1/base-models")).json()["data"][0]
    changes: list[dict[str, Any]] = [
        {"name": "other"},
        {"expires_at": soon},
        {"project_id": project["id"]},
        {"scopes": ["models.read"]},
        {"ip_allow": ["203.0.113.0/24", "2001:db8::/32", "203.0.113.0/24"]},
        {"grants": [{"kind": "base", "id": base["id"]}] * 2},
        {"status": "disabled"},
        {"grants": None, "project_id": None, "expires_at": None, "ip_allow": []},
    ]

    for version, change in enumerate(changes, start=2):
        for _ in range(2):  # the second time nothing differs
            changed = await stand.admin.patch(f"{path}/{key['id']}", json=change)
            assert changed.json()["version"] == version, changed.text
            assert changed.headers["etag"] == f'"{version}"'

    shown = (await stand.admin.get(f"{path}/{key['id']}")).json()
    assert shown["name"] == "other"
    assert shown["scopes"] == ["models.read"]
    assert (shown["ip_allow"], shown["grants"]) == ([], None)
    import psycopg

    with psycopg.connect(db_url) as connection:
        rows = connection.execute(
            "select payload ->> 'version' from outbox where payload ? 'key_id' order by id"
        ).fetchall()
    assert [int(version) for (version,) in rows] == list(range(2, len(changes) + 2))


async def test_what_a_key_may_call_must_be_the_tenants(stand: Stand) -> None:
    path, key = await make(stand)
    mine = path.removesuffix("/keys")
    theirs = f"/admin/v1/tenants/{(await stand.tenant('globex'))['id']}"
    ids = {}
    for tenant in (mine, theirs):
        tenant_id = tenant.rpartition("/")[2]
        version_id = await stand.version(tenant_id)
        deployed = await stand.admin.put(
            f"{tenant}/deployments/capitals", json={"version_id": version_id}
        )
        adapters = (await stand.admin.get(f"{tenant}/adapters")).json()["data"]
        ids[tenant] = (deployed.json()["id"], adapters[0]["id"])
    deployment, adapter = ids[mine]

    grants = [{"kind": "adapter", "id": adapter}, {"kind": "deployment", "id": deployment}]
    changed = await stand.admin.patch(f"{path}/{key['id']}", json={"grants": grants[::-1]})

    assert changed.json()["grants"] == grants
    holder = await authenticate(stand.db.sessions, PEPPER, key["secret"])
    assert holder.grants is not None
    assert [format_id("adapter", i) for i in holder.grants.adapters] == [adapter]
    assert [format_id("deployment", i) for i in holder.grants.deployments] == [deployment]
    foreign = [("deployment", ids[theirs][0]), ("adapter", ids[theirs][1])]
    unknown = [
        ("deployment", format_id("deployment", uuid7())),
        ("adapter", format_id("adapter", uuid7())),
        ("base", format_id("base_model", uuid7())),
        ("adapter", deployment),
        ("deployment", "dep_x"),
    ]
    for kind, target_id in foreign + unknown:
        for method, where in (("PATCH", f"{path}/{key['id']}"), ("POST", path)):
            body = {"name": "k", "grants": [{"kind": kind, "id": target_id}]}
            refused = await stand.admin.request(method, where, json=body)
            error = error_of(refused, 404, "not_found")
            assert error["param"] == "grants.0.id"
            assert error["message"] == f"grants.0.id: the tenant has no such {kind}."
    for bad in ([], "all", [{"kind": "adapter"}], [{"kind": "x", "id": adapter}]):
        refused = await stand.admin.patch(f"{path}/{key['id']}", json={"grants": bad})
        assert error_of(refused, 400, "invalid_request")["param"].startswith("grants")
    assert (await stand.admin.get(f"{path}/{key['id']}")).json()["version"] == 2


async def test_networks_and_scopes_are_checked(stand: Stand) -> None:
    path, key = await make(stand, ip_allow=["192.0.2.7", "2001:db8::1"], scopes=["inference"])

    assert key["ip_allow"] == ["192.0.2.7/32", "2001:db8::1/128"]
    assert key["scopes"] == ["inference"]
    for bad in (["192.0.2.7/24"], ["::/129"], ["example.com"], [""], [None], "192.0.2.0/24"):
        refused = await stand.admin.patch(f"{path}/{key['id']}", json={"ip_allow": bad})
        assert error_of(refused, 400, "invalid_request")["param"].startswith("ip_allow")
    for bad in ([], ["admin"], ["inference", "*"], "inference", None):
        refused = await stand.admin.patch(f"{path}/{key['id']}", json={"scopes": bad})
        assert error_of(refused, 400, "invalid_request")["param"].startswith("scopes")


async def test_nothing_else_of_a_key_can_be_set(stand: Stand) -> None:
    path, key = await make(stand)

    for field, value in (
        ("tenant_id", "ten_x"),
        ("public_id", "x"),
        ("version", 9),
        ("last4", "x"),
        ("created_by", "me"),
        ("revoked_at", None),
        ("secret", "x"),
        ("mac", "x"),
    ):
        refused = await stand.admin.patch(f"{path}/{key['id']}", json={field: value})
        assert error_of(refused, 400, "invalid_request")["param"] == field
        refused = await stand.admin.post(path, json={"name": "k", field: value})
        assert error_of(refused, 400, "invalid_request")["param"] == field
    refused = await stand.admin.patch(f"{path}/{key['id']}", json={"status": "revoked"})
    assert error_of(refused, 400, "invalid_request")["param"] == "status"


async def test_a_stale_change_says_what_differs(stand: Stand) -> None:
    path, key = await make(stand)
    await stand.admin.patch(f"{path}/{key['id']}", json={"name": "b", "scopes": ["inference"]})

    stale = await stand.admin.patch(
        f"{path}/{key['id']}",
        json={"name": "c", "scopes": ["inference"]},
        headers={"if-match": '"1"'},
    )

    message = error_of(stale, 409, "version_conflict")["message"]
    assert "name is 'b'" in message
    assert "scopes" not in message  # what the caller wants is there already


async def test_a_revoked_key_says_why_and_stays_so(stand: Stand) -> None:
    path, key = await make(stand)

    reason = {"reason": "lost on a train"}
    assert (await stand.admin.delete(f"{path}/{key['id']}", params=reason)).status_code == 204

    shown = (await stand.admin.get(f"{path}/{key['id']}")).json()
    assert (shown["status"], shown["revoke_reason"]) == ("revoked", "lost on a train")
    for method, where, body in (
        ("PATCH", "", {"status": "active"}),
        ("PATCH", "", {"name": "x"}),
        ("POST", "/rotate", {}),
    ):
        refused = await stand.admin.request(method, f"{path}/{key['id']}{where}", json=body)
        error_of(refused, 409, "conflict")
    refused = await stand.admin.delete(f"{path}/{key['id']}", params={"reason": "a\u0000b"})
    assert error_of(refused, 400, "invalid_request")["param"] == "reason"


async def test_keys_are_listed_by_project_and_page(stand: Stand) -> None:
    path, first = await make(stand)
    projects = path.replace("/keys", "/projects")
    project = (await stand.admin.post(projects, json={"name": "p"})).json()["id"]
    made = [
        (await stand.admin.post(path, json={"name": f"k{i}", "project_id": project})).json()["id"]
        for i in range(3)
    ]

    of_project = await stand.admin.get(path, params={"project_id": project, "limit": 2})

    assert [key["id"] for key in of_project.json()["data"]] == made[:0:-1]
    assert of_project.json()["has_more"] is True
    everything = (await stand.admin.get(path)).json()["data"]
    assert [key["id"] for key in everything] == [*made[::-1], first["id"]]
    unknown = {"project_id": format_id("project", uuid7())}
    assert (await stand.admin.get(path, params=unknown)).json()["data"] == []


async def test_last_use_is_written_once_a_minute_and_is_no_change(stand: Stand) -> None:
    from datetime import UTC, datetime, timedelta
    from uuid import UUID

    path, key = await make(stand)
    key_id = UUID(hex=key["id"].removeprefix("key_"))
    now = datetime.now(UTC)
    uses = KeyUses(lambda: now)

    async def used_at() -> int | None:
        shown = (await stand.admin.get(f"{path}/{key['id']}")).json()
        assert shown["version"] == 1
        at: int | None = shown["last_used_at"]
        return at

    for _ in range(100):
        uses.note(key_id)
    assert await used_at() is None  # nothing is written on the way
    await uses.flush(stand.db.sessions)
    assert await used_at() == int(now.timestamp())
    first = now
    now += timedelta(seconds=EVERY_S - 1)
    uses.note(key_id)
    uses.note(uuid7())  # a key that is gone is nobody's fault
    await uses.flush(stand.db.sessions)
    assert await used_at() == int(first.timestamp())
    now += timedelta(seconds=2)
    uses.note(key_id)
    await uses.flush(stand.db.sessions)
    assert await used_at() == int(now.timestamp())
