"""A gateway without database and keys, streaming what a replayed engine sends: what a token costs it.

The way of a token is the product's: `EngineClient`, `Pump`, detokenizing, `ChatAnswer`, `EventStream`, uvicorn. Left
out is what happens once a request: authentication, templates, tokenizing, the books. Measured is the CPU time of
this process, its threads included; engine and clients are another process (`world.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import uvloop
from loraplex_engine.client import EngineClient
from loraplex_engine.profiling.clock import PartClock
from loraplex_engine.protocol import EngineMessage, ReplicaRecord, SamplingParams, StepFrame
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex_platform.gateway import completions
from loraplex_platform.gateway.answers import ChatAnswer
from loraplex_platform.gateway.books import Ending
from loraplex_platform.gateway.choice import Choice
from loraplex_platform.gateway.context import Gateway
from loraplex_platform.gateway.idempotency import Retries
from loraplex_platform.gateway.job import Job
from loraplex_platform.gateway.main import listen, make_server
from loraplex_platform.gateway.metrics import GatewayMetrics
from loraplex_platform.gateway.middleware import (
    ARRIVED_S,
    REQUEST_UUID,
    BodyLimit,
    RequestContext,
)
from loraplex_platform.gateway.pump import Pump
from loraplex_platform.gateway.pump_supervisor import PumpSupervisor
from loraplex_platform.gateway.queries import Revision, ServedModel
from loraplex_platform.gateway.routing import Replica, Router
from loraplex_platform.gateway.tokenization import BaseTokenizer, ModelTexts
from loraplex_platform.local.errors import LocalModeError
from loraplex_platform.profiling.world import REQUEST_PATH
from loraplex_platform.quotas.refusal_log import RefusalLog
from loraplex_platform.settings import GatewaySettings

_WARM_STEPS = 20
_NOBODY = UUID(int=0)
_RECEIVE, _DETOKENIZE, _STREAM = "receive", "detokenize", "stream"


class GatewayProfileError(LocalModeError):
    """The streams did not run to their end; says what went wrong."""


@dataclass(frozen=True, slots=True)
class GatewayCost:
    """CPU milliseconds per step of the engine, each of which gives every stream one token."""

    batch: int
    receive_ms: float  # from the socket, decoded, sorted by request
    detokenize_ms: float  # tokens to text that may be shown
    stream_ms: float  # all else: JSON, SSE, HTTP, the event loop
    cpu_share: float  # of one core, at the pace of the replay
    num_bytes: int  # that all clients read

    @property
    def us_per_token(self) -> float:
        """All of it."""
        return 1e3 * (self.receive_ms + self.detokenize_ms + self.stream_ms) / self.batch


def measure_gateway(
    model_dir: Path, batch: int, *, num_steps: int = 150, step_ms: float = 40.0
) -> GatewayCost:
    """Stream to `batch` clients, a token each every `step_ms`.

    Two runs: one that measures all CPU, and one that measures the parts, whose clock costs some itself.

    Raises:
        GatewayProfileError: see there.
        ModelFolderError: the folder cannot be served.
    """
    tokenizer = BaseTokenizer(ModelTexts.read(model_dir))
    try:
        whole = _run(_Stand(model_dir, tokenizer, batch, num_steps, step_ms))
        timed = _Stand(model_dir, tokenizer, batch, num_steps, step_ms, is_timed=True)
        _run(timed)
    finally:
        tokenizer.close()
    receive_ms, detokenize_ms = timed.part_ms(_RECEIVE), timed.part_ms(_DETOKENIZE)
    return GatewayCost(
        batch=batch,
        receive_ms=receive_ms,
        detokenize_ms=detokenize_ms,
        stream_ms=max(0.0, whole.cpu_ms - receive_ms - detokenize_ms),
        cpu_share=whole.cpu_ms / whole.wall_ms,
        num_bytes=whole.num_bytes,
    )


class _UnbookedPump(Pump):
    """Runs a request that is on no books."""

    async def _reserve(self) -> None:
        self.lease_token = 1
        self._lease_ends_s = math.inf

    async def _close_books(self, ending: Ending) -> None:
        self._tell_end(ending.event)


class _OneReplica:
    """The router of a fleet of one."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def choose(
        self,
        base_model: str,
        num_tokens: int,
        refused_by: object = (),
        *,
        builds: object = None,
    ) -> Replica:
        """The one there is."""
        del base_model, num_tokens, refused_by, builds
        return self._replica


@dataclass
class _Span:
    """Of the steps that count, per step."""

    cpu_ms: float
    wall_ms: float
    num_bytes: int = 0


class _Stand:
    def __init__(
        self,
        model_dir: Path,
        tokenizer: BaseTokenizer,
        batch: int,
        num_steps: int,
        step_ms: float,
        *,
        is_timed: bool = False,
    ) -> None:
        self._model_dir = model_dir
        self._tokenizer = tokenizer
        self._batch = batch
        self._num_steps = _WARM_STEPS + num_steps + 1  # the last one ends the streams
        self._step_ms = step_ms
        self._clock = PartClock(time.thread_time) if is_timed else None
        self._begun: tuple[float, float] | None = None  # CPU and wall, seconds
        self._ended: tuple[float, float] | None = None
        self._parts: dict[str, float] = {}

    def part_ms(self, part: str) -> float:
        """Of a timed run, per step."""
        return 1e3 * self._parts.get(part, 0.0) / self._num_counted

    @property
    def _num_counted(self) -> int:
        return self._num_steps - 1 - _WARM_STEPS

    async def run(self) -> _Span:
        """Serve until the world has ended."""
        with tempfile.TemporaryDirectory(prefix="lp-") as folder, self._seams():
            address = f"ipc://{folder}/e.sock"
            async with EngineClient(address, gateway_id="profile") as client:
                gateway = self._gateway(client)
                listener = listen("127.0.0.1", 0)
                server = make_server(_app(gateway))
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                try:
                    num_bytes = await self._world(address, listener.getsockname()[1])
                finally:
                    server.should_exit = True
                    await serving
        if self._begun is None or self._ended is None:
            raise GatewayProfileError("the replayed frames did not arrive")
        cpu_s, wall_s = (end - begin for begin, end in zip(self._begun, self._ended, strict=True))
        num = self._num_counted
        return _Span(1e3 * cpu_s / num, 1e3 * wall_s / num, num_bytes)

    def _gateway(self, client: EngineClient) -> Gateway:
        settings = GatewaySettings(
            database_url=SecretStr("postgresql://nobody@localhost/none"),
            model_dir=self._model_dir,
            key_pepper=SecretStr(secrets.token_hex(32)),
            salt_key=SecretStr(secrets.token_hex(32)),
        )
        no_database = cast("Any", None)  # pumps keep no books
        return Gateway(
            settings=settings,
            gateway_id="profile",
            sessions=no_database,
            router=cast("Router", _OneReplica(Replica(_record(client.address), client))),
            pumps=PumpSupervisor(no_database),
            retries=Retries(no_database, settings.salt_key),
            refusals=RefusalLog(no_database),
            spool=None,
            admissions=cast("Any", None),  # whoever asks may pass
            tokenizer=self._tokenizer,
            metrics=GatewayMetrics(),
            pump=_UnbookedPump,
        )

    async def _world(self, address: str, port: int) -> int:
        flags = {
            "--engine": address,
            "--port": port,
            "--streams": self._batch,
            "--steps": self._num_steps,
            "--step-ms": self._step_ms,
            "--vocab": self._tokenizer.vocab_size,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "loraplex_platform.profiling.world"),
            *(str(part) for flag in flags.items() for part in flag),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        if process.returncode != 0:
            raise GatewayProfileError(
                f"the replayed engine ended with {process.returncode}: see above"
            )
        return int(json.loads(out)["num_bytes"])

    @contextlib.contextmanager
    def _seams(self) -> Iterator[None]:
        """Notice the first and the last step that count; of a timed run, what parts take."""
        handle = EngineClient._handle
        take_frames, pump_take, take = EngineClient._take_frames, Pump._take, Choice.take
        clock = self._clock

        def noticing(client: EngineClient, message: EngineMessage) -> str | None:
            if isinstance(message, StepFrame):
                self._note(message.step_id)
            return handle(client, message)

        EngineClient._handle = noticing  # type: ignore[assignment,method-assign]
        if clock is not None:
            EngineClient._take_frames = clock.timed(_RECEIVE, take_frames)  # type: ignore[method-assign]
            Pump._take = clock.timed(_STREAM, pump_take)  # type: ignore[method-assign]
            Choice.take = clock.timed(_DETOKENIZE, take)  # type: ignore[method-assign]
        try:
            yield
        finally:
            EngineClient._handle = handle  # type: ignore[method-assign]
            EngineClient._take_frames = take_frames  # type: ignore[method-assign]
            Pump._take = pump_take  # type: ignore[method-assign]
            Choice.take = take  # type: ignore[method-assign]

    def _note(self, step_id: int) -> None:
        """At the arrival of a step: what came before it has been dealt with, at this pace."""
        now = (time.process_time(), time.monotonic())
        parts = dict(self._clock.seconds) if self._clock is not None else {}
        if step_id == _WARM_STEPS + 1:
            self._begun, self._parts = now, parts
        elif step_id == self._num_steps:
            self._ended = now
            self._parts = {name: s - self._parts.get(name, 0.0) for name, s in parts.items()}


def _run(stand: _Stand) -> _Span:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(stand.run())


def _record(address: str) -> ReplicaRecord:
    return ReplicaRecord(
        replica_id="profile",
        incarnation="profile",
        address=address,
        curve_public_key=None,
        base_model="profile",
        model_fingerprint="profile",
        kv_format="profile",
        device="profile",
        isa="profile",
        dtype="profile",
        torch_version="profile",
        backends={},
        max_model_len=1 << 20,
        max_loras=1,
        max_lora_rank=1,
        state="ready",
        started_at_unix_s=0.0,
        row_rule_holds=True,
    )


def _app(gateway: Gateway) -> RequestContext:
    async def stream(request: Request) -> Response:
        job = Job(
            request_id=request.scope[REQUEST_UUID],
            tenant_id=_NOBODY,
            key_id=_NOBODY,
            tenant_salt=b"",
            model=ServedModel(
                public_name="profile",
                deployment_id=_NOBODY,
                revision=Revision(_NOBODY, _NOBODY, None, _NOBODY, "profile", "", ""),
            ),
            endpoint="chat.completions",
            is_stream=True,
            prompt_ids=[1],
            sampling=SamplingParams(max_tokens=1 << 16),
            stops=(),
            shows_stop=False,
            arrived_s=request.scope[ARRIVED_S],
            timeout_s=600.0,
        )
        return await completions.run(
            request,
            gateway,
            job,
            shape=ChatAnswer,
            includes_usage=False,
            num_top_logprobs=None,
        )

    app = Starlette(routes=[Route(REQUEST_PATH, stream, methods=["POST"])])
    limited = BodyLimit(app, max_bytes=gateway.settings.max_body_bytes)
    return RequestContext(limited, metrics=gateway.metrics)
