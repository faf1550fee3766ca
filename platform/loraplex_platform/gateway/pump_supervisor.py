"""Owns the pumps: keeps their tasks alive, renews their leases, ends them at shutdown."""

from __future__ import annotations

import asyncio
import time

import structlog

from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import PlatformError, UnavailableError
from loraplex_platform.gateway.books import ANSWER_WAIT_S
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.gateway.pump import ABORT_ANSWER_S, Pump
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.records import LEASE_S
from loraplex_platform.rates.limiter import RateLimiter

RENEWALS_PER_LEASE = 4  # so that one or two may fail

log = structlog.get_logger(__name__)


class PumpSupervisor:
    """See the module's header.

    Args:
        sessions: for renewals alone. They must not wait behind requests that crowd a shared pool, or
            a busy gateway loses its leases and with them the requests.
        rates: whose places are extended too; None: there are none.
        lease_s: how long a request stays ours without a renewal.
    """

    def __init__(
        self,
        sessions: SessionFactory,
        rates: RateLimiter | None = None,
        *,
        lease_s: float = LEASE_S,
    ) -> None:
        self._sessions = sessions
        self._rates = rates
        self._lease_s = lease_s
        self._renew_interval_s = lease_s / RENEWALS_PER_LEASE
        self._tasks: dict[asyncio.Task[None], Pump] = {}

    @property
    def num_live(self) -> int:
        """How many those are."""
        return len(self._tasks)

    @property
    def live(self) -> list[Pump]:
        """Pumps that have not ended."""
        return list(self._tasks.values())

    def start(self, pump: Pump) -> asyncio.Task[None]:
        """Run a pump to its end, with which the task ends. Whoever waits for it must not cancel it."""
        task = asyncio.create_task(pump.run(), name=f"pump {pump.job.request_id}")
        self._tasks[task] = pump
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def renew_forever(self) -> None:
        """Extend the leases of all pumps every few seconds; stop those that lost theirs."""
        while True:
            await asyncio.sleep(self._renew_interval_s)
            try:
                await self.renew_once()
            except UnavailableError as error:
                log.warning("renew_failed", reason=error.message)
            except Exception as error:  # noqa: BLE001 - other leases still need renewing
                log_crash("renew_crashed", error)

    async def renew_once(self) -> None:
        """One round. A Redis that is slow or away costs no lease: both are renewed at once."""
        await asyncio.gather(self._renew_leases(), self._renew_places())

    async def _renew_places(self) -> None:
        if self._rates is None:
            return
        gates = [pump.gate for pump in self._tasks.values() if pump.gate is not None]
        try:
            async with asyncio.timeout(self._renew_interval_s / 2):
                await self._rates.renew([g.admission for g in gates if g.admission is not None])
        except TimeoutError:
            log.warning("places_not_renewed", reason="Redis is slow.")

    async def _renew_leases(self) -> None:
        pumps = {pump.job.request_id: pump for pump in self._tasks.values()}
        renewals = [r for pump in pumps.values() if (r := pump.renewal) is not None]
        asked_s = time.monotonic()
        renewing = asyncio.create_task(
            metering.renew(self._sessions, renewals, lease_s=self._lease_s)
        )
        try:
            while not (await asyncio.wait({renewing}, timeout=self._renew_interval_s))[0]:
                for pump in pumps.values():
                    pump.note_database_away()
            lost = await renewing
        except UnavailableError:
            for pump in pumps.values():
                pump.note_database_away()
            raise
        finally:
            renewing.cancel()
        for renewal in renewals:
            pump = pumps[renewal.request_id]
            if renewal.request_id not in lost:
                pump.note_renewed(asked_s)
            elif pump.renewal is not None:  # not settled by itself meanwhile
                log.warning("lease_lost", request_id=str(renewal.request_id))
                pump.lose_lease()

    async def drain(self, grace_s: float, error: PlatformError) -> None:
        """Let pumps finish for `grace_s`, then end them, and wait until all have settled."""
        await self.wait(grace_s)
        for pump in self.live:
            pump.kill(error)
        await self.wait(ABORT_ANSWER_S + ANSWER_WAIT_S)

    async def wait(self, timeout_s: float) -> None:
        """Until the pumps of this moment have ended, or the time is over."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
