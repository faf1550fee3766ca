"""A tenant that has something on every page of the console, made over the control API as its people would."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from tests.admin_ui.corpus import NAMES
from tests.admin_ui.stand import Platform
from tests.platform.control.stand import BASE, AdapterFiles, adapter
from tests.support.processes import wait_until

_RUNNING = ("queued", "running")
_SET_UP = ("draft", "evaluating")


@dataclass(frozen=True)
class Words:
    """What its people have written, and what they have uploaded.

    Attributes:
        keys: names of keys, of which each that the API does not refuse is made.
        adapters: of its two versions; None: made up for the tiny model.
        base: the model's name.
        questions: what is asked, of the canary, a deployment and the base in turns.
        cases: of its suite: name, question, and what the answer has to contain.
        evaluated: the deployment that is asked them.
    """

    keys: tuple[str, ...] = NAMES
    project: str = "مشروع الدردشة **one**"
    hook: str = "https://example.com/?<script>alert(1)</script>"
    legal_name: str = "Acme **Corp.** שלום"
    address: str = "1 <b>Main</b> St\nSpringfield"
    reason: str = "=1+1 Goodwill <i>"
    zone: str = "Asia/Kathmandu"
    adapters: tuple[AdapterFiles, AdapterFiles] | None = None
    base: str = BASE
    questions: tuple[str, ...] = ("hello",) * 3
    cases: tuple[tuple[str, str, str], ...] = (
        ("france", "Capital of France?", "base model"),
        ("spain", "Capital of Spain?", "Madrid"),
    )
    evaluated: str = "only-base"


def fill(platform: Platform, slug: str, name: str, words: Words | None = None) -> dict[str, Any]:
    """Make it: the tenant, with `opened`: for a page what of it can be opened, as in its address.

    Args:
        words: None: such as are meant to deceive.
    """
    words = words or Words()
    tenant = platform.post("/tenants", json={"slug": slug, "name": name, "billing_tz": words.zone})
    at = f"/tenants/{tenant['id']}"
    keys = []
    for text in words.keys:
        answer = platform.http.post(f"/admin/v1{at}/keys", json={"name": text.strip()})
        # The API refuses what could break a log.
        keys += [answer.json()] if answer.is_success else []
    platform.post(f"{at}/projects", json={"name": words.project})
    for number in range(2):
        body = {"email": f"new-{number}@a-very-long-domain-name.example.org", "role": "developer"}
        platform.post(f"{at}/invitations", json=body)
    member = platform.member(tenant["id"], "viewer")
    assert member.session() is not None
    opened = _models(platform, at, tenant["id"], words)
    _money(platform, at, tenant["id"], keys, words)
    hook = platform.post(f"{at}/webhooks", json={"url": words.hook, "topics": ["alert"]})
    tested = platform.http.post(f"/admin/v1{at}/webhooks/{hook['id']}/test")
    assert tested.is_success, tested.text
    models = ("capitals", "only-base", words.base)
    for number, question in enumerate(words.questions):
        secret = keys[0 if number < len(models) else 2]["secret"]
        asked = platform.ask(secret, models[number % len(models)], question, f"user-{number}")
        assert asked.is_success, asked.text
    requests = platform.http.get(f"/admin/v1/requests?tenant_id={tenant['id']}").json()["data"]
    refused = platform.ask(keys[1]["secret"], words.base)
    assert refused.status_code == 429, refused.text
    month = f"{datetime.now(ZoneInfo(words.zone)):%Y-%m}"
    invoice = platform.post(f"{at}/invoices", json={"month": month})
    [book, *_] = platform.http.get("/admin/v1/price-books").json()["data"]
    alerts = f"/admin/v1/alerts?tenant_id={tenant['id']}"
    wait_until(lambda: platform.http.get(alerts).json()["data"], deadline_s=60)
    [alert, *_] = platform.http.get(alerts).json()["data"]
    audit = platform.http.get(f"/admin/v1/audit?tenant_id={tenant['id']}").json()["data"]
    opened |= {
        "tenants": {"id": tenant["id"]},
        "invoices": {"id": invoice["id"]},
        "keys": {"id": keys[3]["id"]},
        "prices": {"id": book["id"]},
        "webhooks": {"id": hook["id"]},
        "requests": {"id": requests[0]["id"]},
        "limits": {"request": refused.headers["x-request-id"]},
        "audit": {"id": audit[-1]["id"]},
        "alerts": {"id": alert["id"]},
        "playground": {"model": "capitals"},
    }
    return tenant | {"keys": keys, "opened": opened, "viewer": member}


def _models(platform: Platform, at: str, tenant_id: str, words: Words) -> dict[str, dict[str, str]]:
    files = words.adapters or (adapter(seed=1), adapter(seed=2))
    versions = [
        platform.upload(tenant_id, "capitals", one, is_probed=one is files[1]) for one in files
    ]
    adapter_id = versions[0]["id"]
    first, second = (one["version"]["id"] for one in versions)
    alias = platform.http.put(
        f"/admin/v1{at}/adapters/{adapter_id}/aliases/production", json={"version_id": first}
    )
    assert alias.is_success, alias.text
    platform.deploy(tenant_id, "capitals", first)
    platform.deploy(tenant_id, "only-base", None)
    platform.post(f"{at}/deployments/capitals/revisions", json={"version_id": second})
    rollout = platform.post(
        f"{at}/rollouts",
        json={
            "deployment": "capitals",
            "steps": [{"kind": "canary", "weight_bp": 5000, "hold_s": 86_400}],
        },
    )
    platform.post(f"{at}/rollouts/{rollout['id']}/start")

    def answers() -> bool:
        return platform.read(f"{at}/rollouts/{rollout['id']}")["state"] not in _SET_UP

    wait_until(answers, deadline_s=60)
    suite = platform.post(
        f"{at}/eval-suites",
        json={
            "name": "capitals-of-the-world.all",
            "lines": [
                {
                    "id": id_,
                    "messages": [{"role": "user", "content": question}],
                    "checks": [{"type": "contains", "value": value}],
                }
                for id_, question, value in words.cases
            ],
        },
    )
    run = platform.post(
        f"{at}/eval-runs", json={"suite_id": suite["id"], "deployment": words.evaluated}
    )

    def is_over() -> bool:
        return platform.read(f"{at}/eval-runs/{run['id']}")["state"] not in _RUNNING

    wait_until(is_over, deadline_s=60)
    return {
        "adapters": {"id": adapter_id},
        "deployments": {"id": "capitals"},
        "rollouts": {"id": rollout["id"]},
        "evals": {"id": run["id"]},
    }


def _money(
    platform: Platform, at: str, tenant_id: str, keys: list[dict[str, Any]], words: Words
) -> None:
    for body in (
        {"scope_kind": "tenant", "scope_id": tenant_id, "metric": "cost", "period": "month"}
        | {"value": "100.00"},
        {"scope_kind": "key", "scope_id": keys[0]["id"], "metric": "rpm", "value": "60"},
        # Its alert comes with the first request.
        {"scope_kind": "tenant", "scope_id": tenant_id, "metric": "requests", "period": "month"}
        | {"value": "100", "alert_pct": [1]},
        {"scope_kind": "key", "scope_id": keys[1]["id"], "metric": "requests", "period": "day"}
        | {"value": "0"},
    ):
        platform.post("/limits", json=body)
    profile = platform.http.put(
        f"/admin/v1{at}/billing-profile",
        json={"legal_name": words.legal_name, "address": words.address},
    )
    assert profile.is_success, profile.text
    body = {"kind": "credit", "amount_usd": "5.00", "reason": words.reason}
    platform.post(f"{at}/adjustments", json=body)
