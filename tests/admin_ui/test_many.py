"""More than a page of everything: what the address names is what is shown, and whatever is there can be chosen."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from loraplex_admin.api import Api

from tests.admin_ui.driver import checked, keys_of, open_page, press, words
from tests.admin_ui.stand import Stand

MANY = 51  # one more than a page


@pytest.fixture(scope="module")
def admin(platform: Stand) -> Api:
    return platform.api()


@pytest.fixture(scope="module")
def crowd(platform: Stand) -> dict[str, Any]:
    """A tenant older than a hundred others that have its name in theirs, with more deployments than a page holds."""
    mine = platform.tenant("crowd")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: platform.tenant(f"zcrowd-{number}"), range(101)))
    for number in range(MANY):
        platform.deploy(mine["id"], f"model-{number:02}", None)
    return mine


@pytest.mark.parametrize("path", ["keys", "limits"])
def test_the_tenant_of_the_address_is_shown_however_many_are_called_like_it(
    path: str, admin: Api, crowd: dict[str, Any]
) -> None:
    test = open_page(path, admin, crowd)

    assert test.selectbox(key=f"{path}_tenant").value == crowd["id"]
    assert test.query_params["tenant"] == crowd["slug"]


@pytest.mark.parametrize("path", ["keys", "limits", "usage"])
def test_an_address_of_no_tenant_shows_nobody_elses(
    path: str, admin: Api, crowd: dict[str, Any]
) -> None:
    test = open_page(path, admin, {"slug": "crow"})

    assert "no such tenant" in words(test)
    assert "crow" in words(test)
    assert {key for key in keys_of(test) if key != "why_request"} <= {"forget_tenant", "why_go"}
    assert test.query_params["tenant"] == "crow"
    press(test, "forget_tenant")
    assert f"{path}_tenant" in keys_of(test)


def test_a_deployment_beyond_the_first_page_is_found(admin: Api, crowd: dict[str, Any]) -> None:
    test = open_page("playground", admin, crowd, model="model-00")
    assert test.selectbox(key="playground_model").value == "model-00"

    test.text_input(key="playground_model_search").set_value("model-01")
    checked(test.run())
    assert set(test.selectbox(key="playground_model").options) == {"model-00", "model-01"}
    checked(test.selectbox(key="playground_model").set_value("model-01").run())
    assert test.query_params["model"] == "model-01"

    unknown = open_page("playground", admin, crowd, model="nothing")
    assert "no such deployment" in words(unknown)
    assert "playground_ask" not in keys_of(unknown)
    assert unknown.query_params["model"] == "nothing"
