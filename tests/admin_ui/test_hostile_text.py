"""Names and answers that are more than words to somebody: on every page that shows them, they are words."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api

from tests.admin_ui.corpus import CORPUS, LONG, NAMES
from tests.admin_ui.driver import marked, open_page, table
from tests.admin_ui.stand import Stand

# What a page must never give to Streamlit as Markdown: the text itself, for each of these is something in it.
_ACTIVE = re.compile(r"[*_`<>\[\]$:#~|\\]|https?://|->|<-|--")


@pytest.fixture(scope="module")
def admin(platform: Stand) -> Api:
    return platform.api()


def test_keys_with_hostile_names_are_listed_and_opened_as_they_are(
    platform: Stand, admin: Api
) -> None:
    tenant = platform.tenant("hostile", name="<script>alert('tenant')</script> **t**")
    kept = []
    for text in NAMES:
        answer = platform.http.post(
            f"/admin/v1/tenants/{tenant['id']}/keys", json={"name": text.strip()}
        )
        # The API refuses what could break a log; whatever it takes is shown as it is.
        assert answer.status_code in {201, 400}, answer.text
        if answer.status_code == 201:
            kept.append(answer.json())
    assert len(kept) >= len(NAMES) - 1

    test = open_page("keys", admin, tenant)
    names = list(table(test, "keys")["name"])
    assert names == [fmt.cell(key["name"]) for key in reversed(kept)][: len(names)]
    for key in kept[:: max(1, len(kept) // 12)]:
        opened = open_page("keys", admin, tenant, id=key["id"])
        given = marked(opened)
        if _ACTIVE.search(key["name"]):
            assert key["name"] not in given, key["name"]
    assert "<script>" not in marked(open_page("tenants", admin, id=tenant["id"]))


@pytest.mark.parametrize("text", CORPUS, ids=range(len(CORPUS)))
def test_every_page_shows_what_an_api_full_of_it_says(text: str) -> None:
    """Each field that somebody else fills is this text, on the pages that have most of them."""
    word = text[:200]
    rows = {
        "/admin/v1/tenants": [
            {
                "id": "ten_1",
                "slug": "acme",
                "name": word,
                "status": "active",
                "billing_tz": "UTC",
                "replays_answers": False,
                "version": 1,
                "created_at": 0,
            }
        ],
        "/admin/v1/tenants/ten_1/webhooks": [
            {
                "id": "whk_1",
                "tenant_id": "ten_1",
                "url": word,
                "description": text,
                "topics": ["alert"],
                "status": "failed",
                "failing_since": 0,
                "old_secret_until": None,
                "created_at": 0,
                "version": 1,
            }
        ],
        "/admin/v1/tenants/ten_1/webhooks/whk_1/deliveries": [
            {
                "id": "whd_1",
                "webhook_id": "whk_1",
                "topic": "alert",
                "status": "failed",
                "tries": 1,
                "occurred_at": 0,
                "next_at": None,
                "last_tried_at": 0,
                "last_status": 500,
                "last_error": text,
                "delivered_at": None,
                "payload": {text: [text]},
            }
        ],
        "/admin/v1/audit": [
            {
                "id": "aud_1",
                "at": 0,
                "tenant_id": "ten_1",
                "actor_kind": "user",
                "actor_id": word,
                "action": word,
                "object_kind": "api_key",
                "object_id": word,
                "request_id": word,
                "detail": {text: text},
                "before": {"name": text},
                "after": {"name": text[::-1]},
                "seq": 1,
                "hash": word,
            }
        ],
        "/admin/v1/requests": [
            {
                "id": "req_1",
                "tenant_id": "ten_1",
                "kind": "user",
                "model": text,
                "state": "settled",
                "finish_reason": None,
                "http_status": 200,
                "error_code": word,
                "prompt_tokens": 1,
                "completion_tokens": 1,
                "ttft_ms": 1,
                "e2e_ms": 1,
                "created_at": 0,
            }
        ],
    }

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        for list_path, found in rows.items():
            if path == list_path:
                return httpx.Response(
                    200, json={"object": "list", "data": found, "has_more": False}
                )
            if path == f"{list_path}/{found[0]['id']}":
                return httpx.Response(200, json=found[0])
        if path.startswith("/admin/v1/explain/"):
            said = {"request_id": word, "tenant_id": "ten_1", "outcome": "refused", "summary": text}
            return httpx.Response(200, json=said | {"details": [text], "limit_ids": [], "at": 0})
        if path.endswith("/scheduling"):
            weights: dict[str, Any] = {"priority": 0, "weight": 1.0, "memory_weight": None}
            return httpx.Response(200, json=weights | {"max_adapters": None, "version": 1})
        if path.endswith(("/projects", "/chains", "/keys", "/deployments", "/limits")):
            return httpx.Response(200, json={"data": [], "has_more": False})
        error = {"message": text, "type": "x", "param": word, "code": "not_found"}
        return httpx.Response(404, json={"error": error})

    api = Api("http://x", "", transport=httpx.MockTransport(answer))
    everything = {
        f"{what}.{how}"
        for what in ("tenant", "webhook", "audit", "request", "limit", "platform_webhook")
        for how in ("read", "write", "update")
    }
    access = Access({"id": "u", "email": word, "role": "admin"}, frozenset(everything), {})
    for path, opened in (
        ("tenants", {"id": "ten_1"}),
        ("webhooks", {"id": "whk_1", "deliveries_id": "whd_1"}),
        ("audit", {"id": "aud_1"}),
        ("requests", {"id": "req_1"}),
        ("limits", {"request": "req_1"}),
        ("invoices", {}),
    ):
        test = open_page(path, api, {"slug": "acme"}, access=access, **opened)
        given = marked(test)
        for active in re.findall(r"<[a-z!]|\]\(|https?://|:material/|\u202e|```", text):
            # Escaped or inside of a code span, where nothing is anything.
            for line in _outside_of_code(given).splitlines():
                assert active not in line, (path, line[:200])
        assert all(len(line) < 1500 for line in given.splitlines()), path


def _outside_of_code(text: str) -> str:
    """Without code spans, and without our own icons."""
    without = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text, flags=re.S)
    return re.sub(r"^:material/[a-z_]+:$", "", without, flags=re.M)


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_what_is_endless_is_cut_and_says_so(text: str) -> None:
    for shown in (fmt.literal(text), fmt.code(text), fmt.cell(text)):
        assert len(shown) < 1200
        assert "more characters" in shown.replace("\\", "")


def test_direction_signs_are_seen_and_kept_from_the_sentence() -> None:
    assert fmt.cell("user\u202egpj.exe") == "user\ufffdgpj.exe"
    for shown in (fmt.code("user\u202egpj.exe"), fmt.literal("user\u202egpj.exe")):
        assert "\u202e" not in shown
        assert shown.strip("`")[0] == "\u2068"
        assert shown.strip("`")[-1] == "\u2069"
    assert fmt.code("שלום") == "`\u2068שלום\u2069`"
    assert fmt.literal("plain") == "plain"


def test_the_corpus_travels_through_json_as_it_is() -> None:
    for text in CORPUS:
        assert json.loads(json.dumps(text)) == text
