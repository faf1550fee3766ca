"""Every hostile text on every page in a real browser: nothing runs, is made or fetched, and all of it is read as it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from loraplex_admin.api import SESSION_COOKIE
from loraplex_admin.catalog import PAGES
from playwright.sync_api import Browser

from tests.admin_ui.altered import Altered
from tests.admin_ui.hostility import WORD, Group, Watched, groups, judge, watched
from tests.admin_ui.stand import Stand, cookie_of
from tests.admin_ui.surfaces import MUTANTS, SURFACES, texts_of, values_of
from tests.admin_ui.test_browser import address, quick
from tests.support import browser

pytestmark = pytest.mark.browser

PATHS = [page.path for page in PAGES]
GROUPS = groups()


@pytest.fixture(scope="module")
def operator(platform: Stand, chromium: Browser, console_url: str) -> Iterator[Watched]:
    """A platform admin's page, for tests that only look."""
    cookie = {"name": SESSION_COOKIE, "value": cookie_of(platform.api()), "url": console_url}
    with watched(chromium, console_url, [cookie]) as found:
        yield found


@pytest.mark.parametrize("path", quick(PATHS, ("requests",)))
def test_each_text_is_words_wherever_a_page_shows_it(
    path: str,
    operator: Watched,
    console_url: str,
    full: dict[str, Any],
    between: Altered,
) -> None:
    between.texts = (WORD,)
    harmless = operator.look(console_url, address(path, full))
    assert harmless.ran == harmless.made == []
    num_changed, began_s, wrong = between.num_changed, time.monotonic(), []
    for group in GROUPS:
        between.texts = (group.value,)
        look = operator.look(console_url, address(path, full))
        wrong += [f"{group.texts[0][:30]!r}: {one}" for one in judge(look, harmless, group)]
    assert operator.trouble == []
    assert not wrong, "\n".join(wrong)
    where = {name: harmless.num(WORD, name) for name in ("words", "cells", "codes", "drawn")}
    print(
        f"{path}: {sum(len(one.texts) for one in GROUPS)} texts, {between.num_changed - num_changed} values, shown {where}, "
        f"{time.monotonic() - began_s:.0f} s"
    )


@pytest.fixture(scope="module")
def surfaces(chromium: Browser, session_folder: Path) -> Iterator[tuple[Watched, str]]:
    """A page of all surfaces by themselves, and its URL; see surfaces.py."""
    path = Path(__file__).with_name("surfaces.py")
    with browser.script(path, session_folder) as url, watched(chromium, url) as found:
        yield found, url


def wrong_on(surfaces: tuple[Watched, str], surface: str, mutant: str = "") -> list[str]:
    """What is judged of a surface that has each text once."""
    page, url = surfaces
    page.trouble.clear()
    harmless = page.look(url, f"?surface={quote(surface)}")
    look = page.look(url, f"?surface={quote(surface)}&hostile=1&mutant={quote(mutant)}")
    # A difference has few rows, and many texts in each.
    num_values = 1 if surface == "difference" else len(values_of(surface, is_hostile=True))
    return [
        *page.trouble,
        *judge(look, harmless, Group(tuple(texts_of(surface)), ""), num_values),
    ]


@pytest.mark.parametrize("surface", quick(SURFACES, ("refusal", "bars")))
def test_each_text_is_words_on_each_surface(surface: str, surfaces: tuple[Watched, str]) -> None:
    wrong = wrong_on(surfaces, surface)

    assert not wrong, "\n".join(wrong)
    print(f"{surface}: {len(texts_of(surface))} texts")


@pytest.mark.parametrize("mutant", quick(MUTANTS, ("literal in a refusal",)))
def test_an_escape_that_is_broken_is_found_where_it_is_used(
    mutant: str, surfaces: tuple[Watched, str]
) -> None:
    surface = MUTANTS[mutant][0]

    wrong = wrong_on(surfaces, surface, mutant)

    assert wrong
    if mutant == "script":  # which runs as soon as its frame is there
        surfaces[0].page.wait_for_function("() => window.__seen.ran.includes('alert(1)')")
    print(f"{mutant} on {surface}: {len(wrong)}, {wrong[0][:100]!a}")


# One page of each kind of name in an address: what is typed, opened, filtered by.
ADDRESSES = (
    ("keys", "tenant"),
    ("keys", "q"),
    ("keys", "id"),
    ("audit", "id"),
    ("rollouts", "id"),
    ("requests", "request"),
    ("requests", "revision"),
    ("limits", "request"),
    ("playground", "model"),
    ("invoices", "status"),
    ("usage", "by"),
)


@pytest.mark.parametrize(("path", "name"), quick(ADDRESSES, ()))
def test_each_text_is_words_in_an_address(
    path: str, name: str, operator: Watched, console_url: str, full: dict[str, Any]
) -> None:
    def at(text: str) -> str:
        return f"{path}?{urlencode({'tenant': full['slug']} | {name: text})}"

    operator.trouble.clear()
    harmless = operator.look(console_url, at(WORD))
    wrong = []
    for group in GROUPS:
        look = operator.look(console_url, at(group.value[:2000]))
        wrong += judge(look, harmless, group)
    assert operator.trouble == []
    assert not wrong, "\n".join(wrong)
    print(f"{path}?{name}: {sum(len(one.texts) for one in GROUPS)} texts")
