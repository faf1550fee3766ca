"""Any value for any keyword: a schema is accepted, or refused with a path that names it. Nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from loraplex_engine.protocol import Grammar
from loraplex_engine.structured.errors import GrammarError
from loraplex_engine.structured.tokenizer import native_matcher, open_tokenizer
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.gateway.response_format import schema_grammar
from loraplex_platform.gateway.structured_schemas import FunctionDefinition, Tool
from loraplex_platform.gateway.tool_formats.hermes import Hermes
from loraplex_platform.gateway.tools import plan_tools

from tests.support.grammars import write_tokenizer
from tests.support.nasty_schemas import KEYWORDS, NASTY_VALUES

_TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def compiles(tokenizer: Any, schema: Any) -> bool:
    try:
        native_matcher(tokenizer, Grammar(kind="json_schema", value=json.dumps(schema)))
    except GrammarError:
        return False
    return True


def refusal_of(check: Callable[[], object]) -> InvalidRequestError | None:
    """None: it is accepted. Any other exception is a fault of ours, and the test's."""
    try:
        check()
    except InvalidRequestError as refusal:
        return refusal
    return None


def check_all(schema: Any) -> None:
    """As a format, and as a tool's parameters, strict and lax: accepted, or refused with a path."""
    refusal = refusal_of(lambda: json.loads(schema_grammar(schema, "schema").value))
    assert refusal is None or (refusal.param or "").startswith("schema"), schema
    for strict in (True, False):
        function = FunctionDefinition(name="f", parameters=schema, strict=strict)
        tools = [Tool(type="function", function=function)]
        refusal = refusal_of(partial(plan_tools, tools, "required", None, None, Hermes()))
        assert refusal is None or (refusal.param or "").startswith("tools"), schema


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_any_value_of_any_keyword_is_accepted_or_refused(keyword: str) -> None:
    for index, value in enumerate(NASTY_VALUES):
        of_type = {"type": _TYPES[index % len(_TYPES)], keyword: value}
        check_all({keyword: value})
        check_all({"properties": {"a": of_type}, "required": ["a"]})
        check_all({"oneOf": [{keyword: value}, of_type]})


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_any_two_keywords_with_any_values_are_accepted_or_refused(keyword: str) -> None:
    draw = random.Random(keyword)
    for value in NASTY_VALUES * 3:
        check_all({keyword: value, draw.choice(KEYWORDS): draw.choice(NASTY_VALUES)})


@pytest.mark.parametrize(
    ("place", "keyword"),
    [
        ({"type": "string", "format": []}, "format"),
        ({"type": "string", "format": {}}, "format"),
        *(
            ({"type": "number", keyword: number}, keyword)
            for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
            for number in (10**400, -(10**400))
        ),
        ({"$ref": "#/anyOf/" + "9" * 5000}, "$ref"),
        ({"anyOf": [{}], "$ref": "#/anyOf/\u0660"}, "$ref"),
        ({"type": "string", "minLength": 10**400}, "minLength"),
        ({"type": "string", "maxLength": 2**32}, "maxLength"),
        ({"type": "array", "maxItems": 2**70}, "maxItems"),
        ({"type": "object", "minProperties": 2**64}, "minProperties"),
        ({"const": 10**400}, "const"),
        ({"enum": [1, {"b": -(10**400)}]}, "enum[1].b"),
        ({"default": 10**400}, "default"),
        ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "exclusiveMinimum"),
        ({"type": ["integer"], "exclusiveMinimum": 1, "maximum": 1}, "exclusiveMinimum"),
        ({"type": "number", "exclusiveMinimum": 2, "exclusiveMaximum": 1}, "exclusiveMinimum"),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1}, "exclusiveMinimum"),
        ({"type": "number", "minimum": 1, "exclusiveMaximum": 1}, "minimum"),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True, "maximum": 1}, "minimum"),
        ({"type": "integer", "minimum": 5, "exclusiveMinimum": 7, "maximum": 7}, "exclusiveMinimum"),
        ({"type": ["integer", "number"], "minimum": 5, "maximum": 3}, "minimum"),
        ({"type": ["string"], "minLength": 5, "maxLength": 3}, "minLength"),
        ({"type": "string", "pattern": "a{3"}, "pattern"),
    ],
)  # fmt: skip
def test_what_the_engine_would_refuse_is_named_before_anything_is_reserved(
    place: dict[str, Any], keyword: str, tokenizer: Any
) -> None:
    whole = place if "$ref" in place else {"properties": {"a": place}, "required": ["a"]}

    with pytest.raises(InvalidRequestError) as refusal:
        schema_grammar(whole, "schema")

    assert refusal.value.param == f"schema.{'' if '$ref' in place else 'properties.a.'}{keyword}"
    assert not compiles(tokenizer, {"type": "object", **whole})


@pytest.mark.parametrize(
    "place",
    [
        {"type": "string", "maxLength": 2**32 - 1},
        {"type": "array", "maxItems": 2**64 - 1},
        {"const": 2**70},
        {"type": "number", "minimum": 1, "maximum": 1},
        {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2},
        {"type": "integer", "exclusiveMinimum": 0.5, "exclusiveMaximum": 1.5},
        {"type": "number", "minimum": 1, "exclusiveMinimum": False, "maximum": 1},
        {"type": "number", "exclusiveMinimum": True, "maximum": 1},
        {"minimum": 5, "maximum": 3},
    ],
)
def test_the_last_value_that_the_engine_follows_is_accepted(place: Any, tokenizer: Any) -> None:
    assert compiles(
        tokenizer, schema_grammar({"properties": {"a": place}}, "schema").value and place
    )


@pytest.mark.parametrize("pointer", ["oneOf", "one%4Ff", "%6F%6E%65%4F%66"])
def test_a_reference_into_a_one_of_is_found_however_it_is_written(
    pointer: str, tokenizer: Any
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
            "b": {"$ref": f"#/properties/a/{pointer}/0"},
        },
    }

    grammar = schema_grammar(schema, "schema")

    native_matcher(tokenizer, grammar)
