"""What is looked at: the LORAPLEX_* variables, or the local fleet of a data directory, and connections to both.

Settings are read leniently here: what a process would refuse at its start is what the doctor is to explain.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from loraplex_engine.urls import http_fault, passwords_in, redis_fault

from loraplex_platform.doctor.findings import BadUrlError, NotLookedAtError
from loraplex_platform.local.data_dir import DataDir, read_json
from loraplex_platform.local.errors import SettingError

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from loraplex_platform.db.session import Database
    from loraplex_platform.settings import DatabaseSettings

CONNECT_TIMEOUT_S: Final = 5
HTTP_TIMEOUT_S: Final = 5.0
DEFAULT_PORTS: Final = {"gateway": 8000, "control": 8001, "console": 8501}
_HTTP_OF: Final = {
    "gateway": ("LORAPLEX_GATEWAY_URL", "LORAPLEX_GATEWAY_PORT"),
    "control": ("LORAPLEX_CONTROL_URL", "LORAPLEX_CONTROL_PORT"),
    "console": ("LORAPLEX_CONSOLE_URL", "LORAPLEX_CONSOLE_PORT"),
    "worker": ("LORAPLEX_WORKER_URL", "LORAPLEX_WORKER_PORT"),
}
# Not the store: an engine only reads there.
_ENGINES_TOO: Final = frozenset({"LORAPLEX_REDIS_URL", "LORAPLEX_BASE_MODEL"})


@dataclass
class Look:
    """See the module's header.

    Attributes:
        source: where the configuration comes from, for people.
        variables: LORAPLEX_* as the processes get them, all of their processes' together.
        data_dir: of a local fleet; it need not exist.
        is_local: whether the configuration is the local fleet's.
        is_running: whether that fleet runs.
        with_model: load the model and try the row rule here.
    """

    source: str
    variables: Mapping[str, str]
    data_dir: DataDir
    is_local: bool
    is_running: bool = False
    with_model: bool = False
    engine_variables: Mapping[str, str] = field(default_factory=dict)
    database_error: str | None = None  # found by a check, for those after it

    # ------------------------------------------------------------------------ configuration

    def get(self, name: str) -> str | None:
        """A variable; None: not set, or empty. Where only an engine is, what it was told."""
        own = name.replace("LORAPLEX_", "LORAPLEX_ENGINE_", 1) if name in _ENGINES_TOO else ""
        return self.variables.get(name) or self.engine_variables.get(own) or None

    def secrets(self) -> Iterator[str]:
        """Whatever is in the variables that nobody may read in a report."""
        for name, value in {**self.engine_variables, **self.variables}.items():
            if name.endswith(("_KEY", "_PEPPER", "_PASSWORD", "_SECRET", "_TOKEN")):
                yield value
            elif "://" in value:
                yield from passwords_in(value)

    @property
    def model_dir(self) -> Path:
        """Where the base model lies, or would."""
        from loraplex_platform.local.base_model import cache_dir

        given = self.get("LORAPLEX_MODEL_DIR") or self.engine_variables.get(
            "LORAPLEX_ENGINE_MODEL_DIR"
        )
        return Path(given) if given else cache_dir() / "models" / self.base_model

    @property
    def base_model(self) -> str:
        """Its public name."""
        return self.get("LORAPLEX_BASE_MODEL") or "smollm2-135m"

    @property
    def owner_note(self) -> str:
        """How commands find the same database."""
        return f" --data-dir {self.data_dir.root}" if self.is_local else ""

    def url_of(self, process: str) -> str | None:
        """Where a process answers HTTP; None: nothing here says so."""
        url_name, port_name = _HTTP_OF[process]
        url = self.get(url_name)
        if url is not None:
            return url.rstrip("/")
        port = self.get(port_name)
        return None if port in (None, "0") else f"http://127.0.0.1:{port}"

    # ------------------------------------------------------------------------ the machine

    @cached_property
    def _inspection(self) -> asyncio.Task[dict[str, Any]]:
        return asyncio.create_task(self._inspect())

    async def inspection(self) -> dict[str, Any]:
        """What `loraplex_engine.inspection` says of this machine; asked once.

        Raises:
            NotLookedAtError: the engine is not installed here.
        """
        return await asyncio.shield(self._inspection)

    def need_torch(self) -> None:
        """Raises `NotLookedAtError` where no engine can run, so that this machine's size says nothing of one."""
        from importlib.util import find_spec

        if find_spec("torch") is None:
            raise NotLookedAtError(
                "torch is not installed here: engines run elsewhere (run doctor there too)"
            )

    async def _inspect(self) -> dict[str, Any]:
        self.need_torch()
        arguments = ["-m", "loraplex_engine.inspection"]
        if self.with_model:
            arguments += ["--model-dir", str(self.model_dir)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await process.communicate()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
        try:
            found = json.loads(out.splitlines()[-1])
        except (IndexError, ValueError):
            last = err.decode(errors="replace").strip().splitlines()[-1:]
            return {"torch_error": f"its inspection ended with {process.returncode}: {last}"}
        return dict(found)

    # ------------------------------------------------------------------------ Postgres

    def database_settings(self) -> DatabaseSettings:
        """How Postgres is reached.

        Raises:
            NotLookedAtError: nothing says so.
            BadUrlError: what says so is no URL of Postgres.
        """
        from loraplex_platform.settings import DatabaseSettings
        from loraplex_platform.urls import postgres_fault

        url = self.get("LORAPLEX_DATABASE_URL")
        if url is None:
            raise NotLookedAtError(self._nothing("LORAPLEX_DATABASE_URL"))
        fault = postgres_fault(url)
        if fault is not None:
            raise BadUrlError(f"LORAPLEX_DATABASE_URL: {fault}")
        # One connection at a time is all that is needed.
        return DatabaseSettings.model_validate({"database_url": url, "database_pool_size": 2})

    @contextlib.asynccontextmanager
    async def database(self) -> AsyncIterator[Database]:
        """As a serving process sees it.

        Raises:
            NotLookedAtError: it is not configured, does not answer, or has another schema; a check of its own says
                so with the remedy.
        """
        from sqlalchemy.exc import SQLAlchemyError

        from loraplex_platform.db.session import open_database
        from loraplex_platform.errors import UnavailableError

        settings = self.database_settings()
        if self.database_error is not None:
            raise NotLookedAtError(self.database_error)
        async with open_database(settings, statement_timeout_s=10.0) as database:
            try:
                yield database
            except UnavailableError:
                self.database_error = "the database does not answer: see database.reachable"
                raise NotLookedAtError(self.database_error) from None
            except SQLAlchemyError as error:
                reason = str(getattr(error, "orig", error)).strip().splitlines()[0]
                raise NotLookedAtError(
                    f"the database refuses ({reason}): see database.login and database.schema"
                ) from None

    # ------------------------------------------------------------------------ Redis

    def redis(self) -> Redis:
        """A client of it; the caller closes it.

        Raises:
            NotLookedAtError: nothing says where it is.
            BadUrlError: what says so is no URL of Redis.
        """
        from redis import asyncio as redis_asyncio

        url = self.needed("LORAPLEX_REDIS_URL")
        fault = redis_fault(url)
        if fault is not None:
            raise BadUrlError(f"LORAPLEX_REDIS_URL: {fault}")
        return redis_asyncio.Redis.from_url(
            url, socket_timeout=CONNECT_TIMEOUT_S, socket_connect_timeout=CONNECT_TIMEOUT_S
        )

    # ------------------------------------------------------------------------ HTTP

    async def ask(self, url: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON object of a GET; the object is empty where it is none.

        Raises:
            OSError: nobody answers.
        """
        import httpx

        fault = http_fault(url)
        if fault is not None:
            raise OSError(fault)
        try:
            async with httpx.AsyncClient(timeout=HTTP_TIMEOUT_S, trust_env=False) as client:
                response = await client.get(url)
        except httpx.InvalidURL:
            raise OSError("it cannot be read as a URL") from None
        except httpx.HTTPError as error:
            raise OSError(str(error) or type(error).__name__) from error
        try:
            body = response.json()
        except ValueError:
            body = {}
        return response.status_code, body if isinstance(body, dict) else {}

    def _nothing(self, variable: str) -> str:
        return (
            f"{variable} is not set, and no fleet runs on {self.data_dir.root}: start one with"
            " `loraplex up`, or set it"
        )

    def needed(self, variable: str) -> str:
        """A variable that a check cannot do without.

        Raises:
            NotLookedAtError: it is not set.
        """
        value = self.get(variable)
        if value is None:
            raise NotLookedAtError(self._nothing(variable))
        return value


def find_setup(data_dir: Path, *, with_model: bool = False) -> Look:
    """What to look at: the environment where it names a database, else the local fleet of `data_dir`."""
    from loraplex_platform.variables import read_secret_files

    folder = DataDir(data_dir.expanduser().resolve())
    given = {name: value for name, value in os.environ.items() if name.startswith("LORAPLEX_")}
    given |= read_secret_files()
    engine = {name: value for name, value in given.items() if name.startswith("LORAPLEX_ENGINE_")}
    if given.get("LORAPLEX_DATABASE_URL"):
        return Look("the environment", given, folder, False, False, with_model, engine)
    local, is_running = _local_variables(folder)
    source = f"the local fleet on {folder.root}" + ("" if is_running else " (it does not run)")
    return Look(source, given | local, folder, True, is_running, with_model, engine)


def _local_variables(folder: DataDir) -> tuple[dict[str, str], bool]:
    """What `loraplex up` gives its processes, as far as it is known, and whether it runs."""
    from loraplex_platform.local.demo_file import read_state
    from loraplex_platform.variables import with_login

    found: dict[str, str] = {}
    try:
        state = read_state(folder)
        secrets = read_json(folder.secrets_file) or {}
        postgres = read_json(folder.run / "postgres.json") if state else None
        redis = read_json(folder.run / "redis.json") if state else None
    except SettingError:
        return found, False  # the check of the secrets says so
    for name in ("key_pepper", "salt_key", "session_key", "admin_key", "webhook_key"):
        if secrets.get(name):
            found[f"LORAPLEX_{name.upper()}"] = str(secrets[name])
    if postgres is not None and "serve_role" in secrets:
        found["LORAPLEX_DATABASE_URL"] = with_login(
            str(postgres["url"]), str(secrets["serve_role"]), str(secrets["serve_password"])
        )
    if redis is not None:
        found["LORAPLEX_REDIS_URL"] = str(redis["url"])
    if folder.root.is_dir():
        found["LORAPLEX_STORE_URL"] = folder.store.as_uri()
        found["LORAPLEX_SPOOL_DIR"] = str(folder.spool)
    for key, name in (
        ("gateway_url", "LORAPLEX_GATEWAY_URL"),
        ("control_url", "LORAPLEX_CONTROL_URL"),
        ("console_url", "LORAPLEX_CONSOLE_URL"),
        ("base_model", "LORAPLEX_BASE_MODEL"),
    ):
        if state is not None and state.get(key):
            found[name] = str(state[key])
    port_file = folder.run / "worker.port"
    if state is not None and port_file.is_file():
        found["LORAPLEX_WORKER_PORT"] = port_file.read_text().strip()
    return found, state is not None
