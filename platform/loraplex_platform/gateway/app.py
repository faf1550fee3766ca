"""The data plane's ASGI app, put together from its parts; no sockets, no signals."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import structlog
from fastapi import APIRouter, FastAPI
from starlette.routing import BaseRoute

import loraplex_platform
from loraplex_platform.db.session import DatabaseUnavailableError, SessionFactory, open_database
from loraplex_platform.gateway import (
    completions,
    docs,
    error_handlers,
    models,
    openapi,
    operations,
    queries,
)
from loraplex_platform.gateway.admissions import Admissions
from loraplex_platform.gateway.context import Gateway
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.gateway.failpoints import Failpoints
from loraplex_platform.gateway.idempotency import Retries
from loraplex_platform.gateway.metrics import GatewayMetrics
from loraplex_platform.gateway.middleware import BodyLimit, RequestContext
from loraplex_platform.gateway.pump_supervisor import PumpSupervisor
from loraplex_platform.gateway.routing import Router
from loraplex_platform.gateway.spool import Spool
from loraplex_platform.gateway.tokenization import BaseTokenizer, ModelTexts
from loraplex_platform.quotas.refusal_log import RefusalLog
from loraplex_platform.settings import GatewaySettings
from loraplex_platform.users.visitor import parse_networks

log = structlog.get_logger(__name__)

_HEARTBEAT_S = 5.0
_GATEWAY_GONE_S = 15.0  # without a heartbeat


@functools.cache
def _routes() -> list[BaseRoute]:
    """All but the direct ones, once for all apps of a process: what FastAPI works out of them is costly."""
    root = APIRouter()
    for part in (completions, models, operations, docs):
        root.include_router(part.router)
    return root.routes


def create_app(gateway: Gateway) -> FastAPI:
    """The app over a running gateway."""
    app = FastAPI(
        title="Loraplex",
        version=getattr(loraplex_platform, "__version__", "0.1.0"),
        description="OpenAI-compatible completions from one base model and your LoRA adapters.",
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; ours is docs.py
        redoc_url=None,
        redirect_slashes=False,  # a redirect would carry the key to wherever it points
        routes=[*completions.direct_routes(), *_routes()],
    )
    app.state.gateway = gateway
    error_handlers.install(app)
    app.add_middleware(BodyLimit, max_bytes=gateway.settings.max_body_bytes)
    app.add_middleware(  # the outermost: added last
        RequestContext, metrics=gateway.metrics, failpoints=gateway.failpoints
    )
    app.openapi = lambda: openapi.document(app)  # type: ignore[method-assign] # FastAPI's own way
    return app


@contextlib.asynccontextmanager
async def open_gateway(settings: GatewaySettings) -> AsyncIterator[Gateway]:
    """Everything a gateway needs, running; what is still in flight at the end is ended and settled.

    Raises:
        ModelFolderError: the base model's folder cannot be served.
        SpoolFolderError: the spool's folder cannot be written.
        ValueError: LORAPLEX_GATEWAY_TRUSTED_PROXIES is no list of networks.
    """
    metrics = GatewayMetrics()
    tokenizer = BaseTokenizer(ModelTexts.read(settings.model_dir), tool_format=settings.tool_format)
    gateway_id = f"{settings.gateway_id}-{uuid.uuid4().hex[:12]}"
    redis_url = None if settings.redis_url is None else settings.redis_url.get_secret_value()
    async with (
        open_database(settings, answer_deadline_s=settings.database_deadline_s) as database,
        open_database(settings.model_copy(update={"database_pool_size": 1})) as renewals,
        Router(
            database.sessions,
            gateway_id=gateway_id,
            redis_url=redis_url,
            curve_secret_key_file=settings.curve_secret_key_file,
        ) as router,
        Admissions.open(settings, database.sessions, metrics.registry) as admissions,
        _open_spool(settings, database.sessions, metrics) as spool,
    ):
        gateway = Gateway(
            settings=settings,
            gateway_id=gateway_id,
            sessions=database.sessions,
            router=router,
            pumps=PumpSupervisor(
                renewals.sessions, admissions.rates, lease_s=settings.request_lease_s
            ),
            retries=Retries(
                database.sessions, settings.salt_key, deadline_s=settings.database_deadline_s
            ),
            refusals=RefusalLog(database.sessions),
            spool=spool,
            tokenizer=tokenizer,
            metrics=metrics,
            failpoints=Failpoints(settings.failpoint or ""),
            admissions=admissions,
            trusted_proxies=parse_networks(settings.gateway_trusted_proxies),
        )
        tasks = [
            asyncio.create_task(gateway.pumps.renew_forever(), name="lease renewer"),
            asyncio.create_task(_heartbeat(gateway), name="gateway heartbeat"),
            asyncio.create_task(gateway.key_uses.flush_forever(database.sessions), name="key uses"),
            asyncio.create_task(gateway.refusals.run_forever(), name="refusal log"),
        ]
        if spool is not None:
            tasks.append(asyncio.create_task(spool.replay_forever(), name="spool"))
        try:
            yield gateway
        finally:
            gateway.is_draining = True
            await gateway.copying.close()
            await gateway.pumps.drain(0.0, gateway.draining_error())
            await gateway.unserved.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            tokenizer.close()


@contextlib.asynccontextmanager
async def _open_spool(
    settings: GatewaySettings, sessions: SessionFactory, metrics: GatewayMetrics
) -> AsyncIterator[Spool | None]:
    if settings.spool_dir is None:
        yield None
        return
    async with Spool(
        settings.spool_dir, sessions, metrics, max_bytes=settings.spool_max_bytes
    ) as spool:
        yield spool


async def _heartbeat(gateway: Gateway) -> None:
    started_at = datetime.now(UTC)
    while True:
        gateway.known_revisions.forget_idle()
        try:
            async with gateway.sessions.begin() as session:
                await queries.note_gateway(session, gateway.gateway_id, started_at)
                num_gateways = await queries.count_gateways(session, _GATEWAY_GONE_S)
            gateway.admissions.rates.num_gateways = max(1, num_gateways)
        except DatabaseUnavailableError as error:
            log.warning("heartbeat_failed", reason=error.message)
        except Exception as error:  # noqa: BLE001 - a lost heartbeat must not end the gateway
            log_crash("heartbeat_crashed", error)
        await asyncio.sleep(_HEARTBEAT_S)
