"""How a request can end, and that its books are closed exactly once in every case."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from loraplex_platform.db import Gateway as GatewayRow
from loraplex_platform.db import Request
from loraplex_platform.db.session import DatabaseUnavailableError
from loraplex_platform.gateway import pump_supervisor
from loraplex_platform.gateway.errors import GatewayDrainingError
from loraplex_platform.gateway.job import Job
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.records import Renewal
from sqlalchemy import select

from tests.platform.gateway.stand import BASE, Stand, announce, eventually, says
from tests.support.fake_engine import Script
from tests.support.metering import run_sql

pytestmark = pytest.mark.asyncio(loop_scope="package")

_HELLO: list[Any] = [{"role": "user", "content": "hello"}]
_SLOW = says("a long story about many things " * 5, token_delay_s=0.03)
_BODY = {"model": BASE, "messages": _HELLO, "max_tokens": 100}


async def _reserved(stand: Stand) -> bool:
    async with stand.db.sessions() as session:
        found = await session.scalars(select(Request.id).where(Request.state == "reserved"))
        return found.first() is not None


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_request_leaves_nothing_for_the_garbage_collector(
    stand: Stand, is_stream: bool
) -> None:
    body = _BODY | {"max_tokens": 3, "stream": is_stream}
    await stand.settled()
    gc.collect()
    gc.disable()
    try:
        async with stand.http() as client:
            answer = await client.post("/v1/chat/completions", json=body)
        await stand.settled()

        left = [thing for thing in gc.get_objects() if issubclass(type(thing), Job)]
    finally:
        gc.enable()

    assert answer.status_code == 200
    assert left == []
    await stand.check_books()


# ---------------------------------------------------------------------------- client gone


async def test_closing_a_stream_aborts_and_bills_what_was_generated(stand: Stand) -> None:
    stand.engine.script = _SLOW

    stream = await stand.client.chat.completions.create(
        model=BASE, messages=_HELLO, max_tokens=100, stream=True
    )
    seen = 0
    async for chunk in stream:
        seen += bool(chunk.choices[0].delta.content)
        if seen == 3:
            break
    await stream.close()

    request, attempt, entry = await stand.last_request()
    [abort] = stand.aborts
    assert not abort.as_stop
    assert not abort.is_platform_fault
    assert attempt is not None
    assert entry is not None
    assert (attempt.outcome, request.finish_reason) == ("aborted", "abort")
    assert 3 <= attempt.billed == attempt.generated < 30
    assert entry.account == "revenue"
    assert entry.completion_tokens == attempt.billed
    assert request.http_status == 499
    assert stand.engine.num_running == 0


async def test_leaving_an_answer_that_is_not_streamed_aborts_too(stand: Stand) -> None:
    stand.engine.script = _SLOW
    sent_before = stand.engine.num_tokens_sent

    asking = asyncio.create_task(stand.http().post("/v1/chat/completions", json=_BODY))
    await eventually(lambda: stand.engine.num_tokens_sent > sent_before, "a token")
    stand.engine.pause()  # so that it is midway, however long the news of the leaving takes
    try:
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await eventually(lambda: bool(stand.aborts), "an abort")
    finally:
        stand.engine.resume()

    request, attempt, _ = await stand.last_request()
    assert len(stand.aborts) == 1
    assert attempt is not None
    assert attempt.outcome == "aborted"
    assert 0 < attempt.billed == attempt.generated < 100
    assert request.finish_reason == "abort"


async def test_leaving_while_queued_bills_the_prompt_alone(stand: Stand) -> None:
    stand.engine.script = Script(never_answers=True)

    asking = asyncio.create_task(
        stand.http().post("/v1/chat/completions", json=_BODY | {"stream": True})
    )
    await eventually(lambda: bool(stand.generated), "the request at the engine")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    _, attempt, entry = await stand.last_request()
    assert attempt is not None
    assert entry is not None
    assert (attempt.outcome, attempt.generated, entry.completion_tokens) == ("aborted", 0, 0)
    assert entry.prompt_tokens > 0


async def test_leaving_before_the_engine_answers_at_all_tells_the_engine(stand: Stand) -> None:
    stand.engine.script = Script(never_accepts=True)

    asking = asyncio.create_task(stand.http().post("/v1/chat/completions", json=_BODY))
    await eventually(lambda: bool(stand.generated), "the request at the engine")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    await eventually(lambda: len(stand.aborts) == 1, "an abort")
    [pump] = stand.gateway.pumps.live
    pump.replica.client._drop_connection("the test's own doing")
    request, attempt, _ = await stand.last_request()
    assert request.state == "settled"
    assert attempt is not None
    assert (attempt.outcome, attempt.absorbed) == ("lost", 0)
    await eventually(lambda: stand.gateway.router.num_ready == 1)


async def test_many_clients_leaving_at_random_leave_nothing_behind(stand: Stand) -> None:
    stand.engine.script = says("words and words and words " * 3, token_delay_s=0.01)

    async def come_and_go(number: int) -> None:
        body = _BODY | {"stream": number % 2 == 0}
        client = stand.http()
        with contextlib.suppress(httpx.TimeoutException):
            await client.post("/v1/chat/completions", json=body, timeout=0.05 + 0.05 * (number % 8))

    await asyncio.gather(*(come_and_go(number) for number in range(16)))

    await stand.check_books()


# ---------------------------------------------------------------------------- engine gone


async def test_an_engine_error_before_the_first_token_is_a_500(stand: Stand) -> None:
    stand.engine.script = Script(error_after=0, error_code="non_finite_logits")

    for is_stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            await stand.client.chat.completions.create(
                model=BASE, messages=_HELLO, stream=is_stream
            )
        assert (caught.value.status_code, caught.value.code) == (500, "engine_error")
        assert caught.value.response.headers["x-should-retry"] == "false"

    request, attempt, entry = await stand.last_request()
    assert attempt is not None
    assert entry is not None
    assert (attempt.outcome, entry.account, request.error_code) == (
        "fault",
        "absorbed",
        "engine_error",
    )


async def test_an_engine_error_midway_is_an_error_frame_without_done(stand: Stand) -> None:
    stand.engine.script = Script(token_ids=[70, 71, 72, 73, 74], error_after=3)

    stream = await stand.client.chat.completions.create(model=BASE, messages=_HELLO, stream=True)
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    raw = await stand.http().post("/v1/chat/completions", json=_BODY | {"stream": True})

    assert caught.value.code == "engine_error"
    frames = [line for line in raw.text.split("\n\n") if line]
    assert raw.status_code == 200
    assert "[DONE]" not in raw.text
    error = json.loads(frames[-1].removeprefix("data: "))["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == raw.headers["x-request-id"]
    _, attempt, _ = await stand.last_request()
    assert attempt is not None
    assert (attempt.billed, attempt.absorbed) == (0, 3)


@pytest.mark.parametrize("crash_after", [1, 4])
async def test_a_dying_engine_is_absorbed_and_the_next_request_works(
    own_stand: Stand, crash_after: int
) -> None:
    stand = own_stand
    stand.engine.script = Script(crash_after=crash_after, token_delay_s=0.01)

    stream = await stand.client.chat.completions.create(
        model=BASE, messages=_HELLO, stream=True, max_tokens=50
    )
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "engine_lost"
    request, attempt, entry = await stand.last_request()
    assert attempt is not None
    assert entry is not None
    assert (attempt.outcome, attempt.source) == ("lost", "observed")
    assert (attempt.billed, attempt.absorbed, entry.account) == (0, crash_after, "absorbed")
    assert request.state == "settled"

    await eventually(lambda: stand.gateway.router.num_ready == 0)
    for is_stream in (False, True):
        with pytest.raises(openai.InternalServerError) as refused:
            await stand.client.chat.completions.create(
                model=BASE, messages=_HELLO, stream=is_stream
            )
        assert refused.value.status_code == 503
        assert refused.value.code == "engine_unavailable"
        assert int(refused.value.response.headers["retry-after"]) >= 1

    stand.engine.script = says("back")
    await stand.engine.start()
    await eventually(lambda: stand.gateway.router.num_ready == 1)
    answer = await stand.client.chat.completions.create(model=BASE, messages=_HELLO)
    assert answer.choices[0].message.content == "back"
    await stand.check_books()


async def test_an_engine_that_dies_under_a_whole_answer_is_503(own_stand: Stand) -> None:
    own_stand.engine.script = Script(crash_after=3)

    with pytest.raises(openai.InternalServerError) as caught:
        await own_stand.client.chat.completions.create(model=BASE, messages=_HELLO, max_tokens=50)

    assert (caught.value.status_code, caught.value.code) == (503, "engine_lost")
    await own_stand.check_books()


async def test_a_full_replica_hands_over_to_another(own_stand: Stand, short_tmp_path: Path) -> None:
    from tests.platform.gateway import tiny_model
    from tests.support.fake_engine import FakeEngine

    stand = own_stand
    async with FakeEngine(
        short_tmp_path, replica_id="fake-1", max_model_len=tiny_model.CONTEXT_LENGTH
    ) as second:
        announce(stand.redis_url, second)
        await eventually(lambda: stand.gateway.router.num_ready == 2)
        stand.engine.script = Script(reject="queue_full")
        second.script = says("from the second")

        for _ in range(4):
            answer = await stand.client.chat.completions.create(model=BASE, messages=_HELLO)
            assert answer.choices[0].message.content == "from the second"

        request, attempt, _ = await stand.last_request()
        assert attempt is not None
        assert request.replica_id == attempt.replica_id == "fake-1"


# ---------------------------------------------------------------------------- waiting


async def test_a_queued_stream_commits_after_the_hold_and_pings(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    async with Stand.open(
        db_url, redis_url, short_tmp_path, header_hold_s=0.05, ping_interval_s=0.05
    ) as stand:
        stand.engine.script = says("hi")
        stand.engine.pause()
        client = stand.http()
        async with client.stream(
            "POST", "/v1/chat/completions", json=_BODY | {"stream": True}
        ) as r:
            assert r.status_code == 200
            assert r.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert r.headers["cache-control"] == "no-cache"
            assert r.headers["x-accel-buffering"] == "no"
            assert r.headers["x-loraplex-revision"].startswith("rev_")
            lines = r.aiter_lines()
            assert await anext(lines) == ": ping"
            stand.engine.resume()
            rest = [line async for line in lines if line and line != ": ping"]
        assert rest[-1] == "data: [DONE]"
        assert (
            json.loads(rest[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
        )

        stand.engine.script = Script(error_after=0, first_token_delay_s=0.3)
        with pytest.raises(openai.APIError):  # the 200 is out: the failure comes in the stream
            async for _ in await stand.client.chat.completions.create(
                model=BASE, messages=_HELLO, stream=True
            ):
                pass
        await stand.check_books()


async def test_the_deadline_ends_a_request_unbilled(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    async with Stand.open(db_url, redis_url, short_tmp_path, request_timeout_s=1.5) as stand:
        stand.engine.script = Script(never_answers=True)

        with pytest.raises(openai.InternalServerError) as caught:
            await stand.client.chat.completions.create(model=BASE, messages=_HELLO)

        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
        assert caught.value.response.headers["x-should-retry"] == "false"
        _, attempt, entry = await stand.last_request()
        assert attempt is not None
        assert entry is not None
        # "lost" where the engine's acknowledgement took longer than the gateway waits for it.
        assert attempt.outcome in ("fault", "lost")
        assert entry.account == "absorbed"
        assert [abort.is_platform_fault for abort in stand.aborts] == [True]
        await stand.check_books()


async def test_no_engine_at_all_is_503_and_nothing_on_the_books(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    async with Stand.open(db_url, redis_url, short_tmp_path, wait=False) as stand:
        stand.engine.is_ready = False
        await stand.engine.crash()
        await eventually(lambda: stand.gateway.router.num_ready == 0)

        with pytest.raises(openai.InternalServerError) as caught:
            await stand.client.completions.create(model=BASE, prompt="x")

        assert caught.value.code == "engine_unavailable"
        assert [m.id async for m in stand.client.models.list()] == [BASE, "pirate"]
        ready = await stand.http("").get("/ready")
        assert (ready.status_code, ready.json()["engines_ready"]) == (200, 0)
        assert not await _reserved(stand)


# ---------------------------------------------------------------------------- books


async def test_a_long_request_renews_its_lease_with_a_checkpoint(stand: Stand) -> None:
    stand.engine.script = _SLOW
    stream = await stand.client.chat.completions.create(
        model=BASE, messages=_HELLO, stream=True, max_tokens=100
    )
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break

    async def look() -> tuple[int, Any]:
        async with stand.db.sessions() as session:
            row = await session.execute(
                select(Request.checkpoint_tokens, Request.lease_until).where(
                    Request.state == "reserved"
                )
            )
            return tuple(row.one())  # type: ignore[return-value] # two columns

    before = await look()
    await stand.gateway.pumps.renew_once()
    after = await look()
    await stream.close()

    assert before[0] == 0
    assert after[0] > 0
    assert after[1] > before[1]
    await stand.settled()


async def test_a_redis_that_never_answers_costs_no_lease(
    own_stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = own_stand
    pumps = stand.gateway.pumps
    renewed = asyncio.Event()

    async def hang(_: Any) -> None:
        await renewed.wait()
        await asyncio.Event().wait()

    async def renew(*_: Any, **__: Any) -> set[Any]:
        renewed.set()
        return set()

    monkeypatch.setattr(stand.gateway.admissions.rates, "renew", hang)
    monkeypatch.setattr(pump_supervisor.metering, "renew", renew)
    monkeypatch.setattr(pumps, "_renew_interval_s", 0.2)

    async with asyncio.timeout(5.0):
        await pumps.renew_once()

    assert renewed.is_set()


async def test_a_lost_lease_stops_the_engine_and_leaves_the_books(own_stand: Stand) -> None:
    stand = own_stand
    stand.engine.script = _SLOW
    stream = await stand.client.chat.completions.create(
        model=BASE, messages=_HELLO, stream=True, max_tokens=100
    )
    await anext(aiter(stream))

    await run_sql(stand.db, "update requests set lease_token = lease_token + 1")
    await stand.gateway.pumps.renew_once()

    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass
    await stand.settled()
    assert [abort.is_platform_fault for abort in stand.aborts] == [True]
    assert stand.engine.journal[-1].finish_reason == "error"  # by which the sweeper absorbs it
    async with stand.db.sessions() as session:
        request = (await session.scalars(select(Request))).one()
    assert request.state == "reserved"  # the sweeper's now


async def test_leases_are_renewed_although_requests_use_up_the_pool(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    async with Stand.open(db_url, redis_url, short_tmp_path, database_pool_size=2) as stand:
        stand.engine.script = _SLOW
        stream = await stand.client.chat.completions.create(
            model=BASE, messages=_HELLO, stream=True, max_tokens=100
        )
        await anext(aiter(stream))
        async with contextlib.AsyncExitStack() as crowd:
            for _ in range(2):
                session = await crowd.enter_async_context(stand.gateway.sessions())
                await session.connection()
            async with asyncio.timeout(5):
                await stand.gateway.pumps.renew_once()
        await stream.close()
        await stand.settled()


async def test_settling_is_tried_until_the_database_is_back(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand.engine.script = says("x")
    settle, failures = metering.settle, [1, 2]

    async def flaky(*arguments: Any) -> Any:
        if failures:
            failures.pop()
            raise DatabaseUnavailableError
        return await settle(*arguments)

    monkeypatch.setattr("loraplex_platform.gateway.books._SETTLE_RETRY_S", 0.01)
    monkeypatch.setattr(metering, "settle", flaky)

    answer = await stand.client.chat.completions.create(model=BASE, messages=_HELLO)

    request, _, _ = await stand.last_request()
    assert answer.choices[0].message.content == "x"
    assert (failures, request.state) == ([], "settled")


async def test_without_a_reservation_nothing_runs(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise DatabaseUnavailableError

    monkeypatch.setattr(metering, "reserve", fail)

    with pytest.raises(openai.InternalServerError) as caught:
        await stand.client.chat.completions.create(model=BASE, messages=_HELLO)

    assert (caught.value.status_code, caught.value.code) == (503, "database_unavailable")
    assert stand.generated == []


async def test_a_bug_while_generating_is_absorbed(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: Any) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr("loraplex_platform.gateway.text_stream.TextStream.push_plain", explode)
    stand.engine.script = _SLOW

    with pytest.raises(openai.InternalServerError) as caught:
        await stand.client.chat.completions.create(model=BASE, messages=_HELLO, max_tokens=9)

    assert caught.value.status_code == 500
    _, attempt, entry = await stand.last_request()
    assert attempt is not None
    assert entry is not None
    assert (attempt.outcome, entry.account) == ("fault", "absorbed")
    await eventually(lambda: stand.engine.num_running == 0)


# ---------------------------------------------------------------------------- shutdown


async def test_draining_refuses_new_requests_and_ends_running_ones(own_stand: Stand) -> None:
    stand = own_stand
    stand.engine.script = _SLOW
    stream = await stand.client.chat.completions.create(
        model=BASE, messages=_HELLO, stream=True, max_tokens=100
    )
    await anext(aiter(stream))

    stand.gateway.is_draining = True

    with pytest.raises(openai.InternalServerError) as refused:
        await stand.client.chat.completions.create(model=BASE, messages=_HELLO)
    assert (refused.value.status_code, refused.value.code) == (503, "draining")
    assert "retry-after" in refused.value.response.headers
    ready = await stand.http("").get("/ready")
    assert (ready.status_code, ready.json()["draining"]) == (503, True)
    assert (await stand.http("").get("/live")).status_code == 200
    await stand.gateway.pumps.drain(0.0, GatewayDrainingError("bye", retry_after_s=1))
    with pytest.raises(openai.APIError) as ended:
        async for _ in stream:
            pass
    assert ended.value.code == "draining"
    _, attempt, _ = await stand.last_request()
    assert attempt is not None
    assert (attempt.outcome, attempt.billed) == ("fault", 0)
    await stand.check_books()


async def test_renewing_nothing_is_nothing(stand: Stand) -> None:
    await stand.gateway.pumps.renew_once()

    assert await metering.renew(stand.gateway.sessions, list[Renewal]()) == set()


# ---------------------------------------------------------------------------- being seen


async def test_each_ending_is_counted_once(own_stand: Stand) -> None:
    stand = own_stand

    def count(name: str, **labels: str) -> float:
        return stand.gateway.metrics.registry.get_sample_value(f"loraplex:{name}", labels) or 0

    stand.engine.script = says("three")
    answer = await stand.client.chat.completions.create(model=BASE, messages=_HELLO)
    stand.engine.script = Script(reject="queue_full")
    with pytest.raises(openai.InternalServerError):
        await stand.client.chat.completions.create(model=BASE, messages=_HELLO)
    stand.engine.script = Script(token_ids=[70, 71], error_after=2)
    with pytest.raises(openai.InternalServerError):
        await stand.client.completions.create(model=BASE, prompt="x")
    await stand.settled()

    assert answer.usage is not None
    assert count("gateway_requests_finished_total", reason="stop") == 1
    assert count("gateway_requests_finished_total", reason="rejected") == 1
    assert count("gateway_requests_finished_total", reason="fault") == 1
    assert count("gateway_tokens_total", token_class="billed") == answer.usage.completion_tokens
    assert count("gateway_tokens_total", token_class="absorbed") == 2
    # One per request that got a first token; one gap per further token.
    assert count("time_to_first_token_seconds_count", endpoint="chat.completions") == 1
    assert count("time_to_first_token_seconds_count", endpoint="completions") == 1
    assert (
        count("inter_token_latency_seconds_count", endpoint="chat.completions")
        == answer.usage.completion_tokens - 1
    )
    assert count("e2e_request_latency_seconds_count", endpoint="chat.completions") == 2
    assert count("http_requests_total", endpoint="/v1/chat/completions", code="503") == 1
    assert count("gateway_requests_in_flight") == 0
    await stand.check_books()


async def test_the_gateway_shows_itself_in_the_database(stand: Stand) -> None:
    async def is_seen() -> bool:
        async with stand.db.sessions() as session:
            return await session.get(GatewayRow, stand.gateway.gateway_id) is not None

    await eventually(is_seen)
    assert stand.gateway.gateway_id.startswith("gw-test-")  # the rest is this process's own
