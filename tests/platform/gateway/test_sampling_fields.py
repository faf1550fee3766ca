"""Every sampling field through the official client: it reaches the engine, or its 400 names it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from loraplex_engine.protocol import SamplingParams
from openai.types.chat import ChatCompletionMessageParam

from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import BASE, Stand, says
from tests.support.fake_engine import Script

pytestmark = pytest.mark.asyncio(loop_scope="package")

_HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
_VOCAB_SIZE = tiny_model.reference().get_vocab_size(with_added_tokens=True)


async def _sent(stand: Stand, **fields: Any) -> SamplingParams:
    """What the engine is asked for on behalf of these fields; the same from both endpoints."""
    stand.engine.received.clear()
    stand.engine.script = says("x")
    body = {"model": BASE, "max_tokens": 9, "seed": 3} | fields
    for url, prompt in (
        ("/v1/chat/completions", {"messages": _HELLO}),
        ("/v1/completions", {"prompt": "x"}),
    ):
        answer = await stand.http().post(url, json=body | prompt)
        assert answer.status_code == 200, answer.text
    chat, completion = stand.generated
    assert chat.sampling == completion.sampling
    return chat.sampling


async def _refused(stand: Stand, **fields: Any) -> dict[str, Any]:
    """The error that both endpoints answer with."""
    body = {"model": BASE, "max_tokens": 9} | fields
    chat = await stand.http().post("/v1/chat/completions", json=body | {"messages": _HELLO})
    completion = await stand.http().post("/v1/completions", json=body | {"prompt": "x"})
    assert (chat.status_code, completion.status_code) == (400, 400), chat.text
    errors: list[dict[str, Any]] = [answer.json()["error"] for answer in (chat, completion)]
    assert errors[0]["message"] == errors[1]["message"]
    assert stand.generated == []
    return errors[0]


async def test_openai_s_fields_reach_the_engine(stand: Stand) -> None:
    stand.engine.script = says("x")

    await stand.client.chat.completions.create(
        model=BASE,
        messages=_HELLO,
        temperature=0.7,
        top_p=0.9,
        n=2,
        presence_penalty=-1.5,
        frequency_penalty=1.25,
        logit_bias={"5": 100, "6": -0.5},
        seed=11,
        user="someone",
        logprobs=True,
        top_logprobs=20,
        max_completion_tokens=8,
    )
    await stand.client.completions.create(
        model=BASE,
        prompt="x",
        presence_penalty=2,
        frequency_penalty=-2,
        logit_bias={"0": 1},
        logprobs=5,
        user="someone",
    )

    chat, completion = (sent.sampling for sent in stand.generated)
    assert (chat.temperature, chat.top_p, chat.n, chat.seed) == (0.7, 0.9, 2, 11)
    assert (chat.presence_penalty, chat.frequency_penalty) == (-1.5, 1.25)
    assert chat.logit_bias == {5: 100.0, 6: -0.5}
    assert (chat.max_tokens, chat.logprobs) == (8, 20)
    assert (completion.presence_penalty, completion.frequency_penalty) == (2.0, -2.0)
    assert (completion.logit_bias, completion.logprobs, completion.n) == ({0: 1.0}, 5, 1)


async def test_the_extras_go_through_extra_body(stand: Stand) -> None:
    stand.engine.script = says("x")

    await stand.client.chat.completions.create(
        model=BASE,
        messages=_HELLO,
        max_tokens=7,
        extra_body={
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop_token_ids": [7, 9, 7],
            "include_stop_str_in_output": True,
            "allowed_token_ids": [1, 2, 1],
            "bad_words": ["hello"],
        },
    )

    [sent] = stand.generated
    sampling = sent.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (40, 0.05, 1.1)
    assert (sampling.min_tokens, sampling.max_tokens) == (2, 7)
    assert sampling.stop_token_ids == (2, 0, 7, 9)
    assert sampling.allowed_token_ids == (1, 2)
    assert sampling.bad_words_token_ids == tuple(
        tuple(tiny_model.ids_of(text)) for text in ("hello", " hello")
    )


async def test_nothing_asked_for_switches_every_pass_off(stand: Stand) -> None:
    plain = await _sent(stand)

    neutral = await _sent(
        stand,
        n=1,
        presence_penalty=0,
        frequency_penalty=0,
        repetition_penalty=1,
        logit_bias={},
        top_k=-1,
        min_p=0,
        min_tokens=0,
        stop_token_ids=[],
        bad_words=[],
        include_stop_str_in_output=False,
        ignore_eos=False,
        allowed_token_ids=None,
        user="x",
    )

    assert plain == neutral == SamplingParams(max_tokens=9, seed=3, stop_token_ids=(2, 0))


async def test_ignore_eos_keeps_the_callers_own_stop_ids(stand: Stand) -> None:
    sampling = await _sent(stand, ignore_eos=True, stop_token_ids=[9])

    assert (sampling.ignore_eos, sampling.stop_token_ids) == (True, (9,))


async def test_bad_words_are_banned_with_and_without_a_space_as_text(stand: Stand) -> None:
    sampling = await _sent(stand, bad_words=[" Paris", "<|im_end|>", "Rome"])

    decode = tiny_model.reference().decode
    banned = [decode(list(ids), skip_special_tokens=False) for ids in sampling.bad_words_token_ids]
    assert banned == ["Paris", " Paris", "<|im_end|>", " <|im_end|>", "Rome", " Rome"]
    # The caller's text is text: the end token itself is not banned by writing it.
    assert (2,) not in sampling.bad_words_token_ids


_BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 0}, "n", "n"),
    ({"n": 17}, "n", "<= 16"),
    ({"n": True}, "n", "int"),
    ({"n": 1.5}, "n", "int"),
    ({"presence_penalty": 2.01}, "presence_penalty", "<= 2"),
    ({"frequency_penalty": "high"}, "frequency_penalty", "float"),
    ({"repetition_penalty": 0}, "repetition_penalty", ">= 0.01"),
    ({"min_p": 1.1}, "min_p", "<= 1"),
    ({"min_p": -0.1}, "min_p", ">= 0"),
    ({"top_k": -2}, "top_k", ">= -1"),
    ({"min_tokens": -1}, "min_tokens", ">= 0"),
    ({"min_tokens": 10}, "min_tokens", "at most 9, which is 'max_tokens'"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "<= 100"),
    ({"logit_bias": {str(_VOCAB_SIZE): 1}}, "logit_bias", f"from 0 to {_VOCAB_SIZE - 1}"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "from 0"),
    ({"logit_bias": {"٣": 1}}, "logit_bias", "from 0"),
    ({"logit_bias": {" 3": 1}}, "logit_bias", "from 0"),
    ({"logit_bias": {"03": 1}}, "logit_bias", "from 0"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "from 0"),
    ({"logit_bias": {"word": 1}}, "logit_bias", "from 0"),
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "<= 1024"),
    ({"stop_token_ids": [1, _VOCAB_SIZE]}, "stop_token_ids[1]", "from 0 to"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", ">= 0"),
    ({"stop_token_ids": [2**63]}, "stop_token_ids", "<= 2147483647"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids", "<= 64"),
    ({"stop_token_ids": list(range(3, 66))}, "stop_token_ids", "at most 62 ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids", ">= 1"),
    ({"allowed_token_ids": [3, _VOCAB_SIZE]}, "allowed_token_ids[1]", "from 0 to"),
    ({"bad_words": [""]}, "bad_words", ">= 1"),
    ({"bad_words": ["x"] * 129}, "bad_words", "<= 128"),
    ({"bad_words": ["x", "\u16a0" * 40]}, "bad_words[1]", "between 1 and 32 tokens"),
    ({"bad_words": "x"}, "bad_words", "array"),
    ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output", "bool"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "<= 4"),
    ({"stop": ""}, "stop", ">= 1"),
    ({"top_p": 0}, "top_p", "> 0"),
    ({"temperature": 2.5}, "temperature", "<= 2"),
    ({"seed": 2**63}, "seed", "9223372036854775807"),
]


async def test_a_bad_value_is_a_400_that_names_its_field(stand: Stand) -> None:
    for fields, param, expected in _BAD:
        error = await _refused(stand, **fields)

        assert error["param"].startswith(param), error
        assert error["param"].split("[")[0].split(".")[0] == param.split("[")[0]
        assert expected in error["message"]
        assert param.split("[")[0] in error["message"]
        assert len(error["message"]) < 400


async def test_numbers_that_json_allows_but_no_double_holds_are_a_400(stand: Stand) -> None:
    for text in ("1e999", "-1e999", "NaN", "Infinity"):
        body = f'{{"model": "{BASE}", "prompt": "x", "temperature": {text}}}'
        answer = await stand.http().post("/v1/completions", content=body)
        assert answer.status_code == 400


async def test_the_official_client_raises_bad_request_with_the_field(stand: Stand) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await stand.client.chat.completions.create(
            model=BASE, messages=_HELLO, logit_bias={"999999": 1}
        )

    assert caught.value.param == "logit_bias"
    assert caught.value.code == "invalid_value"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"best_of": 3, "n": 2}, "best_of"), ({"echo": True}, "echo"), ({"suffix": "s"}, "suffix")],
)
async def test_what_completions_does_not_do_is_refused_by_name(
    stand: Stand, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await stand.client.completions.create(model=BASE, prompt="x", extra_body=fields)

    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


# ---------------------------------------------------------------------------- stops


async def test_the_stop_string_is_shown_when_asked_for(stand: Stand) -> None:
    stand.engine.script = says("abc STOP and more")

    async def ask(**fields: Any) -> tuple[str, int]:
        answer = await stand.client.completions.create(
            model=BASE, prompt="x", max_tokens=60, stop="STOP", extra_body=fields
        )
        assert answer.usage is not None
        return answer.choices[0].text, answer.usage.completion_tokens

    hidden, shown = await ask(), await ask(include_stop_str_in_output=True)

    assert (hidden[0], shown[0]) == ("abc ", "abc STOP")
    assert hidden[1] == shown[1]


async def test_a_shown_stop_string_streams_the_same(stand: Stand) -> None:
    stand.engine.script = says("abc STOP and more", tokens_per_event=3)

    stream = await stand.client.completions.create(
        model=BASE,
        prompt="x",
        max_tokens=60,
        stop="STOP",
        stream=True,
        extra_body={"include_stop_str_in_output": True},
    )

    assert "".join([c.choices[0].text async for c in stream if c.choices]) == "abc STOP"


async def test_a_stop_token_is_shown_when_asked_for_and_has_text(stand: Stand) -> None:
    [comma] = tiny_model.ids_of(",")
    stand.engine.script = Script(token_ids=tiny_model.ids_of("one, two"))

    async def ask(**fields: Any) -> str:
        answer = await stand.client.completions.create(
            model=BASE,
            prompt="x",
            max_tokens=60,
            extra_body={"stop_token_ids": [comma]} | fields,
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert await ask() == "one"
    assert await ask(include_stop_str_in_output=True) == "one,"


async def test_no_stop_string_ends_a_text_before_min_tokens(stand: Stand) -> None:
    text = "STOP one STOP two"
    stand.engine.script = says(text)
    first = len(tiny_model.ids_of("STOP"))
    assert first > 1

    async def ask(min_tokens: int) -> str:
        answer = await stand.client.completions.create(
            model=BASE,
            prompt="x",
            max_tokens=60,
            stop="STOP",
            extra_body={"min_tokens": min_tokens},
        )
        return answer.choices[0].text

    assert await ask(0) == ""
    assert await ask(first - 1) == ""  # it begins before and ends after
    assert await ask(first) == "STOP one "
    assert await ask(len(tiny_model.ids_of("STOP one"))) == "STOP one "
    assert await ask(60) == text


# ---------------------------------------------------------------------------- logprobs and usage


async def test_no_logprob_in_json_is_infinite_or_not_a_number(stand: Stand) -> None:
    """The engine never sends one; were it to, clients could not even parse the answer."""
    from uuid import UUID

    from loraplex_engine.protocol import TokenLogprobs
    from loraplex_platform.gateway.answers import (
        AnswerHead,
        ChatAnswer,
        CompletionAnswer,
        WholeChoice,
    )
    from loraplex_platform.gateway.openai_schemas import UsageReport
    from loraplex_platform.gateway.text_stream import ShownToken, TextPiece

    bad = TokenLogprobs(float("-inf"), [5, 6], [float("nan"), float("-inf")])
    head = AnswerHead(UUID(int=1), 0, "m", "fp", includes_usage=False, num_top_logprobs=2)
    token_bytes = stand.gateway.tokenizer.token_bytes
    whole = [WholeChoice(TextPiece("x", [ShownToken(5, bad, 0)]), "stop")]

    for shape in (ChatAnswer, CompletionAnswer):
        body = shape(head, token_bytes).whole(whole, UsageReport.of(1, 1, 0))

        def refuse(text: str) -> None:
            raise AssertionError(text)

        json.loads(body, parse_constant=refuse)
        assert b"-9999.0" in body
        assert b"null," not in body.split(b"logprobs")[1].split(b"]")[0]


async def test_top_logprobs_of_partial_characters_have_their_bytes(stand: Stand) -> None:
    ids = [tiny_model.reference().token_to_id(character) for character in _byte_characters("🙂")]
    assert len(ids) == 4
    stand.engine.script = Script(token_ids=[*ids, 2])

    answer = await stand.client.chat.completions.create(
        model=BASE, messages=_HELLO, logprobs=True, top_logprobs=2
    )

    choice = answer.choices[0]
    assert choice.message.content == "🙂"
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert [entry.bytes for entry in entries] == [[0xF0], [0x9F], [0x99], [0x82]]
    assert [entry.token for entry in entries] == [
        f"bytes:\\x{b:02x}" for b in (0xF0, 0x9F, 0x99, 0x82)
    ]
    for entry in entries:
        top = entry.top_logprobs[0]
        assert (top.token, top.bytes) == (entry.token, entry.bytes)


def _byte_characters(text: str) -> str:
    from tokenizers import pre_tokenizers

    [(pieces, _)] = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)
    return str(pieces)


async def test_cached_tokens_are_shown_and_billed_at_their_own_price(stand: Stand) -> None:
    stand.engine.script = says("Paris", cached_tokens=0)
    prompt = "The capital of France is The capital of France is"

    async def ask(cached: int) -> tuple[int | None, int, int]:
        stand.engine.script = says("Paris", cached_tokens=cached)
        answer = await stand.client.completions.create(model=BASE, prompt=prompt)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        _, attempt, entry = await stand.last_request()
        assert attempt is not None
        assert entry is not None
        assert entry.cached_tokens == attempt.cached_tokens == cached
        return (
            answer.usage.prompt_tokens_details.cached_tokens,
            answer.usage.prompt_tokens,
            entry.amount_pico,
        )

    cold, warm = await ask(0), await ask(8)

    assert (cold[0], warm[0]) == (0, 8)
    assert cold[1] == warm[1] > 8
    assert warm[2] < cold[2]


async def test_a_request_that_rules_every_token_out_is_a_400_of_its_own_making(
    stand: Stand,
) -> None:
    stand.engine.script = Script(error_after=0, error_code="no_token_allowed")

    with pytest.raises(openai.BadRequestError) as caught:
        await stand.client.completions.create(model=BASE, prompt="x")

    assert caught.value.code == "no_token_allowed"
    _, attempt, entry = await stand.last_request()
    assert attempt is not None
    assert entry is not None
    assert (attempt.outcome, entry.account) == ("fault", "absorbed")


async def test_requests_without_a_seed_draw_differently(stand: Stand) -> None:
    for _ in range(3):
        await stand.client.completions.create(model=BASE, prompt="x", max_tokens=2)

    seeds = {sent.sampling.seed for sent in stand.generated}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_a_prompt_that_ends_inside_a_character_leaks_nothing_of_itself(stand: Stand) -> None:
    whole = [tiny_model.reference().token_to_id(c) for c in _byte_characters("a🙂b")]
    stand.engine.script = Script(token_ids=[*whole[3:], 2])

    stream = await stand.client.completions.create(
        model=BASE, prompt=whole[:3], max_tokens=9, stream=True
    )
    text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    # The rest of the character is no character by itself, here as in the tokenizer's own decode.
    assert text == tiny_model.reference().decode(whole[3:]) == "\ufffd\ufffdb"


async def test_an_unfinished_character_is_flushed_at_the_length_limit(stand: Stand) -> None:
    ids = [tiny_model.reference().token_to_id(c) for c in _byte_characters("a🙂")][:-1]
    stand.engine.script = Script(token_ids=ids)

    for fields in ({"max_tokens": len(ids)}, {"max_tokens": 60}):
        answer = await stand.client.completions.create(model=BASE, prompt="x", **fields)
        assert answer.choices[0].text == "a\ufffd"
