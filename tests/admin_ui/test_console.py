"""The console's script as a whole: nobody logged in, and a control API that is down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import loraplex_admin
import pytest
from loraplex_admin import connections
from streamlit.testing.v1 import AppTest

from tests.admin_ui.driver import checked, fill, open_page, words
from tests.admin_ui.stand import Stand, cookie_of

SCRIPT = Path(loraplex_admin.__file__).with_name("console.py")


@pytest.fixture
def visitor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A browser without cookies (AppTest has none to set)."""
    monkeypatch.setattr("streamlit.runtime.context.ContextProxy.cookies", {})
    yield
    connections.shared().close()
    connections.shared.clear()


@pytest.mark.usefixtures("visitor")
def test_without_a_session_there_is_only_the_way_to_log_in(
    platform: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_CONTROL_URL", platform.control_url)

    test = AppTest.from_file(SCRIPT, default_timeout=60).run()

    assert not test.exception
    assert test.title[0].value == "You are logged out"
    assert not test.metric


@pytest.mark.usefixtures("visitor")
def test_a_control_api_that_is_down_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_CONTROL_URL", "http://127.0.0.1:9")

    test = AppTest.from_file(SCRIPT, default_timeout=60).run()

    assert not test.exception
    assert [error.value for error in test.error] == [
        "The control API does not answer. Is it running?"
    ]
    assert not test.title


class Cookies(dict[str, str]):
    """A browser's."""


def test_the_console_stands_for_every_role_and_its_first_page_is_one_it_may_see(
    platform: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_CONTROL_URL", platform.control_url)
    tenant = platform.tenant("first-pages")
    for token, title in (
        (platform.session("admin"), "Overview"),
        (platform.session("viewer"), "Overview"),
        (cookie_of(platform.member(tenant["id"], "billing")), "Tenants"),
    ):
        monkeypatch.setattr(
            "streamlit.runtime.context.ContextProxy.cookies", Cookies(loraplex_session=token)
        )
        test = AppTest.from_file(SCRIPT, default_timeout=60).run()
        assert not test.exception
        assert test.title[0].value == title
    connections.shared().close()
    connections.shared.clear()


def test_a_control_api_that_comes_back_brings_the_page_back(
    platform: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "streamlit.runtime.context.ContextProxy.cookies",
        Cookies(loraplex_session=platform.session("viewer")),
    )
    monkeypatch.setenv("LORAPLEX_CONTROL_URL", "http://127.0.0.1:9")
    test = AppTest.from_file(SCRIPT, default_timeout=60).run()
    assert "does not answer" in test.error[0].value
    assert not test.title

    monkeypatch.setenv("LORAPLEX_CONTROL_URL", platform.control_url)
    test.button(key="retry").click().run()

    assert not test.error
    assert test.title[0].value == "Overview"
    connections.shared().close()
    connections.shared.clear()


def test_a_session_that_ends_while_a_page_is_open_changes_nothing_and_says_so(
    platform: Stand,
) -> None:
    tenant = platform.tenant("expired")
    api = platform.api()
    test = open_page("keys", api, tenant)
    fill(test, new_key_name="late")

    api.log_out()
    checked(test.button(key="new_key_go").click().run())

    assert "Your session is over" in words(test)
    keys = platform.http.get(f"/admin/v1/tenants/{tenant['id']}/keys").json()["data"]
    assert keys == []
