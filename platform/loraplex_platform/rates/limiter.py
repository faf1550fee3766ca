"""Admits requests by their rates: asks Redis, and decides alone when it does not answer.

A request is admitted in one script per owner of limits: the tenant's own first, then those that tenants
share. When the second refuses, the first is given back, so a refusal takes nothing. The same script
compares versions: a key that was revoked or changed is looked up again before anything is taken, and so are
limits. That of the limits that tenants share lies on another server of a cluster: who has none of
them asks for it in the same write.

| Redis | what happens |
|---|---|
| answers | all limits are exact, over all gateways |
| another run than before, or emptied | its places are put back from Postgres, then it is asked again |
| late or gone | each limit as its `fail_mode` says; the answer carries `x-loraplex-rate-limits: degraded` |

What Redis is asked for and does not answer is forgotten there by itself: places end with their lease.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from uuid import UUID

import structlog
from prometheus_client import CollectorRegistry, Counter

from loraplex_platform.errors import UnavailableError
from loraplex_platform.quotas.records import RateLimit
from loraplex_platform.rates import keys, scripts
from loraplex_platform.rates.admission import (
    Admission,
    Claim,
    LimitView,
    RateLimitedError,
    RatesUnavailableError,
    Share,
    TokenUse,
)
from loraplex_platform.rates.local import LocalRates
from loraplex_platform.rates.queries import Place
from loraplex_platform.rates.redis_client import DeadlineRedis, RedisAwayError
from loraplex_platform.rates.redis_pipe import Argument

log = structlog.get_logger(__name__)

LEASE_S = 20.0  # of a place; gateways renew every 5 s
# An admission is remembered until its request is over; where nothing will be given back (as a rule),
# only for as long as it may be asked for twice.
ADMISSION_KEPT_S = 1200.0
ADMISSION_KEPT_BRIEFLY_S = 60.0
EPOCH_KEPT_S = 86_400.0
REBUILD_LOCK_S = 0.5
REBUILD_DEADLINE_S = 0.5
REBUILD_POLL_S = 0.02
MAX_ROUNDS = 12  # of asking again because versions or the epoch were old
RENEW_BATCH = 200
RETRY_AFTER_S = 2.0
_LIMITS_FIELD = "l"  # of `keys.versions`

Reload = Callable[[], Awaitable[Claim]]
Running = Callable[[UUID | None], Awaitable[Sequence[Place]]]


class RateLimiter:
    """One gateway's.

    Args:
        redis: None: every request is decided here alone, as if it did not answer.
        running: the places of requests that run now, from Postgres, see `queries.running_places`.
    """

    def __init__(
        self,
        redis: DeadlineRedis | None,
        running: Running,
        registry: CollectorRegistry,
        *,
        local: LocalRates | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        self.num_gateways = 1  # alive now; each enforces its part when it is alone
        self._redis = redis
        self._running = running
        self._local = local or LocalRates()
        self._lease_ms = round(lease_s * 1000)
        self._decisions = Counter(
            "loraplex:rate_decisions",
            "Requests by verdict: admitted, refused; and how: redis, local.",
            ["verdict", "how"],
            registry=registry,
        )
        self._refusals = Counter(
            "loraplex:rate_refusals",
            "Requests refused by a rate limit.",
            ["scope", "metric"],
            registry=registry,
        )
        self._rebuilds = Counter(
            "loraplex:rate_rebuilds",
            "How often the places of a tenant were put back into Redis.",
            registry=registry,
        )

    async def admit(self, claim: Claim, reload: Reload) -> Admission:
        """Take one request's share of all its limits, or nothing.

        Args:
            claim: made from what this gateway remembers of the caller.
            reload: looks the caller up again; called when Redis knows of a newer version.

        Raises:
            RateLimitedError: a limit does not allow it.
            RatesUnavailableError: a limit that fails closed cannot be checked.
            PlatformError: what `reload` raises: the key is no longer good.
        """
        admission = Admission(claim)
        try:
            await self._admit_in(await self._connected(), admission, reload)
        except RedisAwayError:
            await self._admit_alone(admission)
        except RateLimitedError as error:
            await self._give_back(admission)
            self._count_refusal(error, "redis")
            raise
        except BaseException:
            await self._give_back(admission)
            raise
        self._local.hold(admission.claim)
        self._decisions.labels("admitted", "local" if admission.is_degraded else "redis").inc()
        return admission

    async def look(self, claim: Claim) -> tuple[str, list[LimitView]]:
        """How its own limits stand, taking nothing; those that tenants share are shown to nobody.

        Returns:
            STALE if Redis knows of newer versions than the claim's, AWAY if it cannot be asked, else
            OK; and the limits.
        """
        own = next(iter(claim.shares()))
        try:
            verdict, views = await self._ask(await self._connected(), claim, own, "look")
        except RedisAwayError:
            return "AWAY", []
        return ("STALE", []) if verdict == "STALE" else ("OK", views)

    async def release(self, admission: Admission, used: TokenUse | None) -> None:
        """Give back its places and what it did not use. Never raises; a second call does nothing.

        Args:
            used: None: it was not run, so all of it.
        """
        if admission.is_released:
            return
        admission.is_released = True
        self._local.release(admission.claim, used)
        await self._give_back(admission, used)

    async def renew(self, admissions: Iterable[Admission]) -> None:
        """Extend the places of requests that run. Best effort: missed once, the next round does it."""
        if self._redis is None:
            return
        held: dict[str, list[tuple[UUID, list[str]]]] = defaultdict(list)
        for admission in admissions:
            for share in admission.shares:
                if share.place_keys and not admission.is_released:
                    held[share.tag].append((admission.claim.request_id, share.place_keys))
        batches = [
            (tag, requests[start : start + RENEW_BATCH])
            for tag, requests in held.items()
            for start in range(0, len(requests), RENEW_BATCH)
        ]
        await asyncio.gather(*(self._renew_batch(self._redis, *batch) for batch in batches))

    async def _renew_batch(
        self, redis: DeadlineRedis, tag: str, batch: list[tuple[UUID, list[str]]]
    ) -> None:
        names = [n for id_, places in batch for n in (keys.admission(tag, id_), *places)]
        flat: list[Argument] = [v for id_, places in batch for v in (id_.hex, len(places))]
        with contextlib.suppress(RedisAwayError):
            await redis.run(scripts.RENEW, names, [self._lease_ms, *flat])

    # ------------------------------------------------------------------ with Redis

    async def _connected(self) -> DeadlineRedis:
        if self._redis is None:
            raise RedisAwayError("There is no Redis.")
        if not self._redis.epoch:
            await self._redis.command("PING")  # learn which run of the server this is
        return self._redis

    async def _admit_in(self, redis: DeadlineRedis, admission: Admission, reload: Reload) -> None:
        if not await self._admit_all(redis, admission, mode="take"):
            await self._give_back(admission)
            admission.claim = await reload()
            # Postgres has just been asked: whatever Redis says, that holds.
            await self._admit_all(redis, admission, mode="force")
        self._local.forget_buckets()

    async def _admit_all(self, redis: DeadlineRedis, admission: Admission, *, mode: str) -> bool:
        """Take from all limits; False: what is known of them is old, and something may be taken."""
        admission.views.clear()
        shares = list(admission.claim.shares())
        is_asked_apart = mode == "take" and shares[-1].owner is not None
        name = keys.versions(keys.SHARED)
        ahead = redis.ask_ahead("HGET", name, _LIMITS_FIELD) if is_asked_apart else None
        for share in shares:
            if not await self._admit_share(redis, admission, share, mode):
                return False
        if not is_asked_apart:
            return True
        if ahead is None or not ahead.done() or ahead.exception() is not None:
            newest = await redis.command("HGET", name, _LIMITS_FIELD)
        else:
            newest = ahead.result()
        return newest is None or int(newest) <= admission.claim.limits.shared_version

    async def _admit_share(
        self, redis: DeadlineRedis, admission: Admission, share: Share, mode: str
    ) -> bool:
        """Take from the limits of one owner; False: nothing was taken, a version is old."""
        for _ in range(MAX_ROUNDS):
            # Noted before it is asked: should the answer get lost, it may still have been taken.
            if share not in admission.shares:
                admission.shares.append(share)
            epoch = redis.epoch
            verdict, views = await self._ask(redis, admission.claim, share, mode)
            if redis.epoch != epoch or verdict == "REBUILD":
                await self._rebuild(redis, share)
            elif verdict == "STALE":
                admission.shares.remove(share)
                return False
            elif verdict == "OK":
                admission.views += views
                return True
            else:
                admission.shares.remove(share)
                raise RateLimitedError(admission.claim, [*admission.views, *views])
        raise RedisAwayError("Redis is being filled.")

    async def _ask(
        self, redis: DeadlineRedis, claim: Claim, share: Share, mode: str
    ) -> tuple[str, list[LimitView]]:
        tag, id_ = share.tag, claim.request_id.hex
        names = [keys.versions(tag), keys.epoch(tag), keys.admission(tag, claim.request_id)]
        known = claim.limits
        limits_version = known.shared_version if share.owner is None else known.version
        arguments: list[Argument] = [
            *(id_, redis.epoch, claim.key_id.hex),
            *(claim.key_version, claim.tenant_version, limits_version),
            *(mode, self._lease_ms, round(_kept_s(share) * 1000)),
        ]
        for limit in share.limits:
            arguments += _shape(limit, claim.amount(limit.metric))
        reply = await redis.run(scripts.ADMIT, [*names, *share.keys], arguments)
        if reply[0].decode() != id_:
            # Never seen; it would mean that we read somebody else's answer.
            raise RedisAwayError("An answer to another question.")
        numbers = reply[2:]
        views = [
            LimitView(limit, *numbers[3 * i : 3 * i + 3])
            for i, limit in enumerate(share.limits)
            if numbers
        ]
        return reply[1].decode(), views

    async def _rebuild(self, redis: DeadlineRedis, share: Share) -> None:
        """Put the places of what runs back, unless another gateway is at it."""
        tag = share.tag
        lock_ms = round(REBUILD_LOCK_S * 1000)
        if not await redis.command("SET", keys.rebuild_lock(tag), "1", "NX", "PX", lock_ms):
            await asyncio.sleep(REBUILD_POLL_S)
            return
        try:
            async with asyncio.timeout(REBUILD_DEADLINE_S):
                places = await self._running(share.owner)
        except (UnavailableError, TimeoutError) as error:
            raise RedisAwayError("Redis is empty, and Postgres does not answer.") from error
        names = [keys.epoch(tag)]
        positions: dict[str, int] = {}
        flat: list[Argument] = []
        for place in places:
            name = keys.scope(tag, "concurrency", place.scope_kind, place.scope_id)
            if name not in positions:
                names.append(name)
                positions[name] = len(names)
            flat += (positions[name], place.request_id.hex)
        await redis.run(
            scripts.REBUILD,
            names,
            [redis.epoch, round(EPOCH_KEPT_S * 1000), self._lease_ms, *flat],
        )
        await redis.command("DEL", keys.rebuild_lock(tag))
        self._rebuilds.inc()
        log.info("rates_rebuilt", tag=tag, places=len(flat) // 2)

    async def _give_back(self, admission: Admission, used: TokenUse | None = None) -> None:
        """From Redis, everything but what was used."""
        shares, admission.shares = admission.shares, []
        for share in shares:
            claim = admission.claim
            refunds = [claim.refund(limit.metric, used) for limit in share.limits]
            if not any(refunds) and not share.place_keys:
                continue
            arguments: list[Argument] = [claim.request_id.hex]
            for limit, refund in zip(share.limits, refunds, strict=True):
                arguments += _shape(limit, refund)
            names = [keys.admission(share.tag, claim.request_id), *share.keys]
            try:
                if self._redis is not None:
                    await self._redis.run(scripts.RELEASE, names, arguments)
            except RedisAwayError:
                return  # places end with their lease, tokens come back within minutes

    # ------------------------------------------------------------------ without

    async def _admit_alone(self, admission: Admission) -> None:
        """Decide what Redis has not decided, each limit as its `fail_mode` says."""
        decided = {view.limit.limit_id for view in admission.views}
        open_ones = [x for x in admission.claim.limits.rates if x.limit_id not in decided]
        admission.is_degraded = True
        closed = next((limit for limit in open_ones if limit.fail_mode == "closed"), None)
        if closed is not None:
            await self._give_back(admission)
            self._decisions.labels("refused", "local").inc()
            raise RatesUnavailableError(
                "A limit on this request cannot be checked right now, and it is set to refuse then;"
                " try again.",
                retry_after_s=RETRY_AFTER_S,
            )
        local = [limit for limit in open_ones if limit.fail_mode == "local"]
        is_admitted, views = self._local.admit(admission.claim, local, self.num_gateways)
        admission.views += views
        if not is_admitted:
            await self._give_back(admission)
            error = RateLimitedError(admission.claim, admission.views, is_degraded=True)
            self._count_refusal(error, "local")
            raise error

    def _count_refusal(self, error: RateLimitedError, how: str) -> None:
        limit = error.view.limit
        self._decisions.labels("refused", how).inc()
        self._refusals.labels(limit.scope_kind, limit.metric).inc()


def _shape(limit: RateLimit, amount: int) -> tuple[Argument, ...]:
    """A limit as the scripts take it."""
    if limit.metric == "concurrency":
        return ("c", 0, limit.value, amount)
    return ("b", limit.value, limit.burst, amount)


def _kept_s(share: Share) -> float:
    is_brief = all(limit.metric == "rpm" for limit in share.limits)
    return ADMISSION_KEPT_BRIEFLY_S if is_brief else ADMISSION_KEPT_S
