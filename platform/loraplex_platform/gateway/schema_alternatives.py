"""Whether the schemas of a `oneOf` exclude each other, so far as that can be proven.

A grammar follows `anyOf`; `oneOf` is the same where no value matches two of its schemas. Two are known to
exclude each other by:

* their types;
* values, where `const` or `enum` lists them;
* a property that both require and that cannot be the same in both, or that one requires and the other
  does not allow.

References are followed. What is known of a schema is always too little, never too much: keywords that are
not looked at could only make it match less.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import unquote

_Kind = Literal["null", "boolean", "number", "string", "array", "object"]

_KINDS: Final[tuple[_Kind, ...]] = ("null", "boolean", "number", "string", "array", "object")
# Steps for one schema: some 50 ms. What takes more is not proven.
_MAX_STEPS: Final = 20_000
_MAX_DEPTH: Final = 3  # of required properties in required properties
_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class _Case:
    """Values of one type: one value of it if `value` says so, and objects by all of `parts`."""

    kind: _Kind
    value: object = _MISSING
    parts: tuple[dict[str, Any], ...] = ()


_ANYTHING: Final = tuple(_Case(kind) for kind in _KINDS)


class _TooManyStepsError(Exception):
    """It would take too long to tell."""


class Alternatives:
    """The schemas of one document.

    Args:
        root: the document, for references.
    """

    def __init__(self, root: Any) -> None:  # noqa: ANN401 - JSON
        self._root = root
        self._num_steps = 0

    def exclude_each_other(self, schemas: Sequence[Any]) -> bool:
        """True: no value matches two of them. False: some may, or nobody can tell."""
        try:
            cases = [self._cases(schema, ()) for schema in schemas]
            return all(
                self._are_disjoint(first, second, ())
                for first, second in itertools.combinations(cases, 2)
            )
        except (_TooManyStepsError, RecursionError):
            return False

    def impossible_place(self, schema: Any, path: str) -> str | None:  # noqa: ANN401 - JSON
        """Where it says that nothing can match it, below `path`; None: a value may, or nobody can tell.

        What need not be there may well be impossible.
        """
        try:
            if not self._are_impossible(self._cases(schema, ()), 0):
                return None
        except (_TooManyStepsError, RecursionError):
            return None
        if not isinstance(schema, dict) or schema.get("type") != "object":
            return path
        case = _Case("object", parts=(schema,))
        for name in sorted(_required(case)):
            if _forbids(case, name):
                return f"{path}.required"
            within = schema.get("properties", {}).get(name, True)
            place = self.impossible_place(within, f"{path}.properties.{name[:64]}")
            if place is not None:
                return place
        return path

    def _are_impossible(self, cases: Sequence[_Case], depth: int) -> bool:
        return all(self._is_impossible(case, depth) for case in cases)

    def _is_impossible(self, case: _Case, depth: int) -> bool:
        self._step()
        if case.kind != "object" or depth > _MAX_DEPTH:
            return False
        return any(
            _forbids(case, name) or self._are_impossible(self._property(case, name), depth + 1)
            for name in sorted(_required(case))
        )

    def _step(self) -> None:
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise _TooManyStepsError

    # ------------------------------------------------------------------ what may match

    def _cases(self, schema: Any, references: tuple[str, ...]) -> tuple[_Case, ...]:  # noqa: ANN401
        """What `schema` may match. `references`: those that led here, which may go round."""
        self._step()
        if schema is False:
            return ()
        if not isinstance(schema, dict):
            return _ANYTHING
        cases = _typed(schema)
        if "const" in schema:
            cases = self._both(cases, (_case_of(schema["const"]),))
        values = schema.get("enum")
        if isinstance(values, list):
            cases = self._both(cases, [_case_of(value) for value in values])
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in references:
            target = find(self._root, reference)
            cases = self._both(cases, self._cases(target, (*references, reference)))
        for keyword in ("anyOf", "oneOf"):
            schemas = schema.get(keyword)
            if isinstance(schemas, list):
                some = [case for one in schemas for case in self._cases(one, references)]
                cases = self._both(cases, some)
        every = schema.get("allOf")
        for one in every if isinstance(every, list) else ():
            cases = self._both(cases, self._cases(one, references))
        return tuple(cases)

    def _both(self, firsts: Sequence[_Case], seconds: Sequence[_Case]) -> list[_Case]:
        cases = []
        for first, second in itertools.product(firsts, seconds):
            self._step()
            if first.kind != second.kind or _differ(first.value, second.value):
                continue
            value = second.value if first.value is _MISSING else first.value
            cases.append(_Case(first.kind, value, first.parts + second.parts))
        return cases

    # ------------------------------------------------------------------ what excludes what

    def _are_disjoint(
        self, firsts: Sequence[_Case], seconds: Sequence[_Case], path: tuple[str, ...]
    ) -> bool:
        for first, second in itertools.product(firsts, seconds):
            self._step()
            if first.kind != second.kind or _differ(first.value, second.value):
                continue
            if first.kind != "object" or not self._objects_are_disjoint(first, second, path):
                return False
        return True

    def _objects_are_disjoint(self, first: _Case, second: _Case, path: tuple[str, ...]) -> bool:
        if len(path) > _MAX_DEPTH:  # a property's property's ...: recursive ones have no end
            return False
        needed, also_needed = _required(first), _required(second)
        for name in sorted(needed | also_needed):
            self._step()
            if (name in needed and _forbids(second, name)) or (
                name in also_needed and _forbids(first, name)
            ):
                return True
            if name in needed and name in also_needed:
                of_first, of_second = self._property(first, name), self._property(second, name)
                if self._are_disjoint(of_first, of_second, (*path, name)):
                    return True
        return False

    def _property(self, case: _Case, name: str) -> Sequence[_Case]:
        cases: Sequence[_Case] = _ANYTHING
        for part in case.parts:
            properties = part.get("properties")
            if isinstance(properties, dict) and name in properties:
                cases = self._both(cases, self._cases(properties[name], ()))
        return cases


def find(root: Any, reference: str) -> Any:  # noqa: ANN401 - JSON
    """What a reference within `root` points at; True, which allows anything, if that is unknown."""
    found = resolve(root, reference)
    return True if found is None else found[0]


def resolve(root: Any, reference: str) -> tuple[Any] | None:  # noqa: ANN401 - JSON
    """What a JSON pointer (`#/$defs/a`) points at; None: nothing is there, or it is no pointer."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    place = root
    for step in reference[2:].split("/") if reference != "#" else ():
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and name in place:
            place = place[name]
        elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        else:
            return None
    return (place,)


def _typed(schema: dict[str, Any]) -> Sequence[_Case]:
    types = schema.get("type", _MISSING)
    names = types if isinstance(types, list) else [types]
    wanted = {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    kinds = _KINDS if types is _MISSING else [kind for kind in _KINDS if kind in wanted]
    return [_Case(kind, parts=(schema,) if kind == "object" else ()) for kind in kinds]


def _case_of(value: Any) -> _Case:  # noqa: ANN401 - JSON
    match value:
        case None:
            return _Case("null")
        case bool():
            return _Case("boolean", value)
        case int() | float():
            return _Case("number", value)
        case str():
            return _Case("string", value)
        case list():
            return _Case("array")
        case _:
            return _Case("object")


def _differ(first: object, second: object) -> bool:
    # Of one kind: there is no `True == 1` here.
    return first is not _MISSING and second is not _MISSING and first != second


def _required(case: _Case) -> set[str]:
    names: set[str] = set()
    for part in case.parts:
        listed = part.get("required")
        if isinstance(listed, list):
            names.update(name for name in listed if isinstance(name, str))
    return names


def _forbids(case: _Case, name: str) -> bool:
    for part in case.parts:
        properties = part.get("properties")
        known = properties if isinstance(properties, dict) else {}
        if known.get(name) is False:
            return True
        is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
        if is_closed and name not in known:
            return True
    return False
