"""The control API in this process, on a real Postgres and Redis, with a scripted engine behind it.

async with Stand.open(db_url, redis_url, folder) as stand:
    tenant = await stand.tenant("acme")
    answer = await stand.upload(tenant["id"], "capitals", stand.adapter())
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import redis
from argon2 import PasswordHasher
from fastapi import FastAPI
from loraplex_engine.protocol import REPLICA_KEY_PREFIX, ReplicaRecord
from loraplex_platform.control.app import create_app
from loraplex_platform.db.session import Database, open_database
from loraplex_platform.settings import ControlSettings
from loraplex_platform.tenancy import keys
from loraplex_platform.users.passwords import Passwords

from tests.platform.gateway import tiny_model
from tests.support.adapter_files import TINY_SHAPE, encode_tensors, lora_config, lora_tensors
from tests.support.fake_engine import FakeEngine
from tests.support.metering import PEPPER
from tests.support.postgres import database_settings, serving_url

BASE = "tiny-base"
ADMIN_KEY = keys.mint("ak").secret
PASSWORD = "correct horse battery"
CONSOLE = "http://console.test:8501"
CONTROL = "http://control.test:8001"


def cheap_passwords() -> Passwords:
    """argon2id, but quick."""
    return Passwords(PasswordHasher(time_cost=1, memory_cost=64, parallelism=1))


def write_model(folder: Path) -> Path:
    """A model folder whose linears have the shape of `TINY_SHAPE`."""
    tiny_model.write(folder)
    path = folder / "config.json"
    shape = {
        "num_hidden_layers": TINY_SHAPE.num_layers,
        "hidden_size": TINY_SHAPE.hidden_size,
        "intermediate_size": TINY_SHAPE.intermediate_size,
        "num_attention_heads": TINY_SHAPE.num_heads,
        "num_key_value_heads": TINY_SHAPE.num_kv_heads,
        "head_dim": TINY_SHAPE.head_dim,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | shape))
    weights = encode_tensors(lora_tensors(layers=[0]))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def settings_for(db_url: str, redis_url: str, folder: Path, **overrides: Any) -> ControlSettings:
    """Settings that do not depend on the environment."""
    values: dict[str, Any] = {
        "database_url": serving_url(db_url),
        "redis_url": redis_url,
        "model_dir": folder / "model",
        "base_model": BASE,
        "key_pepper": PEPPER,
        "session_key": "session-for-tests-0123456789abcdefg",
        "admin_key": ADMIN_KEY,
        "store_url": f"file://{folder / 'store'}",
        "control_port": 0,
        "console_url": CONSOLE,
        "gateway_url": "http://127.0.0.1:9",
    }
    return ControlSettings.model_validate(values | overrides)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """What an upload sends."""

    config: bytes
    model: bytes


def adapter(*, seed: int = 0, size: float = 0.1, rank: int = 8, **config: Any) -> AdapterFiles:
    """A sound adapter for the tiny model."""
    tensors = lora_tensors(seed=seed, size=size, rank=rank)
    text = json.dumps(lora_config(r=rank, **config)).encode()
    return AdapterFiles(text, encode_tensors(tensors))


@dataclass
class Stand:
    """Everything a test of the control API touches."""

    app: FastAPI
    engine: FakeEngine
    db: Database
    redis_url: str
    folder: Path
    settings: ControlSettings
    clients: list[httpx.AsyncClient] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, db_url: str, redis_url: str, folder: Path, **overrides: Any
    ) -> AsyncIterator[Stand]:
        write_model(folder / "model")
        settings = settings_for(db_url, redis_url, folder, **overrides)
        async with AsyncExitStack() as stack:
            db = await stack.enter_async_context(
                open_database(database_settings(serving_url(db_url)))
            )
            engine = await stack.enter_async_context(
                FakeEngine(folder, max_model_len=tiny_model.CONTEXT_LENGTH, vocab_size=400)
            )
            announce(redis_url, engine)
            app = create_app(settings, passwords=cheap_passwords())
            await stack.enter_async_context(app.router.lifespan_context(app))
            stand = cls(app, engine, db, redis_url, folder, settings)
            try:
                yield stand
            finally:
                for client in stand.clients:
                    await client.aclose()

    def client(self, key: str | None = ADMIN_KEY, **options: Any) -> httpx.AsyncClient:
        """Straight into the app; with the admin key unless told otherwise."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        headers |= options.pop("headers", {})
        address = options.pop("address", "127.0.0.1")
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, client=(address, 1234)),
            base_url=CONTROL,
            headers=headers,
            timeout=30,
            **options,
        )
        self.clients.append(client)
        return client

    @property
    def admin(self) -> httpx.AsyncClient:
        return self.client()

    async def login(self, role: str = "viewer", email: str | None = None) -> httpx.AsyncClient:
        """A browser's client that is logged in as a new user of this role."""
        email = email or f"{role}@example.com"
        body = {"email": email, "password": PASSWORD, "role": role}
        made = await self.admin.post("/admin/v1/users", json=body)
        assert made.status_code == 201, made.text
        client = self.client(None)
        body = {"email": email, "password": PASSWORD}
        answer = await client.post("/admin/v1/sessions", json=body)
        assert answer.status_code == 201, answer.text
        return client

    async def tenant(self, slug: str) -> dict[str, Any]:
        answer = await self.admin.post("/admin/v1/tenants", json={"slug": slug})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    async def upload(
        self,
        tenant_id: str,
        name: str,
        files: AdapterFiles,
        *,
        config_name: str = "adapter_config.json",
        model_name: str = "adapter_model.safetensors",
        data: dict[str, str] | None = None,
        **options: Any,
    ) -> httpx.Response:
        return await self.admin.post(
            f"/admin/v1/tenants/{tenant_id}/adapters",
            data={"name": name} | (data or {}),
            files={
                "adapter_config": (config_name, files.config),
                "adapter_model": (model_name, files.model),
            },
            **options,
        )

    async def version(self, tenant_id: str, name: str = "capitals", seed: int = 0) -> str:
        """Upload a sound adapter; its version's id."""
        answer = await self.upload(tenant_id, name, adapter(seed=seed))
        assert answer.status_code == 201, answer.text
        return str(answer.json()["version"]["id"])


def announce(redis_url: str, engine: FakeEngine, **changes: Any) -> None:
    """Write the engine's record to Redis, as the engine does."""
    values: dict[str, Any] = {
        "replica_id": engine.replica_id,
        "incarnation": engine.incarnation,
        "address": engine.address,
        "curve_public_key": None,
        "base_model": BASE,
        "model_fingerprint": engine.model_fingerprint,
        "kv_format": "fake",
        "device": "cpu",
        "isa": "none",
        "dtype": "float32",
        "torch_version": "none",
        "backends": {"lora": "fake"},
        "max_model_len": engine.max_model_len,
        "max_loras": 4,
        "max_lora_rank": 64,
        "state": "ready",
        "started_at_unix_s": time.time(),
        "row_rule_holds": True,
    }
    record = ReplicaRecord(**values | changes)
    connection = redis.Redis.from_url(redis_url)
    connection.set(REPLICA_KEY_PREFIX + record.replica_id, msgspec.json.encode(record))
    connection.close()


def error_of(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The envelope of a refusal, whose shape, status and code are checked."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code, error
    assert answer.headers["x-request-id"].startswith("req_")
    return error
