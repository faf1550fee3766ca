"""What a key may do on the data plane: its scopes, its networks, and the models it is granted."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from loraplex_platform.db import (
    Adapter,
    ApiKey,
    ApiKeySecret,
    BaseModel,
    Deployment,
    KeyModelGrant,
)
from loraplex_platform.ids import uuid7
from loraplex_platform.tenancy import keys
from sqlalchemy import select

from tests.platform.gateway.stand import BASE, Stand
from tests.support.metering import PEPPER

pytestmark = pytest.mark.asyncio(loop_scope="package")

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


async def add_key(
    stand: Stand, grants: tuple[tuple[str, UUID], ...] = (), **columns: Any
) -> tuple[UUID, str]:
    """One more key of acme's; its id and secret."""
    minted = keys.mint()
    key = ApiKey(
        id=uuid7(),
        tenant_id=stand.customer.tenant_id,
        name="test",
        public_id=minted.public_id,
        last4=minted.last4,
        **columns,
    )
    async with stand.db.transaction() as session:
        session.add(key)
        await session.flush()
        session.add(ApiKeySecret(id=uuid7(), key_id=key.id, mac=keys.mac(PEPPER, minted.secret)))
        session.add_all(
            KeyModelGrant(
                key_id=key.id, tenant_id=key.tenant_id, target_kind=kind, target_id=target_id
            )
            for kind, target_id in grants
        )
    return key.id, minted.secret


async def chat(client: httpx.AsyncClient, model: str) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=CHAT | {"model": model})


async def models_of(client: httpx.AsyncClient) -> list[str]:
    return [model["id"] for model in (await client.get("/v1/models")).json()["data"]]


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["type"], error["code"]


async def test_a_key_does_what_its_scopes_say(stand: Stand) -> None:
    _, reads = await add_key(stand, scopes=["models.read"])
    _, infers = await add_key(stand, scopes=["inference"])
    insufficient = (403, "permission_error", "insufficient_scope")

    reader, worker = stand.http(reads), stand.http(infers)

    assert await models_of(reader) == [BASE, "pirate"]
    for path, body in (
        ("/v1/chat/completions", CHAT | {"model": BASE}),
        ("/v1/completions", {"model": BASE, "prompt": "hi", "max_tokens": 2}),
        ("/v1/chat/completions", {}),  # before anything of the body is looked at
    ):
        assert refusal(await reader.post(path, json=body)) == insufficient
    assert (await chat(worker, BASE)).status_code == 200
    assert refusal(await worker.get("/v1/models")) == insufficient
    assert refusal(await worker.get(f"/v1/models/{BASE}")) == insufficient


async def test_a_key_calls_what_it_is_granted_and_the_rest_does_not_exist(stand: Stand) -> None:
    async with stand.db.sessions() as session:
        base_id = (await session.scalars(select(BaseModel.id))).one()
        found = await session.execute(select(Deployment.public_name, Deployment.id))
        deployments = {row[0]: row[1] for row in found}
        adapter_id = (
            await session.scalars(
                select(Adapter.id).where(
                    Adapter.tenant_id == stand.customer.tenant_id, Adapter.name == "pirate"
                )
            )
        ).one()
    cases: tuple[tuple[tuple[tuple[str, UUID], ...], list[str]], ...] = (
        ((("deployment", deployments["pirate"]),), ["pirate"]),
        ((("deployment", deployments[BASE]),), [BASE]),
        ((("adapter", adapter_id),), ["pirate"]),
        ((("base", base_id),), [BASE]),
        ((("base", base_id), ("adapter", adapter_id)), [BASE, "pirate"]),
        ((("deployment", uuid7()),), []),
        # Somebody else's, should it ever get into the table, is still somebody else's.
        ((("deployment", deployments["secret/plan:1"]),), []),
    )
    for grants, allowed in cases:
        _, secret = await add_key(stand, grants)
        client = stand.http(secret)
        assert await models_of(client) == allowed
        for model in (BASE, "pirate", "secret/plan:1", "never-was"):
            answer, shown = await chat(client, model), await client.get(f"/v1/models/{model}")
            assert answer.status_code == (200 if model in allowed else 404), (grants, model)
            assert shown.status_code == answer.status_code
            if model not in allowed:
                for refused in (answer, shown):
                    error = refused.json()["error"]
                    assert error["code"] == "model_not_found"
                    assert error["message"] == (
                        f"The model '{model}' does not exist or you do not have access to it."
                    )


async def test_a_key_works_from_its_networks_only(stand: Stand) -> None:
    not_allowed = (403, "permission_error", "ip_not_allowed")
    for networks, is_allowed in (
        (["203.0.113.0/24", "2001:db8::/32"], False),
        (["203.0.113.0/24", "127.0.0.0/8"], True),
        (["::/0"], False),
        (["0.0.0.0/0"], True),
    ):
        _, secret = await add_key(stand, ip_allow=networks)
        client = stand.http(secret)
        answers = [await client.get("/v1/models"), await chat(client, BASE)]
        # Anybody can write this header; nobody's word counts unless we named them.
        named = {"x-forwarded-for": "203.0.113.9"}
        answers.append(await client.get("/v1/models", headers=named))
        for answer in answers:
            if is_allowed:
                assert answer.status_code == 200
            else:
                assert refusal(answer) == not_allowed
                assert "203.0.113" not in answer.text


async def test_trusted_proxies_name_the_client(
    db_url: str,
    _redis_server_url: str,  # noqa: PT019 (its value is used)
    short_tmp_path: Path,
) -> None:
    redis_url = f"{_redis_server_url}?db=1"
    async with Stand.open(
        db_url, redis_url, short_tmp_path, gateway_trusted_proxies="127.0.0.0/8"
    ) as stand:
        _, secret = await add_key(stand, ip_allow=["203.0.113.0/24"])
        client = stand.http(secret)

        async def status(*named: str) -> int:
            headers = [("x-forwarded-for", name) for name in named]
            return (await client.get("/v1/models", headers=headers)).status_code

        assert await status("203.0.113.9") == 200
        assert await status("203.0.113.9, 127.0.0.7") == 200
        assert await status() == 403
        # What the client claims stands left of what our proxy saw, and counts for nothing.
        assert await status("203.0.113.9, 198.51.100.1") == 403
        assert await status("nonsense") == 403


async def test_the_last_use_is_noted_but_not_on_the_way(stand: Stand) -> None:
    key_id, secret = await add_key(stand)
    client = stand.http(secret)

    async def last_used_at() -> datetime | None:
        async with stand.db.sessions() as session:
            return (await session.get_one(ApiKey, key_id)).last_used_at

    await models_of(client)
    assert await last_used_at() is None
    await stand.gateway.key_uses.flush(stand.db.sessions)
    used_at = await last_used_at()
    assert used_at is not None
    assert abs((datetime.now(UTC) - used_at).total_seconds()) < 60
