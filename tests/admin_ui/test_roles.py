"""Role x page: what each role is shown is what the API's own table allows, and what is hidden is refused there."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from loraplex_admin.access import Access
from loraplex_admin.api import Api
from loraplex_admin.catalog import PAGES, pages_for
from loraplex_platform.control.permissions import ACTIONS, TENANT_ROLES, PlatformRole

from tests.admin_ui.driver import access_of, keys_of, open_page, words
from tests.admin_ui.stand import Stand

PLATFORM_ROLES = get_args(PlatformRole)
ROLES = (*(f"platform {role}" for role in PLATFORM_ROLES), *TENANT_ROLES)
# What a login may do without a role anywhere: look at itself.
ALWAYS = {"settings"}
# What changes something, and is offered to who may.
WRITES = {
    "keys": ("key.write", "new_key_go"),
    "members": ("member.write", "invite_go"),
    "tenants": ("tenant.create", "new_tenant_go"),
    "limits": ("limit.write", "new_limit_go"),
    "prices": ("price.write", "new_book_go"),
    "invoices": ("invoice.write", "draft_go"),
    "webhooks": ("webhook.write", "new_webhook_go"),
    "fleet": ("fleet.write", "keep_go"),
    "adapters": ("adapter.write", "upload_go"),
    "deployments": ("deployment.write", "deploy_go"),
    "rollouts": ("rollout.write", "new_rollout_go"),
    "evals": ("eval.write", "new_suite_go"),
    "settings": ("user.write", "new_user_go"),
}


def expected(role: str, action: str) -> bool:
    """As the API's own table has it, read here without the API."""
    found = ACTIONS[action]
    if found.kind == "self" or role == "platform admin":
        return True
    if role == "platform viewer":
        return found.is_read
    return role in found.roles


@pytest.fixture(scope="module")
def logins(platform: Stand) -> dict[str, Api]:
    """A client for each role; members are of the tenant `roles`."""
    tenant = platform.tenant("roles")
    platform.post(f"/tenants/{tenant['id']}/keys", json={"name": "k"})
    platform.deploy(tenant["id"], "only-base", None)
    apis = {f"platform {role}": platform.api(role) for role in PLATFORM_ROLES}
    return apis | {role: platform.member(tenant["id"], role) for role in TENANT_ROLES}


@pytest.fixture(scope="module")
def tenant(platform: Stand, logins: dict[str, Api]) -> dict[str, Any]:
    del logins  # which made it
    return dict(platform.http.get("/admin/v1/tenants?search=roles").json()["data"][0])


@pytest.mark.parametrize("role", ROLES)
def test_the_sidebar_is_what_the_apis_table_allows(role: str, logins: dict[str, Api]) -> None:
    shown = {page.path for page in pages_for(access_of(logins[role]))}

    assert shown == {page.path for page in PAGES if expected(role, page.action)}
    assert shown >= ALWAYS


@pytest.mark.parametrize(
    "role",
    [role if role == "billing" else pytest.param(role, marks=pytest.mark.slow) for role in ROLES],
)
def test_each_page_works_or_is_refused_by_the_api_itself(
    role: str, logins: dict[str, Api], tenant: dict[str, Any]
) -> None:
    api = logins[role]
    access = access_of(api)
    everything = Access(access.user | {"role": "admin"}, frozenset(ACTIONS), {})
    for page in PAGES:
        if expected(role, page.action):
            test = open_page(page.path, api, tenant)
            assert not test.error, (page.path, test.error)
            action, button = WRITES.get(page.path, (None, ""))
            if action is not None:
                assert (button in keys_of(test)) == access.may(action, tenant["id"]), page.path
        else:
            # Even a console that believed them to be an admin would get nothing out of the API.
            test = open_page(page.path, api, tenant, access=everything)
            assert any(
                "not allow" in e.value or "may only read" in e.value for e in test.error
            ) or (
                page.path == "playground"  # which asks only when its button is pressed
            ), (page.path, words(test))


def test_pages_name_actions_that_there_are_and_paths_once() -> None:
    assert {page.action for page in PAGES} <= set(ACTIONS)
    assert len({page.path for page in PAGES}) == len(PAGES)
    assert len({page.title for page in PAGES}) == len(PAGES)


def test_somebody_without_any_role_sees_their_settings_only() -> None:
    nobody = Access(
        {"id": "usr_1", "email": "n@example.com", "role": None}, frozenset({"session.read"}), {}
    )

    assert [page.path for page in pages_for(nobody)] == ["settings"]
    assert nobody.role == "no tenant yet"


def test_a_member_of_two_tenants_may_in_each_what_its_role_says() -> None:
    access = Access(
        {"id": "usr_1", "email": "n@example.com", "role": None},
        frozenset(),
        {"ten_a": frozenset({"key.read", "key.write"}), "ten_b": frozenset({"key.read"})},
    )

    assert access.may("key.write")
    assert access.may("key.write", "ten_a")
    assert not access.may("key.write", "ten_b")
    assert not access.may("key.read", "ten_c")
    assert not access.is_operator
