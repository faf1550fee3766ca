"""A deleted tenant: what was theirs is nowhere, what the law wants is there, and nobody else lost anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from loraplex_platform.ids import parse_id
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.registry import service as registry
from sqlalchemy import text

from tests.platform.control.stand import Stand, error_of
from tests.support.metering import Customer, reservation, settlement

# Words that a tenant has given, and that must be nowhere afterwards.
NAMES = ("acme", "Secret Project", "laptop of ada", "pirate-model", "hook.example.com")


def dump(url: str, *without: str) -> str:
    """Every row of every table, as text."""
    with psycopg.connect(url) as connection:
        tables = connection.execute(
            "select c.relname from pg_class c where c.relnamespace = 'public'::regnamespace"
            " and c.relkind in ('r', 'p') and not c.relispartition"
        ).fetchall()
        found = []
        for (name,) in tables:
            if name not in without:
                rows = connection.execute(f"select t::text from {name} t").fetchall()
                found += [f"{name}: {row[0]}" for row in rows]
        return "\n".join(found)


async def key_of(stand: Stand, tenant_id: str, name: str) -> Customer:
    answer = await stand.admin.post(f"/admin/v1/tenants/{tenant_id}/keys", json={"name": name})
    assert answer.status_code == 201, answer.text
    key = answer.json()
    return Customer(parse_id("tenant", tenant_id), parse_id("api_key", key["id"]), key["secret"])


def artifacts(stand: Stand) -> set[str]:
    root = stand.folder / "store" / "adapters"
    return {path.name for path in root.glob("??/*") if not path.name.startswith(".")}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were put just now are looked at like old ones."""
    monkeypatch.setattr(registry, "ORPHAN_AGE_S", 0.0)


async def build(stand: Stand) -> tuple[dict[str, Any], dict[str, Any], Customer]:
    """Two tenants with adapters (one of them the same), keys, a project, a webhook and bills."""
    acme, beta = await stand.tenant("acme"), await stand.tenant("beta")
    for tenant, seeds in ((acme, (0, 1)), (beta, (1, 2))):
        for seed in seeds:
            version = await stand.version(tenant["id"], f"adapter{seed}", seed)
            answer = await stand.admin.put(
                f"/admin/v1/tenants/{tenant['id']}/deployments/pirate-model{seed}",
                json={"version_id": version},
            )
            assert answer.status_code == 200, answer.text
    await stand.admin.post(
        f"/admin/v1/tenants/{acme['id']}/projects", json={"name": "Secret Project"}
    )
    await stand.admin.post(
        f"/admin/v1/tenants/{acme['id']}/webhooks",
        json={"url": "https://hook.example.com/", "topics": ["alert"]},
    )
    customer = await key_of(stand, acme["id"], "laptop of ada")
    wanted = reservation(customer)
    await metering.reserve(stand.db.sessions, wanted)
    await metering.settle(stand.db.sessions, settlement(wanted.request_id))
    return acme, beta, customer


async def test_a_deleted_tenant_leaves_only_what_the_law_wants(
    db_url: str, redis_url: str, short_tmp_path: Path, eager: None
) -> None:
    key = "webhook-key-for-tests-0123456789abcdef"
    async with Stand.open(db_url, redis_url, short_tmp_path, webhook_key=key) as stand:
        acme, beta, customer = await build(stand)
        of_beta = await stand.admin.get(f"/admin/v1/tenants/{beta['id']}/adapters")
        with psycopg.connect(db_url) as connection:
            ledger = connection.execute("select * from ledger").fetchall()
        assert len(artifacts(stand)) == 3
        path = f"/admin/v1/tenants/{acme['id']}"

        wrong = await stand.admin.delete(path, params={"confirm": "beta"})
        answer = await stand.admin.delete(path, params={"confirm": "acme"})
        again = await stand.admin.delete(path, params={"confirm": "acme"})

        error_of(wrong, 400, "invalid_request")
        assert answer.status_code == 200, answer.text
        report = answer.json()
        assert report["removed"]["api_keys"] == 1
        assert report["removed"]["webhooks"] == 1
        assert report["removed"]["adapter_versions"] == 2
        assert report["adapter_files"] == 2
        assert any("ledger" in reason for reason in report["kept"])
        error_of(again, 409, "tenant_deleted")

        # Names: nowhere but where the law or the chain wants them, which is said in the answer.
        left = dump(
            db_url, "audit_log", "billing_profiles", "usage_daily", "requests", "idempotency"
        )
        acme_rows = [line for line in left.splitlines() if str(customer.tenant_id) in line]
        for name in NAMES:
            assert [line for line in acme_rows if name in line] == [], name
        # The key is dead, with its MAC.
        with psycopg.connect(db_url) as connection:
            secrets = connection.execute(
                "select count(*) from api_key_secrets where key_id = %s", [customer.key_id]
            ).fetchone()
            assert secrets == (0,)
            assert connection.execute("select * from ledger").fetchall() == ledger
        with pytest.raises(Exception, match=r"(?i)revoked|closed|suspended"):
            await metering.reserve(stand.db.sessions, reservation(customer))
        # Files: the shared one stays, for it is beta's too.
        assert len(artifacts(stand)) == 2
        now = await stand.admin.get(f"/admin/v1/tenants/{beta['id']}/adapters")
        assert now.json() == of_beta.json()
        assert (await stand.admin.get(path)).json()["status"] == "closed"
        entries = (
            await stand.admin.get("/admin/v1/audit", params={"action": "tenant.delete"})
        ).json()
        assert entries["data"][0]["detail"]["removed"] == report["removed"]
        books = await check_invariants(stand.db.sessions)
        broken = [check.name for check in books.checks if not check.ok]
        assert "audit_chain_is_unbroken" not in broken
        assert "settled_has_one_ledger_row" not in broken


async def test_replies_to_the_members_go_and_the_operators_own_stay(
    stand: Stand, db_url: str
) -> None:
    acme, beta = await stand.tenant("acme"), await stand.tenant("beta")
    people = {}
    for name, tenants in (("own", [acme]), ("shared", [acme, beta]), ("former", [])):
        people[name] = await stand.login("viewer", f"{name}@x.example")
        async with stand.db.transaction() as session:
            for tenant in tenants:
                await session.execute(
                    text(
                        "insert into memberships (tenant_id, user_id, role)"
                        " select :tenant, id, 'admin' from users where email = :email"
                    ),
                    {"tenant": parse_id("tenant", tenant["id"]), "email": f"{name}@x.example"},
                )
            await session.execute(
                text("update users set platform_role = null where email = :email"),
                {"email": f"{name}@x.example"},
            )
    operator = await stand.login("admin", "op@x.example")

    async def post(client: httpx.AsyncClient, tenant: dict[str, Any], name: str) -> None:
        answer = await client.post(
            f"/admin/v1/tenants/{tenant['id']}/projects",
            json={"name": name},
            headers={"idempotency-key": name, "origin": str(client.base_url).rstrip("/")},
        )
        assert answer.status_code == 201, answer.text

    await post(people["own"], acme, "by-own")
    await post(people["shared"], acme, "by-shared")
    await post(people["shared"], beta, "by-shared-of-beta")
    await post(operator, acme, "by-operator")
    await post(stand.admin, acme, "by-key")
    with psycopg.connect(db_url) as connection:
        # Somebody who was a member when they called.
        connection.execute(
            "insert into idempotency select 'user:usr_' || replace(u.id::text, '-', ''), i.route,"
            " i.key_hash, i.fingerprint, i.claim_token, i.status,"
            " jsonb_set(i.response, '{name}', '\"by-former\"'), i.created_at, i.expires_at"
            " from idempotency i, users u where u.email = 'former@x.example'"
            " and i.response ->> 'name' = 'by-own'"
        )

    await stand.admin.delete(f"/admin/v1/tenants/{acme['id']}", params={"confirm": "acme"})

    with psycopg.connect(db_url) as connection:
        left = connection.execute("select response ->> 'name' from idempotency").fetchall()
    names = {row[0] for row in left if str(row[0]).startswith("by-")}
    assert names == {"by-shared-of-beta", "by-operator", "by-key"}


async def test_people_of_the_tenant_alone_go_and_others_stay(stand: Stand, db_url: str) -> None:
    acme, beta = await stand.tenant("acme"), await stand.tenant("beta")
    async with stand.db.transaction() as session:
        for email, role in (("only@acme.test", None), ("both@acme.test", None), ("op@x", "viewer")):
            await session.execute(
                text(
                    "insert into users (id, email, password_hash, platform_role)"
                    " values (gen_random_uuid(), :email, 'x', :role)"
                ),
                {"email": email, "role": role},
            )
        for email, tenant in (
            ("only@acme.test", acme),
            ("both@acme.test", acme),
            ("both@acme.test", beta),
            ("op@x", acme),
        ):
            await session.execute(
                text(
                    "insert into memberships (tenant_id, user_id, role)"
                    " select :tenant, id, 'admin' from users where email = :email"
                ),
                {"tenant": parse_id("tenant", tenant["id"]), "email": email},
            )

    answer = await stand.admin.delete(f"/admin/v1/tenants/{acme['id']}", params={"confirm": "acme"})

    assert answer.json()["removed"]["users"] == 1, answer.text
    with psycopg.connect(db_url) as connection:
        users = dict(
            connection.execute(
                "select email, disabled_at is null from users where email like '%acme%'"
                " or email like 'deleted%' or email = 'op@x'"
            ).fetchall()
        )
    assert users.pop("both@acme.test")
    assert users.pop("op@x")
    [(email, is_enabled)] = users.items()
    assert email.startswith("deleted-")
    assert not is_enabled


async def test_viewers_cannot_and_unknown_tenants_are_unknown(stand: Stand) -> None:
    acme = await stand.tenant("acme")
    viewer = await stand.login("viewer")
    path = f"/admin/v1/tenants/{acme['id']}"

    error_of(await viewer.delete(path, params={"confirm": "acme"}), 403, "permission_denied")
    missing = f"/admin/v1/tenants/ten_{'0' * 32}"
    error_of(await stand.admin.delete(missing, params={"confirm": "x"}), 404, "not_found")
    assert (await stand.admin.delete(path)).status_code == 400
    assert (await stand.admin.get(path)).json()["status"] == "active"
