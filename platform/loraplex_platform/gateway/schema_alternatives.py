"""Whether the schemas of a `oneOf` exclude each other, so far as that can be proven.

A grammar follows `anyOf`; `oneOf` is the same where no value matches two of its schemas. Two are known to
exclude each other by:

* their types;
* values, where `const` or `enum` lists them;
* a property that both require and that cannot be the same in both, or that one requires and the other
  does not allow.

References are followed. What is known of a schema is always too little, never too much: keywords that are
not looked at could only make it match less.

How long that takes is bounded by a budget of steps for a whole document, each a microsecond or a few. What
is asked of a schema again is remembered, and alternatives that a property with a constant tells apart, as
in a tagged union, are not compared with each other: they are sorted by it.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final, Literal
from urllib.parse import unquote

_Kind = Literal["null", "boolean", "number", "string", "array", "object"]

_KINDS: Final[tuple[_Kind, ...]] = ("null", "boolean", "number", "string", "array", "object")
# Steps for one document: some 0.1 s, and never on the event loop. What takes more is not proven.
_MAX_STEPS: Final = 100_000
_MAX_DEPTH: Final = 3  # of required properties in required properties
_MISSING: Final = object()
# Keywords that say something of objects alone; `patternProperties` only opens what others close.
_OF_OBJECTS: Final = frozenset({"required", "properties", "additionalProperties"})
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,8}")


class TooManyStepsError(Exception):
    """It would take too long to tell."""


class _Case:
    """Values of one type: one value of it if `value` says so, and objects by a schema's keywords.

    Args:
        part: a schema for objects.
        both: two cases whose schemas for objects all hold.
    """

    __slots__ = ("both", "facts", "kind", "part", "value")

    def __init__(
        self,
        kind: _Kind,
        value: Any = _MISSING,  # noqa: ANN401 - JSON
        part: dict[str, Any] | None = None,
        both: tuple[_Case, _Case] | None = None,
    ) -> None:
        self.kind, self.value, self.part, self.both = kind, value, part, both
        self.facts: _ObjectFacts | None = None  # once asked for


class _ObjectFacts:
    """What all schemas for one object say together."""

    __slots__ = ("allowed", "banned", "properties", "property_cases", "required")

    def __init__(self) -> None:
        self.required: set[str] = set()
        self.banned: set[str] = set()  # properties that are `false`
        self.allowed: set[str] | None = None  # the only names; None: any
        self.properties: defaultdict[str, list[Any]] = defaultdict(list)
        self.property_cases: dict[str, Sequence[_Case]] = {}

    def forbids(self, name: str) -> bool:
        return name in self.banned or (self.allowed is not None and name not in self.allowed)

    def forbids_some(self, names: set[str]) -> bool:
        return not names.isdisjoint(self.banned) or (
            self.allowed is not None and not names <= self.allowed
        )


_Owned = tuple[int, _Case]  # a case, and the index of the alternative that it is of

_ANYTHING: Final = tuple(_Case(kind) for kind in _KINDS)


class Alternatives:
    """The schemas of one document, none of which may change.

    Args:
        root: the document, for references.
    """

    def __init__(self, root: Any) -> None:  # noqa: ANN401 - JSON
        self._root = root
        self._num_steps = 0
        self._num_loops = 0  # references that led back to themselves
        self._known: dict[int, tuple[_Case, ...]] = {}  # by the identity of a schema in `root`

    def exclude_each_other(self, schemas: Sequence[Any]) -> bool:
        """True: no value matches two of them. False: some may, or that is not to be seen.

        Raises:
            TooManyStepsError: it would take too long to tell.
        """
        try:
            owned = [
                (owner, case)
                for owner, schema in enumerate(schemas)
                for case in self._cases(schema, ())
            ]
            return self._are_exclusive(owned, 0)
        except RecursionError:
            raise TooManyStepsError from None

    def impossible_place(self, schema: Any, path: str) -> str | None:  # noqa: ANN401 - JSON
        """Where it says that nothing can match it, below `path`; None: a value may, or nobody can tell.

        What need not be there may well be impossible.
        """
        try:
            if not self._are_impossible(self._cases(schema, ()), 0):
                return None
            if not isinstance(schema, dict) or schema.get("type") != "object":
                return path
            facts = self._facts(_Case("object", part=schema))
        except (TooManyStepsError, RecursionError):
            return None
        for name in sorted(facts.required):
            if facts.forbids(name):
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
        facts = self._facts(case)
        return facts.forbids_some(facts.required) or any(
            self._are_impossible(self._property(facts, name), depth + 1)
            for name in sorted(facts.required)
        )

    def _step(self, count: int = 1) -> None:
        self._num_steps += count
        if self._num_steps > _MAX_STEPS:
            raise TooManyStepsError

    # ------------------------------------------------------------------ what may match

    def _cases(self, schema: Any, references: tuple[str, ...]) -> tuple[_Case, ...]:  # noqa: ANN401
        """What `schema` may match. `references`: those that led here, which may go round."""
        self._step()
        if schema is False:
            return ()
        if not isinstance(schema, dict):
            return _ANYTHING
        known = self._known.get(id(schema))
        if known is None:
            num_loops = self._num_loops
            known = self._found_cases(schema, references)
            if num_loops == self._num_loops:  # or less is known here than elsewhere
                self._known[id(schema)] = known
        return known

    def _found_cases(
        self, schema: dict[str, Any], references: tuple[str, ...]
    ) -> tuple[_Case, ...]:
        cases = _typed(schema)
        if "const" in schema:
            cases = self._both(cases, (_case_of(schema["const"]),))
        values = schema.get("enum")
        if isinstance(values, list):
            cases = self._both(cases, [_case_of(value) for value in values])
        reference = schema.get("$ref")
        if isinstance(reference, str):
            self._step(1 + len(references) // 16)
            if reference in references:
                self._num_loops += 1
            else:
                target = find(self._root, reference)
                cases = self._both(cases, self._cases(target, (*references, reference)))
        for keyword in ("anyOf", "oneOf"):
            schemas = schema.get(keyword)
            if isinstance(schemas, list):
                some = [case for one in schemas for case in self._cases(one, references)]
                self._step(len(some) // 8)
                cases = self._both(cases, some)
        every = schema.get("allOf")
        for one in every if isinstance(every, list) else ():
            cases = self._both(cases, self._cases(one, references))
        return tuple(cases)

    def _both(self, firsts: Sequence[_Case], seconds: Sequence[_Case]) -> Sequence[_Case]:
        if firsts is _ANYTHING or seconds is _ANYTHING:
            return seconds if firsts is _ANYTHING else firsts
        self._step(len(firsts) * len(seconds))  # before the work, which may be much at once
        cases = []
        for first, second in itertools.product(firsts, seconds):
            if first.kind != second.kind or _differ(first.value, second.value):
                continue
            value = second.value if first.value is _MISSING else first.value
            both = (first, second) if first.kind == "object" else None
            cases.append(_Case(first.kind, value, both=both))
        return cases

    # ------------------------------------------------------------------ what excludes what

    def _are_exclusive(self, owned: Sequence[_Owned], depth: int) -> bool:
        """No value is of two alternatives."""
        objects: list[_Owned] = []
        owners: dict[Hashable, int] = {}  # of each value that is not an object
        of_all: dict[str, int] = {}  # of each type of which any value will do
        self._step(len(owned))
        for owner, case in owned:
            if case.kind == "object":
                objects.append((owner, case))
            elif case.value is _MISSING:
                if of_all.setdefault(case.kind, owner) != owner:
                    return False
            elif owners.setdefault((case.kind, case.value), owner) != owner:
                return False
        for owner, case in owned:
            is_value = case.kind != "object" and case.value is not _MISSING
            if is_value and of_all.get(case.kind, owner) != owner:
                return False
        return self._objects_are_exclusive(objects, depth, frozenset())

    def _objects_are_exclusive(
        self, owned: Sequence[_Owned], depth: int, tried: frozenset[str]
    ) -> bool:
        if len({owner for owner, _ in owned}) < 2:
            return True
        if depth > _MAX_DEPTH:  # a property's property's ...: recursive ones have no end
            return False
        for name in sorted(self._required_by_all(owned) - tried):
            groups = self._by_constant(owned, name)
            if groups is not None and all(len(group) < len(owned) for group in groups):
                tried |= {name}
                return all(self._objects_are_exclusive(group, depth, tried) for group in groups)
        return all(
            first[0] == second[0] or self._objects_differ(first[1], second[1], depth)
            for first, second in itertools.combinations(owned, 2)
        )

    def _required_by_all(self, owned: Sequence[_Owned]) -> set[str]:
        names: set[str] | None = None
        for _, case in owned:
            required = self._facts(case).required
            self._step(1 + len(required if names is None else names) // 16)
            names = set(required) if names is None else names & required
            if not names:
                break
        return names or set()

    def _by_constant(self, owned: Sequence[_Owned], name: str) -> Iterable[list[_Owned]] | None:
        """Cases that may have the same value of a property; None: not all list its values."""
        groups: defaultdict[Hashable, list[_Owned]] = defaultdict(list)
        for owner, case in owned:
            cases = self._property(self._facts(case), name)
            self._step(1 + len(cases))
            # Null has but one value; a list or an object is not told apart here.
            if any(one.value is _MISSING and one.kind != "null" for one in cases):
                return None
            for key in {(one.kind, one.value) for one in cases}:
                groups[key].append((owner, case))
        return groups.values()

    def _objects_differ(self, first: _Case, second: _Case, depth: int) -> bool:
        one, other = self._facts(first), self._facts(second)
        self._step(1 + (len(one.required) + len(other.required)) // 16)
        if one.forbids_some(other.required) or other.forbids_some(one.required):
            return True
        for name in sorted(one.required & other.required):
            self._step()
            if one.properties.get(name) is None or other.properties.get(name) is None:
                continue  # any value will do
            values = [
                *((0, case) for case in self._property(one, name)),
                *((1, case) for case in self._property(other, name)),
            ]
            if self._are_exclusive(values, depth + 1):
                return True
        return False

    # ------------------------------------------------------------------ objects

    def _facts(self, case: _Case) -> _ObjectFacts:
        """What is known of an object: gathered once, a step for each schema and name."""
        if case.facts is None:
            facts = _ObjectFacts()
            left = [case]
            while left:
                place = left.pop()
                self._step()
                if place.both is not None:
                    left += reversed(place.both)
                elif place.part is not None:
                    self._add(facts, place.part)
            case.facts = facts
        return case.facts

    def _add(self, facts: _ObjectFacts, part: dict[str, Any]) -> None:
        listed = part.get("required")
        if isinstance(listed, list):
            self._step(len(listed))
            facts.required.update(name for name in listed if isinstance(name, str))
        properties = part.get("properties")
        known = properties if isinstance(properties, dict) else {}
        self._step(len(known))
        for name, schema in known.items():
            if schema is False:
                facts.banned.add(name)
            facts.properties[name].append(schema)
        if part.get("additionalProperties") is False and not part.get("patternProperties"):
            allowed = facts.allowed
            facts.allowed = set(known) if allowed is None else allowed & known.keys()

    def _property(self, facts: _ObjectFacts, name: str) -> Sequence[_Case]:
        known = facts.property_cases.get(name)
        if known is None:
            known = _ANYTHING
            for schema in facts.properties.get(name, ()):
                known = self._both(known, self._cases(schema, ()))
            facts.property_cases[name] = known
        return known


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
        elif isinstance(place, list) and _INDEX.fullmatch(name) and int(name) < len(place):
            place = place[int(name)]
        else:
            return None
    return (place,)


def _typed(schema: dict[str, Any]) -> Sequence[_Case]:
    types = schema.get("type", _MISSING)
    if types is _MISSING and not _OF_OBJECTS & schema.keys():
        return _ANYTHING
    names = types if isinstance(types, list) else [types]
    wanted = {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    kinds = _KINDS if types is _MISSING else [kind for kind in _KINDS if kind in wanted]
    return [_Case(kind, part=schema if kind == "object" else None) for kind in kinds]


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
