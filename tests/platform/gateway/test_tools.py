"""Tools over HTTP, with the official client: plans, prompts, calls whole and streamed, the way back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import openai
import pytest
from jinja2 import TemplateError
from loraplex_engine.protocol import Grammar
from loraplex_engine.structured.matcher import LlMatcher
from loraplex_engine.structured.tokenizer import native_matcher, open_tokenizer
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.gateway.chat_message import CalledFunction, ChatMessage
from loraplex_platform.gateway.structured_schemas import NamedToolChoice, Tool
from loraplex_platform.gateway.templates import ChatTemplate
from loraplex_platform.gateway.tool_answers import ChoiceCalls
from loraplex_platform.gateway.tool_formats.hermes import END, START, Hermes
from loraplex_platform.gateway.tools import ToolPlan
from loraplex_platform.gateway.tools import plan_tools as plan_tools_in

from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import BASE, Stand, says
from tests.support.grammars import VOCAB_SIZE, write_tokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
BARE: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}  # short
ONE_CALL = f'{START}\n{{"name": "now", "arguments": {{"z": "\u00e9"}}}}\n{END}'
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather?"}]
TWO_CALLS = (
    f'Let me see.\n{START}\n{{"name": "get_weather", "arguments": {{"city": "S\\u00e3o \\"P\\" 🙂 {{"}}}}\n'
    f'{END}\n{START}\n{{"name": "now", "arguments": {{}}}}\n{END}'
)
ARGUMENTS = '{"city": "S\\u00e3o \\"P\\" 🙂 {"}'


def plan_tools(*arguments: Any) -> ToolPlan | None:
    return plan_tools_in(*arguments, Hermes())


def tools(*definitions: dict[str, Any]) -> list[Tool]:
    return [msgspec.convert(definition, Tool) for definition in definitions]


def strict(definition: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {**definition["function"], "strict": True}}


def named(name: str) -> NamedToolChoice:
    return msgspec.convert({"type": "function", "function": {"name": name}}, NamedToolChoice)


# ------------------------------------------------------------------ plans


def test_without_tools_or_with_none_the_answer_is_an_ordinary_one() -> None:
    output = Grammar(kind="json_object")
    assert plan_tools(None, None, None, output) is None
    assert plan_tools([], "auto", True, output) is None
    assert plan_tools(tools(WEATHER), "none", None, output) is None


def test_auto_is_free_text_unless_something_must_hold() -> None:
    free = plan_tools(tools(WEATHER, CLOCK), None, None, None)
    assert free is not None
    assert (free.grammar, free.names) == (None, {"get_weather", "now"})
    assert not free.ends_after_call

    single = plan_tools(tools(WEATHER), "auto", False, None)
    assert single is not None
    assert (single.grammar, single.ends_after_call) == (None, True)

    bound = plan_tools(tools(strict(WEATHER), CLOCK), "auto", None, None)
    assert bound is not None
    assert bound.grammar is not None


def test_a_named_choice_shows_that_tool_alone() -> None:
    plan = plan_tools(tools(WEATHER, CLOCK), named("now"), None, None)

    assert plan is not None
    assert plan.names == {"now"}
    assert [tool["function"]["name"] for tool in plan.shown] == ["now"]


@pytest.fixture(scope="module")
def native_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write(native_tokenizer: Any, grammar: Grammar, seed: int, most: int = 400) -> str:
    """Random tokens that the grammar allows, until it is complete or an end token came."""
    matcher = LlMatcher(native_matcher(native_tokenizer, grammar), VOCAB_SIZE)
    choice, ids = random.Random(seed), []
    while not matcher.is_complete and len(ids) < most:
        mask = matcher.masks_for()[0]
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        ends = [id_ for id_ in allowed if id_ in (0, 2)]
        ids.append(ends[0] if ends and choice.random() < 0.5 else choice.choice(allowed))
        matcher.advance(ids[-1])
    return tiny_model.reference().decode(ids, skip_special_tokens=True)


def parsed(plan: Any, text: str) -> Any:
    return ChoiceCalls(plan.parser(), "k").whole(text)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("how", ["required", "named", "single"])
def test_what_is_forced_is_always_calls_with_valid_arguments(
    how: str, seed: int, native_tokenizer: Any
) -> None:
    choice = named("get_weather") if how == "named" else "required"
    plan = plan_tools(tools(WEATHER, CLOCK), choice, how != "single", None)
    assert plan is not None
    assert plan.grammar is not None

    text = write(native_tokenizer, plan.grammar, seed)

    message = parsed(plan, text)
    assert message.content is None, text
    assert len(message.tool_calls) == 1 if how != "required" else len(message.tool_calls) >= 1
    for call in message.tool_calls:
        if call.function.name == "now":
            assert json.loads(call.function.arguments) == {}
        else:
            arguments = json.loads(call.function.arguments)
            jsonschema.validate(arguments, WEATHER["function"]["parameters"])
    if how == "named":
        assert message.tool_calls[0].function.name == "get_weather"


def test_several_calls_are_allowed_where_they_may_be(native_tokenizer: Any) -> None:
    plan = plan_tools(tools(CLOCK), "required", None, None)
    assert plan is not None
    assert plan.grammar is not None

    counts = {
        len(parsed(plan, write(native_tokenizer, plan.grammar, seed)).tool_calls)
        for seed in range(12)
    }

    assert 1 in counts
    assert max(counts) > 1


@pytest.mark.parametrize("seed", range(6))
def test_auto_with_a_format_is_calls_or_the_format(seed: int, native_tokenizer: Any) -> None:
    wanted = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}}
    wanted |= {"required": ["n"], "additionalProperties": False}
    output = Grammar(kind="json_schema", value=json.dumps(wanted))
    plan = plan_tools(tools(CLOCK), "auto", None, output)
    assert plan is not None
    assert plan.grammar is not None

    message = parsed(plan, write(native_tokenizer, plan.grammar, seed))

    if message.content is not None:
        jsonschema.validate(json.loads(message.content), wanted)
    else:
        assert message.tool_calls[0].function.name == "now"


def test_strict_tools_are_held_to_their_schema_amid_free_text(native_tokenizer: Any) -> None:
    plan = plan_tools(tools(strict(WEATHER)), "auto", None, None)
    assert plan is not None
    assert plan.grammar is not None
    matcher = LlMatcher(native_matcher(native_tokenizer, plan.grammar), VOCAB_SIZE)

    def is_allowed(text: str) -> bool:
        ids = tiny_model.ids_of(text)
        return matcher.fork().validate_drafts(ids) == len(ids)

    assert is_allowed("Any text, with < and > and {braces}.")
    good = f'Look:\n{START}\n{{"name": "get_weather", "arguments": {{"city": "Rome"}}}}\n{END}'
    assert is_allowed(good + " Then more text.")
    assert not is_allowed(good.replace("Rome", "far too long a city"))
    assert not is_allowed(good.replace("get_weather", "other"))
    assert not is_allowed(f"{START}\nno json")


@pytest.mark.parametrize(
    ("definitions", "choice", "output", "param"),
    [
        ([WEATHER, WEATHER], None, None, "tools[1].function.name"),
        ([WEATHER], named("other"), None, "tool_choice.function.name"),
        ([], "required", None, "tool_choice"),
        ([], named("now"), None, "tool_choice"),
        ([WEATHER], None, Grammar(kind="regex", value="a"), "structured_outputs"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    definitions: list[dict[str, Any]], choice: Any, output: Grammar | None, param: str
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        plan_tools(tools(*definitions), choice, None, output)

    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("schema", "is_lax"),
    [({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, False), ({"type": "integer"}, True)],
)
def test_only_a_lax_tool_takes_one_of_for_any_of(schema: Any, is_lax: bool) -> None:
    """`oneOf` taken for `anyOf` allows what matches twice: no schema followed to the letter may."""
    object_schema = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": object_schema}}
    output = Grammar(kind="json_schema", value='{"type":"object"}')

    def options(definition: dict[str, Any]) -> list[Any]:
        plan = plan_tools(tools(definition), None, None, output)
        assert plan is not None
        assert plan.grammar is not None
        schemas = [line.partition("%json ")[2] for line in plan.grammar.value.split("\n")]
        return [json.loads(schema)["x-guidance"] for schema in schemas if schema]

    lax, of_format = options(tool)
    assert (lax["coerce_one_of"], lax["lenient"]) == (True, True)
    assert (of_format["coerce_one_of"], of_format["lenient"]) == (False, False)
    if is_lax:
        [strictly, _] = options(strict(tool))
        assert (strictly["coerce_one_of"], strictly["lenient"]) == (False, False)


def test_a_strict_tools_unsupported_keyword_is_named_and_a_lax_ones_is_ignored(
    native_tokenizer: Any,
) -> None:
    odd = {
        "type": "function",
        "function": {
            "name": "odd",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "array", "uniqueItems": True, "items": {"const": 1}}},
            },
        },
    }
    with pytest.raises(InvalidRequestError) as refusal:
        plan_tools(tools(strict(odd)), "required", None, None)
    assert refusal.value.param == "tools[0].function.parameters.properties.a.uniqueItems"

    plan = plan_tools(tools(odd), "required", None, None)
    assert plan is not None
    assert plan.grammar is not None
    native_matcher(native_tokenizer, plan.grammar)


# ------------------------------------------------------------------ prompts

HERMES = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer with <tool_call>.\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson(ensure_ascii=True) }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
)
CALLED = ChatMessage("assistant", "", (CalledFunction("c1", "get_weather", '{"city": "Rome"}'),))
RESULT = ChatMessage("tool", "Sunny", call_id="c1")


def test_a_template_that_knows_tools_gets_them() -> None:
    template = ChatTemplate(HERMES, {}, ["<|im_start|>", "<|im_end|>"])

    text = template.render([ChatMessage("user", "Hi"), CALLED, RESULT], [WEATHER])

    assert json.dumps(WEATHER) in text
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>' in text
    assert "<|im_start|>tool\nSunny<|im_end|>" in text


def test_nothing_in_tools_or_calls_becomes_a_control_token() -> None:
    template = ChatTemplate(HERMES, {}, ["<|im_start|>", "<|im_end|>"])
    evil = "é<|im_end|>"
    tool = {
        "type": "function",
        "function": {"name": "f", "description": evil, "parameters": {evil: [evil]}},
    }
    call = ChatMessage("assistant", evil, (CalledFunction("c", "f", json.dumps({evil: evil})),))

    text = template.render([call, ChatMessage("tool", evil, call_id="c")], [tool])

    plain = "".join(piece for piece, is_plain in template.split(text) if not is_plain)
    assert plain.count("<|im_end|>") == 2  # the template's own
    assert text.count("<|im_end|>") == 9
    assert "\\u00e9" in text  # escaped as the template wanted, the marks not


def test_any_other_template_is_told_in_plain_messages() -> None:
    template = ChatTemplate(tiny_model.CHATML, {}, ["<|im_start|>", "<|im_end|>"])
    messages = [
        ChatMessage("system", "Be kind."),
        ChatMessage("user", "Weather?"),
        ChatMessage("assistant", "Let me see.", (*CALLED.calls, CalledFunction("c2", "now", ""))),
        RESULT,
        ChatMessage("tool", "12:00", call_id="c2"),
    ]

    text = template.render(messages, [WEATHER, CLOCK])

    assert text.startswith("<|im_start|>system\nBe kind.\n\nYou can call functions.")
    assert json.dumps(WEATHER["function"]) in text
    assert (
        "<|im_start|>assistant\nLet me see.\n"
        f'{START}\n{{"name": "get_weather", "arguments": {{"city": "Rome"}}}}\n{END}\n'
        f'{START}\n{{"name": "now", "arguments": {{}}}}\n{END}<|im_end|>'
    ) in text
    assert (
        "<|im_start|>user\n<tool_response>\nSunny\n</tool_response>\n"
        "<tool_response>\n12:00\n</tool_response><|im_end|>"
    ) in text
    assert template.render(messages[1:2], [CLOCK]).startswith("<|im_start|>system\nYou can call")


def test_no_tools_leave_the_prompt_alone() -> None:
    for source in (tiny_model.CHATML, HERMES):
        template = ChatTemplate(source, {}, [])
        messages = [ChatMessage("user", "Hi"), ChatMessage("assistant", "Yes", calls=())]

        assert template.render(messages) == template.render(messages, [])
        assert "function" not in template.render(messages)


def test_a_template_that_refuses_is_a_400_with_its_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {}, [])

    with pytest.raises(InvalidRequestError, match="roles must alternate") as refusal:
        template.render([CALLED, RESULT])

    assert refusal.value.param == "messages"
    assert not isinstance(refusal.value, TemplateError)


# ------------------------------------------------------------------ over HTTP


async def ask(stand: Stand, **fields: Any) -> Any:
    return await stand.client.chat.completions.create(
        **{"model": BASE, "messages": QUESTION, "max_tokens": 160, "tools": [BARE, CLOCK]} | fields
    )


async def streamed(
    stand: Stand, **fields: Any
) -> tuple[str, list[dict[str, str]], str | None, int]:
    """A stream put together as clients do: content, calls, reason, and how many tool deltas came."""
    content, calls, reason, num_deltas = "", [], None, 0
    async for chunk in await ask(stand, stream=True, **fields):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            content += choice.delta.content or ""
            for delta in choice.delta.tool_calls or []:
                num_deltas += 1
                if delta.index == len(calls):
                    assert delta.type == "function"
                    calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
                else:
                    assert delta.id is None
                    assert delta.function.name is None
                calls[delta.index]["arguments"] += delta.function.arguments or ""
    return content, calls, reason, num_deltas


@pytest.mark.asyncio(loop_scope="package")
class TestOverHttp:
    async def test_calls_come_whole(self, stand: Stand) -> None:
        stand.engine.script = says(TWO_CALLS)

        answer = await ask(stand)

        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see.\n"
        first, second = choice.message.tool_calls
        assert (first.function.name, first.function.arguments) == ("get_weather", ARGUMENTS)
        assert json.loads(first.function.arguments) == {"city": 'São "P" 🙂 {'}
        assert (second.function.name, second.function.arguments) == ("now", "{}")
        assert first.id != second.id
        assert first.id.startswith("call_")

    @pytest.mark.parametrize("tokens_per_event", [1, 3, 7, 1000])
    async def test_streamed_is_whole_for_every_chunking(
        self, tokens_per_event: int, stand: Stand
    ) -> None:
        stand.engine.script = says(TWO_CALLS, tokens_per_event=tokens_per_event)

        content, calls, reason, num_deltas = await streamed(stand)

        assert (content, reason) == ("Let me see.\n", "tool_calls")
        assert [call["name"] for call in calls] == ["get_weather", "now"]
        assert [call["arguments"] for call in calls] == [ARGUMENTS, "{}"]
        assert len({call["id"] for call in calls}) == 2
        if tokens_per_event == 1:
            assert num_deltas > 8  # arguments really stream

    async def test_an_answer_without_calls_is_an_answer(self, stand: Stand) -> None:
        stand.engine.script = says("It is <b>sunny</b> {today}.")

        answer = await ask(stand)
        content, calls, reason, _ = await streamed(stand)

        assert answer.choices[0].message.content == content == "It is <b>sunny</b> {today}."
        assert answer.choices[0].message.tool_calls is None
        assert (calls, reason, answer.choices[0].finish_reason) == ([], "stop", "stop")

    async def test_max_tokens_within_a_call_says_length_and_closes_nothing(
        self, stand: Stand
    ) -> None:
        text = f'{START}\n{{"name": "get_weather", "arguments": {{"city": "Ro'
        stand.engine.script = says(text, end=False)
        num_tokens = len(tiny_model.ids_of(text))

        answer = await ask(stand, max_tokens=num_tokens)
        _, calls, reason, _ = await streamed(stand, max_tokens=num_tokens)

        [call] = answer.choices[0].message.tool_calls
        assert call.function.arguments == calls[0]["arguments"] == '{"city": "Ro'
        assert answer.choices[0].finish_reason == reason == "length"

    async def test_a_stop_string_within_a_call_stops_it_and_is_no_tool_calls(
        self, stand: Stand
    ) -> None:
        stand.engine.script = says(TWO_CALLS)

        answer = await ask(stand, stop="🙂")

        [call] = answer.choices[0].message.tool_calls
        assert call.function.arguments == ARGUMENTS[: ARGUMENTS.index("🙂")]
        assert answer.choices[0].finish_reason == "stop"

    async def test_without_parallel_calls_the_first_ends_the_answer(self, stand: Stand) -> None:
        stand.engine.script = says(TWO_CALLS)

        answer = await ask(stand, parallel_tool_calls=False)
        _, calls, reason, _ = await streamed(stand, parallel_tool_calls=False)

        assert len(answer.choices[0].message.tool_calls) == len(calls) == 1
        assert answer.choices[0].finish_reason == reason == "tool_calls"
        used = answer.usage.completion_tokens
        assert used < len(tiny_model.ids_of(TWO_CALLS))  # nobody pays for the second

    @pytest.mark.parametrize("tokens_per_event", [1, 5, 1000])
    @pytest.mark.parametrize(
        "arguments",
        ['{"a": "</tool_call>"}', '{"a": {"b": "<tool_call>"}}', '"{\\"a\\": 1}"', "[1]"],
    )
    async def test_a_mark_within_the_only_call_s_arguments_does_not_end_it(
        self, arguments: str, tokens_per_event: int, stand: Stand
    ) -> None:
        """Found in review: as a stop string the mark cut the call in its middle."""
        body = f'{START}\n{{"name": "now", "arguments": {arguments}}}'
        text = f"Well: {body}\n{END} and {ONE_CALL} and more"
        stand.engine.script = says(text, tokens_per_event=tokens_per_event)
        whole_ids = tiny_model.ids_of(text)
        decode = tiny_model.reference().decode
        num_kept = next(n for n in range(len(whole_ids)) if body in decode(whole_ids[:n]))
        expected = json.loads(arguments) if arguments.startswith('"') else arguments

        answer = await ask(stand, parallel_tool_calls=False, max_tokens=150, tools=[CLOCK])
        content, calls, reason, _ = await streamed(
            stand, parallel_tool_calls=False, max_tokens=150, tools=[CLOCK]
        )

        [choice] = answer.choices
        [call] = choice.message.tool_calls
        assert call.function.arguments == calls[0]["arguments"] == expected
        assert (len(calls), choice.message.content, content) == (1, "Well: ", "Well: ")
        assert choice.finish_reason == reason == "tool_calls"
        assert answer.usage.completion_tokens == num_kept

    async def test_each_choice_ends_after_its_own_call(self, stand: Stand) -> None:
        texts = (TWO_CALLS, "Just text.", f"{ONE_CALL} and more and more and more")
        stand.engine.script = says("", choices=[[*tiny_model.ids_of(text), 2] for text in texts])

        answer = await ask(stand, n=3, parallel_tool_calls=False)

        assert [c.finish_reason for c in answer.choices] == ["tool_calls", "stop", "tool_calls"]
        assert [len(c.message.tool_calls or ()) for c in answer.choices] == [1, 0, 1]
        assert {(a.index, a.as_stop) for a in stand.aborts} == {(0, True), (2, True)}

    async def test_nothing_but_calls_has_no_content_streamed_either(self, stand: Stand) -> None:
        async def contents() -> list[str | None]:
            stream = await ask(stand, stream=True)
            return [c.choices[0].delta.content async for c in stream if c.choices]

        stand.engine.script = says(ONE_CALL)
        assert set(await contents()) == {None}
        assert (await ask(stand)).choices[0].message.content is None
        stand.engine.script = says("")
        assert "".join(content or "" for content in await contents()) == ""
        assert "" in await contents()
        assert (await ask(stand)).choices[0].message.content == ""

    @pytest.mark.parametrize(
        "change",
        [{"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": True}],
    )
    async def test_what_is_about_tools_needs_them(
        self, change: dict[str, Any], stand: Stand
    ) -> None:
        with pytest.raises(openai.BadRequestError) as refusal:
            await ask(stand, tools=None, extra_body=change)

        assert refusal.value.param == next(iter(change))
        await ask(stand, tools=[], extra_body={"tool_choice": "auto"})

    async def test_a_speaker_s_name_is_taken(self, stand: Stand) -> None:
        stand.engine.script = says("Fine.")

        await ask(stand, messages=[{"role": "user", "name": "Ann", "content": "Hi"}])

    async def test_choices_are_parsed_apart(self, stand: Stand) -> None:
        ids = [[*tiny_model.ids_of(text), 2] for text in (TWO_CALLS, "Just text.")]
        stand.engine.script = says("", choices=ids)

        answer = await ask(stand, n=2)

        first, second = answer.choices
        assert (first.finish_reason, len(first.message.tool_calls)) == ("tool_calls", 2)
        assert (second.finish_reason, second.message.content) == ("stop", "Just text.")

    async def test_the_engine_gets_the_grammar_and_the_prompt_the_tools(self, stand: Stand) -> None:
        stand.engine.script = says(f'{START}\n{{"name": "now", "arguments": {{}}}}\n{END}')

        answer = await ask(
            stand, tool_choice={"type": "function", "function": {"name": "now"}}, tools=[CLOCK]
        )

        [generate] = stand.generated
        assert generate.sampling.grammar is not None
        assert '\\"now\\"' in generate.sampling.grammar.value
        prompt = tiny_model.reference().decode(generate.prompt_token_ids)
        assert "You can call functions" in prompt
        assert answer.choices[0].message.content is None
        assert answer.choices[0].finish_reason == "tool_calls"

        await ask(stand, tool_choice="none")
        assert stand.generated[1].sampling.grammar is None
        prompt = tiny_model.reference().decode(stand.generated[1].prompt_token_ids)
        assert "functions" not in prompt

    async def test_a_result_goes_the_whole_way_round(self, stand: Stand) -> None:
        stand.engine.script = says(ONE_CALL)
        first = (await ask(stand, tools=[CLOCK])).choices[0].message
        messages: list[Any] = [*QUESTION, first.model_dump(exclude_none=True)]
        for call in first.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "12 h"})
        stand.engine.script = says("It is sunny.")

        answer = await ask(stand, messages=messages, tools=[CLOCK], max_tokens=20)

        assert answer.choices[0].message.content == "It is sunny."
        prompt = tiny_model.reference().decode(stand.generated[1].prompt_token_ids)
        assert ONE_CALL in prompt
        assert prompt.count("<tool_response>\n12 h\n</tool_response>") == 1

    async def test_empty_tool_calls_of_our_own_making_are_none(self, stand: Stand) -> None:
        stand.engine.script = says("Fine.")
        plain = [*QUESTION, {"role": "assistant", "content": "Yes."}, *QUESTION]
        empty = [*QUESTION, {"role": "assistant", "content": "Yes.", "tool_calls": []}, *QUESTION]

        await ask(stand, messages=plain, tools=[])
        await ask(stand, messages=empty, tools=[])

        bare, same = (generate.prompt_token_ids for generate in stand.generated)
        assert bare == same

    async def test_logprobs_cover_every_token_of_calls_too(self, stand: Stand) -> None:
        stand.engine.script = says(TWO_CALLS)

        answer = await ask(stand, logprobs=True)
        tokens = []
        async for chunk in await ask(stand, logprobs=True, stream=True):
            for choice in chunk.choices:
                tokens += [t.token for t in (choice.logprobs.content if choice.logprobs else [])]

        whole = [t.token for t in answer.choices[0].logprobs.content]
        assert tokens == whole
        assert len(whole) == len(tiny_model.ids_of(TWO_CALLS))

    @pytest.mark.parametrize(
        ("code", "status", "kind"),
        [
            ("grammar_invalid", 400, openai.BadRequestError),
            ("grammar_too_complex", 400, openai.BadRequestError),
            ("grammar_no_token", 400, openai.BadRequestError),
            ("grammar_failed", 400, openai.BadRequestError),
            ("grammar_unavailable", 503, openai.InternalServerError),
        ],
    )
    async def test_a_grammar_that_fails_is_told_and_nobody_pays(
        self, code: str, status: int, kind: type[openai.APIStatusError], stand: Stand
    ) -> None:
        stand.engine.script = says("x", error_after=0, error_code=code)

        with pytest.raises(kind) as failure:
            await stand.client.with_options(max_retries=0).chat.completions.create(
                model=BASE, messages=QUESTION, response_format={"type": "json_object"}
            )

        assert failure.value.status_code == status
        assert failure.value.code == code
        assert failure.value.param == ("response_format" if status == 400 else None)
        await stand.settled()
        _, attempt, _ = await stand.last_request()
        assert attempt is not None
        assert attempt.billed == 0

    @pytest.mark.parametrize(
        ("code", "fields", "param"),
        [
            ("grammar_invalid", {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
            ("grammar_invalid", {"tools": [CLOCK], "tool_choice": "required"}, "tools"),
            ("no_token_allowed", {"tools": [CLOCK], "tool_choice": "required"}, "tools"),
            ("no_token_allowed", {"allowed_token_ids": [5]}, "allowed_token_ids"),
            ("no_token_allowed", {"bad_words": ["a"]}, "bad_words"),
            ("no_token_allowed", {"min_tokens": 1}, "min_tokens"),
            ("never_fits", {"max_tokens": 8}, "max_tokens"),
            ("never_fits", {"max_completion_tokens": 8}, "max_completion_tokens"),
        ],
    )
    async def test_what_the_engine_refuses_names_the_field_that_was_sent(
        self, code: str, fields: dict[str, Any], param: str, stand: Stand
    ) -> None:
        if code == "never_fits":
            stand.engine.script = says("x", reject=code, reject_message="too long" * 1000)
        else:
            stand.engine.script = says("x", error_after=0, error_code=code)
        body = {"model": BASE, "messages": QUESTION, **fields}

        answer = await stand.http().post("/v1/chat/completions", json=body)

        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == param
        assert param in error["message"]
        assert len(error["message"]) < 1000

    async def test_formats_reach_the_engine(self, stand: Stand) -> None:
        stand.engine.script = says('{"a": 1}')
        schema = {"type": "object", "properties": {"b": {}, "a": {}}}
        formats = [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        ]
        for wanted in formats:
            answer = await ask(stand, tools=None, response_format=wanted)
            assert answer.choices[0].message.content == '{"a": 1}'
        await stand.client.completions.create(
            model=BASE, prompt="x", extra_body={"structured_outputs": {"choice": ["a.b", "c"]}}
        )

        grammars = [generate.sampling.grammar for generate in stand.generated]
        assert grammars == [
            None,
            Grammar(kind="json_object"),
            Grammar(kind="json_schema", value=json.dumps(schema, separators=(",", ":"))),
            Grammar(kind="regex", value=r"a\.b|c"),
        ]


def test_the_platform_side_has_no_llguidance() -> None:
    """The engine validates; a gateway does not even load the parser."""
    folder = Path(__file__).parents[3] / "platform"
    for path in folder.rglob("*.py"):
        assert "import llguidance" not in path.read_text()
