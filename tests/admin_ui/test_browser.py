"""Every page in a real browser, by every role: it stands, nothing in a name comes alive, nothing is fetched from elsewhere.

`--screenshots FOLDER` keeps pictures of all pages there: light, dark, narrow, empty and full.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from loraplex_admin.access import Access
from loraplex_admin.api import SESSION_COOKIE, Api
from loraplex_admin.catalog import PAGES, pages_for
from loraplex_platform.control.permissions import TENANT_ROLES
from playwright.sync_api import Browser, Page

from tests.admin_ui.corpus import NAMES
from tests.admin_ui.driver import access_of
from tests.admin_ui.stand import Stand, cookie_of
from tests.platform.control.stand import BASE
from tests.support import browser
from tests.support.screenshots import Pictures

pytestmark = pytest.mark.browser

ROLES = ("platform admin", "platform viewer", *TENANT_ROLES)


@pytest.fixture(scope="module")
def console_url(platform: Stand, session_folder: Path) -> Iterator[str]:
    with browser.console(platform.control_url, session_folder) as url:
        yield url


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser.chromium() as found:
        yield found


@pytest.fixture(scope="module")
def full(platform: Stand) -> dict[str, Any]:
    """A tenant whose every name is meant to deceive, with something on every page."""
    tenant = platform.tenant("full", name="<img src=x onerror=alert(1)> \u202eABC שלום")
    keys = []
    for text in NAMES:
        path = f"/admin/v1/tenants/{tenant['id']}/keys"
        answer = platform.http.post(path, json={"name": text.strip()})
        keys += [answer.json()] if answer.is_success else []
    platform.deploy(tenant["id"], "only-base", None)
    for body in (
        {
            "scope_kind": "tenant",
            "scope_id": tenant["id"],
            "metric": "cost",
            "period": "month",
            "value": "100.00",
        },
        {"scope_kind": "key", "scope_id": keys[0]["id"], "metric": "rpm", "value": "60"},
    ):
        platform.post("/limits", json=body)
    platform.post(
        f"/tenants/{tenant['id']}/webhooks",
        json={"url": "https://example.com/?<script>alert(1)</script>", "topics": ["alert"]},
    )
    assert platform.ask(keys[0]["secret"], BASE).is_success
    return tenant | {"key": keys[3]}


def session_of(platform: Stand, tenant: dict[str, Any], role: str) -> Api:
    if role.startswith("platform "):
        return platform.api(role.removeprefix("platform "))
    return platform.member(tenant["id"], role)


def enter(chromium: Browser, url: str, api: Api, **options: Any) -> tuple[Page, list[str]]:
    """A page of somebody who is logged in, and what went wrong on it: dialogs, errors, strange addresses."""
    page = browser.open_page(chromium, **options)
    trouble: list[str] = []
    page.on("dialog", lambda dialog: (trouble.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on("pageerror", lambda error: trouble.append(f"error {error}"))
    host = urlsplit(url).netloc

    def watch(request: Any) -> None:
        if urlsplit(request.url).netloc not in (host, "") and request.url.startswith("http"):
            trouble.append(f"fetched {request.url}")

    page.on("request", watch)
    page.context.add_cookies([{"name": SESSION_COOKIE, "value": cookie_of(api), "url": url}])
    return page, trouble


@pytest.mark.parametrize("role", ROLES)
def test_each_role_sees_its_pages_and_they_stand(
    role: str,
    platform: Stand,
    chromium: Browser,
    console_url: str,
    full: dict[str, Any],
    pictures: Pictures,
) -> None:
    api = session_of(platform, full, role)
    access: Access = access_of(api)
    page, trouble = enter(chromium, console_url, api)
    browser.visit(page, console_url, f"settings?tenant={full['slug']}")
    shown = page.get_by_test_id("stSidebarNavLink").all_inner_texts()
    assert [text.split("\n")[-1] for text in shown] == [one.title for one in pages_for(access)]

    for one in pages_for(access):
        browser.visit(page, console_url, f"{one.path}?tenant={full['slug']}")
        assert page.get_by_role("heading", name=one.title, exact=True).count(), one.path
        assert not page.get_by_test_id("stException").count(), one.path
        refusals = page.get_by_test_id("stAlertContentError").all_inner_texts()
        assert not [text for text in refusals if "not allow" in text], (one.path, refusals)
        pictures.take(page, f"{role.replace(' ', '-')}-{one.path}")
    assert trouble == []
    page.context.close()


@pytest.mark.parametrize(("scheme", "width"), [("dark", 1280), ("light", 420)])
def test_pages_are_as_wide_as_the_window_in_both_themes(
    scheme: str,
    width: int,
    platform: Stand,
    chromium: Browser,
    console_url: str,
    full: dict[str, Any],
    pictures: Pictures,
) -> None:
    page, trouble = enter(chromium, console_url, platform.api(), scheme=scheme, width=width)
    for one in PAGES:
        browser.visit(page, console_url, f"{one.path}?tenant={full['slug']}")
        wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0, one.path
        pictures.take(page, f"{scheme}-{width}-{one.path}")
    # What is open is the widest: a key with a hostile name, and its forms.
    browser.visit(page, console_url, f"keys?tenant={full['slug']}&id={full['key']['id']}")
    assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    pictures.take(page, f"{scheme}-{width}-keys-open")
    assert trouble == []
    page.context.close()


def test_every_hostile_name_is_shown_and_none_comes_alive(
    platform: Stand, chromium: Browser, console_url: str, full: dict[str, Any]
) -> None:
    api = platform.api()
    page, trouble = enter(chromium, console_url, api)
    keys = api.of_tenant(full["id"], "keys")
    found = [*keys.page()["data"], *keys.page(after=keys.page()["last_id"])["data"]]
    for key in found[:: 4 if len(found) > 20 else 1]:
        browser.visit(page, console_url, f"keys?tenant={full['slug']}&id={key['id']}")
        main = page.get_by_test_id("stMain")
        assert not main.locator(
            "script, iframe, [onerror], [onload], a[href^='javascript:']"
        ).count()
        assert main.get_by_text("Revoke this key").count(), key["name"]
    assert trouble == []
    page.context.close()


def test_an_empty_tenant_is_told_what_to_do_next_on_every_page(
    platform: Stand, chromium: Browser, console_url: str, pictures: Pictures
) -> None:
    tenant = platform.tenant("empty")
    page, trouble = enter(chromium, console_url, platform.api())
    slowest: tuple[float, str] = (0.0, "")
    for one in PAGES:
        browser.visit(page, console_url, f"{one.path}?tenant={tenant['slug']}")
        began = time.monotonic()
        browser.visit(page, console_url, f"{one.path}?tenant={tenant['slug']}")
        slowest = max(slowest, (time.monotonic() - began, one.path))
        pictures.take(page, f"empty-{one.path}")
    print(f"slowest page: {slowest[1]}, {slowest[0]:.2f} s from address to standing")
    assert trouble == []
    page.context.close()
