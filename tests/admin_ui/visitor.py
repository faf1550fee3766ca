"""Somebody at the console with a browser of their own."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode, urlsplit

from loraplex_admin.api import SESSION_COOKIE, Api
from playwright.sync_api import Browser, Page

from tests.admin_ui.stand import cookie_of
from tests.support import browser


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


def address(path: str, tenant: dict[str, Any]) -> str:
    """A page with what is open on it."""
    query = {"tenant": tenant["slug"]} | tenant.get("opened", {}).get(path, {})
    return f"{path}?{urlencode(query)}"


def width_beyond(page: Page) -> int:
    """By how much the page is wider than its window, in pixels."""
    return int(page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))
