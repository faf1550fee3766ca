"""What the gateway says of a schema before anything is reserved is what the engine's compiler would say."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loraplex_engine.protocol import Grammar
from loraplex_engine.structured.errors import GrammarError
from loraplex_engine.structured.matcher import LlMatcher
from loraplex_engine.structured.tokenizer import native_matcher, open_tokenizer
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.gateway.response_format import schema_grammar
from loraplex_platform.gateway.schema_check import check_schema, followable

from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import BASE, Stand
from tests.support.cpu_time import least_s
from tests.support.grammars import VOCAB_SIZE, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def compiles(tokenizer: Any, grammar: Grammar) -> bool:
    try:
        native_matcher(tokenizer, grammar)
    except GrammarError:
        return False
    return True


def as_it_came(schema: object) -> Grammar:
    return Grammar(kind="json_schema", value=json.dumps(schema))


def within(schema: object) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


_CLOSED = {"type": "object", "additionalProperties": False}
_CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
_DOG = {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}


# ------------------------------------------------------------------ oneOf


@pytest.mark.parametrize(
    "alternatives",
    [
        [{"type": "integer"}, {"minimum": 3}],
        [{"type": "integer"}, {"type": "number"}],
        [{"type": ["integer", "null"]}, {"type": ["string", "null"]}],
        [{"const": "a"}, {"enum": ["b", "a"]}],
        [{"const": 1}, {"const": 1.0}],
        [{"type": "boolean"}, {"const": True}],
        [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}],
        [{"type": "object", "properties": {"k": {"const": "a"}}}, _DOG],
        [{"type": "object", "required": ["k"]}, {"type": "object", "required": ["j"]}],
        [{"$ref": "#/$defs/number"}, {"type": "integer"}],
        [{"$ref": "#/$defs/round"}, {"type": "integer"}],
        [{}, {"type": "string"}],
        [True, False, {"type": "null"}],
    ],
)
def test_one_of_whose_schemas_overlap_is_refused_with_its_path(alternatives: list[Any]) -> None:
    schema = {
        **within({"items": {"oneOf": alternatives}}),
        "$defs": {"number": {"type": "number"}, "round": {"$ref": "#/$defs/round"}},
    }

    with pytest.raises(InvalidRequestError) as refusal:
        schema_grammar(schema, "response_format.json_schema.schema")

    path = "response_format.json_schema.schema.properties.a.items.oneOf"
    assert refusal.value.param == path
    assert path in refusal.value.message
    assert "anyOf" in refusal.value.message  # the remedy


@pytest.mark.parametrize(
    "alternatives",
    [
        [{"type": "integer"}, {"type": "string"}, {"type": "null"}],
        [{"const": 1}, {"const": 2}, {"const": "1"}, {"const": True}],
        [{"enum": ["a", 1]}, {"enum": ["b", 2]}],
        [_CAT, _DOG],
        # The engine itself tells none of these apart.
        [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        [{"allOf": [{"$ref": "#/$defs/cat"}, {"required": ["name"]}]}, {"$ref": "#/$defs/dog"}],
        [
            {**_CLOSED, "properties": {"a": {}}, "required": ["a"]},
            {**_CLOSED, "properties": {"b": {}}, "required": ["b"]},
        ],
        [{"type": "integer"}, False],
    ],
)
def test_one_of_whose_schemas_exclude_each_other_is_followed(
    alternatives: list[Any], tokenizer: Any
) -> None:
    schema = {**within({"oneOf": alternatives}), "$defs": {"cat": _CAT, "dog": _DOG}}

    grammar = schema_grammar(schema, "schema")

    assert compiles(tokenizer, grammar)
    for seed in range(3):
        jsonschema.validate(json.loads(write(tokenizer, grammar, seed)), schema)


def test_one_of_beside_any_of_holds_both(tokenizer: Any) -> None:
    schema = {
        "oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}],
        "anyOf": [{"type": "string"}, {"type": "null"}],
    }

    grammar = schema_grammar(schema, "schema")

    assert "oneOf" in schema  # what the client sent is left alone
    for seed in range(4):
        jsonschema.validate(json.loads(write(tokenizer, grammar, seed)), schema)


def test_a_reference_into_a_one_of_still_finds_it(tokenizer: Any) -> None:
    schema = within({"oneOf": [{"type": "integer"}, {"type": "string"}]})
    properties: dict[str, Any] = schema["properties"]
    properties["b"] = {"$ref": "#/properties/a/oneOf/0"}

    assert compiles(tokenizer, schema_grammar(schema, "schema"))


def test_many_references_take_no_time() -> None:
    places = {f"p{i}": {"$ref": "#/$defs/word"} for i in range(2000)}
    schema = {"properties": places, "$defs": {"word": {"enum": ["x"] * 2000}}}

    assert least_s(lambda: check_schema(schema, "schema"), enough_s=0.5) < 0.5


def test_many_alternatives_take_no_time_to_refuse() -> None:
    wide = [{"oneOf": [{"type": "object", "required": [f"p{i}"]} for i in range(300)]}] * 5
    deep: dict[str, Any] = {"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}] * 60}}}
    deep["oneOf"] = [{"$ref": "#/$defs/n"}, {"allOf": [{"$ref": "#/$defs/n"}] * 60}]

    def refuse(schema: dict[str, Any]) -> None:
        with pytest.raises(InvalidRequestError):
            check_schema(schema, "schema")

    for schema in ({"anyOf": wide}, deep):
        assert least_s(partial(refuse, schema), enough_s=1.0) < 1.0


# ------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "nosuch"}, "type"),
        ({"type": 5}, "type"),
        ({"type": []}, "type"),
        ({"type": ["string", "nosuch"]}, "type"),
        ({"enum": []}, "enum"),
        ({"enum": 5}, "enum"),
        ({"anyOf": []}, "anyOf"),
        ({"anyOf": 5}, "anyOf"),
        ({"oneOf": []}, "oneOf"),
        ({"prefixItems": 5}, "prefixItems"),
        ({"properties": 5}, "properties"),
        ({"type": "object", "required": "a"}, "required"),
        ({"type": "object", "required": [5]}, "required"),
        ({"type": "object", "required": ["z"], "additionalProperties": False}, "required"),
        ({"type": "object", "required": ["z"], "properties": {"z": False}}, "required"),
        (
            {
                "type": "object",
                "required": ["z"],
                "properties": {"z": {"allOf": [{"type": "null"}, {"type": "string"}]}},
            },
            "properties.z",
        ),
        ({"$ref": "#/$defs/nosuch"}, "$ref"),
        ({"$schema": "https://example.com/mine"}, "$schema"),
        ({"type": "string", "pattern": "("}, "pattern"),
        ({"type": "string", "pattern": "a)"}, "pattern"),
        ({"type": "string", "pattern": "[a"}, "pattern"),
        ({"type": "string", "pattern": "[^]"}, "pattern"),
        ({"type": "string", "pattern": 5}, "pattern"),
        ({"patternProperties": {"[": {}}}, "patternProperties"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": "string", "maxLength": 1.5}, "maxLength"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "minItems"),
        ({"type": "object", "minProperties": 3, "maxProperties": 1}, "minProperties"),
        ({"type": "integer", "minimum": "3"}, "minimum"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"type": "integer", "minimum": 0.5, "maximum": 0.7}, "minimum"),
        ({"type": "number", "minimum": 1e30, "maximum": 1e31}, "minimum"),
        ({"type": "integer", "minimum": float("inf")}, "minimum"),
        ({"type": "number", "multipleOf": 0}, "multipleOf"),
    ],
)
def test_a_value_that_the_engine_would_refuse_is_named_with_its_path(
    schema: dict[str, Any], keyword: str, tokenizer: Any
) -> None:
    whole = schema if "$schema" in schema else within(schema)
    place = "" if "$schema" in schema else ".properties.a"

    with pytest.raises(InvalidRequestError) as refusal:
        schema_grammar(whole, "schema")

    assert refusal.value.param == f"schema{place}.{keyword}"
    assert not compiles(tokenizer, as_it_came(whole))  # or the refusal would be too strict


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "integer"}, {"type": "string"}]},
        {"type": "string", "enum": [{"a": 1}, 2]},
        {"type": "string", "anyOf": [{"type": "null"}, {"const": 5}]},
    ],
)
def test_a_schema_that_nothing_matches_is_refused(schema: dict[str, Any], tokenizer: Any) -> None:
    with pytest.raises(InvalidRequestError, match="allows nothing") as refusal:
        schema_grammar(schema, "schema")

    assert refusal.value.param == "schema"
    assert not compiles(tokenizer, as_it_came(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"allOf": [{"type": "null"}, {"const": 5}]}}},
        {"type": ["string", "array"], "minItems": 3, "maxItems": 1},
        *(
            {"type": "string", "pattern": pattern}
            for pattern in (
                r"\p{L}+(?<name>a)",
                *(
                    r"\(\[",
                    "[(]",
                    "[)]a",
                    "[]a]",
                    "[^]a(]",
                    "[[:alpha:](]",
                    r"[\](]",
                    "[a[b]c(]",
                    "a]",
                ),
            )
        ),
        {"$id": "https://example.com/b", "$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
        {"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "integer"}}},
        {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "integer"}}},
        {"type": "number", "exclusiveMinimum": True, "minimum": 1, "maximum": 9e15},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "integer"},
    ],
)
def test_nothing_is_refused_that_the_engine_follows(schema: Any, tokenizer: Any) -> None:
    assert compiles(tokenizer, schema_grammar(schema, "schema"))


# ------------------------------------------------------------------ any schema at all

_leaves = st.sampled_from(
    [
        *({"type": kind} for kind in ("integer", "number", "boolean", "null", "array")),
        {"type": "string", "maxLength": 3},
        {"type": ["string", "null"], "maxLength": 2},
        *({"const": value} for value in ("a", "b", 1, 2, True, None)),
        {"enum": ["a", 1, None]},
        {"enum": ["b", 2]},
        {"$ref": "#/$defs/cat"},
        {"$ref": "#/$defs/word"},
        {"$ref": "#/$defs/nosuch"},
        True,
        False,
    ]
)


def _combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    objects = st.builds(
        lambda properties, required, is_closed: {
            "type": "object",
            "properties": properties,
            "required": required,
            **({"additionalProperties": False} if is_closed else {}),
        },
        st.dictionaries(st.sampled_from("kab"), inner, max_size=2),
        st.lists(st.sampled_from("kab"), unique=True, max_size=2),
        st.booleans(),
    )
    return (
        st.builds(lambda schemas: {"oneOf": schemas}, some)
        | st.builds(lambda schemas: {"anyOf": schemas}, some)
        | st.builds(lambda schemas: {"allOf": schemas}, some)
        | objects
    )


_schemas = st.recursive(_leaves, _combined, max_leaves=6).map(
    lambda schema: {**within(schema), "$defs": {"cat": _CAT, "word": {"enum": ["x", "y"]}}}
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=_schemas)
def test_what_is_let_through_compiles_and_what_is_written_by_it_is_valid(
    schema: Any, tokenizer: Any
) -> None:
    try:
        grammar = schema_grammar(schema, "schema")
    except InvalidRequestError:
        # No loss: the engine refuses it too, unless only an overlapping alternative is in the way.
        sent = json.dumps(schema)
        assert "oneOf" in sent or "nosuch" in sent or not compiles(tokenizer, as_it_came(schema))
        return

    assert compiles(tokenizer, grammar)
    text = write(tokenizer, grammar, seed=1)
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


def test_a_lax_schema_is_left_as_it_is() -> None:
    lax = {"oneOf": [{"type": "integer"}, {"minimum": 3}], "uniqueItems": False}

    assert followable(lax, is_strict=False) == {"oneOf": lax["oneOf"]}


@pytest.mark.asyncio(loop_scope="package")
async def test_a_refused_schema_is_on_no_books_and_reaches_no_engine(stand: Stand) -> None:
    schema = within({"oneOf": [{"type": "integer"}, {"minimum": 3}]})
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    before = await num_requests(stand)

    answer = await stand.http().post(
        "/v1/chat/completions",
        json={
            "model": BASE,
            "messages": [{"role": "user", "content": "x"}],
            "response_format": wanted,
        },
    )

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "response_format.json_schema.schema.properties.a.oneOf"
    assert error["code"] == "unsupported_parameter"
    assert stand.generated == []
    assert await num_requests(stand) == before


async def num_requests(stand: Stand) -> int:
    from loraplex_platform.db import Request
    from sqlalchemy import func, select

    async with stand.db.sessions() as session:
        return (await session.scalars(select(func.count()).select_from(Request))).one()


def write(tokenizer: Any, grammar: Grammar, seed: int, most: int = 300) -> Any:
    """Random tokens that the grammar allows, to its end; None: it had none so soon."""
    matcher = LlMatcher(native_matcher(tokenizer, grammar), VOCAB_SIZE)
    choice, ids = random.Random(seed), []
    while not matcher.is_complete:
        if len(ids) == most:
            return None
        bits = np.unpackbits(matcher.masks_for()[0].view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        closing = [
            id_ for id_ in allowed if tiny_model.reference().decode([id_]) in ('"', "}", "]")
        ]
        ends = [id_ for id_ in allowed if id_ in (0, 2)] or (closing if len(ids) > 20 else [])
        ids.append(choice.choice(ends or allowed))
        matcher.advance(ids[-1])
    return tiny_model.reference().decode(ids, skip_special_tokens=True)
