"""What goes wrong between people and pages, in a real browser: two of them at one form, clicks that come twice, a connection
that breaks, a session that ends, a control API that is away.

The forms of two people and clicks that come twice are tried each time in Streamlit's driver (test_tenancy_pages.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from loraplex_admin.api import SESSION_COOKIE, Api
from loraplex_admin.app import BACK_COOKIE
from playwright.sync_api import Browser, Page, expect

from tests.admin_ui.altered import Altered
from tests.admin_ui.stand import PASSWORD, Stand, cookie_of
from tests.support import browser
from tests.support.cutting_proxy import CuttingProxy

pytestmark = pytest.mark.browser
AWAY = "The control API does not answer."


@pytest.fixture
def admin(platform: Stand) -> Api:
    return platform.api()


@pytest.fixture
def visitors(chromium: Browser) -> Iterator[list[Page]]:
    """Two browsers, which share nothing."""
    pages = [browser.open_page(chromium) for _ in range(2)]
    yield pages
    for page in pages:
        page.context.close()


def enter(page: Page, url: str, api: Api) -> None:
    page.context.add_cookies([{"name": SESSION_COOKIE, "value": cookie_of(api), "url": url}])


def names(api: Api, tenant: dict[str, Any]) -> list[str]:
    return [key["name"] for key in api.of_tenant(tenant["id"], "keys").page()["data"]]


def place(page: Page) -> str:
    """The address within the console."""
    parts = urlsplit(page.url)
    return f"{parts.path}?{parts.query}"


@pytest.mark.slow
def test_two_browsers_at_one_form_see_what_differs_and_one_decides(
    platform: Stand,
    admin: Api,
    tenant: dict[str, Any],
    console_url: str,
    visitors: list[Page],
) -> None:
    made = platform.post(f"/tenants/{tenant['id']}/keys", json={"name": "shared"})
    address = f"keys?tenant={tenant['slug']}&id={made['id']}"
    for page in visitors:
        enter(page, console_url, admin)
        browser.visit(page, console_url, address)
        browser.press(page, "Edit")
    hers, his = visitors
    for page, name in ((hers, "hers"), (his, "<b>his</b>")):
        form = page.get_by_test_id("stForm").filter(has=page.get_by_role("button", name="Cancel"))
        form.get_by_label("Name", exact=True).fill(name)
        browser.press(page, "Save")

    expect(his.get_by_text("Somebody changed this while the form was open")).to_be_visible()
    assert names(admin, tenant) == ["hers"]
    for word in ("when you opened it", "hers", "shared", "<b>his</b>"):
        his.get_by_text(word, exact=True).first.wait_for(state="attached")
    browser.press(his, "Save mine over it")
    expect(his.get_by_text("Somebody changed this while the form was open")).to_have_count(0)
    assert names(admin, tenant) == ["<b>his</b>"]


def new_key(page: Page, console_url: str, tenant: dict[str, Any], name: str) -> None:
    browser.visit(page, console_url, f"keys?tenant={tenant['slug']}")
    browser.unfold(page, "New key")
    browser.write(page, "Name", name)


@pytest.mark.slow
def test_a_double_click_makes_one_key_whose_secret_is_shown(
    admin: Api, tenant: dict[str, Any], console_url: str, visitors: list[Page]
) -> None:
    page = visitors[0]
    enter(page, console_url, admin)
    new_key(page, console_url, tenant, "once")

    page.get_by_role("button", name="Create key").dblclick()
    page.get_by_role("button", name="I have copied it").wait_for()
    browser.settle(page)

    assert page.get_by_test_id("stCode").first.inner_text().strip().startswith("lpx_sk_")
    assert names(admin, tenant) == ["once"]


def test_an_answer_that_is_lost_and_a_second_click_make_one_key(
    admin: Api, tenant: dict[str, Any], console_url: str, visitors: list[Page], between: Altered
) -> None:
    page = visitors[0]
    enter(page, console_url, admin)
    new_key(page, console_url, tenant, "lost")

    between.loses_answers = True
    browser.press(page, "Create key")
    page.get_by_text(AWAY).first.wait_for()
    between.loses_answers = False
    # The page comes back by itself, with what was typed.
    expect(page.get_by_text(AWAY)).to_have_count(0, timeout=30_000)
    browser.unfold(page, "New key")
    expect(page.get_by_label("Name", exact=True).first).to_have_value("lost")
    page.get_by_role("button", name="Create key").click()

    page.get_by_text("whose answer was lost").wait_for()
    assert names(admin, tenant) == ["lost"]


@pytest.fixture
def cut(console_url: str) -> Iterator[CuttingProxy]:
    """The network between browser and console."""
    with CuttingProxy(int(console_url.rpartition(":")[2]), ()) as proxy:
        yield proxy
        proxy.cut_now()


def test_a_connection_that_breaks_comes_back_where_it_was(
    platform: Stand,
    admin: Api,
    tenant: dict[str, Any],
    cut: CuttingProxy,
    visitors: list[Page],
) -> None:
    made = platform.post(f"/tenants/{tenant['id']}/keys", json={"name": "kept"})
    page, url = visitors[0], f"http://127.0.0.1:{cut.port}"
    enter(page, url, admin)
    browser.visit(page, url, f"keys?tenant={tenant['slug']}&q=kep&id={made['id']}")
    browser.press(page, "Edit")
    form = page.get_by_test_id("stForm").filter(has=page.get_by_role("button", name="Cancel"))
    form.get_by_label("Name", exact=True).fill("half typed")
    before = place(page)

    with page.expect_websocket():  # the one that comes after
        cut.cut_now()
    browser.settle(page)

    assert place(page) == before
    expect(form.get_by_label("Name", exact=True)).to_have_value("half typed")
    browser.press(page, "Save")
    form.wait_for(state="detached")
    assert names(admin, tenant) == ["half typed"]


@pytest.mark.slow
def test_a_console_that_was_replaced_shows_the_same_page(
    platform: Stand,
    admin: Api,
    tenant: dict[str, Any],
    cut: CuttingProxy,
    visitors: list[Page],
    short_tmp_path: Path,
) -> None:
    """Another process knows nothing of the old one's sessions: what is kept is what is in the address."""
    made = platform.post(f"/tenants/{tenant['id']}/keys", json={"name": "kept"})
    page, url = visitors[0], f"http://127.0.0.1:{cut.port}"
    enter(page, url, admin)
    browser.visit(page, url, f"keys?tenant={tenant['slug']}&q=kep&id={made['id']}")
    before = place(page)

    with browser.console(platform.control_url, short_tmp_path) as other:
        cut.target = int(other.rpartition(":")[2])
        with page.expect_websocket():
            cut.cut_now()
        page.get_by_role("heading", name="kept").wait_for()
        browser.settle(page)
        assert place(page) == before
        expect(page.get_by_label("Search keys")).to_have_value("kep")
        cut.cut_now()


def log_in(page: Page, email: str) -> None:
    page.get_by_label("E-mail").fill(email)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()


def test_a_session_that_ends_leads_to_the_form_and_back_to_the_page(
    platform: Stand, tenant: dict[str, Any], console_url: str, visitors: list[Page]
) -> None:
    page, api = visitors[0], platform.api()
    made = platform.post(f"/tenants/{tenant['id']}/keys", json={"name": "a & b=c"})
    enter(page, console_url, api)
    address = f"keys?tenant={tenant['slug']}&q=a+%26+b&id={made['id']}"
    browser.visit(page, console_url, address)
    before = place(page)

    api.log_out()
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_role("heading", name="You are logged out").wait_for()
    page.get_by_role("button", name="Log in").click()
    log_in(page, platform.user("admin"))

    page.get_by_role("heading", name="a & b=c").wait_for()
    assert place(page) == before
    # Once: the next login goes where it is asked to go.
    assert BACK_COOKIE not in {cookie["name"] for cookie in page.context.cookies()}


@pytest.mark.slow
def test_an_address_that_somebody_sends_is_reached_through_the_form(
    platform: Stand, tenant: dict[str, Any], console_url: str, visitors: list[Page]
) -> None:
    page = visitors[0]
    page.goto(f"{console_url}/webhooks?tenant={tenant['slug']}")
    log_in(page, platform.user("admin"))

    page.get_by_role("heading", name="Webhooks").wait_for()
    browser.settle(page)
    assert place(page) == f"/webhooks?tenant={tenant['slug']}"


@pytest.mark.parametrize(
    "back",
    [
        *("https://evil.example", "//evil.example", "/\\evil.example", "/%5Cevil.example"),
        *(
            "javascript:alert(1)",
            "/%0d%0aset-cookie: a=b",
            "%2F%2Fevil.example",
            "/\t/evil.example",
        ),
        *("/login", "", "x", "/" + "a" * 5000),
    ],
)
def test_a_cookie_that_leads_elsewhere_leads_nowhere(
    back: str, platform: Stand, console_url: str
) -> None:
    cookie = f"{SESSION_COOKIE}={platform.session('admin')}; {BACK_COOKIE}={back}"
    answer = httpx.get(
        console_url, headers={"cookie": cookie.encode(), "accept": "text/html"}, trust_env=False
    )

    location = answer.headers.get("location", "/")
    assert urlsplit(location).netloc == ""
    assert location.startswith("/")
    assert not location.startswith(("//", "/\\"))
    assert "a" not in answer.cookies


@pytest.mark.slow
@pytest.mark.parametrize("path", ["keys", "overview"])
def test_a_control_api_that_is_away_is_told_and_the_page_comes_back_by_itself(
    path: str,
    admin: Api,
    tenant: dict[str, Any],
    console_url: str,
    visitors: list[Page],
    between: Altered,
) -> None:
    page = visitors[0]
    enter(page, console_url, admin)
    between.is_away = True
    page.goto(f"{console_url}/{path}?tenant={tenant['slug']}")
    page.get_by_text(AWAY).first.wait_for()

    between.is_away = False

    page.get_by_test_id("stMain").get_by_role("heading").first.wait_for()
    browser.settle(page)
    expect(page.get_by_text(AWAY)).to_have_count(0)
    assert place(page) == f"/{path}?tenant={tenant['slug']}"


def test_a_control_api_that_goes_away_under_an_open_page_loses_nothing_of_it(
    platform: Stand,
    admin: Api,
    tenant: dict[str, Any],
    console_url: str,
    visitors: list[Page],
    between: Altered,
) -> None:
    page = visitors[0]
    platform.post(f"/tenants/{tenant['id']}/keys", json={"name": "one"})
    enter(page, console_url, admin)
    browser.visit(page, console_url, f"keys?tenant={tenant['slug']}")

    between.is_away = True
    box = page.get_by_label("Search keys")
    box.fill("on")
    box.press("Enter")
    page.get_by_text(AWAY).first.wait_for()
    between.is_away = False

    page.get_by_role("heading", name="API keys").wait_for()
    browser.settle(page)
    expect(page.get_by_text(AWAY)).to_have_count(0)
    expect(page.get_by_label("Search keys")).to_have_value("on")


def test_the_form_of_a_control_api_that_is_away_comes_by_itself(
    console_url: str, visitors: list[Page], between: Altered
) -> None:
    page = visitors[0]
    between.is_away = True
    page.goto(f"{console_url}/keys")
    page.get_by_text(AWAY).wait_for()

    between.is_away = False

    page.get_by_label("E-mail").wait_for()
