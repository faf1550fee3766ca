"""Loops that do not die: each runs its work again and again, whatever one round raised."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from loraplex_platform.errors import UnavailableError

log = structlog.get_logger(__name__)

MAX_BACKOFF_S = 30.0
STUCK_AFTER_S = 120.0


class LoopMetrics:
    """What the loops count."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.rounds = Counter(
            "loraplex:worker_rounds", "Rounds of each loop.", ["loop"], registry=registry
        )
        self.failures = Counter(
            "loraplex:worker_failures", "Rounds that failed.", ["loop"], registry=registry
        )
        self.last_success = Gauge(
            "loraplex:worker_last_success_timestamp_seconds",
            "When a round of the loop last ended well.",
            ["loop"],
            registry=registry,
        )


@dataclass(slots=True)
class Loop:
    """Do `work` every `interval_s`; after a failure wait longer, up to half a minute."""

    name: str
    interval_s: float
    work: Callable[[], Awaitable[object]]
    metrics: LoopMetrics
    stuck_after_s: float = STUCK_AFTER_S
    _round_began_s: float | None = field(default=None, init=False)

    @property
    def is_stuck(self) -> bool:
        """A round hangs. A round that fails, over and over, is not stuck."""
        began_s = self._round_began_s
        return began_s is not None and time.monotonic() - began_s > self.stuck_after_s

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            self._round_began_s = time.monotonic()
            try:
                await self.work()
            except UnavailableError as error:
                failures += 1
                log.warning("loop_waits", loop=self.name, reason=error.message)
            except Exception:
                # One odd row must not end the loop for all others.
                failures += 1
                log.exception("loop_failed", loop=self.name)
            else:
                failures = 0
                self.metrics.last_success.labels(self.name).set_to_current_time()
            finally:
                self._round_began_s = None
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # Whoever turned the cancellation into another error must not keep the worker alive.
                raise asyncio.CancelledError
            self.metrics.rounds.labels(self.name).inc()
            if failures:
                self.metrics.failures.labels(self.name).inc()
            await asyncio.sleep(
                min(self.interval_s * 2**failures, max(MAX_BACKOFF_S, self.interval_s))
            )
