"""What the console shows on the first day: no replica, no tenant; then one tenant that has nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loraplex_admin.api import Api
from loraplex_admin.catalog import PAGES
from playwright.sync_api import Browser

from tests.admin_ui.driver import open_page, words
from tests.admin_ui.stand import Stand, stand
from tests.admin_ui.visitor import address, enter, width_beyond
from tests.support import browser
from tests.support.postgres import PostgresServer
from tests.support.screenshots import Pictures, name_of

# What a page says instead of what it would show; those that are of a tenant: that there is none.
SAYS = {
    "overview": "No engine replica is registered",
    "fleet": "No engine replica is registered",
    "invariants": "Everything adds up",
    "tenants": "There is no tenant yet",
    "models": "No engine was ever seen here",
    "limits": "Nothing is limited here",
    "deployments": "the base model that all tenants reach",
    "rollouts": "Nothing was rolled out yet",
    "usage": "Nothing was used",
    "invoices": "There is no invoice yet",
    "prices": "Tick a row",
    "requests": "No request yet",
    "audit": "Tick a row",
    "alerts": "Nothing has called for attention",
    "webhooks": "Nobody is told of anything yet",
    "settings": "Who may log in",
}
NO_TENANT = "There is no tenant yet"
# Those whose pictures need none.
OF_THE_PLATFORM = ("overview", "fleet", "invariants", "tenants", "models", "prices", "settings")


@pytest.fixture(scope="module")
def fresh(postgres_server: PostgresServer) -> Iterator[Stand]:
    """A platform as `loraplex migrate` leaves it, whose engine has not announced itself."""
    from loraplex_platform.local.embedded import start_redis

    with tempfile.TemporaryDirectory(prefix="lpx-") as name, postgres_server.clone() as url:
        redis = start_redis(Path(name) / "redis")
        try:
            with stand(url, redis.url, Path(name), has_engine=False) as made:
                yield made
        finally:
            redis.stop()


@pytest.fixture(scope="module")
def admin(fresh: Stand) -> Api:
    return fresh.api()


@pytest.mark.parametrize("path", [one.path for one in PAGES])
def test_a_platform_without_anything_says_what_comes_first(
    path: str, fresh: Stand, admin: Api
) -> None:
    test = open_page(path, admin)

    assert not test.error, words(test)
    assert SAYS.get(path, NO_TENANT) in words(test)


@pytest.mark.browser
@pytest.mark.slow
def test_every_page_stands_in_a_browser_before_there_is_anything(
    fresh: Stand, admin: Api, chromium: Browser, session_folder: Path, pictures: Pictures
) -> None:
    """Last, as it makes a tenant."""
    with browser.console(fresh.control_url, session_folder) as url:
        page, trouble = enter(chromium, url, admin)
        made: dict[str, Any] = {}
        for path in sorted(
            (one.path for one in PAGES), key=lambda path: path not in OF_THE_PLATFORM
        ):
            if path not in OF_THE_PLATFORM:
                made = made or fresh.tenant("acme")
            with browser.told(page):
                browser.visit(page, url, address(path, made) if made else path)
                assert not page.get_by_test_id("stException").count()
                assert not page.get_by_test_id("stAlertContentError").count()
                assert width_beyond(page) <= 0
                pictures.take(page, name_of("empty", path))
        assert trouble == []
        page.context.close()
