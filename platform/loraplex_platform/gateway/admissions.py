"""Who calls, which limits hold for the call, and whether it may pass: a gateway's front door.

Callers and limits are remembered for a few seconds; the admission compares their versions with what
Redis knows, and asks again when they are old. `RateGate` is one request's way through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from loraplex_platform.db.deadline import within
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import UnavailableError
from loraplex_platform.quotas.effective import effective_limits
from loraplex_platform.quotas.records import EffectiveLimits, LimitScopes
from loraplex_platform.rates.admission import Admission, Claim, TokenUse, rate_headers
from loraplex_platform.rates.limiter import RateLimiter
from loraplex_platform.rates.limits_cache import LimitsCache
from loraplex_platform.rates.queries import Place, running_places
from loraplex_platform.rates.redis_client import DeadlineRedis, RedisMetrics
from loraplex_platform.tenancy.authentication import Authenticated, authenticate
from loraplex_platform.tenancy.key_cache import KeyCache
from loraplex_platform.tenancy.unknown_keys import UnknownKeys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from prometheus_client import CollectorRegistry

    from loraplex_platform.gateway.queries import ServedModel
    from loraplex_platform.settings import GatewaySettings

HEADERS_WAIT_S = 0.25  # an answer that is no admitted one's does without them rather than wait
RATES = "loraplex.rates"  # in the ASGI scope: a `RateGate` or a `RateView`


@dataclass(frozen=True, slots=True)
class Admissions:
    """The parts."""

    keys: KeyCache
    limits: LimitsCache
    rates: RateLimiter

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: GatewaySettings, sessions: SessionFactory, registry: CollectorRegistry
    ) -> AsyncIterator[Admissions]:
        """Over one database, and one Redis if there is one."""

        async def find_caller(secret: str) -> Authenticated:
            finding = authenticate(sessions, settings.key_pepper, secret)
            return await within(settings.database_deadline_s, finding)

        async def find_limits(scopes: LimitScopes) -> EffectiveLimits:
            return await within(settings.database_deadline_s, effective_limits(sessions, scopes))

        async def find_running(owner: UUID | None) -> Sequence[Place]:
            async with sessions() as session:
                return await running_places(session, owner)

        url = settings.redis_url
        redis = None
        if url is not None:
            redis = DeadlineRedis(url.get_secret_value(), RedisMetrics(registry))
        try:
            yield cls(
                KeyCache(
                    find_caller, registry, unknown=UnknownKeys(redis), ttl_s=settings.key_cache_s
                ),
                LimitsCache(find_limits, ttl_s=settings.key_cache_s),
                RateLimiter(redis, find_running, registry),
            )
        finally:
            if redis is not None:
                await redis.aclose()

    async def claim(
        self,
        caller: Authenticated,
        request_id: UUID,
        model: ServedModel | None = None,
        *,
        prompt_tokens: int = 0,
        max_completion_tokens: int = 0,
        is_fresh: bool = False,
    ) -> Claim:
        """What a caller's request asks of the limits. `model` None: it is for no model."""
        scopes = LimitScopes(
            tenant_id=caller.tenant_id,
            key_id=caller.key_id,
            project_id=caller.project_id,
            deployment_id=None if model is None else model.deployment_id,
            adapter_id=None if model is None else model.revision.adapter_id,
        )
        return Claim(
            request_id=request_id,
            tenant_id=caller.tenant_id,
            key_id=caller.key_id,
            key_version=caller.key_version,
            tenant_version=caller.tenant_version,
            limits=await self.limits.find(scopes, is_fresh=is_fresh),
            prompt_tokens=prompt_tokens,
            max_completion_tokens=max_completion_tokens,
        )


@dataclass(slots=True)
class RateView:
    """For answers that are not admitted (models, errors): how the caller's limits stand."""

    admissions: Admissions
    caller: Authenticated
    request_id: UUID
    _headers: dict[str, str] | None = field(default=None, init=False)

    async def is_stale(self) -> bool:
        """Whether Redis knows of a newer version of the caller."""
        claim = await self.admissions.claim(self.caller, self.request_id)
        verdict, views = await self.admissions.rates.look(claim)
        self._headers = rate_headers(views)
        return verdict == "STALE"

    async def headers(self) -> dict[str, str]:
        """For the answer, which goes out in any case."""
        if self._headers is None:
            with contextlib.suppress(UnavailableError):
                await within(HEADERS_WAIT_S, self.is_stale())
        return self._headers or {}


@dataclass(slots=True)
class RateGate:
    """One request's way past the rate limits: in once, out once."""

    rates: RateLimiter
    claim: Claim
    reload: Callable[[], Awaitable[Claim]]
    admission: Admission | None = None

    async def enter(self) -> None:
        """Take the request's share of all its limits.

        Raises:
            RateLimitedError, RatesUnavailableError: it may not pass now.
            PlatformError: its caller may not call any more.
        """
        self.admission = await self.rates.admit(self.claim, self.reload)

    async def leave(self, used: TokenUse | None) -> None:
        """Give back what was not used; None: all of it. A second call does nothing."""
        if self.admission is not None:
            await self.rates.release(self.admission, used)

    async def headers(self) -> dict[str, str]:
        """For the answer: the limits as the admission saw them, or as they are."""
        if self.admission is not None:
            return self.admission.headers
        _, views = await self.rates.look(self.claim)
        return rate_headers(views)
