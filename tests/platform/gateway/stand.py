"""A gateway on a real socket, a scripted engine behind it, and rows in a real Postgres.

async with Stand.open(db_url, redis_url, folder) as stand:
    stand.engine.script = Script(...)
    answer = await stand.client.chat.completions.create(model="base", ...)
    await stand.check_books()      # ends every test: nothing reserved, every token accounted for
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import msgspec
import redis
import uvicorn
from loraplex_engine.protocol import (
    REPLICA_KEY_PREFIX,
    Abort,
    Generate,
    ReplicaRecord,
)
from loraplex_platform.db import (
    Adapter,
    AdapterVersion,
    Attempt,
    BaseModel,
    Deployment,
    DeploymentRevision,
    EngineUsage,
    LedgerEntry,
    Request,
)
from loraplex_platform.db.session import Database, open_database
from loraplex_platform.gateway.app import create_app, open_gateway
from loraplex_platform.gateway.context import Gateway
from loraplex_platform.gateway.http_protocol import BoundedHttpProtocol
from loraplex_platform.gateway.main import Server
from loraplex_platform.ids import uuid7
from loraplex_platform.metering import invariants
from loraplex_platform.settings import GatewaySettings
from openai import AsyncOpenAI
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert

from tests.platform.gateway import tiny_model
from tests.support.fake_engine import FakeEngine, Script
from tests.support.metering import PEPPER, Customer, add_customer
from tests.support.postgres import database_settings, serving_url

BASE = "tiny-base"
# Generous: nothing waits that long in vain, and the machine may be busy.
DEADLINE_S = 60.0


async def eventually(
    condition: Callable[[], Awaitable[bool]] | Callable[[], bool],
    what: str = "condition",
    *,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Poll until true."""
    limit = time.monotonic() + deadline_s
    while True:
        value = condition()
        if await value if isinstance(value, Awaitable) else value:
            return
        assert time.monotonic() < limit, f"never came: {what}"
        await asyncio.sleep(0.01)


@dataclass
class Stand:
    """Everything a test of the data plane touches."""

    engine: FakeEngine
    gateway: Gateway
    db: Database
    url: str
    customer: Customer
    stranger: Customer
    redis_url: str
    closers: list[Callable[[], Awaitable[object]]] = field(default_factory=list)
    # What `check_books` has seen: the stand that a package shares is checked after each of its tests.
    _checked: set[UUID] = field(default_factory=set)
    _num_landed: int = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, db_url: str, redis_url: str, folder: Path, **overrides: Any
    ) -> AsyncIterator[Stand]:
        """Two tenants: acme with deployment `pirate`, globex with `secret/plan:1`, and the base."""
        settings = settings_for(db_url, redis_url, folder, **overrides)
        async with contextlib.AsyncExitStack() as stack:
            db = await stack.enter_async_context(
                open_database(database_settings(serving_url(db_url)))
            )
            customer = await add_customer(db, "acme")
            stranger = await add_customer(db, "globex")
            base_id = await add_base(db)
            await deploy(db, base_id, None, BASE)
            await deploy(db, base_id, customer.tenant_id, "pirate", digest="sha256:" + "a" * 64)
            await deploy(db, base_id, stranger.tenant_id, "secret/plan:1")
            engine = FakeEngine(folder, max_model_len=tiny_model.CONTEXT_LENGTH, vocab_size=400)
            await stack.enter_async_context(engine)
            announce(redis_url, engine)
            gateway = await stack.enter_async_context(open_gateway(settings))
            url = await stack.enter_async_context(serving(gateway))
            stand = cls(engine, gateway, db, url, customer, stranger, redis_url)
            try:
                if overrides.get("wait", True):
                    await eventually(lambda: gateway.router.num_ready > 0, "a ready engine")
                yield stand
            finally:
                await stand.close_clients()

    # ------------------------------------------------------------------ clients

    @property
    def client(self) -> AsyncOpenAI:
        """The official client with acme's key; no retries, so that a test sees each answer."""
        return self.client_with(self.customer.secret)

    def client_with(self, key: str) -> AsyncOpenAI:
        client = AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S
        )
        self.closers.append(client.close)
        return client

    def http(self, key: str | None = None) -> httpx.AsyncClient:
        """A plain client; acme's key unless told otherwise (empty: none)."""
        secret = self.customer.secret if key is None else key
        headers = {"authorization": f"Bearer {secret}"} if secret else {}
        client = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=DEADLINE_S)
        self.closers.append(client.aclose)
        return client

    async def close_clients(self) -> None:
        """Close every client that was made."""
        closers, self.closers = self.closers, []
        for close in closers:
            await close()

    # ------------------------------------------------------------------ looking

    @property
    def generated(self) -> list[Generate]:
        """What the engine was asked to run."""
        return [m for m in self.engine.received if isinstance(m, Generate)]

    @property
    def aborts(self) -> list[Abort]:
        """What the engine was asked to stop."""
        return [m for m in self.engine.received if isinstance(m, Abort)]

    async def last_request(self) -> tuple[Request, Attempt | None, LedgerEntry | None]:
        """The newest request, settled or void, with its books."""
        await self.settled()
        async with self.db.sessions() as session:
            request = (
                await session.scalars(select(Request).order_by(Request.id.desc()).limit(1))
            ).one()
            attempt = await session.get(Attempt, (request.id, 1))
            entry = await session.get(LedgerEntry, (request.id, "usage", 0))
        return request, attempt, entry

    async def settled(self) -> None:
        """Wait until no request is being answered, no pump runs and no rollout wants anything more."""
        registry = self.gateway.metrics.registry

        def is_idle() -> bool:
            is_quiet = registry.get_sample_value("loraplex:gateway_http_in_flight") == 0
            is_done = self.gateway.copying.num_pending == 0
            return is_quiet and is_done and self.gateway.pumps.num_live == 0

        await eventually(is_idle, "everything ended")

    async def check_books(self) -> None:
        """Nothing left reserved; each settled request has its rows; engine = billed + the rest."""
        await self.settled()
        async with self.db.sessions() as session:
            rows = await session.execute(select(Request.id, Request.state))
            states = {row.id: row.state for row in rows}
            new = states.keys() - self._checked
            attempts = {
                attempt.request_id: attempt
                for attempt in await session.scalars(
                    select(Attempt).where(Attempt.request_id.in_(new))
                )
            }
            ledger = set(
                await session.scalars(
                    select(LedgerEntry.entry_id).where(LedgerEntry.entry_id.in_(new))
                )
            )
        journal = {UUID(e.request_id): e.usage for e in self.engine.journal}
        for id_, state in states.items():
            assert state in ("settled", "voided"), state
            if id_ in new:
                assert (state == "settled") == (id_ in attempts)
                assert (id_ in attempts) == (id_ in ledger)
        assert journal.keys() <= {id_ for id_, state in states.items() if state == "settled"}
        for id_, attempt in attempts.items():
            if attempt.source == "terminal":
                assert attempt.generated == journal[id_].completion_tokens
                assert attempt.prompt_tokens == journal[id_].prompt_tokens
        assert self.engine.num_running == 0
        num_landed, self._num_landed = self._num_landed, len(self.engine.journal)
        await check_invariants(self.db, self.engine, num_landed=num_landed)
        self._checked |= new


async def check_invariants(db: Database, engine: FakeEngine, *, num_landed: int = 0) -> None:
    """Land the engine's journal as the worker does, then run every SQL check.

    Args:
        num_landed: so many entries of the journal were landed before.
    """
    rows = [
        {
            "request_id": UUID(entry.request_id),
            "attempt": entry.attempt,
            "replica_id": engine.replica_id,
            "tenant_id": UUID(entry.tenant_id),
            "adapter_digest": entry.adapter_digest,
            "finish_reason": entry.finish_reason,
            "prompt_tokens": entry.usage.prompt_tokens,
            "cached_tokens": entry.usage.cached_tokens,
            "completion_tokens": entry.usage.completion_tokens,
            "ended_at": datetime.fromtimestamp(entry.ended_at_unix_s, UTC),
        }
        for entry in engine.journal[num_landed:]
    ]
    if rows:
        async with db.transaction() as session:
            await session.execute(insert(EngineUsage).values(rows).on_conflict_do_nothing())
    report = await invariants.check_invariants(db.sessions)
    assert report.ok, [check for check in report.checks if not check.ok]
    assert report.identity.difference == 0
    assert report.identity.pending_requests == 0


def settings_for(db_url: str, redis_url: str, folder: Path, **overrides: Any) -> GatewaySettings:
    """Settings that do not depend on the environment."""
    values: dict[str, Any] = {
        "database_url": serving_url(db_url),
        "redis_url": redis_url,
        "model_dir": tiny_model.write(folder / "model"),
        "base_model": BASE,
        "key_pepper": PEPPER,
        "salt_key": "salt-for-tests-0123456789abcdefghij",
        "gateway_port": 0,
        "gateway_id": "gw-test",
        "default_max_tokens": 64,
        # Most tests change keys behind the gateway's back, without the news that the control API sends.
        "key_cache_s": 0,
    }
    overrides.pop("wait", None)
    return GatewaySettings.model_validate(values | overrides)


@contextlib.asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[str]:
    """The gateway's app behind uvicorn on a free port, as `main.serve` runs it."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    config = uvicorn.Config(
        create_app(gateway),
        http=BoundedHttpProtocol,
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
    )
    server = Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await eventually(lambda: server.started, "uvicorn")
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


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
        "backends": {},
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


async def add_base(db: Database) -> UUID:
    """The base model's row."""
    base = BaseModel(
        id=uuid7(),
        name=BASE,
        revision="1",
        tokenizer_sha256="0" * 64,
        chat_template_sha256="0" * 64,
        architecture={},
    )
    async with db.transaction() as session:
        session.add(base)
    return base.id


async def deploy(
    db: Database, base_id: UUID, tenant_id: UUID | None, name: str, *, digest: str | None = None
) -> UUID:
    """A deployment with its first revision."""
    deployment = Deployment(
        id=uuid7(), tenant_id=tenant_id, public_name=name, base_model_id=base_id
    )
    async with db.transaction() as session:
        version_id = None
        if digest is not None and tenant_id is not None:
            version_id = await _add_version(session, tenant_id, base_id, name, digest)
        session.add(deployment)
        await session.flush()
        revision = DeploymentRevision(
            id=uuid7(),
            deployment_id=deployment.id,
            tenant_id=tenant_id,
            number=1,
            base_model_id=base_id,
            adapter_version_id=version_id,
            adapter_digest=digest,
            params={},
            sha256="0" * 64,
            created_at=datetime.now(UTC),
        )
        session.add(revision)
        await session.flush()
        deployment.current_revision_id = revision.id
    return deployment.id


async def _add_version(
    session: Any, tenant_id: UUID, base_id: UUID, name: str, digest: str
) -> UUID:
    adapter = Adapter(id=uuid7(), tenant_id=tenant_id, name=name, base_model_id=base_id)
    session.add(adapter)
    await session.flush()
    version = AdapterVersion(
        id=uuid7(),
        tenant_id=tenant_id,
        adapter_id=adapter.id,
        version=1,
        digest=digest,
        status="ready",
        size_bytes=1,
        rank=8,
        target_modules=["q_proj"],
        report={},
    )
    session.add(version)
    await session.flush()
    return version.id


def says(text_: str, *, end: bool = True, **changes: Any) -> Script:
    """A script whose tokens decode to the text, with the end token after it."""
    ids = tiny_model.ids_of(text_) + ([2] if end else [])
    return Script(token_ids=ids, **changes)
