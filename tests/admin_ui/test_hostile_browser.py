"""Every hostile text on every page in a real browser: nothing runs, is made or fetched, and all of it is read as it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from loraplex_admin.api import SESSION_COOKIE
from loraplex_admin.catalog import PAGES
from playwright.sync_api import Browser

from tests.admin_ui.altered import Altered
from tests.admin_ui.hostility import WORD, Watched, groups, judge, watched
from tests.admin_ui.stand import Stand, cookie_of
from tests.admin_ui.test_browser import address, quick

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
        found = [f"{group.texts[0][:30]!r}: {one}" for one in judge(look, harmless, group)]
        wrong += found
        for one in found:
            print("WRONG", path, one, flush=True)
    assert operator.trouble == []
    assert not wrong, "\n".join(wrong)
    where = {name: harmless.num(WORD, name) for name in ("words", "cells", "codes", "drawn")}
    print(
        f"{path}: {sum(len(one.texts) for one in GROUPS)} texts, {between.num_changed - num_changed} values, shown {where}, "
        f"{time.monotonic() - began_s:.0f} s"
    )
