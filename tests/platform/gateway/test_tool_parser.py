"""Tool calls out of text: every way to cut a text gives the same calls, and what a model may get wrong."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_platform.gateway.tool_formats.call_parser import (
    ArgumentsDelta,
    CallBegun,
    ContentDelta,
)
from loraplex_platform.gateway.tool_formats.hermes import END, START
from loraplex_platform.gateway.tool_formats.hermes import HermesParser as ToolCallParser

from tests.support.cpu_time import least_s

NAMES = ("get_weather", "add", "search-web")


def call(name: str, arguments: str) -> str:
    return f'{START}\n{{"name": "{name}", "arguments": {arguments}}}\n{END}'


def parse(pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]], bool]:
    """Content, calls, and whether the last was cut off; asserts the order of deltas."""
    parser = ToolCallParser(NAMES)
    content, calls = "", []
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    for delta in [*deltas, *parser.finish()]:
        match delta:
            case ContentDelta():
                assert delta.text
                content += delta.text
            case CallBegun():
                assert delta.index == len(calls)
                calls.append((delta.name, ""))
            case ArgumentsDelta():
                assert delta.text
                assert delta.index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
    assert parser.num_calls == len(calls)
    return content, calls, parser.is_cut_off


def whole(text: str) -> tuple[str, list[tuple[str, str]]]:
    """As `parse`, after checking that one character at a time gives the same."""
    result = parse([text])
    assert parse(text) == result
    return result[:2]


# ------------------------------------------------------------------ what is a call


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": "Paris"}',
        "{}",
        '{"a": {"b": [1, {"c": "}"}]}, "d": "{"}',
        r'{"text": "a \"quoted\" \\ backslash \u00e9 }] </tool_call> <tool_call>"}',
        '{"emoji": "🙂 ключ 안녕"}',
        '{ "spaced" :\n [ 1 , 2 ] }',
        "[1, 2]",
        "3.5",
        "true",
        "null",
    ],
)
def test_arguments_are_the_models_own_characters(arguments: str) -> None:
    assert whole(call("add", arguments)) == ("", [("add", arguments)])


def test_several_calls_with_text_around_them() -> None:
    second = call("get_weather", '{"x":1}')
    text = f"Let me look.\n{call('add', '{}')}\n{second}\n\nDone."

    assert whole(text) == (
        "Let me look.\n\n\nDone.",
        [("add", "{}"), ("get_weather", '{"x":1}')],
    )


def test_whitespace_around_calls_is_nobodys_content() -> None:
    assert whole(f"\n\n{call('add', '{}')}\n\n{call('add', '{}')}\n ") == (
        "",
        [("add", "{}"), ("add", "{}")],
    )


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n", "  plain text\n", "a < b", "<tool", "x<tool_cal"]
)
def test_an_answer_without_calls_stays_as_it_is(text: str) -> None:
    assert whole(text) == (text, [])


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "add"}', '{"a": 1}'),
        ('{"arguments": 7 , "name": "add"}', "7"),
        ('{"name": "add", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"arguments": "{\\"a\\": 1}", "name": "add"}', '{"a": 1}'),
        ('{"name": "add"}', "{}"),
        ('{"name": "add", "id": {"arguments": 1}, "arguments": {"a": 2}}', '{"a": 2}'),
        ('{"name": "add", "arguments": {"a": 1}, "arguments": {"b": 2}}', '{"a": 1}'),
        ('{"name": "add", "name": "other", "arguments": {"a": 1}}', '{"a": 1}'),
        ('{"type": "function", "name": "add", "arguments": {"name": "no"}}', '{"name": "no"}'),
        ('{"\\u006eame": "a\\u0064d", "arguments": {}}', "{}"),
        ('{"name": "add", "arguments": ""}', ""),
    ],
)
def test_what_else_models_write(body: str, arguments: str) -> None:
    assert whole(f"{START}{body}{END}") == ("", [("add", arguments)])


def test_half_a_surrogate_pair_in_a_string_is_no_text() -> None:
    content, calls = whole(f'{START}{{"name": "add", "arguments": "\\ud800"}}{END}')

    assert content == ""
    assert calls[0][1].encode()  # it can go out


# ------------------------------------------------------------------ what is not, or not quite


@pytest.mark.parametrize(
    "block",
    [
        f"{START}hello{END}",
        f"{START}{{test1,test2{END}",  # vllm's parsers crashed on this
        f'{START}{{"name": "unknown", "arguments": {{}}}}{END}',
        f'{START}{{"name": 3, "arguments": {{}}}}{END}',
        f'{START}{{"arguments": {{"a": 1}}}}{END}',
        f"{START}{{}}{END}",
        f"{START}[1]{END}",
        f"{START}{END}",
        f'{START}{{"name": "add", "argu',
        f'{START}{{"name"',
        START,
        f"{START}\n{{",
        f'{START}{{"name": "add"]{END}',
        f'{START}{{"name" "add"}}{END}',
        f'{START}{{"arguments": {{"a": 1}} "name": "add"}}{END}',
        f"{START} {START} x",
    ],
)
def test_a_block_that_is_no_call_is_text(block: str) -> None:
    assert whole(block) == (block, [])
    content, calls = whole(f"a{block}")
    assert (content, calls) == (f"a{block}", [])


def test_after_a_block_that_is_no_call_others_are_found() -> None:
    text = f"{START}{START}{call('add', '{}')}"

    assert whole(text) == (START + START, [("add", "{}")])


@pytest.mark.parametrize("length", range(1, 64))
def test_an_answer_cut_off_anywhere_closes_nothing_by_itself(length: int) -> None:
    arguments = '{"city": "Pa}ris", "n": [1, 2]}'
    text = call("get_weather", arguments)
    begun = text.index(arguments) + 1
    content, calls = whole(text[:length])

    if length < begun:
        assert (content, calls) == (text[:length], [])
    else:
        assert content == ""
        assert calls == [("get_weather", arguments[: length - begun + 1])]
        assert parse([text[:length]])[2] == (length < text.index("}\n" + END) + 1)


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        # the end mark is missing
        (f'{START}{{"name": "add", "arguments": {{"a": 1}}}}', "", '{"a": 1}'),
        (f'{START}{{"name": "add", "arguments": {{"a": 1}}}} More.', "More.", '{"a": 1}'),
        # so is a brace
        (f'{START}{{"name": "add", "arguments": {{"a": 1}}{END} More.', " More.", '{"a": 1}'),
        (f'{START}{{"name": "add", "arguments": {{"a": {{"b": 1}}{END}', "", '{"a": {"b": 1}'),
        # other brackets
        (f'{START}{{"name": "add", "arguments": {{"a": 1]}}{END}', "", '{"a": 1]'),
        # an angle bracket where there should be none
        (f'{START}{{"name": "add", "arguments": {{"a": <b}}}}{END}', "", '{"a": <b}'),
        (f'{START}{{"name": "add", "arguments": {{"a": </tool}}}}{END}', "", '{"a": </tool}'),
    ],
)
def test_a_call_that_has_begun_keeps_what_it_got(text: str, content: str, arguments: str) -> None:
    assert whole(text) == (content, [("add", arguments)])


_MANY = 100_000
_LONG = 640_000  # what 8,000 tokens can say


@pytest.mark.parametrize(
    "text",
    [
        " " * _MANY,
        "y" * _MANY,
        "<" * _MANY,
        "<tool_" * (_MANY // 6),
        START * (_MANY // len(START)),
        START + " " * _MANY,
        f'{START}{{"{"k" * _MANY}',
        f'{START}{{"name": "add", "arguments": {{"text": "{"x" * _MANY}"}}}}{END}',
        f'{START}{{"arguments": {{"text": "{"x" * _MANY}"}}, "name": "add"}}{END}',
        f'{START}{{"name": "add", "arguments": {"7" * _MANY}',
        f'{START}{{"name": "add", "arguments": {{{" " * _MANY}',
        f'{START}{{"name": "add", "arguments": {{}}}}{" " * _MANY}',
        f'{START}{{"name": "add", "arguments": ["' + "\\n" * (_MANY // 2),
        f'{START}{{"name": "add", "arguments": {"[" * _MANY}',
        f'{START}{{"name": "add", "arguments": [{"</tool_call" * (_MANY // 11)}',
        call("add", "{}") * (_MANY // 60),
    ],
    ids=lambda text: f"{text[:40]}...{text[-12:]}",
)
@pytest.mark.parametrize("size", [80, _MANY])
def test_a_long_answer_takes_time_in_proportion(text: str, size: int) -> None:
    """The worst there is, character by character."""

    def parse_it() -> None:
        parse(text[start : start + size] for start in range(0, len(text), size))

    assert least_s(parse_it, enough_s=2.0) < 2.0


@pytest.mark.parametrize("size", [80, _LONG])
def test_long_runs_of_one_character_cost_next_to_nothing(size: int) -> None:
    in_string = f'{START}{{"name": "add", "arguments": ["'

    def parse_it(text: str) -> None:
        parse(text[start : start + size] for start in range(0, len(text), size))

    for text in (" " * _LONG, "y" * _LONG, in_string + " " * _LONG, in_string + r"\n" * _MANY):
        assert least_s(partial(parse_it, text), enough_s=0.3) < 0.3


def test_a_call_is_over_with_its_object() -> None:
    first, second = call("add", '{"a": "}"}'), call("get_weather", "[1]")
    text = f"Look: {first}\n{START}no call{END} {second} more"
    ends = [text.index("\n" + END), text.rindex("\n" + END)]
    for pieces in ([text], list(text), [text[:9], text[9:]]):
        parser = ToolCallParser(NAMES)
        for piece in pieces:
            parser.push(piece)
        assert parser.call_ends == ends


def test_a_call_whose_brace_is_missing_is_over_with_its_mark() -> None:
    text = f'{START}{{"name": "add", "arguments": {{"a": 1}}{END} more'
    for pieces in ([text], list(text)):
        parser = ToolCallParser(NAMES)
        for piece in pieces:
            parser.push(piece)
        assert parser.call_ends == [text.index(" more")]


# ------------------------------------------------------------------ every way to cut it

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
_objects = st.dictionaries(st.text(max_size=6), _json, max_size=3)
_good = st.builds(
    lambda name, value, ascii_only, indent: call(
        name, json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    ),
    st.sampled_from(NAMES),
    _objects,
    st.booleans(),
    st.sampled_from([None, 1]),
)
_fragments = st.sampled_from(
    [
        START,
        END,
        "<tool_",
        "</tool_call",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ",",
        ":",
        '"name"',
        '"add"',
        '"arguments"',
        '"parameters"',
        ": ",
        "1",
        " ",
        "\n",
        "<",
        "é",
        "🙂",
        '{"name": "add", "arguments": ',
    ]
)
_messy = st.lists(_fragments, max_size=24).map("".join)
_texts = st.lists(_good | _messy | st.text(max_size=12), max_size=4).map("".join)


def cut(text: str, data: st.DataObject) -> list[str]:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    bounds = [0, *places, len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@settings(max_examples=200, deadline=None)
@given(text=_texts, data=st.data())
def test_streamed_is_unstreamed_however_it_is_cut(text: str, data: st.DataObject) -> None:
    assert parse(cut(text, data)) == parse([text]) == parse(text)


@settings(max_examples=80, deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(NAMES), _objects, st.booleans()), min_size=1, max_size=4
    ),
    data=st.data(),
)
def test_what_was_called_is_what_comes_out(
    calls: list[tuple[str, dict[str, object], bool]], data: st.DataObject
) -> None:
    written = [
        (name, json.dumps(value, ensure_ascii=ascii_only)) for name, value, ascii_only in calls
    ]
    text = "\n".join(call(name, arguments) for name, arguments in written)

    assert parse(cut(text, data)) == ("", written, False)


@settings(max_examples=120, deadline=None)
@given(text=_messy)
def test_nothing_of_a_text_without_calls_is_lost(text: str) -> None:
    content, calls, _ = parse([text])

    if not calls:
        assert content == text
