"""Formats of tool calls: which one a model has, and that each is read, forced and written the same way."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_engine.protocol import Grammar
from loraplex_engine.structured.matcher import LlMatcher
from loraplex_engine.structured.tokenizer import native_matcher, open_tokenizer
from loraplex_platform.gateway.chat_message import CalledFunction, ChatMessage
from loraplex_platform.gateway.detokenizer import Detokenizer
from loraplex_platform.gateway.templates import ChatTemplate
from loraplex_platform.gateway.tokenization import BaseTokenizer
from loraplex_platform.gateway.tool_answers import ChoiceCalls
from loraplex_platform.gateway.tool_formats.call_parser import (
    ArgumentsDelta,
    CallBegun,
    CallParser,
    ContentDelta,
)
from loraplex_platform.gateway.tool_formats.choice import choose_format
from loraplex_platform.gateway.tool_formats.hermes import END, START, Hermes
from loraplex_platform.gateway.tool_formats.llama import MARK as LLAMA_MARK
from loraplex_platform.gateway.tool_formats.llama import Llama
from loraplex_platform.gateway.tool_formats.mistral import MARK as MISTRAL_MARK
from loraplex_platform.gateway.tool_formats.mistral import Mistral
from loraplex_platform.gateway.tool_formats.tool_format import ToolFormat
from loraplex_platform.gateway.tools import ToolPlan, plan_tools
from loraplex_platform.settings import GatewaySettings, ToolFormatName
from pydantic import ValidationError

from tests.platform.gateway import tiny_model
from tests.platform.gateway.test_tools import CLOCK, WEATHER, named, strict, tools
from tests.support.cpu_time import least_s
from tests.support.grammars import VOCAB_SIZE, write_tokenizer

FORMATS = [Hermes(), Llama(), Mistral()]
NAMES = ("get_weather", "now", "add")
SPECIAL = "<file_sep>"  # a special token of the tests' tokenizer
formats = pytest.mark.parametrize("kind", FORMATS, ids=[one.name for one in FORMATS])


def read(parser: CallParser, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls; asserts the order of deltas."""
    content, calls = "", []
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    for delta in [*deltas, *parser.finish()]:
        match delta:
            case ContentDelta():
                content += delta.text
            case CallBegun():
                assert delta.index == len(calls)
                calls.append((delta.name, ""))
            case ArgumentsDelta():
                assert delta.index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
    return content, calls


def whole(kind: ToolFormat, text: str, **options: bool) -> tuple[str, list[tuple[str, str]]]:
    """As `read`, after checking that one character at a time gives the same."""
    result = read(kind.parser(NAMES, **options), [text])
    assert read(kind.parser(NAMES, **options), text) == result
    return result


# ------------------------------------------------------------------ which one

_LLAMA_TEMPLATE = (
    "{% if tools is not none and tools is defined %}"
    'Respond in the format {{ \'{"name": function name, "parameters": dictionary}\' }}.'
    "{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}"
    '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '}' }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
_MISTRAL_TEMPLATE = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.tool_calls is defined %}[TOOL_CALLS]["
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('9') }}{% endif %}"
    "{{ c.function | tojson }} {{ c.id }}{% endfor %}]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }} {{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
_OTHER_TEMPLATE = "{% if tools %}{{ tools }}{% endif %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("template", "wanted", "name", "is_native"),
    [
        (tiny_model.CHATML, "auto", "hermes", False),
        (tiny_model.CHATML_WITH_TOOLS, "auto", "hermes", True),
        (_LLAMA_TEMPLATE, "auto", "llama", True),
        (_MISTRAL_TEMPLATE, "auto", "mistral", True),
        # The newer form of Mistral's calls is not read, so the model is told of ours.
        (_MISTRAL_TEMPLATE + "[ARGS]", "auto", "hermes", False),
        (_OTHER_TEMPLATE, "auto", "hermes", False),
        # Who names a format is believed, unless the template is known to write another.
        (_OTHER_TEMPLATE, "mistral", "mistral", True),
        (_LLAMA_TEMPLATE, "hermes", "hermes", False),
        (tiny_model.CHATML, "llama", "llama", False),
    ],
)
def test_the_template_says_which_format_unless_a_setting_does(
    template: str, wanted: ToolFormatName, name: str, is_native: bool
) -> None:
    rendered = ChatTemplate(template, {}, [], tool_format=wanted)

    assert rendered.tool_format.name == name
    takes_tools = "tools" in template
    assert choose_format(template, takes_tools=takes_tools, wanted=wanted)[1] == is_native
    told = rendered.render([ChatMessage("user", "Hi")], [CLOCK])
    assert ("You can call functions" in told) == (not is_native)
    if not is_native:
        assert rendered.tool_format.write([("function_name", '{"key": "value"}')]) in told


def test_the_setting_takes_only_formats_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    required = {
        "model_dir": "/m",
        "database_url": "postgresql://x",
        "key_pepper": "0123456789abcdef" * 2,
    }
    required["salt_key"] = required["key_pepper"]
    assert {"auto", *(one.name for one in FORMATS)} == set(get_args(ToolFormatName))
    monkeypatch.setenv("LORAPLEX_TOOL_FORMAT", "llama")
    assert GatewaySettings.model_validate(required).tool_format == "llama"
    monkeypatch.setenv("LORAPLEX_TOOL_FORMAT", "pythonic")

    with pytest.raises(ValidationError, match="tool_format"):
        GatewaySettings()


_TWO = ChatMessage(
    "assistant",
    "",
    (CalledFunction("call_1", "now", "{}"), CalledFunction("call_2", "add", '{"a": 1}')),
)
_RESULTS = [ChatMessage("tool", "3", call_id="call_2"), ChatMessage("tool", "12", call_id="call_1")]


def test_llama_is_shown_one_call_a_turn_with_its_result() -> None:
    template = ChatTemplate(_LLAMA_TEMPLATE, {}, [])

    text = template.render([ChatMessage("user", "Hi"), _TWO, *_RESULTS, ChatMessage("user", "?")])

    assert text.endswith(
        '<user>Hi{"name": "now", "parameters": {}}<tool>12'
        '{"name": "add", "parameters": {"a": 1}}<tool>3<user>?'
    )
    many = [ChatMessage("user", "Hi"), _TWO, *_RESULTS] * 20_000
    assert len(Llama().arrange(many)) == 5 * 20_000
    assert least_s(lambda: Llama().arrange(many), enough_s=2.0) < 2.0
    assert Llama().arrange([]) == []
    assert [one.role for one in Llama().arrange([_TWO])] == ["assistant"] * 2
    stray = ChatMessage("tool", "lost", call_id="other")
    assert "<tool>lost" in template.render([_TWO, stray, *_RESULTS])


def test_mistral_is_shown_ids_that_it_takes() -> None:
    template = ChatTemplate(_MISTRAL_TEMPLATE, {}, [])

    text = template.render([_TWO, *_RESULTS])

    called, *results = text.split("[TOOL_RESULTS]")
    ids = [part.split()[0].rstrip("]") for part in called.split("} ")[1:]]
    ids = [id_[:9] for id_ in ids]
    assert len(set(ids)) == 2
    assert [result.split()[0] for result in results] == ids[::-1]  # as the results came
    kept = ChatMessage("assistant", "", (CalledFunction("abcDEF123", "now", "{}"),))
    assert "abcDEF123" in template.render([kept])


# ------------------------------------------------------------------ reading


@formats
@pytest.mark.parametrize(
    "arguments",
    [
        "{}",
        '{"city": "Paris", "n": [1, {"c": "}"}]}',
        r'{"text": "a \"q\" \\ é }] </tool_call> <tool_call> <|python_tag|> [TOOL_CALLS] ; {"}',
        '{"text": "{\\"name\\": \\"now\\", \\"parameters\\": {}}; [TOOL_CALLS][{"}',
        "[1, 2]",
        "3.5",
    ],
)
def test_what_a_format_writes_it_reads(kind: ToolFormat, arguments: str) -> None:
    """Marks, separators and whole calls within strings are nobody's but the arguments'."""
    calls = [("get_weather", arguments), ("now", "{}"), ("add", arguments)]

    assert whole(kind, kind.write(calls)) == ("", calls)
    assert whole(kind, f"\n {kind.write(calls[:1])} \n") == ("", calls[:1])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "now", "parameters": {}}', "", [("now", "{}")]),
        ('{"type": "function", "name": "now", "parameters": {"a": 1}}', "", [("now", '{"a": 1}')]),
        (f'{LLAMA_MARK}{{"name": "now", "arguments": {{}}}}', "", [("now", "{}")]),
        (f'Well. {LLAMA_MARK} {{"name": "now"}}', "Well. ", [("now", "{}")]),
        ('{"name": "now"}; {"name": "add", "parameters": {"a": 1}}', "", None),
        ('{"name": "now"}\n{"name": "add", "parameters": {"a": 1}}', "", None),
        (f'{{"name": "now"}} {LLAMA_MARK}{{"name": "add", "parameters": {{"a": 1}}}}', "", None),
        # JSON that calls nothing on offer, and an object amid text, are text
        ('{"answer": 42}', '{"answer": 42}', []),
        ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
        ('So: {"name": "now"}', 'So: {"name": "now"}', []),
        ("{", "{", []),
        ('{"name": "now", "para', '{"name": "now", "para', []),
        (f"{LLAMA_MARK}search.call(query='x')", f"{LLAMA_MARK}search.call(query='x')", []),
        # what follows calls
        ('{"name": "now"} Done.', " Done.", [("now", "{}")]),
        ('{"name": "now"}; done', "; done", [("now", "{}")]),
        ('{"name": "now"};', "", [("now", "{}")]),
        ('{"name": "now"}; {"x": 1}', '; {"x": 1}', [("now", "{}")]),
        ('{"name": "now", "parameters": {"a": 1} oops', "oops", [("now", '{"a": 1}')]),
        ('{"name": "now", "parameters": {"a": "cut o', "", [("now", '{"a": "cut o')]),
        ("<|python", "<|python", []),
        (";x", ";x", []),
    ],
)
def test_llama(text: str, content: str, calls: list[tuple[str, str]] | None) -> None:
    expected = [("now", "{}"), ("add", '{"a": 1}')] if calls is None else calls
    assert whole(Llama(), text) == (content, expected)


def test_where_objects_are_answers_llama_calls_need_the_mark() -> None:
    call = '{"name": "now", "parameters": {}}'

    assert whole(Llama(), call, is_marked=True) == (call, [])
    assert whole(Llama(), f"{LLAMA_MARK}{call}; {call}", is_marked=True) == (
        "",
        [("now", "{}")] * 2,
    )


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f'{MISTRAL_MARK} [{{"name": "now", "arguments": {{}}}}]', "", [("now", "{}")]),
        (f'{MISTRAL_MARK}[{{"name": "now"}}, {{"name": "add", "arguments": [1]}}]', "", None),
        (
            f'{MISTRAL_MARK}[{{"name": "now"}}]{MISTRAL_MARK}[{{"name":"add","arguments":[1]}}]',
            "",
            None,
        ),
        (f'Hm. {MISTRAL_MARK}[{{"name": "now", "id": "x"}}] Bye', "Hm.  Bye", [("now", "{}")]),
        (f'{MISTRAL_MARK}{{"name": "now"}}', "", [("now", "{}")]),
        (f'{MISTRAL_MARK}[{{"name": "now"}}, ', "", [("now", "{}")]),
        (f'{MISTRAL_MARK}[{{"name": "now"}}, nothing', ",nothing", [("now", "{}")]),
        (f'{MISTRAL_MARK}[{{"name": "now"}}, {{"x": 1}}] y', ', {"x": 1}] y', [("now", "{}")]),
        (f'{MISTRAL_MARK}[{{"name": "now", "arguments": {{"a": 1}}', "", [("now", '{"a": 1}')]),
        *(
            (text, text, [])
            for text in (
                MISTRAL_MARK,
                f"{MISTRAL_MARK} [",
                f"{MISTRAL_MARK}[]",
                f"{MISTRAL_MARK}now[ARGS]{{}}",
                f'{MISTRAL_MARK}[{{"name": "other"}}]',
                '[{"name": "now"}]',
                "[TOOL_CALL",
            )
        ),
    ],
)
def test_mistral(text: str, content: str, calls: list[tuple[str, str]] | None) -> None:
    expected = [("now", "{}"), ("add", "[1]")] if calls is None else calls
    found, found_calls = whole(Mistral(), text)
    assert found_calls == expected
    assert found.replace(", ", ",") == content.replace(", ", ",")  # spaces are nobody's there


@formats
def test_a_single_call_s_end_is_known(kind: ToolFormat) -> None:
    text = "" if kind.name == "llama" else "Look: "
    text += kind.write([("add", '{"a": "}"}'), ("now", "{}")])
    brace = text.index('"}"}') + len('"}"}}') - 1
    for pieces in ([text], list(text), [text[:9], text[9:]]):
        parser = kind.parser(NAMES)
        for piece in pieces:
            parser.push(piece)
        assert parser.call_ends[0] == brace + 1
        assert len(parser.call_ends) == 2


# ------------------------------------------------------------------ every way to cut it

_fragments = st.sampled_from(
    [
        *(START, END, LLAMA_MARK, MISTRAL_MARK, "<", "<|py", "[TOOL"),
        *("[", "]", "{", "}", '"', "\\", ",", ":", ";", "; ", " ", ": ", "1", "\n", "é", "🙂"),
        *('"name"', '"now"', '"parameters"', '"arguments"', ", {"),
        *('{"name": "now", "parameters": ', '{"name": "now"}'),
    ]
)
_messy = st.lists(_fragments, max_size=24).map("".join)
_objects = st.dictionaries(
    st.text(max_size=6),
    st.none() | st.integers() | st.text(max_size=8) | st.lists(st.text(max_size=4), max_size=2),
    max_size=3,
)
_calls = st.lists(
    st.tuples(st.sampled_from(NAMES), _objects, st.booleans()), min_size=1, max_size=4
)


def cut(text: str, data: st.DataObject) -> list[str]:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


@formats
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_streamed_is_unstreamed_however_it_is_cut(kind: ToolFormat, data: st.DataObject) -> None:
    good = data.draw(_calls.map(as_written).map(kind.write))
    text = data.draw(_messy) + data.draw(st.sampled_from(["", good])) + data.draw(_messy)
    is_marked = data.draw(st.booleans())

    def reading(pieces: Iterable[str]) -> Any:
        return read(kind.parser(NAMES, is_marked=is_marked), pieces)

    content, calls = reading([text])
    assert reading(cut(text, data)) == reading(text) == (content, calls)
    # Nothing is invented, and of a text without calls nothing is lost.
    assert is_within(content, text)
    for _, arguments in calls:
        assert arguments == "{}" or arguments in text or '"' in text
    if not calls:
        assert content == text


@formats
@settings(max_examples=40, deadline=None)
@given(calls=_calls, data=st.data())
def test_what_was_called_is_what_comes_out(
    kind: ToolFormat, calls: list[tuple[str, dict[str, object], bool]], data: st.DataObject
) -> None:
    written = as_written(calls)

    assert read(kind.parser(NAMES), cut(kind.write(written), data)) == ("", written)


def as_written(calls: Sequence[tuple[str, dict[str, object], bool]]) -> list[tuple[str, str]]:
    return [(name, json.dumps(value, ensure_ascii=plain)) for name, value, plain in calls]


def is_within(part: str, text: str) -> bool:
    """Whether `part` is `text` with some left out."""
    left = iter(text)
    return all(character in left for character in part)


_MANY = 40_000


@formats
@pytest.mark.parametrize("size", [80, _MANY])
@pytest.mark.parametrize(
    "unit",
    [
        *(" ", "<", "[", "{", ";", "[TOOL_", LLAMA_MARK, MISTRAL_MARK),
        *('{"name": "now"};', '[TOOL_CALLS][{"name": "now"},'),
    ],
)
def test_a_long_answer_takes_time_in_proportion(kind: ToolFormat, unit: str, size: int) -> None:
    text = kind.write([("now", "{}")]) + unit * (_MANY // len(unit))

    def read_it() -> None:
        read(kind.parser(NAMES), (text[i : i + size] for i in range(0, len(text), size)))

    assert least_s(read_it, enough_s=2.0) < 2.0


# ------------------------------------------------------------------ forcing


@pytest.fixture(scope="module")
def native_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def special(kind: ToolFormat) -> ToolFormat:
    """The same format for a model in which its first mark is a token without text."""
    return type(kind)({kind.marks[0]: tiny_model.SPECIAL_TOKENS.index(SPECIAL)})


def say(ids: Sequence[int], kind: ToolFormat) -> str:
    """Tokens as the gateway shows them to the parser; the special one is the format's first mark."""
    text = Detokenizer(tiny_model.base_tokenizer().token_bytes, kind.shown_ids)
    return "".join(text.push(id_) for id_ in ids).replace(SPECIAL, kind.marks[0])


def written_by(tokenizer: Any, plan: ToolPlan, seed: int, most: int = 1500) -> str:
    """Random tokens that the grammar allows, until it is complete or an end token came."""
    assert plan.grammar is not None
    matcher = LlMatcher(native_matcher(tokenizer, plan.grammar), VOCAB_SIZE)
    choice, ids = random.Random(seed), []
    while not matcher.is_complete and len(ids) < most:
        bits = np.unpackbits(matcher.masks_for()[0].view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        ends = [id_ for id_ in allowed if id_ in (0, 2)]
        ids.append(ends[0] if ends and choice.random() < 0.5 else choice.choice(allowed))
        matcher.advance(ids[-1])
    return say([id_ for id_ in ids if id_ not in (0, 2)], plan.format)


both = pytest.mark.parametrize("is_special", [False, True], ids=["text", "token"])


@formats
@both
@pytest.mark.parametrize("how", ["required", "named", "single"])
def test_what_is_forced_is_always_calls_with_valid_arguments(
    kind: ToolFormat, is_special: bool, how: str, native_tokenizer: Any
) -> None:
    kind = special(kind) if is_special else kind
    choice: Any = named("get_weather") if how == "named" else "required"
    plan = plan_tools(tools(WEATHER, CLOCK), choice, how != "single", None, kind)
    assert plan is not None

    for seed in range(4):
        message = ChoiceCalls(plan.parser(), "k").whole(written_by(native_tokenizer, plan, seed))

        assert message.content is None
        assert isinstance(message.tool_calls, list)
        assert len(message.tool_calls) == 1 if how != "required" else message.tool_calls
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            if call.function.name == "now":
                assert arguments == {}
            else:
                jsonschema.validate(arguments, WEATHER["function"]["parameters"])


@formats
@both
def test_auto_with_a_format_is_calls_or_the_format_even_if_it_looks_like_a_call(
    kind: ToolFormat, is_special: bool, native_tokenizer: Any
) -> None:
    kind = special(kind) if is_special else kind
    wanted = {
        "type": "object",
        "properties": {"name": {"const": "now"}, "parameters": {"const": {}}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    output = Grammar(kind="json_schema", value=json.dumps(wanted))
    plan = plan_tools(tools(CLOCK), "auto", None, output, kind)
    assert plan is not None

    seen = set()
    for seed in range(16):
        message = ChoiceCalls(plan.parser(), "k").whole(written_by(native_tokenizer, plan, seed))
        seen.add(message.content is None)
        if message.content is not None:
            jsonschema.validate(json.loads(message.content), wanted)

    assert seen == {True, False}


@formats
@both
def test_strict_tools_are_held_to_their_schema_amid_free_text(
    kind: ToolFormat, is_special: bool, native_tokenizer: Any
) -> None:
    kind = special(kind) if is_special else kind
    plan = plan_tools(tools(strict(WEATHER)), "auto", None, None, kind)
    assert plan is not None
    assert plan.grammar is not None
    matcher = LlMatcher(native_matcher(native_tokenizer, plan.grammar), VOCAB_SIZE)

    def is_allowed(text: str) -> bool:
        ids: list[int] = []
        for number, piece in enumerate(text.split(kind.marks[0])):
            if number:
                ids += (
                    [tiny_model.SPECIAL_TOKENS.index(SPECIAL)]
                    if is_special
                    else tiny_model.ids_of(kind.marks[0])
                )
            ids += tiny_model.ids_of(piece)
        return matcher.fork().validate_drafts(ids) == len(ids)

    good = kind.write([("get_weather", '{"city": "Rome"}')])
    assert is_allowed("Any text, with < and > and [braces].")
    assert is_allowed(good)
    if kind.name == "llama":
        good = LLAMA_MARK + good
    assert is_allowed("Look: " + good)
    assert not is_allowed("Look: " + good.replace("Rome", "far too long a city"))
    assert not is_allowed(good.replace("get_weather", "other"))
    assert not is_allowed(f"Look: {kind.marks[0]}no json")


def test_a_mark_that_is_a_special_token_is_seen_by_the_parser_alone() -> None:
    texts = tiny_model.texts(_MISTRAL_TEMPLATE)
    document = json.loads(texts.tokenizer_json.replace(SPECIAL, MISTRAL_MARK))
    tokenizer = BaseTokenizer(
        type(texts)(
            tokenizer_json=json.dumps(document),
            tokenizer_config=texts.tokenizer_config,
            config=texts.config,
            chat_template=_MISTRAL_TEMPLATE,
        )
    )
    mark = tiny_model.SPECIAL_TOKENS.index(SPECIAL)
    plan = plan_tools(tools(CLOCK), "required", None, None, tokenizer.tool_format)
    assert plan is not None
    assert plan.grammar is not None

    assert tokenizer.tool_format.name == "mistral"
    assert tokenizer.tool_format.shown_ids == {mark}
    assert f"<[{mark}]>" in plan.grammar.value
    shown = Detokenizer(tokenizer.token_bytes, tokenizer.tool_format.shown_ids)
    assert shown.push(mark) == MISTRAL_MARK
    assert Detokenizer(tokenizer.token_bytes).push(mark) == ""
