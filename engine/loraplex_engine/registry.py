"""Says in Redis that this replica exists: one key with a TTL, refreshed while we live.

Redis is a notice board here and nothing more. When it is down the engine serves on; the record comes
back with it. A replica that dies takes at most `REPLICA_TTL_S` to disappear; one that stops takes its
record down itself, unless a successor has already put up its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import redis
import structlog

from loraplex_engine.errors import ConfigError
from loraplex_engine.protocol import REPLICA_KEY_PREFIX, REPLICA_TTL_S, ReplicaRecord
from loraplex_engine.urls import redis_fault

log = structlog.get_logger(__name__)

REFRESH_S = REPLICA_TTL_S / 3
REDIS_TIMEOUT_S = 2.0
# Only our own record: a successor with the same replica id may have published already.
_REMOVE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end"


class ReplicaRegistry:
    """See the module's header.

    Args:
        url: `redis://...` or `unix:///path`.
        describe: the record as of now; None: nothing to publish yet.

    Raises:
        ConfigError: `url` is none of Redis.
    """

    def __init__(
        self,
        url: str,
        describe: Callable[[], ReplicaRecord | None],
        *,
        refresh_s: float = REFRESH_S,
        ttl_s: int = REPLICA_TTL_S,
    ) -> None:
        fault = redis_fault(url)
        if fault is not None:
            raise ConfigError(f"--redis-url: {fault}")
        self._redis = redis.Redis.from_url(
            url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
        )
        self._describe = describe
        self._refresh_s = refresh_s
        self._ttl_s = ttl_s
        self._published: tuple[str, bytes] | None = None  # key, value
        self._is_reachable = True
        self._is_stopping = False
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="registry", daemon=True)

    def start(self) -> None:
        """Publish, and go on doing so."""
        self._thread.start()

    def notify(self) -> None:
        """The record has changed: publish it now."""
        self._changed.set()

    def stop(self) -> None:
        """Take the record down (best effort) and end."""
        self._is_stopping = True
        self._changed.set()
        self._thread.join(3 * REDIS_TIMEOUT_S)
        self._redis.close()

    def _run(self) -> None:
        while not self._is_stopping:
            self._try(self._publish)
            self._changed.wait(self._refresh_s)
            self._changed.clear()
        if self._published is not None:  # else it was not asked, and is not "reachable again"
            self._try(self._remove)

    def _publish(self) -> None:
        record = self._describe()
        if record is None:
            return
        key, value = REPLICA_KEY_PREFIX + record.replica_id, msgspec.json.encode(record)
        self._redis.set(key, value, ex=self._ttl_s)
        self._published = (key, value)

    def _remove(self) -> None:
        if self._published is not None:
            self._redis.eval(_REMOVE, 1, *self._published)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (redis.RedisError, OSError) as error:
            if self._is_reachable:
                log.warning("registry_unreachable", error=str(error))
            self._is_reachable = False
        else:
            if not self._is_reachable:
                log.info("registry_reachable_again")
            self._is_reachable = True
