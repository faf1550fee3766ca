"""Limits, prices and invoices, against the real control API, with real requests behind them."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from loraplex_admin.api import Api
from loraplex_admin.views import invoices
from streamlit.testing.v1 import AppTest

from tests.admin_ui.driver import confirm, fill, open_page, press, records, table, words
from tests.admin_ui.stand import Stand
from tests.platform.control.stand import BASE
from tests.support.processes import wait_until


@pytest.fixture(scope="module")
def admin(platform: Stand) -> Api:
    return platform.api()


def ask(api: Api, tenant: dict[str, Any]) -> None:
    """One answered, billed request."""
    hello = [{"role": "user", "content": "hello"}]
    assert "".join(api.chat(tenant["id"], BASE, hello, max_tokens=40, temperature=0.0))


# ----------------------------------------------------------------------------------- limits


def test_a_limit_is_set_read_with_its_exact_reset_changed_and_removed(
    platform: Stand, admin: Api
) -> None:
    slug = f"berlin-{time.time_ns()}"
    tenant = platform.post("/tenants", json={"slug": slug, "billing_tz": "Europe/Berlin"})
    test = open_page("limits", admin, tenant)
    assert "Nothing is limited here" in words(test)
    test.selectbox(key="new_limit_metric").set_value("cost")
    fill(test, new_limit_value="100.00")
    test.text_area(key="new_limit_alert_pct").set_value("50\n80 %")
    press(test, "new_limit_go")

    [row] = table(test, "limits").to_dict("records")
    assert (row["limit"], row["used"], row["left"]) == ("$100.00", "$0.00", "$100.00")
    assert row["counts"] == "cost a month"
    assert row["alerts at"] == "50 %, 80 %"
    # The first of a month in Berlin, and how long that is.
    assert re.fullmatch(r"\d{4}-\d\d-01 00:00 \+0[12]:00, in .+", row["begins anew"])

    [limit] = admin.of_platform("limits").page(tenant_id=tenant["id"])["data"]
    opened = open_page("limits", admin, tenant, id=limit["id"])
    press(opened, f"limit_{limit['id']}_edit")
    fill(opened, **{f"limit_{limit['id']}_value": "250.00"})
    press(opened, f"limit_{limit['id']}_go")
    assert admin.of_platform("limits").get(limit["id"])["value"] == "250.00"
    confirm(opened, f"unlimit_{limit['id']}", f"cost a month of tenant {tenant['slug']}")
    assert admin.of_platform("limits").page(tenant_id=tenant["id"])["data"] == []


def test_limits_and_invoices_are_searched_by_the_server_and_in_the_address(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    for metric in ("rpm", "concurrency"):
        body = {"scope_kind": "tenant", "scope_id": tenant["id"], "metric": metric, "value": "9"}
        platform.post("/limits", json=body)

    some = open_page("limits", admin, tenant, q="concur")
    none = open_page("limits", admin, tenant, q="nothing-like-it")
    drafts = open_page("invoices", admin, tenant, status="final", q=tenant["slug"])

    assert list(table(some, "limits")["counts"]) == ["requests at a time"]
    assert table(none, "limits") is None
    assert "Nothing here has that in its name" in words(none)
    assert drafts.selectbox(key="status_filter").value == "final"
    assert drafts.text_input(key="invoices_search").value == tenant["slug"]


def test_a_rate_with_a_period_and_a_percent_that_is_none_are_said_before_anything_is_sent(
    admin: Api, tenant: dict[str, Any]
) -> None:
    test = open_page("limits", admin, tenant)
    test.selectbox(key="new_limit_metric").set_value("rpm")
    fill(test, new_limit_value="60")
    press(test, "new_limit_go")
    assert "A rate has no period" in words(test)

    test.selectbox(key="new_limit_metric").set_value("requests")
    test.text_area(key="new_limit_alert_pct").set_value("many")
    press(test, "new_limit_go")
    assert "whole percents" in words(test)
    assert admin.of_platform("limits").page(tenant_id=tenant["id"])["data"] == []


def test_why_was_i_blocked_names_the_limit_and_how_it_stands(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    key = platform.post(f"/tenants/{tenant['id']}/keys", json={"name": "k"})
    platform.post(
        "/limits",
        json={
            "scope_kind": "tenant",
            "scope_id": tenant["id"],
            "metric": "requests",
            "period": "day",
            "value": "0",
        },
    )
    answer = platform.ask(key["secret"])
    assert answer.status_code == 429
    request_id = answer.headers["x-request-id"]

    def is_known() -> bool:
        return not open_page(
            "limits", admin, tenant, request=request_id
        ).error or "Refused" in words(open_page("limits", admin, tenant, request=request_id))

    wait_until(is_known)
    test = open_page("limits", admin, tenant)
    fill(test, why_request=request_id)
    press(test, "why_go")

    assert "**Refused.**" in words(test)
    assert test.query_params["request"] == request_id
    shown = records(test, "begins anew")
    assert (shown[0]["counts"], shown[0]["limit"]) == ("requests a day", "0 requests")

    unknown = open_page("limits", admin, tenant, request="req_" + "0" * 32)
    assert "Nothing is known" in words(unknown) or "No such request" in words(unknown)


def test_what_binds_a_caller_is_told_for_a_key(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    key = platform.post(f"/tenants/{tenant['id']}/keys", json={"name": "k"})
    platform.post(
        "/limits",
        json={"scope_kind": "key", "scope_id": key["id"], "metric": "rpm", "value": "60"},
    )
    test = open_page("limits", admin, tenant)

    rows = [row for row in records(test, "refuses") if row["of"] == "key"]
    assert [(row["counts"], row["limit"]) for row in rows] == [("requests a minute", "60 requests")]


# ----------------------------------------------------------------------------------- prices


def test_prices_are_drafted_previewed_published_and_what_was_stale_is_shown(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    ask(admin, tenant)
    books = admin.of_platform("price-books")
    test = open_page("prices", admin)
    in_force = next(one for one in books.page()["data"] if one["is_in_force"])
    name = f"draft {time.time_ns()}"
    fill(test, new_book_name=name)
    press(test, "new_book_go")
    draft = next(one for one in books.page()["data"] if one["name"] == name)
    assert len(books.get(draft["id"])["prices"]) == len(books.get(in_force["id"])["prices"])

    press(test, f"preview_{draft['id']}")
    figures = {metric.label: metric.value for metric in test.metric}
    assert figures["It cost"] == figures["It would have cost"] != "$0.00"

    # Somebody else was quicker.
    prices = [
        {"target_kind": kind, "price_class": what, "price_usd": "0.50"}
        for kind in ("any_base", "any_adapter")
        for what in ("input", "output")
    ]
    books.change(draft["id"], {"prices": prices})
    press(test, f"prices_save_{draft['id']}")
    assert "Somebody changed these prices" in words(test)
    assert {row["now"] for row in records(test, "when you opened it")} >= {"0.500000"}

    opened = open_page("prices", admin, id=draft["id"])
    confirm(opened, f"publish_{draft['id']}", "something else")
    assert books.get(draft["id"])["status"] == "draft"
    confirm(opened, f"drop_{draft['id']}", name)
    assert name not in [one["name"] for one in books.page()["data"]]


# --------------------------------------------------------------------------------- invoices


@pytest.mark.parametrize(
    ("price_class", "unit_price_usd", "shown"),
    [
        ("input", "0.00000003", "$0.03 per 1M tokens"),
        ("request", "0.002", "$0.002 per request"),
        ("adapter_hour", "0.05", "$0.05 per hour"),
        (None, "-5.00", "-$5.00"),
    ],
)
def test_a_line_has_the_price_that_its_book_has(
    price_class: str | None, unit_price_usd: str, shown: str
) -> None:
    line = {"price_class": price_class, "unit_price_usd": unit_price_usd}
    assert invoices.say_price(line) == shown


def test_an_invoice_is_drafted_read_taken_as_a_file_and_not_finalized_too_soon(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    test = open_page("invoices", admin, tenant)
    assert "There is no invoice yet" in words(test)
    profile = f"profile_{tenant['id']}"
    press(test, f"{profile}_edit")
    fill(test, **{f"{profile}_legal_name": "Acme **Corp.**"})
    test.text_area(key=f"{profile}_address").set_value("1 Main St\nSpringfield")
    press(test, f"{profile}_go")
    assert admin.read(f"/tenants/{tenant['id']}/billing-profile")["legal_name"] == "Acme **Corp.**"

    fill(test, adjust_amount_usd="5.00", adjust_reason="Goodwill")
    press(test, "adjust_go")
    assert "is booked" in words(test)
    press(test, "draft_go")
    invoices = admin.of_tenant(tenant["id"], "invoices")
    [invoice] = invoices.page()["data"]
    assert test.query_params["id"] == invoice["id"]
    assert invoice["status"] == "draft"
    assert any("Goodwill" in row["what"] for row in records(test, "what"))

    kinds = {str(one.key).split("_")[1] for one in test.download_button}
    assert kinds == {"pdf", "html"}
    assert invoices.download(invoice["id"], "document.pdf")[:5] == b"%PDF-"
    assert b"Acme **Corp.**" in invoices.download(invoice["id"], "document.html")
    # Nobody finalizes a month that goes on, and the API says so.
    confirm(test, f"finalize_{invoice['id']}", f"draft of {invoice['month']}")
    assert invoices.get(invoice["id"])["status"] == "draft"
    assert test.error
    confirm(test, f"drop_{invoice['id']}", "draft")
    assert invoices.page()["data"]
    confirm(test, f"drop_{invoice['id']}", f"draft of {invoice['month']}")
    assert invoices.page()["data"] == []


def test_all_tenants_invoices_are_one_list(platform: Stand, admin: Api) -> None:
    test: AppTest = open_page("invoices", admin)

    assert test.selectbox(key="invoices_tenant").value == ""
