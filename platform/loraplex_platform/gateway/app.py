"""The data plane's ASGI app, put together from its parts; no sockets, no signals."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import structlog
from fastapi import FastAPI

import loraplex_platform
from loraplex_platform.db.session import DatabaseUnavailableError, open_database
from loraplex_platform.gateway import (
    completions,
    docs,
    error_handlers,
    models,
    openapi,
    operations,
    queries,
)
from loraplex_platform.gateway.context import Gateway
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.gateway.idempotency import Retries
from loraplex_platform.gateway.metrics import GatewayMetrics
from loraplex_platform.gateway.middleware import BodyLimit, RequestContext
from loraplex_platform.gateway.pump_supervisor import PumpSupervisor
from loraplex_platform.gateway.routing import Router
from loraplex_platform.gateway.tokenization import BaseTokenizer, ModelTexts
from loraplex_platform.settings import GatewaySettings

log = structlog.get_logger(__name__)

_HEARTBEAT_S = 5.0


def create_app(gateway: Gateway) -> FastAPI:
    """The app over a running gateway."""
    app = FastAPI(
        title="Loraplex",
        version=getattr(loraplex_platform, "__version__", "0.1.0"),
        description="OpenAI-compatible completions from one base model and your LoRA adapters.",
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; ours is docs.py
        redoc_url=None,
        redirect_slashes=False,  # a redirect would carry the key to wherever it points
    )
    app.state.gateway = gateway
    error_handlers.install(app)
    app.include_router(completions.router)
    app.include_router(models.router)
    app.include_router(operations.router)
    app.include_router(docs.router)
    app.add_middleware(BodyLimit, max_bytes=gateway.settings.max_body_bytes)
    app.add_middleware(RequestContext, metrics=gateway.metrics)  # the outermost: added last
    app.openapi = lambda: openapi.document(app)  # type: ignore[method-assign] # FastAPI's own way
    return app


@contextlib.asynccontextmanager
async def open_gateway(settings: GatewaySettings) -> AsyncIterator[Gateway]:
    """Everything a gateway needs, running; what is still in flight at the end is ended and settled.

    Raises:
        ModelFolderError: the base model's folder cannot be served.
    """
    tokenizer = BaseTokenizer(ModelTexts.read(settings.model_dir), tool_format=settings.tool_format)
    gateway_id = settings.gateway_id or f"gw-{uuid.uuid4().hex[:12]}"
    redis_url = None if settings.redis_url is None else settings.redis_url.get_secret_value()
    async with (
        open_database(settings) as database,
        open_database(settings.model_copy(update={"database_pool_size": 1})) as renewals,
        Router(
            database.sessions,
            gateway_id=gateway_id,
            redis_url=redis_url,
            curve_secret_key_file=settings.curve_secret_key_file,
        ) as router,
    ):
        gateway = Gateway(
            settings=settings,
            gateway_id=gateway_id,
            sessions=database.sessions,
            router=router,
            pumps=PumpSupervisor(renewals.sessions),
            retries=Retries(database.sessions, settings.salt_key),
            tokenizer=tokenizer,
            metrics=GatewayMetrics(),
        )
        tasks = [
            asyncio.create_task(gateway.pumps.renew_forever(), name="lease renewer"),
            asyncio.create_task(_heartbeat(gateway), name="gateway heartbeat"),
        ]
        try:
            yield gateway
        finally:
            gateway.is_draining = True
            await gateway.pumps.drain(0.0, gateway.draining_error())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            tokenizer.close()


async def _heartbeat(gateway: Gateway) -> None:
    started_at = datetime.now(UTC)
    while True:
        try:
            async with gateway.sessions.begin() as session:
                await queries.note_gateway(session, gateway.gateway_id, started_at)
        except DatabaseUnavailableError as error:
            log.warning("heartbeat_failed", reason=error.message)
        except Exception as error:  # noqa: BLE001 - a lost heartbeat must not end the gateway
            log_crash("heartbeat_crashed", error)
        await asyncio.sleep(_HEARTBEAT_S)
