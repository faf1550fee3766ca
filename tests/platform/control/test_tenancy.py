"""Tenants and their projects."""

from __future__ import annotations

import asyncio
import time

import pytest
from loraplex_platform.errors import TenantSuspendedError
from loraplex_platform.ids import format_id, uuid7
from loraplex_platform.tenancy.authentication import authenticate
from sqlalchemy.exc import IntegrityError

from tests.platform.control.stand import Stand, error_of
from tests.support.metering import PEPPER, run_sql


async def test_a_tenant_is_created_listed_and_read(stand: Stand) -> None:
    made = await stand.admin.post("/admin/v1/tenants", json={"slug": "acme", "name": "Acme"})

    assert made.status_code == 201
    tenant = made.json()
    assert set(tenant) == {
        "object",
        "id",
        "slug",
        "name",
        "status",
        "billing_tz",
        "replays_answers",
        "version",
        "created_at",
    }
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


async def test_a_change_is_refused_when_somebody_was_faster(stand: Stand) -> None:
    made = await stand.admin.post("/admin/v1/tenants", json={"slug": "acme", "name": "Acme"})
    path = f"/admin/v1/tenants/{made.json()['id']}"
    assert made.headers["etag"] == '"1"'

    first = await stand.admin.patch(path, json={"name": "A"}, headers={"if-match": '"1"'})
    second = await stand.admin.patch(path, json={"name": "B"}, headers={"if-match": '"1"'})

    assert (first.status_code, first.headers["etag"]) == (200, '"2"')
    error = error_of(second, 409, "version_conflict")
    assert "version 2 now, 1 then" in error["message"]
    assert "name is 'A'" in error["message"]
    assert (await stand.admin.get(path)).json()["name"] == "A"
    # Without If-Match the last one wins; the same again is no change.
    for _ in range(2):
        again = await stand.admin.patch(path, json={"name": "B"})
        assert (again.json()["name"], again.headers["etag"]) == ("B", '"3"')
    for bad in ("1", "x", '"x"', '""', '"1", "2"'):
        refused = await stand.admin.patch(path, json={"name": "C"}, headers={"if-match": bad})
        assert error_of(refused, 400, "invalid_request")["param"] == "If-Match"


async def test_parallel_changes_of_one_version_let_one_through(stand: Stand) -> None:
    path = f"/admin/v1/tenants/{(await stand.tenant('acme'))['id']}"

    answers = await asyncio.gather(
        *(
            stand.admin.patch(path, json={"name": f"n{i}"}, headers={"if-match": '"1"'})
            for i in range(8)
        )
    )

    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 7


async def test_a_tenants_zone_is_set_before_its_first_request_only(stand: Stand) -> None:
    body = {"slug": "acme", "billing_tz": "Europe/Berlin"}
    tenant = (await stand.admin.post("/admin/v1/tenants", json=body)).json()
    path = f"/admin/v1/tenants/{tenant['id']}"
    assert tenant["billing_tz"] == "Europe/Berlin"

    changed = await stand.admin.patch(path, json={"billing_tz": "Asia/Kolkata"})
    assert changed.json()["billing_tz"] == "Asia/Kolkata"
    # Python and Postgres must both know it, and mean the same by it: CET is an offset in Postgres.
    for bad in ("Mars/Olympus", "", "+02:00", "europe/berlin", 7, None, "localtime", "CET", "WET"):
        refused = await stand.admin.patch(path, json={"billing_tz": bad})
        assert error_of(refused, 400, "invalid_request")["param"] == "billing_tz"
    await run_sql(
        stand.db,
        "insert into requests (id, tenant_id, price_book_id, endpoint, model, is_stream, owner,"
        " lease_until, est_prompt_tokens, est_completion_tokens, est_pico)"
        " select :id, t.id, b.id, 'probe', 'm', false, 'o', now(), 1, 1, 1"
        " from tenants t, price_books b",
        id=uuid7(),
    )
    refused = await stand.admin.patch(path, json={"billing_tz": "UTC"})
    assert error_of(refused, 409, "conflict")["param"] == "billing_tz"


@pytest.mark.parametrize("zone", ["localtime", "MET", "Mars/Olympus", "posixrules", ""])
async def test_no_zone_that_settles_would_stumble_over_is_stored_whoever_writes_it(
    stand: Stand, zone: str
) -> None:
    answer = await stand.admin.post("/admin/v1/tenants", json={"slug": "new", "billing_tz": zone})
    assert error_of(answer, 400, "invalid_request")["param"] == "billing_tz"
    await stand.tenant("acme")
    for statement in (
        "update tenants set billing_tz = :zone",
        "insert into tenants (id, slug, name, billing_tz) values (gen_random_uuid(), 'b', 'b', :zone)",
    ):
        with pytest.raises(IntegrityError, match="billing_tz"):
            await run_sql(stand.db, statement, zone=zone)


async def test_a_suspended_tenant_is_refused_until_it_is_active_again(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}"
    secret = (await stand.admin.post(f"{path}/keys", json={"name": "k"})).json()["secret"]

    for _ in range(2):
        suspended = await stand.admin.post(f"{path}/suspend")
        assert (suspended.json()["status"], suspended.json()["version"]) == ("suspended", 2)
    with pytest.raises(TenantSuspendedError):
        await authenticate(stand.db.sessions, PEPPER, secret)
    assert (await stand.admin.post(f"{path}/activate")).json()["status"] == "active"
    holder = await authenticate(stand.db.sessions, PEPPER, secret)
    assert holder.tenant_version == 3
    await run_sql(stand.db, "update tenants set status = 'closed'")
    error_of(await stand.admin.post(f"{path}/activate"), 409, "conflict")


async def test_projects_are_made_renamed_and_archived(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/projects"

    made = await stand.admin.post(path, json={"name": "Chat"})

    assert made.status_code == 201
    project = made.json()
    assert project["id"].startswith("prj_")
    for taken in ("Chat", "chat", "CHAT"):
        refused = await stand.admin.post(path, json={"name": taken})
        assert error_of(refused, 409, "conflict")["param"] == "name"
    other = (await stand.admin.post(path, json={"name": "other"})).json()
    refused = await stand.admin.patch(f"{path}/{other['id']}", json={"name": "cHAT"})
    assert error_of(refused, 409, "conflict")["param"] == "name"
    stale = {"if-match": '"7"'}
    refused = await stand.admin.patch(f"{path}/{other['id']}", json={"name": "x"}, headers=stale)
    error_of(refused, 409, "version_conflict")
    # Its own name in other capitals is a change, not a clash.
    renamed = await stand.admin.patch(f"{path}/{project['id']}", json={"name": "CHAT"})
    assert (renamed.json()["name"], renamed.headers["etag"]) == ("CHAT", '"2"')

    keys = f"/admin/v1/tenants/{tenant['id']}/keys"
    body = {"name": "k", "project_id": project["id"]}
    key = (await stand.admin.post(keys, json=body)).json()
    refused = await stand.admin.delete(f"{path}/{project['id']}")
    assert "1 live keys" in error_of(refused, 409, "conflict")["message"]
    await stand.admin.delete(f"{keys}/{key['id']}")
    for _ in range(2):
        assert (await stand.admin.delete(f"{path}/{project['id']}")).status_code == 204
    assert [p["id"] for p in (await stand.admin.get(path)).json()["data"]] == [other["id"]]
    everything = await stand.admin.get(path, params={"archived": True})
    assert {p["id"] for p in everything.json()["data"]} == {project["id"], other["id"]}
    # The name is free again, the archived one is not for use.
    assert (await stand.admin.post(path, json={"name": "chat"})).status_code == 201
    refused = await stand.admin.post(keys, json=body)
    assert error_of(refused, 409, "conflict")["param"] == "project_id"
    error_of(
        await stand.admin.patch(f"{path}/{project['id']}", json={"name": "z"}), 409, "conflict"
    )


async def test_two_projects_of_one_name_are_never_made_at_once(stand: Stand) -> None:
    path = f"/admin/v1/tenants/{(await stand.tenant('acme'))['id']}/projects"

    names = ("chat", "Chat", "CHAT", "chAt")
    answers = await asyncio.gather(*(stand.admin.post(path, json={"name": name}) for name in names))

    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409]


async def test_projects_of_others_and_of_nobody_are_the_same(stand: Stand) -> None:
    mine, theirs = await stand.tenant("acme"), await stand.tenant("globex")
    made = await stand.admin.post(
        f"/admin/v1/tenants/{theirs['id']}/projects", json={"name": "secret"}
    )
    path = f"/admin/v1/tenants/{mine['id']}"

    for project_id in (made.json()["id"], format_id("project", uuid7()), "prj_x", mine["id"]):
        for method in ("GET", "PATCH", "DELETE"):
            body = {"json": {"name": "x"}} if method == "PATCH" else {}
            answer = await stand.admin.request(method, f"{path}/projects/{project_id}", **body)
            assert error_of(answer, 404, "not_found")["message"] == "No such project."
        body = {"name": "k", "project_id": project_id}
        refused = await stand.admin.post(f"{path}/keys", json=body)
        assert error_of(refused, 404, "not_found")["param"] == "project_id"
