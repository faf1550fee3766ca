"""Every field of OpenAI's own client is either served or refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.gateway.errors import UnknownParameterError
from loraplex_platform.gateway.request_parsing import chat_messages, parse_chat, parse_completion
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

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


def test_values_are_never_echoed() -> None:
    secret = "SECRET" * 3000
    for change in (
        {"messages": [{"role": secret, "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": secret}]}]},
        {"temperature": secret},
        {"stop": [secret]},
        {"stream_options": {secret: 1}, "stream": True},
        {"response_format": secret},
    ):
        with pytest.raises(InvalidRequestError) as caught:
            chat_messages(parse_chat(json.dumps(_CHAT | change).encode()).messages)
        assert len(caught.value.message) < 200
        assert secret not in caught.value.message


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
