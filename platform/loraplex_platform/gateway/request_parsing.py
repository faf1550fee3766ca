"""Request bodies to structs: every field of OpenAI's API is served, or refused by its name.

A field that we do not serve is accepted when it says what happens anyway (`n: 1`, `tools: []`,
null). Messages name the field and what was expected, never what was sent: an echoed prompt would
end in other people's logs, and an echoed 5 MB one would be an answer of 5 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from loraplex_platform.gateway.chat_message import CalledFunction, ChatMessage, check_arguments
from loraplex_platform.gateway.errors import (
    InvalidValueError,
    MalformedJsonError,
    MissingParameterError,
    UnknownParameterError,
    UnsupportedParameterError,
)
from loraplex_platform.gateway.field_errors import MAX_NAME_CHARS, field_error
from loraplex_platform.gateway.openai_schemas import ChatRequest, CompletionRequest, Message

_Rules = Mapping[str, Callable[[Any], bool]]
RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest)


def _one_of(*values: object) -> Callable[[Any], bool]:
    # 1 == True in Python, and a flag is not a count.
    return lambda value: any(type(value) is type(v) and value == v for v in values)


def _is_empty(value: object) -> bool:
    return isinstance(value, list | dict | str) and not value


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _never(_: object) -> bool:
    return False


# Values that change nothing; null is one for every field.
_NEUTRAL_IN_CHAT: Final[_Rules] = {
    "audio": _never,
    "function_call": _one_of("none"),
    "functions": _is_empty,
    "modalities": _one_of(["text"]),
    "moderation": _never,
    "prediction": _never,
    "prompt_cache_key": _is_text,
    "prompt_cache_options": _never,
    "prompt_cache_retention": _one_of("in_memory"),
    "reasoning_effort": _one_of("none"),
    "service_tier": _one_of("auto", "default"),
    "store": _one_of(False),
    "verbosity": _one_of("medium"),
    "web_search_options": _never,
}
_NEUTRAL_IN_COMPLETIONS: Final[_Rules] = {
    "echo": _one_of(False),
    "suffix": _is_empty,
}

_ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def parse_chat(body: bytes) -> ChatRequest:
    """Parse a chat request; raises an `InvalidRequestError` that names the field."""
    request = _parse(body, ChatRequest, _NEUTRAL_IN_CHAT)
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise InvalidValueError(
            "'max_tokens' and 'max_completion_tokens' differ; send one of them.",
            param="max_tokens",
        )
    if request.top_logprobs and not request.logprobs:
        raise InvalidValueError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Parse a completions request, `prompt` included; raises as `parse_chat` does."""
    request = _parse(body, CompletionRequest, _NEUTRAL_IN_COMPLETIONS)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise UnsupportedParameterError(
            "'best_of' is supported only where it equals 'n'; leave it out.", param="best_of"
        )
    return msgspec.structs.replace(request, prompt=_parse_prompt(request.prompt))


def chat_messages(messages: list[Message]) -> list[ChatMessage]:
    """The turns as the template takes them; raises an `InvalidRequestError` naming the field."""
    turns = [_chat_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    _check_results(turns)
    return turns


def _parse(body: bytes, kind: type[RequestT], neutral: _Rules) -> RequestT:
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise MalformedJsonError("The body is not valid JSON.") from None
    if not isinstance(document, dict):
        raise MalformedJsonError("The body must be a JSON object.")
    known = set(kind.__struct_fields__)
    for name, value in document.items():
        if name in known or value is None:
            continue
        if name not in neutral:
            shown = name[:MAX_NAME_CHARS]
            raise UnknownParameterError(f"Unknown parameter: '{shown}'.", param=shown)
        if not neutral[name](value):
            raise UnsupportedParameterError(
                f"'{name}' is not supported yet; leave it out.", param=name
            )
    served = {name: value for name, value in document.items() if name in known}
    try:
        request = msgspec.convert(served, kind)
    except msgspec.ValidationError as error:
        raise field_error(str(error), kind) from None
    options = request.stream_options
    if options is not None:
        if not request.stream:
            raise InvalidValueError(
                "'stream_options' is allowed only with 'stream': true.", param="stream_options"
            )
        if options.include_obfuscation:
            name = "stream_options.include_obfuscation"
            raise UnsupportedParameterError(f"'{name}' is not supported yet.", param=name)
    return request


def _parse_prompt(prompt: object) -> str | list[int]:
    """A string, a token array, or a list with exactly one of either."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise UnsupportedParameterError(
                "'prompt' with more than one prompt is not supported yet; send one request each.",
                param="prompt",
            )
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(id_) is int for id_ in prompt):
        return prompt
    raise InvalidValueError(
        "Invalid value for 'prompt': expected a string or an array of token ids.", param="prompt"
    )


def _chat_message(message: Message, path: str) -> ChatMessage:
    role = _ROLES.get(message.role)
    if role is None:
        if message.role == "function":
            raise UnsupportedParameterError(
                f"'{path}.role': '{message.role}' is not supported yet.", param=f"{path}.role"
            )
        raise InvalidValueError(
            f"Invalid value for '{path}.role': expected one of {', '.join(_ROLES)}.",
            param=f"{path}.role",
        )
    for name in ("function_call", "audio", "refusal", "annotations"):
        if getattr(message, name):
            raise UnsupportedParameterError(
                f"'{path}.{name}' is not supported yet; leave it out.", param=f"{path}.{name}"
            )
    for name, its_role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and role != its_role:
            raise InvalidValueError(
                f"'{path}.{name}' is only for messages with the role '{its_role}'.",
                param=f"{path}.{name}",
            )
    if role == "tool" and not message.tool_call_id:
        name = f"{path}.tool_call_id"
        raise MissingParameterError(f"Missing required parameter: '{name}'.", param=name)
    for j, call in enumerate(message.tool_calls or ()):
        check_arguments(call.function.arguments, f"{path}.tool_calls[{j}].function.arguments")
    calls = tuple(
        CalledFunction(call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
    )
    # A turn of nothing but calls has no content.
    is_silent = bool(calls) and message.content is None
    content = "" if is_silent else _content_text(message, f"{path}.content")
    call_id = message.tool_call_id if role == "tool" else None
    return ChatMessage(role, content, calls, call_id, message.name or None)


def _check_results(turns: list[ChatMessage]) -> None:
    """A result answers a call that was made before it."""
    called: set[str] = set()
    for i, turn in enumerate(turns):
        called.update(call.id for call in turn.calls)
        if turn.call_id is not None and turn.call_id not in called:
            name = f"messages[{i}].tool_call_id"
            raise InvalidValueError(f"'{name}' is no call of a message before it.", param=name)


def _content_text(message: Message, path: str) -> str:
    content = message.content
    if content is None:
        raise MissingParameterError(f"Missing required parameter: '{path}'.", param=path)
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidValueError(f"Invalid value for '{path}': the array is empty.", param=path)
    texts = []
    for i, part in enumerate(content):
        if part.type != "text":
            raise UnsupportedParameterError(
                f"'{path}[{i}]': only parts of type 'text' are supported yet.",
                param=f"{path}[{i}].type",
            )
        if part.text is None:
            name = f"{path}[{i}].text"
            raise MissingParameterError(f"Missing required parameter: '{name}'.", param=name)
        texts.append(part.text)
    return "\n".join(texts)
