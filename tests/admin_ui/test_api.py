"""The console's client: against the real control API, and against answers that went wrong."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from loraplex_admin.api import Api, ApiError, ApiUnreachableError

from tests.admin_ui.stand import ADAPTER_ANSWER, BASE_ANSWER, Stand
from tests.platform.control.stand import BASE, adapter
from tests.platform.gateway import tiny_model
from tests.support.fake_engine import Script
from tests.support.processes import wait_until

HELLO = [{"role": "user", "content": "hello"}]


def answering(answer: Callable[[httpx.Request], httpx.Response]) -> Api:
    """A client whose control API is a function."""
    return Api("http://control.test", "token", transport=httpx.MockTransport(answer))


def chat(api: Api, tenant_id: str, model: str) -> str:
    return "".join(api.chat(tenant_id, model, HELLO, max_tokens=40, temperature=0.0))


def test_everything_a_page_needs_against_the_real_api(platform: Stand, tenant: Any) -> None:
    api = platform.api()
    files = adapter(seed=3)

    session = api.session()
    assert session is not None
    assert session["user"]["role"] == "admin"
    keys = api.of_tenant(tenant["id"], "keys")
    made = keys.create({"name": "production"})
    assert made["secret"].startswith("lpx_sk_")
    uploaded = api.upload_adapter(
        tenant["id"], "capitals", io.BytesIO(files.config), io.BytesIO(files.model)
    )
    assert uploaded["tenant_id"] == tenant["id"]
    assert len(uploaded["version"]["report"]["probe"]["samples"]) > 1
    deployed = api.deploy(tenant["id"], "capitals", uploaded["version"]["id"])
    assert deployed["revision"]["adapter_name"] == "capitals"
    assert chat(api, tenant["id"], "capitals") == ADAPTER_ANSWER
    assert chat(api, tenant["id"], BASE) == BASE_ANSWER
    keys.remove(made["id"], reason="over")

    assert api.tenant(tenant["id"])["slug"] == tenant["slug"]
    statuses = {key["name"]: key["status"] for key in keys.page()["data"]}
    assert statuses == {"production": "revoked", "playground": "active"}
    assert "secret" not in keys.page()["data"][0]
    assert keys.get(made["id"])["revoke_reason"] == "over"
    assert [a["name"] for a in api.adapters(tenant["id"])["data"]] == ["capitals"]
    requests = api.requests(tenant_id=tenant["id"])["data"]
    assert {row["kind"] for row in requests} == {"probe", "user"}
    now = int(time.time())
    query: dict[str, Any] = {
        "start": now - 3600,
        "end": now + 60,
        "bucket": "1h",
        "group_by": ["model"],
        "tenant_id": tenant["id"],
    }
    rows, is_cut = api.usage(**query)
    assert {row["model"] for row in rows} == {"capitals", BASE}
    assert not is_cut
    assert b"capitals" in api.usage_csv(**query)
    wait_until(lambda: api.invariants()["identity"]["unlanded"] == 0)
    assert api.invariants()["ok"]
    assert api.overview()["tenants"] >= 1
    assert api.fleet()["replicas"][0]["state"] == "ready"
    api.delete_deployment(tenant["id"], "capitals")
    assert api.deployments(tenant["id"])["data"] == []


def test_a_session_that_is_over_is_nobody(platform: Stand) -> None:
    api = platform.api("viewer")
    session = api.session()
    assert session is not None
    assert session["user"]["role"] == "viewer"

    api.log_out()

    assert api.session() is None
    for token in ("", "made-up"):
        with Api(platform.control_url, token) as nobody:
            assert nobody.session() is None


def test_refusals_keep_the_apis_words(platform: Stand, tenant: Any) -> None:
    api = platform.api()

    with pytest.raises(ApiError, match="slug") as refusal:
        api.create_tenant({"slug": "Not A Slug"})
    assert refusal.value.status == 400
    assert refusal.value.param == "slug"
    for name in ("a/b", "..", "?x=1", "#", "a b", "🙂"):
        with pytest.raises(ApiError) as refusal:
            api.deploy(tenant["id"], name, None)
        assert refusal.value.status in {400, 404}
    assert api.deployments(tenant["id"])["data"] == []
    with pytest.raises(ApiError) as refusal:
        chat(api, tenant["id"], "no-such-model")
    assert refusal.value.code == "model_not_found"
    with pytest.raises(ApiError) as refusal:
        platform.api("viewer").of_tenant(tenant["id"], "keys").create({"name": "x"})
    assert refusal.value.status == 403
    assert "Viewers may only read" in str(refusal.value)


def test_an_api_that_is_down_is_unreachable() -> None:
    with Api("http://127.0.0.1:9", "token") as api:
        with pytest.raises(ApiUnreachableError):
            api.session()
        with pytest.raises(ApiUnreachableError):
            list(api.chat("ten_1", "m", HELLO, max_tokens=1, temperature=0))


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(502, html="<html>bad gateway</html>"),
        httpx.Response(500, json={"detail": "?"}),
        httpx.Response(500, json={"error": "text"}),
        httpx.Response(503, content=b""),
    ],
)
def test_an_error_in_a_foreign_form_is_one_plain_line(answer: httpx.Response) -> None:
    with pytest.raises(ApiError, match=f"^The control API answered {answer.status_code}.$"):
        answering(lambda _: answer).overview()


def test_something_else_at_the_address_is_said() -> None:
    api = answering(lambda _: httpx.Response(200, html="<html>hello</html>"))

    with pytest.raises(ApiError, match="LORAPLEX_CONTROL_URL"):
        api.tenants()


def test_all_pages_of_a_usage_report_are_read() -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        page = int(request.url.params.get("page", "0"))
        asked.append(page)
        body = {"data": [{"requests": page}], "has_more": page < 2, "next_page": str(page + 1)}
        return httpx.Response(200, json=body)

    rows, is_cut = answering(answer).usage(
        start=0, end=1, bucket="1d", group_by=["model"], tenant_id=None
    )

    assert [row["requests"] for row in rows] == asked == [0, 1, 2]
    assert not is_cut


def frames(*parts: object) -> bytes:
    return b"".join(
        f"data: {part if isinstance(part, str) else json.dumps(part)}\n\n".encode()
        for part in parts
    )


def piece(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (frames(piece("a")), "The answer broke off."),
        (frames(piece("a"), {"error": {"message": "lost it", "code": "x"}}, "[DONE]"), "lost it"),
    ],
)
def test_a_stream_that_ends_badly_says_so_after_what_came(stream: bytes, message: str) -> None:
    api = answering(lambda _: httpx.Response(200, content=stream))
    pieces = iter(api.chat("ten_1", "m", HELLO, max_tokens=9, temperature=0))

    assert next(pieces) == "a"
    with pytest.raises(ApiError, match=message):
        next(pieces)


def test_comments_role_frames_and_usage_frames_are_no_text() -> None:
    stream = b": ping\n\n" + frames(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        piece("a"),
        piece(" b"),
        {"id": "chatcmpl-0a", "choices": [], "usage": {"prompt_tokens": 3}},
        "[DONE]",
    )
    api = answering(lambda _: httpx.Response(200, content=stream))

    answer = api.chat("t", "m", HELLO, max_tokens=9, temperature=0)

    assert list(answer) == ["a", " b"]
    assert (answer.request_id, answer.usage) == ("req_0a", {"prompt_tokens": 3})


@pytest.mark.parametrize("is_silent", [False, True])
def test_closing_a_stream_ends_its_thread_and_the_engines_work(
    platform: Stand, tenant: Any, is_silent: bool
) -> None:
    platform.deploy(tenant["id"], "endless", None)
    words = tiny_model.ids_of("again ") * 100
    old = platform.base_script
    platform.base_script = Script(token_ids=words, token_delay_s=0.02, never_answers=is_silent)
    stream = platform.api().chat(tenant["id"], "endless", HELLO, max_tokens=400, temperature=0)
    got: list[str] = []
    thread = threading.Thread(target=lambda: got.extend(stream))
    try:
        thread.start()
        wait_until(lambda: platform.engine.num_running > 0)

        stream.close()
        # Until the gateway has begun to answer there is no connection to end: the flag counts.
        if not is_silent:
            thread.join(20)
            assert not thread.is_alive()
            wait_until(lambda: platform.engine.num_running == 0)
            assert len("".join(got)) < len("again " * 100)
    finally:
        platform.base_script = old
        if is_silent:
            platform.run(let_speak(platform))
            thread.join(20)
    assert not thread.is_alive()


async def let_speak(platform: Stand) -> None:
    """Let the silent requests go on."""
    for running in platform.engine._running.values():
        running.wake.set()


def test_what_is_sent_once_is_made_once_and_a_stale_change_is_told_apart(
    platform: Stand, tenant: dict[str, Any]
) -> None:
    keys = platform.api().of_tenant(tenant["id"], "keys")

    first = keys.create({"name": "x"}, once="a-form")
    again = keys.create({"name": "x"}, once="a-form")

    assert again["id"] == first["id"]
    assert (first["secret"] is None, again["secret"] is None) == (False, True)
    keys.change(first["id"], {"name": "y"}, version=first["version"])
    with pytest.raises(ApiError) as stale:
        keys.change(first["id"], {"name": "z"}, version=first["version"])
    assert stale.value.is_stale
    with pytest.raises(ApiError) as unknown:
        keys.get("key_/../..")
    assert unknown.value.status == 404
    assert not unknown.value.is_stale
