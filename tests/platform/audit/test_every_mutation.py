"""Every route that changes something leaves an audit row: the list of routes is the app's own.

A scenario goes through all of them with requests that do change something, and counts rows. A route that
is in neither the scenario nor among the exceptions fails the test: add a step.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psycopg
import pytest
from fastapi.routing import APIRoute
from loraplex_platform.ids import parse_id, uuid7
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.invariants import check_invariants

from tests.platform.control import stand as stands
from tests.platform.control.people import invite, log_in, member, user_id_of
from tests.platform.control.stand import PASSWORD, Stand
from tests.support.metering import Customer, reservation, settlement

CHANGES = {"POST", "PUT", "PATCH", "DELETE"}
TENANT = "/admin/v1/tenants/{tenant_id}"

# Routes that change nothing of the platform's, with the reason.
EXCEPTIONS = {
    ("POST", "/admin/v1/price-books/{book_id}/preview"): "computes what would have been paid",
    ("POST", "/admin/v1/price-books/{book_id}/quote"): "computes what a request would cost",
    ("POST", f"{TENANT}/playground"): "asks the gateway as a tenant does; its key is audited",
    (
        "PATCH",
        f"{TENANT}/adapter-uploads/{{upload_id}}/files/{{file_name}}",
    ): "adds bytes to an upload whose making is audited, as its end is",
    ("POST", "/login"): "the form of POST /sessions",
    ("POST", "/join"): "the form of POST /invitations/accept",
    ("POST", "/logout"): "the form of DELETE /sessions/current",
    ("POST", "/login/oidc/link"): "sends the browser to the provider; what comes back is audited",
}


@pytest.fixture
async def stand(db_url: str, redis_url: str, short_tmp_path: Path) -> AsyncIterator[Stand]:
    options = {
        "webhook_key": "webhook-key-for-tests-0123456789abcdef",
        "issuer_name": "Loraplex Ltd",
        "issuer_address": "1 Road|City",
        "import_sources": "file:///nowhere/",
    }
    async with Stand.open(db_url, redis_url, short_tmp_path, **options) as stand:
        yield stand


class Walk:
    """Calls routes one after another; notes which left no audit row."""

    def __init__(self, stand: Stand, db_url: str) -> None:
        self.stand = stand
        self.db_url = db_url
        self.ids: dict[str, str] = {}
        self.walked: set[tuple[str, str]] = set()
        self.silent: list[str] = []
        self.without_change: list[str] = []

    def audit_rows(self) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.db_url) as connection:
            return connection.execute(
                "select id, action, before, after from audit_log order by at, id"
            ).fetchall()

    async def step(
        self,
        method: str,
        route: str,
        *,
        client: httpx.AsyncClient | None = None,
        keep: str | None = None,
        **options: Any,
    ) -> httpx.Response:
        """Call `route` with the ids so far; `keep` names the id in its answer."""
        before = {row[0] for row in self.audit_rows()}
        answer = await (client or self.stand.admin).request(
            method, route.format(**self.ids), **options
        )
        assert answer.status_code < 300, f"{method} {route}: {answer.status_code} {answer.text}"
        self.walked.add((method, route))
        new = [row for row in self.audit_rows() if row[0] not in before]
        if not new:
            self.silent.append(f"{method} {route}")
        if method == "PATCH" and not any(row[2] and row[3] for row in new):
            self.without_change.append(f"{method} {route}")
        if keep is not None:
            self.ids[keep] = answer.json()["id"]
        return answer


def mutating_routes(stand: Stand) -> set[tuple[str, str]]:
    included = [getattr(route, "original_router", None) for route in stand.app.routes]
    routes = [route for router in included if router is not None for route in router.routes]
    return {
        (method, route.path)
        for route in routes
        if isinstance(route, APIRoute)
        for method in route.methods & CHANGES
    }


async def test_every_change_is_audited(stand: Stand, db_url: str) -> None:
    walk = Walk(stand, db_url)
    parts = (
        _tenants,
        _people,
        _models,
        _limits,
        _money,
        _webhooks,
        _evals,
        _rollouts,
        _operation,
        _ends,
    )
    for part in parts:
        await part(walk)

    assert walk.silent == [], "changed something and left no audit row"
    assert walk.without_change == [], "no before and after"
    missing = mutating_routes(stand) - walk.walked - EXCEPTIONS.keys()
    assert missing == set(), "add a step to this scenario for each"
    assert EXCEPTIONS.keys() <= mutating_routes(stand)
    report = await check_invariants(stand.db.sessions)
    assert next(check for check in report.checks if check.code == "I10").ok
    with psycopg.connect(db_url) as connection:
        texts = connection.execute("select a::text from audit_log a").fetchall()
    for secret in (PASSWORD, stands.ADMIN_KEY, *walk.ids.get("secrets", "").split()):
        assert not any(secret in text for (text,) in texts)


async def _tenants(walk: Walk) -> None:
    made = await walk.step(
        "POST", "/admin/v1/tenants", json={"slug": "acme", "name": "Acme"}, keep="tenant_id"
    )
    assert made.json()["slug"] == "acme"
    await walk.step("PATCH", TENANT, json={"name": "Acme Corp."})
    await walk.step("POST", f"{TENANT}/suspend")
    await walk.step("POST", f"{TENANT}/activate")
    await walk.step("POST", f"{TENANT}/projects", json={"name": "search"}, keep="project_id")
    await walk.step("PATCH", f"{TENANT}/projects/{{project_id}}", json={"name": "find"})
    key = await walk.step("POST", f"{TENANT}/keys", json={"name": "laptop"}, keep="key_id")
    await walk.step("PATCH", f"{TENANT}/keys/{{key_id}}", json={"name": "desktop"})
    rotated = await walk.step("POST", f"{TENANT}/keys/{{key_id}}/rotate", json={})
    walk.ids["secrets"] = f"{key.json()['secret']} {rotated.json()['secret']}"


async def _people(walk: Walk) -> None:
    stand, tenant_id = walk.stand, walk.ids["tenant_id"]
    await walk.step(
        "POST",
        "/admin/v1/users",
        json={"email": "ada@example.com", "password": PASSWORD, "role": "viewer"},
    )
    login = {"email": "ada@example.com", "password": PASSWORD}
    ada = stand.client(None)
    await walk.step("POST", "/admin/v1/sessions", client=ada, json=login)
    await walk.step("DELETE", "/admin/v1/sessions/current", client=ada)
    listed = (await stand.admin.get("/admin/v1/users")).json()["data"]
    walk.ids["user_id"] = next(u["id"] for u in listed if u["email"] == "ada@example.com")
    await walk.step("POST", "/admin/v1/users/{user_id}/disable")
    await walk.step("POST", "/admin/v1/users/{user_id}/enable")
    await walk.step("POST", "/admin/v1/users/{user_id}/password", json={"password": PASSWORD})
    await stand.client(None).post("/admin/v1/sessions", json=login)
    await walk.step("POST", "/admin/v1/users/{user_id}/logout")
    await walk.step("DELETE", "/admin/v1/users/{user_id}/role")
    await walk.step(
        "POST",
        f"{TENANT}/invitations",
        json={"email": "bob@acme.example", "role": "developer"},
        keep="invitation_id",
    )
    await walk.step("DELETE", f"{TENANT}/invitations/{{invitation_id}}")
    invitation = await invite(stand, tenant_id, "eve@acme.example", "viewer")
    await walk.step(
        "POST",
        "/admin/v1/invitations/accept",
        client=stand.client(None),
        json={"token": invitation["token"], "password": PASSWORD},
    )
    walk.ids["user_id"] = await user_id_of(await log_in(stand, "eve@acme.example"))
    await walk.step("PATCH", f"{TENANT}/members/{{user_id}}", json={"role": "developer"})
    await member(stand, tenant_id, "owner", "owner@acme.example")
    await walk.step("DELETE", f"{TENANT}/members/{{user_id}}")


async def _uploads(walk: Walk, files: stands.AdapterFiles) -> None:
    parts = {"adapter_config.json": files.config, "adapter_model.safetensors": files.model}
    plan = {
        "name": "capitals",
        "files": [{"name": name, "size_bytes": len(data)} for name, data in parts.items()],
    }
    for end in ("complete", ""):
        await walk.step("POST", f"{TENANT}/adapter-uploads", json=plan, keep="upload_id")
        upload = f"{TENANT}/adapter-uploads/{{upload_id}}"
        if not end:
            await walk.step("DELETE", upload)
            return
        for name, data in parts.items():
            sent = await walk.stand.admin.patch(
                f"{upload}/files/{name}".format(**walk.ids),
                content=data,
                headers={
                    "content-type": "application/offset+octet-stream",
                    "upload-offset": "0",
                },
            )
            assert sent.status_code == 204, sent.text
        await walk.step("POST", f"{upload}/complete")


async def _models(walk: Walk) -> None:
    files = stands.adapter()
    uploaded = await walk.step(
        "POST",
        f"{TENANT}/adapters",
        data={"name": "capitals"},
        files={
            "adapter_config": ("adapter_config.json", files.config),
            "adapter_model": ("adapter_model.safetensors", files.model),
        },
    )
    version = uploaded.json()["version"]
    walk.ids |= {"name": "capitals", "digest": version["digest"]}
    await _uploads(walk, files)
    await walk.step(
        "POST",
        f"{TENANT}/adapters/import",
        json={"name": "fetched", "source": "file:///nowhere/x"},
    )
    walk.ids |= {"adapter_id": version["adapter_id"], "version_id": version["id"]}
    alias = f"{TENANT}/adapters/{{adapter_id}}/aliases/{{alias}}"
    walk.ids["alias"] = "production"
    await walk.step("PUT", alias, json={"version_id": version["id"]})
    await walk.step("DELETE", alias)
    residency = "/admin/v1/fleet/residency/{version_id}"
    await walk.step("PUT", residency, json={"reason": "launch"})
    await walk.step("DELETE", residency)
    one = f"{TENANT}/adapters/{{adapter_id}}/versions/{{version_id}}"
    await walk.step("POST", f"{one}/retire")
    await walk.step("POST", f"{one}/unretire")
    warm = {"sampling": {"temperature": 1.5}}
    for path, name, version_id in (
        ("/admin/v1/deployments/{name}", stands.BASE, None),
        (f"{TENANT}/deployments/{{name}}", "capitals", version["id"]),
    ):
        walk.ids["name"] = name
        new = {"version_id": version_id, "params": warm}
        await walk.step("PUT", path, json=new)
        new = {"version_id": version_id, "params": {"system_prompt": "Be brief."}}
        await walk.step("POST", f"{path}/revisions", json=new, keep="revision_id")
    pin = {"revision_id": walk.ids["revision_id"], "reason": "audit"}
    await walk.step("PUT", f"{TENANT}/deployments/{{name}}/pin", json=pin)
    await walk.step("DELETE", f"{TENANT}/deployments/{{name}}/pin")


async def _limits(walk: Walk) -> None:
    body = {
        "scope_kind": "tenant",
        "scope_id": walk.ids["tenant_id"],
        "metric": "cost",
        "period": "month",
        "value": "100.00",
    }
    await walk.step("POST", "/admin/v1/limits", json=body, keep="limit_id")
    await walk.step("PATCH", "/admin/v1/limits/{limit_id}", json={"value": "200.00"})
    await walk.step("DELETE", "/admin/v1/limits/{limit_id}")
    await walk.step("PATCH", f"{TENANT}/scheduling", json={"weight": 2.0})


async def _money(walk: Walk) -> None:
    prices = [
        {"target_kind": "any_base", "price_class": "input", "price_usd": "0.03"},
        {"target_kind": "any_base", "price_class": "output", "price_usd": "0.05"},
    ]
    new = {"name": "next", "prices": prices}
    await walk.step("POST", "/admin/v1/price-books", json=new, keep="book_id")
    await walk.step("PATCH", "/admin/v1/price-books/{book_id}", json={"name": "later"})
    await walk.step("DELETE", "/admin/v1/price-books/{book_id}")
    await walk.step("POST", "/admin/v1/price-books", json=new, keep="book_id")
    soon = int((datetime.now(UTC) + timedelta(days=2)).timestamp())
    await walk.step(
        "POST", "/admin/v1/price-books/{book_id}/publish", json={"effective_from": soon}
    )
    await walk.step("POST", "/admin/v1/price-books/{book_id}/retire")

    customer = Customer(
        parse_id("tenant", walk.ids["tenant_id"]), parse_id("api_key", walk.ids["key_id"]), ""
    )
    wanted = reservation(customer)
    await metering.reserve(walk.stand.db.sessions, wanted)
    await metering.settle(walk.stand.db.sessions, settlement(wanted.request_id))
    request_id = _move_to_last_month(walk.db_url, wanted.request_id)
    await walk.step(
        "POST",
        f"{TENANT}/adjustments",
        json={"kind": "credit", "amount_usd": "1.00", "reason": "sorry"},
    )
    await walk.step(
        "POST",
        f"{TENANT}/reversals",
        json={"entry_id": f"req_{request_id.hex}", "reason": "wrong"},
    )
    await walk.step("PUT", f"{TENANT}/billing-profile", json={"legal_name": "Acme GmbH"})
    await _invoices(walk)


def _last_month() -> datetime:
    return (datetime.now(UTC).replace(day=1) - timedelta(days=1)).replace(day=15)


def _move_to_last_month(db_url: str, was: UUID) -> UUID:
    """As if the request had been made in a month that is over, so that there is something to invoice."""
    at = _last_month()
    moved = {"id": uuid7(int(at.timestamp() * 1000)), "was": was, "at": at}
    with psycopg.connect(db_url) as connection:
        connection.execute("set session_replication_role = replica")
        for statement in (
            "update requests set id = %(id)s, admitted_at = %(at)s where id = %(was)s",
            "update attempts set request_id = %(id)s where request_id = %(was)s",
            "update ledger set entry_id = %(id)s, occurred_at = %(at)s where entry_id = %(was)s",
            "update rollup_dirty set entry_id = %(id)s, day = (%(at)s::timestamptz at time zone 'UTC')::date"
            " where entry_id = %(was)s",
        ):
            connection.execute(statement, moved)
    return UUID(str(moved["id"]))


async def _invoices(walk: Walk) -> None:
    month = {"month": f"{_last_month():%Y-%m}"}
    await walk.step("POST", f"{TENANT}/invoices", json=month, keep="invoice_id")
    await walk.step("DELETE", f"{TENANT}/invoices/{{invoice_id}}")
    await walk.step("POST", f"{TENANT}/invoices", json=month, keep="invoice_id")
    await walk.step("POST", f"{TENANT}/invoices/{{invoice_id}}/finalize")
    await walk.step("POST", f"{TENANT}/invoices/{{invoice_id}}/void", json={"reason": "mistake"})


async def _webhooks(walk: Walk) -> None:
    for path, name in ((f"{TENANT}/webhooks", "of"), ("/admin/v1/webhooks", "own")):
        one = f"{path}/{{webhook_id}}"
        body = {"url": "https://example.com/hook", "topics": ["alert"], "description": name}
        made = await walk.step("POST", path, json=body, keep="webhook_id")
        walk.ids["secrets"] += " " + made.json()["secret"].removeprefix("whsec_")
        await walk.step("PATCH", one, json={"description": "pager"})
        await walk.step("POST", f"{one}/rotate", json={})
        await walk.step("POST", f"{one}/test", keep="delivery_id")
        await walk.step("POST", f"{one}/deliveries/{{delivery_id}}/replay")
        await walk.step("DELETE", one)


async def _evals(walk: Walk) -> None:
    golden = {"id": "a", "prompt": "Hi", "checks": [{"type": "contains", "value": "Hi"}]}
    suite = {"name": "golden", "lines": [golden]}
    await walk.step("POST", "/admin/v1/eval-suites", json=suite, keep="suite_id")
    await walk.step("DELETE", "/admin/v1/eval-suites/{suite_id}")
    await walk.step("POST", f"{TENANT}/eval-suites", json=suite, keep="suite_id")
    aim = {"suite_id": walk.ids["suite_id"], "deployment": "capitals"}
    await walk.step("POST", f"{TENANT}/eval-runs", json=aim, keep="run_id")
    await walk.step("POST", f"{TENANT}/eval-runs/{{run_id}}/cancel")
    schedule = {**aim, "name": "nightly", "cron": "0 3 * * *"}
    await walk.step("POST", f"{TENANT}/eval-schedules", json=schedule, keep="schedule_id")
    one = f"{TENANT}/eval-schedules/{{schedule_id}}"
    await walk.step("PATCH", one, json={"is_enabled": False})
    await walk.step("DELETE", one)
    await walk.step("DELETE", f"{TENANT}/eval-suites/{{suite_id}}")


async def _rollouts(walk: Walk) -> None:
    path = walk.ids["tenant_id"]
    deployments = f"/admin/v1/tenants/{path}/deployments"
    await walk.stand.admin.put(f"{deployments}/capitals", json={"version_id": None})
    # The platform's own deployment has one that nothing answers with: `_models` made it.
    for where, body in (
        (f"{TENANT}/rollouts", {"deployment": "capitals", "canary": 1}),
        ("/admin/v1/rollouts", {"deployment": stands.BASE}),
    ):
        one = f"{where}/{{rollout_id}}"
        await walk.step("POST", where, json=body, keep="rollout_id")
        await walk.step("PATCH", one, json={"sticky_by": "user"})
        for verb in ("start", "pause", "resume", "promote", "rollback"):
            await walk.step("POST", f"{one}/{verb}")
        await walk.step("POST", where, json=body, keep="rollout_id")
        await walk.step("POST", f"{one}/abort", json={"reason": "enough"})


async def _operation(walk: Walk) -> None:
    walk.ids["name"] = "invariant_runs"
    await walk.step("PUT", "/admin/v1/retention/{name}", json={"keep_days": 30})
    with psycopg.connect(walk.db_url) as connection:
        for _ in range(2):  # the newest one stays
            connection.execute(
                "insert into invariant_runs (id, checked_at, checked_by, is_ok, took_ms, report)"
                " values (%s, now() - interval '60 days', 'x', true, 1, '{}')",
                [uuid7(0)],
            )
    await walk.step("POST", "/admin/v1/retention/runs")
    await walk.step("POST", "/admin/v1/invariants")
    with psycopg.connect(walk.db_url) as connection:
        connection.execute(
            "insert into outbox (topic, dedupe_key, payload, dead_at)"
            " values ('alert', 'dead', '{}', now())"
        )
    walk.ids["topic"] = "alert"
    for method, route in sorted(mutating_routes(walk.stand)):
        if route.startswith("/admin/v1/outbox"):
            await walk.step(method, route)


async def _ends(walk: Walk) -> None:
    walk.ids["name"] = "capitals"
    await walk.step("DELETE", f"{TENANT}/deployments/{{name}}")
    await walk.step("DELETE", f"{TENANT}/keys/{{key_id}}")
    await walk.step("DELETE", f"{TENANT}/projects/{{project_id}}")
    await walk.step("DELETE", TENANT, params={"confirm": "acme"})
