"""The port's outbox, turn by turn and without its thread: every request gets one end, in the journal."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from loraplex_engine.endpoint import Endpoint
from loraplex_engine.errors import QueueFullError
from loraplex_engine.gateway_port import GatewayPort, _Live
from loraplex_engine.journal import Journal
from loraplex_engine.metrics import EngineMetrics
from loraplex_engine.protocol import (
    GIVEN_UP,
    PROTOCOL_VERSION,
    Abort,
    Generate,
    Hello,
    TokenEvent,
    Usage,
    encode,
)
from loraplex_engine.step_loop import Admitted, Failed, Output, Poisoned, StepOutput, Work

from tests.engine.test_step_loop import FACTS
from tests.support.engine_fakes import make_request

COST = Usage(prompt_tokens=3, completion_tokens=1)


@pytest.fixture
def journal() -> Iterator[Journal]:
    with tempfile.TemporaryDirectory(prefix="lpx-") as name:
        journal = Journal(Path(name))
        yield journal
        journal.close()


@pytest.fixture
def port(journal: Journal) -> Iterator[GatewayPort]:
    with tempfile.TemporaryDirectory(prefix="lpx-") as name:
        endpoint = Endpoint(f"ipc://{name}/e.sock")
        yield GatewayPort(
            endpoint,
            journal,
            lambda work: None,
            lambda: None,
            EngineMetrics("fake"),
            replica_id="e0",
            incarnation="i",
            max_live=8,
        )
        endpoint.close()


def ended(request: Generate) -> StepOutput:
    event = TokenEvent(
        request_id=request.request_id, attempt=request.attempt, finish_reason="stop", usage=COST
    )
    return StepOutput(1, [event])


@pytest.mark.parametrize(
    "late",
    [
        Admitted,
        lambda request: Admitted(request, QueueFullError("full")),
        Poisoned,
        ended,
        lambda request: Failed("again"),
    ],
    ids=["admitted", "refused", "poisoned", "ended", "failed"],
)
def test_what_the_loop_says_after_it_was_given_up_changes_nothing(
    port: GatewayPort, journal: Journal, late: Callable[[Generate], Output]
) -> None:
    """The main thread gives a stalled loop up, which may then speak in the same turn."""
    requests = [make_request(f"r{index}") for index in range(2)]
    for request in requests:
        port._live[request.request_id, request.attempt] = _Live(b"gone", request, 0.0)
    port.publish(Failed("no step completes"))
    for request in requests:
        port.publish(late(request))

    port._send_outputs()

    assert port.failure == "no step completes"
    assert port.num_live == 0
    entries = [journal.find(request.request_id, request.attempt) for request in requests]
    assert [entry and entry.finish_reason for entry in entries] == ["error", "error"]


@pytest.mark.parametrize("late", [Admitted, Poisoned])
def test_word_of_a_request_that_has_ended_is_ignored(
    port: GatewayPort, late: Callable[[Generate], Output]
) -> None:
    port.publish(late(make_request()))

    port._send_outputs()

    assert port.failure is None


@pytest.mark.parametrize("is_slow", [True, False])
def test_too_many_bytes_for_one_gateway_end_its_requests_and_nobody_elses(
    journal: Journal, is_slow: bool
) -> None:
    submitted: list[Work] = []
    metrics = EngineMetrics("fake")
    with tempfile.TemporaryDirectory(prefix="lpx-") as name, zmq.Context() as context:
        endpoint = Endpoint(f"ipc://{name}/e.sock")
        port = GatewayPort(
            endpoint,
            journal,
            submitted.append,
            lambda: None,
            metrics,
            replica_id="e0",
            incarnation="i",
            max_live=8,
            gateway_queue_bytes=1024**2,
        )
        port.facts = FACTS
        sockets = {name: context.socket(zmq.DEALER) for name in ("stuck", "reading")}
        try:
            for who, socket in sockets.items():
                socket.linger = 0
                socket.rcvhwm = 1 if who == "stuck" and is_slow else 0
                socket.identity = who.encode()
                socket.connect(endpoint.address)
                socket.send(encode(Hello(protocol_version=PROTOCOL_VERSION, gateway_id=who)))
                socket.send(encode(make_request(who)))
            while len(port._live) < 2:
                assert endpoint.router.poll(10_000)
                port._take_frames()

            num_frames = 600 if is_slow else 40
            assert sockets["reading"].poll(10_000)
            sockets["reading"].recv()  # the welcome
            for step in range(num_frames):  # 16 KB each for either gateway
                events = [
                    TokenEvent(request_id=who, attempt=0, error_message="x" * 16384)
                    for who in sockets
                ]
                port.publish(StepOutput(step, events))
                port._send_outputs()
                deadline = time.monotonic() + 10
                while not sockets["reading"].poll(10):  # it keeps up, however busy the machine
                    assert time.monotonic() < deadline
                    port._flush_queues()
                sockets["reading"].recv()

            cut = [work.request_id for work in submitted if isinstance(work, Abort)]
            assert cut == (["stuck"] if is_slow else [])
            assert port.num_gateways == (1 if is_slow else 2)
            port.publish(aborted("stuck"))
            port._send_outputs()
            value = metrics.registry.get_sample_value
            labels = {"model_name": "fake"}
            assert value("loraplex:gateway_queued_bytes", labels) == 0 or not is_slow
            assert value("loraplex:gateways_cut_off_total", labels | {"reason": "slow"}) == is_slow
            assert ("reading", 0) in port._live
        finally:
            for socket in sockets.values():
                socket.close()
            endpoint.close()
    entry = journal.find("stuck", 0)
    assert entry is not None
    assert entry.finish_reason == "error"


def aborted(request_id: str) -> StepOutput:
    """The loop's answer to an abort that is our fault."""
    event = TokenEvent(
        request_id=request_id,
        attempt=0,
        finish_reason="error",
        usage=COST,
        error_code=GIVEN_UP,
    )
    return StepOutput(1, [event])
