"""Which replica runs a request: the ready one with the fewest of our requests in flight.

Replicas announce themselves in Redis; while Redis does not answer, the worker's mirror in Postgres
stands in. Announcements only say where to connect. Whether a replica takes requests is what its own
connection says, so neither a flushed Redis nor a stale mirror sends anybody to a dead one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
import zmq
from loraplex_engine.client import CurveKeys, EngineClient
from loraplex_engine.errors import EngineError
from loraplex_engine.protocol import REPLICA_KEY_PREFIX, ReplicaRecord
from redis import asyncio as redis_asyncio
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from loraplex_platform.errors import EngineUnavailableError
from loraplex_platform.gateway import queries
from loraplex_platform.gateway.builds import ANY_BUILD, BuildRule
from loraplex_platform.gateway.crash_log import log_crash

log = structlog.get_logger(__name__)

POLL_INTERVAL_S = 1.0
REDIS_DEADLINE_S = 0.5
RETRY_AFTER_S = 5.0

_record_decoder = msgspec.json.Decoder(ReplicaRecord)


@dataclass(slots=True)
class Replica:
    """A replica and our connection to it."""

    record: ReplicaRecord
    client: EngineClient

    @property
    def is_ready(self) -> bool:
        """Takes requests now."""
        return self.client.is_ready and self.record.state != "draining"

    @property
    def max_model_len(self) -> int:
        """Most tokens, prompt and completion together."""
        welcome = self.client.welcome
        return self.record.max_model_len if welcome is None else welcome.max_model_len

    @property
    def fingerprint(self) -> str:
        """Of its build: what exactly computes there."""
        welcome = self.client.welcome
        return self.record.model_fingerprint if welcome is None else welcome.model_fingerprint


class Router:
    """Keeps one connection per announced replica. Use as `async with Router(...) as router`.

    Args:
        redis_url: None: only the mirror in Postgres is read.
        curve_secret_key_file: our Z85 secret key, for replicas on TCP.
    """

    def __init__(
        self,
        sessions: async_sessionmaker[AsyncSession],
        *,
        gateway_id: str,
        redis_url: str | None,
        curve_secret_key_file: Path | None = None,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        self._sessions = sessions
        self._gateway_id = gateway_id
        self._redis = (
            None
            if redis_url is None
            else redis_asyncio.Redis.from_url(
                redis_url,
                socket_timeout=REDIS_DEADLINE_S,
                socket_connect_timeout=REDIS_DEADLINE_S,
            )
        )
        self._curve_file = curve_secret_key_file
        self._poll_interval_s = poll_interval_s
        self._replicas: dict[tuple[str, str | None], Replica] = {}
        self._poller: asyncio.Task[None] | None = None
        self._is_closing = False

    async def __aenter__(self) -> Router:
        await self.refresh()
        self._poller = asyncio.create_task(self._poll_forever(), name="replica poller")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        # redis-py can swallow a cancellation that meets a reply: the flag ends the loop even then.
        self._is_closing = True
        if self._poller is not None:
            self._poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poller
        for replica in self._replicas.values():
            await replica.client.close()
        self._replicas.clear()
        if self._redis is not None:
            await self._redis.aclose()

    @property
    def replicas(self) -> list[Replica]:
        """Every replica we know of and its connection, ready or not."""
        return list(self._replicas.values())

    @property
    def num_ready(self) -> int:
        """Replicas that take requests now."""
        return sum(replica.is_ready for replica in self._replicas.values())

    def max_model_len(self, base_model: str, default: int, builds: BuildRule = ANY_BUILD) -> int:
        """The longest context that any connected replica of this base and these builds serves; at most
        `default`.
        """
        lengths = [
            replica.max_model_len
            for replica in self._replicas.values()
            if replica.record.base_model == base_model
            and builds.allows(replica.fingerprint)
            and replica.client.welcome is not None
            and replica.max_model_len > 0  # 0: it listens, but its model is still loading
        ]
        return min(default, max(lengths, default=default))

    def choose(
        self,
        base_model: str,
        num_tokens: int,
        exclude: Collection[str] = (),
        *,
        builds: BuildRule = ANY_BUILD,
    ) -> Replica:
        """The least busy ready replica whose context holds `num_tokens`.

        Args:
            exclude: replica ids that have refused this request already.
            builds: which engine builds may run it.

        Raises:
            EngineUnavailableError: there is none.
        """
        candidates = [
            replica
            for replica in self._replicas.values()
            if replica.is_ready
            and replica.record.base_model == base_model
            and replica.max_model_len >= num_tokens
            and replica.record.replica_id not in exclude
            and builds.allows(replica.fingerprint)
        ]
        if not candidates:
            raise EngineUnavailableError(
                builds.unavailable(base_model), retry_after_s=RETRY_AFTER_S
            )
        if builds.rather_not:
            candidates = [
                replica for replica in candidates if replica.fingerprint not in builds.rather_not
            ] or candidates
        # Ties are broken at random: gateways that start together must not all pick the same one.
        return min(candidates, key=lambda r: (r.client.num_in_flight, random.random()))  # noqa: S311 - no secret

    async def refresh(self) -> None:
        """Look once for replicas that came or went."""
        records = await self._announced()
        if records is None:
            return  # nobody to ask: what we are connected to stays
        announced = {(record.address, record.curve_public_key): record for record in records}
        for key, record in announced.items():
            known = self._replicas.get(key)
            if known is not None:
                known.record = record
            else:
                await self._connect(key, record)
        for key in [key for key in self._replicas if key not in announced]:
            if self._replicas[key].client.welcome is None:
                gone = self._replicas.pop(key)
                log.info("replica_gone", replica_id=gone.record.replica_id)
                await gone.client.close()

    # ------------------------------------------------------------------ insides

    async def _poll_forever(self) -> None:
        while not self._is_closing:
            await asyncio.sleep(self._poll_interval_s)
            try:
                await self.refresh()
            except Exception as error:  # noqa: BLE001 - see below
                # One odd record must not stop every later one from being found.
                log_crash("replica_poll_crashed", error)

    async def _connect(self, key: tuple[str, str | None], record: ReplicaRecord) -> None:
        try:
            client = EngineClient(
                record.address, gateway_id=self._gateway_id, curve=self._curve_for(record)
            )
        except EngineError as error:
            log.warning("replica_unreachable", replica_id=record.replica_id, reason=str(error))
            return
        self._replicas[key] = Replica(record, client)
        await client.__aenter__()
        log.info("replica_found", replica_id=record.replica_id, address=record.address)

    def _curve_for(self, record: ReplicaRecord) -> CurveKeys | None:
        if record.curve_public_key is None or self._curve_file is None:
            return None
        secret = self._curve_file.read_text(encoding="ascii").strip().encode()
        return CurveKeys(
            server_public_key=record.curve_public_key.encode(),
            public_key=zmq.curve_public(secret),
            secret_key=secret,
        )

    async def _announced(self) -> list[ReplicaRecord] | None:
        records = await self._records_in_redis()
        return records if records is not None else await self._records_in_postgres()

    async def _records_in_redis(self) -> list[ReplicaRecord] | None:
        if self._redis is None:
            return None
        try:
            async with asyncio.timeout(REDIS_DEADLINE_S):
                keys = [
                    key async for key in self._redis.scan_iter(f"{REPLICA_KEY_PREFIX}*", count=500)
                ]
                values = await self._redis.mget(keys) if keys else []
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("redis_unavailable", reason=type(error).__name__)
            return None
        return _valid([value for value in values if value is not None])

    async def _records_in_postgres(self) -> list[ReplicaRecord] | None:
        try:
            async with self._sessions() as session:
                rows = await queries.mirrored_replicas(session)
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            log.warning("replica_mirror_unavailable", reason=type(error).__name__)
            return None
        return _valid([msgspec.json.encode(row) for row in rows])


def _valid(values: Sequence[bytes | str]) -> list[ReplicaRecord]:
    records = []
    for value in values:
        try:
            records.append(_record_decoder.decode(value))
        except msgspec.MsgspecError as error:
            log.warning("replica_record_malformed", reason=str(error))
    return records
