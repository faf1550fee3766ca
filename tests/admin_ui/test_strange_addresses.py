"""Addresses that are old, or somebody else's: what they name is not shown, nor whether it is there at all."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from loraplex_admin.access import Access
from loraplex_admin.api import SESSION_COOKIE, Api
from loraplex_admin.catalog import PAGES
from playwright.sync_api import Browser

from tests.admin_ui.driver import access_of, keys_of, open_page, press, table, words
from tests.admin_ui.hostility import watched
from tests.admin_ui.stand import Stand, cookie_of
from tests.admin_ui.test_browser import quick
from tests.support import browser

# What is chosen or opened on a page that is a tenant's own; the others are of the platform.
OF_A_TENANT = (
    *("members", "keys", "limits", "adapters", "deployments", "rollouts", "evals", "playground"),
    *("usage", "invoices", "requests", "audit", "webhooks"),
)
OPENED = ("keys", "adapters", "deployments", "rollouts", "evals", "invoices", "requests", "audit")
OPENED += ("webhooks", "tenants", "members")
SEARCHED = (
    ("limits", "request"),
    ("requests", "request"),
    ("requests", "revision"),
    ("requests", "rollout"),
)


@pytest.fixture(scope="module")
def mine(platform: Stand) -> dict[str, Any]:
    """A tenant with an owner of its own, who is nobody elsewhere."""
    tenant = platform.tenant("strangers")
    platform.post(f"/tenants/{tenant['id']}/keys", json={"name": "k"})
    return tenant | {"owner": platform.member(tenant["id"], "owner")}


@pytest.fixture(scope="module")
def owner(mine: dict[str, Any]) -> Api:
    return mine["owner"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def access(owner: Api) -> Access:
    return access_of(owner)


def never(id_: str) -> str:
    """An id of the same kind that stands for nothing."""
    kind, separator, _ = id_.partition("_")
    return f"{kind}_{uuid.uuid4().hex}" if separator else f"{id_}-never"


def said(path: str, api: Api, access: Access, tenant: dict[str, Any], **in_address: str) -> str:
    """What a page says, with what was asked for taken out of it."""
    text = words(open_page(path, api, tenant, access=access, **in_address))
    for value in (*in_address.values(), tenant["slug"]):
        text = text.replace(value, "…")
    return text


@pytest.mark.parametrize("path", quick(OF_A_TENANT, ("keys", "usage")))
@pytest.mark.parametrize("name", quick(("slug", "id"), ("slug",)))
def test_a_foreign_tenants_address_says_what_one_of_nobody_says(
    path: str, name: str, owner: Api, access: Access, full: dict[str, Any]
) -> None:
    foreign = {"slug": full[name]}
    nobody = {"slug": never(full["id"]) if name == "id" else "no-such-tenant"}

    answer = said(path, owner, access, foreign)

    assert answer == said(path, owner, access, nobody)
    assert "no such tenant, or you may not see this" in answer
    assert "Nothing is shown" in answer
    test = open_page(path, owner, foreign, access=access)
    assert not test.dataframe
    press(test, "forget_tenant")
    assert f"{path}_tenant" in keys_of(test)
    # Where all tenants can be looked at together, that is where a choice begins.
    assert test.query_params.get("tenant", "strangers") == "strangers"


@pytest.mark.parametrize("path", quick(OPENED, ("keys", "audit")))
def test_a_foreign_objects_address_says_what_one_of_nothing_says(
    path: str, owner: Api, access: Access, mine: dict[str, Any], full: dict[str, Any]
) -> None:
    opened = full["opened"].get(path) or {"id": full["viewer"].session()["user"]["id"]}

    answer = said(path, owner, access, mine, **opened)

    assert answer == said(path, owner, access, mine, id=never(opened["id"]))
    assert full["name"] not in answer
    assert full["slug"] not in answer
    if path != "requests":
        assert "What this address opens is not here" in answer
        test = open_page(path, owner, mine, access=access, **opened)
        [close] = [key for key in keys_of(test) if key.endswith("_close")]
        press(test, close)
        assert "id" not in test.query_params
        assert "What this address opens" not in words(test)


@pytest.mark.parametrize(("path", "name"), quick(SEARCHED, SEARCHED[:1]))
def test_a_foreign_id_that_is_searched_says_what_one_of_nothing_says(
    path: str,
    name: str,
    owner: Api,
    access: Access,
    mine: dict[str, Any],
    full: dict[str, Any],
) -> None:
    id_ = {
        "request": full["opened"]["limits"]["request"],
        "rollout": full["opened"]["rollouts"]["id"],
        "revision": f"rev_{uuid.uuid4().hex}",
    }[name]

    assert said(path, owner, access, mine, **{name: id_}) == said(
        path, owner, access, mine, **{name: never(id_)}
    )


@pytest.mark.parametrize("name", ["model", "beside"])
def test_a_foreign_deployments_address_says_what_one_of_nothing_says(
    name: str,
    platform: Stand,
    owner: Api,
    access: Access,
    mine: dict[str, Any],
    full: dict[str, Any],
) -> None:
    platform.deploy(mine["id"], "my-own", None)

    answer = said("playground", owner, access, mine, **{name: "capitals"})

    assert answer == said("playground", owner, access, mine, **{name: "capitals-never"})
    assert full["name"] not in answer


@pytest.mark.parametrize("path", quick([page.path for page in PAGES], ("keys",)))
def test_an_address_as_somebody_has_cut_it_leaves_the_page_standing(
    path: str, platform: Stand, full: dict[str, Any]
) -> None:
    api = platform.api()
    for value in ("x", "key_", "%00", "../../tenants"):
        test = open_page(path, api, full, id=value, after=value, q=value)

        assert test.title


def test_what_was_deleted_meanwhile_is_said_to_be_gone(
    platform: Stand, tenant: dict[str, Any]
) -> None:
    admin = platform.api()
    hook = platform.post(
        f"/tenants/{tenant['id']}/webhooks",
        json={"url": "https://example.com/hook", "topics": ["alert"]},
    )
    test = open_page("webhooks", admin, tenant, id=hook["id"])
    assert "What this address opens" not in words(test)
    admin.of_tenant(tenant["id"], "webhooks").remove(hook["id"], version=hook.get("version"))

    test.run()

    assert "What this address opens is not here" in words(test)
    press(test, "webhooks_close")
    assert "id" not in test.query_params


def test_a_search_without_a_match_offers_nothing(platform: Stand, tenant: dict[str, Any]) -> None:
    admin = platform.api()
    platform.post(f"/tenants/{tenant['id']}/keys", json={"name": "the newest"})
    test = open_page("limits", admin, tenant)
    key = f"effective_key_{tenant['id']}"
    assert key in keys_of(test)
    test.session_state[f"{key}_search"] = "nothing like it"

    test.run()

    assert key not in keys_of(test)
    assert "No keys have that in their name" in words(test)
    assert "no key yet" not in words(test)


@pytest.mark.browser
def test_a_member_who_follows_a_foreign_link_reads_nothing_of_it(
    chromium: Browser, console_url: str, mine: dict[str, Any], full: dict[str, Any]
) -> None:
    cookie = {"name": SESSION_COOKIE, "value": cookie_of(mine["owner"]), "url": console_url}
    read = []
    with watched(chromium, console_url, [cookie]) as found:
        for slug in (full["slug"], "no-such-tenant"):
            key = full["opened"]["keys"]["id"]
            browser.visit(found.page, console_url, f"keys?tenant={slug}&id={key}")
            text = found.page.get_by_test_id("stMain").inner_text()
            assert "Nothing is shown" in text
            read.append(text.replace(slug, "…"))
        assert read[0] == read[1]
        browser.press(found.page, "Choose another")
        found.page.get_by_test_id("stDataFrame").first.wait_for()  # of their own key
        assert "id=" not in found.page.url
        assert found.trouble == []


def test_all_projects_and_revisions_can_be_chosen_however_many_there_are(
    platform: Stand, tenant: dict[str, Any]
) -> None:
    admin, at = platform.api(), f"/tenants/{tenant['id']}"
    for number in range(101):
        platform.post(f"{at}/projects", json={"name": f"project {number:03}"})
    test = open_page("keys", admin, tenant)
    assert "project 000" not in test.selectbox(key="new_key_project_id").options

    test.text_input(key="new_key_project_search").set_value("project 000").run()

    assert list(test.selectbox(key="new_key_project_id").options) == ["none", "project 000"]
    assert table(test, "keys") is None
