"""The pages, by Streamlit's own test driver, against the real control API. Widgets by their keys."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from loraplex_admin.api import Api
from streamlit.testing.v1 import AppTest

from tests.admin_ui.corpus import CORPUS
from tests.admin_ui.stand import ADAPTER_ANSWER, BASE_ANSWER, Stand
from tests.platform.control.stand import adapter
from tests.support.fake_engine import Script
from tests.support.processes import wait_until

PAGES = ("overview", "invariants", "tenants", "adapters", "playground", "usage", "request_log")


def _script(page, api, user):  # AppTest runs its text alone, where no name of this module exists
    import importlib

    importlib.import_module(f"loraplex_admin.pages.{page}").render(api, user)


def open_page(page: str, api: Api, tenant: dict[str, Any] | None = None) -> AppTest:
    """Run a page as whoever `api` is logged in as, with this tenant chosen before."""
    user = api.current_user()
    assert user is not None
    test = AppTest.from_function(
        _script, default_timeout=60, kwargs={"page": page, "api": api, "user": user}
    )
    if tenant is not None:
        test.session_state["last_tenant_id"] = tenant["id"]
    return checked(test.run())


def checked(test: AppTest) -> AppTest:
    assert not test.exception, test.exception
    return test


def words(test: AppTest) -> str:
    """Everything that is written on the page, as it was given to Streamlit."""
    kinds = ("title", "subheader", "markdown", "caption", "text", "code", "success", "info")
    kinds += ("warning", "error", "metric", "expander", "toast")
    found = []
    for kind in kinds:
        for element in getattr(test, kind):
            found += [str(getattr(element, name, "")) for name in ("label", "value")]
    return "\n".join(found)


def keys_of(test: AppTest) -> set[str]:
    return {
        str(w.key) for kind in ("button", "text_input", "selectbox") for w in getattr(test, kind)
    }


@pytest.fixture(scope="module")
def admin(platform: Stand) -> Api:
    return platform.api()


@pytest.fixture(scope="module")
def viewer(platform: Stand) -> Api:
    return platform.api("viewer")


def test_a_key_is_made_shown_once_and_revoked_after_a_question(
    admin: Api, tenant: dict[str, Any]
) -> None:
    test = open_page("tenants", admin, tenant)
    assert test.selectbox(key="tenants_tenant").value == tenant["id"]
    test.text_input(key="new_key_name").set_value("**prod** `x`")
    checked(test.button(key="new_key_go").click().run())

    [secret] = [block.value for block in test.code]
    assert secret.startswith("lpx_sk_")
    assert "**prod** `x`" in [text.value for text in test.text]
    checked(test.button(key="new_secret_done").click().run())
    assert secret not in words(test)

    [key] = admin.keys(tenant["id"])["data"]
    checked(test.button(key=f"revoke_{key['id']}").click().run())
    assert admin.keys(tenant["id"])["data"][0]["status"] == "active"
    checked(test.button(key=f"revoke_no_{key['id']}").click().run())
    checked(test.button(key=f"revoke_{key['id']}").click().run())
    checked(test.button(key=f"revoke_yes_{key['id']}").click().run())
    assert admin.keys(tenant["id"])["data"][0]["status"] == "revoked"
    assert f"revoke_{key['id']}" not in keys_of(test)


def test_a_new_tenant_is_chosen_at_once_and_a_bad_slug_is_refused_in_the_apis_words(
    admin: Api,
) -> None:
    test = open_page("tenants", admin)
    test.text_input(key="new_tenant_slug").set_value("Not *good*")
    checked(test.button(key="new_tenant_go").click().run())
    assert "slug" in test.error[0].value

    slug = f"new-{time.time_ns()}"
    test.text_input(key="new_tenant_slug").set_value(slug)
    checked(test.button(key="new_tenant_go").click().run())

    chosen = admin.tenant(test.selectbox(key="tenants_tenant").value)
    assert chosen["slug"] == slug


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
    test.selectbox(key=f"deploy_version_{tenant['id']}").set_value(made["versions"][0]["id"])
    checked(test.button(key="deploy_go").click().run())
    assert "Write a model id" in test.error[0].value
    admin.deploy(tenant["id"], "capitals", None)
    checked(test.run())
    test.selectbox(key=f"deploy_name_{tenant['id']}").set_value("capitals")
    test.selectbox(key=f"deploy_version_{tenant['id']}").set_value(made["versions"][0]["id"])
    checked(test.button(key="deploy_go").click().run())
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
    log = open_page("request_log", admin, tenant)
    assert len(log.dataframe[0].value) == len(admin.requests(tenant_id=tenant["id"])["data"])

    test.selectbox(key=f"take_out_name_{tenant['id']}").set_value("capitals")
    checked(test.run())
    checked(test.button(key="take_out_go").click().run())
    assert admin.deployments(tenant["id"])["data"] == []


def test_an_adapter_that_was_not_probed_is_shown_without_answers(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    platform.upload(tenant["id"], "unasked", is_probed=False)

    test = open_page("adapters", admin, tenant)

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


def test_viewers_see_everything_and_are_offered_no_change(
    platform: Stand, viewer: Api, tenant: dict[str, Any]
) -> None:
    platform.post(f"/tenants/{tenant['id']}/keys", json={"name": "k"})
    version = platform.upload(tenant["id"], "seen")["version"]
    platform.deploy(tenant["id"], "seen", version["id"])
    offered: set[str] = set()
    for page in PAGES:
        test = open_page(page, viewer, tenant)
        offered |= {key.split("_ten_")[0].split("_key_")[0] for key in keys_of(test)}
        assert not test.file_uploader

    assert offered == {
        "invariants_again",
        "tenants_tenant",
        "adapters_tenant",
        "playground_tenant",
        "usage_tenant",
        "usage_range",
        "usage_group",
        "usage_measure",
        "requests_tenant",
    }


def test_names_from_others_never_reach_streamlit_as_markdown(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    """`st.text`, cells and options take text as it is; everything else must be escaped."""
    for text in CORPUS:
        name = text[:80].strip()
        answer = platform.http.post(f"/admin/v1/tenants/{tenant['id']}/keys", json={"name": name})
        # The API refuses what could deceive an eye; whatever it takes is shown as it is.
        assert answer.status_code in {201, 400}
    kept = [key["name"] for key in admin.keys(tenant["id"])["data"]]
    assert len(kept) >= len(CORPUS) - 1

    test = open_page("tenants", admin, tenant)

    assert set(kept) <= {text.value for text in test.text}
    marked = "\n".join(str(element.value) for element in [*test.markdown, *test.caption])
    for name in kept:
        assert name not in marked


def test_invariants_say_everything_adds_up(platform: Stand, admin: Api) -> None:
    wait_until(lambda: admin.invariants()["identity"]["unlanded"] == 0)

    test = open_page("invariants", admin)

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
    test = AppTest.from_function(
        _script, kwargs={"page": "invariants", "api": api, "user": {"role": "viewer"}}
    )

    checked(test.run())

    assert test.error[0].value == "1 of 2 checks fail; see below."
    assert [box.label for box in test.expander] == [r"Bad \*one\*", "Good"]
    assert test.code[0].value == "req_1"


def test_the_overview_shows_the_fleet(admin: Api) -> None:
    test = open_page("overview", admin)

    figures = {metric.label: metric.value for metric in test.metric}
    assert figures["Waiting"] == "0"
    assert "fake-0" in words(test)
