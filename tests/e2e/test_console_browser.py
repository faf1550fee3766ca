"""The console as a person uses it: headless Chromium, the real product behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.support import browser
from tests.support.fleet import Fleet

pytestmark = [pytest.mark.browser, pytest.mark.model]

ADAPTER = Path(__file__).resolve().parents[2] / "examples" / "adapters" / "pirate"


@pytest.fixture(scope="module")
def console_url(demo_fleet: Fleet, session_folder: Path) -> Iterator[str]:
    with browser.console(demo_fleet.state["control_url"], session_folder) as url:
        yield url


@pytest.fixture(scope="module")
def page(console_url: str, demo_fleet: Fleet) -> Iterator[Page]:
    with browser.chromium() as chromium:
        page = browser.open_page(chromium)
        login = demo_fleet.demo["console_login"]
        browser.log_in(page, console_url, login["email"], login["password"])
        yield page


@pytest.mark.slow
def test_an_adapter_from_upload_to_the_books(page: Page, console_url: str, tmp_path: Path) -> None:
    browser.go(page, "Adapters")
    browser.choose(page, "Tenant", "acme")
    page.get_by_text("Upload an adapter").click()
    page.get_by_label("Adapter name").first.fill("matey")
    page.get_by_label("Adapter name").first.press("Tab")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        browser.give(page, name, ADAPTER / name)
    page.get_by_role("button", name="Upload and check").click()
    page.get_by_text("is ready to serve").wait_for()
    browser.settle(page)
    page.screenshot(path=tmp_path / "report.png")

    browser.go(page, "Deployments")
    page.get_by_text("Deploy", exact=True).first.click()
    model_id = page.get_by_role("textbox", name="Model id", exact=True)
    model_id.fill("matey")
    model_id.press("Tab")
    browser.settle(page)
    browser.choose(page, "Answers with", "matey v1")
    page.get_by_role("button", name="Deploy", exact=True).click()
    page.get_by_text("from now on").wait_for()
    page.screenshot(path=tmp_path / "deployed.png")

    browser.go(page, "Playground")
    browser.choose(page, "Deployment", "matey")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.get_by_text("deployment, revision 1 · matey").wait_for()
    browser.settle(page)
    page.screenshot(path=tmp_path / "playground.png")
    assert not page.get_by_test_id("stAlert").count()

    browser.go(page, "Usage")
    page.get_by_role("button", name="Download CSV").wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    assert "matey" in Path(download.value.path()).read_text()

    browser.go(page, "Invariants")
    page.get_by_text("Everything adds up.").wait_for()
    page.screenshot(path=tmp_path / "invariants.png")

    page.reload()
    page.get_by_text("Everything adds up.").wait_for()
    page.get_by_role("button", name="Log out").click()
    page.get_by_role("heading", name="You are logged out").wait_for()
    page.goto(console_url)
    page.get_by_label("Password").wait_for()
