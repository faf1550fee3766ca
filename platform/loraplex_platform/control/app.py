"""The control API as an ASGI app: its parts, their lifetime, its routes."""

from __future__ import annotations

import asyncio
import functools
import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import urlsplit

import httpx
import structlog
from fastapi import APIRouter, FastAPI
from loraplex_engine.artifact import AdapterStore
from starlette.routing import BaseRoute

from loraplex_platform.alerts.routes import router as alerts_router
from loraplex_platform.audit.routes import router as audit_router
from loraplex_platform.billing.routes import routers as billing_routers
from loraplex_platform.control import bootstrap, docs, health, housekeeping, login, oidc_login
from loraplex_platform.control.context import ControlContext
from loraplex_platform.control.errors import install_error_handlers
from loraplex_platform.control.metrics import ControlMetrics
from loraplex_platform.control.middleware import RequestMiddleware
from loraplex_platform.db.session import open_database
from loraplex_platform.erasure.routes import router as erasure_router
from loraplex_platform.errors import PlatformError
from loraplex_platform.evals.routes import routers as eval_routers
from loraplex_platform.fleet.engines import EngineFleet
from loraplex_platform.fleet.residency_routes import router as residency_router
from loraplex_platform.fleet.routes import router as fleet_router
from loraplex_platform.gateway.failpoints import CONTROL_POINTS, Failpoints
from loraplex_platform.gateway.routing import Router
from loraplex_platform.gateway.tokenization import BaseTokenizer, ModelFolderError, ModelTexts
from loraplex_platform.members import routes as members
from loraplex_platform.metering.routes import router as metering_router
from loraplex_platform.outbox.relay import Relay
from loraplex_platform.playground.routes import router as playground_router
from loraplex_platform.playground.service import Playground
from loraplex_platform.quotas import routes as quotas
from loraplex_platform.rates.redis_client import DeadlineRedis, RedisMetrics
from loraplex_platform.rates.versions import version_topic
from loraplex_platform.registry import alias_routes as aliases
from loraplex_platform.registry import deployment_routes as deployments
from loraplex_platform.registry import import_routes as imports
from loraplex_platform.registry import quarantine as quarantines
from loraplex_platform.registry import routes as registry
from loraplex_platform.registry import upload_routes as uploads
from loraplex_platform.registry import upload_sessions
from loraplex_platform.registry.base_model import BaseModelError
from loraplex_platform.registry.imports import ImportRunner, ImportTimes
from loraplex_platform.registry.probe import Prober
from loraplex_platform.registry.service import AdapterIntake
from loraplex_platform.registry.sources.base import Source
from loraplex_platform.registry.sources.bucket import BucketSource
from loraplex_platform.registry.sources.hub import HubSource
from loraplex_platform.registry.sources.local import FolderSource
from loraplex_platform.registry.sources.rules import ImportRules, parse_hub
from loraplex_platform.registry.store_watch import StoreWatch
from loraplex_platform.registry.upload import MULTIPART_OVERHEAD_BYTES
from loraplex_platform.registry.upload_files import UploadFolders
from loraplex_platform.registry.validation import Validator
from loraplex_platform.retention.routes import router as retention_router
from loraplex_platform.rollouts.routes import routers as rollout_routers
from loraplex_platform.settings import ControlSettings
from loraplex_platform.tenancy import key_routes as keys
from loraplex_platform.tenancy import routes as tenancy
from loraplex_platform.users import routes as users
from loraplex_platform.users.oidc import OidcProvider, is_secure
from loraplex_platform.users.passwords import Passwords
from loraplex_platform.users.visitor import parse_networks
from loraplex_platform.webhooks import routes as webhooks
from loraplex_platform.webhooks.addresses import AddressRules, OwnerRules, parse_trusted
from loraplex_platform.webhooks.signing import Vault

log = structlog.get_logger(__name__)

_UPLOAD_PATH = re.compile(
    r"/admin/v1/tenants/[^/]+/(?:adapters/?|adapter-uploads/[^/]+/files/[^/]+)"
)

_DESCRIPTION = (
    "Administer tenants, API keys, adapters and deployments; read usage, money, load and the "
    "invariants that prove them. Tenants' own requests go to the gateway, not here."
)


@functools.cache
def _routes() -> list[BaseRoute]:
    """Every route, once for all apps of a process.

    FastAPI works out what a route takes and gives anew for each router that includes it, at its first
    request: a second of work for all of them, which tests would pay for each of their apps.
    """
    root = APIRouter()
    for router in (
        health.router,
        docs.router,
        login.router,
        oidc_login.router,
        tenancy.router,
        tenancy.projects_router,
        keys.router,
        members.router,
        members.invitations_router,
        members.accept_router,
        registry.base_models_router,
        registry.adapters_router,
        registry.uploads_router,
        uploads.router,
        uploads.bytes_router,
        imports.router,
        imports.jobs_router,
        registry.builds_router,
        aliases.router,
        aliases.versions_router,
        deployments.router,
        deployments.platform_router,
        deployments.pins_router,
        quotas.router,
        quotas.scheduling_router,
        quotas.explain_router,
        playground_router,
        metering_router,
        *billing_routers,
        audit_router,
        alerts_router,
        retention_router,
        erasure_router,
        webhooks.tenant_router,
        webhooks.platform_router,
        *eval_routers,
        *rollout_routers,
        fleet_router,
        residency_router,
        users.router,
        users.login_router,
        users.sessions_router,
    ):
        root.include_router(router)
    return root.routes


def create_app(settings: ControlSettings, *, passwords: Passwords | None = None) -> FastAPI:
    """The app; its lifespan opens the database, registers the base model and finds the engines.

    Args:
        settings: of this process.
        passwords: how passwords are hashed; tests pass cheap parameters.
    """
    metrics = ControlMetrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            try:
                context = await _open(stack, settings, metrics, passwords or Passwords())
            except (BaseModelError, ModelFolderError, PlatformError, ValueError) as error:
                log.error("control_cannot_start", reason=str(error))
                app.state.has_told_why = True
                raise
            app.state.context = context
            yield

    app = FastAPI(
        title="Loraplex control API",
        description=_DESCRIPTION,
        version=_version(),
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads scripts from elsewhere; ours is docs.py
        redoc_url=None,
        redirect_slashes=False,
        routes=list(_routes()),
    )
    app.add_middleware(
        RequestMiddleware,
        metrics=metrics,
        max_upload_bytes=settings.max_adapter_bytes + MULTIPART_OVERHEAD_BYTES,
        is_upload=lambda path: _UPLOAD_PATH.fullmatch(path) is not None,
        form_targets=(_origin(settings.console_url),),
    )
    install_error_handlers(app)
    return app


async def _open(
    stack: AsyncExitStack, settings: ControlSettings, metrics: ControlMetrics, passwords: Passwords
) -> ControlContext:
    sessions = (await stack.enter_async_context(open_database(settings))).sessions
    base_model = await bootstrap.ensure_base_model(sessions, settings)
    if settings.admin_email is not None and settings.admin_password is not None:
        await bootstrap.ensure_admin_user(
            sessions, passwords, settings.admin_email, settings.admin_password
        )
    client_id = f"control-{secrets.token_hex(4)}"
    redis_url = None if settings.redis_url is None else settings.redis_url.get_secret_value()
    fleet = EngineFleet(
        Router(
            sessions,
            gateway_id=client_id,
            redis_url=redis_url,
            curve_secret_key_file=settings.curve_secret_key_file,
        )
    )
    await stack.enter_async_context(fleet.running())
    texts = await asyncio.to_thread(ModelTexts.read, settings.model_dir)
    tokenizer = await asyncio.to_thread(BaseTokenizer, texts)
    stack.callback(tokenizer.close)
    # trust_env off: a proxy of the environment must never see the conversations or the keys.
    client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
    store = AdapterStore(settings.store_url)
    store_watch = StoreWatch(store, metrics.store_up)
    await stack.enter_async_context(store_watch.running())
    intake = AdapterIntake(
        sessions,
        base_model,
        Validator(
            settings.model_dir / "config.json",
            max_rank=settings.max_adapter_rank,
            max_bytes=settings.max_adapter_bytes,
            memory_bytes=settings.validation_memory_bytes,
            timeout_s=settings.validation_timeout_s,
        ),
        store,
        Prober(sessions, fleet, tokenizer, owner=client_id),
    )
    root = settings.quarantine_dir or quarantines.default_root(settings.store_url)
    folders = UploadFolders(root)
    try:
        quarantine = stack.enter_context(quarantines.Quarantine.opened(root))
    except OSError as error:
        raise ValueError(
            f"LORAPLEX_QUARANTINE_DIR: uploads cannot be kept there meanwhile ({error})"
        ) from error
    rules = ImportRules.parse(
        settings.import_sources, has_hub_token=settings.import_hub_token is not None
    )
    runner = ImportRunner(
        sessions,
        intake,
        quarantine,
        rules,
        _source_opener(settings),
        max_model_bytes=settings.max_adapter_bytes,
        times=ImportTimes(transfer_s=settings.import_timeout_s),
    )
    await stack.enter_async_context(runner.running())

    async def sweep() -> None:
        await intake.sweep()
        await upload_sessions.sweep(sessions, folders)
        await runner.sweep()

    await stack.enter_async_context(housekeeping.running(sessions, sweep))
    redis = None
    if redis_url is not None:
        redis = DeadlineRedis(redis_url, RedisMetrics(metrics.registry))
        stack.push_async_callback(redis.aclose)
    playground = Playground(sessions, client, settings.gateway_url, settings.key_pepper)
    stack.push_async_callback(playground.close)
    return ControlContext(
        settings=settings,
        sessions=sessions,
        fleet=fleet,
        intake=intake,
        quarantine=quarantine,
        uploads=folders,
        import_rules=rules,
        imports=runner,
        store_watch=store_watch,
        playground=playground,
        passwords=passwords,
        metrics=metrics,
        versions=Relay(sessions, version_topic(redis)),
        redis=redis,
        origins=frozenset({_origin(settings.console_url)}),
        trusted_proxies=parse_networks(settings.control_trusted_proxies),
        oidc=_oidc(settings, client),
        webhook_vault=Vault(settings.webhook_key, settings.webhook_old_key),
        webhook_rules=OwnerRules(operators=AddressRules(parse_trusted(settings.webhook_networks))),
        failpoints=Failpoints(settings.failpoint or "", CONTROL_POINTS),
    )


def _source_opener(settings: ControlSettings) -> Callable[[str, str], Source]:
    """What reads a source of each kind.

    Raises:
        ValueError: the hub's address is not safe to speak to.
    """
    hub_url = settings.import_hub_url
    if not is_secure(hub_url):
        raise ValueError("LORAPLEX_IMPORT_HUB_URL: it must be an https URL.")
    token = settings.import_hub_token
    hosts = [host.strip() for host in settings.import_hub_hosts.split(",") if host.strip()]

    def open_source(source: str, root: str) -> Source:
        if source.startswith("file:"):
            return FolderSource(source, root)
        if source.startswith("hf:"):
            secret = None if token is None else token.get_secret_value()
            return HubSource(parse_hub(source), hub_url=hub_url, hosts=hosts, token=secret)
        return BucketSource(source)

    return open_source


def _oidc(settings: ControlSettings, client: httpx.AsyncClient) -> OidcProvider | None:
    if settings.oidc_issuer is None:
        return None
    if not is_secure(settings.oidc_issuer):
        raise ValueError("LORAPLEX_OIDC_ISSUER: it must be an https URL.")
    return OidcProvider(
        settings.oidc_issuer,
        settings.oidc_client_id or "",
        settings.oidc_client_secret,
        f"{(settings.control_public_url or '').rstrip('/')}{oidc_login.PATH}/callback",
        client,
    )


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _version() -> str:
    try:
        return version("loraplex")
    except PackageNotFoundError:
        return "0"
