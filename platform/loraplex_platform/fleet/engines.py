"""The replicas as the control plane sees them: their counters, sampled, and how fast they go.

Discovery and connections are the gateway's router; here is only the looking. Nothing in this module
is on the path of a tenant's request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

import structlog
from loraplex_engine.client import EngineLostError, EnginePinRefusedError
from loraplex_engine.protocol import EngineStats, ReplicaRecord

from loraplex_platform.errors import EngineUnavailableError
from loraplex_platform.gateway.builds import ANY_BUILD, BuildRule
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.gateway.routing import Replica, Router

log = structlog.get_logger(__name__)

STATS_TIMEOUT_S = 1.0
PIN_TIMEOUT_S = 10.0  # it is answered between two steps
CONNECT_TIMEOUT_S = 2.0
SAMPLE_INTERVAL_S = 2.0
FRESH_S = 5.0
RATE_WINDOW_S = 10.0
UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters of one replica at one time."""

    at_s: float
    incarnation: str
    stats: EngineStats

    @property
    def num_finished(self) -> int:
        """Requests finished since the replica started."""
        return sum(self.stats.requests_finished_total.values())


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, over the last `RATE_WINDOW_S`; zeros until there are two samples."""

    prompt_tokens_per_s: float = 0.0
    generation_tokens_per_s: float = 0.0
    requests_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica, what it last said of itself, and how fast it goes."""

    record: ReplicaRecord
    stats: EngineStats | None  # None: it does not answer
    rates: Rates


@dataclass(frozen=True, slots=True)
class PinOutcome:
    """What one replica said to `EngineFleet.set_pin`."""

    replica_id: str
    pinned: list[str] | None  # digests that it keeps now; None: it refused, or did not answer
    refusal: str | None = None  # the protocol's PinRefusal, or UNREACHABLE
    message: str | None = None


class EngineFleet:
    """See the module's header. Use as `async with fleet.running(): ...`."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._samples: dict[str, deque[Sample]] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[EngineFleet]:
        """Connect and sample in the background for as long as the block lasts."""
        async with self._router:
            sampler = asyncio.create_task(self._sample_forever(), name="fleet sampler")
            try:
                yield self
            finally:
                sampler.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await sampler

    async def ready_engine(
        self, base_model: str, num_tokens: int, builds: BuildRule = ANY_BUILD
    ) -> Replica:
        """A replica that takes a request of this size now.

        Raises:
            EngineUnavailableError: there is none.
        """
        try:
            return self._router.choose(base_model, num_tokens, builds=builds)
        except EngineUnavailableError:
            # One may have come up since the router last looked.
            await self._router.refresh()
            for found in self._router.replicas:
                with contextlib.suppress(EngineLostError):
                    await found.client.connect(CONNECT_TIMEOUT_S)
            return self._router.choose(base_model, num_tokens, builds=builds)

    def prefetch(self, digest: str) -> None:
        """Have every replica load an adapter that will be asked for soon; best effort."""
        for replica in self._router.replicas:
            replica.client.prefetch(digest)

    async def set_pin(self, digest: str, *, is_wanted: bool) -> list[PinOutcome]:
        """Have every replica that is known now keep an adapter in memory, or let it go; by replica id. What a
        replica's own flag (`--pin-adapter`) pins it keeps.

        The worker tells those that start later, or again: see residency.py.
        """
        replicas = sorted(self._router.replicas, key=lambda r: r.record.replica_id)
        return list(await asyncio.gather(*(_set_pin(r, digest, is_wanted) for r in replicas)))

    def running_builds(self) -> dict[str, list[str]]:
        """Fingerprint -> ids of the replicas that take requests for it now."""
        running: dict[str, list[str]] = {}
        for replica in self._router.replicas:
            if replica.is_ready:
                welcome = replica.client.welcome
                fingerprint = replica.record.model_fingerprint
                if welcome is not None and welcome.model_fingerprint:
                    fingerprint = welcome.model_fingerprint
                running.setdefault(fingerprint, []).append(replica.record.replica_id)
        return {fingerprint: sorted(ids) for fingerprint, ids in running.items()}

    async def views(self) -> list[ReplicaView]:
        """Every known replica with fresh statistics of this very process where it answers, by id."""
        await self.sample()
        views = []
        for replica in sorted(self._router.replicas, key=lambda r: r.record.replica_id):
            samples = self._samples.get(replica.record.replica_id)
            if samples is None or not _speaks_for(samples[-1], replica.record):
                views.append(ReplicaView(replica.record, None, Rates()))
            else:
                views.append(ReplicaView(replica.record, samples[-1].stats, _rates(samples)))
        return views

    async def sample(self) -> None:
        """Ask every replica for its counters; forget those that are gone."""
        replicas = self._router.replicas
        known = {replica.record.replica_id for replica in replicas}
        for gone in self._samples.keys() - known:
            del self._samples[gone]
        await asyncio.gather(*(self._sample_one(replica) for replica in replicas))

    async def _sample_forever(self) -> None:
        while True:
            try:
                await self.sample()
            except Exception as error:  # noqa: BLE001 - see below
                # The console must not go blind for good because of one odd answer.
                log_crash("fleet_sample_crashed", error)
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    async def _sample_one(self, replica: Replica) -> None:
        try:
            await replica.client.connect(STATS_TIMEOUT_S)
            stats = await replica.client.stats(STATS_TIMEOUT_S)
        except EngineLostError:
            return
        welcome = replica.client.welcome
        incarnation = replica.record.incarnation if welcome is None else welcome.incarnation
        samples = self._samples.setdefault(replica.record.replica_id, deque(maxlen=64))
        samples.append(Sample(time.monotonic(), incarnation, stats))


def _speaks_for(sample: Sample, record: ReplicaRecord) -> bool:
    """A killed process's last figures are not those of the one that has started in its place."""
    is_fresh = time.monotonic() - sample.at_s < FRESH_S
    return is_fresh and sample.incarnation == record.incarnation


def _rates(samples: deque[Sample]) -> Rates:
    latest = samples[-1]
    oldest = next(
        sample
        for sample in samples
        if sample.incarnation == latest.incarnation and latest.at_s - sample.at_s <= RATE_WINDOW_S
    )
    elapsed_s = latest.at_s - oldest.at_s
    if elapsed_s <= 0:
        return Rates()
    now, then = latest.stats, oldest.stats
    return Rates(
        prompt_tokens_per_s=(now.prompt_tokens_total - then.prompt_tokens_total) / elapsed_s,
        generation_tokens_per_s=(now.generation_tokens_total - then.generation_tokens_total)
        / elapsed_s,
        requests_per_s=(latest.num_finished - oldest.num_finished) / elapsed_s,
    )


async def _set_pin(replica: Replica, digest: str, is_wanted: bool) -> PinOutcome:
    client, replica_id = replica.client, replica.record.replica_id
    try:
        if is_wanted:
            pinned = await client.pin(digest, PIN_TIMEOUT_S)
        else:
            stats = await client.stats(STATS_TIMEOUT_S)
            if digest in (stats.adapters_pinned_at_start or ()):
                return PinOutcome(replica_id, stats.adapters_pinned)
            pinned = await client.unpin(digest, PIN_TIMEOUT_S)
    except EnginePinRefusedError as error:
        return PinOutcome(replica_id, None, error.code, str(error))
    except EngineLostError as error:
        return PinOutcome(replica_id, None, UNREACHABLE, str(error))
    return PinOutcome(replica_id, pinned)
