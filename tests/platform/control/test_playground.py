"""The playground: the gateway's stream passed through, with a short-lived key of the tenant."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from loraplex_platform.errors import InvalidApiKeyError, RevokedKeyError
from loraplex_platform.gateway.main import Server
from loraplex_platform.ids import format_id, parse_id, uuid7
from loraplex_platform.playground import revision_ticket, service
from loraplex_platform.tenancy.authentication import authenticate

from tests.platform.control.people import member
from tests.platform.control.stand import ADMIN_KEY, Stand, error_of
from tests.support.billing import STANDARD_BOOK
from tests.support.metering import PEPPER, run_sql
from tests.support.processes import until

CHAT = {"model": "capitals", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
EVENTS = [b'data: {"a": 1}\n\n', b'data: {"b": 2}\n\n', b"data: [DONE]\n\n"]


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, ws="none")
    server = Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


@dataclass
class FakeGateway:
    """Checks the key as the real one does, then plays a script."""

    stand: Stand | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    tickets: list[str | None] = field(default_factory=list)
    is_endless: bool = False
    refusal: Response | None = None
    was_cut: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            assert self.stand is not None
            secret = request.headers["authorization"].removeprefix("Bearer ")
            self.keys.append(secret)
            self.bodies.append(await request.json())
            self.tickets.append(request.headers.get(revision_ticket.HEADER))
            try:
                await authenticate(self.stand.db.sessions, PEPPER, secret)
            except (InvalidApiKeyError, RevokedKeyError) as error:
                return JSONResponse({"error": {"message": error.message}}, 401)
            if self.refusal is not None:
                return self.refusal
            return StreamingResponse(self._stream(), media_type="text/event-stream")

        return app

    async def _stream(self) -> AsyncIterator[bytes]:
        try:
            for event in EVENTS:
                yield event
                await asyncio.sleep(0)
            while self.is_endless:
                yield b": ping\n\n"
                await asyncio.sleep(0.01)
        except (asyncio.CancelledError, GeneratorExit):
            self.was_cut.set()
            raise


@dataclass
class Setting:
    stand: Stand
    gateway: FakeGateway
    path: str


@pytest.fixture
async def setting(db_url: str, redis_url: str, short_tmp_path: Path) -> AsyncIterator[Setting]:
    gateway = FakeGateway()
    async with (
        serving(gateway.app) as url,
        Stand.open(db_url, redis_url, short_tmp_path, gateway_url=url) as stand,
    ):
        gateway.stand = stand
        tenant = await stand.tenant("acme")
        yield Setting(stand, gateway, f"/admin/v1/tenants/{tenant['id']}/playground")


async def test_the_stream_comes_through_unchanged_with_one_short_lived_key(
    setting: Setting,
) -> None:
    admin = setting.stand.admin

    first = await admin.post(setting.path, json=CHAT)
    again = await admin.post(setting.path, json=CHAT | {"temperature": 0})

    assert first.status_code == again.status_code == 200
    assert first.content == b"".join(EVENTS)
    assert first.headers["content-type"].startswith("text/event-stream")
    assert len(set(setting.gateway.keys)) == 1
    sent = setting.gateway.bodies[0]
    assert sent["stream"] is True
    assert sent["stream_options"] == {"include_usage": True}
    assert sent["messages"] == CHAT["messages"]
    path = setting.path.replace("playground", "keys")
    [key] = (await admin.get(path)).json()["data"]
    assert key["name"] == "playground"
    assert 0 < key["expires_at"] - key["created_at"] <= 15 * 60


async def test_a_revoked_or_expiring_key_is_replaced(setting: Setting) -> None:
    admin = setting.stand.admin
    await admin.post(setting.path, json=CHAT)

    await run_sql(setting.stand.db, "update api_keys set status = 'revoked', revoked_at = now()")
    answer = await admin.post(setting.path, json=CHAT)

    assert answer.status_code == 200
    assert len(set(setting.gateway.keys)) == 2
    assert len(setting.gateway.keys) == 3


async def test_a_key_in_use_is_prolonged_not_joined_by_another(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, path = setting.stand.admin, setting.path.replace("playground", "keys")
    await admin.post(setting.path, json=CHAT)
    [before] = (await admin.get(path)).json()["data"]
    # Every key is now so close to its end that no further conversation may start with it.
    monkeypatch.setattr(service, "_KEY_MARGIN", service.KEY_LIFETIME)
    await run_sql(
        setting.stand.db, "update api_keys set expires_at = expires_at - interval '12 minutes'"
    )

    answer = await admin.post(setting.path, json=CHAT)

    assert answer.status_code == 200
    assert len(set(setting.gateway.keys)) == 1
    [after] = (await admin.get(path)).json()["data"]
    assert after["id"] == before["id"]
    assert after["expires_at"] >= before["expires_at"]


async def test_a_stop_revokes_the_keys(setting: Setting) -> None:
    await setting.stand.admin.post(setting.path, json=CHAT)

    await setting.stand.app.state.context.playground.close()

    path = setting.path.replace("playground", "keys")
    [key] = (await setting.stand.admin.get(path)).json()["data"]
    assert key["status"] == "revoked"


async def test_the_gateways_refusal_keeps_its_status_code_and_words(setting: Setting) -> None:
    error = {
        "message": "No such model.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    setting.gateway.refusal = JSONResponse({"error": error}, 404)
    answer = await setting.stand.admin.post(setting.path, json=CHAT)
    assert error_of(answer, 404, "model_not_found") == error

    setting.gateway.refusal = Response(b"<html>", 502)
    answer = await setting.stand.admin.post(setting.path, json=CHAT)
    error_of(answer, 502, "gateway_error")


async def test_a_gateway_that_is_down_is_a_503(stand: Stand) -> None:
    tenant = await stand.tenant("acme")

    answer = await stand.admin.post(f"/admin/v1/tenants/{tenant['id']}/playground", json=CHAT)

    error_of(answer, 503, "gateway_unavailable")
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_revision_is_asked_by_its_id_as_a_pin_would_have_it(setting: Setting) -> None:
    stand, tenant_path = setting.stand, setting.path.removesuffix("/playground")
    tenant_id = tenant_path.rpartition("/")[2]
    version_id = await stand.version(tenant_id, "capitals")
    revisions = []
    for content in ({"version_id": version_id}, {"version_id": None}):
        put = await stand.admin.put(f"{tenant_path}/deployments/capitals", json=content)
        assert put.status_code == 200, put.text
        revisions.append(put.json()["revision"]["id"])
    developer = await member(stand, tenant_id, "developer", "dev@acme.example")

    answer = await developer.post(setting.path, json=CHAT | {"revision_id": revisions[0]})
    plain = await developer.post(setting.path, json=CHAT)

    assert answer.status_code == plain.status_code == 200, answer.text
    assert "revision_id" not in setting.gateway.bodies[0]
    [ticket, none] = setting.gateway.tickets
    assert none is None
    assert ticket is not None
    tenant_uuid = parse_id("tenant", tenant_id)
    named = revision_ticket.read(PEPPER, tenant_uuid, ticket)
    assert format_id("deployment_revision", named) == revisions[0]

    retired = await stand.admin.post(
        f"{tenant_path}/adapters/{await adapter_of(stand, tenant_path)}/versions/{version_id}/retire"
    )
    assert retired.status_code == 200, retired.text
    gone = await developer.post(setting.path, json=CHAT | {"revision_id": revisions[0]})
    unknown = format_id("deployment_revision", uuid7())
    none_such = [
        await developer.post(setting.path, json=CHAT | {"revision_id": id_})
        for id_ in (unknown, "rev_1", "")
    ]

    assert error_of(gone, 409, "conflict")["param"] == "revision_id"
    for refused in none_such:
        assert error_of(refused, 404, "not_found")["param"] == "revision_id"
    assert len(setting.gateway.tickets) == 2


async def test_a_revision_with_another_price_book_is_asked_by_the_operator_only(
    setting: Setting,
) -> None:
    stand, tenant_path = setting.stand, setting.path.removesuffix("/playground")
    tenant_id = tenant_path.rpartition("/")[2]
    revisions = []
    for book in (format_id("price_book", STANDARD_BOOK), None):
        content = {"version_id": None, "price_book_id": book}
        put = await stand.admin.put(f"{tenant_path}/deployments/capitals", json=content)
        assert put.status_code == 200, put.text
        revisions.append(put.json()["revision"]["id"])
    developer = await member(stand, tenant_id, "developer", "dev@acme.example")
    ask = CHAT | {"revision_id": revisions[0]}

    refused = await developer.post(setting.path, json=ask)
    current = await developer.post(setting.path, json=CHAT | {"revision_id": revisions[1]})
    operator = await stand.admin.post(setting.path, json=ask)

    assert error_of(refused, 403, "permission_denied")["param"] == "revision_id"
    assert current.status_code == operator.status_code == 200, current.text
    assert len(setting.gateway.tickets) == 2


async def adapter_of(stand: Stand, tenant_path: str) -> str:
    [found] = (await stand.admin.get(f"{tenant_path}/adapters")).json()["data"]
    return str(found["id"])


async def test_a_client_that_goes_away_ends_the_request_at_the_gateway(setting: Setting) -> None:
    setting.gateway.is_endless = True
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}

    async with serving(setting.stand.app) as url, httpx.AsyncClient(headers=headers) as client:
        async with client.stream("POST", f"{url}{setting.path}", json=CHAT) as response:
            async for _ in response.aiter_bytes():
                break
        async with asyncio.timeout(10):
            await setting.gateway.was_cut.wait()


async def test_bad_chats_name_the_field(setting: Setting) -> None:
    for change, param in (
        ({"model": ""}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"api_base": "http://169.254.169.254"}, "api_base"),
    ):
        refused = await setting.stand.admin.post(setting.path, json=CHAT | change)
        assert error_of(refused, 400, "invalid_request")["param"] == param
    assert setting.gateway.keys == []
