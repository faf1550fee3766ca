"""What the control API's handlers share, built once in the app's lifespan and passed by request.

Dependencies are coroutines also where they wait for nothing: FastAPI runs plain functions in threads, and
each change of threads costs a request more than the function.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.control.metrics import ControlMetrics
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.fleet.engines import EngineFleet
from loraplex_platform.fleet.service import CountKeeper
from loraplex_platform.gateway.failpoints import INERT, Failpoints
from loraplex_platform.outbox.relay import Relay
from loraplex_platform.playground.service import Playground
from loraplex_platform.rates.redis_client import DeadlineRedis
from loraplex_platform.registry.imports import ImportRunner
from loraplex_platform.registry.quarantine import Quarantine
from loraplex_platform.registry.service import AdapterIntake
from loraplex_platform.registry.sources.rules import ImportRules
from loraplex_platform.registry.store_watch import StoreWatch
from loraplex_platform.registry.upload_files import UploadFolders
from loraplex_platform.settings import ControlSettings
from loraplex_platform.users.oidc import OidcProvider
from loraplex_platform.users.passwords import Passwords
from loraplex_platform.users.visitor import Network
from loraplex_platform.webhooks.addresses import OwnerRules
from loraplex_platform.webhooks.signing import Vault


@dataclass(frozen=True, slots=True)
class ControlContext:
    """The process's long-lived parts."""

    settings: ControlSettings
    sessions: SessionFactory
    fleet: EngineFleet
    intake: AdapterIntake
    quarantine: Quarantine
    uploads: UploadFolders
    import_rules: ImportRules
    imports: ImportRunner
    store_watch: StoreWatch
    playground: Playground
    passwords: Passwords
    metrics: ControlMetrics
    versions: Relay  # tells gateways of changed keys, tenants and limits
    redis: DeadlineRedis | None = None  # to look at rates
    counts: CountKeeper = field(default_factory=CountKeeper)
    origins: frozenset[str] = field(default_factory=frozenset)  # may send cookie-borne writes
    trusted_proxies: tuple[Network, ...] = ()  # whose X-Forwarded-For counts
    oidc: OidcProvider | None = None
    webhook_vault: Vault = field(default_factory=lambda: Vault(None))
    webhook_rules: OwnerRules = field(default_factory=OwnerRules)
    failpoints: Failpoints = INERT


def get_context(request: Request) -> ControlContext:
    """The context of the app that serves this request."""
    context: ControlContext = request.app.state.context
    return context


async def get_session(request: Request) -> AsyncSession:
    """The request's session; its transaction is committed by the route, never by a service."""
    session: AsyncSession = request.state.session
    return session


async def _context(request: Request) -> ControlContext:
    return get_context(request)


Context = Annotated[ControlContext, Depends(_context)]
DbSession = Annotated[AsyncSession, Depends(get_session)]
