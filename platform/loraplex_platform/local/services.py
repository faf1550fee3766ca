"""The services of a local fleet: each one's command, environment, order and sign of readiness.

Every command is one that a cluster or compose runs too. Each service gets the secrets that it needs and
no others.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loraplex_platform.local.credentials import Credentials
from loraplex_platform.local.data_dir import DataDir, read_json
from loraplex_platform.local.ports import is_loopback, reachable_host
from loraplex_platform.local.readiness import (
    Probe,
    at_once,
    gateway_with_engine,
    http_ok,
    http_ok_at_port_file,
)
from loraplex_platform.local.supervisor import Service
from loraplex_platform.variables import with_login

# How long a stream may go on after Ctrl-C. A person waits at the terminal: shorter than a cluster's.
DRAIN_GRACE_S = 10.0
# What comes after the grace, at worst: aborting what is left, settling it, closing connections.
DRAIN_END_S = 20.0
ENGINE_END_S = 15.0
# Longer than a keeper waits for its server: a killed keeper cannot say how its server ended.
SERVER_END_S = 55.0
# Postgres ends "immediately" within five seconds. What a keeper has not ended then, the supervisor ends.
SERVER_HURRY_S = 6.0


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What `loraplex up` was asked for, with everything settled (ports, model folder)."""

    host: str
    gateway_port: int
    control_port: int
    console_port: int | None  # None: no console
    model_dir: Path
    base_model: str
    database_url: str | None = None  # None: embedded
    serve_database_url: str | None = None  # None: through a login that `migrate` makes
    redis_url: str | None = None
    engine_flags: tuple[str, ...] = ()
    tool_format: str | None = None  # None: as the gateway's setting says by default

    def url(self, port: int) -> str:
        """The address by which this machine reaches `port`."""
        return f"http://{reachable_host(self.host)}:{port}"

    @property
    def gateway_url(self) -> str:
        """Where the data plane answers."""
        return self.url(self.gateway_port)

    @property
    def control_url(self) -> str:
        """Where the control API answers."""
        return self.url(self.control_port)

    @property
    def console_url(self) -> str | None:
        """Where the console answers."""
        return None if self.console_port is None else self.url(self.console_port)


class Fleet:
    """Builds the services of one data directory."""

    def __init__(self, options: FleetOptions, data_dir: DataDir, credentials: Credentials) -> None:
        self._options = options
        self._data_dir = data_dir
        self._credentials = credentials
        self._socket_dir = data_dir.socket_dir()
        self._engine_port_file = data_dir.run / "engine.port"
        self._worker_port_file = data_dir.run / "worker.port"

    def services(self) -> list[Service]:
        """In starting order; all but Postgres, Redis and the schema come up side by side."""
        options = self._options
        services = []
        if options.database_url is None:
            services.append(self._embedded("postgres"))
        if options.redis_url is None:
            services.append(self._embedded("redis"))
        on_redis = ("redis",) if options.redis_url is None else ()
        on_postgres = ("postgres",) if options.database_url is None else ()
        services += [
            Service(
                name="engine",
                command=self._engine_command,
                env=self._engine_env,
                is_ready=http_ok_at_port_file(self._engine_port_file, "/ready"),
                after=on_redis,
                ready_deadline_s=300.0,
                stop_deadline_s=DRAIN_GRACE_S + ENGINE_END_S,
            ),
            Service(
                name="migrate",
                command=lambda: _loraplex("migrate"),
                env=lambda: self._env(self._migrate_settings()),
                is_ready=at_once,
                after=on_postgres,
                is_task=True,
                ready_deadline_s=120.0,
            ),
            Service(
                name="worker",
                command=self._worker_command,
                env=self._worker_env,
                is_ready=http_ok_at_port_file(self._worker_port_file, "/live"),
                after=("migrate", *on_redis),
                # It lands the engine's journal: the engine's last entries come from ended requests.
                stop_before=("engine",),
                stop_deadline_s=10.0,
            ),
            Service(
                name="gateway",
                command=lambda: _loraplex("gateway"),
                env=self._gateway_env,
                is_ready=gateway_with_engine(reachable_host(options.host), options.gateway_port),
                after=("migrate", *on_redis),
                stop_before=("engine", "worker"),
                ready_deadline_s=300.0,
                stop_deadline_s=DRAIN_GRACE_S + DRAIN_END_S,
            ),
            Service(
                name="control",
                command=lambda: _loraplex("control"),
                env=self._control_env,
                is_ready=self._http(options.control_port, "/ready"),
                after=("migrate", *on_redis),
                stop_before=("engine", "worker", "gateway"),
                ready_deadline_s=60.0,
                stop_deadline_s=20.0,  # its own drain takes up to 10 s
            ),
        ]
        if options.console_port is not None:
            services.append(
                Service(
                    name="console",
                    command=lambda: _loraplex("console"),
                    env=self._console_env,
                    is_ready=self._http(options.console_port, "/_stcore/health"),
                    stop_before=("control",),
                    ready_deadline_s=60.0,
                    stop_deadline_s=5.0,
                )
            )
        return services

    def database_url(self) -> str:
        """The external Postgres, or the embedded one once it runs: the owner's login."""
        return self._options.database_url or self._embedded_url("postgres")

    def redis_url(self) -> str:
        """The external Redis, or the embedded one once it runs."""
        return self._options.redis_url or self._embedded_url("redis")

    # ------------------------------------------------------------------------ environments

    def _env(self, settings: Mapping[str, str]) -> dict[str, str]:
        # What the caller's shell has set for Loraplex must not leak into services by accident.
        base = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("LORAPLEX_")
            or name in {"LORAPLEX_CACHE_DIR", "LORAPLEX_LOG_LEVEL", "LORAPLEX_LOG_FORMAT"}
        }
        return {**base, **settings}

    def _migrate_settings(self) -> dict[str, str]:
        settings = {"LORAPLEX_DATABASE_URL": self.database_url()}
        if self._options.serve_database_url is None:
            settings["LORAPLEX_SERVE_ROLE"] = self._credentials.serve_role
            settings["LORAPLEX_SERVE_PASSWORD"] = self._credentials.serve_password
        return settings

    def _serving_url(self) -> str:
        """The same Postgres through a login that can change nothing in the books."""
        made = self._credentials
        return self._options.serve_database_url or with_login(
            self.database_url(), made.serve_role, made.serve_password
        )

    def _data_stores(self) -> dict[str, str]:
        return {
            "LORAPLEX_DATABASE_URL": self._serving_url(),
            "LORAPLEX_REDIS_URL": self.redis_url(),
        }

    def _model(self) -> dict[str, str]:
        return {
            "LORAPLEX_MODEL_DIR": str(self._options.model_dir),
            "LORAPLEX_BASE_MODEL": self._options.base_model,
        }

    def _engine_env(self) -> dict[str, str]:
        # Flags that `loraplex up` does not have reach the engine as LORAPLEX_ENGINE_<FLAG>.
        given = {k: v for k, v in os.environ.items() if k.startswith("LORAPLEX_ENGINE_")}
        # Not as a flag: a command line is everybody's to read, and the URL may hold a password.
        own = {"LORAPLEX_ENGINE_REDIS_URL": self.redis_url()}
        return self._env({"LORAPLEX_ENGINE_DRAIN_GRACE_S": str(DRAIN_GRACE_S)} | given | own)

    def _gateway_env(self) -> dict[str, str]:
        tool_format = self._options.tool_format
        return self._env(
            self._data_stores()
            | self._model()
            | ({} if tool_format is None else {"LORAPLEX_TOOL_FORMAT": tool_format})
            | {
                "LORAPLEX_KEY_PEPPER": self._credentials.key_pepper,
                "LORAPLEX_SALT_KEY": self._credentials.salt_key,
                "LORAPLEX_SPOOL_DIR": str(self._data_dir.spool),
                "LORAPLEX_GATEWAY_HOST": self._options.host,
                "LORAPLEX_GATEWAY_PORT": str(self._options.gateway_port),
                "LORAPLEX_DRAIN_GRACE_S": str(DRAIN_GRACE_S),
            }
        )

    def _control_env(self) -> dict[str, str]:
        options = self._options
        return self._env(
            self._data_stores()
            | self._model()
            | _issuer()
            | {
                "LORAPLEX_KEY_PEPPER": self._credentials.key_pepper,
                "LORAPLEX_SESSION_KEY": self._credentials.session_key,
                "LORAPLEX_WEBHOOK_KEY": self._credentials.webhook_key,
                "LORAPLEX_ADMIN_KEY": self._credentials.admin_key,
                "LORAPLEX_STORE_URL": self._data_dir.store.as_uri(),
                "LORAPLEX_CONTROL_HOST": options.host,
                "LORAPLEX_CONTROL_PORT": str(options.control_port),
                "LORAPLEX_CONTROL_TRUSTED_PROXIES": self._console_address(),
                "LORAPLEX_GATEWAY_URL": options.gateway_url,
                "LORAPLEX_CONSOLE_URL": options.console_url or options.control_url,
            }
        )

    def _worker_env(self) -> dict[str, str]:
        own = {
            "LORAPLEX_WORKER_PORT": "0",
            "LORAPLEX_WEBHOOK_KEY": self._credentials.webhook_key,
        }
        return self._env(self._data_stores() | self._model() | _issuer() | own)

    def _console_address(self) -> str:
        """Whose word about a visitor counts. On loopback all visitors are this machine anyway, and
        any program of it could claim to be the console."""
        host = self._options.host
        return "" if is_loopback(host) else reachable_host(host).strip("[]")

    def _console_env(self) -> dict[str, str]:
        return self._env(
            {
                "LORAPLEX_CONTROL_URL": self._options.control_url,
                "LORAPLEX_CONSOLE_HOST": self._options.host,
                "LORAPLEX_CONSOLE_PORT": str(self._options.console_port),
            }
        )

    # ------------------------------------------------------------------------ commands

    def _engine_command(self) -> Sequence[str]:
        self._engine_port_file.unlink(missing_ok=True)
        return _loraplex(
            "engine",
            *("--model-dir", str(self._options.model_dir)),
            *("--base-model", self._options.base_model),
            *("--address", f"ipc://{self._socket_dir}/engine.sock"),
            *("--replica-id", "local"),
            *("--store-url", self._data_dir.store.as_uri()),
            *("--journal-dir", str(self._data_dir.journal)),
            *("--metrics-port", "0", "--metrics-port-file", str(self._engine_port_file)),
            *self._options.engine_flags,
        )

    def _worker_command(self) -> Sequence[str]:
        self._worker_port_file.unlink(missing_ok=True)
        return _loraplex("worker", "--port-file", str(self._worker_port_file))

    def _http(self, port: int, path: str) -> Probe:
        return http_ok(reachable_host(self._options.host), port, path)

    def _embedded(self, kind: str) -> Service:
        url_file = self._url_file(kind)

        def command() -> Sequence[str]:
            url_file.unlink(missing_ok=True)
            keeper = "loraplex_platform.local.keeper"
            folder = self._data_dir.root / kind
            return [sys.executable, "-m", keeper, kind, str(folder), str(url_file)]

        async def is_ready() -> bool:
            return url_file.exists()

        def end_remains(is_hurried: Callable[[], bool]) -> None:
            # Imported here: the drivers of both servers are nothing that a start should wait for.
            from loraplex_platform.local.embedded import end_server

            end_server(kind, self._data_dir.root / kind, is_hurried)

        return Service(
            name=kind,
            command=command,
            env=lambda: self._env({}),
            is_ready=is_ready,
            ready_deadline_s=90.0,
            stop_deadline_s=SERVER_END_S,
            hurry_signal=signal.SIGQUIT,
            hurry_deadline_s=SERVER_HURRY_S,
            end_remains=end_remains,
        )

    def _url_file(self, kind: str) -> Path:
        return self._data_dir.run / f"{kind}.json"

    def _embedded_url(self, kind: str) -> str:
        content = read_json(self._url_file(kind))
        if content is None:
            # Its keeper is on its way back: the child that asked fails and is started again.
            raise FileNotFoundError(f"the embedded {kind} is not running")
        return str(content["url"])


def _loraplex(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "loraplex_platform.cli", *arguments]


def _issuer() -> dict[str, str]:
    """Who issues invoices is the caller's to say: there is no flag for it."""
    wanted = ("LORAPLEX_ISSUER_", "LORAPLEX_INVOICE_")
    return {name: value for name, value in os.environ.items() if name.startswith(wanted)}
