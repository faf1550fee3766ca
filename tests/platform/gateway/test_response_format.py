"""`response_format` and `structured_outputs`: what the engine is asked for, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from loraplex_engine.protocol import MAX_GRAMMAR_CHARS, Grammar
from loraplex_engine.structured.errors import GrammarError
from loraplex_engine.structured.tokenizer import native_matcher, open_tokenizer
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.gateway.response_format import output_grammar
from loraplex_platform.gateway.schema_check import (
    FORMATS,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMA_NODES,
    UNSUPPORTED,
    check_schema,
)
from loraplex_platform.gateway.schema_patterns import MAX_REGEX_CHARS
from loraplex_platform.gateway.structured_schemas import ResponseFormat, StructuredOutputs

from tests.support.grammars import SCHEMAS, write_tokenizer


def of_format(**fields: Any) -> Grammar | None:
    return output_grammar(msgspec.convert(fields, ResponseFormat), None)


def of_outputs(**fields: Any) -> Grammar | None:
    return output_grammar(None, msgspec.convert(fields, StructuredOutputs))


def of_schema(schema: object) -> Grammar | None:
    return of_format(type="json_schema", json_schema={"name": "x", "schema": schema})


def refusal(call: Any, *arguments: Any, **fields: Any) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequestError) as caught:
        call(*arguments, **fields)
    assert len(caught.value.message) < 1000
    return caught.value.param, caught.value.error_code


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("schema", SCHEMAS)
def test_what_the_engine_follows_is_let_through_in_the_order_it_came(schema: Any) -> None:
    grammar = of_schema(schema)

    assert grammar is not None
    assert grammar.kind == "json_schema"
    # Of alternatives that exclude each other, "one of" is "any of".
    assert grammar.value.replace('"anyOf"', '"oneOf"') == json.dumps(
        schema, ensure_ascii=False, separators=(",", ":")
    ).replace('"anyOf"', '"oneOf"')


def test_each_form_has_its_grammar() -> None:
    anything = Grammar(kind="json_object")
    assert output_grammar(None, None) is None
    assert of_format(type="text") is None
    assert of_format(type="json_object") == anything
    assert of_format(type="json_schema", json_schema={"name": "x"}) == anything
    assert of_schema(True) == Grammar(kind="json_schema", value="{}")
    assert of_outputs(json_object=True) == anything
    assert of_outputs(json={"type": "null"}) == of_schema({"type": "null"})
    assert of_outputs(json='{"type": "null"}') == of_schema({"type": "null"})
    assert of_outputs(regex="a+") == Grammar(kind="regex", value="a+")
    assert of_outputs(grammar="start: A") == Grammar(kind="lark", value="start: A")
    assert of_outputs(choice=["a|b", "c", "c"]) == Grammar(kind="regex", value=r"a\|b|c")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"regex": "a", "grammar": "b"}, "structured_outputs"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": False}, "structured_outputs.json"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"choice": ["x" * MAX_GRAMMAR_CHARS, "y"]}, "structured_outputs.choice"),
        ({"regex": "x" * (MAX_REGEX_CHARS + 1)}, "structured_outputs.regex"),
        ({"grammar": "x" * (MAX_GRAMMAR_CHARS + 1)}, "structured_outputs.grammar"),
    ],
)
def test_outputs_that_say_nothing_or_too_much(fields: dict[str, Any], param: str) -> None:
    assert refusal(of_outputs, **fields)[0] == param


def test_formats_that_contradict_themselves() -> None:
    assert refusal(of_format, type="json_schema")[0] == "response_format.json_schema"
    contradiction = {"type": "json_object", "json_schema": {"name": "x"}}
    assert refusal(of_format, **contradiction)[0] == "response_format.json_schema"
    both = (ResponseFormat(type="json_object"), StructuredOutputs(regex="a"))
    assert refusal(output_grammar, *both)[0] == "structured_outputs"


@pytest.mark.parametrize("keyword", sorted(UNSUPPORTED))
def test_an_unsupported_keyword_is_named_with_its_place(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {"anyOf": [{}, {keyword: {"x": 1}}]}}}

    param, code = refusal(of_schema, schema)

    assert param == f"response_format.json_schema.schema.properties.a.anyOf[1].{keyword}"
    assert code == "unsupported_parameter"


_NEVER = ("unevaluatedProperties", "propertyNames", "contains", "dependentRequired", "not")


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        *(({keyword: False}, keyword) for keyword in _NEVER),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"$dynamicAnchor": "x"}, "$dynamicAnchor"),
        ({"type": "string", "format": "nosuch"}, "format"),
        ({"format": "uri-reference"}, "format"),
        ({"type": ["string", "null"], "format": "regex"}, "format"),
        *(
            ({"type": "string", "pattern": pattern}, "pattern")
            for pattern in ("(?=a)b", "a(?!b)", "(?<=a)b", "(?<!a)b", r"(a)\1", r"\bfoo", r"\\\b")
        ),
        ({"patternProperties": {"^(?=x)": {}}}, "patternProperties"),
    ],
)
def test_what_restricts_or_does_not_compile_is_refused_with_its_path(
    schema: dict[str, Any], path: str, native_tokenizer: Any
) -> None:
    whole = {"type": "object", "properties": {"a": schema}}

    param, code = refusal(of_schema, whole)

    assert param == f"response_format.json_schema.schema.properties.a.{path}"
    assert code == "unsupported_parameter"
    with pytest.raises(GrammarError):  # or the refusal would be too strict
        native_matcher(native_tokenizer, Grammar(kind="json_schema", value=json.dumps(whole)))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
        {"type": "integer", "format": "int32"},
        *({"type": "string", "format": name} for name in sorted(FORMATS)),
        *(
            {"type": "string", "pattern": pattern}
            for pattern in (r"\(?=a", r"[(?=]a", r"^[\w.]+$", "(?:a|b)+", r"\\", "(?<name>a)")
        ),
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
    ],
)
def test_what_is_let_through_compiles(schema: dict[str, Any], native_tokenizer: Any) -> None:
    grammar = of_schema(schema)

    assert grammar is not None
    native_matcher(native_tokenizer, grammar)


@pytest.fixture(scope="module")
def native_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_names_and_values_that_look_like_keywords_are_none() -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"enum": [{"if": 1}]}, "contains": {"const": {"else": 2}}},
        "uniqueItems": False,
        "default": {"not": {}},
    }

    check_schema(schema, "schema")


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        (False, "response_format.json_schema.schema"),
        ({"$ref": "https://example.com"}, "response_format.json_schema.schema.$ref"),
        ({"items": 5}, "response_format.json_schema.schema.items"),
        ({"properties": {"a": "text"}}, "response_format.json_schema.schema.properties.a"),
        (nested(MAX_SCHEMA_DEPTH + 1), "response_format.json_schema.schema"),
        ({"enum": ["x"] * MAX_SCHEMA_NODES}, "response_format.json_schema.schema"),
        ({"title": "x" * MAX_SCHEMA_BYTES}, "response_format.json_schema.schema"),
        ({"properties": {"x" * 5000: {"not": {}}}}, None),
    ],
)
def test_what_is_too_much_or_no_schema(schema: Any, param: str | None) -> None:
    named, _ = refusal(of_schema, schema)

    assert param is None or named == param


def test_the_deepest_that_is_allowed_is() -> None:
    assert of_schema(nested(MAX_SCHEMA_DEPTH)) is not None
