"""The gateway's client against a scripted replica: streams, refusals, loss, restarts, queries."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
from loraplex_engine.client import (
    CurveKeys,
    EngineClient,
    EngineLostError,
    EnginePinRefusedError,
    EngineRejectedError,
)
from loraplex_engine.errors import EngineError
from loraplex_engine.protocol import Abort, Generate, PrefetchAdapter, SamplingParams, TokenEvent

from tests.support.fake_engine import FakeEngine, Script
from tests.support.replicas import eventually, read_all

DEADLINE_S = 60.0


def make_request(name: str = "r1", *, max_tokens: int = 8, attempt: int = 1) -> Generate:
    return Generate(
        request_id=name,
        attempt=attempt,
        lease_token=1,
        tenant_id="t1",
        tenant_salt=b"salt",
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
    )


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        yield engine


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[EngineClient]:
    async with EngineClient(engine.address, gateway_id="g1") as client:
        await client.connect()
        yield client


async def test_no_frame_leaves_a_cycle_for_the_garbage_collector(
    engine: FakeEngine, client: EngineClient
) -> None:
    gc.collect()
    gc.disable()
    try:
        await read_all(await client.generate(make_request(max_tokens=5)))

        left = [thing for thing in gc.get_objects() if issubclass(type(thing), zmq.Again)]
    finally:
        gc.enable()

    assert left == []


async def test_stream_ends_after_the_terminal_event(
    engine: FakeEngine, client: EngineClient
) -> None:
    request = make_request(max_tokens=5)

    stream = await client.generate(request)
    token_ids, last = await read_all(stream)

    assert token_ids == engine.tokens_for(request, 5)
    assert last.finish_reason == "length"
    assert last.usage is not None
    assert last.usage.completion_tokens == 5
    assert client.num_in_flight == 0


async def test_concurrent_streams_get_their_own_tokens(
    engine: FakeEngine, client: EngineClient
) -> None:
    requests = [make_request(f"r{i}", max_tokens=1 + i % 7) for i in range(50)]
    engine.script_for = lambda request: Script(
        token_ids=[int(request.request_id[1:])] * request.sampling.max_tokens
    )

    streams = await asyncio.gather(*(client.generate(request) for request in requests))
    results = await asyncio.gather(*(read_all(stream) for stream in streams))

    for i, (token_ids, last) in enumerate(results):
        assert token_ids == [i] * (1 + i % 7)
        assert last.request_id == f"r{i}"


async def test_refusal_carries_code_and_retry_after(
    engine: FakeEngine, client: EngineClient
) -> None:
    engine.script = Script(reject="queue_full", reject_message="full", retry_after_s=2.5)

    with pytest.raises(EngineRejectedError) as caught:
        await client.generate(make_request())

    assert (caught.value.code, caught.value.message) == ("queue_full", "full")
    assert caught.value.retry_after_s == 2.5
    assert client.num_in_flight == 0


async def test_error_ends_one_stream_as_an_event(engine: FakeEngine, client: EngineClient) -> None:
    engine.script = Script(error_after=2, error_code="non_finite_logits")

    token_ids, last = await read_all(await client.generate(make_request()))

    assert len(token_ids) == 2
    assert (last.finish_reason, last.error_code) == ("error", "non_finite_logits")
    assert client.is_ready


@pytest.mark.parametrize(("as_stop", "reason"), [(False, "abort"), (True, "stop")])
async def test_abort_still_delivers_the_usage(
    engine: FakeEngine, client: EngineClient, as_stop: bool, reason: str
) -> None:
    engine.script = Script(token_delay_s=0.01)
    stream = await client.generate(make_request(max_tokens=10_000))
    first = await anext(stream)

    stream.abort(as_stop=as_stop)
    rest, last = await read_all(stream)

    assert last.finish_reason == reason
    assert last.usage is not None
    assert last.usage.completion_tokens == len(first.token_ids) + len(rest) < 10_000


async def test_cancelling_the_wait_for_acceptance_aborts(
    engine: FakeEngine, client: EngineClient
) -> None:
    engine.script = Script(never_accepts=True)
    task = asyncio.create_task(client.generate(make_request()))
    await eventually(lambda: bool(engine.received))

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await eventually(lambda: bool(engine.received_of(Abort)))
    [abort] = engine.received_of(Abort)
    assert isinstance(abort, Abort)
    assert abort.is_platform_fault  # the one who cancels is not the client


async def test_the_same_attempt_twice_is_a_programming_error(
    engine: FakeEngine, client: EngineClient
) -> None:
    engine.pause()
    await client.generate(make_request())

    with pytest.raises(ValueError, match="already in flight"):
        await client.generate(make_request())
    await client.generate(make_request(attempt=2))


async def test_death_of_the_replica_ends_streams_queries_and_waits(
    engine: FakeEngine, client: EngineClient
) -> None:
    engine.script_for = lambda request: Script(
        never_accepts=request.request_id == "w", token_delay_s=0.01
    )
    stream = await client.generate(make_request("r", max_tokens=10_000))
    waiting = asyncio.create_task(client.generate(make_request("w")))
    await eventually(lambda: len(engine.received) == 2)

    await engine.crash()

    with pytest.raises(EngineLostError):
        await read_all(stream)
    with pytest.raises(EngineLostError):
        await asyncio.wait_for(waiting, DEADLINE_S)
    assert not client.is_ready
    assert client.num_in_flight == 0
    with pytest.raises(EngineLostError):
        await client.generate(make_request("later"))
    with pytest.raises(EngineLostError):
        await client.stats()
    client.abort("r", 1)  # nobody to tell: not an error


async def test_client_finds_a_restarted_replica_and_its_journal(
    engine: FakeEngine, client: EngineClient
) -> None:
    await read_all(await client.generate(make_request("done", max_tokens=3)))
    old = client.welcome
    await engine.crash()
    await eventually(lambda: not client.is_ready)

    await engine.start()
    new = await client.connect()

    assert old is not None
    assert new.incarnation != old.incarnation
    reply = await client.query_usage("done", 1)
    assert reply.entry is not None
    assert reply.entry.usage.completion_tokens == 3
    assert (await client.query_usage("never", 1)).state == "unknown"
    await read_all(await client.generate(make_request("again")))


async def test_silent_replica_is_lost() -> None:
    async with (
        FakeEngine() as engine,
        EngineClient(
            engine.address, gateway_id="g1", heartbeat_s=0.02, silence_timeout_s=0.1
        ) as client,
    ):
        await client.connect()
        engine.script = Script(never_answers=True)
        stream = await client.generate(make_request())

        engine.is_mute = True
        with pytest.raises(EngineLostError, match="said nothing"):
            await read_all(stream)

        engine.is_mute = False
        await client.connect()


async def test_a_loop_that_stood_still_blames_no_replica() -> None:
    """Whoever computes on the loop for long would otherwise end every tenant's requests."""
    async with (
        FakeEngine() as engine,
        EngineClient(
            engine.address, gateway_id="g1", heartbeat_s=0.05, silence_timeout_s=0.2
        ) as client,
    ):
        await client.connect()
        engine.script = Script(token_delay_s=0.01)
        stream = await client.generate(make_request(max_tokens=40))
        events = []
        async for event in stream:
            events.append(event)
            if len(events) in (3, 20):
                time.sleep(0.5)  # noqa: ASYNC251 - this is what is tested

        assert events[-1].finish_reason == "length"
        assert client.num_in_flight == 0


async def test_heartbeats_notice_that_a_replica_drains() -> None:
    async with (
        FakeEngine() as engine,
        EngineClient(engine.address, gateway_id="g1", heartbeat_s=0.02) as client,
    ):
        await client.connect()
        assert client.is_ready

        engine.is_draining = True

        await eventually(lambda: not client.is_ready)


async def test_connect_says_when_nobody_answers(tmp_path: Path) -> None:
    async with EngineClient(f"ipc://{tmp_path / 'no.sock'}", gateway_id="g1") as client:
        with pytest.raises(EngineLostError, match="no answer"):
            await client.connect(timeout_s=0.05)


async def test_stats_journal_and_prefetch(engine: FakeEngine, client: EngineClient) -> None:
    for name in "abc":
        await read_all(await client.generate(make_request(name, max_tokens=4)))
    client.prefetch("sha256:" + "0" * 64)

    stats = await client.stats()
    page = await client.read_journal(after_seq=1, limit=1)

    assert stats.requests_finished_total == {"length": 3}
    assert page.journal_id == engine.journal_id
    assert [entry.request_id for entry in page.entries] == ["b"]
    assert engine.received_of(PrefetchAdapter)


async def test_pins_say_what_is_kept_or_why_not(engine: FakeEngine, client: EngineClient) -> None:
    first, second = ("sha256:" + digit * 64 for digit in "12")

    assert await client.pin(first) == [first]
    assert await client.pin(second) == [first, second]
    assert await client.unpin(first) == [second]

    engine.pin_refusal = "too_many_pins"
    with pytest.raises(EnginePinRefusedError) as refused:
        await client.pin(first)
    assert refused.value.code == "too_many_pins"
    engine.is_mute = True
    with pytest.raises(EngineLostError, match="no answer"):
        await client.pin(first, timeout_s=0.05)


async def test_garbage_from_the_replica_is_a_loss_not_a_crash(tmp_path: Path) -> None:
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    address = f"ipc://{tmp_path}/x.sock"
    router.bind(address)
    async with EngineClient(address, gateway_id="g1") as client:
        for _ in range(2):  # it says hello again on a new connection
            identity, _hello = await router.recv_multipart()
            await router.send_multipart([identity, b"\xc1 not msgpack"])

        assert not client.is_ready
    router.close(linger=0)
    context.term()


async def test_a_fault_of_our_own_is_not_the_end_of_reconnecting(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_socket = zmq.asyncio.Context.socket
    faults = [zmq.ZMQError(24), RuntimeError("surprise")]

    def fail_at_first(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
        if faults:
            raise faults.pop()
        return make_socket(context, kind)

    monkeypatch.setattr(zmq.asyncio.Context, "socket", fail_at_first)
    async with EngineClient(engine.address, gateway_id="g1") as client:
        await client.connect(DEADLINE_S)

        await read_all(await client.generate(make_request()))
    assert not faults


async def test_close_ends_cleanly_even_after_a_fault(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: EngineClient, reason: str) -> None:
        raise RuntimeError("surprise")

    client = EngineClient(engine.address, gateway_id="g1")
    await client.__aenter__()
    await client.connect(DEADLINE_S)
    monkeypatch.setattr(EngineClient, "_drop_connection", refuse)

    await client.close()

    assert client._context is not None
    assert client._context.closed
    await client.close()  # harmless


async def test_a_bad_key_neither_ends_the_task_nor_hangs_close() -> None:
    keys = CurveKeys(b"no key", b"no key", b"no key")
    async with EngineClient("tcp://127.0.0.1:1", gateway_id="g1", curve=keys) as client:
        with pytest.raises(EngineLostError, match="ZMQError"):
            await client.connect(timeout_s=0.2)


async def test_tcp_without_keys_is_refused() -> None:
    with pytest.raises(EngineError, match="CURVE"):
        EngineClient("tcp://127.0.0.1:5555", gateway_id="g1")
    assert "secret" not in repr(CurveKeys(b"s", b"p", b"secret"))


def test_client_imports_no_torch() -> None:
    code = (
        "import sys, loraplex_engine.client; sys.exit(any(m in sys.modules for m in"
        " ('torch', 'transformers', 'numpy')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_what_ended_a_stream_is_told_again_however_its_follower_fared(
    engine: FakeEngine, client: EngineClient
) -> None:
    def fail_at_the_end(event: TokenEvent) -> None:
        if event.usage is not None:
            raise ValueError("the follower's own")

    at_once = await client.generate(make_request("r0", max_tokens=3))
    with pytest.raises(ValueError, match="the follower's own"):
        await at_once.follow(fail_at_the_end)
    queued = await client.generate(make_request("r1", max_tokens=3))
    await eventually(lambda: client.num_in_flight == 0)
    with pytest.raises(ValueError, match="the follower's own"):
        await queued.follow(fail_at_the_end)

    for stream in (at_once, queued):
        async with asyncio.timeout(10):
            last = await stream.follow(fail_at_the_end)
            assert await stream.follow(fail_at_the_end) is last
        assert last.finish_reason == "length"
