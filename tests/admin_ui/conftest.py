"""One platform for all tests of the console: they make tenants of their own in it."""

from __future__ import annotations

import functools
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from streamlit.components.v2 import manifest_scanner

from tests.admin_ui import full_tenant
from tests.admin_ui.altered import Altered, altered_api
from tests.admin_ui.stand import Stand, stand
from tests.support import browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.support.postgres import PostgresServer

_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def _main_stays_what_it_was(_main: object = sys.modules["__main__"]) -> Iterator[None]:
    """Streamlit's test driver leaves its script as `__main__`, which processes that are spawned later would run."""
    yield
    sys.modules["__main__"] = _main  # type: ignore[assignment]


@pytest.fixture(scope="package", autouse=True)
def _components_are_looked_for_once() -> Iterator[None]:
    """Streamlit's test driver reads the metadata of every installed package for each page that is opened, which is
    most of the time that a page takes. What is installed does not change meanwhile."""
    found = functools.cache(manifest_scanner.scan_component_manifests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", found)
        yield


@pytest.fixture(scope="package")
def platform(postgres_server: PostgresServer, session_folder: Path) -> Iterator[Stand]:
    """Control API, gateway and worker on real ports; see stand.py."""
    from loraplex_platform.local.embedded import start_redis

    with tempfile.TemporaryDirectory(prefix="lpx-") as name, postgres_server.clone() as url:
        folder = Path(name)
        # One of its own: other tests empty theirs.
        redis = start_redis(folder / "redis")
        try:
            with stand(url, redis.url, folder) as made:
                yield made
        finally:
            redis.stop()


@pytest.fixture(scope="package")
def _between(platform: Stand) -> Iterator[tuple[Altered, str]]:
    with altered_api(platform.control_url) as found:
        yield found


@pytest.fixture(scope="package")
def console_url(_between: tuple[Altered, str], session_folder: Path) -> Iterator[str]:
    """A console for browsers, whose control API is the platform's, behind `between`."""
    with browser.console(_between[1], session_folder) as url:
        yield url


@pytest.fixture
def between(_between: tuple[Altered, str]) -> Iterator[Altered]:
    """What stands between the browser's console and its control API; as it was after each test."""
    altered = _between[0]
    yield altered
    altered.refusal, altered.texts = None, ()
    altered.is_away = altered.loses_answers = False


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Not for longer: while Playwright runs, its event loop is the thread's, and other tests need one of theirs."""
    with browser.chromium() as found:
        yield found


@pytest.fixture
def tenant(platform: Stand) -> dict[str, Any]:
    """A tenant of this test's own."""
    return platform.tenant(f"tenant-{next(_numbers)}")


@pytest.fixture(scope="package")
def full(platform: Stand) -> dict[str, Any]:
    """One with something on every page, whose every name is meant to deceive; read only."""
    return full_tenant.fill(platform, "full", "<img src=x onerror=alert(1)> \u202eABC שלום")


@pytest.fixture(scope="package")
def empty(platform: Stand) -> dict[str, Any]:
    """One with nothing; read only."""
    return platform.tenant("empty")
