"""Lists that are searched by name: literally, whatever the capitals, and page by page."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from loraplex_platform.ids import parse_id, uuid7

from tests.platform.control.stand import Stand

NAMES = ("100% sure", "Blue_Whale", "bluexwhale", "ÜBER blue", "מפתח", "plain")


async def found(stand: Stand, path: str, search: str, **query: object) -> list[str]:
    answer = await stand.admin.get(path, params={"search": search, **query})
    assert answer.status_code == 200, answer.text
    return [row["name"] for row in answer.json()["data"]]


@pytest.mark.parametrize(
    ("search", "names"),
    [
        ("blue", ["ÜBER blue", "bluexwhale", "Blue_Whale"]),
        ("e_w", ["Blue_Whale"]),
        ("%", ["100% sure"]),
        ("פת", ["מפתח"]),
        ("  plain  ", ["plain"]),
        ("\\", []),
        ("' or 1=1 --", []),
        ("   ", list(reversed(NAMES))),
    ],
)
async def test_keys_are_found_by_a_piece_of_their_name(
    stand: Stand, search: str, names: list[str]
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    path = f"/admin/v1/tenants/{tenant_id}/keys"
    for name in NAMES:
        assert (await stand.admin.post(path, json={"name": name})).status_code == 201

    assert await found(stand, path, search) == names


async def test_pages_go_on_within_what_was_searched(stand: Stand) -> None:
    for slug in ("north-1", "south-1", "north-2", "north-3"):
        await stand.tenant(slug)

    first = (
        await stand.admin.get("/admin/v1/tenants", params={"search": "NORTH", "limit": 2})
    ).json()
    rest = await stand.admin.get(
        "/admin/v1/tenants", params={"search": "NORTH", "limit": 2, "after": first["last_id"]}
    )

    assert [row["slug"] for row in first["data"]] == ["north-3", "north-2"]
    assert first["has_more"]
    assert [row["slug"] for row in rest.json()["data"]] == ["north-1"]


async def test_users_and_members_are_found_by_their_email(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    for path in ("/admin/v1/users", f"/admin/v1/tenants/{tenant_id}/members"):
        answer = await stand.admin.get(path, params={"search": "nobody@"})
        assert (answer.status_code, answer.json()["data"]) == (200, [])
    everyone = (await stand.admin.get("/admin/v1/users")).json()["data"]
    some = await stand.admin.get("/admin/v1/users", params={"search": "EXAMPLE.com"})
    assert some.json()["data"] == [u for u in everyone if "example.com" in u["email"]]


async def test_what_postgres_could_not_take_is_refused(stand: Stand) -> None:
    answer = await stand.admin.get("/admin/v1/tenants", params={"search": "a\0b"})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "search"


async def test_limits_are_found_by_what_they_limit_and_what_they_count(stand: Stand) -> None:
    acme, globex = [(await stand.tenant(slug))["id"] for slug in ("acme", "globex")]
    keys = f"/admin/v1/tenants/{acme}/keys"
    key_id = (await stand.admin.post(keys, json={"name": "Night_shift"})).json()["id"]
    for scope_kind, scope_id, metric in (
        ("tenant", acme, "rpm"),
        ("tenant", globex, "rpm"),
        ("key", key_id, "concurrency"),
        ("platform", None, "tpm_in"),
    ):
        body = {"scope_kind": scope_kind, "scope_id": scope_id, "metric": metric, "value": "9"}
        made = await stand.admin.post("/admin/v1/limits", json=body)
        assert made.status_code == 201, made.text

    async def metrics(search: str, **query: str) -> list[tuple[str, str]]:
        answer = await stand.admin.get("/admin/v1/limits", params={"search": search, **query})
        assert answer.status_code == 200, answer.text
        return [(row["scope_kind"], row["metric"]) for row in answer.json()["data"]]

    assert await metrics("ACME") == [("tenant", "rpm")]
    assert await metrics("t_s") == [("key", "concurrency")]
    assert await metrics("rpm", tenant_id=globex) == [("tenant", "rpm")]
    assert await metrics("night", tenant_id=globex) == []
    assert await metrics("platform") == [("platform", "tpm_in")]
    assert await metrics("%") == []


async def test_invoices_are_found_by_their_customer_and_status(stand: Stand) -> None:
    month = f"{datetime.now(UTC).replace(day=1) - timedelta(days=1):%Y-%m}"
    for slug, name in (("acme", "Blue Whale Ltd"), ("globex", "Globex")):
        body = {"slug": slug, "name": name}
        tenant = (await stand.admin.post("/admin/v1/tenants", json=body)).json()
        path = f"/admin/v1/tenants/{tenant['id']}/invoices"
        made = await stand.admin.post(path, json={"month": month})
        assert made.status_code == 201, made.text

    async def ids(**query: str) -> list[str]:
        answer = await stand.admin.get("/admin/v1/invoices", params=query)
        assert answer.status_code == 200, answer.text
        return [row["id"] for row in answer.json()["data"]]

    assert len(await ids(search="whale")) == 1
    assert len(await ids(search="GLOBEX", status="draft")) == 1
    assert await ids(search="GLOBEX", status="final") == []
    assert await ids(search="_") == []


async def test_evals_and_rollouts_are_found_by_their_names(stand: Stand) -> None:
    tenant = f"/admin/v1/tenants/{(await stand.tenant('acme'))['id']}"
    case = {"id": "a", "prompt": "Hi", "checks": [{"type": "contains", "value": "Hi"}]}
    suites = {}
    for name in ("capitals", "rivers"):
        made = await stand.admin.post(f"{tenant}/eval-suites", json={"name": name, "lines": [case]})
        suites[name] = made.json()["id"]
    for name in ("north", "south"):
        for prompt in ("one", "two"):
            body = {"version_id": None, "params": {"system_prompt": prompt}}
            assert (
                await stand.admin.put(f"{tenant}/deployments/{name}", json=body)
            ).status_code == 200
        body = {"deployment": name, "canary": 1}
        assert (await stand.admin.post(f"{tenant}/rollouts", json=body)).status_code == 201
    for suite, deployment in (("capitals", "north"), ("rivers", "south")):
        body = {"suite_id": suites[suite], "deployment": deployment}
        assert (await stand.admin.post(f"{tenant}/eval-runs", json=body)).status_code == 201
        schedule = body | {"name": f"nightly-{suite}", "every_hours": 24}
        made = await stand.admin.post(f"{tenant}/eval-schedules", json=schedule)
        assert made.status_code == 201, made.text

    async def shown(what: str, search: str, field: str) -> list[str]:
        answer = await stand.admin.get(f"{tenant}/{what}", params={"search": search})
        assert answer.status_code == 200, answer.text
        return [row[field] for row in answer.json()["data"]]

    assert await shown("eval-suites", "CAP", "name") == ["capitals"]
    assert await shown("eval-runs", "cap", "suite") == ["capitals"]
    assert await shown("eval-runs", "SOUTH", "suite") == ["rivers"]
    assert await shown("eval-schedules", "riv", "name") == ["nightly-rivers"]
    assert await shown("rollouts", "outh", "deployment") == ["south"]
    assert await shown("rollouts", "", "deployment") == ["south", "north"]


async def test_books_and_webhooks_are_found_by_name_address_and_purpose(
    stand: Stand, db_url: str
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    tenant = f"/admin/v1/tenants/{tenant_id}"
    for name in ("Standard 2027", "Partners"):
        made = await stand.admin.post("/admin/v1/price-books", json={"name": name})
        assert made.status_code == 201, made.text
    with psycopg.connect(db_url) as owner:  # the API wants a key for their secrets
        for url, description in (("blue", "billing"), ("red", "Paging duty")):
            owner.execute(
                "insert into webhooks (id, tenant_id, url, description, topics, secret_box,"
                " secret_key_id) values (%s, %s, %s, %s, '{alert}', '', 'k')",
                [
                    uuid7(),
                    parse_id("tenant", tenant_id),
                    f"https://{url}.example.com/hooks",
                    description,
                ],
            )

    async def shown(path: str, search: str, field: str) -> list[str]:
        answer = await stand.admin.get(path, params={"search": search})
        assert answer.status_code == 200, answer.text
        return [row[field] for row in answer.json()["data"]]

    assert await shown("/admin/v1/price-books", "PART", "name") == ["Partners"]
    assert await shown("/admin/v1/price-books", "%", "name") == []
    assert await shown(f"{tenant}/webhooks", "BLUE", "description") == ["billing"]
    assert await shown(f"{tenant}/webhooks", "duty", "url") == ["https://red.example.com/hooks"]
    assert await shown("/admin/v1/webhooks", "blue", "url") == []


async def test_models_and_builds_are_found_by_name_and_fingerprint(
    stand: Stand, db_url: str
) -> None:
    with psycopg.connect(db_url) as owner:
        for number, base in enumerate(("north-7b", "south_1b")):
            owner.execute(
                "insert into engine_builds (id, fingerprint, base_model, facts) values (%s, %s, %s, '{}')",
                [uuid7(), f"sha256:{number}abc", base],
            )
    [model] = (await stand.admin.get("/admin/v1/base-models")).json()["data"]

    async def count(path: str, search: str) -> int:
        answer = await stand.admin.get(f"/admin/v1/{path}", params={"search": search})
        assert answer.status_code == 200, answer.text
        return len(answer.json()["data"])

    assert await count("base-models", model["name"].upper()) == 1
    assert await count("base-models", model["revision"][-9:]) == 1
    assert await count("base-models", "no such") == 0
    assert await count("engine-builds", "SOUTH_") == 1
    assert await count("engine-builds", "0ABC") == 1
    assert await count("engine-builds", "%") == 0
