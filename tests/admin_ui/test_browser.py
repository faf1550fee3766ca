"""Every page in a real browser, by every role: it stands, nothing in a name comes alive, nothing is fetched from elsewhere.

`--screenshots FOLDER` keeps pictures of all pages there: by role, dark, narrow, hostile and bare. Those in the docs are
taken elsewhere (test_fresh_platform.py, tests/e2e/test_console_pictures.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from loraplex_admin.api import Api
from loraplex_admin.catalog import PAGES, pages_for
from loraplex_platform.control.permissions import TENANT_ROLES
from playwright.sync_api import Browser, Page

from tests.admin_ui.altered import Altered
from tests.admin_ui.corpus import CORPUS
from tests.admin_ui.driver import access_of
from tests.admin_ui.stand import Stand
from tests.admin_ui.visitor import address, enter, width_beyond
from tests.support import browser
from tests.support.screenshots import Pictures

pytestmark = pytest.mark.browser

ROLES = ("platform admin", "platform viewer", *TENANT_ROLES)
# The others, and the rest of the pictures, with the slow tests.
QUICK_ROLES = ("billing",)
QUICK_LOOKS = (("dark", 1280, "usage"), ("light", 420, "rollouts"))
# What would be alive, had it come through: nothing of Streamlit's own looks like this.
ALIVE = (
    "script, iframe, style, [onerror], [onload], [onmouseover], [ontoggle], "
    "a[href^='javascript:'], a[href*='example.com'], img[src='x'], img[src*='example.com'], "
    "details[ontoggle], math:not(.katex math)"
)


def quick(values: Any, some: Any) -> list[Any]:
    """Parameters, of which only some are tried each time."""
    return [
        one
        if one in some
        else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow)
        for one in values
    ]


def session_of(platform: Stand, tenant: dict[str, Any], role: str) -> Api:
    if role.startswith("platform "):
        return platform.api(role.removeprefix("platform "))
    if role in tenant:  # one of its people already
        return tenant[role]  # type: ignore[no-any-return]
    return platform.member(tenant["id"], role)


@pytest.fixture(scope="module")
def operator(
    platform: Stand, chromium: Browser, console_url: str
) -> Iterator[tuple[Page, list[str]]]:
    """A page of a platform admin's, for tests that only look."""
    page, trouble = enter(chromium, console_url, platform.api())
    yield page, trouble
    page.context.close()


@pytest.mark.parametrize("role", quick(ROLES, QUICK_ROLES))
def test_each_role_sees_its_pages_and_is_told_of_the_others(
    role: str,
    platform: Stand,
    chromium: Browser,
    console_url: str,
    full: dict[str, Any],
    pictures: Pictures,
) -> None:
    api = session_of(platform, full, role)
    allowed = pages_for(access_of(api))
    page, trouble = enter(chromium, console_url, api)
    browser.visit(page, console_url, f"settings?tenant={full['slug']}")
    shown = page.get_by_test_id("stSidebarNavLink").all_inner_texts()
    assert [text.split("\n")[-1] for text in shown] == [one.title for one in allowed]

    for one in PAGES:
        if one in allowed:
            browser.go(page, one.title)
        else:
            browser.visit(page, console_url, address(one.path, full))
        assert page.get_by_role("heading", name=one.title, exact=True).count(), one.path
        assert not page.get_by_test_id("stException").count(), one.path
        errors = page.get_by_test_id("stAlertContentError").all_inner_texts()
        refusals = [text for text in errors if "not allow" in text]
        assert bool(refusals) == (one not in allowed), (one.path, errors)
        pictures.take(page, f"{role.replace(' ', '-')}-{one.path}")
    assert trouble == []
    page.context.close()
    seen = " ".join("sees" if one in allowed else "no" for one in PAGES)
    print(f"{role}: {seen}")


@pytest.mark.parametrize(
    ("scheme", "width", "path"),
    quick(
        [(*look, one.path) for look in (("dark", 1280), ("light", 420)) for one in PAGES],
        QUICK_LOOKS,
    ),
)
def test_pages_are_as_wide_as_the_window_in_both_themes(
    scheme: str,
    width: int,
    path: str,
    platform: Stand,
    chromium: Browser,
    console_url: str,
    full: dict[str, Any],
    pictures: Pictures,
) -> None:
    page, trouble = enter(chromium, console_url, platform.api(), scheme=scheme, width=width)
    browser.visit(page, console_url, address(path, full))
    assert width_beyond(page) <= 0
    pictures.take(page, f"{scheme}-{width}-{path}")
    assert trouble == []
    page.context.close()


@pytest.mark.parametrize("first", quick(range(0, len(CORPUS), 9), [0]))
@pytest.mark.parametrize("path", quick([one.path for one in PAGES], ("requests",)))
def test_nothing_that_an_api_full_of_hostile_text_says_comes_alive(
    path: str,
    first: int,
    operator: tuple[Page, list[str]],
    console_url: str,
    full: dict[str, Any],
    between: Altered,
    pictures: Pictures,
) -> None:
    page, trouble = operator
    between.texts = CORPUS[first : first + 9]
    before = between.num_changed

    browser.visit(page, console_url, address(path, full))

    main = page.get_by_test_id("stMain")
    alive = main.locator(ALIVE).evaluate_all("all => all.map(one => one.outerHTML.slice(0, 200))")
    assert alive == []
    assert not page.get_by_test_id("stException").count()
    assert width_beyond(page) <= 0
    pictures.take(page, f"hostile-{first}-{path}")
    assert trouble == []
    print(f"{path}: {between.num_changed - before} hostile values")


@pytest.mark.parametrize("path", quick([one.path for one in PAGES], ("keys",)))
def test_an_empty_tenant_stands_on_every_page(
    path: str,
    operator: tuple[Page, list[str]],
    console_url: str,
    empty: dict[str, Any],
    between: Altered,
    pictures: Pictures,
) -> None:
    page, trouble = operator

    browser.visit(page, console_url, address(path, empty))

    assert not page.get_by_test_id("stException").count()
    pictures.take(page, f"bare-{path}")
    assert trouble == []
