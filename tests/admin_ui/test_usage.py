"""The usage page's days: those of the tenant's zone, whole, also where the clocks change."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from loraplex_admin.api import Api
from loraplex_admin.views import usage

from tests.admin_ui.driver import open_page
from tests.admin_ui.stand import Stand
from tests.platform.control.stand import BASE


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Asia/Kathmandu", "Pacific/Auckland"])
def test_days_begin_at_the_tenants_midnight(zone: str) -> None:
    query = usage._query(timedelta(days=90), "1d", "model", "ten_1", zone)

    for edge in (query["start"], query["end"]):
        on_the_wall = usage._on_the_wall(edge, zone)
        assert (on_the_wall.hour, on_the_wall.minute) == (0, 0)
        assert on_the_wall.tzinfo is UTC
    assert query["start"] < datetime.now(UTC).timestamp() < query["end"]


def test_a_shared_address_shows_what_was_chosen(platform: Stand, tenant: dict[str, Any]) -> None:
    api: Api = platform.api()
    hello = [{"role": "user", "content": "hello"}]
    assert "".join(api.chat(tenant["id"], BASE, hello, max_tokens=40, temperature=0.0))

    shared = open_page("usage", api, tenant, usage_group="Key", usage_range="Last 7 days")
    assert shared.selectbox(key="usage_group").value == "Key"
    assert shared.selectbox(key="usage_range").value == "Last 7 days"
