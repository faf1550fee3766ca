"""Requests, audit log, webhooks, the fleet and settings, against the real control API."""

from __future__ import annotations

import time
from typing import Any

import pytest
from loraplex_admin import format as fmt
from loraplex_admin.api import Api

from tests.admin_ui.driver import (
    checked,
    confirm,
    fill,
    keys_of,
    open_page,
    press,
    records,
    table,
    words,
)
from tests.admin_ui.stand import Stand
from tests.platform.control.stand import BASE


@pytest.fixture(scope="module")
def admin(platform: Stand) -> Api:
    return platform.api()


def test_requests_are_listed_without_prompts_and_one_is_explained(
    admin: Api, tenant: dict[str, Any]
) -> None:
    assert "No request yet" in words(open_page("requests", admin, tenant))
    hello = [{"role": "user", "content": "a secret question"}]
    assert "".join(admin.chat(tenant["id"], BASE, hello, max_tokens=40, temperature=0.0))
    [request] = admin.requests(tenant_id=tenant["id"])["data"]

    test = open_page("requests", admin, tenant, id=request["id"])

    assert list(table(test, "requests")["model"]) == [BASE]
    assert "**Answered.**" in words(test)
    assert "secret question" not in words(test)


def test_a_request_is_found_by_its_id_and_contents_are_shown_to_nobody(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    admin.all_tenants.change(tenant["id"], {"replays_answers": True})

    opted = open_page("requests", admin, tenant, request=f"req_{'0' * 32}")

    assert "This tenant opted in" in words(opted)
    assert "shown to nobody else" in words(opted)
    assert opted.error


def test_alerts_are_listed_filtered_in_the_address_and_opened(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    assert "Nothing has called for attention" in words(open_page("alerts", admin, tenant))
    limit = platform.post(
        "/limits",
        json={
            "scope_kind": "tenant",
            "scope_id": tenant["id"],
            "metric": "requests",
            "period": "day",
            "value": "2",
            "hard": False,
            "alert_pct": [50],
        },
    )
    hello = [{"role": "user", "content": "hello"}]
    "".join(admin.chat(tenant["id"], BASE, hello, max_tokens=9, temperature=0.0))
    [alert] = admin.of_platform("alerts").page(tenant_id=tenant["id"])["data"]

    listed = open_page("alerts", admin, tenant, kind="limit_threshold", id=alert["id"])
    none = open_page("alerts", admin, tenant, kind="eval_changed")
    member = platform.member(tenant["id"], "viewer")
    everywhere = open_page("alerts", member)

    [row] = table(listed, "alerts").to_dict("records")
    assert row["what"].startswith("50 % of the limit on requests per day of your organization")
    assert limit["id"] in words(listed)
    assert table(none, "alerts") is None
    assert "No alert is so" in words(none)
    # Where a member chooses no tenant they see their own tenants' and nobody else's.
    assert set(table(everywhere, "alerts")["tenant"]) == {tenant["slug"]}
    assert "of the limit on requests" in str(records(open_page("overview", admin), "severity"))


def test_the_audit_log_is_filtered_in_the_address_and_shows_what_changed(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    key = platform.post(f"/tenants/{tenant['id']}/keys", json={"name": "first"})
    admin.of_tenant(tenant["id"], "keys").change(key["id"], {"name": "=cmd|' /C calc'!A0"})
    test = open_page("audit", admin, tenant)
    assert len(table(test, "audit")) >= 3
    checked(test.text_input(key="audit_object_id").set_value(key["id"]).run())
    assert test.query_params["object_id"] == key["id"]
    rows = table(test, "audit").to_dict("records")
    assert {row["what"] for row in rows} == {key["id"]}

    newest = admin.page("/audit", tenant_id=tenant["id"], object_id=key["id"])["data"][0]
    opened = open_page("audit", admin, tenant, object_id=key["id"], id=newest["id"])
    changes = {row["field"]: row for row in records(opened, "before")}
    assert changes["name"]["before"] == '"first"'
    # Whom it concerns, in whole, where the list's cells are too narrow.
    assert fmt.code(key["id"]) in words(opened)
    assert "tenant" not in table(opened, "audit").columns
    assert "tenant" in table(open_page("audit", admin), "audit").columns
    # A file that a spreadsheet opens: no cell begins a formula.
    csv = admin.download("/audit", format="csv", tenant_id=tenant["id"]).decode()
    assert not [
        cell
        for line in csv.splitlines()
        for cell in line.split(",")
        if cell.strip('"').startswith("=")
    ]
    nothing = open_page("audit", admin, tenant, action="no.such.*")
    assert "Take a filter out" in words(nothing)


def test_a_webhook_is_added_tested_replayed_switched_off_and_deleted(
    admin: Api, tenant: dict[str, Any]
) -> None:
    test = open_page("webhooks", admin, tenant)
    fill(test, new_webhook_url="http://127.0.0.1/inside")
    press(test, "new_webhook_go")
    assert test.error  # never reaches inside, in the API's words
    fill(test, new_webhook_url="https://example.com/hooks?=%22%3E%3Cscript%3E")
    press(test, "new_webhook_go")
    assert not test.error, test.error
    [secret] = [block.value for block in test.code if block.value.startswith("whsec_")]
    press(test, "webhook_done")
    assert secret not in words(test)
    hooks = admin.of_tenant(tenant["id"], "webhooks")
    [hook] = hooks.page()["data"]

    press(test, f"test_{hook['id']}")
    [delivery] = hooks.under(hook["id"], "deliveries").page()["data"]
    opened = open_page("webhooks", admin, tenant, id=hook["id"], deliveries_id=delivery["id"])
    assert delivery["id"] in words(opened)
    press(opened, f"replay_{delivery['id']}")
    press(opened, f"switch_{hook['id']}")
    assert hooks.get(hook["id"])["status"] == "disabled"
    confirm(opened, f"rotate_{hook['id']}", hook["url"])
    assert [block.value for block in opened.code if block.value.startswith("whsec_")]
    confirm(opened, f"delete_{hook['id']}", hook["url"])
    assert hooks.page()["data"] == []


def test_the_fleet_shows_every_replica_and_what_is_kept_in_memory(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    version = platform.upload(tenant["id"], "kept", is_probed=False)["version"]
    test = open_page("fleet", admin)
    assert "fake-0" in words(test)
    figures = {metric.label for metric in test.metric}
    assert {"Running", "Waiting", "KV blocks free", "Memory (RSS)"} <= figures
    assert "Loads from the store: 3; last 40 ms, p50 50 ms, p95 1,250 ms" in words(test)

    press(test, "keep_go")
    assert "Write the version's id" in words(test)
    fill(test, keep_version_id="ver_nonsense", keep_reason="launch")
    press(test, "keep_go")
    assert test.error
    fill(test, keep_version_id=version["id"])
    press(test, "keep_go")
    assert "replicas keep it" in words(test) or test.error
    kept = admin.of_platform("fleet/residency").page()["data"]
    if kept:  # an engine may refuse, and then nothing is desired of it
        opened = open_page("fleet", admin, residents_id=version["id"])
        press(opened, "unkeep")
        assert admin.of_platform("fleet/residency").page()["data"] == []


def test_people_are_let_in_locked_out_and_let_in_again(admin: Api) -> None:
    email = f"grace-{time.time_ns()}@example.com"
    test = open_page("settings", admin)
    fill(test, new_user_email=email, new_user_password="short")
    press(test, "new_user_go")
    assert "password" in test.error[0].value
    assert "short" not in test.error[0].value
    fill(test, new_user_password="correct horse battery")
    press(test, "new_user_go")
    [user] = admin.of_platform("users").page(search=email)["data"]
    assert user["role"] == "viewer"

    opened = open_page("settings", admin, q=email, id=user["id"])
    confirm(opened, f"disable_{user['id']}", email)
    [locked] = admin.of_platform("users").page(search=email)["data"]
    assert locked["disabled_at"]
    press(opened, f"enable_{user['id']}")
    [free] = admin.of_platform("users").page(search=email)["data"]
    assert free["disabled_at"] is None


def test_how_long_records_are_kept_is_changed_within_what_the_law_asks(admin: Api) -> None:
    test = open_page("settings", admin)
    before = {row["what"]: row["kept"] for row in records(test, "kept")}
    test.selectbox(key="retention_id").set_value("sessions")
    test.number_input(key="retention_keep_days").set_value(0)
    press(test, "retention_go")
    assert test.error
    assert {row["what"]: row["kept"] for row in records(test, "kept")} == before
    assert "retention_go" in keys_of(test)
