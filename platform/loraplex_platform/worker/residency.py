"""Makes every connected replica keep what is desired (fleet/residency.py), and tells how far each is from it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
from loraplex_engine.client import EngineLostError, EnginePinRefusedError
from prometheus_client import CollectorRegistry, Gauge

from loraplex_platform.db.session import SessionFactory
from loraplex_platform.fleet import residency_queries as queries
from loraplex_platform.fleet.drift import Drift, drift_of
from loraplex_platform.fleet.engines import PIN_TIMEOUT_S, STATS_TIMEOUT_S
from loraplex_platform.fleet.residency_queries import Desired
from loraplex_platform.worker.engines import ConnectedEngines, ConnectedReplica

log = structlog.get_logger(__name__)


class Residency:
    """See the module's header. Any number may run: what each does is harmless to repeat."""

    def __init__(
        self, sessions: SessionFactory, engines: ConnectedEngines, registry: CollectorRegistry
    ) -> None:
        self._sessions = sessions
        self._engines = engines
        self._drift = Gauge(
            "loraplex:replica_drift",
            "Adapters that a replica is to keep in memory and does not (missing), or keeps and is not to (extra).",
            ["replica_id", "kind"],
            registry=registry,
        )
        self._wanted_builds = Gauge(
            "loraplex:builds_not_running",
            "Engine builds that a live revision names and no replica runs.",
            registry=registry,
        )
        self._shown: set[str] = set()
        self._said: dict[tuple[str, str], str | None] = {}  # replica and digest -> reason

    async def converge_once(self) -> dict[str, Drift]:
        """Look at every replica, tell it what it lacks; what was found, by replica id."""
        async with self._sessions() as session:
            desired = await queries.desired_adapters(session)
            wanted = await queries.wanted_builds(session)
        replicas = self._engines.all()
        found = await asyncio.gather(*(self._converge(replica, desired) for replica in replicas))
        drifts = {
            replica.replica_id: drift
            for replica, drift in zip(replicas, found, strict=True)
            if drift is not None
        }
        self._show(drifts)
        running = {replica.fingerprint for replica in replicas}
        self._wanted_builds.set(len({item.build.fingerprint for item in wanted} - running))
        return drifts

    async def _converge(
        self, replica: ConnectedReplica, desired: Sequence[Desired]
    ) -> Drift | None:
        """None: it does not answer, so nobody knows."""
        record = replica.record
        try:
            stats = await replica.client.stats(STATS_TIMEOUT_S)
            drift = drift_of(stats, record.base_model, record.started_at_unix_s, desired)
            for missing in drift.missing:
                reason = missing.reason
                if not missing.is_pinned:
                    reason = await self._pin(replica, missing.digest) or reason
                self._say(replica.replica_id, missing.digest, reason)
            for digest in drift.extra:
                await replica.client.unpin(digest, PIN_TIMEOUT_S)
                log.info("adapter_unpinned", replica_id=replica.replica_id, digest=digest)
        except EngineLostError:
            return None
        return drift

    async def _pin(self, replica: ConnectedReplica, digest: str) -> str | None:
        """Why not, if it refuses."""
        try:
            await replica.client.pin(digest, PIN_TIMEOUT_S)
        except EnginePinRefusedError as error:
            return str(error)
        log.info("adapter_pinned", replica_id=replica.replica_id, digest=digest)
        return None

    def _say(self, replica_id: str, digest: str, reason: str | None) -> None:
        """Once for each reason, not in every round."""
        if reason is None or self._said.get((replica_id, digest)) == reason:
            return
        self._said[replica_id, digest] = reason
        log.warning("replica_drifts", replica_id=replica_id, digest=digest, reason=reason)

    def _show(self, drifts: dict[str, Drift]) -> None:
        for gone in self._shown - drifts.keys():
            for kind in ("missing", "extra"):
                self._drift.remove(gone, kind)
            self._said = {key: reason for key, reason in self._said.items() if key[0] != gone}
        self._shown = set(drifts)
        for replica_id, drift in drifts.items():
            self._drift.labels(replica_id, "missing").set(len(drift.missing))
            self._drift.labels(replica_id, "extra").set(len(drift.extra))
            missing = {item.digest for item in drift.missing}
            for key in [key for key in self._said if key[0] == replica_id]:
                if key[1] not in missing:
                    del self._said[key]
