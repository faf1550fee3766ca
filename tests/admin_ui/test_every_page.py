"""Every page of the catalogue, empty, full, and with a control API that refuses or is away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from loraplex_admin.access import Access
from loraplex_admin.api import Api
from loraplex_admin.catalog import PAGES

from tests.admin_ui.altered import Altered
from tests.admin_ui.driver import access_of, checked, open_page, words
from tests.admin_ui.stand import Stand, cookie_of

PATHS = [page.path for page in PAGES]
# Of a tenant without anything: what each page says instead of a list, or that it needs none of the tenant's things.
EMPTY = {
    "overview": "Replicas",
    "fleet": "Nothing is kept",
    "invariants": "adds up",
    "tenants": "Tick a row",
    "members": "Nobody belongs",
    "keys": "no key yet",
    "limits": "Nothing is limited here",
    "models": "Models",
    "adapters": "no adapter yet",
    "deployments": "No deployment yet",
    "rollouts": "Nothing was rolled out yet",
    "evals": "No suite yet",
    "playground": "Playground",
    "usage": "Nothing was used",
    "prices": "Prices",
    "invoices": "There is no invoice yet",
    "requests": "No request yet",
    "audit": "Audit log",
    "alerts": "Nothing has called for attention",
    "webhooks": "Nobody is told",
    "settings": "Settings",
}


@pytest.fixture(scope="module")
def admin(platform: Stand) -> Api:
    return platform.api()


@pytest.fixture(scope="module")
def access(admin: Api) -> Access:
    return access_of(admin)


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_tenant_is_told_what_to_do_next(
    path: str, admin: Api, access: Access, empty: dict[str, Any]
) -> None:
    test = open_page(path, admin, empty, access=access)

    assert not test.error, words(test)
    assert EMPTY[path] in words(test)


@pytest.mark.parametrize("path", PATHS)
def test_a_full_tenant_is_shown_with_what_is_open(
    path: str, admin: Api, access: Access, full: dict[str, Any]
) -> None:
    test = open_page(path, admin, full, access=access, **full["opened"].get(path, {}))

    # The page that explains a refusal says so in red.
    refused = "**Refused.**" if path == "limits" else None
    assert not [one for one in test.error if not refused or refused not in one.value], words(test)
    assert test.dataframe or path in ("playground", "invariants", "fleet"), words(test)


@pytest.mark.parametrize("path", PATHS)
def test_a_list_whose_rows_open_has_no_room_for_their_ids(
    path: str, admin: Api, access: Access, full: dict[str, Any]
) -> None:
    """They stand in what is opened; only of a request the id is what people ask by."""
    test = open_page(path, admin, full, access=access)

    for element in test.dataframe:
        if element.proto.selection_mode and path != "requests":
            assert "id" not in element.value.columns


@pytest.fixture
def altered() -> Iterator[Altered]:
    made = Altered()
    yield made
    made.close()


@pytest.mark.parametrize(
    "status", [500, *(pytest.param(one, marks=pytest.mark.slow) for one in (403, 404, 409))]
)
@pytest.mark.parametrize("path", PATHS)
def test_a_control_api_that_refuses_is_quoted(
    path: str,
    status: int,
    platform: Stand,
    admin: Api,
    access: Access,
    full: dict[str, Any],
    altered: Altered,
) -> None:
    altered.refusal = status

    test = open_page(
        path, Api(platform.control_url, cookie_of(admin), transport=altered), full, access=access
    )

    assert test.title, path
    assert test.error
    assert {one.value for one in test.error} == {
        rf"Refused \*\*for\*\* \<b\>a test\<\/b\>\: {status}\. (`field_x`)"
    }


@pytest.mark.parametrize("path", PATHS)
def test_a_page_whose_control_api_goes_away_says_so_and_comes_back(
    path: str,
    platform: Stand,
    admin: Api,
    access: Access,
    full: dict[str, Any],
    altered: Altered,
) -> None:
    altered.is_away = True

    test = open_page(
        path, Api(platform.control_url, cookie_of(admin), transport=altered), full, access=access
    )
    assert test.error
    assert all("The control API does not answer" in one.value for one in test.error)

    altered.is_away = False
    checked(test.run())
    assert not test.error, words(test)
