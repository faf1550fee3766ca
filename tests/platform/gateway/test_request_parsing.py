"""Every field of OpenAI's own client is either served or refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.gateway.chat_message import MAX_ARGUMENTS_DEPTH
from loraplex_platform.gateway.errors import UnknownParameterError
from loraplex_platform.gateway.openai_schemas import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    ChatRequest,
    CompletionRequest,
)
from loraplex_platform.gateway.request_parsing import chat_messages, parse_chat, parse_completion
from loraplex_platform.gateway.templates import ChatTemplate
from msgspec import inspect
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from tests.platform.gateway import tiny_model

_CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
_COMPLETION: dict[str, Any] = {"model": "m", "prompt": "x"}

_CHAT_FIELDS = sorted(
    {
        *chat_create_params.CompletionCreateParamsStreaming.__annotations__,
        *chat_create_params.CompletionCreateParamsBase.__annotations__,
    }
)
_COMPLETION_FIELDS = sorted(
    {
        *completion_create_params.CompletionCreateParamsStreaming.__annotations__,
        *completion_create_params.CompletionCreateParamsBase.__annotations__,
    }
)


_NEVER_RIGHT = [["never right"]]


@pytest.mark.parametrize("name", _CHAT_FIELDS)
def test_every_chat_field_of_the_official_client_is_known(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat(json.dumps(_CHAT | {name: _NEVER_RIGHT}).encode())

    _check_named(caught.value, name)


@pytest.mark.parametrize("name", _COMPLETION_FIELDS)
def test_every_completions_field_of_the_official_client_is_known(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_completion(json.dumps(_COMPLETION | {name: [_NEVER_RIGHT]}).encode())

    _check_named(caught.value, name)


def _check_named(error: InvalidRequestError, name: str) -> None:
    assert not isinstance(error, UnknownParameterError)
    assert error.param is not None
    assert error.param.startswith(name)
    assert name in error.message


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
_FIELDS = st.dictionaries(
    st.sampled_from([*_CHAT_FIELDS, "prompt", "top_k", "ignore_eos"]) | st.text(max_size=8),
    _JSON,
    max_size=4,
)


def _refusal(fields: dict[str, Any]) -> InvalidRequestError | None:
    try:
        request = parse_chat(msgspec.json.encode(_CHAT | fields))
        chat_messages(request.messages)
        parse_completion(msgspec.json.encode(_COMPLETION | fields))
    except InvalidRequestError as error:
        return error
    return None


@settings(max_examples=120, deadline=None)
@given(_FIELDS)
def test_any_json_object_is_parsed_or_refused_shortly(fields: dict[str, Any]) -> None:
    refusal = _refusal(fields)

    assert refusal is None or (refusal.status == 400 and len(refusal.message) < 500)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_refused_as_a_400(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_chat(body)


def _called(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call, call]}
    return {"messages": [{"role": "user", "content": "x"}, message]}


_SECRET = "SECRET" * 3000
_EVIL = 'SECRET" - at `$.evil' + "A" * 100_000


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": [{"role": _SECRET, "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": _SECRET}]}]},
            "messages[0].content[0].type",
        ),
        ({"temperature": _SECRET}, "temperature"),
        ({"stop": [_SECRET]}, "stop[0]"),
        ({"logit_bias": {_SECRET: "x"}}, "logit_bias[...]"),
        ({"response_format": _SECRET}, "response_format"),
        ({"response_format": {"type": _SECRET}}, "response_format.type"),
        ({"response_format": {"type": _EVIL}}, "response_format.type"),
        ({"tool_choice": _EVIL}, "tool_choice"),
        ({"tool_choice": {"type": _EVIL, "function": {"name": "f"}}}, "tool_choice.type"),
        ({"tools": [{"type": _EVIL, "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": _EVIL}}]}, "tools[0].function.name"),
        ({"structured_outputs": {"regex": 5, "x": _EVIL}}, "structured_outputs.regex"),
        (_called(f'{{"{_EVIL[:6]}": "\\ud800"}}'), "messages[1].tool_calls[0].function.arguments"),
    ],
)
def test_values_are_never_echoed(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat_messages(parse_chat(json.dumps(_CHAT | change).encode()).messages)

    assert len(caught.value.message) < 250
    assert "SECRET" not in caught.value.message
    assert "evil" not in caught.value.message
    assert caught.value.param == param


def test_of_names_that_we_do_not_know_only_the_beginning_is_shown() -> None:
    for change in ({_EVIL: 1}, {"stream_options": {_EVIL: 1}, "stream": True}):
        with pytest.raises(UnknownParameterError) as caught:
            parse_chat(json.dumps(_CHAT | change).encode())
        assert len(caught.value.message) < 150
        assert len(caught.value.param or "") < 100


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"response_format": {"type": "x"}}, "expected one of json_object, json_schema, text."),
        ({"tool_choice": "x"}, "expected one of auto, none, required."),
        ({"tools": [{"type": "x", "function": {"name": "f"}}]}, "expected one of function."),
    ],
)
def test_what_is_allowed_is_told_instead_of_what_was_sent(
    change: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(expected)):
        parse_chat(json.dumps(_CHAT | change).encode())


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": "\\ud800"}',
        '{"\\udc00": 1}',
        '[{"a": ["\\ud83d"]}]',
        '"\\udfff"',
        *(f'{{"a": {"[" * n}{"]" * n}}}' for n in (MAX_ARGUMENTS_DEPTH, 600, 50_000)),
        '{"a":' * 600 + "1" + "}" * 600,
        "[" * 100_000,
    ],
)
def test_call_arguments_that_no_template_can_write_are_refused_by_name(arguments: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat_messages(parse_chat(json.dumps(_CHAT | _called(arguments)).encode()).messages)

    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "no JSON",
        '{"a": "\\ud83d\\ude42", "b": "🙂"}',
        '{"a": 1e999, "b": NaN}',
        f'{{"a": {"9" * 5000}}}',
        f"{'[' * MAX_ARGUMENTS_DEPTH}{']' * MAX_ARGUMENTS_DEPTH}",
    ],
)
def test_all_other_arguments_are_rendered(arguments: str) -> None:
    messages = chat_messages(parse_chat(json.dumps(_CHAT | _called(arguments)).encode()).messages)
    for source in (tiny_model.CHATML_WITH_TOOLS, tiny_model.CHATML):
        assert ChatTemplate(source, {}, []).render(messages).encode()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"allowed_token_ids": [0] * (MAX_ALLOWED_TOKEN_IDS + 1)}, "allowed_token_ids"),
        ({"messages": _CHAT["messages"] * (MAX_MESSAGES + 1)}, "messages"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": ""}] * (MAX_CONTENT_PARTS + 1),
                    }
                ]
            },
            "messages[0].content",
        ),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "x" * 257}]},
            "messages[0].tool_call_id",
        ),
    ],
)
def test_every_list_is_bounded(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat(json.dumps(_CHAT | change).encode())

    assert caught.value.param == param


def test_no_list_of_a_request_is_without_bound() -> None:
    """Walks the schemas: whoever adds a list gives it a maximum."""
    unbounded: set[str] = set()

    def walk(place: inspect.Type, path: str, has_maximum: bool = False) -> None:
        match place:
            case inspect.Metadata():
                walk(place.type, path, has_maximum)
            case inspect.UnionType():
                for one in place.types:
                    walk(one, path)
            case inspect.StructType():
                for field in place.fields:
                    walk(field.type, f"{path}.{field.encode_name}")
            case inspect.ListType():
                if place.max_length is None:
                    unbounded.add(path)
                walk(place.item_type, path)
            case _:
                pass

    walk(inspect.type_info(ChatRequest), "")
    walk(inspect.type_info(CompletionRequest), "")

    assert unbounded == {".messages.annotations"}  # refused unless empty


def test_text_parts_are_joined_by_lines_and_developer_is_system() -> None:
    body = {
        "model": "m",
        "messages": [
            {"role": "developer", "content": "d"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
        ],
    }

    messages = chat_messages(parse_chat(json.dumps(body).encode()).messages)

    assert [(m.role, m.content) for m in messages] == [("system", "d"), ("user", "a\nb")]
