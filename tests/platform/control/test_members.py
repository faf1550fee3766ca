"""Invitations, members and what their roles mean, in their own tenants and in others'."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from loraplex_platform.audit.service import SYSTEM
from loraplex_platform.control.auth import Principal
from loraplex_platform.control.permissions import may_give
from loraplex_platform.errors import ConflictError, NotFoundError, RevokedKeyError
from loraplex_platform.ids import format_id, parse_id, uuid7
from loraplex_platform.members import queries as member_queries
from loraplex_platform.members import service as members
from loraplex_platform.tenancy import key_service
from loraplex_platform.tenancy.authentication import authenticate
from loraplex_platform.tenancy.key_schemas import NewKey
from loraplex_platform.users import throttle

from tests.platform.control.people import ROLES, invite, join, log_in, member, user_id_of
from tests.platform.control.stand import CONSOLE, CONTROL, PASSWORD, Stand, adapter, error_of
from tests.support.metering import PEPPER, run_sql
from tests.support.postgres import until_in_statement

ADA = "ada@example.com"


async def test_an_invited_person_makes_an_account_and_belongs_to_the_tenant(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    path = f"/admin/v1/tenants/{tenant_id}"
    body = {"email": "Ada@Example.com", "role": "developer"}

    made = await stand.admin.post(f"{path}/invitations", json=body)

    assert made.status_code == 201
    invitation = made.json()
    token = invitation.pop("token")
    assert (invitation["email"], invitation["status"]) == (ADA, "pending")
    assert (await stand.admin.get(f"{path}/invitations")).json()["data"] == [invitation]
    assert (await stand.admin.get(f"{path}/members")).json()["data"] == []
    joined = await join(stand, token)
    assert joined.status_code == 200
    shown = joined.json()
    assert (shown["object"], shown["email"], shown["role"]) == ("member", ADA, "developer")
    assert (await stand.admin.get(f"{path}/members")).json()["data"] == [shown]
    ada = await log_in(stand, ADA)
    session = (await ada.get("/admin/v1/sessions/current")).json()
    assert session["user"]["role"] is None
    [membership] = session["memberships"]
    assert (membership["tenant_id"], membership["role"]) == (tenant_id, "developer")
    assert {"key.write", "usage.read"} <= set(membership["actions"])
    assert not {"member.write", "invoice.read", "fleet.read"} & set(membership["actions"])
    # Outside of the tenant there is only one's own login.
    assert session["actions"] == ["session.read", "session.end"]
    [listed] = (await ada.get(f"{path}/invitations")).json()["data"]
    assert listed["status"] == "accepted"


async def test_a_token_works_once_and_not_when_it_is_over(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    path = f"/admin/v1/tenants/{tenant_id}/invitations"
    used = (await invite(stand, tenant_id, ADA, "viewer"))["token"]
    assert (await join(stand, used)).status_code == 200
    replaced = (await invite(stand, tenant_id, "b@example.com", "viewer"))["token"]
    withdrawn = await invite(stand, tenant_id, "b@example.com", "viewer")
    for _ in range(2):
        assert (await stand.admin.delete(f"{path}/{withdrawn['id']}")).status_code == 204
    late = (await invite(stand, tenant_id, "c@example.com", "viewer"))["token"]
    await run_sql(
        stand.db,
        "update invitations set expires_at = now() - interval '1 s' where email = 'c@example.com'",
    )

    refused = [
        error_of(await join(stand, token), 404, "invitation_not_found")
        for token in (used, replaced, withdrawn["token"], late, "x", "\u00e9", withdrawn["id"])
    ]

    assert all(error == refused[0] for error in refused)
    statuses = [i["status"] for i in (await stand.admin.get(path)).json()["data"]]
    assert statuses == ["expired", "revoked", "revoked", "accepted"]


async def test_two_who_use_a_token_at_once_are_one(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    token = (await invite(stand, tenant_id, ADA, "viewer"))["token"]

    answers = await asyncio.gather(*(join(stand, token) for _ in range(4)))

    assert [answer.status_code for answer in answers].count(200) == 1
    assert {answer.status_code for answer in answers} <= {200, 401, 404}
    members = await stand.admin.get(f"/admin/v1/tenants/{tenant_id}/members")
    assert len(members.json()["data"]) == 1


async def test_an_invitation_does_not_tell_whether_there_is_an_account(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    owner = await member(stand, tenant_id, "owner", "o@example.com")
    await stand.login("admin", "known@example.com")

    known = await invite(stand, tenant_id, "known@example.com", "viewer", by=owner)
    unknown = await invite(stand, tenant_id, "nobody@example.com", "viewer", by=owner)

    for field in ("id", "token", "email", "created_at", "expires_at"):
        del known[field], unknown[field]
    assert known == unknown


async def test_an_account_that_exists_must_be_proven(stand: Stand) -> None:
    """An account made in somebody's name does not get into tenants that invite that person later."""
    mine, theirs = await stand.tenant("acme"), await stand.tenant("globex")
    await member(stand, theirs["id"], "owner", ADA)  # whoever that was, with PASSWORD
    token = (await invite(stand, mine["id"], ADA, "owner"))["token"]

    error_of(await join(stand, token, "not the password"), 401, "bad_credentials")
    missing = error_of(await join(stand, token, None), 400, "invalid_request")
    assert missing["param"] == "password"
    members = await stand.admin.get(f"/admin/v1/tenants/{mine['id']}/members")
    assert members.json()["data"] == []
    # With its password, or a session of it, the account joins; its password stays what it was.
    ada = await log_in(stand, ADA)
    accepted = await ada.post("/admin/v1/invitations/accept", json={"token": token})
    assert accepted.status_code == 200
    assert {
        m["role"] for m in (await ada.get("/admin/v1/sessions/current")).json()["memberships"]
    } == {"owner"}
    # Somebody else's session proves nothing.
    other = await member(stand, theirs["id"], "viewer", "eve@example.com")
    token = (await invite(stand, theirs["id"], "new@example.com", "viewer"))["token"]
    refused = await other.post("/admin/v1/invitations/accept", json={"token": token})
    assert error_of(refused, 400, "invalid_request")["param"] == "password"


async def test_guesses_at_an_invited_account_are_throttled(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    await stand.login("admin", ADA)
    token = (await invite(stand, tenant_id, ADA, "viewer"))["token"]

    for _ in range(throttle.MAX_PER_EMAIL):
        error_of(await join(stand, token, "a wrong password"), 401, "bad_credentials")
    error_of(await join(stand, token, PASSWORD), 429, "too_many_attempts")


async def test_short_passwords_and_bad_fields_are_refused(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    token = (await invite(stand, tenant_id, ADA, "viewer"))["token"]
    path = f"/admin/v1/tenants/{tenant_id}/invitations"

    assert (
        error_of(await join(stand, token, "short"), 400, "invalid_request")["param"] == "password"
    )
    for change, param in (
        ({"email": "ada"}, "email"),
        ({"role": "god"}, "role"),
        ({"role": None}, "role"),
        ({"expires_in_s": 1}, "expires_in_s"),
        ({"tenant_id": "ten_x"}, "tenant_id"),
    ):
        body = {"email": ADA, "role": "viewer"} | change
        refused = await stand.admin.post(path, json=body)
        assert error_of(refused, 400, "invalid_request")["param"] == param
    await join(stand, token)
    again = await stand.admin.post(path, json={"email": ADA, "role": "viewer"})
    assert error_of(again, 409, "conflict")["param"] == "email"


async def test_nobody_makes_changes_or_removes_a_member_above_themselves(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    path = f"/admin/v1/tenants/{tenant_id}"
    owner = await member(stand, tenant_id, "owner", "owner@example.com")
    admin = await member(stand, tenant_id, "admin", "admin@example.com")
    owner_id, admin_id = await user_id_of(owner), await user_id_of(admin)

    body = {"email": ADA, "role": "owner"}
    error_of(await admin.post(f"{path}/invitations", json=body), 403, "permission_denied")
    promotion = {"role": "owner"}
    for user_id in (admin_id, owner_id):
        refused = await admin.patch(
            f"{path}/members/{user_id}", json=promotion | {"role": "viewer"}
        )
        assert refused.status_code == (403 if user_id == owner_id else 200)
        await stand.admin.patch(f"{path}/members/{admin_id}", json={"role": "admin"})
        refused = await admin.patch(f"{path}/members/{admin_id}", json=promotion)
        error_of(refused, 403, "permission_denied")
    error_of(await admin.delete(f"{path}/members/{owner_id}"), 403, "permission_denied")
    assert (await owner.patch(f"{path}/members/{admin_id}", json=promotion)).status_code == 200


def test_roles_give_what_is_not_above_them() -> None:
    for role in ROLES:
        assert may_give("admin", None, role)
        assert may_give(None, "owner", role)
        assert may_give(None, "admin", role) == (role != "owner")
        for low in ("developer", "billing", "viewer", None):
            assert not may_give(None, low, role)
            assert not may_give("viewer", low, role)


async def test_a_tenant_keeps_an_owner_whatever_happens_at_once(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    path = f"/admin/v1/tenants/{tenant_id}/members"
    first = await member(stand, tenant_id, "owner", "a@example.com")
    first_id = await user_id_of(first)
    for answer in (
        await first.patch(f"{path}/{first_id}", json={"role": "admin"}),
        await first.delete(f"{path}/{first_id}"),
        await stand.admin.delete(f"{path}/{first_id}"),
    ):
        assert "last owner" in error_of(answer, 409, "conflict")["message"]
    second = await member(stand, tenant_id, "owner", "b@example.com")
    second_id = await user_id_of(second)

    answers = await asyncio.gather(
        first.patch(f"{path}/{second_id}", json={"role": "viewer"}),
        second.delete(f"{path}/{first_id}"),
    )

    assert sorted(answer.is_success for answer in answers) == [False, True]
    owners = [m for m in (await stand.admin.get(path)).json()["data"] if m["role"] == "owner"]
    assert len(owners) == 1


async def test_whoever_is_removed_is_out_at_the_next_request_and_so_are_their_own_keys(
    stand: Stand,
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    path = f"/admin/v1/tenants/{tenant_id}"
    ada = await member(stand, tenant_id, "developer", ADA)
    ada_id = await user_id_of(ada)
    own = await ada.post(f"{path}/keys", json={"name": "mine", "owner_id": ada_id})
    service = await ada.post(f"{path}/keys", json={"name": "service"})
    assert (own.json()["owner_id"], own.json()["created_by"]) == (ada_id, ada_id)
    stale = await stand.admin.delete(f"{path}/members/{ada_id}", headers={"if-match": '"9"'})
    error_of(stale, 409, "version_conflict")

    assert (await stand.admin.delete(f"{path}/members/{ada_id}")).status_code == 204

    error_of(await ada.get(path), 404, "not_found")
    error_of(await ada.get("/admin/v1/tenants"), 403, "permission_denied")
    with pytest.raises(RevokedKeyError):
        await authenticate(stand.db.sessions, PEPPER, own.json()["secret"])
    await authenticate(stand.db.sessions, PEPPER, service.json()["secret"])
    error_of(await stand.admin.get(f"{path}/members/{ada_id}"), 404, "not_found")
    body = {"name": "k", "owner_id": ada_id}
    refused = await stand.admin.post(f"{path}/keys", json=body)
    assert error_of(refused, 404, "not_found")["param"] == "owner_id"


async def test_a_role_holds_from_the_next_request_on(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    path = f"/admin/v1/tenants/{tenant_id}"
    ada = await member(stand, tenant_id, "viewer", ADA)
    error_of(await ada.post(f"{path}/keys", json={"name": "k"}), 403, "permission_denied")

    changed = await stand.admin.patch(
        f"{path}/members/{await user_id_of(ada)}",
        json={"role": "developer"},
        headers={"if-match": '"1"'},
    )

    assert (changed.status_code, changed.headers["etag"]) == (200, '"2"')
    assert (await ada.post(f"{path}/keys", json={"name": "k"})).status_code == 201


async def test_members_see_their_tenants_and_their_colleagues_only(stand: Stand) -> None:
    tenants = [(await stand.tenant(slug))["id"] for slug in ("acme", "globex", "initech")]
    ada = await member(stand, tenants[0], "owner", ADA)
    await member(stand, tenants[2], "owner", "other@example.com")

    assert [t["id"] for t in (await ada.get("/admin/v1/tenants")).json()["data"]] == tenants[:1]
    token = (await invite(stand, tenants[1], ADA, "viewer"))["token"]
    await ada.post("/admin/v1/invitations/accept", json={"token": token})
    listed = (await ada.get("/admin/v1/tenants")).json()["data"]
    assert [t["id"] for t in listed] == tenants[1::-1]
    error_of(await ada.get(f"/admin/v1/tenants/{tenants[2]}/members"), 404, "not_found")
    error_of(await ada.get("/admin/v1/users"), 403, "permission_denied")
    await run_sql(stand.db, "update tenants set status = 'closed' where slug = 'acme'")
    assert [t["slug"] for t in (await ada.get("/admin/v1/tenants")).json()["data"]] == ["globex"]


async def test_a_developer_does_a_developers_work(stand: Stand, db_url: str) -> None:
    """All of it runs as the tenant's own role in Postgres, so every right it needs is tried here."""
    tenant_id = (await stand.tenant("acme"))["id"]
    path = f"/admin/v1/tenants/{tenant_id}"
    ada = await member(stand, tenant_id, "developer", ADA)
    files = adapter()

    async def done(call: Any, status: int) -> Any:
        answer: httpx.Response = await call
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    uploaded = await done(
        ada.post(
            f"{path}/adapters",
            data={"name": "capitals"},
            files={
                "adapter_config": ("adapter_config.json", files.config),
                "adapter_model": ("adapter_model.safetensors", files.model),
            },
        ),
        201,
    )
    version = {"version_id": uploaded["version"]["id"]}
    deployed = await done(ada.put(f"{path}/deployments/capitals", json=version), 200)
    await done(ada.put(f"{path}/deployments/capitals", json={"version_id": None}), 200)
    await done(ada.get(f"{path}/deployments/capitals"), 200)
    assert len((await done(ada.get(f"{path}/adapters"), 200))["data"]) == 1
    assert (await done(ada.get("/admin/v1/base-models"), 200))["data"]
    once = {"idempotency-key": "ada-1"}
    grants = [{"kind": "deployment", "id": deployed["id"]}]
    body = {"name": "k", "grants": grants}
    key = await done(ada.post(f"{path}/keys", json=body, headers=once), 201)
    again = await done(ada.post(f"{path}/keys", json=body, headers=once), 201)
    assert again == key | {"secret": None}
    await done(ada.patch(f"{path}/keys/{key['id']}", json={"grants": None}), 200)
    await done(ada.post(f"{path}/keys/{key['id']}/rotate", json={}), 200)
    await done(ada.delete(f"{path}/keys/{key['id']}"), 204)
    await done(ada.delete(f"{path}/deployments/capitals"), 204)
    await done(ada.get("/admin/v1/requests"), 200)
    await done(ada.get("/admin/v1/usage", params={"start_time": 0, "tenant_id": tenant_id}), 200)
    import psycopg

    with psycopg.connect(db_url) as connection:
        actions = connection.execute(
            "select action from audit_log where actor_kind = 'user' and actor_id = %s order by id",
            [await user_id_of(ada)],
        ).fetchall()
    assert [action for (action,) in actions] == [
        "user.create",
        "member.join",
        "session.create",
        "adapter.create",
        "adapter_version.create",
        "deployment.put",
        "deployment.put",
        "api_key.create",
        "api_key.update",
        "api_key.rotate",
        "api_key.revoke",
        "deployment.archive",
    ]


async def test_an_owner_does_an_owners_work(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    path = f"/admin/v1/tenants/{tenant_id}"
    owner = await member(stand, tenant_id, "owner", "owner@example.com")

    renamed = await owner.patch(path, json={"name": "Acme & Sons", "billing_tz": "Asia/Kolkata"})
    assert renamed.json()["name"] == "Acme & Sons", renamed.text
    project = await owner.post(f"{path}/projects", json={"name": "p"})
    assert project.status_code == 201
    project_path = f"{path}/projects/{project.json()['id']}"
    assert (await owner.patch(project_path, json={"name": "q"})).status_code == 200
    assert (await owner.delete(project_path)).status_code == 204
    invitation = await invite(stand, tenant_id, ADA, "admin", by=owner)
    assert (await join(stand, invitation["token"])).status_code == 200
    ada = await log_in(stand, ADA)
    member_path = f"{path}/members/{await user_id_of(ada)}"
    assert (await owner.patch(member_path, json={"role": "viewer"})).status_code == 200
    assert (await owner.delete(member_path)).status_code == 204
    error_of(await owner.post(f"{path}/suspend"), 403, "permission_denied")


async def test_members_of_nobody_and_of_others_are_the_same(stand: Stand) -> None:
    mine, theirs = await stand.tenant("acme"), await stand.tenant("globex")
    stranger = await member(stand, theirs["id"], "owner", "x@example.com")
    stranger_id = await user_id_of(stranger)
    invited = await invite(stand, theirs["id"], "y@example.com", "viewer")
    path = f"/admin/v1/tenants/{mine['id']}"

    for user_id in (stranger_id, format_id("user", uuid7()), "usr_x", "me"):
        for method in ("GET", "PATCH", "DELETE"):
            body = {"json": {"role": "viewer"}} if method == "PATCH" else {}
            answer = await stand.admin.request(method, f"{path}/members/{user_id}", **body)
            assert error_of(answer, 404, "not_found")["message"] == "No such member."
    for invitation_id in (invited["id"], format_id("invitation", uuid7()), "ivt_x"):
        answer = await stand.admin.delete(f"{path}/invitations/{invitation_id}")
        assert error_of(answer, 404, "not_found")["message"] == "No such invitation."
    assert (await join(stand, invited["token"])).status_code == 200


async def test_the_form_joins_and_leads_to_the_console(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    token = (await invite(stand, tenant_id, ADA, "viewer"))["token"]
    browser = stand.client(None, headers={"origin": CONTROL})

    form = await browser.get("/join")
    assert 'name="token"' in form.text
    assert "script" not in form.text
    refused = await browser.post("/join", data={"token": "<b>x</b>", "password": PASSWORD})
    assert refused.status_code == 404
    assert "<b>" not in refused.text
    assert (await browser.post("/join", data={"token": token})).status_code == 400
    foreign = stand.client(None, headers={"origin": "http://evil.test"})
    assert (
        await foreign.post("/join", data={"token": token, "password": PASSWORD})
    ).status_code == 403
    joined = await browser.post("/join", data={"token": f" {token} ", "password": PASSWORD})
    assert (joined.status_code, joined.headers["location"]) == (303, CONSOLE)
    session = (await browser.get("/admin/v1/sessions/current")).json()
    [membership] = session["memberships"]
    assert (membership["tenant_id"], membership["role"]) == (tenant_id, "viewer")


async def test_an_owners_invitation_is_ended_by_owners_only(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    path = f"/admin/v1/tenants/{tenant_id}/invitations"
    owner = await member(stand, tenant_id, "owner", "owner@example.com")
    admin = await member(stand, tenant_id, "admin", "admin@example.com")
    invited = await invite(stand, tenant_id, ADA, "owner", by=owner)

    error_of(await admin.delete(f"{path}/{invited['id']}"), 403, "permission_denied")
    # Nor by another one in its place.
    again = await admin.post(path, json={"email": ADA, "role": "viewer"})
    error_of(again, 403, "permission_denied")
    assert (await stand.admin.get(path)).json()["data"][0]["status"] == "pending"

    assert (await owner.delete(f"{path}/{invited['id']}")).status_code == 204
    assert (await admin.post(path, json={"email": ADA, "role": "viewer"})).status_code == 201


async def test_a_key_made_while_its_owner_is_removed_does_not_outlive_the_membership(
    stand: Stand, db_url: str
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    ada_id = await user_id_of(await member(stand, tenant_id, "developer", ADA))
    tenant = parse_id("tenant", tenant_id)
    operator = Principal("admin_key", "admin")

    async def remove() -> None:
        async with stand.db.sessions.begin() as session:
            await members.remove(session, operator, SYSTEM, tenant, user_id=ada_id, if_match=None)

    async with stand.db.sessions() as session:
        new = NewKey(name="k", owner_id=ada_id)
        made = await key_service.create_key(session, SYSTEM, PEPPER, tenant, new)
        removal = asyncio.create_task(remove())
        await until_in_statement(db_url, "memberships", waits_for="Lock")
        assert not removal.done()
        await session.commit()
    await removal
    async with stand.db.sessions() as session:
        key = (await key_service.get_key(session, tenant, made.key.id)).key
        assert (key.status, key.revoke_reason) == ("revoked", "their owner left the tenant")
        # And the other way round: whoever comes after the removal finds no member.
        with pytest.raises(NotFoundError, match="owner_id"):
            await key_service.create_key(session, SYSTEM, PEPPER, tenant, new)


async def test_a_key_that_changes_hands_while_its_owner_is_removed_blocks_nobody(
    stand: Stand, db_url: str
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    tenant = parse_id("tenant", tenant_id)
    old_id = await user_id_of(await member(stand, tenant_id, "developer", ADA))
    new_id = await user_id_of(await member(stand, tenant_id, "owner", "b@example.com"))
    async with stand.db.sessions.begin() as session:
        new = NewKey(name="k", owner_id=old_id)
        key = (await key_service.create_key(session, SYSTEM, PEPPER, tenant, new)).key

    async def hand_over() -> None:
        async with stand.db.sessions.begin() as session:
            await key_service.update_key(
                session, SYSTEM, tenant, key.id, {"owner_id": new_id}, None
            )

    async with stand.db.sessions.begin() as session:
        await member_queries.lock_owners(session, tenant)  # the removal has come that far
        changing = asyncio.create_task(hand_over())
        await until_in_statement(db_url, "memberships", waits_for="Lock")
        operator = Principal("admin_key", "admin")
        await members.remove(session, operator, SYSTEM, tenant, user_id=old_id, if_match=None)

    with pytest.raises(ConflictError, match="revoked"):
        await changing
