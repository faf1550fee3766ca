"""An operator's whole story in the console, in headless Chromium, with the real product behind it: a tenant, its key, an
adapter, a deployment, a canary that is watched, promoted and rolled back, and the invoice.

`LORAPLEX_SCREENSHOTS=folder` keeps a picture of each step there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.support import browser
from tests.support.fleet import Fleet
from tests.support.processes import wait_until

pytestmark = [pytest.mark.browser, pytest.mark.model]

ADAPTERS = Path(__file__).resolve().parents[2] / "examples" / "adapters"


@pytest.fixture(scope="module")
def console_url(demo_fleet: Fleet, session_folder: Path) -> Iterator[str]:
    with browser.console(demo_fleet.state["control_url"], session_folder) as url:
        yield url


@pytest.fixture
def page(console_url: str, demo_fleet: Fleet) -> Iterator[Page]:
    with browser.chromium() as chromium:
        page = browser.open_page(chromium)
        login = demo_fleet.demo["console_login"]
        browser.log_in(page, console_url, login["email"], login["password"])
        yield page


def ask(fleet: Fleet, secret: str, question: str) -> httpx.Response:
    body = {
        "model": "story",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 8,
    }
    url = f"{fleet.demo['gateway_url']}/v1/chat/completions"
    headers = {"authorization": f"Bearer {secret}"}
    return httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False)


def test_from_a_new_tenant_to_a_canary_rolled_back_and_the_invoice(
    page: Page, demo_fleet: Fleet, tmp_path: Path
) -> None:
    pictures = Path(os.environ.get("LORAPLEX_SCREENSHOTS") or tmp_path)
    steps = iter(range(1, 99))

    def picture(name: str) -> None:
        page.screenshot(path=pictures / f"story-{next(steps):02}-{name}.png", full_page=True)

    # A tenant, and its key.
    browser.go(page, "Tenants")
    browser.unfold(page, "New tenant")
    browser.write(page, "Slug", "story")
    browser.press(page, "Create tenant")
    page.get_by_text("Next: a key under").wait_for()
    picture("tenant")
    browser.go(page, "API keys")
    browser.choose(page, "Tenant", "story")
    browser.unfold(page, "New key")
    browser.write(page, "Name", "production")
    browser.press(page, "Create key")
    page.get_by_text("it is shown this once").wait_for()
    secret = page.get_by_test_id("stCode").first.inner_text().strip()
    assert secret.startswith("lpx_sk_")
    picture("key")
    browser.press(page, "I have copied it")
    expect(page.get_by_text(secret)).to_have_count(0)

    # Two versions of an adapter; the first one answers.
    browser.go(page, "Adapters")
    for number, folder in ((1, "pirate"), (2, "capitals")):
        browser.unfold(page, "Upload an adapter")
        browser.write(page, "Adapter name", "voice")
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            browser.give(page, name, ADAPTERS / folder / name)
        browser.press(page, "Upload and check")
        page.get_by_text(f"version {number} is ready to serve").wait_for()
    picture("adapter")
    browser.go(page, "Deployments")
    browser.unfold(page, "Deploy")
    browser.write(page, "Model id", "story")
    browser.choose(page, "Answers with", "voice v1")
    page.get_by_role("button", name="Deploy", exact=True).click()
    page.get_by_text("from now on").wait_for()
    picture("deployment")
    assert ask(demo_fleet, secret, "Who are you?").is_success

    # The second one as a revision, then a canary for half of the subjects.
    browser.visit(page, page.url.split("/deployments")[0], "deployments?tenant=story&id=story")
    browser.unfold(page, "New revision")
    part = page.get_by_test_id("stExpander").filter(has_text="New revision").first
    part.get_by_role("combobox", name="Answers with").click()
    page.get_by_role("option", name="voice v2", exact=True).click()
    browser.press(page, "Make the revision")
    page.get_by_text("Nothing answers with it before").wait_for()
    picture("revision")
    browser.go(page, "Rollouts")
    browser.unfold(page, "New rollout")
    browser.write(page, "Canary steps in percent", "50")
    browser.write(page, "Shadow first, percent of the requests", "0")
    browser.press(page, "Make a draft")
    page.get_by_text("Nothing happens before it is started").wait_for()
    picture("draft")
    browser.press(page, "Start")
    # Cells are drawn on a canvas; what is in them stands in the document, unseen.
    page.get_by_text("▶").first.wait_for(state="attached", timeout=150_000)
    for number in range(4):
        assert ask(demo_fleet, secret, f"Count to {number}.").is_success
    page.get_by_text("Both sides of step 1").wait_for()
    page.get_by_text("share of requests").first.wait_for(state="attached")
    picture("canary")
    browser.confirm(page, "Promote: the canary", "story", "Promote it")
    page.get_by_text("answers with the new revision").wait_for()
    picture("promoted")
    browser.confirm(page, "Roll back: undo", "story", "Roll it back")
    page.get_by_text("back at its stable revision").wait_for()
    picture("rolled-back")
    assert ask(demo_fleet, secret, "Who are you now?").is_success

    # What it cost, and whether the books are right.
    browser.go(page, "Invoices")
    browser.unfold(page, "Draft a month")
    browser.press(page, "Draft it")
    page.get_by_text("The draft of").wait_for()
    picture("invoice")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download PDF").click()
    assert Path(download.value.path()).read_bytes().startswith(b"%PDF-")
    browser.go(page, "Invariants")

    def adds_up() -> bool:
        browser.press(page, "Check now")
        return page.get_by_text("Everything adds up.").count() == 1

    wait_until(adds_up, deadline_s=60)
    picture("invariants")
    assert not page.get_by_test_id("stException").count()
