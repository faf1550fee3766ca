"""Every route of the gateway x every kind of key x own, foreign and unknown models, generated from the app."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from fastapi.routing import APIRoute
from loraplex_platform.gateway.app import create_app
from loraplex_platform.tenancy import keys

from tests.platform.gateway.stand import BASE, Stand
from tests.platform.gateway.test_key_access import add_key
from tests.support.metering import add_customer, run_sql

pytestmark = pytest.mark.asyncio(loop_scope="package")

# For whoever runs the process; they ask for no key, and say nothing of tenants.
OPEN = {"/live", "/ready", "/metrics", "/docs", "/openapi.json"}
OWN, FOREIGN, UNKNOWN = "pirate", "secret/plan:1", "never-was"
MODELS = (BASE, OWN, FOREIGN, UNKNOWN)
LISTS = {("GET", "/v1/models")}
# What a route needs of a key; a route that is not named here is one that nobody has thought about.
SCOPES = {
    ("GET", "/v1/models"): "models.read",
    ("GET", "/v1/models/{model_id:path}"): "models.read",
    ("POST", "/v1/chat/completions"): "inference",
    ("POST", "/v1/completions"): "inference",
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and what they hear on a route that asks for `scope`: None if they are let in."""

    who: str
    secret: str
    refusal: tuple[int, str] | None = None
    scopes: tuple[str, ...] = ("inference", "models.read")

    def expected(self, scope: str) -> tuple[int, str] | None:
        if self.refusal is not None:
            return self.refusal
        return None if scope in self.scopes else (403, "insufficient_scope")


async def test_every_route_answers_every_key_as_it_should(stand: Stand) -> None:
    callers = await make_callers(stand)
    num_cells = 0
    wrong: list[str] = []
    for method, path in operations(stand):
        if path in OPEN:
            assert (method, path) not in SCOPES
            continue
        scope = SCOPES[method, path]
        for caller in callers:
            for model in MODELS[:1] if (method, path) in LISTS else MODELS:
                num_cells += 1
                answer = await call(stand.http(caller.secret), method, path, model)
                expected = caller.expected(scope)
                if expected is None and model in (FOREIGN, UNKNOWN):
                    expected = (404, "model_not_found")
                found = None
                if answer.status_code != 200:
                    found = (answer.status_code, answer.json()["error"]["code"])
                if found != expected:
                    wrong.append(
                        f"{method} {path} {model} by {caller.who}: {expected}, got {found}"
                    )
                is_told = model == FOREIGN and expected == (404, "model_not_found")
                if FOREIGN in answer.text and not is_told:
                    wrong.append(f"{method} {path} shows {FOREIGN} to {caller.who}")

    assert not wrong, "\n".join(wrong)
    print(f"\nroute x key x model: {num_cells} cells, all as expected")
    assert num_cells >= 100


async def test_what_needs_no_key_says_nothing_of_tenants(stand: Stand) -> None:
    async with stand.http("") as client:
        for path in OPEN:
            answer = await client.get(path)
            assert answer.status_code == 200
            for text in (FOREIGN, "globex", str(stand.customer.tenant_id)):
                assert text not in answer.text, path


async def make_callers(stand: Stand) -> list[Caller]:
    past = datetime.now(UTC) - timedelta(seconds=1)
    suspended = await add_customer(stand.db, "suspended-for-matrix")
    await run_sql(
        stand.db,
        "update tenants set status = 'suspended' where id = :id",
        id=suspended.tenant_id,
    )

    async def key(**columns: object) -> str:
        return (await add_key(stand, **columns))[1]

    return [
        Caller("nobody", "", (401, "invalid_api_key")),
        Caller("an unknown key", keys.mint("sk").secret, (401, "invalid_api_key")),
        Caller("an admin key", keys.mint("ak").secret, (401, "invalid_api_key")),
        Caller(
            "a revoked key",
            await key(status="revoked", revoked_at=past),
            (401, "revoked_api_key"),
        ),
        Caller("a disabled key", await key(status="disabled"), (401, "disabled_api_key")),
        Caller("an expired key", await key(expires_at=past), (401, "expired_api_key")),
        Caller("a suspended tenant's key", suspended.secret, (403, "tenant_suspended")),
        Caller(
            "a key from elsewhere", await key(ip_allow=["203.0.113.0/24"]), (403, "ip_not_allowed")
        ),
        Caller("a key that reads", await key(scopes=["models.read"]), scopes=("models.read",)),
        Caller("a key that infers", await key(scopes=["inference"]), scopes=("inference",)),
        Caller("a whole key", stand.customer.secret),
    ]


def operations(stand: Stand) -> list[tuple[str, str]]:
    app = create_app(stand.gateway)
    included = [getattr(route, "original_router", None) for route in app.routes]
    routes = [route for router in included if router is not None for route in router.routes]
    routes += [route for route in app.routes if isinstance(route, APIRoute)]
    found = {
        (method, route.path)
        for route in routes
        for method in (route.methods or ())
        if method != "HEAD"
    }
    assert set(SCOPES) <= found
    return sorted(found)


async def call(client: httpx.AsyncClient, method: str, path: str, model: str) -> httpx.Response:
    url = path.replace("{model_id:path}", model)
    body = {
        "model": model,
        "max_tokens": 2,
        **({"prompt": "hi"} if path == "/v1/completions" else {}),
        **(
            {"messages": [{"role": "user", "content": "hi"}]}
            if path == "/v1/chat/completions"
            else {}
        ),
    }
    async with client:
        return await client.request(method, url, json=body if method == "POST" else None)
