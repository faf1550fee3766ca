"""What the routes of one gateway process share."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated
from uuid import UUID

import structlog
from fastapi import Depends, Request

from loraplex_platform.db.session import DatabaseUnavailableError, SessionFactory
from loraplex_platform.errors import InvalidApiKeyError
from loraplex_platform.gateway.admissions import RATES, Admissions, RateGate, RateView
from loraplex_platform.gateway.books import Ending
from loraplex_platform.gateway.copying import Copying
from loraplex_platform.gateway.errors import AuthBackendUnavailableError, GatewayDrainingError
from loraplex_platform.gateway.failpoints import INERT, Failpoints
from loraplex_platform.gateway.idempotency import Retries
from loraplex_platform.gateway.job import Job
from loraplex_platform.gateway.metrics import GatewayMetrics
from loraplex_platform.gateway.middleware import REQUEST_UUID
from loraplex_platform.gateway.preparation import Preparer
from loraplex_platform.gateway.pump import Pump
from loraplex_platform.gateway.pump_supervisor import PumpSupervisor
from loraplex_platform.gateway.queries import KnownRevisions
from loraplex_platform.gateway.routing import RETRY_AFTER_S, Replica, Router
from loraplex_platform.gateway.spool import Spool
from loraplex_platform.gateway.tokenization import BaseTokenizer
from loraplex_platform.quotas.refusal_log import RefusalLog
from loraplex_platform.settings import GatewaySettings
from loraplex_platform.tenancy.authentication import Authenticated, require_address
from loraplex_platform.tenancy.key_uses import KeyUses
from loraplex_platform.users.visitor import Network, visitor_address


@dataclass(slots=True)
class Gateway:
    """One gateway process."""

    settings: GatewaySettings
    gateway_id: str
    sessions: SessionFactory
    router: Router
    pumps: PumpSupervisor
    retries: Retries
    refusals: RefusalLog
    spool: Spool | None  # None: without a folder for one
    admissions: Admissions
    tokenizer: BaseTokenizer
    metrics: GatewayMetrics
    key_uses: KeyUses = field(default_factory=KeyUses)
    is_draining: bool = field(default=False)
    trusted_proxies: tuple[Network, ...] = ()  # whose X-Forwarded-For names the client
    failpoints: Failpoints = INERT
    pump: type[Pump] = Pump  # what runs a request; a profile's keeps no books
    known_revisions: KnownRevisions = field(default_factory=KnownRevisions)
    preparer: Preparer = field(init=False)
    copying: Copying = field(init=False)

    def __post_init__(self) -> None:
        self.preparer = Preparer(self.router, self.tokenizer, self.settings.default_max_tokens)
        self.copying = Copying(self)

    def salt_of(self, tenant_id: UUID) -> bytes:
        """What keeps a tenant's cached blocks apart from everybody else's; clients never choose it."""
        key = self.settings.salt_key.get_secret_value().encode()
        return hmac.digest(key, tenant_id.bytes, "sha256")

    def make_pump(
        self,
        job: Job,
        replica: Replica,
        *,
        metrics: GatewayMetrics,
        on_closed: Callable[[Pump, Ending], None],
        gate: RateGate | None = None,
    ) -> Pump:
        """What runs a job, to be started."""
        return self.pump(
            job=job,
            replica=replica,
            owner=self.gateway_id,
            sessions=self.sessions,
            router=self.router,
            retries=self.retries,
            refusals=self.refusals,
            spool=self.spool,
            database_deadline_s=self.settings.database_deadline_s,
            token_bytes=self.tokenizer.token_bytes,
            metrics=metrics,
            failpoints=self.failpoints,
            lease_s=self.settings.request_lease_s,
            gate=gate,
            on_closed=on_closed,
        )

    def draining_error(self) -> GatewayDrainingError:
        """What new requests hear while this process shuts down."""
        return GatewayDrainingError(
            "This gateway is restarting; try again.", retry_after_s=RETRY_AFTER_S
        )

    def address_of(self, request: Request) -> str:
        """Where a request comes from, behind our own proxies; empty on a unix socket."""
        peer = "" if request.client is None else request.client.host
        forwarded = request.headers.getlist("x-forwarded-for")
        return visitor_address(peer, forwarded, self.trusted_proxies)

    async def authenticate(self, request: Request, *, is_fresh: bool = False) -> Authenticated:
        """Whoever holds the key in `Authorization: Bearer`; no other place is looked at.

        Args:
            request: of the data plane.
            is_fresh: whether what is remembered of the key will not do.

        Raises:
            InvalidApiKeyError and its kinds: 401.  TenantSuspendedError: 403.
            TooManyAttemptsError: 429, too many unknown keys from this address.
            AuthBackendUnavailableError: we cannot tell, so it is a 503.
        """
        values = request.headers.getlist("authorization")
        scheme, _, secret = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not secret.strip():
            raise InvalidApiKeyError("No API key. Send it as 'Authorization: Bearer <key>', once.")
        try:
            return await self.admissions.keys.find(
                secret.strip(), self.address_of(request), is_fresh=is_fresh
            )
        except DatabaseUnavailableError as error:
            raise AuthBackendUnavailableError(
                "Keys cannot be checked right now; try again.", retry_after_s=RETRY_AFTER_S
            ) from error


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves this request."""
    gateway: Gateway = request.app.state.gateway
    return gateway


async def find_caller(request: Request, *, is_fresh: bool = False) -> Authenticated:
    """The authenticated caller; refuses everyone while draining. `is_fresh`: see `authenticate`."""
    gateway = gateway_of(request)
    if gateway.is_draining:
        raise gateway.draining_error()
    request.scope.pop(RATES, None)
    caller = await gateway.authenticate(request, is_fresh=is_fresh)
    require_address(caller, gateway.address_of(request))
    gateway.key_uses.note(caller.key_id)
    structlog.contextvars.bind_contextvars(tenant_id=str(caller.tenant_id))
    request.scope[RATES] = RateView(gateway.admissions, caller, request.scope[REQUEST_UUID])
    return caller


async def caller_of(request: Request) -> Authenticated:
    """The caller as remembered: whatever it asks for is admitted later, which compares versions."""
    return await find_caller(request)


async def confirmed_caller_of(request: Request) -> Authenticated:
    """The caller of what needs no admission: the versions are compared here."""
    caller = await find_caller(request)
    view: RateView = request.scope[RATES]
    return await find_caller(request, is_fresh=True) if await view.is_stale() else caller


ThisGateway = Annotated[Gateway, Depends(gateway_of)]
Caller = Annotated[Authenticated, Depends(caller_of)]
ConfirmedCaller = Annotated[Authenticated, Depends(confirmed_caller_of)]
