"""What a gateway remembers of limits, for a few seconds."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from loraplex_platform.quotas.records import EffectiveLimits, LimitScopes

TTL_S = 5.0
MAX_ENTRIES = 50_000

Load = Callable[[LimitScopes], Awaitable[EffectiveLimits]]


class LimitsCache:
    """Limits by scopes. A change is seen at the next request by the tenant's `limits_version`, or that of

    the limits that tenants share; while Redis is away, within `ttl_s`.
    """

    def __init__(
        self,
        load: Load,
        *,
        ttl_s: float = TTL_S,
        max_entries: int = MAX_ENTRIES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._clock = clock
        self._known: OrderedDict[LimitScopes, tuple[EffectiveLimits, float]] = OrderedDict()

    async def find(self, scopes: LimitScopes, *, is_fresh: bool = False) -> EffectiveLimits:
        """The limits of these scopes.

        Args:
            is_fresh: whether only what is read after this call will do.

        Raises:
            DatabaseUnavailableError: they are not known.
        """
        asked_s = self._clock()
        known = self._known.get(scopes)
        if known is not None and not is_fresh and asked_s - known[1] < self._ttl_s:
            return known[0]
        limits = await self._load(scopes)
        newest = self._known.get(scopes)
        # A read that began earlier may end later; what it saw is not newer for that.
        if newest is None or (_versions(newest[0]), newest[1]) <= (_versions(limits), asked_s):
            self._known[scopes] = (limits, asked_s)
            self._known.move_to_end(scopes)
            if len(self._known) > self._max_entries:
                self._known.popitem(last=False)
        return limits


def _versions(limits: EffectiveLimits) -> tuple[int, int]:
    """Both grow with every read of a later state."""
    return limits.version, limits.shared_version
