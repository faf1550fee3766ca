"""Runs a set of services: starts them in order, restarts what crashes, stops them in reverse order.

Knows nothing of what the services are (`services.py`) or how progress is shown (`display.py`). A service
starts when everything in its `after` is ready, so independent ones start together; it is stopped when
everything that came after it, or that names it in `stop_before`, has ended.

| happens                                     | then                                                      |
|---------------------------------------------|-----------------------------------------------------------|
| ends or is not ready in time, at first start| `ServiceFailedError`; the caller stops the rest           |
| ends later                                  | restarted after 0.5 s, doubling up to 15 s                |
| ran well for a minute since                 | the delay starts again at 0.5 s                           |
| stop                                        | each gets its signal and its deadline, then SIGKILL       |
| stop again (`hurry`)                        | its hurry signal and deadline now: by default SIGKILL, 0 s |
| ended, however                              | what it had started outside its group is ended (`remains`) |
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loraplex_platform.local.data_dir import DataDir
from loraplex_platform.local.errors import ServiceFailedError, StillRunningError
from loraplex_platform.local.process import Child, last_lines
from loraplex_platform.local.readiness import Probe

PROBE_INTERVAL_S = 0.05
LONGEST_PROBE_INTERVAL_S = 0.3
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 15.0
STABLE_AFTER_S = 60.0

State = Literal["waiting", "starting", "ready", "restarting", "stopping", "stopped", "stuck"]


@dataclass(frozen=True, slots=True)
class Service:
    """One process to keep running, or (`is_task`) one command to run to its end."""

    name: str
    command: Callable[[], Sequence[str]]  # called at each start, when what it needs is ready
    env: Callable[[], Mapping[str, str]]
    is_ready: Probe
    after: tuple[str, ...] = ()
    stop_before: tuple[str, ...] = ()  # those that it uses while it drains
    is_task: bool = False
    ready_deadline_s: float = 60.0
    stop_deadline_s: float = 10.0
    stop_signal: signal.Signals = signal.SIGTERM
    hurry_signal: signal.Signals = signal.SIGKILL
    hurry_deadline_s: float = 0.0
    # Ends what a dead process has left outside its group, quickly once the function given is true. Blocks;
    # raises StillRunningError.
    end_remains: Callable[[Callable[[], bool]], None] | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """A service changed its state; `detail` is for people."""

    service: str
    state: State
    detail: str = ""
    last_lines: tuple[str, ...] = ()


Listener = Callable[[Event], None]


class Supervisor:
    """The processes of one data directory."""

    def __init__(self, services: Sequence[Service], data_dir: DataDir, listener: Listener) -> None:
        names = [service.name for service in services]
        for position, service in enumerate(services):
            # Both kinds of order point to earlier ones, so neither can be a circle.
            unknown = {*service.after, *service.stop_before} - set(names[:position])
            if unknown:
                raise ValueError(
                    f"{service.name} comes after {unknown}, which must be listed first"
                )
        self._services = list(services)
        self._data_dir = data_dir
        self._listener = listener
        self._ready = {name: asyncio.Event() for name in names}
        self._children: dict[str, Child] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._first_failure: asyncio.Future[ServiceFailedError] = (
            asyncio.get_running_loop().create_future()
        )
        self.hurry = asyncio.Event()

    def pid(self, name: str) -> int | None:
        """The pid of a service that runs now."""
        child = self._children.get(name)
        return None if child is None or child.returncode is not None else child.pid

    async def start(self) -> None:
        """Start everything; returns when all are ready. They are kept running from then on.

        Raises:
            ServiceFailedError: one never became ready. Call `stop` for the others.
        """
        for service in self._services:
            self._data_dir.rotate_log(service.name)
            self._tell(service, "waiting")
            self._keepers[service.name] = asyncio.create_task(
                self._keep(service), name=f"keep {service.name}"
            )
        all_ready = asyncio.create_task(self._all_ready())
        either: set[asyncio.Future[Any]] = {all_ready, self._first_failure}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            all_ready.cancel()
        if self._first_failure.done():
            raise self._first_failure.result()

    async def stop(self) -> None:
        """End everything in reverse order. Nothing is left running, whatever the services do.

        Raises:
            StillRunningError: something is, against all odds: the first such, when all else has ended.
        """
        for task in self._keepers.values():
            task.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        ended = {service.name: asyncio.Event() for service in self._services}
        stuck: list[StillRunningError] = []

        async def end(service: Service) -> None:
            for later in self._services:
                if service.name in (*later.after, *later.stop_before):
                    await ended[later.name].wait()
            child = self._children.pop(service.name, None)
            detail = ""
            if child is not None:
                self._tell(service, "stopping")
                ending = await child.stop(
                    service.stop_signal,
                    service.stop_deadline_s,
                    self.hurry,
                    hurry_signal=service.hurry_signal,
                    hurry_deadline_s=service.hurry_deadline_s,
                )
                detail = {"in order": "", "at once": "at once", "killed": "had to be killed"}[
                    ending
                ]
            try:
                await self._end_remains(service)
            except StillRunningError as error:
                stuck.append(error)
                self._tell(service, "stuck", str(error))
            else:
                if child is not None:
                    self._tell(service, "stopped", detail)
            ended[service.name].set()

        await asyncio.gather(*(end(service) for service in self._services))
        if stuck:
            raise stuck[0]

    async def _end_remains(self, service: Service) -> None:
        if service.end_remains is not None:
            await asyncio.to_thread(service.end_remains, self.hurry.is_set)

    async def _all_ready(self) -> None:
        for event in self._ready.values():
            await event.wait()

    # ------------------------------------------------------------------------ one service

    async def _keep(self, service: Service) -> None:
        for name in service.after:
            await self._ready[name].wait()
        delay_s = FIRST_DELAY_S
        while True:
            started = time.monotonic()
            reason = await self._run_once(service)
            if reason is None:
                return
            try:
                await self._end_remains(service)
            except StillRunningError as error:
                reason = f"{reason}, and {error}"
            lines = last_lines(self._data_dir.log_file(service.name))
            if not self._ready[service.name].is_set():
                if not self._first_failure.done():
                    log_file = self._data_dir.log_file(service.name)
                    self._first_failure.set_result(
                        ServiceFailedError(service.name, reason, log_file, lines)
                    )
                return
            if time.monotonic() - started > STABLE_AFTER_S:
                delay_s = FIRST_DELAY_S
            detail = f"{reason}; starting again in {delay_s:g} s"
            self._tell(service, "restarting", detail, tuple(lines[-5:]))
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, LONGEST_DELAY_S)

    async def _run_once(self, service: Service) -> str | None:
        """One life of the process: why it ended, or None for a task that is done."""
        self._tell(service, "starting")
        started = time.monotonic()
        try:
            child = await self._spawn(service)
        except OSError as error:
            return f"could not be started ({error})"
        ended = asyncio.create_task(child.wait())
        try:
            if service.is_task:
                code = await asyncio.wait_for(asyncio.shield(ended), service.ready_deadline_s)
                if code != 0:
                    return _why(code)
            elif not await self._becomes_ready(service, ended):
                if ended.done():
                    return _why(ended.result())
                await child.stop(signal.SIGKILL, 0, self.hurry)
                return f"was not ready after {service.ready_deadline_s:g} s"
            self._tell(service, "ready", f"{time.monotonic() - started:.1f} s")
            self._ready[service.name].set()
            return None if service.is_task else _why(await ended)
        except TimeoutError:
            await child.stop(signal.SIGKILL, 0, self.hurry)
            return f"was not done after {service.ready_deadline_s:g} s"
        finally:
            ended.cancel()
            if child.returncode is not None:
                self._children.pop(service.name, None)

    async def _spawn(self, service: Service) -> Child:
        spawning = asyncio.ensure_future(
            Child.spawn(
                service.name,
                service.command(),
                env=service.env(),
                log_file=self._data_dir.log_file(service.name),
                pids=self._data_dir.pids,
            )
        )
        try:
            child = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            # A stop between fork and here must still find the child.
            self._children[service.name] = await spawning
            raise
        self._children[service.name] = child
        return child

    async def _becomes_ready(self, service: Service, ended: asyncio.Task[int]) -> bool:
        deadline = time.monotonic() + service.ready_deadline_s
        interval_s = PROBE_INTERVAL_S
        while time.monotonic() < deadline and not ended.done():
            if await service.is_ready() and not ended.done():
                return True
            await asyncio.wait({ended}, timeout=interval_s)
            interval_s = min(interval_s * 1.3, LONGEST_PROBE_INTERVAL_S)
        return False

    def _tell(
        self, service: Service, state: State, detail: str = "", lines: tuple[str, ...] = ()
    ) -> None:
        self._listener(Event(service.name, state, detail, lines))


def _why(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
