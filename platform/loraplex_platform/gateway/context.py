"""What the routes of one gateway process share."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Annotated
from uuid import UUID

import structlog
from fastapi import Depends, Request

from loraplex_platform.db.session import DatabaseUnavailableError, SessionFactory
from loraplex_platform.errors import InvalidApiKeyError
from loraplex_platform.gateway.errors import AuthBackendUnavailableError, GatewayDrainingError
from loraplex_platform.gateway.idempotency import Retries
from loraplex_platform.gateway.metrics import GatewayMetrics
from loraplex_platform.gateway.pump import Pump
from loraplex_platform.gateway.pump_supervisor import PumpSupervisor
from loraplex_platform.gateway.routing import RETRY_AFTER_S, Router
from loraplex_platform.gateway.tokenization import BaseTokenizer
from loraplex_platform.settings import GatewaySettings
from loraplex_platform.tenancy.authentication import Authenticated, authenticate


@dataclass(slots=True)
class Gateway:
    """One gateway process."""

    settings: GatewaySettings
    gateway_id: str
    sessions: SessionFactory
    router: Router
    pumps: PumpSupervisor
    retries: Retries
    tokenizer: BaseTokenizer
    metrics: GatewayMetrics
    is_draining: bool = field(default=False)
    pump: type[Pump] = Pump  # what runs a request; a profile's keeps no books

    def salt_of(self, tenant_id: UUID) -> bytes:
        """What keeps a tenant's cached blocks apart from everybody else's; clients never choose it."""
        key = self.settings.salt_key.get_secret_value().encode()
        return hmac.new(key, tenant_id.bytes, hashlib.sha256).digest()

    def draining_error(self) -> GatewayDrainingError:
        """What new requests hear while this process shuts down."""
        return GatewayDrainingError(
            "This gateway is restarting; try again.", retry_after_s=RETRY_AFTER_S
        )

    async def authenticate(self, request: Request) -> Authenticated:
        """Whoever holds the key in `Authorization: Bearer`; no other place is looked at.

        Raises:
            InvalidApiKeyError and its kinds: 401.  TenantSuspendedError: 403.
            AuthBackendUnavailableError: we cannot tell, so it is a 503.
        """
        values = request.headers.getlist("authorization")
        scheme, _, secret = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not secret.strip():
            raise InvalidApiKeyError("No API key. Send it as 'Authorization: Bearer <key>', once.")
        try:
            return await authenticate(self.sessions, self.settings.key_pepper, secret.strip())
        except DatabaseUnavailableError as error:
            raise AuthBackendUnavailableError(
                "Keys cannot be checked right now; try again.", retry_after_s=RETRY_AFTER_S
            ) from error


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves this request."""
    gateway: Gateway = request.app.state.gateway
    return gateway


async def caller_of(request: Request) -> Authenticated:
    """The authenticated caller; refuses everyone while draining."""
    gateway = gateway_of(request)
    if gateway.is_draining:
        raise gateway.draining_error()
    caller = await gateway.authenticate(request)
    structlog.contextvars.bind_contextvars(tenant_id=str(caller.tenant_id))
    return caller


ThisGateway = Annotated[Gateway, Depends(gateway_of)]
Caller = Annotated[Authenticated, Depends(caller_of)]
