"""`loraplex up`: everything on this machine, in the foreground, until Ctrl-C.

Puts the pieces together: data directory and lock, what an earlier run left, secrets, ports, the model,
the services, the demo's data, and the text that tells a newcomer what to do next.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from loraplex_platform.local.base_model import BaseModel, find_base_model
from loraplex_platform.local.credentials import load_or_make
from loraplex_platform.local.data_dir import DataDir, write_private
from loraplex_platform.local.display import Display
from loraplex_platform.local.errors import LocalModeError, ServiceFailedError, SettingError
from loraplex_platform.local.ports import is_loopback, settle_port
from loraplex_platform.local.process import end_stale
from loraplex_platform.local.seed import Demo
from loraplex_platform.local.services import Fleet, FleetOptions
from loraplex_platform.local.supervisor import Supervisor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The flags of `loraplex up`."""

    data_dir: Path
    host: str
    gateway_port: int
    control_port: int
    console_port: int | None  # None: --no-console
    model: str
    database_url: str | None
    serve_database_url: str | None
    redis_url: str | None
    demo: bool
    force_unsafe_demo: bool
    engine_flags: tuple[str, ...]
    tool_format: str | None  # None: as the chat template says


def run_up(options: UpOptions, console: Console) -> int:
    """Run the fleet until a signal; the exit code is 0 after an orderly stop.

    Raises:
        LocalModeError: it could not start; nothing is left running.
    """
    if options.demo and not is_loopback(options.host) and not options.force_unsafe_demo:
        raise SettingError(
            f"--demo makes keys and a login that are shown on this terminal, and --host {options.host} "
            "lets other machines in: leave --host out, start without --demo, or, if you are sure, add "
            "--force-unsafe-demo"
        )
    if options.serve_database_url is not None and options.database_url is None:
        raise SettingError(
            "--serve-database-url is another login to an external Postgres: give its owner's as "
            "--database-url, or leave both out"
        )
    data_dir = DataDir.create(options.data_dir)
    with data_dir.lock():
        for file in (data_dir.state_file, data_dir.demo_file):
            file.unlink(missing_ok=True)
        for stale in end_stale(data_dir.pids):
            console.print(f"Ended {stale.name} (pid {stale.pid}), left by a run that was killed.")
        settled = _settle_ports(options)
        model = find_base_model(options.model)
        return asyncio.run(_Run(options, data_dir, settled, model, console).run())


def _settle_ports(options: UpOptions) -> tuple[int, int, int | None]:
    taken: set[int] = set()

    def settle(port: int, purpose: str, flag: str) -> int:
        found = settle_port(options.host, port, purpose=purpose, flag=flag)
        while port == 0 and found in taken:
            found = settle_port(options.host, 0, purpose=purpose, flag=flag)
        if found in taken:
            raise SettingError(f"{flag} {found} is another service's port too: choose another")
        taken.add(found)
        return found

    gateway = settle(options.gateway_port, "gateway", "--gateway-port")
    control = settle(options.control_port, "control API", "--control-port")
    console = (
        None
        if options.console_port is None
        else settle(options.console_port, "console", "--console-port")
    )
    return gateway, control, console


class _Run:
    """One life of a fleet."""

    def __init__(
        self,
        options: UpOptions,
        data_dir: DataDir,
        ports: tuple[int, int, int | None],
        model: BaseModel,
        console: Console,
    ) -> None:
        self._options = options
        self._data_dir = data_dir
        self._credentials = load_or_make(data_dir.secrets_file)
        self._console = console
        self._display = Display(console)
        self._fleet = FleetOptions(
            host=options.host,
            gateway_port=ports[0],
            control_port=ports[1],
            console_port=ports[2],
            model_dir=model.folder,
            base_model=model.name,
            database_url=options.database_url,
            serve_database_url=options.serve_database_url,
            redis_url=options.redis_url,
            engine_flags=options.engine_flags,
            tool_format=options.tool_format,
        )

    async def run(self) -> int:
        """Start, tell, wait, stop."""
        services = Fleet(self._fleet, self._data_dir, self._credentials).services()
        supervisor = Supervisor(services, self._data_dir, self._display)
        told_to_stop = asyncio.Event()

        def on_signal(number: signal.Signals) -> None:
            # A closed terminal says so twice (the kernel and the shell), and nobody is in a hurry there.
            if told_to_stop.is_set() and number != signal.SIGHUP:
                supervisor.hurry.set()
            told_to_stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under `nohup` the terminal's end is nothing to us.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, on_signal, number)
        try:
            with self._display:
                is_up = await _unless(told_to_stop, asyncio.ensure_future(self._start(supervisor)))
            if is_up:
                await told_to_stop.wait()
        except ServiceFailedError as error:
            for line in error.last_lines:
                self._console.print(Text(f"    {line}", style="dim"), soft_wrap=True)
            raise
        finally:
            for file in (self._data_dir.state_file, self._data_dir.demo_file):
                file.unlink(missing_ok=True)
            if told_to_stop.is_set():
                self._console.print("Stopping (once more to stop at once) ...")
            with self._display:
                await supervisor.stop()
        return 0

    async def _start(self, supervisor: Supervisor) -> bool:
        await supervisor.start()
        demo = None
        if self._options.demo:
            self._display.step("demo", "looking at the demo's data")
            demo = await asyncio.to_thread(self._seed)
            self._display.step("demo", "ready", is_done=True)
        state = {
            "pid": os.getpid(),
            "gateway_url": self._fleet.gateway_url,
            "control_url": self._fleet.control_url,
            "console_url": self._fleet.console_url,
            "base_model": self._fleet.base_model,
        }
        if demo is not None:
            write_private(self._data_dir.demo_file, self._demo_content(demo))
        write_private(self._data_dir.state_file, state)
        self._tell(demo)
        return True

    def _seed(self) -> Demo:
        from loraplex_platform.admin_client import AdminApiError, AdminClient
        from loraplex_platform.local.seed import seed_demo

        def tell(text: str) -> None:
            self._display.step("demo", text)

        try:
            with AdminClient(self._fleet.control_url, self._credentials.admin_key) as admin:
                return seed_demo(admin, self._data_dir, self._fleet.base_model, tell)
        except AdminApiError as error:
            raise LocalModeError(f"the demo's data could not be made: {error}") from error

    def _demo_content(self, demo: Demo) -> dict[str, Any]:
        return {
            "gateway_url": self._fleet.gateway_url,
            "control_url": self._fleet.control_url,
            "console_url": self._fleet.console_url,
            "admin_key": self._credentials.admin_key,
            "console_login": {"email": demo.email, "password": demo.password},
            "tenants": [
                {**asdict(tenant), "models": list(tenant.models)} for tenant in demo.tenants
            ],
            "pid": os.getpid(),
        }

    # ------------------------------------------------------------------------ words

    def _tell(self, demo: Demo | None) -> None:
        fleet = self._fleet
        rows = [("API", f"{fleet.gateway_url}/v1"), ("Admin API", f"{fleet.control_url}/docs")]
        if fleet.console_url is not None:
            rows.append(("Console", fleet.console_url))
        folder = _shown(self._data_dir.root)
        if demo is None:
            rows.append(("Admin key", f"in {folder}/secrets.json"))
        else:
            where = (
                f"{demo.password}   (shown this once; later: {folder}/demo.json)"
                if demo.is_password_new
                else f"password in {folder}/demo.json"
            )
            rows.append(("Login", f"{demo.email}  {where}"))
            for tenant in demo.tenants:
                rows.append((f"Tenant {tenant.slug}", ", ".join(tenant.models)))
        rows.append(("Logs", f"{folder}/logs"))
        text = "\n".join(f"{name:<14} {value}" for name, value in rows)
        title = f"Loraplex is ready after {self._display.elapsed_s:.1f} s"
        if self._console.is_terminal:
            self._console.print(Panel(Text(text, overflow="fold"), title=title, expand=False))
        else:
            self._plain(f"{title}\n{text}")
        if demo is not None:
            self._plain(_first_request(fleet.gateway_url, demo))
        data_dir = self._data_dir.root
        suffix = (
            "" if data_dir == Path(".loraplex").resolve() else f" --data-dir {shlex.quote(folder)}"
        )
        if demo is not None:
            self._plain(
                f"All of it at once:\n  {_program()} demo{suffix}\n  {_program()} verify{suffix}\n"
            )
        self._plain("Ctrl-C stops everything.")

    def _plain(self, text: str) -> None:
        """Text to be copied: as it is, never wrapped or coloured."""
        self._console.print(Text(text), soft_wrap=True, highlight=False)


async def _unless(event: asyncio.Event, task: asyncio.Task[T] | asyncio.Future[T]) -> T | None:
    """The task's result, or None if the event comes first (the task is cancelled then)."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        either: set[asyncio.Future[Any]] = {waiting, task}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        return None
    finally:
        waiting.cancel()


def _first_request(gateway_url: str, demo: Demo) -> str:
    tenant = demo.tenants[0]
    model = "pirate" if "pirate" in tenant.models else tenant.models[0]
    question = "How do I boil an egg?"
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "{question}"}}]}}'
    return f"""
First request:
  curl {gateway_url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -H 'Authorization: Bearer {tenant.api_key}' \\
    -d '{body}'

The same in Python (pip install openai):
  from openai import OpenAI
  client = OpenAI(base_url="{gateway_url}/v1", api_key="{tenant.api_key}")
  answer = client.chat.completions.create(
      model="{model}", messages=[{{"role": "user", "content": "{question}"}}]
  )
  print(answer.choices[0].message.content)
"""


def _program() -> str:
    """How the reader can call us: from a clone, the program is in .venv."""
    return ".venv/bin/loraplex" if Path(".venv/bin/loraplex").exists() else "loraplex"


def _shown(path: Path) -> str:
    """A path as people write it: relative where it lies below the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
