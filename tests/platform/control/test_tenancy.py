"""Tenants and keys."""

from __future__ import annotations

import time

import pytest
from loraplex_platform.errors import InvalidApiKeyError, RevokedKeyError
from loraplex_platform.tenancy.authentication import authenticate

from tests.platform.control.stand import Stand, error_of
from tests.support.metering import PEPPER


async def test_a_tenant_is_created_listed_and_read(stand: Stand) -> None:
    made = await stand.admin.post("/admin/v1/tenants", json={"slug": "acme", "name": "Acme"})

    assert made.status_code == 201
    tenant = made.json()
    assert set(tenant) == {"object", "id", "slug", "name", "status", "created_at"}
    assert tenant["object"] == "tenant"
    assert tenant["status"] == "active"
    assert abs(tenant["created_at"] - time.time()) < 60
    assert (await stand.admin.get(f"/admin/v1/tenants/{tenant['id']}")).json() == tenant
    listed = (await stand.admin.get("/admin/v1/tenants")).json()
    assert listed == {
        "object": "list",
        "data": [tenant],
        "first_id": tenant["id"],
        "last_id": tenant["id"],
        "has_more": False,
    }


async def test_a_slug_is_taken_once_and_has_a_form(stand: Stand) -> None:
    await stand.tenant("acme")

    taken = await stand.admin.post("/admin/v1/tenants", json={"slug": "acme"})
    assert error_of(taken, 409, "conflict")["param"] == "slug"
    for slug in ("Acme", "-acme", "a b", "", "a" * 64, "=cmd", "ac\u0000me", "tiny\n"):
        refused = await stand.admin.post("/admin/v1/tenants", json={"slug": slug})
        assert error_of(refused, 400, "invalid_request")["param"] == "slug"
    for name in ("", "a" * 201, "nul\u0000", "line\nbreak", 7, ["x"]):
        refused = await stand.admin.post("/admin/v1/tenants", json={"slug": "ok", "name": name})
        assert error_of(refused, 400, "invalid_request")["param"] == "name"


async def test_lists_are_paged_by_key_newest_first(stand: Stand) -> None:
    made = [(await stand.tenant(f"t-{n}"))["id"] for n in range(5)]

    seen, after = [], None
    for has_more in (True, True, False):
        params = {"limit": 2} | ({"after": after} if after else {})
        page = (await stand.admin.get("/admin/v1/tenants", params=params)).json()
        ids = [tenant["id"] for tenant in page["data"]]
        assert (page["first_id"], page["last_id"]) == (ids[0], ids[-1])
        assert page["has_more"] is has_more
        seen += ids
        after = page["last_id"]

    assert seen == made[::-1]
    for params, param in (
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"after": "x"}, "after"),
    ):
        refused = await stand.admin.get("/admin/v1/tenants", params=params)
        assert error_of(refused, 400, "invalid_request")["param"] == param


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
