"""Who is let in at all, on every route of the app's own OpenAPI document; roles are in test_matrix.py."""

from __future__ import annotations

import re
from typing import Any

import httpx
from loraplex_platform.control.routing import AdminRoute, StreamedRoute
from loraplex_platform.ids import format_id, uuid7
from loraplex_platform.tenancy import keys

from tests.platform.control.stand import Stand, error_of

LOGIN = ("POST", "/admin/v1/sessions")
ACCEPT = ("POST", "/admin/v1/invitations/accept")
# Public: the credentials are in their bodies.
PUBLIC = (LOGIN, ACCEPT)

BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/admin/v1/tenants"): {"json": {"slug": "other"}},
    ("POST", "/admin/v1/tenants/{tenant_id}/keys"): {"json": {"name": "x"}},
    ("PUT", "/admin/v1/tenants/{tenant_id}/deployments/{name}"): {"json": {"version_id": None}},
    ("POST", "/admin/v1/tenants/{tenant_id}/playground"): {
        "json": {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    },
    ("POST", "/admin/v1/users"): {
        "json": {"email": "x@example.com", "password": "long enough pw", "role": "viewer"}
    },
    ("GET", "/admin/v1/usage"): {"params": {"start_time": 0}},
    ("DELETE", "/admin/v1/tenants/{tenant_id}"): {"params": {"confirm": "acme"}},
}

Operation = tuple[str, str]


def operations(stand: Stand) -> list[Operation]:
    found = [
        (method.upper(), path)
        for path, methods in stand.app.openapi()["paths"].items()
        for method in methods
        if path.startswith("/admin/v1")
    ]
    assert len(found) > 20
    return found


def filled(path: str, **values: str) -> str:
    defaults = {
        "name": "capitals",
        "key_id": "key_x",
        "adapter_id": "adp_x",
        "digest": "sha256:" + "0" * 64,
    }
    return re.sub(r"{(\w+)}", lambda match: (defaults | values).get(match[1], "x"), path)


async def call(client: httpx.AsyncClient, operation: Operation, **values: str) -> httpx.Response:
    method, path = operation
    return await client.request(method, filled(path, **values), **BODIES.get(operation, {}))


async def test_every_route_refuses_the_unknown(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    strangers = {
        "none": stand.client(None),
        "wrong key": stand.client(keys.mint("ak").secret),
        "tenant's key": stand.client(keys.mint("sk").secret),
        "basic": stand.client(None, headers={"authorization": "Basic YWRtaW46YWRtaW4="}),
        "empty": stand.client(None, headers={"authorization": ""}),
        "sql": stand.client("' or '1'='1"),
        "bad cookie": stand.client(None, cookies={"loraplex_session": "x" * 43}),
        "odd bytes": stand.client(None, headers={"authorization": b"Bearer \xff\xfe"}),
    }

    for operation in operations(stand):
        if operation in PUBLIC:
            continue
        for who, client in strangers.items():
            answer = await call(client, operation, tenant_id=tenant_id)
            assert answer.status_code == 401, (operation, who, answer.text)
            assert answer.headers["www-authenticate"] == "Bearer"
            if operation[0] != "GET" and who not in ("none", "bad cookie"):
                break  # one bad key is enough for the others


async def test_unknown_tenants_are_not_found_on_every_route(stand: Stand) -> None:
    unknown = [format_id("tenant", uuid7()), "ten_x", "acme", format_id("user", uuid7()), "..%2f.."]

    for operation in operations(stand):
        if "{tenant_id}" not in operation[1]:
            continue
        for tenant_id in unknown:
            answer = await call(stand.admin, operation, tenant_id=tenant_id)
            error_of(answer, 404, "not_found")


async def test_another_tenants_ids_are_as_unknown_as_made_up_ones(stand: Stand) -> None:
    mine, theirs = await stand.tenant("acme"), await stand.tenant("globex")
    path, their_path = (f"/admin/v1/tenants/{t['id']}" for t in (mine, theirs))
    key = (await stand.admin.post(f"{their_path}/keys", json={"name": "k"})).json()
    version_id = await stand.version(theirs["id"])
    adapter_id = (await stand.admin.get(f"{their_path}/adapters")).json()["data"][0]["id"]
    deployed = await stand.admin.put(
        f"{their_path}/deployments/capitals", json={"version_id": version_id}
    )
    assert deployed.status_code == 200

    pairs = [
        ("DELETE", f"{path}/keys/{key['id']}", f"{path}/keys/{format_id('api_key', uuid7())}"),
        ("GET", f"{path}/adapters/{adapter_id}", f"{path}/adapters/adp_{'0' * 32}"),
        ("GET", f"{path}/deployments/capitals", f"{path}/deployments/never-was"),
        ("DELETE", f"{path}/deployments/capitals", f"{path}/deployments/never-was"),
    ]
    for method, foreign, made_up in pairs:
        refused = await stand.admin.request(method, foreign)
        unknown = await stand.admin.request(method, made_up)
        assert error_of(refused, 404, "not_found") == error_of(unknown, 404, "not_found")
    for body_id in (version_id, format_id("adapter_version", uuid7()), "ver_x", ""):
        refused = await stand.admin.put(f"{path}/deployments/x", json={"version_id": body_id})
        assert error_of(refused, 404, "not_found")["param"] == "version_id"
    unchanged = (await stand.admin.get(f"{their_path}/keys")).json()["data"][0]
    assert unchanged["status"] == "active"
    assert (await stand.admin.get(f"{path}/adapters")).json()["data"] == []
    assert (await stand.admin.get(f"{path}/deployments")).json()["data"] == []


async def test_no_admin_route_is_left_out_of_the_document_or_of_authorize(stand: Stand) -> None:
    included = [getattr(route, "original_router", None) for route in stand.app.routes]
    routes = [route for router in included if router is not None for route in router.routes]
    admin = [route for route in routes if route.path.startswith("/admin/v1")]

    found = {(method, route.path) for route in admin for method in route.methods}
    assert found == set(operations(stand))
    for route in admin:
        if not {(method, route.path) for method in route.methods} <= set(PUBLIC):
            assert isinstance(route, AdminRoute | StreamedRoute), route.path


async def test_fields_that_are_not_offered_cannot_be_set(stand: Stand) -> None:
    for field in ("status", "id", "tenant_id", "role", "created_at"):
        answer = await stand.admin.post("/admin/v1/tenants", json={"slug": "acme", field: "closed"})
        error = error_of(answer, 400, "invalid_request")
        assert error["param"] == field
        assert "remove it" in error["message"]


async def test_the_host_header_decides_nothing(stand: Stand) -> None:
    for host in ("localhost", "127.0.0.1", "control.internal", "evil.test"):
        client = stand.client(None, headers={"host": host, "x-forwarded-for": "127.0.0.1"})
        assert (await client.get("/admin/v1/tenants")).status_code == 401
        assert (await client.get("/metrics")).status_code == 404
