"""Every route x every role x own and foreign ids, generated from the app; expectations from the table.

`permissions.reach_of` says what each cell must answer, so a route that forgets to ask, or asks for
something else than it declares, is found here. Afterwards the foreign tenant must not have changed by a
byte, and none of its ids may have been in any answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psycopg
import pytest
from fastapi.routing import APIRoute
from loraplex_platform.control.permissions import (
    ACTIONS,
    TENANT_ROLES,
    PlatformRole,
    Refusal,
    TenantRole,
    reach_of,
)
from loraplex_platform.control.routing import AdminRoute, GuardedRoute, PublicRoute, StreamedRoute
from loraplex_platform.db import Alert
from loraplex_platform.ids import PREFIXES, format_id, uuid7
from loraplex_platform.outbox.service import enqueue
from psycopg import sql
from sqlalchemy import select

from tests.platform.control.people import invite, log_in, member, user_id_of
from tests.platform.control.stand import Stand

# Public on purpose: what they ask for is in their bodies, and other tests look at that.
PUBLIC = {
    ("POST", "/admin/v1/sessions"),
    ("POST", "/admin/v1/invitations/accept"),
}
WEBHOOK_KEY = "webhook-key-for-tests-0123456789abcdef"
# What ends somebody comes after everything that needs them, in this order.
LAST = ("tenant.suspend", "tenant.delete", "session.end")
# Down here on purpose; a refusal by role never comes as one of these.
MAY_BE_DOWN = {"gateway_unavailable"}

GOLDEN = {"id": "a", "prompt": "Hi", "checks": [{"type": "contains", "value": "Hi"}]}

BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/admin/v1/tenants"): {"json": {"slug": "made-by-{n}"}},
    ("PATCH", "/admin/v1/tenants/{tenant_id}"): {"json": {"name": "by {n}"}},
    ("POST", "/admin/v1/tenants/{tenant_id}/keys"): {"json": {"name": "by {n}"}},
    ("PATCH", "/admin/v1/tenants/{tenant_id}/keys/{key_id}"): {"json": {"name": "by {n}"}},
    ("POST", "/admin/v1/tenants/{tenant_id}/keys/{key_id}/rotate"): {"json": {}},
    ("POST", "/admin/v1/tenants/{tenant_id}/projects"): {"json": {"name": "by {n}"}},
    ("PATCH", "/admin/v1/tenants/{tenant_id}/projects/{project_id}"): {"json": {"name": "by {n}"}},
    ("PATCH", "/admin/v1/tenants/{tenant_id}/members/{user_id}"): {"json": {"role": "viewer"}},
    ("POST", "/admin/v1/tenants/{tenant_id}/invitations"): {
        "json": {"email": "by-{n}@example.com", "role": "viewer"}
    },
    ("PUT", "/admin/v1/tenants/{tenant_id}/deployments/{name}"): {"json": {"version_id": None}},
    ("PUT", "/admin/v1/deployments/{name}"): {"json": {"version_id": None}},
    ("POST", "/admin/v1/deployments/{name}/revisions"): {"json": {"version_id": None}},
    ("POST", "/admin/v1/tenants/{tenant_id}/deployments/{name}/revisions"): {
        "json": {"version_id": None, "params": {"system_prompt": "by {n}"}}
    },
    ("PUT", "/admin/v1/tenants/{tenant_id}/deployments/{name}/pin"): {
        "json": {"revision_id": f"rev_{'0' * 32}", "reason": "by {n}"}
    },
    ("PUT", "/admin/v1/tenants/{tenant_id}/adapters/{adapter_id}/aliases/{alias}"): {
        "json": {"version_id": f"ver_{'0' * 32}"}
    },
    ("PUT", "/admin/v1/fleet/residency/{version_id}"): {"json": {"reason": "by {n}"}},
    ("POST", "/admin/v1/tenants/{tenant_id}/playground"): {
        "json": {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    },
    ("POST", "/admin/v1/tenants/{tenant_id}/adapter-uploads"): {
        "json": {
            "name": "by-{n}",
            "files": [
                {"name": "adapter_config.json", "size_bytes": 1},
                {"name": "adapter_model.safetensors", "size_bytes": 1},
            ],
        }
    },
    ("PATCH", "/admin/v1/tenants/{tenant_id}/adapter-uploads/{upload_id}/files/{file_name}"): {
        "headers": {"content-type": "application/offset+octet-stream", "upload-offset": "0"}
    },
    ("POST", "/admin/v1/tenants/{tenant_id}/adapters/import"): {
        "json": {"name": "by-{n}", "source": "file:///nowhere/acme/{n}"}
    },
    ("POST", "/admin/v1/users"): {
        "json": {"email": "by-{n}@example.org", "password": "long enough pw", "role": "viewer"}
    },
    ("POST", "/admin/v1/users/{user_id}/password"): {"json": {"password": "another long pw"}},
    ("GET", "/admin/v1/usage"): {"params": {"start_time": 0}},
    ("POST", "/admin/v1/eval-suites"): {"json": {"name": "by-{n}", "lines": [GOLDEN]}},
    ("POST", "/admin/v1/tenants/{tenant_id}/eval-suites"): {
        "json": {"name": "by-{n}", "lines": [GOLDEN]}
    },
    ("GET", "/admin/v1/tenants/{tenant_id}/eval-runs/{run_id}/compare"): {
        "params": {"with": f"evr_{'0' * 32}"}
    },
    ("GET", "/admin/v1/tenants/{tenant_id}/eval-trace"): {
        "params": {"start_time": "0", "end_time": "60"}
    },
    ("POST", "/admin/v1/rollouts"): {"json": {"deployment": "tiny-base"}},
    ("POST", "/admin/v1/tenants/{tenant_id}/rollouts"): {"json": {"deployment": "nobody-{n}"}},
    ("PATCH", "/admin/v1/tenants/{tenant_id}/rollouts/{rollout_id}"): {
        "json": {"sticky_by": "user"}
    },
    ("GET", "/admin/v1/tenants/{tenant_id}/eval-series"): {
        "params": {"suite_id": f"evs_{'0' * 32}"}
    },
}


# Names and numbers that mean another thing in another tenant.
UNIQUE_BY_TENANT = ("name", "seq", "version", "alias")


@dataclass(slots=True)
class Side:
    """A tenant and ids of things that are its own, by the names that paths give them."""

    tenant_id: str
    ids: dict[str, str] = field(default_factory=dict)

    @property
    def secrets(self) -> list[str]:
        """What nobody of another tenant may ever read."""
        return [
            self.tenant_id,
            *(i for name, i in self.ids.items() if name not in UNIQUE_BY_TENANT),
        ]


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who calls, and what they are."""

    who: str
    client: httpx.AsyncClient
    platform_role: PlatformRole | None = None
    memberships: dict[UUID, TenantRole] = field(default_factory=dict)
    is_known: bool = True


@pytest.fixture
async def stand(db_url: str, redis_url: str, short_tmp_path: Path) -> AsyncIterator[Stand]:
    """With webhooks, which need a key."""
    options = {"webhook_key": WEBHOOK_KEY, "import_sources": "file:///nowhere/{tenant}/"}
    async with Stand.open(db_url, redis_url, short_tmp_path, **options) as opened:
        yield opened


def guarded_routes(stand: Stand) -> list[GuardedRoute]:
    """Every route below /admin/v1 that asks for an action, harmless ones first."""
    routes = [route for route in _routes(stand) if isinstance(route, GuardedRoute)]
    order = {"GET": 0, "PUT": 1, "POST": 1, "PATCH": 1, "DELETE": 2}

    def place(route: GuardedRoute) -> tuple[int, int]:
        last = LAST.index(route.action.name) + 1 if route.action.name in LAST else 0
        return last, order[_method(route)]

    return sorted(routes, key=place)


async def make_side(stand: Stand, slug: str) -> Side:
    """A tenant with one of everything."""
    tenant_id = (await stand.tenant(slug))["id"]
    path = f"/admin/v1/tenants/{tenant_id}"
    side = Side(tenant_id)

    async def made(where: str, body: dict[str, Any]) -> str:
        answer = await stand.admin.post(f"{path}/{where}", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    version_id = await stand.version(tenant_id, f"{slug}-adapter", seed=len(slug))
    deployed = await stand.admin.put(
        f"{path}/deployments/{slug}-model", json={"version_id": version_id}
    )
    assert deployed.status_code == 200, deployed.text
    adapters = (await stand.admin.get(f"{path}/adapters")).json()["data"]
    spare = await member(stand, tenant_id, "viewer", f"spare@{slug}.example")
    side.ids = {
        "key_id": await made("keys", {"name": f"{slug} key"}),
        "project_id": await made("projects", {"name": f"{slug} project"}),
        "adapter_id": adapters[0]["id"],
        "name": f"{slug}-model",
        "version_id": version_id,
        "revision_id": deployed.json()["revision"]["id"],
        "alias": "production",
        "user_id": await user_id_of(spare),
        "invitation_id": (await invite(stand, tenant_id, f"late@{slug}.example", "viewer"))["id"],
        "request_id": await _add_request(stand, tenant_id),
        "limit_id": await _add_limit(stand, tenant_id),
        "alert_id": await _add_alert(stand, tenant_id),
        "invoice_id": await made("invoices", {"month": _last_month()}),
        "webhook_id": await made(
            "webhooks", {"url": "https://hooks.example.com/", "topics": ["alert"]}
        ),
        "upload_id": await made(
            "adapter-uploads",
            {
                "name": f"{slug}-adapter",
                "files": [
                    {"name": "adapter_config.json", "size_bytes": 5},
                    {"name": "adapter_model.safetensors", "size_bytes": 5},
                ],
            },
        ),
        "import_id": await _add_import(stand, path, slug),
        "suite_id": await made("eval-suites", {"name": f"{slug}-suite", "lines": [GOLDEN]}),
        "version": "1",
        "chain": tenant_id,
        "seq": "1",
    }
    aliased = await stand.admin.put(
        f"{path}/adapters/{side.ids['adapter_id']}/aliases/production",
        json={"version_id": version_id},
    )
    assert aliased.status_code == 200, aliased.text
    pin = {"revision_id": side.ids["revision_id"], "reason": slug}
    pinned = await stand.admin.put(f"{path}/deployments/{slug}-model/pin", json=pin)
    assert pinned.status_code == 200, pinned.text
    aim = {"suite_id": side.ids["suite_id"], "deployment": f"{slug}-model"}
    side.ids["run_id"] = await made("eval-runs", aim)
    again = await stand.admin.put(f"{path}/deployments/{slug}-model", json={"version_id": None})
    assert again.status_code == 200, again.text
    side.ids["rollout_id"] = await made("rollouts", {"deployment": f"{slug}-model", "canary": 1})
    side.ids["schedule_id"] = await made(
        "eval-schedules", {**aim, "name": "nightly", "every_hours": 24}
    )
    return side


async def test_every_route_answers_every_role_as_the_table_says(stand: Stand, db_url: str) -> None:
    mine, theirs = await make_side(stand, "acme"), await make_side(stand, "globex")
    my_uuid = UUID(hex=mine.tenant_id.removeprefix("ten_"))
    their_uuid = UUID(hex=theirs.tenant_id.removeprefix("ten_"))
    await stand.login("viewer", "viewer@platform.example")
    await stand.login("admin", "admin@platform.example")
    # Members are let in by the operator, so that the owners are not alone.
    for role in TENANT_ROLES:
        await member(stand, mine.tenant_id, role, f"{role}@acme.example")
    await member(stand, theirs.tenant_id, "owner", "owner@globex.example")
    leaver = await member(stand, mine.tenant_id, "viewer", "nobody@example.com")
    leaver_path = f"/admin/v1/tenants/{mine.tenant_id}/members/{await user_id_of(leaver)}"
    assert (await stand.admin.delete(leaver_path)).status_code == 204

    async def callers() -> list[Caller]:
        return [
            Caller("anonymous", stand.client(None), is_known=False),
            Caller("tenant's key", stand.client("lpx_sk_x"), is_known=False),
            Caller("nobody", await log_in(stand, "nobody@example.com")),
            Caller(
                "foreign owner",
                await log_in(stand, "owner@globex.example"),
                memberships={their_uuid: "owner"},
            ),
            *[
                Caller(role, await log_in(stand, f"{role}@acme.example"), None, {my_uuid: role})
                for role in TENANT_ROLES[::-1]
            ],
            Caller("platform viewer", await log_in(stand, "viewer@platform.example"), "viewer"),
            Caller("platform admin", await log_in(stand, "admin@platform.example"), "admin"),
            Caller("admin key", stand.admin, "admin"),
        ]

    everybody = await callers()
    before = dump_of(db_url, their_uuid)
    routes = guarded_routes(stand)
    num_cells = 0
    wrong: list[str] = []
    for route in routes:
        for caller in everybody:
            # Whoever reaches every tenant tries the first only, so that the other one stays as it is.
            is_everywhere = caller.platform_role is not None
            sides = [mine] if is_everywhere or not _names_an_id(route) else [theirs, mine]
            if caller.who == "foreign owner":
                sides = [mine]
            for side in sides:
                num_cells += 1
                answer = await call(caller.client, route, side, num_cells)
                expected = expectation(route, caller, side)
                if not matches(answer, expected):
                    place = "own" if side is mine else "foreign"
                    wrong.append(
                        f"{_method(route)} {route.path} by {caller.who} ({place}): expected "
                        f"{expected}, got {answer.status_code} {answer.text[:200]}"
                    )
                if caller.who not in (
                    "foreign owner",
                    "platform viewer",
                    "platform admin",
                    "admin key",
                ):
                    leaked = [secret for secret in theirs.secrets if secret in answer.text]
                    asked = str(answer.request.url)
                    wrong += [
                        f"{route.path} shows {secret} to {caller.who}"
                        for secret in leaked
                        if secret not in asked
                    ]

    assert not wrong, "\n".join(wrong)
    assert dump_of(db_url, their_uuid) == before
    print(f"\nroute x role x tenant: {num_cells} cells over {len(routes)} routes, all as expected")
    assert num_cells > 15 * len(routes)


async def test_what_another_tenant_owns_is_not_found_behind_ones_own_id(
    stand: Stand, db_url: str
) -> None:
    mine, theirs = await make_side(stand, "acme"), await make_side(stand, "globex")
    mixed = Side(mine.tenant_id, dict(theirs.ids))
    owner = await member(stand, mine.tenant_id, "owner", "owner@acme.example")
    their_uuid = UUID(hex=theirs.tenant_id.removeprefix("ten_"))
    before = dump_of(db_url, their_uuid)
    wrong: list[str] = []
    num_cells = 0
    for who, client in (("owner", owner), ("admin key", stand.admin)):
        for route in guarded_routes(stand):
            names = set(re.findall(r"{(\w+)", route.path)) & set(theirs.ids)
            # A deployment is named by its tenant: the same name is another one.
            if "{tenant_id}" not in route.path or not names - set(UNIQUE_BY_TENANT):
                continue
            num_cells += 1
            answer = await call(client, route, mixed, num_cells)
            is_forbidden = who == "owner" and answer.status_code == 403
            if answer.status_code != 404 and not is_forbidden:
                wrong.append(f"{_method(route)} {route.path} by {who}: {answer.status_code}")

    assert not wrong, "\n".join(wrong)
    assert dump_of(db_url, their_uuid) == before
    assert num_cells >= 30


async def test_what_another_tenant_owns_is_not_found_in_a_body(stand: Stand, db_url: str) -> None:
    mine, theirs = await make_side(stand, "acme"), await make_side(stand, "globex")
    owner = await member(stand, mine.tenant_id, "owner", "owner@acme.example")
    await member(stand, theirs.tenant_id, "owner", "owner@globex.example")
    path, its = f"/admin/v1/tenants/{mine.tenant_id}", theirs.ids
    adapters = await stand.admin.get(f"/admin/v1/tenants/{theirs.tenant_id}/adapters")
    their_version = adapters.json()["data"][0]["versions"][0]["id"]
    their_model = await stand.admin.get(f"/admin/v1/tenants/{theirs.tenant_id}/deployments")
    deployment_id = their_model.json()["data"][0]["id"]
    key = f"{path}/keys/{mine.ids['key_id']}"
    grants = [
        {"grants": [{"kind": "adapter", "id": its["adapter_id"]}]},
        {"grants": [{"kind": "deployment", "id": deployment_id}]},
        {"project_id": its["project_id"]},
        {"owner_id": its["user_id"]},
    ]
    cells: list[tuple[str, str, dict[str, Any]]] = [
        ("PUT", f"{path}/deployments/{mine.ids['name']}", {"version_id": their_version}),
        ("PUT", f"{path}/deployments/another-name", {"version_id": their_version}),
        (
            "PUT",
            f"{path}/deployments/{mine.ids['name']}",
            {"follow": {"adapter_id": its["adapter_id"], "alias": "production"}},
        ),
        (
            "POST",
            f"{path}/deployments/{mine.ids['name']}/revisions",
            {"version_id": their_version},
        ),
        (
            "PUT",
            f"{path}/deployments/{mine.ids['name']}/pin",
            {"revision_id": its["revision_id"], "reason": "x"},
        ),
        (
            "PUT",
            f"{path}/adapters/{mine.ids['adapter_id']}/aliases/other",
            {"version_id": their_version},
        ),
        *[("POST", f"{path}/keys", {"name": "k", **fields}) for fields in grants],
        *[("PATCH", key, fields) for fields in grants],
    ]
    before = dump_of(db_url, UUID(hex=theirs.tenant_id.removeprefix("ten_")))

    wrong = []
    for method, where, body in cells:
        for who, client in (("owner", owner), ("admin key", stand.admin)):
            answer = await client.request(method, where, json=body)
            if answer.status_code != 404:
                wrong.append(f"{method} {where} {body} by {who}: {answer.status_code}")

    assert not wrong, "\n".join(wrong)
    assert dump_of(db_url, UUID(hex=theirs.tenant_id.removeprefix("ten_"))) == before


async def test_only_the_platforms_admins_give_somebody_another_password(stand: Stand) -> None:
    mine = await make_side(stand, "acme")
    victim = mine.ids["user_id"]
    owner = await member(stand, mine.tenant_id, "owner", "owner@acme.example")
    await stand.login("viewer", "viewer@platform.example")
    viewer = await log_in(stand, "viewer@platform.example")
    spare = await log_in(stand, "spare@acme.example")
    path, body = f"/admin/v1/users/{victim}/password", {"password": "another long pw"}

    for client, status in ((stand.client(None), 401), (spare, 403), (owner, 403), (viewer, 403)):
        assert (await client.post(path, json=body)).status_code == status
    assert (await spare.get("/admin/v1/sessions/current")).status_code == 200
    assert (await stand.admin.post(path, json=body)).status_code == 200

    # What they were logged in with is over; what they are stays.
    assert (await spare.get("/admin/v1/sessions/current")).status_code == 401
    members = await stand.admin.get(f"/admin/v1/tenants/{mine.tenant_id}/members")
    assert victim in [one["id"] for one in members.json()["data"]]


def expectation(route: GuardedRoute, caller: Caller, side: Side) -> str:
    """What the table says: 401, 403, 404 or allowed."""
    if not caller.is_known:
        return "401"
    tenant_id = UUID(hex=side.tenant_id.removeprefix("ten_"))
    named = tenant_id if "{tenant_id}" in route.path else None
    reach = reach_of(route.action, caller.platform_role, caller.memberships, named)
    if reach is Refusal.FORBIDDEN:
        return "403"
    if reach is Refusal.UNKNOWN:
        return "404"
    assert not isinstance(reach, Refusal)
    is_foreign = reach.tenant_ids is not None and tenant_id not in reach.tenant_ids
    return "404" if is_foreign and _names_a_foreign_thing(route, side) else "allowed"


def matches(answer: httpx.Response, expected: str) -> bool:
    if answer.status_code >= 500:
        code = answer.json()["error"]["code"]
        return expected == "allowed" and answer.status_code == 503 and code in MAY_BE_DOWN
    if expected == "allowed":
        # It may still be wrong, gone or impossible: but nobody said that the role does not allow it.
        return answer.status_code not in (401, 403)
    return answer.status_code == int(expected)


async def call(
    client: httpx.AsyncClient, route: GuardedRoute, side: Side, number: int
) -> httpx.Response:
    method = _method(route)
    options = _numbered(BODIES.get((method, route.path), {}), number)
    if not options and method in ("POST", "PUT", "PATCH"):
        options = {"json": {}}
    return await client.request(method, filled(route.path, side), **options)


def filled(path: str, side: Side) -> str:
    """The path with the side's ids, and made-up ones where it has none."""

    def value(match: re.Match[str]) -> str:
        name = match[1].partition(":")[0]
        if name == "tenant_id":
            return side.tenant_id
        if name == "digest":
            return "sha256:" + "0" * 64
        kind = name.removesuffix("_id")
        made_up = format_id(kind, uuid7()) if kind in PREFIXES else "made-up"
        return side.ids.get(name, made_up)

    return re.sub(r"{([\w:]+)}", value, path)


def test_every_route_of_the_control_api_declares_what_it_asks_for(stand: Stand) -> None:
    guarded, public, pages = set(), set(), set()
    for route in _routes(stand):
        place = (_method(route), route.path)
        if isinstance(route, GuardedRoute):
            assert isinstance(route, AdminRoute | StreamedRoute)
            assert route.path.startswith("/admin/v1"), place
            assert ACTIONS[route.action.name] is route.action
            # A read changes nothing, so a platform viewer may do it; a change is no read.
            is_change = _method(route) in ("PUT", "PATCH", "DELETE")
            assert not (is_change and route.action.is_read), place
            guarded.add(place)
        elif isinstance(route, PublicRoute):
            public.add(place)
        else:
            pages.add(place)

    assert public == PUBLIC
    assert not any(path.startswith("/admin") for _, path in pages)
    assert len(guarded) >= 40


def test_every_action_of_the_table_is_asked_for_by_some_route(stand: Stand) -> None:
    used = {route.action.name for route in guarded_routes(stand)}

    # Not a route of /admin/v1: /metrics asks for it where it is not asked from this machine.
    assert set(ACTIONS) - used == {"metrics.read"}


def dump_of(db_url: str, tenant_id: UUID) -> dict[str, list[str]]:
    """Every row that is the tenant's."""
    found: dict[str, list[str]] = {}
    with psycopg.connect(db_url) as connection:
        tables = connection.execute(
            "select c.relname from pg_class c join pg_attribute a on a.attrelid = c.oid "
            "and a.attname = 'tenant_id' where c.relnamespace = 'public'::regnamespace "
            "and c.relkind in ('r', 'p') and not c.relispartition"
        ).fetchall()
        for (table,) in [*tables, ("tenants",)]:
            column = "id" if table == "tenants" else "tenant_id"
            query = sql.SQL("select t::text from {} t where {} = %s order by 1")
            rows = connection.execute(
                query.format(sql.Identifier(table), sql.Identifier(column)), [tenant_id]
            )
            found[table] = [row[0] for row in rows]
    return found


def _routes(stand: Stand) -> list[APIRoute]:
    included = [getattr(route, "original_router", None) for route in stand.app.routes]
    found = [route for router in included if router is not None for route in router.routes]
    return [route for route in found if isinstance(route, APIRoute)]


def _method(route: APIRoute) -> str:
    [method] = set(route.methods) - {"HEAD"}
    return method


def _names_an_id(route: APIRoute) -> bool:
    return "{" in route.path and "{digest}" not in route.path


def _names_a_foreign_thing(route: APIRoute, side: Side) -> bool:
    """Whether the path names something that exists and is the tenant's, without naming the tenant."""
    names = set(re.findall(r"{(\w+)", route.path))
    return bool(names & set(side.ids)) and "{tenant_id}" not in route.path


def _numbered(options: dict[str, Any], number: int) -> dict[str, Any]:
    """The body with every {n} replaced, so that names are new in every cell."""
    return {
        kind: {
            name: value.replace("{n}", str(number)) if isinstance(value, str) else value
            for name, value in fields.items()
        }
        for kind, fields in options.items()
    }


async def _add_limit(stand: Stand, tenant_id: str) -> str:
    body = {"scope_kind": "tenant", "scope_id": tenant_id, "metric": "rpm", "value": "60"}
    answer = await stand.admin.post("/admin/v1/limits", json=body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def _add_alert(stand: Stand, tenant_id: str) -> str:
    owner = UUID(hex=tenant_id.removeprefix("ten_"))
    async with stand.db.transaction() as session:
        payload = {"kind": "webhook_failed", "tenant_id": str(owner), "reason": tenant_id}
        await enqueue(session, "alert", f"matrix:{owner}", payload)
        found = await session.scalar(select(Alert.id).where(Alert.tenant_id == owner))
    assert found is not None
    return format_id("alert", found)


async def _add_import(stand: Stand, path: str, slug: str) -> str:
    """One that has ended: nothing of it changes any more."""
    body = {"name": "x", "source": f"file:///nowhere/{slug}/x"}
    answer = await stand.admin.post(f"{path}/adapters/import", json=body)
    assert answer.status_code == 202, answer.text
    job = answer.json()
    async with asyncio.timeout(30):
        while job["state"] != "failed":
            await asyncio.sleep(0.05)
            job = (await stand.admin.get(f"{path}/adapter-imports/{job['id']}")).json()
    return str(job["id"])


def _last_month() -> str:
    first = datetime.now(UTC).replace(day=1)
    return f"{first - timedelta(days=1):%Y-%m}"


async def _add_request(stand: Stand, tenant_id: str) -> str:
    from tests.support.metering import run_sql

    request_id = uuid7()
    await run_sql(
        stand.db,
        "insert into requests (id, tenant_id, price_book_id, endpoint, model, is_stream, owner,"
        " lease_until, est_prompt_tokens, est_completion_tokens, est_pico, state, settled_at)"
        " select :id, :tenant, b.id, 'chat.completions', 'm', false, 'o', now(), 1, 1, 1, 'voided',"
        " now() from price_books b limit 1",
        id=request_id,
        tenant=UUID(hex=tenant_id.removeprefix("ten_")),
    )
    return format_id("request", request_id)
