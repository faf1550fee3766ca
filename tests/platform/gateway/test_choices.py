"""n > 1: choices side by side, each with its own text, stop and reason; one reservation, one bill."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import msgspec
import openai
import pytest
from loraplex_engine.protocol import Generate
from loraplex_platform.gateway.errors import AbandonedError
from loraplex_platform.gateway.job import Failed
from loraplex_platform.worker.sweeper import Sweeper
from openai.types.chat import ChatCompletionMessageParam

from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import BASE, Stand, eventually, says
from tests.support.engines import connected
from tests.support.fake_engine import Script
from tests.support.metering import run_sql

pytestmark = pytest.mark.asyncio(loop_scope="package")

_HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
_END = 2


def _say(*texts: str, **changes: Any) -> Script:
    """Each choice says its text and ends."""
    return Script(choices=[[*tiny_model.ids_of(text), _END] for text in texts], **changes)


def _num_tokens(script: Script) -> int:
    return sum(len(ids) for ids in script.choices or ())


async def test_a_whole_answer_has_all_choices_in_order_and_one_bill(stand: Stand) -> None:
    stand.engine.script = _say("Paris", "a much longer answer, naïve 🙂", "Rome.", cached_tokens=4)

    answer = await stand.client.chat.completions.create(model=BASE, messages=_HELLO, n=3)

    assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
        (0, "Paris", "stop"),
        (1, "a much longer answer, naïve 🙂", "stop"),
        (2, "Rome.", "stop"),
    ]
    [sent] = stand.generated
    assert sent.sampling.n == 3
    prompt, total = len(sent.prompt_token_ids), _num_tokens(stand.engine.script)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, total)
    request, attempt, entry = await stand.last_request()
    assert attempt is not None
    assert entry is not None
    assert (entry.prompt_tokens, entry.cached_tokens, entry.completion_tokens) == (prompt, 4, total)
    assert request.est_completion_tokens == 3 * sent.sampling.max_tokens


async def test_a_stream_interleaves_choices_and_ends_each_once(stand: Stand) -> None:
    texts = ["Paris is old", "안녕하세요 세계 🙂", "x"]
    stand.engine.script = _say(*texts)

    stream = await stand.client.chat.completions.create(
        model=BASE, messages=_HELLO, n=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    *frames, usage = chunks
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == _num_tokens(stand.engine.script)
    assert [c.choices[0].delta.role for c in frames[:3]] == ["assistant"] * 3
    order = [c.choices[0].index for c in frames]
    assert sorted(order[:3]) == [0, 1, 2]
    assert order[3:] != sorted(order[3:]), "the choices came one after the other"
    for index, text in enumerate(texts):
        mine = [c.choices[0] for c in frames if c.choices[0].index == index]
        assert "".join(c.delta.content or "" for c in mine) == text
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["stop"]


async def test_completions_have_choices_too(stand: Stand) -> None:
    stand.engine.script = _say(" Rome", " Paris")

    whole = await stand.client.completions.create(model=BASE, prompt="x", n=2, best_of=2)
    stream = await stand.client.completions.create(model=BASE, prompt="x", n=2, stream=True)
    texts = {0: "", 1: ""}
    reasons = {}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
        if chunk.choices[0].finish_reason is not None:
            reasons[chunk.choices[0].index] = chunk.choices[0].finish_reason

    assert [choice.text for choice in whole.choices] == [" Rome", " Paris"]
    assert texts == {0: " Rome", 1: " Paris"}
    assert reasons == {0: "stop", 1: "stop"}


async def test_each_choice_has_its_own_reason(stand: Stand) -> None:
    stand.engine.script = _say("one two three four five six", "x")

    answer = await stand.client.chat.completions.create(
        model=BASE, messages=_HELLO, n=2, max_tokens=3
    )

    assert [choice.finish_reason for choice in answer.choices] == ["length", "stop"]
    request, _, _ = await stand.last_request()
    assert request.finish_reason == "length"


async def test_choices_draw_differently_and_a_seed_repeats_them(stand: Stand) -> None:
    async def ask(n: int) -> list[str | None]:
        answer = await stand.client.chat.completions.create(
            model=BASE, messages=_HELLO, n=n, seed=2**63 - 1, max_tokens=12
        )
        return [choice.message.content for choice in answer.choices]

    first = await ask(4)

    assert len(set(first)) == 4
    assert await ask(4) == first
    assert await ask(2) == first[:2]


async def test_a_stop_string_ends_its_own_choice_alone(stand: Stand) -> None:
    stand.engine.script = _say(
        "short STOP and far more after it, which nobody is to see or pay for",
        "this one goes on to its own end",
        "and here STOP as well, with more behind",
        token_delay_s=0.01,
    )

    answer = await stand.client.chat.completions.create(
        model=BASE, messages=_HELLO, n=3, stop="STOP", logprobs=True
    )

    assert [c.message.content for c in answer.choices] == [
        "short ",
        "this one goes on to its own end",
        "and here ",
    ]
    assert all(c.finish_reason == "stop" for c in answer.choices)
    for choice in answer.choices:
        assert choice.logprobs is not None
        tokens = [entry.token for entry in choice.logprobs.content or []]
        content = choice.message.content or ""
        # The last may have begun the stop string: then it reaches beyond what is shown.
        assert "".join(tokens).startswith(content)
        assert len("".join(tokens[:-1])) < len(content)
    aborts = {(abort.index, abort.as_stop, abort.is_platform_fault) for abort in stand.aborts}
    assert aborts == {(0, True, False), (2, True, False)}
    assert len(stand.aborts) == 2
    _, attempt, entry = await stand.last_request()
    assert attempt is not None
    assert entry is not None
    kept = sum(
        _tokens_until(text, "STOP")
        for text in ("short STOP and far more after it", "and here STOP as well, with more behind")
    ) + len((stand.engine.script.choices or [])[1])
    assert attempt.billed == entry.completion_tokens == kept
    assert attempt.billed + attempt.discarded_past_stop == attempt.generated
    assert answer.usage is not None
    assert answer.usage.completion_tokens == kept


def _tokens_until(text: str, stop: str) -> int:
    ids = tiny_model.ids_of(text)
    decode = tiny_model.reference().decode
    return next(n for n in range(len(ids) + 1) if stop in decode(ids[:n]))


async def test_all_choices_past_their_stop_strings_finish_the_request(stand: Stand) -> None:
    stand.engine.script = _say(*(["go STOP " + "on and on " * 8] * 2), tokens_per_event=9)

    answer = await stand.client.completions.create(
        model=BASE, prompt="x", n=2, max_tokens=60, stop=["STOP"]
    )

    assert [choice.text for choice in answer.choices] == ["go ", "go "]
    _, attempt, _ = await stand.last_request()
    assert attempt is not None
    assert attempt.discarded_past_stop > 0
    assert attempt.billed == 2 * _tokens_until("go STOP on", "STOP")


async def test_the_lease_s_checkpoint_counts_all_choices_up_to_their_stops(stand: Stand) -> None:
    stand.engine.script = _say(
        "go STOP " + "on and on " * 6, "a long story about many things " * 4, token_delay_s=0.02
    )
    asking = asyncio.create_task(
        stand.client.completions.create(model=BASE, prompt="x", n=2, max_tokens=200, stop="STOP")
    )
    await eventually(lambda: len(stand.aborts) == 1, "a choice stopped")
    [pump] = stand.gateway.pumps.live

    renewal = pump.renewal
    assert renewal is not None
    stopped, going = pump._choices
    assert renewal.checkpoint_tokens == stopped.text.num_tokens + going.num_observed
    assert stopped.text.num_tokens == _tokens_until("go STOP on", "STOP")

    await asking


async def test_leaving_ends_all_choices_and_bills_what_each_had(stand: Stand) -> None:
    num_kept = _tokens_until("go STOP on", "STOP")
    stand.engine.script = _say(
        "go STOP " + "on and on " * 6,
        "a long story about many things " * 6,
        token_delay_s=0.03,
        tokens_per_event=num_kept + 3,  # the first choice's first event goes past its stop string
    )

    stream = await stand.client.chat.completions.create(
        model=BASE, messages=_HELLO, n=2, max_tokens=200, stream=True, stop="STOP"
    )
    [pump] = stand.gateway.pumps.live
    async for chunk in stream:
        if chunk.choices[0].finish_reason is not None:
            break  # the first has met its stop string
    await stream.close()

    request, attempt, _ = await stand.last_request()
    assert attempt is not None
    assert (attempt.outcome, request.finish_reason) == ("aborted", "abort")
    assert [a.index for a in stand.aborts] == [0, None]
    stopped, going = pump._choices
    assert (stopped.num_kept, stopped.num_observed) == (num_kept, num_kept + 3)
    assert going.num_kept == going.num_observed > 0
    assert attempt.billed == num_kept + going.num_observed
    assert attempt.discarded_past_stop == 3
    assert attempt.billed + attempt.discarded_past_stop == attempt.generated
    assert stand.engine.num_running == 0


async def test_of_an_abort_whose_gateway_died_the_sweeper_bills_all_choices_up_to_the_checkpoint(
    own_stand: Stand,
) -> None:
    stand = own_stand
    stand.engine.script = _say(
        "go STOP " + "on and on " * 6, "a long story about many things " * 4, token_delay_s=0.01
    )
    stream = await stand.client.completions.create(
        model=BASE, prompt="x", n=2, max_tokens=200, stop="STOP", stream=True
    )
    await eventually(lambda: len(stand.aborts) == 1, "a choice stopped")
    await stand.gateway.pumps.renew_once()
    [(task, pump)] = stand.gateway.pumps._tasks.items()
    task.cancel()  # the books stay open, as after a kill
    await asyncio.wait({task})
    pump.events.put_nowait(Failed(AbandonedError("killed")))  # the response's end
    await stream.close()
    await eventually(lambda: len(stand.engine.journal) == 1, "the engine finished")
    stand.engine.journal[0] = msgspec.structs.replace(
        stand.engine.journal[0], finish_reason="abort"
    )
    await run_sql(stand.db, "update requests set lease_until = now() - interval '1 s'")

    async with connected(stand.engine) as engines:
        sweeper = Sweeper(stand.db.sessions, engines, grace_s=0.0, replica_lost_after_s=0.0)
        assert await sweeper.sweep_once() == ["settled"]

    request, attempt, entry = await stand.last_request()
    assert attempt is not None
    assert entry is not None
    stopped, going = pump._choices
    num_stopped = _tokens_until("go STOP on", "STOP")
    assert stopped.num_kept == num_stopped
    assert num_stopped < request.checkpoint_tokens <= num_stopped + going.num_observed
    assert attempt.billed == entry.completion_tokens == request.checkpoint_tokens
    assert attempt.generated == stand.engine.journal[0].usage.completion_tokens > attempt.billed
    assert attempt.absorbed == attempt.generated - attempt.billed
    assert entry.prompt_tokens == len(stand.generated[0].prompt_token_ids)


async def test_a_fault_after_some_choices_ended_bills_nothing(stand: Stand) -> None:
    stand.engine.script = _say("x", "a long story about many things " * 3, error_after=12)

    stream = await stand.client.chat.completions.create(
        model=BASE, messages=_HELLO, n=2, stream=True
    )
    with pytest.raises(openai.APIError):
        [chunk async for chunk in stream]

    _, attempt, entry = await stand.last_request()
    assert attempt is not None
    assert entry is not None
    assert (attempt.outcome, attempt.billed, entry.account) == ("fault", 0, "absorbed")


async def test_a_choice_whose_end_was_never_told_is_a_fault(stand: Stand) -> None:
    """Another's end says nothing of it: its text may be any part of what there was."""
    stand.engine.script = _say("x", "a long story", forgets_end_of=0)

    with pytest.raises(openai.InternalServerError) as failure:
        await stand.client.chat.completions.create(model=BASE, messages=_HELLO, n=2)

    assert failure.value.code == "engine_error"
    _, attempt, entry = await stand.last_request()
    assert attempt is not None
    assert entry is not None
    assert (attempt.outcome, attempt.billed, entry.account) == ("fault", 0, "absorbed")


async def test_an_engine_lost_after_every_choice_has_its_text_still_answers(
    own_stand: Stand,
) -> None:
    stand = own_stand
    stand.engine.script = _say(*(["go STOP " + "on and on " * 9] * 2), crash_after=24)

    answer = await stand.client.completions.create(
        model=BASE, prompt="x", n=2, max_tokens=200, stop="STOP"
    )

    assert [choice.text for choice in answer.choices] == ["go ", "go "]
    _, attempt, _ = await stand.last_request()
    assert attempt is not None
    assert attempt.outcome == "completed"


async def test_many_choices_with_clients_leaving_at_random_leave_nothing(stand: Stand) -> None:
    def script(request: Generate) -> Script:
        texts = ["words STOP and " * 3, "words and words " * 3, "x"] * 6
        return _say(*texts[: request.sampling.n], token_delay_s=0.005)

    stand.engine.script_for = script

    async def come_and_go(number: int) -> None:
        body = {
            "model": BASE,
            "prompt": "x",
            "max_tokens": 40,
            "n": 1 + number % 5,
            "stream": number % 2 == 0,
            "stop": "STOP",
        }
        client = stand.http()
        with contextlib.suppress(httpx.TimeoutException):
            await client.post("/v1/completions", json=body, timeout=0.1 + 0.1 * (number % 6))

    await asyncio.gather(*(come_and_go(number) for number in range(18)))


async def test_a_single_choice_is_stopped_as_before(stand: Stand) -> None:
    stand.engine.script = says("abc STOP and on and on")

    await stand.client.completions.create(model=BASE, prompt="x", max_tokens=60, stop="STOP")

    [abort] = stand.aborts
    assert (abort.index, abort.as_stop) == (None, True)
