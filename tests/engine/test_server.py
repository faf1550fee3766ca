"""The engine server with its real socket, journal, core and scheduler, and a runner that invents."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import structlog
import zmq
import zmq.asyncio
from loraplex_engine.block_events import TOPIC, decode_batch
from loraplex_engine.client import (
    CurveKeys,
    EngineClient,
    EngineLostError,
    EnginePinRefusedError,
    EngineRejectedError,
)
from loraplex_engine.config import EngineConfig
from loraplex_engine.curve import AllowList, load_key_pair, make_key_pair
from loraplex_engine.errors import ConfigError, ModelError
from loraplex_engine.gateway_port import MAX_PINS_UNDER_WAY
from loraplex_engine.journal import Journal, JournalError
from loraplex_engine.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    EngineMessage,
    Generate,
    Hello,
    JournalEntry,
    Rejected,
    ReplicaRecord,
    SamplingParams,
    StatsQuery,
    StepFrame,
    TokenEvent,
    Usage,
    UsageQuery,
    Welcome,
    decode_from_engine,
    encode,
)
from loraplex_engine.server import EngineServer, ServerOptions
from loraplex_engine.server_cli import main, read_options
from loraplex_engine.step_loop import MAX_BEFORE_PREFETCH

from tests.support.fake_replica import BOMB_ID, HANG_ID, NAN_ID, UNKNOWN_DIGEST, FakeReplicaEngine

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


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: unix socket paths are at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="lpx-") as name:
        yield Path(name)


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


@pytest.fixture
async def replica(folder: Path) -> AsyncIterator[Replica]:
    async with run_replica(folder) as replica:
        yield replica


@pytest.fixture
async def client(replica: Replica) -> AsyncIterator[EngineClient]:
    async with EngineClient(replica.address, gateway_id="g1") as client:
        await client.connect()
        yield client


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


# ---------------------------------------------------------------------------- requests


async def test_tokens_stream_and_usage_is_journaled(replica: Replica, client: EngineClient) -> None:
    stream = await client.generate(make_request(max_tokens=5))
    token_ids, last = await read_all(stream)
    reply = await client.query_usage("r1", 1)

    assert token_ids == [13, 14, 15, 16, 17]
    assert last.finish_reason == "length"
    assert last.usage == Usage(prompt_tokens=3, completion_tokens=5)
    assert reply.state == "finished"
    assert reply.entry is not None
    assert (reply.entry.lease_token, reply.entry.tenant_id) == (41, "t1")
    assert reply.entry.usage == last.usage
    assert [e.seq for e in (await client.read_journal(0)).entries] == [1]


async def test_no_terminal_event_leaves_before_its_journal_entry(
    replica: Replica, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_open = threading.Event()
    sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (is_open.wait(), sync(fd))[1])
    stream = await client.generate(make_request(max_tokens=1))
    reading = asyncio.create_task(read_all(stream))

    await eventually(lambda: not replica.engine.core.has_work())
    done, _ = await asyncio.wait([reading], timeout=0.1)
    assert not done

    is_open.set()
    assert (await reading)[1].finish_reason == "length"


async def test_a_crowd_with_random_aborts_leaves_nothing_behind(
    replica: Replica, client: EngineClient
) -> None:
    rng = random.Random(7)
    replica.engine.executor.step_s = 0.001

    async def run(i: int, gateway: EngineClient) -> TokenEvent:
        adapter = rng.choice([None, *DIGESTS])
        prompt = [rng.randrange(1, 600) for _ in range(rng.randrange(1, 100))]
        request = make_request(
            f"r{i}", prompt=prompt, max_tokens=rng.randrange(1, 60), adapter=adapter
        )
        stream = await gateway.generate(request)
        num_wanted = rng.choice([0, 1, 3, 1000])
        num_seen = 0
        async for event in stream:
            num_seen += len(event.token_ids)
            if num_seen >= num_wanted:
                stream.abort(as_stop=rng.random() < 0.3)
            if event.finish_reason is not None:
                assert event.usage is not None
                assert event.usage.completion_tokens == num_seen
                return event
        raise AssertionError("no terminal event")

    async with EngineClient(replica.address, gateway_id="g2") as other:
        await other.connect()
        async with asyncio.timeout(DEADLINE_S):
            ends = await asyncio.gather(*(run(i, client if i % 2 else other) for i in range(64)))
    stats = await client.stats()
    entries = (await client.read_journal(0)).entries

    assert (stats.num_running, stats.num_waiting, stats.adapter_leases) == (0, 0, 0)
    assert stats.kv_blocks_free == stats.kv_blocks_total
    assert client.num_in_flight == replica.server._port.num_live == 0
    replica.engine.core.check()
    assert len(entries) == len({(e.request_id, e.attempt) for e in entries}) == 64
    total = sum(e.usage.completion_tokens for e in entries)
    assert total == stats.generation_tokens_total
    assert total == sum(end.usage.completion_tokens for end in ends if end.usage is not None)
    assert stats.max_adapters_in_step >= 2
    assert stats.mixed_steps_total > 0


async def test_one_frame_per_gateway_and_step(replica: Replica) -> None:
    replica.engine.executor.flowing.clear()
    async with raw_gateway(replica.address) as one, raw_gateway(replica.address) as two:
        for i in range(12):
            await (one if i % 3 else two).send(make_request(f"r{i}", max_tokens=6))
        await eventually(lambda: replica.server._port.num_live == 12)
        replica.engine.executor.flowing.set()
        for gateway, count in ((one, 8), (two, 4)):
            messages = await gateway.receive_until_end(count)

            frames = [m for m in messages if isinstance(m, StepFrame)]
            assert len({frame.step_id for frame in frames}) == len(frames)
            assert max(len(frame.events) for frame in frames) == count


async def test_a_copy_of_a_request_runs_once(replica: Replica) -> None:
    replica.engine.executor.flowing.clear()
    async with raw_gateway(replica.address) as gateway, raw_gateway(replica.address) as other:
        for _ in range(3):
            await gateway.send(make_request())
        await eventually(lambda: replica.server._port.num_live == 1)
        await other.send(make_request())
        refused_while_live = await other.receive()
        replica.engine.executor.flowing.set()
        messages = await gateway.receive_until_end()
        await gateway.send(make_request())
        refused_after = await gateway.receive()
        while isinstance(refused_after, Accepted | StepFrame):
            refused_after = await gateway.receive()

    ends = [
        event
        for m in messages
        if isinstance(m, StepFrame)
        for event in m.events
        if event.finish_reason is not None
    ]
    assert len(ends) == 1
    assert isinstance(refused_while_live, Rejected)
    assert isinstance(refused_after, Rejected)
    assert replica.engine.core.stats().generation_tokens_total == 8


async def test_an_ended_attempt_stays_ended_after_a_restart(folder: Path) -> None:
    async with (
        run_replica(folder) as replica,
        EngineClient(replica.address, gateway_id="g") as client,
    ):
        await client.connect()
        await read_all(await client.generate(make_request()))
    async with (
        run_replica(folder) as replica,
        EngineClient(replica.address, gateway_id="g") as client,
    ):
        await client.connect()
        with pytest.raises(EngineRejectedError, match="ended"):
            await client.generate(make_request())
        await read_all(await client.generate(make_request(attempt=2)))


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (make_request(prompt=[-1]), "invalid_request"),
        (make_request(prompt=[10**6]), "invalid_request"),
        (make_request(prompt=[2**62]), "invalid_request"),
        (make_request(max_tokens=0), "invalid_request"),
        (make_request(max_tokens=10**6), "never_fits"),
        (make_request(adapter="sha256:../../etc"), "invalid_request"),
    ],
)
async def test_what_cannot_run_is_refused_and_not_journaled(
    client: EngineClient, request_: Generate, code: str
) -> None:
    with pytest.raises(EngineRejectedError) as caught:
        await client.generate(request_)

    assert caught.value.code == code
    assert (await client.read_journal(0)).entries == []
    assert (await client.query_usage("r1", 1)).state == "unknown"


async def test_a_full_queue_refuses_with_retry_after(folder: Path) -> None:
    async with (
        run_replica(folder, max_num_seqs=1, max_waiting=2) as replica,
        EngineClient(replica.address, gateway_id="g") as client,
    ):
        await client.connect()
        replica.engine.executor.flowing.clear()
        first = [asyncio.create_task(client.generate(make_request("r0")))]
        await eventually(replica.engine.core.has_work)
        tasks = [asyncio.create_task(client.generate(make_request(f"r{i}"))) for i in range(1, 6)]
        with pytest.raises(EngineRejectedError) as caught:
            await tasks[-1]

        assert caught.value.code == "queue_full"
        assert caught.value.retry_after_s is not None
        assert caught.value.num_waiting >= 2
        replica.engine.executor.flowing.set()
        results = await asyncio.gather(*first, *tasks, return_exceptions=True)
        assert sum(isinstance(r, EngineRejectedError) for r in results) == 3
        for stream in results:
            if not isinstance(stream, BaseException):
                await read_all(stream)


# ---------------------------------------------------------------------------- faults of one request


async def test_a_missing_adapter_ends_one_request(client: EngineClient) -> None:
    bad = await client.generate(make_request("bad", adapter=UNKNOWN_DIGEST))
    good = await client.generate(make_request("good", adapter=DIGESTS[0]))

    assert (await read_all(bad))[1].finish_reason == "error"
    assert (await read_all(good))[1].finish_reason == "length"


async def test_logits_that_are_not_numbers_end_one_request(client: EngineClient) -> None:
    bad = await client.generate(make_request("bad", prompt=[NAN_ID]))
    good = await client.generate(make_request("good"))

    assert (await read_all(bad))[1].error_code == "non_finite_logits"
    assert (await read_all(good))[0] == list(range(13, 21))


async def test_a_request_that_breaks_admission_ends_alone(
    replica: Replica, client: EngineClient
) -> None:
    replica.engine.executor.flowing.clear()
    neighbour = asyncio.create_task(client.generate(make_request("good")))
    await eventually(replica.engine.core.has_work)
    replica.engine.adapters.fault = RuntimeError("surprise")
    replica.engine.executor.flowing.set()

    bad = await client.generate(make_request("bad", adapter=DIGESTS[0]))
    _, last = await read_all(bad)

    assert (last.finish_reason, last.error_code) == ("error", "internal_error")
    assert last.usage == Usage(prompt_tokens=0, completion_tokens=0)  # nothing was computed
    assert (await client.query_usage("bad", 1)).state == "finished"
    assert (await read_all(await neighbour))[1].finish_reason == "length"
    assert (await client.stats()).num_waiting == 0
    replica.engine.core.check()


async def test_malformed_frames_are_counted_and_harm_nobody(
    replica: Replica, client: EngineClient
) -> None:
    bad_type = encode(make_request()).replace(b"generate", b"gen_rate")
    wrong_field = encode(make_request()).replace(b"\xa7attempt\x01", b"\xa7attempt\xa1x")
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(replica.address)

    nested = b"\x83" + encode(StatsQuery(query_id=1))[1:] + b"\xa1z" + b"\x91" * 100_000 + b"\xc0"

    for frame in (
        *(b"", b"\xc1", b"junk" * 1000, b"\x81\xa4type\xa1x"),
        *(bad_type, wrong_field, nested),
    ):
        await socket.send(frame)
    await socket.send_multipart([encode(make_request()), b"a second part"])
    counted = 'loraplex:malformed_frames_total{model_name="fake"} 8.0'
    await eventually(lambda: counted in replica.get("/metrics")[1])
    token_ids, _ = await read_all(await client.generate(make_request("good")))

    assert token_ids == list(range(13, 21))
    assert counted in replica.get("/metrics")[1]
    socket.close(linger=0)
    context.term()


async def test_requests_before_hello_are_refused(replica: Replica) -> None:
    async with raw_gateway(replica.address, is_polite=False) as gateway:
        await gateway.send(make_request())

        answer = await gateway.receive()

    assert isinstance(answer, Rejected)
    assert "hello" in answer.message


async def test_another_protocol_version_is_told_ours(replica: Replica) -> None:
    async with raw_gateway(replica.address, is_polite=False) as gateway:
        await gateway.send(Hello(protocol_version=PROTOCOL_VERSION + 1, gateway_id="new"))
        answer = await gateway.receive()
        await gateway.send(make_request())
        refusal = await gateway.receive()

    assert isinstance(answer, Welcome)
    assert answer.protocol_version == PROTOCOL_VERSION
    assert isinstance(refusal, Rejected)


# ---------------------------------------------------------------------------- timing


async def test_heartbeats_and_queries_are_answered_during_a_long_step(
    replica: Replica, client: EngineClient
) -> None:
    replica.engine.executor.step_s = 0.005
    stream = await client.generate(make_request(max_tokens=100))
    replica.engine.executor.flowing.clear()
    steps_before = (await client.stats()).steps_total

    async with EngineClient(replica.address, gateway_id="late") as late:
        await late.connect()
        reply = await late.query_usage("r1", 1)

    assert reply.state == "running"
    assert (await client.stats()).steps_total <= steps_before + 1
    replica.engine.executor.flowing.set()
    assert (await read_all(stream))[1].finish_reason == "length"


async def test_abort_is_honoured_within_the_step_that_runs(
    replica: Replica, client: EngineClient
) -> None:
    replica.engine.executor.step_s = 0.002
    stream = await client.generate(make_request(max_tokens=1900))
    await anext(stream)
    replica.engine.executor.flowing.clear()
    num_before = replica.engine.core.stats().generation_tokens_total

    stream.abort()
    await eventually(
        lambda: not replica.server._loop._inbox.empty() or not replica.engine.core.has_work()
    )
    replica.engine.executor.flowing.set()
    _, last = await read_all(stream)

    assert last.finish_reason == "abort"
    assert last.usage is not None
    # One step was in mid-air when we looked, and one may have started since.
    assert last.usage.completion_tokens <= num_before + 2
    assert (await client.stats()).kv_usage == 0


async def test_what_a_gateway_repeats_does_not_pile_up_in_a_long_step(
    replica: Replica, client: EngineClient
) -> None:
    stream = await client.generate(make_request(max_tokens=1900))
    replica.engine.executor.flowing.clear()
    inbox = replica.server._loop._inbox

    for _ in range(3000):
        stream.abort()
        client.prefetch(DIGESTS[0])
    await client.stats()  # all were taken

    assert inbox.qsize() <= MAX_BEFORE_PREFETCH + 1
    replica.engine.executor.flowing.set()
    assert (await read_all(stream))[1].finish_reason == "abort"


async def test_adapters_are_pinned_and_let_go_while_the_replica_serves(
    replica: Replica, client: EngineClient
) -> None:
    stream = await client.generate(make_request(max_tokens=1900))

    assert await client.pin(DIGESTS[0]) == [DIGESTS[0]]
    assert await client.pin(DIGESTS[1]) == DIGESTS[:2]
    await eventually(lambda: replica.server._loop.stats.adapters_pinned == DIGESTS[:2])  # type: ignore[union-attr]
    assert (await client.stats()).adapters_pinned == DIGESTS[:2]

    with pytest.raises(EnginePinRefusedError, match="2 adapters") as refused:
        await client.pin(DIGESTS[2])
    assert refused.value.code == "too_many_pins"
    with pytest.raises(EnginePinRefusedError) as refused:
        await client.pin("sha256:../../etc/passwd")
    assert refused.value.code == "invalid_digest"

    assert await client.unpin(DIGESTS[0]) == [DIGESTS[1]]
    assert await client.unpin(DIGESTS[0]) == [DIGESTS[1]], "not pinned: nothing to do"
    stream.abort()
    await read_all(stream)


async def test_pins_do_not_pile_up_in_a_long_step(replica: Replica, client: EngineClient) -> None:
    stream = await client.generate(make_request(max_tokens=1900))
    replica.engine.executor.flowing.clear()
    await eventually(replica.server._loop._inbox.empty)
    digests = [f"sha256:{i:064x}" for i in range(MAX_PINS_UNDER_WAY + 3)]

    answers = [asyncio.create_task(client.pin(digest, DEADLINE_S)) for digest in digests]
    await eventually(lambda: sum(answer.done() for answer in answers) == 3)
    replica.engine.executor.flowing.set()
    outcomes = await asyncio.gather(*answers, return_exceptions=True)

    codes = [getattr(outcome, "code", None) for outcome in outcomes]
    assert codes[:2] == [None, None]
    assert codes.count("busy") == 3
    assert codes.count("too_many_pins") == MAX_PINS_UNDER_WAY - 2
    assert await client.unpin(digests[0]) == [digests[1]], "all were answered: there is room again"
    stream.abort()
    await read_all(stream)


async def test_a_replica_that_loads_its_model_refuses_pins(folder: Path) -> None:
    gate = threading.Event()
    async with run_replica(folder, build_gate=gate) as replica:
        async with EngineClient(replica.address, gateway_id="g") as client:
            await client.connect()
            with pytest.raises(EnginePinRefusedError) as refused:
                await client.pin(DIGESTS[0])
            assert refused.value.code == "not_ready"
        gate.set()
        await eventually(lambda: replica.server._facts is not None)


async def test_choices_stream_side_by_side_and_one_can_be_stopped(
    replica: Replica, client: EngineClient
) -> None:
    replica.engine.executor.step_s = 0.002
    stream = await client.generate(make_request(max_tokens=40, n=3))
    ends: dict[int, TokenEvent] = {}
    counts = {0: 0, 1: 0, 2: 0}
    async with asyncio.timeout(DEADLINE_S):
        async for event in stream:
            counts[event.index] += len(event.token_ids)
            if event.index == 1 and counts[1] == 5:
                stream.abort(as_stop=True, index=1)
            if event.finish_reason is not None:
                ends[event.index] = event

    assert {index: event.finish_reason for index, event in ends.items()} == {
        0: "length",
        1: "stop",
        2: "length",
    }
    assert counts[0] == counts[2] == 40
    assert 5 <= counts[1] < 40
    (usage,) = [event.usage for event in ends.values() if event.usage is not None]
    assert usage == Usage(prompt_tokens=3, completion_tokens=sum(counts.values()))
    (entry,) = (await client.read_journal(0)).entries
    assert entry.usage == usage


async def test_a_choice_is_stopped_once_whatever_is_repeated(
    replica: Replica, client: EngineClient
) -> None:
    stream = await client.generate(make_request(max_tokens=1900, n=2))
    replica.engine.executor.flowing.clear()
    inbox = replica.server._loop._inbox
    num_before = inbox.qsize()

    for index in (0, 0, 1, 0, 1, 2, -1, 10**6) * 100:
        stream.abort(as_stop=True, index=index)
    await client.stats()  # all were taken

    assert inbox.qsize() <= num_before + 2
    replica.engine.executor.flowing.set()
    assert (await read_all(stream))[1].finish_reason == "stop"


async def test_abort_of_a_queued_request(folder: Path) -> None:
    async with (
        run_replica(folder, max_num_seqs=1) as replica,
        EngineClient(replica.address, gateway_id="g") as client,
    ):
        await client.connect()
        replica.engine.executor.step_s = 0.005
        running = await client.generate(make_request("a", max_tokens=200))
        queued = await client.generate(make_request("b"))

        queued.abort()
        _, last = await read_all(queued)

        assert last.usage == Usage(prompt_tokens=0, completion_tokens=0)
        running.abort()
        await read_all(running)


async def test_a_silent_gateway_is_taken_for_dead_and_its_requests_are_faults(
    folder: Path,
) -> None:
    async with (
        run_replica(folder, gateway_timeout_s=0.2, step_s=0.005) as replica,
        EngineClient(replica.address, gateway_id="alive", heartbeat_s=0.05) as client,
    ):
        await client.connect()
        stream = await client.generate(make_request("mine", max_tokens=300))
        async with raw_gateway(replica.address) as silent:
            await silent.send(make_request("silent", max_tokens=1900))
            await eventually(lambda: replica.server._port.num_live == 2)
            await eventually(lambda: replica.server._port.num_live == 1)
            reply = await client.query_usage("silent", 1)
            await silent.send(Hello(protocol_version=PROTOCOL_VERSION, gateway_id="raw"))
            await read_all(stream)  # ours is unharmed
            with suppress(zmq.Again):  # it finds us silent, so it will connect anew
                while True:
                    frame = await silent.socket.recv(zmq.NOBLOCK)
                    assert not isinstance(decode_from_engine(frame), Welcome)

    assert reply.entry is not None
    assert reply.entry.finish_reason == "error"
    assert 0 < reply.entry.usage.completion_tokens < 1900


async def test_a_gateway_that_vanishes_is_noticed_within_a_step(
    replica: Replica, client: EngineClient
) -> None:
    replica.engine.executor.step_s = 0.005
    async with raw_gateway(replica.address) as gone:
        await gone.send(make_request("gone", max_tokens=1900))
        assert isinstance(await gone.receive(), Accepted)

    await eventually(lambda: replica.server._port.num_live == 0)
    reply = await client.query_usage("gone", 1)

    assert reply.entry is not None
    assert reply.entry.finish_reason == "error"  # not the client's abort: nobody is billed
    assert reply.entry.usage.completion_tokens < 1000


async def test_an_abort_for_the_platforms_sake_is_journaled_as_an_error(
    replica: Replica, client: EngineClient
) -> None:
    replica.engine.executor.step_s = 0.002
    stream = await client.generate(make_request("given-up", max_tokens=1900))
    await anext(stream)

    stream.abort(is_platform_fault=True)
    stream.abort()  # the first reason stands
    _, last = await read_all(stream)
    reply = await client.query_usage("given-up", 1)

    assert (last.finish_reason, last.error_code) == ("error", "given_up")
    assert reply.entry is not None
    assert reply.entry.finish_reason == "error"
    assert last.usage == reply.entry.usage


# ---------------------------------------------------------------------------- the engine's own faults


async def test_a_failed_step_ends_every_request_with_an_error_and_the_process(
    replica: Replica, client: EngineClient
) -> None:
    replica.engine.executor.step_s = 0.002
    neighbour = await client.generate(make_request("n", max_tokens=1900))
    await anext(neighbour)
    await client.generate(make_request("bomb", prompt=[BOMB_ID]))

    rest, last = await read_all(neighbour)

    assert (last.finish_reason, last.error_code) == ("error", "internal_error")
    assert last.usage is not None
    assert last.usage.completion_tokens == len(rest) + 1
    await eventually(lambda: replica.port_failure is not None)
    assert await replica.finish() == 70
    journal = Journal(replica.journal_dir)
    found = journal.find("n", 1)
    assert found is not None
    assert found.usage == last.usage
    assert found.usage.prompt_tokens == 3
    bomb = journal.find("bomb", 1)
    assert bomb is not None
    assert bomb.usage == Usage(
        prompt_tokens=0, completion_tokens=0
    )  # its only step came to nothing
    journal.close()


@pytest.mark.parametrize(
    ("error", "code"), [(ModelError("no such model"), 2), (RuntimeError("no memory"), 70)]
)
async def test_a_model_that_does_not_load_ends_the_process(
    folder: Path, error: Exception, code: int
) -> None:
    config = EngineConfig(model_dir=folder, base_model="fake")
    options = ServerOptions(
        address=f"ipc://{folder}/e.sock", replica_id="e0", journal_dir=folder / "j"
    )

    def build() -> FakeReplicaEngine:
        raise error

    server = EngineServer(config, options, build)
    server.start()

    await eventually(lambda: server._port.failure is not None)

    assert await asyncio.to_thread(server.finish) == code


async def test_a_journal_that_cannot_be_written_acknowledges_nothing(
    replica: Replica, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Journal, entries: list[JournalEntry]) -> None:
        if entries:
            raise JournalError("disk full")

    monkeypatch.setattr(Journal, "append", refuse)
    stream = await client.generate(make_request(max_tokens=2))

    with pytest.raises(EngineLostError):
        await read_all(stream)
    assert await replica.finish() == 70


# ---------------------------------------------------------------------------- draining


async def test_drain_refuses_new_requests_and_finishes_running_ones(
    replica: Replica, client: EngineClient
) -> None:
    replica.engine.executor.step_s = 0.005
    stream = await client.generate(make_request(max_tokens=40))
    draining = asyncio.create_task(asyncio.to_thread(replica.server.drain, DEADLINE_S))
    await eventually(lambda: not client.is_ready)

    with pytest.raises(EngineRejectedError) as caught:
        await client.generate(make_request("late"))
    _, last = await read_all(stream)
    await draining

    assert caught.value.code == "draining"
    assert last.finish_reason == "length"
    assert replica.get("/ready")[0] == 503
    assert replica.get("/live")[0] == 200
    assert await replica.finish() == 0


async def test_what_the_grace_cuts_short_is_an_error_not_the_clients_abort(
    replica: Replica, client: EngineClient
) -> None:
    replica.engine.executor.step_s = 0.002
    stream = await client.generate(make_request(max_tokens=1900))
    await anext(stream)

    finishing = asyncio.create_task(replica.finish(grace_s=0.0))
    rest, last = await read_all(stream)

    assert await finishing == 0
    assert (last.finish_reason, last.error_code) == ("error", "draining")
    journal = Journal(replica.journal_dir)
    entry = journal.find("r1", 1)
    journal.close()
    assert entry is not None
    assert (entry.finish_reason, entry.usage.completion_tokens) == ("error", len(rest) + 1)


# ---------------------------------------------------------------------------- health


async def test_loading_ready_and_metrics(folder: Path) -> None:
    gate = threading.Event()
    async with (
        run_replica(folder, build_gate=gate, metrics_port_file=folder / "port") as replica,
        EngineClient(replica.address, gateway_id="g", heartbeat_s=0.05) as client,
    ):
        await client.connect()
        assert not client.is_ready
        assert replica.get("/ready")[0] == 503
        assert replica.get("/live")[0] == 200
        with pytest.raises(EngineRejectedError, match="loading"):
            await client.generate(make_request())

        gate.set()
        await eventually(lambda: client.is_ready)
        await read_all(await client.generate(make_request("a", adapter=DIGESTS[0])))

        assert replica.get("/ready")[0] == 200
        assert replica.get("/nothing")[0] == 404
        assert (folder / "port").read_text().strip() == replica.http.rsplit(":", 1)[1]
        metrics = replica.get("/metrics")[1]
        for line in (
            'loraplex:generation_tokens_total{model_name="fake"} 8.0',
            'loraplex:prompt_tokens_total{model_name="fake"} 3.0',
            'loraplex:request_success_total{finished_reason="length",model_name="fake"} 1.0',
            'loraplex:num_requests_running{model_name="fake"} 0.0',
            'loraplex:num_requests_waiting{model_name="fake"} 0.0',
            'loraplex:kv_cache_usage_perc{model_name="fake"} 0.0',
            'loraplex:adapters{model_name="fake",tier="slot"} 1.0',
            'loraplex:adapters{model_name="fake",tier="host"} 1.0',
            'loraplex:mixed_steps_total{model_name="fake"} 0.0',
            'loraplex:max_adapters_in_step{model_name="fake"} 1.0',
            'loraplex:requests_rejected_total{model_name="fake",reason="queue_full"} 1.0',
            'loraplex:step_duration_seconds_count{model_name="fake"} 8.0',
            'loraplex:request_queue_time_seconds_bucket{le="+Inf",model_name="fake"} 1.0',
            'loraplex:service_gap{model_name="fake"} 0.0',
            'loraplex:service_gap_promised{model_name="fake"} 19.0',
            'loraplex:service_gap_bound{model_name="fake"} ',
            "loraplex:last_step_timestamp_seconds{",
            "process_resident_memory_bytes",
        ):
            assert line in metrics
        stats = await client.stats()
        assert stats.rss_bytes > 1 << 20


async def test_a_step_that_hangs_is_not_alive_and_leaves_its_stack(folder: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with (
            run_replica(folder, stall_limit_s=0.1) as replica,
            EngineClient(replica.address, gateway_id="g") as client,
        ):
            await client.connect()
            replica.engine.executor.flowing.clear()
            task = asyncio.create_task(client.generate(make_request()))

            await eventually(lambda: replica.get("/live")[0] == 503)

            assert "stalled" in json.loads(replica.get("/ready")[1])["status"]
            replica.engine.executor.flowing.set()
            await read_all(await task)
            assert replica.get("/live")[0] == 200
    dumps = [entry for entry in logs if entry["event"] == "engine_stalled"]
    assert len(dumps) == 1
    assert "in collect" in str(dumps[0]["stacks"]) or " collect" in str(dumps[0]["stacks"])


# ---------------------------------------------------------------------------- closed by default


def make_server(folder: Path, address: str, **options: object) -> EngineServer:
    config = EngineConfig(model_dir=folder, base_model="fake")
    settings = ServerOptions(
        address=address,
        replica_id="e0",
        journal_dir=folder / "journal",
        **options,  # type: ignore[arg-type]  # test options by name
    )
    return EngineServer(config, settings, lambda: FakeReplicaEngine(config))


def test_a_folder_that_others_can_enter_is_refused(folder: Path) -> None:
    (folder / "open").mkdir(mode=0o755)

    with pytest.raises(ConfigError, match="chmod 700"):
        make_server(folder, f"ipc://{folder}/open/e.sock")


@pytest.mark.parametrize(
    ("address", "match"),
    [
        ("ipc:///tmp/" + "x" * 120 + "/e.sock", "shorter"),
        ("ipc://relative.sock", "absolute"),
        ("tcp://127.0.0.1:0", "CURVE|--curve"),
        ("inproc://x", "ipc:///path or tcp"),
        ("tcp", "ipc:///path or tcp"),
    ],
)
def test_bad_addresses_are_refused_with_a_remedy(folder: Path, address: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_server(folder, address)


async def test_a_second_engine_cannot_take_the_address_or_the_journal(
    replica: Replica, folder: Path
) -> None:
    with pytest.raises(ConfigError, match="journal"):
        make_server(folder, f"ipc://{folder}/other.sock")
    (folder / "second").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="another engine listens"):
        make_server(folder / "second", replica.address)


async def test_tcp_admits_only_listed_keys(folder: Path) -> None:
    server = make_key_pair(folder / "server.key")
    friend = make_key_pair(folder / "friend.key")
    stranger = make_key_pair(folder / "stranger.key")
    assert load_key_pair(folder / "friend.key") == friend
    allowed = folder / "allowed"
    allowed.write_text(f"# gateways\n{friend.public_key.decode()} gw-1\n\n#\n")
    async with run_replica(
        folder,
        address="tcp://127.0.0.1:0",
        curve_secret_key_file=folder / "server.key",
        curve_allowed_keys_file=allowed,
    ) as replica:
        keys = CurveKeys(server.public_key, friend.public_key, friend.secret_key)
        async with EngineClient(replica.address, gateway_id="friend", curve=keys) as client:
            await client.connect()
            await read_all(await client.generate(make_request()))
        keys = CurveKeys(server.public_key, stranger.public_key, stranger.secret_key)
        async with EngineClient(replica.address, gateway_id="stranger", curve=keys) as client:
            with pytest.raises(EngineLostError):
                await client.connect(timeout_s=0.5)
        context = zmq.asyncio.Context()
        plain = context.socket(zmq.DEALER)
        plain.connect(replica.address)
        await plain.send(encode(Hello(protocol_version=PROTOCOL_VERSION, gateway_id="plain")))
        assert await plain.poll(300) == 0
        plain.close(linger=0)
        context.term()


async def test_the_record_says_where_block_events_are_published(folder: Path) -> None:
    """A router that reads the registry can subscribe, knowing nothing else; also where TCP is mixed in."""
    keys = make_key_pair(folder / "server.key")
    (folder / "allowed").write_text(f"{keys.public_key.decode()} router\n")
    curve = {
        "curve_secret_key_file": folder / "server.key",
        "curve_allowed_keys_file": folder / "allowed",
    }

    async with run_replica(folder, events_address="tcp://127.0.0.1:0", **curve) as replica:
        record = replica.server._describe()
        assert record is not None
        assert (record.address, record.curve_public_key) == (replica.address, None)
        assert record.events_address == replica.server.events_address
        assert record.events_curve_public_key == keys.public_key.decode()
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.curve_serverkey = record.events_curve_public_key.encode()
            socket.curve_publickey, socket.curve_secretkey = keys.public_key, keys.secret_key
            socket.subscribe(TOPIC)
            socket.connect(record.events_address)
            assert await asyncio.to_thread(socket.poll, int(DEADLINE_S) * 1000)
            assert decode_batch(socket.recv_multipart()[1]).replica_id == record.replica_id
        assert msgspec.json.decode(msgspec.json.encode(record), type=ReplicaRecord) == record

    (folder / "plain").mkdir(mode=0o700)
    async with run_replica(
        folder / "plain",
        events_address=f"ipc://{folder}/plain/events.sock",
        advertise_events_address="ipc:///shared/events.sock",
    ) as replica:
        record = replica.server._describe()
        assert record is not None
        assert record.events_address == "ipc:///shared/events.sock"
        assert record.events_curve_public_key is None


async def test_without_block_events_the_record_has_no_address_for_them(
    replica: Replica, folder: Path
) -> None:
    record = replica.server._describe()
    assert record is not None
    assert (record.events_address, record.events_curve_public_key) == (None, None)

    (folder / "second").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="add --events-address"):
        make_server(
            folder / "second",
            f"ipc://{folder}/second/e.sock",
            advertise_events_address="tcp://router:1",
        )


def test_keys_in_the_allow_list_may_hold_the_comment_sign(folder: Path) -> None:
    path = folder / "allowed"
    keys = [b"#" + b"a" * 39, b"b" * 20 + b"#" + b"b" * 19]
    path.write_bytes(b"# ours\n" + keys[0] + b" gw-1 # the first\n" + keys[1] + b"\n")

    allow_list = AllowList(path)

    assert all(allow_list.callback("", key) for key in keys)
    assert not allow_list.callback("", b"c" * 40)
    path.write_bytes(keys[1])  # read again: the first is shut out
    assert [allow_list.callback("", key) for key in keys] == [False, True]
    path.unlink()
    assert not allow_list.callback("", keys[1])
    path.write_text("#forgot the space\n")
    with pytest.raises(ConfigError, match="does not start with"):
        AllowList(path)


def test_a_secret_that_others_can_read_is_refused(folder: Path) -> None:
    path = folder / "server.key"
    make_key_pair(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_key_pair(path)

    path.chmod(0o600)
    path.write_text("not a key")
    with pytest.raises(ConfigError, match="Z85 secret key"):
        load_key_pair(path)
    with pytest.raises(FileExistsError):  # never overwritten
        make_key_pair(path)


# ---------------------------------------------------------------------------- the command line


def test_flags_come_from_the_environment_too(folder: Path) -> None:
    environ = {
        "LORAPLEX_ENGINE_MODEL_DIR": "/m",
        "LORAPLEX_ENGINE_MAX_LORAS": "3",
        "LORAPLEX_ENGINE_DIE_WITH_PARENT": "true",
        "LORAPLEX_ENGINE_ADDRESS": "ipc:///x",
    }

    _, config, options = read_options(
        ["--journal-dir", "/j", "--address", "ipc:///flag/wins"], environ
    )

    assert (config.max_loras, config.model_dir, config.num_blocks) == (3, Path("/m"), None)
    assert options.die_with_parent
    assert options.address == "ipc:///flag/wins"


def test_the_prefix_caches_flags() -> None:
    usual = ["--model-dir", "/m", "--journal-dir", "/j", "--address", "ipc:///x"]

    _, default, options = read_options(usual, {})
    assert (default.prefix_cache, default.prefix_cache_tenant_share) == (True, None)
    assert options.events_address is None
    assert not read_options([*usual, "--no-prefix-cache"], {})[1].prefix_cache
    flags = ["--prefix-cache-tenant-share", "0.25", "--public-prefix-file", "/p.json"]
    _, config, options = read_options([*usual, *flags, "--events-address", "ipc:///e"], {})
    assert config.prefix_cache_tenant_share == 0.25
    assert config.public_prefix_file == Path("/p.json")
    assert options.events_address == "ipc:///e"


def test_the_schedulers_flags() -> None:
    usual = ["--model-dir", "/m", "--journal-dir", "/j", "--address", "ipc:///x"]
    names = ("policy", "aging_s", "admission", "kv_watermark", "long_prefill_token_threshold")
    names += ("max_partial_prefills", "waiting_served_ratio", "max_steps_closed")
    built = EngineConfig(model_dir=Path("/m"), base_model="smollm2-135m")

    _, default, _ = read_options(usual, {})
    assert [getattr(default, name) for name in names] == [getattr(built, name) for name in names]
    flags = ["--policy", "priority", "--aging-s", "5", "--admission", "reserve"]
    flags += ["--kv-watermark", "0.1", "--long-prefill-token-threshold", "64"]
    flags += ["--max-partial-prefills", "2", "--waiting-served-ratio", "1.2"]
    environ = {"LORAPLEX_ENGINE_MAX_STEPS_CLOSED": "7"}
    _, config, _ = read_options([*usual, *flags], environ)
    assert [getattr(config, name) for name in names] == [
        *("priority", 5.0, "reserve", 0.1, 64, 2, 1.2, 7)
    ]


def test_the_device_s_flags() -> None:
    usual = ["--model-dir", "/m", "--journal-dir", "/j", "--address", "ipc:///x"]
    names = ("device", "attention_backend", "lora_backend", "batch_invariant", "cuda_graphs")
    names += ("gpu_memory_utilization",)

    _, default, _ = read_options(usual, {})
    assert [getattr(default, name) for name in names] == ["auto", "auto", "auto", False, True, None]
    flags = ["--device", "cuda", "--attention-backend", "triton", "--lora-backend", "triton"]
    flags += ["--batch-invariant", "--no-cuda-graphs", "--gpu-memory-utilization", "0.8"]
    _, config, _ = read_options([*usual, *flags], {})
    assert [getattr(config, name) for name in names] == [
        *("cuda", "triton", "triton", True, False, 0.8)
    ]
    _, config, _ = read_options(usual, {"LORAPLEX_ENGINE_CUDA_GRAPHS": "0"})
    assert not config.cuda_graphs


def test_help_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])

    text = capsys.readouterr().out
    assert caught.value.code == 0
    for flag in ("--model-dir", "--address", "--journal-dir", "--max-loras", "--die-with-parent"):
        assert flag in text
    assert "(default: None)" not in text


@pytest.fixture
def process_restored() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    structlog.reset_defaults()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("process_restored")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--address", "tcp://127.0.0.1:0"], "--curve-secret-key-file"),
        (["--metrics-port", "70000"], "--metrics-port 70000"),
        (["--metrics-host", "no host"], "--metrics-port 0: cannot listen on no host"),
        (["--metrics-port-file", "/dev/null/port"], "--metrics-port-file /dev/null/port"),
        (["--redis-url", "nonsense"], "--redis-url"),
        (["--redis-url", "redis://host:port"], "--redis-url"),
        (["--events-address", "tcp://127.0.0.1:0"], "--curve-secret-key-file"),
        (["--events-address", "ipc://x"], "--events-address ipc://x"),
        (["--journal-dir", "/dev/null"], "--journal-dir /dev/null"),
        (["--journal-dir", "/dev/null/x"], "--journal-dir /dev/null/x"),
    ],
)
def test_wrong_settings_exit_2_and_say_what(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    usual = ["--model-dir", "/m", "--journal-dir", f"{folder}/j", "--address", f"ipc://{folder}/e"]

    code = main([*usual, *flags])

    assert code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("process_restored")
def test_a_folder_without_a_model_exits_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-dir", f"{folder}/none", "--journal-dir", f"{folder}/j"]

    code = main([*flags, "--address", f"ipc://{folder}/e"])

    assert code == 2
    assert f"{folder}/none" in capsys.readouterr().err


# ---------------------------------------------------------------------------- processes


@asynccontextmanager
async def spawn_replica(folder: Path, *flags: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    command = [
        *(sys.executable, "-m", "tests.support.fake_replica", "--step-s", "0.005", "--"),
        *("--address", f"ipc://{folder}/e.sock", "--journal-dir", f"{folder}/journal"),
        *flags,
    ]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)  # noqa: ASYNC220 - short
    try:
        yield process
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


def test_blas_threads_are_bounded_before_numpy_is_loaded() -> None:
    code = (
        "import os, sys, loraplex_engine.server_cli as cli\n"
        "cli.read_options = lambda *a: sys.exit('numpy' in sys.modules)\n"
        "try: cli.main([])\n"
        "finally: print(os.environ['OPENBLAS_NUM_THREADS'])\n"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS")}

    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


async def test_kill_9_in_mid_stream_then_restart(folder: Path) -> None:
    async with EngineClient(f"ipc://{folder}/e.sock", gateway_id="g") as client:
        async with spawn_replica(folder) as process:
            await client.connect(DEADLINE_S)
            await eventually(lambda: client.is_ready)
            _, done = await read_all(await client.generate(make_request("done", max_tokens=9)))
            stream = await client.generate(make_request("cut", max_tokens=1900))
            await anext(stream)

            process.send_signal(signal.SIGKILL)

            with pytest.raises(EngineLostError):
                await read_all(stream)
        (segment,) = (folder / "journal").glob("*.log")
        with segment.open("ab") as file:
            file.write(b"\x40\x00\x00\x00 torn")

        async with spawn_replica(folder):
            await client.connect(DEADLINE_S)
            await eventually(lambda: client.is_ready)
            reply = await client.query_usage("done", 1)
            lost = await client.query_usage("cut", 1)
            token_ids, _ = await read_all(await client.generate(make_request("cut", attempt=2)))
            page = await client.read_journal(0)

    assert reply.entry is not None
    assert reply.entry.usage == done.usage
    assert lost.state == "unknown"
    assert token_ids == list(range(13, 21))
    assert [entry.seq for entry in page.entries] == [1, 2]


async def test_a_step_that_hangs_for_good_ends_the_process(folder: Path) -> None:
    async with (
        spawn_replica(folder, "--stall-limit-s", "1") as process,
        EngineClient(f"ipc://{folder}/e.sock", gateway_id="g") as client,
    ):
        await client.connect(DEADLINE_S)
        await eventually(lambda: client.is_ready)
        stream = await client.generate(make_request(prompt=[HANG_ID]))

        await eventually(lambda: not client.is_ready)
        assert client.welcome is not None  # it says so itself, before its end
        _, last = await read_all(stream)

        assert (last.finish_reason, last.error_code) == ("error", "internal_error")
        assert await asyncio.to_thread(process.wait, DEADLINE_S) == 70
    journal = Journal(folder / "journal")
    assert journal.find("r1", 1) is not None
    journal.close()


async def test_sigterm_drains_and_exits_0(folder: Path) -> None:
    async with (
        spawn_replica(folder, "--drain-grace-s", "20") as process,
        EngineClient(f"ipc://{folder}/e.sock", gateway_id="g") as client,
    ):
        await client.connect(DEADLINE_S)
        await eventually(lambda: client.is_ready)
        stream = await client.generate(make_request(max_tokens=30))

        process.send_signal(signal.SIGTERM)
        _, last = await read_all(stream)

        assert last.finish_reason == "length"
        assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0
    assert '"event": "engine_stopped"' in (folder / "log").read_text()


async def test_kill_9_of_the_supervisor_leaves_no_engine(folder: Path) -> None:
    launcher = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); p.wait()\n"
    )
    command = [
        *(sys.executable, "-c", launcher, sys.executable, "-m", "tests.support.fake_replica"),
        *("--step-s", "0.005", "--", "--address", f"ipc://{folder}/e.sock"),
        *("--journal-dir", f"{folder}/journal", "--die-with-parent", "--drain-grace-s", "60"),
    ]
    with (folder / "log").open("wb") as log:
        supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)  # noqa: ASYNC220 - short
    assert supervisor.stdout is not None
    pid = int(await asyncio.to_thread(supervisor.stdout.readline))
    async with EngineClient(f"ipc://{folder}/e.sock", gateway_id="g") as client:
        await client.connect(DEADLINE_S)
        await eventually(lambda: client.is_ready)
        await client.generate(make_request(max_tokens=1900))

        supervisor.kill()
        await asyncio.to_thread(supervisor.wait)
        supervisor.stdout.close()

        await eventually(lambda: not Path(f"/proc/{pid}").exists() or is_zombie(pid))
    journal = Journal(folder / "journal")  # its lock is free and its usage is there
    entry = journal.find("r1", 1)
    journal.close()
    assert entry is not None
    assert entry.finish_reason == "error"


def is_zombie(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return True
