"""The pages, by Streamlit's own test driver, against the real control API. Widgets by their keys."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from loraplex_admin.access import Access
from loraplex_admin.api import Api

from tests.admin_ui.driver import checked, confirm, open_page, press, table, words
from tests.admin_ui.stand import ADAPTER_ANSWER, BASE_ANSWER, Stand
from tests.platform.control.stand import adapter
from tests.support.fake_engine import Script
from tests.support.processes import wait_until

VIEWER = Access(
    {"id": "usr_1", "email": "v@example.com", "role": "viewer"}, frozenset({"invariant.read"}), {}
)


@pytest.fixture(scope="module")
def admin(platform: Stand) -> Api:
    return platform.api()


def test_an_adapter_is_uploaded_deployed_asked_and_taken_out(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    files = adapter(seed=1)
    test = open_page("adapters", admin, tenant)
    test.text_input(key="upload_name").set_value("capitals")
    checked(test.button(key="upload_go").click().run())
    assert test.error[0].value == (
        "Still missing: `adapter_config.json`, `adapter_model.safetensors`."
    )
    test.file_uploader(key="upload_config").set_value(
        ("adapter_config.json", files.config, "application/json")
    )
    test.file_uploader(key="upload_model").set_value(
        ("adapter_model.safetensors", files.model, "application/octet-stream")
    )
    checked(test.button(key="upload_go").click().run())

    assert "is ready to serve" in test.success[0].value
    shown = [text.value for text in test.text]
    assert BASE_ANSWER in shown
    assert ADAPTER_ANSWER in shown
    [made] = admin.adapters(tenant["id"])["data"]
    deploy = open_page("deployments", admin, tenant)
    deploy.selectbox(key="deploy_version_id").set_value(made["versions"][0]["id"])
    checked(deploy.button(key="deploy_go").click().run())
    assert "Write a model id" in deploy.error[0].value
    deploy.text_input(key="deploy_name").set_value("capitals")
    checked(deploy.button(key="deploy_go").click().run())
    [deployment] = admin.deployments(tenant["id"])["data"]
    assert deployment["revision"]["adapter_name"] == "capitals"

    ask = open_page("playground", admin, tenant)
    checked(ask.button(key="playground_ask").click().run())
    assert {BASE_ANSWER, ADAPTER_ANSWER} <= {text.value for text in ask.text}
    checked(ask.run())
    assert {BASE_ANSWER, ADAPTER_ANSWER} <= {text.value for text in ask.text}

    usage = open_page("usage", admin, tenant)
    figures = {metric.label: metric.value for metric in usage.metric}
    assert figures["Requests"] == "2"
    assert figures["Cost"].startswith("$0.0000")
    log = open_page("requests", admin, tenant)
    assert len(table(log, "requests")) == len(admin.requests(tenant_id=tenant["id"])["data"])

    out = open_page("deployments", admin, tenant, id="capitals")
    confirm(out, "archive", "capitals")
    assert admin.deployments(tenant["id"])["data"] == []


def test_the_base_and_two_revisions_answer_side_by_side_and_each_says_its_cost(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    version = platform.upload(tenant["id"], "capitals")["version"]["id"]
    platform.deploy(tenant["id"], "town", version)
    platform.deploy(tenant["id"], "town", None)
    ask = open_page("playground", admin, tenant, beside="town", revision="town@1")
    assert "3 answers are 3 requests of" in words(ask)

    press(ask, "playground_ask")

    assert [text.value for text in ask.text] == [BASE_ANSWER, ADAPTER_ANSWER, BASE_ANSWER]
    labels = [one.value for one in ask.caption if "deployment, revision" in one.value]
    assert labels == ["deployment, revision 1 · `town`", "deployment, revision 2 · `town`"]
    costs = [one.value for one in ask.caption if "tokens, " in one.value]
    assert len(costs) == 3
    assert all("$0.0" in cost for cost in costs), costs
    named = open_page("requests", admin, tenant, side="named")
    assert list(table(named, "requests")["side"]) == ["named"]


def test_an_adapter_that_was_not_probed_is_shown_without_answers(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    platform.upload(tenant["id"], "unasked", is_probed=False)

    [made] = admin.adapters(tenant["id"])["data"]

    test = open_page("adapters", admin, tenant, id=made["id"])

    figures = {metric.label: metric.value for metric in test.metric}
    assert figures["Answers changed"] == "not asked"
    assert ADAPTER_ANSWER not in [text.value for text in test.text]


def test_a_bad_upload_is_refused_in_the_apis_words(admin: Api, tenant: dict[str, Any]) -> None:
    test = open_page("adapters", admin, tenant)
    test.text_input(key="upload_name").set_value("bad")
    test.file_uploader(key="upload_config").set_value(
        ("adapter_config.json", b"{}", "application/json")
    )
    test.file_uploader(key="upload_model").set_value(
        ("adapter_model.safetensors", b"nonsense", "application/octet-stream")
    )
    checked(test.button(key="upload_go").click().run())

    [error] = test.error
    assert "adapter_config" in error.value or "adapter_model" in error.value
    assert "Still missing" not in error.value
    assert admin.adapters(tenant["id"])["data"] == []


def test_a_failing_model_shows_its_error_beside_the_other_answer(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    platform.deploy(tenant["id"], "only-base", None)
    old = platform.base_script
    platform.base_script = Script(error_after=2)
    try:
        test = open_page("playground", admin, tenant)
        checked(test.button(key="playground_ask").click().run())
    finally:
        platform.base_script = old
    assert len(test.error) == 2
    assert all(error.value for error in test.error)


def test_invariants_say_everything_adds_up(platform: Stand, admin: Api) -> None:
    wait_until(lambda: admin.invariants()["identity"]["unlanded"] == 0)

    test = press(open_page("invariants", admin), "invariants_again")

    assert test.success[0].value == "Everything adds up."
    figures = {metric.label: metric.value for metric in test.metric}
    assert figures["Difference"] == "0"
    assert figures["Generated by engines"] == figures["Accounted for"]


def test_invariants_that_fail_come_first_with_their_offenders() -> None:
    report = {
        "ok": False,
        "checked_at": 0,
        "identity": dict.fromkeys(
            (
                *("generated", "billed", "absorbed", "discarded_past_stop"),
                *("discarded_past_abort", "difference", "pending_requests", "unlanded"),
            ),
            7,
        ),
        "checks": [
            {"name": "a", "title": "Good", "ok": True, "detail": "fine", "offenders": []},
            {
                "name": "b",
                "title": "Bad *one*",
                "ok": False,
                "detail": "off",
                "offenders": ["req_1"],
            },
        ],
    }
    api = Api(
        "http://x", "", transport=httpx.MockTransport(lambda _: httpx.Response(200, json=report))
    )
    test = open_page("invariants", api, access=VIEWER)

    assert test.error[0].value == "1 of 2 checks fail; see below."
    assert [box.label for box in test.expander] == [r"Bad \*one\*", "Good"]
    assert test.code[0].value == "req_1"


def test_the_overview_shows_the_fleet(admin: Api) -> None:
    test = open_page("overview", admin)

    figures = {metric.label: metric.value for metric in test.metric}
    assert figures["Waiting"] == "0"
    assert "fake-0" in words(test)
