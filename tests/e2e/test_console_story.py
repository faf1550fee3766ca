"""An operator's whole story in the console, in headless Chromium, with the real product behind it: a tenant, its key, an
adapter, a deployment, a canary that is watched, promoted and rolled back, and the invoice.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.support import browser
from tests.support.fleet import Fleet
from tests.support.processes import wait_until
from tests.support.screenshots import Pictures

pytestmark = [pytest.mark.browser, pytest.mark.model]

ADAPTERS = Path(__file__).resolve().parents[2] / "examples" / "adapters"
# Half of them on each side: that one side has none is one in 30,000.
NUM_USERS = 16


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


def ask(fleet: Fleet, secret: str, *users: str) -> None:
    """A request of each of these users, a few at a time; all are answered."""

    def one(user: str) -> httpx.Response:
        body = {
            "model": "story",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 4,
            "user": user,
        }
        url = f"{fleet.demo['gateway_url']}/v1/chat/completions"
        headers = {"authorization": f"Bearer {secret}"}
        return httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False)

    with ThreadPoolExecutor(4) as pool:
        for answer in pool.map(one, users):
            assert answer.is_success, answer.text


@pytest.mark.timeout(
    400
)  # the demo starts within it; the story itself takes a minute on a quiet machine
def test_from_a_new_tenant_to_a_canary_rolled_back_and_the_invoice(
    page: Page, demo_fleet: Fleet, pictures: Pictures
) -> None:
    with browser.told(page):
        pictures.take(page, "story-overview")
        secret = tenant_and_key(page, pictures)
        two_versions(page, pictures)
        deployment(page, pictures)
        ask(demo_fleet, secret, "first")
        second_revision(page, pictures)
        start_canary(page, pictures)
        ask(demo_fleet, secret, *(f"user-{number}" for number in range(NUM_USERS)))
        watch_and_take_back(page, pictures)
        ask(demo_fleet, secret, "last")
        invoice_and_books(page, pictures)
        assert not page.get_by_test_id("stException").count()


def tenant_and_key(page: Page, pictures: Pictures) -> str:
    """The key's secret. The tenant that was made is the one that the pages after it are of."""
    browser.go(page, "Tenants")
    browser.unfold(page, "New tenant")
    browser.write(page, "Slug", "story")
    browser.press(page, "Create tenant")
    page.get_by_text("Next: a key under").wait_for()
    pictures.take(page, "story-tenant")
    browser.go(page, "API keys")
    page.get_by_text("This tenant has no key yet").wait_for()
    browser.unfold(page, "New key")
    browser.write(page, "Name", "production")
    browser.press(page, "Create key")
    page.get_by_text("it is shown this once").wait_for()
    secret = page.get_by_test_id("stCode").first.inner_text().strip()
    assert secret.startswith("lpx_sk_")
    pictures.take(page, "story-key")
    browser.press(page, "I have copied it")
    expect(page.get_by_text(secret)).to_have_count(0)
    return secret


def two_versions(page: Page, pictures: Pictures) -> None:
    """Of one adapter, each with its report."""
    browser.go(page, "Adapters")
    for number, folder in ((1, "pirate"), (2, "capitals")):
        browser.unfold(page, "Upload an adapter")
        browser.write(page, "Adapter name", "voice")
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            browser.give(page, name, ADAPTERS / folder / name)
        browser.press(page, "Upload and check")
        page.get_by_text(f"version {number} is ready to serve").wait_for()
    pictures.take(page, "story-adapter")


def deployment(page: Page, pictures: Pictures) -> None:
    """A name that the first version answers under."""
    browser.go(page, "Deployments")
    browser.unfold(page, "Deploy")
    browser.write(page, "Model id", "story")
    browser.choose(page, "Answers with", "voice v1")
    page.get_by_role("button", name="Deploy", exact=True).click()
    page.get_by_text("from now on").wait_for()
    pictures.take(page, "story-deployment")


def second_revision(page: Page, pictures: Pictures) -> None:
    """The second version, which answers nobody yet."""
    browser.visit(page, page.url.split("/deployments")[0], "deployments?tenant=story&id=story")
    browser.unfold(page, "New revision")
    part = page.get_by_test_id("stExpander").filter(has_text="New revision").first
    part.get_by_role("combobox", name="Answers with").click()
    page.get_by_role("option", name="voice v2", exact=True).click()
    browser.press(page, "Make the revision")
    page.get_by_text("Nothing answers with it before").wait_for()
    pictures.take(page, "story-revision")


def start_canary(page: Page, pictures: Pictures) -> None:
    """It answers half of the users, until somebody decides."""
    browser.go(page, "Rollouts")
    browser.unfold(page, "New rollout")
    browser.write(page, "Canary steps in percent", "50")
    browser.write(page, "Shadow first, percent of the requests", "0")
    browser.choose(page, "Who stays with one side", "a user, as requests name them")
    browser.press(page, "Make a draft")
    page.get_by_text("Nothing happens before it is started").wait_for()
    pictures.take(page, "story-draft")
    browser.press(page, "Start")
    # The worker loads it first; then the page is drawn anew by itself, with what can be done now.
    page.get_by_text("Promote: the canary").wait_for(timeout=90_000)


def watch_and_take_back(page: Page, pictures: Pictures) -> None:
    """Both sides' figures, which come by themselves; the promotion; the way back."""
    page.get_by_text("Both sides of step 1").wait_for()
    # Cells are drawn on a canvas; what is in them stands in the document, unseen.
    page.get_by_text("share of requests").first.wait_for(state="attached")
    pictures.take(page, "story-canary")
    browser.confirm(page, "Promote: the canary", "story", "Promote it")
    page.get_by_text("answers with the new revision").wait_for()
    pictures.take(page, "story-promoted")
    browser.confirm(page, "Roll back: undo", "story", "Roll it back")
    page.get_by_text("back at its stable revision").wait_for()
    pictures.take(page, "story-rolled-back")


def invoice_and_books(page: Page, pictures: Pictures) -> None:
    """What it cost, on paper too, and that the books are right."""
    browser.go(page, "Invoices")
    browser.unfold(page, "Draft a month")
    browser.press(page, "Draft it")
    page.get_by_text("The draft of").wait_for()
    pictures.take(page, "story-invoice")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download PDF").click()
    assert Path(download.value.path()).read_bytes().startswith(b"%PDF-")
    browser.go(page, "Invariants")

    def adds_up() -> bool:
        browser.press(page, "Check now")
        return page.get_by_text("Everything adds up.").count() == 1

    wait_until(adds_up, deadline_s=60)
    pictures.take(page, "story-invariants")
