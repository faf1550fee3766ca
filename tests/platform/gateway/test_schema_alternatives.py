"""Whether alternatives exclude each other: found for honest unions of any size, in bounded time for all."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import jsonschema
import pytest
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.gateway.schema_alternatives import (
    _MAX_STEPS,
    Alternatives,
    TooManyStepsError,
)
from loraplex_platform.gateway.schema_check import check_schema

from tests.support.cpu_time import least_s


def tagged(value: Any, **others: Any) -> dict[str, Any]:
    properties = {"kind": {"const": value}, **others}
    return {"type": "object", "properties": properties, "required": list(properties)}


def keyed(name: str) -> dict[str, Any]:
    """As Serde writes an enum's variant."""
    return {
        "type": "object",
        "properties": {name: {"type": "string"}},
        "required": [name],
        "additionalProperties": False,
    }


_MANY = 200
_UNIONS: dict[str, Any] = {
    "tagged": {"oneOf": [tagged(f"v{i}", x={"type": "string"}) for i in range(_MANY)]},
    "several": {
        "properties": {
            f"p{k}": {"oneOf": [tagged(f"v{i}") for i in range(_MANY)]} for k in range(4)
        }
    },
    "referred": {
        "oneOf": [{"$ref": f"#/$defs/v{i}"} for i in range(_MANY)],
        "$defs": {
            **{f"v{i}": {"allOf": [{"$ref": "#/$defs/base"}, tagged(i)]} for i in range(_MANY)},
            "base": {"type": "object", "properties": {"id": {}}, "required": ["id"]},
        },
    },
    "keyed": {"oneOf": [keyed(f"k{i}") for i in range(_MANY)]},
    "two tags": {
        "oneOf": [tagged(i // 20, version={"const": i % 20}) for i in range(_MANY)],
    },
    "constants": {"oneOf": [{"const": f"v{i}"} for i in range(4000)]},
    "recursive": {
        "oneOf": [tagged(i, next={"$ref": "#"}) for i in range(_MANY)],
    },
}


@pytest.mark.parametrize("name", _UNIONS)
def test_a_union_of_many_variants_is_followed(name: str) -> None:
    check_schema(_UNIONS[name], "schema")


@pytest.mark.parametrize("name", [name for name in _UNIONS if name != "several"])
def test_the_same_union_with_one_variant_twice_is_refused(name: str) -> None:
    schema = dict(_UNIONS[name])
    schema["oneOf"] = [*schema["oneOf"], schema["oneOf"][-1]]

    with pytest.raises(InvalidRequestError, match="must exclude each other") as refusal:
        check_schema(schema, "schema")

    assert refusal.value.param == "schema.oneOf"


def test_a_tagged_union_takes_steps_linear_in_its_variants() -> None:
    steps = []
    for count in (200, 400):
        schema = {"oneOf": [tagged(i) for i in range(count)]}
        alternatives = Alternatives(schema)
        assert alternatives.exclude_each_other(schema["oneOf"])
        steps.append(alternatives._num_steps)

    assert steps[1] <= 2 * steps[0]


def _wide(count: int) -> dict[str, Any]:
    return {
        "type": "object",
        "required": [f"p{i}" for i in range(count)],
        "allOf": [{"type": "object"}] * count,
    }


_HOSTILE: dict[str, Any] = {
    "many names in many parts": {"oneOf": [_wide(2600), {"type": "object", "required": ["q"]}]},
    "impossible in many parts": {
        **_wide(2000),
        "allOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(1300)],
    },
    "products of alternatives": {
        "oneOf": [{"allOf": [{"anyOf": [{"type": "object"}] * 9}] * 9}, {"const": 1}]
    },
    "references that fan out": {
        "oneOf": [{"$ref": "#/$defs/n"}, {"allOf": [{"$ref": "#/$defs/n"}] * 60}],
        "$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}] * 60}},
    },
    "parts shared by alternatives": {
        "oneOf": [
            {"allOf": [{"anyOf": [{"type": "object", "required": [f"p{i}"]} for i in range(80)]},
                       {"type": "object", "required": [f"r{i}" for i in range(3000)]}]},
            keyed("k"),
        ]
    },
    "enums that all overlap": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"k": {"enum": list(range(i, i + 120))}},
                "required": ["k"],
            }
            for i in range(60)
        ]
    },
    "a long chain of references": {
        "oneOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}],
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_alternatives_take_bounded_time(name: str) -> None:
    def check() -> None:
        with contextlib.suppress(InvalidRequestError):
            check_schema(_HOSTILE[name], "schema")

    assert least_s(check, enough_s=1.0) < 1.0  # 2.5 s for the first, before


def test_what_takes_too_long_is_refused_in_words_of_its_own() -> None:
    schema = _HOSTILE["references that fan out"]
    with pytest.raises(TooManyStepsError):
        Alternatives(schema).exclude_each_other(schema["oneOf"])

    with pytest.raises(InvalidRequestError, match="takes too long to tell") as refusal:
        check_schema(schema, "schema")

    assert "must exclude each other" not in refusal.value.message
    assert "anyOf" in refusal.value.message
    assert refusal.value.param == "schema.oneOf"


def test_a_step_is_a_bounded_piece_of_work() -> None:
    for name, schema in _HOSTILE.items():
        made: list[Alternatives] = []

        def decide(schema: dict[str, Any] = schema, made: list[Alternatives] = made) -> None:
            made.append(Alternatives(schema))
            with contextlib.suppress(TooManyStepsError):
                made[-1].exclude_each_other(schema.get("oneOf", [schema]))

        spent_s = least_s(decide)

        alternatives = made[-1]
        assert spent_s < 0.05 + min(alternatives._num_steps, _MAX_STEPS) * 10e-6, name


def test_sorting_by_constants_finds_what_comparing_pairs_finds() -> None:
    draw = random.Random(3)
    values: list[Any] = [1, 2, "1", True, None]
    found = {True: 0, False: 0}
    for _ in range(300):
        schemas = [
            {
                "type": "object",
                "properties": {
                    name: draw.choice([{"const": draw.choice(values)}, {"enum": draw.sample(values, 2)}])
                    for name in draw.sample("abc", draw.randint(1, 3))
                },
                "required": draw.sample("abc", draw.randint(1, 3)),
            }
            for _ in range(draw.randint(2, 5))
        ]  # fmt: skip
        whole = Alternatives(schemas).exclude_each_other(schemas)
        pairs = all(
            Alternatives(pair).exclude_each_other(pair)
            for pair in itertools.combinations(schemas, 2)
        )
        assert whole == pairs, schemas
        found[whole] += 1
        if whole:  # and it is true
            for a, b, c in itertools.product(values, repeat=3):
                value = {"a": a, "b": b, "c": c}
                assert sum(_is_valid(value, schema) for schema in schemas) <= 1
    assert min(found.values()) > 15


def _is_valid(value: Any, schema: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)
