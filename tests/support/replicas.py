"""Engine servers in this process: the real socket, journal, core and scheduler, and a runner that invents."""

from __future__ import annotations

import asyncio
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio
from loraplex_engine.config import EngineConfig
from loraplex_engine.protocol import (
    PROTOCOL_VERSION,
    EngineMessage,
    Generate,
    Hello,
    SamplingParams,
    StepFrame,
    TokenEvent,
    UsageQuery,
    Welcome,
    decode_from_engine,
    encode,
)
from loraplex_engine.server import EngineServer, ServerOptions

from tests.support.fake_replica import FakeReplicaEngine

DEADLINE_S = 60.0
DIGESTS = ["sha256:" + f"{i:064x}" for i in range(1, 9)]


def make_request(
    name: str = "r1",
    *,
    prompt: list[int] | None = None,
    max_tokens: int = 8,
    attempt: int = 1,
    adapter: str | None = None,
    n: int = 1,
) -> Generate:
    return Generate(
        request_id=name,
        attempt=attempt,
        lease_token=41,
        tenant_id="t1",
        tenant_salt=b"salt",
        prompt_token_ids=prompt or [10, 11, 12],
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, n=n),
        adapter_digest=adapter,
    )


async def eventually(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not is_true():  # noqa: ASYNC110 - polls what other threads change
            await asyncio.sleep(0.005)


async def read_all(stream: AsyncIterator[TokenEvent]) -> tuple[list[int], TokenEvent]:
    token_ids: list[int] = []
    last = None
    async with asyncio.timeout(DEADLINE_S):
        async for event in stream:
            token_ids += event.token_ids
            last = event
    assert last is not None
    return token_ids, last


@dataclass
class Replica:
    server: EngineServer
    engine: FakeReplicaEngine
    address: str
    journal_dir: Path
    exit_code: int | None = None

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.server._health.port}"

    @property
    def port_failure(self) -> str | None:
        return self.server._port.failure

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.http + path, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    async def finish(self, grace_s: float = 0.0) -> int:
        await asyncio.to_thread(self.server.drain, grace_s)
        if self.exit_code is None:
            self.exit_code = await asyncio.to_thread(self.server.finish)
        return self.exit_code


@asynccontextmanager
async def run_replica(
    folder: Path,
    *,
    build_gate: threading.Event | None = None,
    step_s: float = 0.0,
    max_num_seqs: int = 32,
    max_waiting: int = 96,
    **options: object,
) -> AsyncIterator[Replica]:
    config = EngineConfig(
        model_dir=folder,
        base_model="fake",
        max_num_seqs=max_num_seqs,
        max_waiting=max_waiting,
        max_num_batched_tokens=256,
    )
    engine = FakeReplicaEngine(config, step_s)

    def build() -> FakeReplicaEngine:
        if build_gate is not None:
            build_gate.wait()
        return engine

    settings = ServerOptions(
        **{
            "address": f"ipc://{folder}/e.sock",
            "replica_id": "e0",
            "journal_dir": folder / "journal",
            **options,
        }  # type: ignore[arg-type]  # test options by name
    )
    server = EngineServer(config, settings, build)
    replica = Replica(server, engine, server._endpoint.address, folder / "journal")
    server.start()
    if build_gate is None:
        await eventually(lambda: server._facts is not None)
    try:
        yield replica
    finally:
        engine.executor.flowing.set()
        await replica.finish()


@asynccontextmanager
async def raw_gateway(address: str, *, is_polite: bool = True) -> AsyncIterator[RawGateway]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    gateway = RawGateway(socket)
    if is_polite:
        await gateway.send(Hello(protocol_version=PROTOCOL_VERSION, gateway_id="raw"))
        assert isinstance(await gateway.receive(), Welcome)
    try:
        yield gateway
    finally:
        socket.close(linger=0)
        context.term()


@dataclass
class RawGateway:
    """A gateway with bad manners: sends what it likes, and no heartbeats."""

    socket: zmq.asyncio.Socket

    async def send(self, message: Generate | Hello | UsageQuery) -> None:
        await self.socket.send(encode(message))

    async def receive(self) -> EngineMessage:
        async with asyncio.timeout(DEADLINE_S):
            return decode_from_engine(await self.socket.recv())

    async def receive_until_end(self, count: int = 1) -> list[EngineMessage]:
        messages: list[EngineMessage] = []
        while count:
            message = await self.receive()
            messages.append(message)
            if isinstance(message, StepFrame):
                count -= sum(event.finish_reason is not None for event in message.events)
        return messages


def make_server(folder: Path, address: str, **options: object) -> EngineServer:
    config = EngineConfig(model_dir=folder, base_model="fake")
    settings = ServerOptions(
        address=address,
        replica_id="e0",
        journal_dir=folder / "journal",
        **options,  # type: ignore[arg-type]  # test options by name
    )
    return EngineServer(config, settings, lambda: FakeReplicaEngine(config))
