"""One engine replica as a process: `python -m loraplex_engine.server --help`.

Owns the order of things and the exit code; the work is elsewhere:

| thread | module | does |
|---|---|---|
| main | here | signals, watchdog, draining |
| step-loop | `step_loop.py` | builds the engine, steps it |
| gateway-port | `gateway_port.py` | the ZeroMQ socket and the journal |
| health-http | `health.py` | /live /ready /metrics |
| registry | `registry.py` | the replica's record in Redis |
| block-events | `event_publisher.py` | what the prefix cache holds, for routers |

SIGTERM or SIGINT: new requests are refused with `draining`, running ones get `drain_grace_s` to
finish, what is left then ends as an error with its usage journaled, exit 0. A second signal ends the
grace at once. Exit 2: wrong settings. Exit 70: the engine failed and must be restarted. A
step that hangs makes the replica not ready after `stall_limit_s` and ends it after twice that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
import psutil
import structlog

from loraplex_engine.block_events import BlockEvent
from loraplex_engine.config import EngineConfig
from loraplex_engine.endpoint import Endpoint, EventsEndpoint
from loraplex_engine.errors import ConfigError, ModelError
from loraplex_engine.event_publisher import BlockEventPublisher
from loraplex_engine.gateway_port import GATEWAY_QUEUE_BYTES, MIN_GATEWAY_QUEUE_BYTES, GatewayPort
from loraplex_engine.health import STALL_LIMIT_S, HealthServer, Watchdog
from loraplex_engine.journal import Journal
from loraplex_engine.lifetime import die_with_parent
from loraplex_engine.metrics import EngineMetrics
from loraplex_engine.protocol import GATEWAY_TIMEOUT_S, EngineStats, ReplicaRecord
from loraplex_engine.registry import ReplicaRegistry
from loraplex_engine.step_loop import Engine, Failed, Output, ReplicaFacts, Started, StepLoop

log = structlog.get_logger(__name__)

EXIT_OK, EXIT_USAGE, EXIT_FAILED = 0, 2, 70
_TURN_S = 0.1  # how soon a signal is acted upon
_FLUSH_S = 10.0  # after the grace: for aborts to be stepped, journaled and sent


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What surrounds the engine; the engine's own settings are `EngineConfig`."""

    address: str
    replica_id: str
    journal_dir: Path
    advertise_address: str | None = None  # what gateways connect to; None: `address`
    redis_url: str | None = None
    events_address: str | None = None  # where cached blocks are published; None: nowhere
    advertise_events_address: str | None = None  # what routers connect to; None: `events_address`
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    metrics_port_file: Path | None = None
    curve_secret_key_file: Path | None = None
    curve_allowed_keys_file: Path | None = None
    gateway_timeout_s: float = GATEWAY_TIMEOUT_S
    gateway_queue_bytes: int = GATEWAY_QUEUE_BYTES
    drain_grace_s: float = 30.0
    stall_limit_s: float = STALL_LIMIT_S
    die_with_parent: bool = False

    def __post_init__(self) -> None:
        if self.gateway_queue_bytes < MIN_GATEWAY_QUEUE_BYTES:
            raise ConfigError(
                f"--gateway-queue-bytes {self.gateway_queue_bytes}: at least"
                f" {MIN_GATEWAY_QUEUE_BYTES}, or a busy step alone cuts gateways off"
            )


@dataclass(slots=True)
class _Shutdown:
    """What signals asked for. The handler takes no lock: it may interrupt whoever holds it."""

    num_signals: int = 0

    def note(self, number: int, frame: FrameType | None) -> None:
        self.num_signals += 1


class EngineServer:
    """One replica. `run` is a process's whole life; `start`, `drain`, `finish` are its parts.

    Args:
        build: makes the engine, on the step loop's thread.

    Raises:
        ConfigError: an address, a key, a port, a URL or the journal cannot be had.
    """

    def __init__(
        self, config: EngineConfig, options: ServerOptions, build: Callable[[], Engine]
    ) -> None:
        self._config = config
        self._options = options
        self._started_at = time.time()
        self._incarnation = uuid.uuid4().hex
        self._parent_pid = os.getppid()
        self._facts: ReplicaFacts | None = None
        self._process = psutil.Process()
        self._metrics = EngineMetrics(config.base_model)
        self._loop = StepLoop(
            build,
            self._publish,
            observe_step=self._metrics.observe_step,
            observe_load=self._metrics.observe_adapter_load,
        )
        self._watchdog = Watchdog(self._loop.stalled_s, limit_s=options.stall_limit_s)
        self._registry = (
            ReplicaRegistry(options.redis_url, self._describe) if options.redis_url else None
        )
        with contextlib.ExitStack() as undo:
            self._health = HealthServer(
                options.metrics_host,
                options.metrics_port,
                self._metrics.registry,
                live_problem=self._live_problem,
                ready_problem=self._ready_problem,
            )
            undo.callback(self._health.close)
            self._journal = Journal(options.journal_dir)
            undo.callback(self._journal.close)
            self._endpoint = Endpoint(
                options.address,
                curve_secret_key_file=options.curve_secret_key_file,
                curve_allowed_keys_file=options.curve_allowed_keys_file,
            )
            undo.callback(self._endpoint.close)
            self._block_events = self._open_block_events(options)
            undo.pop_all()
        self._port = GatewayPort(
            self._endpoint,
            self._journal,
            self._loop.submit,
            self.stats,
            self._metrics,
            replica_id=options.replica_id,
            incarnation=self._incarnation,
            max_live=config.most_seqs + config.max_waiting,
            gateway_timeout_s=options.gateway_timeout_s,
            gateway_queue_bytes=options.gateway_queue_bytes,
        )
        self._metrics.watch(
            self.stats, lambda: self._loop.last_step_unix_s, lambda: self._port.num_gateways
        )

    def run(self) -> int:
        """Serve until SIGTERM, SIGINT or a failure. Main thread only; returns the exit code."""
        shutdown = _Shutdown()
        signal.signal(signal.SIGTERM, shutdown.note)
        signal.signal(signal.SIGINT, shutdown.note)
        if self._options.die_with_parent:
            die_with_parent()
        self.start()
        while not shutdown.num_signals and self._port.failure is None:
            self._wait()
        is_orphan = self._options.die_with_parent and os.getppid() != self._parent_pid
        num_signals = shutdown.num_signals
        self.drain(
            0.0 if is_orphan else self._options.drain_grace_s,
            lambda: shutdown.num_signals > num_signals,
        )
        return self.finish()

    def start(self) -> None:
        """Begin to load the model and to answer; does not wait.

        Raises:
            ConfigError: the port file cannot be written; everything is closed again.
        """
        if self._options.metrics_port_file is not None:
            try:
                _write_port(self._options.metrics_port_file, self._health.port)
            except ConfigError:
                self._health.close()
                self._journal.close()
                self._endpoint.close()
                if self._block_events is not None:
                    self._block_events.close()
                raise
        self._health.start()
        log.info(
            "engine_starting",
            address=self._endpoint.address,
            replica_id=self._options.replica_id,
            metrics_port=self._health.port,
            pid=os.getpid(),
        )
        self._port.start()
        if self._block_events is not None:
            self._block_events.start()
        self._loop.start()
        if self._registry is not None:
            self._registry.start()

    @property
    def publish_block_event(self) -> Callable[[BlockEvent], None] | None:
        """What the engine is to tell of changes in its prefix cache; None: nobody."""
        return None if self._block_events is None else self._block_events.post

    @property
    def events_address(self) -> str | None:
        """Where block events are published, a TCP port of 0 resolved."""
        return None if self._block_events is None else self._block_events.address

    def stats(self) -> EngineStats | None:
        """The step loop's last snapshot, with what this process knows of itself."""
        stats = self._loop.stats
        if stats is None:
            return None
        return msgspec.structs.replace(
            stats,
            rss_bytes=self._process.memory_info().rss,
            uptime_s=time.time() - self._started_at,
        )

    # ------------------------------------------------------------------ phases

    def drain(self, grace_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Take nothing new and let running requests finish; cut short what is left after that."""
        if self._port.failure is not None:
            return
        log.info("engine_draining", num_requests=self._port.num_live, grace_s=grace_s)
        self._port.begin_drain()
        self._notify_registry()
        self._wait_until_idle(grace_s, is_over)
        if self._port.num_live and self._port.failure is None:
            log.warning("engine_cuts_short", num_requests=self._port.num_live)
            self._port.abort_all()
            self._wait_until_idle(_FLUSH_S, lambda: False)

    def _wait_until_idle(self, limit_s: float, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + limit_s
        while (
            self._port.num_live
            and self._port.failure is None
            and time.monotonic() < deadline
            and not is_over()
        ):
            self._wait()

    def _wait(self) -> None:
        """For something to change, a signal, or a tenth of a second; looks after the watchdog."""
        self._port.changed.wait(_TURN_S)
        self._port.changed.clear()
        is_stalled = not self._watchdog.check()
        if is_stalled != self._port.is_stalled:
            self._port.note_stall(is_stalled)
            self._notify_registry()
        if self._loop.stalled_s() > 2 * self._options.stall_limit_s:
            # Native code cannot be interrupted, so only a new process computes again.
            self._port.publish(Failed("no step completes"))

    @property
    def is_step_thread_alive(self) -> bool:
        """After `finish`: a thread is stuck in native code, so the process must not unwind."""
        return self._loop.is_alive

    def finish(self) -> int:
        """Stop all threads and free everything; returns the exit code."""
        is_loading = self._facts is None  # which nothing can interrupt, and nothing is lost by
        is_hopeless = is_loading or self._port.is_stalled
        has_stopped = self._loop.stop(timeout_s=0.0 if is_hopeless else _FLUSH_S)
        self._port.stop()
        if self._block_events is not None:
            self._block_events.close()
        failure = self._port.failure
        if failure is None and not has_stopped and not is_loading:
            failure = "the step loop did not end"
        if self._registry is not None:
            self._registry.stop()
        self._health.close()
        self._journal.close()
        if failure is not None:
            log.critical("engine_failed", reason=failure)
            is_setting = is_loading and isinstance(self._loop.error, ConfigError | ModelError)
            return EXIT_USAGE if is_setting else EXIT_FAILED  # a restart does not mend a setting
        log.info("engine_stopped")
        return EXIT_OK

    def _open_block_events(self, options: ServerOptions) -> BlockEventPublisher | None:
        if options.events_address is None:
            if options.advertise_events_address is not None:
                raise ConfigError(
                    "--advertise-events-address says where block events are published, which they are"
                    " not: add --events-address or leave it out"
                )
            return None
        endpoint = EventsEndpoint(
            options.events_address,
            curve_secret_key_file=options.curve_secret_key_file,
            curve_allowed_keys_file=options.curve_allowed_keys_file,
        )
        return BlockEventPublisher(
            endpoint, replica_id=options.replica_id, incarnation=self._incarnation
        )

    # ------------------------------------------------------------------ what we say of ourselves

    def _publish(self, output: Output) -> None:
        """On the step loop's thread."""
        self._port.publish(output)
        if isinstance(output, Started):
            facts = self._facts = output.facts
            self._metrics.note_ready(facts)
            self._notify_registry()
            log.info(
                "engine_ready",
                address=self._endpoint.address,
                seconds=round(time.time() - self._started_at, 2),
                **msgspec.to_builtins(facts),
            )

    def _live_problem(self) -> str | None:
        if self._port.failure is not None:
            return "failed"
        return None if self._watchdog.check() else "stalled: there is work and no step completes"

    def _ready_problem(self) -> str | None:
        if self._facts is None:
            return "loading"
        if self._port.is_draining:
            return "draining"
        return self._live_problem()

    def _notify_registry(self) -> None:
        if self._registry is not None:
            self._registry.notify()

    def _describe(self) -> ReplicaRecord | None:
        facts, config = self._facts, self._config
        if facts is None:
            return None  # gateways can do nothing with a replica that is still loading
        return ReplicaRecord(
            replica_id=self._options.replica_id,
            incarnation=self._incarnation,
            address=self._options.advertise_address or self._endpoint.address,
            curve_public_key=self._endpoint.public_key,
            base_model=config.base_model,
            model_fingerprint=facts.model_fingerprint,
            kv_format=facts.kv_format,
            device=facts.device,
            isa=facts.isa,
            dtype=facts.dtype,
            torch_version=facts.torch_version,
            backends=facts.backends,
            max_model_len=facts.max_model_len,
            max_loras=config.max_loras,
            max_lora_rank=config.max_lora_rank,
            state="draining" if self._port.is_draining or self._port.is_stalled else "ready",
            started_at_unix_s=self._started_at,
            row_rule_holds=facts.row_rule_holds,
            events_address=(
                self._options.advertise_events_address or self._block_events.address
                if self._block_events is not None
                else None
            ),
            events_curve_public_key=(
                self._block_events.public_key if self._block_events is not None else None
            ),
            base_revision=facts.identity.revision,
            tokenizer_sha256=facts.identity.tokenizer_sha256,
            chat_template_sha256=facts.identity.chat_template_sha256,
        )


def _write_port(path: Path, port: int) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(f"{port}\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"--metrics-port-file {path}: cannot be written ({error})") from error


if __name__ == "__main__":
    from loraplex_engine.server_cli import main

    sys.exit(main())
