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
    for key in kept[:: max(1, len(kept) // 5)]:
        given = marked(open_page("keys", admin, tenant, id=key["id"]))
        if _ACTIVE.search(key["name"]):
            assert key["name"] not in given, key["name"]
    assert "<script>" not in marked(open_page("tenants", admin, id=tenant["id"]))


def answering_with(texts: tuple[str, ...]) -> Api:
    """A client whose control API has these texts in every field that somebody else fills, a row for each."""
    whole = dict(zip(map(str, range(len(texts))), texts, strict=True)) | dict.fromkeys(texts, "x")
    none: dict[str, Any] = {}

    def row(number: int, text: str) -> dict[str, dict[str, Any]]:
        word = text[:200]
        return {
            "/admin/v1/tenants": none
            | {"id": f"ten_{number}", "slug": f"acme-{number}", "name": word, "status": "active"}
            | {"billing_tz": "UTC", "replays_answers": False, "version": 1, "created_at": 0},
            "/admin/v1/tenants/ten_0/webhooks": none
            | {"id": f"whk_{number}", "tenant_id": "ten_0", "url": word, "description": text}
            | {"topics": ["alert"], "status": "failed", "failing_since": 0, "created_at": 0}
            | {"old_secret_until": None, "version": 1},
            "/admin/v1/tenants/ten_0/webhooks/whk_0/deliveries": none
            | {"id": f"whd_{number}", "webhook_id": "whk_0", "topic": "alert", "status": "failed"}
            | {"tries": 1, "occurred_at": 0, "next_at": None, "last_tried_at": 0}
            | {"last_status": 500, "last_error": text, "delivered_at": None, "payload": whole},
            "/admin/v1/audit": none
            | {"id": f"aud_{number}", "at": 0, "tenant_id": "ten_0", "actor_kind": "user"}
            | {"actor_id": word, "action": word, "object_kind": "api_key", "object_id": word}
            | {"request_id": word, "detail": whole, "before": whole, "after": {text: text[::-1]}}
            | {"seq": 1, "hash": word},
            "/admin/v1/requests": none
            | {"id": f"req_{number}", "tenant_id": "ten_0", "kind": "user", "model": text}
            | {"state": "settled", "finish_reason": None, "http_status": 200, "error_code": word}
            | {"prompt_tokens": 1, "completion_tokens": 1, "ttft_ms": 1, "e2e_ms": 1}
            | {"created_at": 0},
        }

    rows = [row(number, text) for number, text in enumerate(texts)]

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        for list_path in rows[0]:
            found = [one[list_path] for one in rows]
            if path == list_path:
                return httpx.Response(200, json={"object": "list", "data": found})
            for one in found:
                if path == f"{list_path}/{one['id']}":
                    return httpx.Response(200, json=one)
        if path.startswith("/admin/v1/explain/"):
            said = {"request_id": texts[0][:200], "tenant_id": "ten_0", "outcome": "refused"}
            said |= {"summary": texts[-1], "details": list(texts), "limit_ids": [], "at": 0}  # type: ignore[dict-item]
            return httpx.Response(200, json=said)
        if path.endswith("/scheduling"):
            weights: dict[str, Any] = {"priority": 0, "weight": 1.0, "memory_weight": None}
            return httpx.Response(200, json=weights | {"max_adapters": None, "version": 1})
        if path.endswith(("/projects", "/chains", "/keys", "/deployments", "/limits")):
            return httpx.Response(200, json={"data": [], "has_more": False})
        error = {"message": " ".join(texts), "type": "x", "param": texts[0], "code": "not_found"}
        return httpx.Response(404, json={"error": error})

    return Api("http://x", "", transport=httpx.MockTransport(answer))


ACTIVE = re.compile(r"<[a-z!/]|\]\(|https?://|(?<![a-z]):material/|\u202e|```|\$\$|javascript:")
OPENED = (
    ("tenants", {"id": "ten_0"}),
    ("webhooks", {"id": "whk_0", "deliveries_id": "whd_0"}),
    ("audit", {"id": "aud_0"}),
    ("requests", {"id": "req_0"}),
    ("limits", {"request": "req_0"}),
    ("invoices", {}),
)


@pytest.mark.parametrize("first", range(0, len(CORPUS), 9))
@pytest.mark.parametrize(("path", "opened"), OPENED, ids=[path for path, _ in OPENED])
def test_every_page_shows_what_an_api_full_of_it_says(
    path: str, opened: dict[str, str], first: int
) -> None:
    texts = CORPUS[first : first + 9]
    actions = {
        f"{what}.{how}"
        for what in ("tenant", "webhook", "audit", "request", "limit", "platform_webhook")
        for how in ("read", "write", "update")
    }
    user: Any = {"id": "u", "email": texts[0], "role": "admin"}

    test = open_page(
        path,
        answering_with(texts),
        {"slug": "acme-0"},
        access=Access(user, frozenset(actions), {}),
        **opened,
    )

    for line in _outside_of_code(marked(test)).splitlines():
        assert not ACTIVE.search(line), line[:200]
        assert len(line) < 6000, line[:200]


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
