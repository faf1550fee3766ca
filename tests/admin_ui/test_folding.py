"""A form that has done its work is folded away, and the page says what was done: in a browser, which alone knows what is open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from loraplex_admin.api import SESSION_COOKIE
from playwright.sync_api import Browser, Page, expect

from tests.admin_ui.hostility import watched
from tests.admin_ui.stand import Stand, cookie_of
from tests.admin_ui.test_browser import quick
from tests.support import browser

pytestmark = pytest.mark.browser


def _invite(page: Page) -> None:
    browser.write(page, "E-mail", "ada@example.org")
    browser.press(page, "Invite")


def _key(page: Page) -> None:
    browser.write(page, "Name", "production")
    browser.press(page, "Create key")


def _credit(page: Page) -> None:
    browser.write(page, "Dollars", "5.00")
    browser.write(page, "Reason", "goodwill")
    browser.press(page, "Book it")


FORMS: dict[str, tuple[str, Callable[[Page], None], str]] = {
    "keys": ("New key", _key, "Copy the secret"),
    "members": ("Invite somebody", _invite, "ada@example.org"),
    "invoices": ("Credit or debit", _credit, "is booked"),
}


@pytest.mark.parametrize("path", quick(FORMS, ("keys",)))
def test_a_form_that_is_done_is_folded_and_says_so(
    path: str, platform: Stand, chromium: Browser, console_url: str, tenant: dict[str, Any]
) -> None:
    title, send, told = FORMS[path]
    cookie = {"name": SESSION_COOKIE, "value": cookie_of(platform.api()), "url": console_url}
    with watched(chromium, console_url, [cookie]) as found:
        page = found.page
        browser.visit(page, console_url, f"{path}?tenant={tenant['slug']}")
        browser.unfold(page, title)
        fold = page.get_by_test_id("stExpander").filter(has_text=title).first.locator("details")
        assert fold.first.get_attribute("open") is not None

        send(page)

        page.get_by_text(told).first.wait_for()
        expect(fold.first).to_have_js_property("open", False, timeout=browser.DEADLINE_S * 1000)
        assert found.trouble == []


def test_a_confirmation_that_was_given_is_not_given_again(
    platform: Stand, chromium: Browser, console_url: str
) -> None:
    email = platform.user("viewer", "gone@example.com")
    [user] = platform.http.get("/admin/v1/users", params={"search": email}).json()["data"]
    cookie = {"name": SESSION_COOKIE, "value": cookie_of(platform.api()), "url": console_url}
    with watched(chromium, console_url, [cookie]) as found:
        page, title = found.page, "End all of their logins"
        browser.visit(page, console_url, f"settings?id={user['id']}&q=gone")

        browser.confirm(page, title, email, "End them")

        page.get_by_text("has to log in anew").wait_for()
        fold = page.get_by_test_id("stExpander").filter(has_text=title).first
        details = fold.locator("details").first
        expect(details).to_have_js_property("open", False, timeout=browser.DEADLINE_S * 1000)
        browser.unfold(page, title)
        assert fold.get_by_label("Type the name above to confirm").input_value() == ""
