"""Webhooks over the control API: whose they are, the secret once, changes with their before and after."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.platform.control.stand import Stand, error_of

KEY = "webhook-key-for-tests-0123456789abcdef"
HOOK = {"url": "https://example.com/hooks", "topics": ["alert"], "description": "pager"}


@pytest.fixture
async def stand(db_url: str, redis_url: str, short_tmp_path: Path) -> AsyncIterator[Stand]:
    async with Stand.open(db_url, redis_url, short_tmp_path, webhook_key=KEY) as stand:
        yield stand


async def path_of(stand: Stand, slug: str) -> str:
    return f"/admin/v1/tenants/{(await stand.tenant(slug))['id']}/webhooks"


async def audited(stand: Stand, action: str) -> list[dict[str, Any]]:
    answer = await stand.admin.get("/admin/v1/audit", params={"action": action})
    return list(answer.json()["data"])


async def test_the_secret_is_shown_once_and_is_nowhere_else(stand: Stand, db_url: str) -> None:
    import psycopg

    path = await path_of(stand, "acme")
    headers = {"idempotency-key": "k1"}
    made = await stand.admin.post(path, json=HOOK, headers=headers)
    again = await stand.admin.post(path, json=HOOK, headers=headers)
    shown = await stand.admin.get(f"{path}/{made.json()['id']}")

    assert made.status_code == 201, made.text
    secret = made.json()["secret"]
    assert secret.startswith("whsec_")
    assert again.json() == made.json() | {"secret": None}
    assert shown.json() == {k: v for k, v in made.json().items() if k != "secret"}
    assert shown.headers["etag"] == '"1"'
    with psycopg.connect(db_url) as connection:
        dump = connection.execute(
            "select (select string_agg(w::text, '') from webhooks w)"
            " || (select string_agg(a::text, '') from audit_log a)"
            " || (select string_agg(i::text, '') from idempotency i)"
        ).fetchone()
    assert dump is not None
    assert secret.removeprefix("whsec_").rstrip("=") not in dump[0]


async def test_another_tenants_webhook_is_an_unknown_one(stand: Stand) -> None:
    acme, beta = await path_of(stand, "acme"), await path_of(stand, "beta")
    made = (await stand.admin.post(acme, json=HOOK)).json()
    dlv = (await stand.admin.post(f"{acme}/{made['id']}/test")).json()["id"]

    for answer in (
        await stand.admin.get(f"{beta}/{made['id']}"),
        await stand.admin.patch(f"{beta}/{made['id']}", json={"status": "disabled"}),
        await stand.admin.delete(f"{beta}/{made['id']}"),
        await stand.admin.post(f"{beta}/{made['id']}/rotate", json={}),
        await stand.admin.post(f"{beta}/{made['id']}/test"),
        await stand.admin.get(f"{beta}/{made['id']}/deliveries"),
        await stand.admin.post(f"{beta}/{made['id']}/deliveries/{dlv}/replay"),
        await stand.admin.get(f"/admin/v1/webhooks/{made['id']}"),
        await stand.admin.get(f"{acme}/whk_{'0' * 32}"),
        await stand.admin.get(f"{acme}/nonsense"),
    ):
        error_of(answer, 404, "not_found")
    assert (await stand.admin.get(beta)).json()["data"] == []


async def test_changes_are_audited_with_before_and_after(stand: Stand) -> None:
    path = await path_of(stand, "acme")
    made = (await stand.admin.post(path, json=HOOK)).json()

    changed = await stand.admin.patch(
        f"{path}/{made['id']}",
        json={"topics": ["invoice", "alert", "invoice"][:2], "status": "disabled"},
        headers={"if-match": '"1"'},
    )
    same = await stand.admin.patch(f"{path}/{made['id']}", json={"status": "disabled"})
    stale = await stand.admin.patch(
        f"{path}/{made['id']}", json={"status": "enabled"}, headers={"if-match": '"1"'}
    )

    assert changed.status_code == 200, changed.text
    assert changed.json()["topics"] == ["alert", "invoice"]
    assert (changed.headers["etag"], same.headers["etag"]) == ('"2"', '"2"')
    error_of(stale, 409, "version_conflict")
    [entry] = await audited(stand, "webhook.update")
    assert entry["before"] == {"topics": ["alert"], "status": "enabled"}
    assert entry["after"] == {"topics": ["alert", "invoice"], "status": "disabled"}
    assert (await stand.admin.delete(f"{path}/{made['id']}")).status_code == 204
    [entry] = await audited(stand, "webhook.delete")
    assert entry["before"]["url"] == HOOK["url"]


async def test_a_test_message_is_listed_and_replayed(stand: Stand) -> None:
    path = await path_of(stand, "acme")
    made = (await stand.admin.post(path, json=HOOK)).json()

    sent = await stand.admin.post(f"{path}/{made['id']}/test")
    listed = (await stand.admin.get(f"{path}/{made['id']}/deliveries")).json()
    replayed = await stand.admin.post(f"{path}/{made['id']}/deliveries/{sent.json()['id']}/replay")
    await stand.admin.patch(f"{path}/{made['id']}", json={"status": "disabled"})
    off = await stand.admin.post(f"{path}/{made['id']}/test")

    assert sent.status_code == replayed.status_code == 202, replayed.text
    assert [entry["id"] for entry in listed["data"]] == [sent.json()["id"]]
    assert listed["data"][0]["topic"] == "test"
    error_of(off, 409, "conflict")


async def test_the_operators_own_are_apart(stand: Stand) -> None:
    path = await path_of(stand, "acme")
    made = await stand.admin.post("/admin/v1/webhooks", json=HOOK)
    viewer = await stand.login("viewer")

    assert made.json()["tenant_id"] is None
    assert (await stand.admin.get(path)).json()["data"] == []
    assert len((await viewer.get("/admin/v1/webhooks")).json()["data"]) == 1
    error_of(await viewer.post("/admin/v1/webhooks", json=HOOK), 403, "permission_denied")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"url": "http://example.com/"}, "url"),
        ({"url": "https://169.254.169.254/latest"}, "url"),
        ({"topics": []}, "topics"),
        ({"topics": ["everything"]}, "topics.0"),
        ({"description": "a\nb"}, "description"),
        ({"secret": "mine"}, "secret"),
    ],
)
async def test_bad_input_names_the_field(stand: Stand, change: dict[str, Any], param: str) -> None:
    answer = await stand.admin.post(await path_of(stand, "acme"), json=HOOK | change)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_there_is_an_end_to_them(stand: Stand) -> None:
    from loraplex_platform.webhooks.service import MAX_WEBHOOKS

    path = await path_of(stand, "acme")
    for _ in range(MAX_WEBHOOKS):
        assert (await stand.admin.post(path, json=HOOK)).status_code == 201

    error_of(await stand.admin.post(path, json=HOOK), 409, "conflict")


async def test_without_the_operators_key_there_can_be_none(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    async with Stand.open(db_url, redis_url, short_tmp_path) as stand:
        answer = await stand.admin.post("/admin/v1/webhooks", json=HOOK)

    error = error_of(answer, 503, "webhook_key_missing")
    assert "LORAPLEX_WEBHOOK_KEY" in error["message"]
