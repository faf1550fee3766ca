"""What a gateway remembers of keys, for a few seconds: who holds them, and which are nobody's.

A change of the key or its tenant is seen at the next request, because the admission compares
versions and asks here again (`is_fresh`); while Redis is away, within `TTL_S`. The transaction that
reserves looks at key and tenant in any case (docs/adr/0001). Secrets are not kept, only their digests under
a key that this process made for itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Counter

from loraplex_platform.errors import PlatformError, TooManyAttemptsError
from loraplex_platform.tenancy.authentication import Authenticated, public_id_of
from loraplex_platform.tenancy.unknown_keys import UnknownKeys

TTL_S = 5.0
REFUSED_TTL_S = 3.0
MAX_KEYS = 50_000

Load = Callable[[str], Awaitable[Authenticated]]


@dataclass(frozen=True, slots=True)
class _Known:
    caller: Authenticated
    read_s: float  # when the read began


@dataclass(frozen=True, slots=True)
class _Refused:
    error: type[PlatformError]
    message: str
    noted_s: float


class KeyCache:
    """See the module's header.

    Args:
        load: reads a key's holder from the database; raises what the key deserves.
        unknown: counts keys that are nobody's; this gateway's own count unless given.
    """

    def __init__(
        self,
        load: Load,
        registry: CollectorRegistry,
        *,
        unknown: UnknownKeys | None = None,
        ttl_s: float = TTL_S,
        refused_ttl_s: float = REFUSED_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._ttl_s = ttl_s
        self._refused_ttl_s = refused_ttl_s
        self._clock = clock
        self._digest_key = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._refused: OrderedDict[bytes, _Refused] = OrderedDict()
        self._unknown = unknown or UnknownKeys(clock=clock)
        self._reads: dict[bytes, asyncio.Task[Authenticated]] = {}
        self._lookups = Counter(
            "loraplex:key_lookups",
            "Keys looked up, by outcome: remembered, read, refused (remembered), flooded.",
            ["outcome"],
            registry=registry,
        )

    async def find(self, secret: str, address: str, *, is_fresh: bool = False) -> Authenticated:
        """The key's holder.

        Args:
            secret: the whole text of the key.
            address: who shows it. Many unknown keys from there are not looked up.
            is_fresh: whether only what is read after this call will do.

        Raises:
            InvalidApiKeyError and its kinds, TenantSuspendedError: as `authenticate`.
            TooManyAttemptsError: too many unknown keys from this address.
            DatabaseUnavailableError: we cannot tell.
        """
        digest = hashlib.blake2b(secret.encode(), key=self._digest_key, digest_size=16).digest()
        now_s = self._clock()
        if not is_fresh:
            known = self._known.get(digest)
            if known is not None and self._is_good(known, now_s):
                self._lookups.labels("remembered").inc()
                return known.caller
            refused = self._refused.get(digest)
            if refused is not None and now_s - refused.noted_s < self._refused_ttl_s:
                self._lookups.labels("refused").inc()
                raise refused.error(refused.message)
        public_id_of(secret)  # nonsense costs no look-up
        if digest not in self._known:
            await self._refuse_flood(address)
        try:
            return await self._read(secret, digest, is_fresh=is_fresh)
        except PlatformError as error:
            if error.status in (401, 403):
                await self._note_refusal(digest, error, address)
            raise

    def _is_good(self, known: _Known, now_s: float) -> bool:
        ends = known.caller.valid_until
        return now_s - known.read_s < self._ttl_s and (ends is None or datetime.now(UTC) < ends)

    async def _read(self, secret: str, digest: bytes, *, is_fresh: bool) -> Authenticated:
        """Read once for all who wait, but never hand a fresh asker an older read."""
        running = self._reads.get(digest)
        if running is not None and not is_fresh:
            return await asyncio.shield(running)
        self._lookups.labels("read").inc()
        task = asyncio.create_task(self._read_once(secret, digest))
        # Whoever asked may be gone by then; the outcome is not lost to the others.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._reads[digest] = task
        try:
            return await asyncio.shield(task)
        finally:
            if self._reads.get(digest) is task:
                del self._reads[digest]

    async def _read_once(self, secret: str, digest: bytes) -> Authenticated:
        read_s = self._clock()
        caller = await self._load(secret)
        known, refused = self._known.get(digest), self._refused.get(digest)
        # A read that began before a change may end after it: what is older never comes back.
        is_older = (known is not None and _version(caller) < _version(known.caller)) or (
            refused is not None and refused.noted_s > read_s
        )
        if not is_older:
            self._known[digest] = _Known(caller, read_s)
            self._known.move_to_end(digest)
            self._refused.pop(digest, None)
            if len(self._known) > MAX_KEYS:
                self._known.popitem(last=False)
        return caller

    # ------------------------------------------------------------------ refusals

    async def _note_refusal(self, digest: bytes, error: PlatformError, address: str) -> None:
        was_known = self._known.pop(digest, None) is not None
        self._refused[digest] = _Refused(type(error), error.message, self._clock())
        self._refused.move_to_end(digest)
        if len(self._refused) > MAX_KEYS:
            self._refused.popitem(last=False)
        if not was_known:
            await self._unknown.note(address)

    async def _refuse_flood(self, address: str) -> None:
        try:
            await self._unknown.check(address)
        except TooManyAttemptsError:
            self._lookups.labels("flooded").inc()
            raise


def _version(caller: Authenticated) -> tuple[int, int]:
    return caller.key_version, caller.tenant_version
