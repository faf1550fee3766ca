"""The engine server with its real socket, journal, core and scheduler, and a runner that invents."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from pathlib import Path

import pytest
import structlog
import zmq
import zmq.asyncio
from loraplex_engine.client import EngineClient, EngineLostError, EngineRejectedError
from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import ModelError
from loraplex_engine.journal import Journal, JournalError
from loraplex_engine.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    Generate,
    Hello,
    JournalEntry,
    Rejected,
    StatsQuery,
    StepFrame,
    TokenEvent,
    Usage,
    Welcome,
    encode,
)
from loraplex_engine.server import EngineServer, ServerOptions

from tests.support.fake_replica import BOMB_ID, NAN_ID, UNKNOWN_DIGEST, FakeReplicaEngine
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


async def test_latencies_are_observed_once_for_each_request_that_had_them(
    replica: Replica, client: EngineClient
) -> None:
    """Fault 58: one first token however many choices, none for who never had one, one end for each."""
    await read_all(await client.generate(make_request("choices", n=3)))
    await read_all(await client.generate(make_request("missing", adapter=UNKNOWN_DIGEST)))
    await read_all(await client.generate(make_request("one")))

    _, text = await asyncio.to_thread(replica.get, "/metrics")

    def count(name: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith(f"loraplex:{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    assert count("engine_time_to_first_token_seconds_count") == 2
    assert count("engine_request_duration_seconds_count") == 3
    assert count("request_success_total") == 3


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
