"""`response_format` and `structured_outputs` to the grammar that the engine follows.

Two names for one thing, because there are two habits: `response_format` is OpenAI's (chat only), and
`structured_outputs` is vLLM's current name for what OpenAI lacks: a regular expression, a list of
choices, a grammar. A request has one of them.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec
from loraplex_engine.protocol import MAX_GRAMMAR_CHARS, Grammar

from loraplex_platform.gateway.errors import InvalidValueError, MissingParameterError
from loraplex_platform.gateway.schema_check import MAX_SCHEMA_BYTES, check_schema, followable
from loraplex_platform.gateway.schema_patterns import MAX_REGEX_CHARS
from loraplex_platform.gateway.structured_schemas import ResponseFormat, StructuredOutputs

_NO_OBJECT: Final = ("json_object", False)
_JSON_OBJECT: Final = Grammar(kind="json_object")


def output_grammar(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> Grammar | None:
    """The grammar that they ask for; None: free text.

    Raises:
        InvalidRequestError: names the field and what is wrong with it.
    """
    of_format = None if response_format is None else _of_format(response_format)
    of_outputs = None if structured_outputs is None else _of_outputs(structured_outputs)
    if of_format is not None and of_outputs is not None:
        raise InvalidValueError(
            "'response_format' and 'structured_outputs' both say what the answer must be; send one.",
            param="structured_outputs",
        )
    return of_format or of_outputs


def _of_format(response_format: ResponseFormat) -> Grammar | None:
    if response_format.type == "json_schema":
        if response_format.json_schema is None:
            name = "response_format.json_schema"
            raise MissingParameterError(f"Missing required parameter: '{name}'.", param=name)
        schema = response_format.json_schema.schema
        if schema is None:  # as OpenAI's API: any object
            return _JSON_OBJECT
        return schema_grammar(schema, "response_format.json_schema.schema")
    if response_format.json_schema is not None:
        raise InvalidValueError(
            "'response_format.json_schema' needs 'response_format.type': 'json_schema'.",
            param="response_format.json_schema",
        )
    return _JSON_OBJECT if response_format.type == "json_object" else None


def _of_outputs(outputs: StructuredOutputs) -> Grammar:
    name = "structured_outputs"
    given = [
        field
        for field in outputs.__struct_fields__
        if getattr(outputs, field) is not None and (field, getattr(outputs, field)) != _NO_OBJECT
    ]
    if len(given) != 1:
        raise InvalidValueError(
            f"'{name}' must have exactly one of json, json_object, regex, choice and grammar.",
            param=name,
        )
    path = f"{name}.{given[0]}"
    if outputs.regex is not None:
        if len(outputs.regex) > MAX_REGEX_CHARS:
            raise _too_long(path, MAX_REGEX_CHARS)
        return Grammar(kind="regex", value=outputs.regex)
    if outputs.choice is not None:
        return _of_choice(outputs.choice, path)
    if outputs.grammar is not None:
        if len(outputs.grammar) > MAX_GRAMMAR_CHARS:
            raise _too_long(path, MAX_GRAMMAR_CHARS)
        return Grammar(kind="lark", value=outputs.grammar)
    if outputs.json is None:
        return _JSON_OBJECT
    schema: Any = outputs.json
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            raise InvalidValueError(f"'{path}' is not valid JSON.", param=path) from None
    return schema_grammar(schema, path)


def _of_choice(choices: list[str], path: str) -> Grammar:
    if "" in choices:
        raise InvalidValueError(f"'{path}' holds an empty text.", param=path)
    regex = "|".join(re.escape(choice) for choice in dict.fromkeys(choices))
    if len(regex) > MAX_GRAMMAR_CHARS:
        raise _too_long(path, MAX_GRAMMAR_CHARS)
    return Grammar(kind="regex", value=regex)


def schema_grammar(schema: Any, param: str) -> Grammar:  # noqa: ANN401 - JSON
    """A grammar for a checked schema; raises as `check_schema` does, and for its size."""
    check_schema(schema, param)
    if schema is False:
        raise InvalidValueError(f"'{param}' allows nothing.", param=param)
    if schema is True:
        schema = {}
    return Grammar(kind="json_schema", value=schema_text(followable(schema), param))


def schema_text(schema: Any, param: str) -> str:  # noqa: ANN401 - JSON
    """A schema as compact JSON, in the client's order of keys: properties come in that order."""
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    if len(text.encode("utf-8", "replace")) > MAX_SCHEMA_BYTES:
        raise InvalidValueError(f"'{param}' is larger than {MAX_SCHEMA_BYTES} bytes.", param=param)
    return text


def _too_long(path: str, limit: int) -> InvalidValueError:
    return InvalidValueError(f"'{path}' is longer than {limit} characters.", param=path)
