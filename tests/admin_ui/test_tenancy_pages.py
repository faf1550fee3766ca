"""Tenants, members and keys, against the real control API."""

from __future__ import annotations

import time
from typing import Any

import pytest
from loraplex_admin.api import Api
from streamlit.testing.v1 import AppTest

from tests.admin_ui.driver import (
    checked,
    choose,
    confirm,
    fill,
    keys_of,
    open_page,
    press,
    records,
    table,
    words,
)
from tests.admin_ui.stand import Stand


@pytest.fixture(scope="module")
def admin(platform: Stand) -> Api:
    return platform.api()


def make_key(test: AppTest, name: str) -> AppTest:
    fill(test, new_key_name=name)
    return press(test, "new_key_go")


# ------------------------------------------------------------------------------------- keys


def test_a_key_is_made_shown_once_and_revoked_by_its_name(
    admin: Api, tenant: dict[str, Any]
) -> None:
    test = open_page("keys", admin, tenant)
    assert "no key yet" in words(test)

    make_key(test, "**prod** `x`")

    [secret] = [block.value for block in test.code if block.value.startswith("lpx_sk_")]
    assert list(table(test, "keys")["name"]) == ["**prod** `x`"]
    press(test, "key_done")
    assert secret not in words(test)
    [key] = admin.of_tenant(tenant["id"], "keys").page()["data"]
    # The new one is open at once, and the address says so.
    assert test.query_params["id"] == key["id"]

    confirm(test, f"revoke_{key['id']}", "prod")
    assert "That is not the name" in words(test)
    assert admin.of_tenant(tenant["id"], "keys").get(key["id"])["status"] == "active"
    confirm(test, f"revoke_{key['id']}", "**prod** `x`")
    assert admin.of_tenant(tenant["id"], "keys").get(key["id"])["status"] == "revoked"
    assert not [key for key in keys_of(test) if key.startswith("revoke_")]


def test_two_clicks_make_one_key(admin: Api, tenant: dict[str, Any]) -> None:
    first, second = (open_page("keys", admin, tenant) for _ in range(2))
    for test in (first, second):
        # Both clicks are of the same form: the second one came before the first one's answer was drawn.
        test.session_state["new_key_form"] = f"form of {tenant['id']}"
        make_key(test, "once")

    assert len(admin.of_tenant(tenant["id"], "keys").page()["data"]) == 1
    assert [block.value for block in first.code if block.value.startswith("lpx_sk_")]
    assert "whose answer was lost" in words(second)


def test_a_key_is_narrowed_and_rotated(platform: Stand, admin: Api, tenant: dict[str, Any]) -> None:
    platform.deploy(tenant["id"], "capitals", None)
    made = platform.post(f"/tenants/{tenant['id']}/keys", json={"name": "k"})
    test = open_page("keys", admin, tenant, id=made["id"])
    deployment = admin.deployments(tenant["id"])["data"][0]["id"]
    press(test, f"key_{made['id']}_edit")
    test.multiselect(key=f"key_{made['id']}_grants").set_value([f"deployment:{deployment}"])
    test.text_area(key=f"key_{made['id']}_ip_allow").set_value("203.0.113.0/24\n")
    press(test, f"key_{made['id']}_go")

    changed = admin.of_tenant(tenant["id"], "keys").get(made["id"])
    assert changed["grants"] == [{"kind": "deployment", "id": deployment}]
    assert changed["ip_allow"] == ["203.0.113.0/24"]
    assert changed["name"] == "k"

    press(test, f"rotate_{made['id']}_go")
    assert "That is not the name" in words(test)
    confirm(test, f"rotate_{made['id']}", "k")
    [secret] = [block.value for block in test.code if block.value.startswith("lpx_sk_")]
    assert secret != made["secret"]


def test_a_stale_form_shows_what_differs_and_lets_the_reader_decide(
    admin: Api, platform: Stand, tenant: dict[str, Any]
) -> None:
    made = platform.post(f"/tenants/{tenant['id']}/keys", json={"name": "shared"})
    keys, id_ = admin.of_tenant(tenant["id"], "keys"), made["id"]
    first, second = (open_page("keys", admin, tenant, id=id_) for _ in range(2))
    for test in (first, second):
        press(test, f"key_{id_}_edit")
    fill(first, **{f"key_{id_}_name": "hers"})
    press(first, f"key_{id_}_go")
    assert keys.get(id_)["name"] == "hers"

    fill(second, **{f"key_{id_}_name": "his"})
    press(second, f"key_{id_}_go")

    assert keys.get(id_)["name"] == "hers"
    assert "Somebody changed this" in words(second)
    assert records(second, "yours") == [
        {"field": "Name", "when you opened it": "shared", "now": "hers", "yours": "his"}
    ]
    press(second, f"key_{id_}_over")
    assert keys.get(id_)["name"] == "his"

    # The other way: what is there is kept.
    third = open_page("keys", admin, tenant, id=id_)
    press(third, f"key_{id_}_edit")
    keys.change(id_, {"name": "newest"})
    fill(third, **{f"key_{id_}_name": "late"})
    press(third, f"key_{id_}_go")
    press(third, f"key_{id_}_theirs")
    assert keys.get(id_)["name"] == "newest"
    assert f"key_{id_}_edit" in keys_of(third)


def test_a_long_list_is_paged_and_searched_by_the_server_and_the_address_says_so(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    for number in range(53):
        platform.post(f"/tenants/{tenant['id']}/keys", json={"name": f"key {number:02}"})
    test = open_page("keys", admin, tenant)
    assert len(table(test, "keys")) == 50

    press(test, "keys_next")
    assert list(table(test, "keys")["name"]) == ["key 02", "key 01", "key 00"]
    after = test.query_params["after"]
    elsewhere = open_page("keys", admin, tenant, after=after)
    assert list(table(elsewhere, "keys")["name"]) == ["key 02", "key 01", "key 00"]
    press(test, "keys_previous")
    assert len(table(test, "keys")) == 50
    assert "after" not in test.query_params

    checked(test.text_input(key="keys_search").set_value("KEY 1").run())
    assert len(table(test, "keys")) == 10
    assert test.query_params["q"] == "KEY 1"
    found = open_page("keys", admin, tenant, q="key 4")
    assert len(table(found, "keys")) == 10
    checked(test.text_input(key="keys_search").set_value("nothing like it").run())
    assert "Try a shorter piece" in words(test)

    nonsense = open_page("keys", admin, tenant, after="garbage")
    assert len(table(nonsense, "keys")) == 50


def test_a_ticked_row_opens_and_an_unticked_one_closes(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    for name in ("a", "b"):
        platform.post(f"/tenants/{tenant['id']}/keys", json={"name": name})
    test = open_page("keys", admin, tenant)

    choose(test, "keys", 1)
    assert [one.value for one in test.subheader] == ["a"]
    # A row that comes in above must not move what is open.
    platform.post(f"/tenants/{tenant['id']}/keys", json={"name": "c"})
    checked(test.run())
    assert [one.value for one in test.subheader] == ["a"]


# ---------------------------------------------------------------------------------- members


def test_somebody_is_invited_joins_is_promoted_and_removed(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    test = open_page("members", admin, tenant)
    assert "Nobody belongs" in words(test)
    email = f"ada-{time.time_ns()}@example.org"
    fill(test, invite_email=email)
    press(test, "invite_go")
    [token] = [block.value for block in test.code]
    press(test, "invitation_done")
    assert token not in words(test)
    assert list(table(test, "invitations")["status"]) == ["pending"]

    platform.post("/invitations/accept", json={"token": token, "password": "correct horse battery"})
    checked(test.run())
    members = admin.of_tenant(tenant["id"], "members")
    [member] = members.page()["data"]
    assert (member["email"], member["role"]) == (email, "developer")
    choose(test, "members", 0)
    press(test, f"member_{member['id']}_edit")
    test.selectbox(key=f"member_{member['id']}_role").set_value("owner")
    press(test, f"member_{member['id']}_go")
    assert members.get(member["id"])["role"] == "owner"

    confirm(test, f"remove_{member['id']}", email)
    # The last owner stays, in the API's words.
    assert "last owner" in words(test)


def test_an_invitation_is_withdrawn(admin: Api, tenant: dict[str, Any]) -> None:
    invitations = admin.of_tenant(tenant["id"], "invitations")
    made = invitations.create({"email": "eve@example.org", "role": "viewer"})
    test = open_page("members", admin, tenant, invitations_id=made["id"])

    confirm(test, f"withdraw_{made['id']}", made["id"])
    assert invitations.page()["data"][0]["status"] == "pending"
    confirm(test, f"withdraw_{made['id']}", "eve@example.org")

    assert invitations.page()["data"][0]["status"] == "revoked"


# ---------------------------------------------------------------------------------- tenants


def test_a_tenant_is_made_changed_suspended_and_deleted(admin: Api) -> None:
    slug = f"new-{time.time_ns()}"
    test = open_page("tenants", admin)
    fill(test, new_tenant_slug="Not *good*")
    press(test, "new_tenant_go")
    assert "slug" in test.error[0].value

    fill(test, new_tenant_slug=slug)
    test.selectbox(key="new_tenant_billing_tz").set_value("Europe/Berlin")
    press(test, "new_tenant_go")

    [made] = [one for one in admin.tenants(search=slug)["data"] if one["slug"] == slug]
    assert made["billing_tz"] == "Europe/Berlin"
    id_ = made["id"]
    assert test.query_params["id"] == id_
    press(test, f"tenant_{id_}_edit")
    fill(test, **{f"tenant_{id_}_name": "Ünïcode & Sons"})
    press(test, f"tenant_{id_}_go")
    assert admin.tenant(id_)["name"] == "Ünïcode & Sons"

    press(test, f"scheduling_{id_}_edit")
    fill(test, **{f"scheduling_{id_}_weight": "much"})
    press(test, f"scheduling_{id_}_go")
    assert "Write a number" in words(test)
    fill(test, **{f"scheduling_{id_}_weight": "2.5"})
    press(test, f"scheduling_{id_}_go")
    assert admin.read(f"/tenants/{id_}/scheduling")["weight"] == 2.5

    confirm(test, f"suspend_{id_}", slug)
    assert admin.tenant(id_)["status"] == "suspended"
    press(test, f"activate_{id_}")
    assert admin.tenant(id_)["status"] == "active"
    confirm(test, f"delete_{id_}", slug)
    assert "is deleted" in words(test)
    assert not [one for one in admin.tenants(search=slug)["data"] if one["status"] == "active"]


def test_projects_are_made_renamed_and_archived(admin: Api, tenant: dict[str, Any]) -> None:
    test = open_page("tenants", admin, id=tenant["id"])
    fill(test, new_project_name="chat")
    press(test, "new_project_go")
    projects = admin.of_tenant(tenant["id"], "projects")
    [project] = projects.page()["data"]
    choose(test, "projects", 0)
    confirm(test, f"archive_{project['id']}", "chat")
    assert projects.page()["data"] == []


def test_a_tenant_is_chosen_by_its_name_in_the_address_and_follows_the_reader(
    admin: Api, tenant: dict[str, Any]
) -> None:
    test = open_page("keys", admin, tenant)
    assert test.selectbox(key="keys_tenant").value == tenant["id"]
    by_id = open_page("keys", admin, {"slug": tenant["id"]})
    assert by_id.selectbox(key="keys_tenant").value == tenant["id"]
    assert by_id.query_params["tenant"] == tenant["slug"]
