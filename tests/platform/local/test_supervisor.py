"""Starting in order, restarting, and stopping in reverse order, with real small processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from loraplex_platform.local.data_dir import DataDir
from loraplex_platform.local.errors import ServiceFailedError, StillRunningError
from loraplex_platform.local.supervisor import Event, Service, Supervisor

from tests.support.processes import DEAF, POLITE, is_alive, python, until, wait_until


class Rig:
    """A supervisor over dummy services, with what happened to them."""

    def __init__(self, folder: Path) -> None:
        self.data_dir = DataDir.create(folder / "data")
        self.journal = folder / "journal"
        self.journal.touch()
        self.events: list[Event] = []
        self.supervisor: Supervisor | None = None

    def polite(self, name: str, *after: str, **settings: object) -> Service:
        """A service that is ready once it runs and ends when told to."""
        ready = self.data_dir.run / f"{name}.ready"
        command = python(POLITE, name, self.journal, ready)
        return self.service(name, command, ready, *after, **settings)

    def service(
        self, name: str, command: list[str], ready: Path, *after: str, **settings: object
    ) -> Service:
        """Any command that makes the file `ready`."""

        is_there = ready.exists

        async def is_ready() -> bool:
            return is_there()

        def fresh_command() -> list[str]:
            ready.unlink(missing_ok=True)
            return command

        return Service(
            name=name,
            command=fresh_command,
            env=lambda: dict(os.environ),
            is_ready=is_ready,
            after=after,
            **settings,  # type: ignore[arg-type] # checked by the dataclass's users
        )

    def run(self, *services: Service) -> Supervisor:
        """The supervisor over these."""
        self.supervisor = Supervisor(services, self.data_dir, self.events.append)
        return self.supervisor

    def lines(self, what: str) -> list[str]:
        """Names of services that noted `what`, in order."""
        rows = [line.split() for line in self.journal.read_text().splitlines()]
        return [row[1] for row in rows if row[0] == what]

    def states(self, name: str) -> list[str]:
        """What became of one service."""
        return [event.state for event in self.events if event.service == name]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    if rig.supervisor is not None:
        rig.supervisor.hurry.set()
        await rig.supervisor.stop()


async def test_services_start_after_what_they_need_and_stop_before_it(rig: Rig) -> None:
    supervisor = rig.run(
        rig.polite("database"),
        rig.polite("engine"),
        rig.polite("gateway", "database", "engine"),
        rig.polite("console", "gateway"),
    )

    await supervisor.start()
    started = rig.lines("start")
    pids = [supervisor.pid(name) for name in ("database", "engine", "gateway", "console")]
    await supervisor.stop()

    assert set(started[:2]) == {"database", "engine"}
    assert started[2:] == ["gateway", "console"]
    assert rig.lines("end")[:2] == ["console", "gateway"]
    assert set(rig.lines("end")[2:]) == {"database", "engine"}
    assert not any(is_alive(pid) for pid in pids if pid is not None)
    assert None not in pids
    assert list(rig.data_dir.pids.iterdir()) == []


async def test_a_task_runs_to_its_end_before_what_needs_it(rig: Rig) -> None:
    note = f"open({str(rig.journal)!r}, 'a').write('start migrate 0\\n')"
    migrate = rig.service("migrate", python(note), rig.data_dir.run / "x", is_task=True)
    supervisor = rig.run(migrate, rig.polite("gateway", "migrate"))

    await supervisor.start()

    assert rig.lines("start") == ["migrate", "gateway"]
    assert rig.states("migrate") == ["waiting", "starting", "ready"]


async def test_a_task_that_fails_stops_the_start_and_its_last_lines_are_kept(rig: Rig) -> None:
    code = "import sys; print('column is missing'); sys.exit(3)"
    migrate = rig.service("migrate", python(code), rig.data_dir.run / "x", is_task=True)
    supervisor = rig.run(migrate, rig.polite("gateway", "migrate"))

    with pytest.raises(ServiceFailedError, match="migrate ended with exit code 3") as caught:
        await supervisor.start()

    assert caught.value.last_lines == ["column is missing"]
    assert str(rig.data_dir.log_file("migrate")) in str(caught.value)
    assert rig.lines("start") == []


async def test_a_service_that_ends_before_it_is_ready_stops_the_start(rig: Rig) -> None:
    ready = rig.data_dir.run / "never"
    broken = rig.service("engine", python("raise SystemExit('no model')"), ready)
    supervisor = rig.run(rig.polite("database"), broken)

    with pytest.raises(ServiceFailedError, match="engine ended with exit code 1") as caught:
        await supervisor.start()
    await supervisor.stop()

    assert caught.value.last_lines == ["no model"]
    assert set(rig.lines("start")) == set(rig.lines("end"))


async def test_a_service_that_is_not_ready_in_time_stops_the_start_and_is_gone(rig: Rig) -> None:
    pid_file = rig.data_dir.run / "pid"
    code = (
        f"import os, signal; open({str(pid_file)!r}, 'w').write(str(os.getpid())); signal.pause()"
    )
    slow = rig.service("engine", python(code), rig.data_dir.run / "never", ready_deadline_s=0.5)

    with pytest.raises(ServiceFailedError, match=r"was not ready after 0\.5 s"):
        await rig.run(slow).start()

    assert not is_alive(int(pid_file.read_text()))


async def test_a_crashed_service_comes_back_and_says_so(rig: Rig) -> None:
    supervisor = rig.run(rig.polite("database"), rig.polite("gateway", "database"))
    await supervisor.start()
    first = supervisor.pid("gateway")
    assert first is not None

    os.kill(first, signal.SIGKILL)
    await until(lambda: rig.states("gateway").count("ready") == 2)

    assert supervisor.pid("gateway") not in {None, first}
    assert rig.lines("start").count("database") == 1
    told = next(event for event in rig.events if event.state == "restarting")
    assert told.service == "gateway"
    assert told.detail == "was ended by SIGKILL; starting again in 0.5 s"


async def test_a_deaf_service_is_killed_at_its_deadline(rig: Rig) -> None:
    ready = rig.data_dir.run / "deaf.ready"
    deaf = rig.service("deaf", python(DEAF, ready), ready, stop_deadline_s=0.3)
    supervisor = rig.run(deaf)
    await supervisor.start()
    pid = supervisor.pid("deaf")
    assert pid is not None

    await supervisor.stop()

    assert not is_alive(pid)
    assert rig.events[-1] == Event("deaf", "stopped", "had to be killed")


async def test_hurry_ends_a_deaf_service_at_once(rig: Rig) -> None:
    ready = rig.data_dir.run / "deaf.ready"
    supervisor = rig.run(rig.service("deaf", python(DEAF, ready), ready, stop_deadline_s=1000.0))
    await supervisor.start()
    pid = supervisor.pid("deaf")
    assert pid is not None

    stopping = asyncio.create_task(supervisor.stop())
    await until(lambda: rig.states("deaf")[-1] == "stopping")
    supervisor.hurry.set()
    await stopping

    assert not is_alive(pid)


async def test_a_stop_in_the_middle_of_the_start_leaves_nothing(rig: Rig) -> None:
    never = rig.service("engine", python("import signal; signal.pause()"), rig.data_dir.run / "x")
    supervisor = rig.run(rig.polite("database"), never)
    starting = asyncio.create_task(supervisor.start())
    await until(lambda: supervisor.pid("engine") is not None and bool(rig.lines("start")))
    pids = [supervisor.pid(name) for name in ("database", "engine")]

    starting.cancel()
    await supervisor.stop()

    assert not any(is_alive(pid) for pid in pids if pid is not None)
    assert None not in pids


async def test_what_a_service_leaves_behind_is_ended_with_it(rig: Rig) -> None:
    child_file = rig.data_dir.run / "child"
    ready = rig.data_dir.run / "parent.ready"
    code = f"""
import os, signal
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True: signal.pause()
open({str(child_file)!r}, "w").write(str(child))
open({str(ready)!r}, "w").close()
signal.pause()
"""
    supervisor = rig.run(rig.service("parent", python(code), ready))
    await supervisor.start()
    child = int(child_file.read_text())
    assert is_alive(child)

    await supervisor.stop()

    await until(lambda: not is_alive(child))


async def test_what_a_service_leaves_outside_its_group_is_ended_before_it_is_back(rig: Rig) -> None:
    """As a keeper does with its server, on a system that has no death signal."""
    left = rig.data_dir.run / "left"
    ready = rig.data_dir.run / "keeper.ready"
    code = f"""
import os, signal
child = os.fork()
if child == 0:
    os.setsid()
    while True: signal.pause()
open({str(left)!r}, "a").write(f"{{child}}\\n")
open({str(ready)!r}, "w").close()
signal.pause()
"""
    hurried: list[bool] = []

    def pids() -> list[int]:
        return [int(line) for line in left.read_text().splitlines()]

    def end_remains(is_hurried: Callable[[], bool]) -> None:
        hurried.append(is_hurried())
        for pid in pids():
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(is_alive(pid) for pid in pids()))

    keeper = rig.service("keeper", python(code), ready, end_remains=end_remains)
    supervisor = rig.run(keeper)
    await supervisor.start()
    keeper_pid = supervisor.pid("keeper")
    assert keeper_pid is not None

    os.kill(keeper_pid, signal.SIGKILL)
    await until(lambda: rig.states("keeper").count("ready") == 2)
    first, second = pids()
    assert not is_alive(first)
    assert is_alive(second)
    supervisor.hurry.set()
    await supervisor.stop()

    assert not is_alive(second)
    assert hurried == [False, True]


async def test_what_cannot_be_ended_is_not_called_stopped(rig: Rig) -> None:
    def end_remains(_: Callable[[], bool]) -> None:
        raise StillRunningError("postgres", 4711)

    ready = rig.data_dir.run / "database.ready"
    command = python(POLITE, "database", rig.journal, ready)
    database = rig.service("database", command, ready, end_remains=end_remains)
    supervisor = rig.run(database, rig.polite("gateway", "database"))
    await supervisor.start()

    with pytest.raises(StillRunningError, match=r"postgres \(pid 4711\) still runs"):
        await supervisor.stop()

    assert rig.states("gateway")[-1] == "stopped"
    assert rig.states("database")[-1] == "stuck"
    rig.supervisor = None  # its stop, which all tests end with, was this one


async def test_the_logs_of_earlier_runs_are_kept(rig: Rig) -> None:
    for number in range(7):
        path = rig.data_dir.rotate_log("engine")
        path.write_text(f"run {number}")

    texts = {path.name: path.read_text() for path in rig.data_dir.logs.iterdir()}

    assert texts == {
        "engine.log": "run 6",
        **{f"engine.log.{age}": f"run {6 - age}" for age in range(1, 6)},
    }


async def test_a_service_listed_before_what_it_needs_is_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="gateway comes after"):
        rig.run(rig.polite("gateway", "database"), rig.polite("database"))
