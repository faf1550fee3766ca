"""The port's outbox, turn by turn and without its thread: every request gets one end, in the journal."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loraplex_engine.endpoint import Endpoint
from loraplex_engine.errors import QueueFullError
from loraplex_engine.gateway_port import GatewayPort, _Live
from loraplex_engine.journal import Journal
from loraplex_engine.metrics import EngineMetrics
from loraplex_engine.protocol import Generate, TokenEvent, Usage
from loraplex_engine.step_loop import Admitted, Failed, Output, Poisoned, StepOutput

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
