"""What the server does while a step takes long: it answers, ends, counts and lets nothing pile up."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from loraplex_engine.client import EngineClient, EnginePinRefusedError
from loraplex_engine.gateway_port import MAX_PINS_UNDER_WAY
from loraplex_engine.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    Hello,
    TokenEvent,
    Usage,
    Welcome,
    decode_from_engine,
)
from loraplex_engine.step_loop import MAX_BEFORE_PREFETCH

from tests.support.replicas import (
    DEADLINE_S,
    DIGESTS,
    Replica,
    eventually,
    make_request,
    raw_gateway,
    read_all,
    run_replica,
)


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
    await eventually(replica.engine.executor.is_held.is_set)
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
            reply = await client.query_usage("silent", 1, gateway_id="raw")
            other = await client.query_usage("mine", 1, gateway_id="alive")
            await silent.send(Hello(protocol_version=PROTOCOL_VERSION, gateway_id="raw"))
            await read_all(stream)  # ours is unharmed
            with suppress(zmq.Again):  # it finds us silent, so it will connect anew
                while True:
                    frame = await silent.socket.recv(zmq.NOBLOCK)
                    assert not isinstance(decode_from_engine(frame), Welcome)

    assert (reply.is_gateway_connected, other.is_gateway_connected) == (False, True)
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
