"""Grammars for tests: fifty JSON schemas, a tokenizer that can say anything, and compilers without processes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from loraplex_engine.errors import QueueFullError
from loraplex_engine.protocol import Grammar
from loraplex_engine.step import UInt32Array
from loraplex_engine.structured.errors import (
    GrammarDeadEndError,
    GrammarError,
    GrammarFailedError,
)
from loraplex_engine.structured.matcher import LlMatcher
from loraplex_engine.structured.meter import GrammarMeter
from loraplex_engine.structured.tokenizer import native_matcher, open_tokenizer
from loraplex_engine.structured.worker_frames import TokenizerSpec

from tests.platform.gateway import tiny_model

VOCAB_SIZE = 512  # of the model; the tokenizer has fewer
END_IDS = (0, 2)


def write_tokenizer(folder: Path) -> TokenizerSpec:
    """The gateway tests' byte-level tokenizer."""
    path = folder / "tokenizer.json"
    path.write_text(tiny_model.tokenizer_json())
    return TokenizerSpec(path=str(path), vocab_size=VOCAB_SIZE, eos_token_ids=END_IDS)


def open_matcher(spec: TokenizerSpec, grammar: Grammar) -> LlMatcher:
    """A matcher without a compiler around it."""
    return LlMatcher(native_matcher(open_tokenizer(spec), grammar), spec.vocab_size)


def schema(value: object) -> Grammar:
    return Grammar(kind="json_schema", value=json.dumps(value))


def allowed_ids(mask_W: UInt32Array, vocab_size: int = VOCAB_SIZE) -> set[int]:
    """The ids whose bits are set, padding of the last word included."""
    bits = np.unpackbits(mask_W.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any(), "a bit beyond the vocabulary"
    return set(np.flatnonzero(bits).tolist())


def wait_for(compilation: Any, timeout_s: float = 60.0) -> None:
    """Until it is done."""
    deadline_s = time.monotonic() + timeout_s
    while not compilation.is_done:
        assert time.monotonic() < deadline_s, "the compilation does not end"
        time.sleep(0.001)


# ---------------------------------------------------------------------------- without llguidance


@dataclass
class ListMatcher:
    """`Matcher` that allows exactly some sequences of ids, then an end id."""

    sequences: Sequence[tuple[int, ...]]
    vocab_size: int
    end_id: int = 0
    consumed: tuple[int, ...] = ()
    has_ended: bool = False

    def _next(self) -> set[int]:
        here = len(self.consumed)
        live = [s for s in self.sequences if s[:here] == self.consumed]
        ids = {s[here] for s in live if len(s) > here}
        return ids | ({self.end_id} if self.consumed in self.sequences else set())

    @property
    def is_complete(self) -> bool:
        return self.has_ended or self._next() == {self.end_id}

    def masks_for(self, drafts: Sequence[int] = ()) -> UInt32Array:
        masks = np.full((1 + len(drafts), -(-self.vocab_size // 32)), 0xFFFF_FFFF, np.uint32)
        ahead = ListMatcher(self.sequences, self.vocab_size, self.end_id, self.consumed)
        for row in range(1 + len(drafts)):
            masks[row] = 0
            for id_ in ahead._next():
                masks[row, id_ // 32] |= np.uint32(1 << (id_ % 32))
            if row == 0 and not masks[0].any():
                raise GrammarDeadEndError("nothing")
            if row == len(drafts) or drafts[row] not in ahead._next() or ahead.is_complete:
                masks[row + 1 :] = 0xFFFF_FFFF
                break
            ahead.advance(drafts[row])
        return masks

    def validate_drafts(self, drafts: Sequence[int]) -> int:
        ahead = ListMatcher(self.sequences, self.vocab_size, self.end_id, self.consumed)
        for count, id_ in enumerate(drafts):
            if id_ not in ahead._next():
                return count
            ahead.advance(id_)
        return len(drafts)

    def advance(self, token_id: int) -> None:
        if token_id not in self._next():
            raise GrammarFailedError(f"{token_id} is refused")
        if token_id == self.end_id and self.consumed in self.sequences:
            self.has_ended = True
        else:
            self.consumed += (token_id,)

    def fork(self) -> ListMatcher:
        return ListMatcher(self.sequences, self.vocab_size, self.end_id, self.consumed)


@dataclass
class ListCompilation:
    """Done when the test says so."""

    template: ListMatcher
    is_done: bool = True
    error: GrammarError | None = None
    made: list[ListMatcher] = field(default_factory=list)
    noted: list[GrammarError] = field(default_factory=list)

    def note_failure(self, error: GrammarError) -> None:
        self.noted.append(error)

    def matcher(self) -> ListMatcher:
        assert self.is_done
        if self.error is not None:
            raise self.error
        self.made.append(self.template.fork())
        return self.made[-1]


@dataclass
class ListGrammars:
    """`GrammarSource`: a grammar's value is JSON, a list of lists of ids. `is_open` False holds all back."""

    vocab_size: int
    is_open: bool = True
    is_full: bool = False
    errors: dict[str, GrammarError] = field(default_factory=dict)
    compilations: list[ListCompilation] = field(default_factory=list)
    meter: GrammarMeter = field(default_factory=GrammarMeter)

    def request(self, grammar: Grammar, tenant_id: str) -> ListCompilation:
        if self.is_full:
            raise QueueFullError("full", retry_after_s=1.0)
        sequences = [tuple(sequence) for sequence in json.loads(grammar.value)]
        compilation = ListCompilation(
            ListMatcher(sequences, self.vocab_size),
            is_done=self.is_open,
            error=self.errors.get(grammar.value),
        )
        self.compilations.append(compilation)
        return compilation

    def finish(self) -> None:
        for compilation in self.compilations:
            compilation.is_done = True


# ---------------------------------------------------------------------------- fifty schemas


def _object(properties: dict[str, Any], *, required: list[str] | None = None, **more: Any) -> Any:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
        **more,
    }


_TEXT = {"type": "string", "maxLength": 12}
_WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 999}


def _array(items: Any, most: int = 3, least: int = 0) -> Any:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


# Bounded, so that a random model reaches their end.
SCHEMAS: list[Any] = [
    _object({"name": _TEXT}),
    _object({"name": _TEXT, "age": _COUNT}),
    _object({"name": _TEXT, "tags": _array(_WORD)}),
    _object({"ok": {"type": "boolean"}}),
    _object({"none": {"type": "null"}}),
    _object({"kind": {"enum": ["cat", "dog", "bird"]}}),
    _object({"kind": {"const": "fixed"}, "n": _COUNT}),
    _object({"a": _WORD, "b": _WORD}, required=["a"]),
    _object({"a": _WORD, "b": _WORD, "c": _COUNT}, required=[]),
    _object({"point": _object({"x": _COUNT, "y": _COUNT})}),
    _object({"line": _array(_object({"x": _COUNT, "y": _COUNT}), 3, 1)}),
    _object({"date": {"type": "string", "format": "date"}}),
    _object({"time": {"type": "string", "format": "date-time"}}),
    _object({"id": {"type": "string", "format": "uuid"}}),
    _object({"ip": {"type": "string", "format": "ipv4"}}),
    _object({"code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}}),
    _object({"phone": {"type": "string", "pattern": "^\\+[0-9]{7,12}$"}}),
    _object({"level": {"type": "integer", "minimum": -5, "maximum": 5}}),
    _object({"ratio": {"type": "number", "minimum": 0, "maximum": 1}}),
    _object({"even": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 98}}),
    _object({"price": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 100}}),
    _object({"value": {"anyOf": [_COUNT, _WORD]}}),
    _object({"value": {"anyOf": [{"type": "null"}, _object({"inner": _WORD})]}}),
    _object({"value": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, _WORD]}}),
    _object({"value": {"type": ["integer", "null"], "minimum": 0, "maximum": 99}}),
    _object({"both": {"allOf": [{"type": "integer"}, {"minimum": 3, "maximum": 42}]}}),
    _object(
        {"pair": {"type": "array", "prefixItems": [_WORD, _COUNT], "items": False, "minItems": 2}}
    ),
    _object({"matrix": _array(_array(_COUNT, 3, 3), 2, 2)}),
    _object({"flags": _array({"type": "boolean"}, 5, 2)}),
    _object({"shade": {"enum": ["red", "green", "blue", 7, None, True]}}),
    {
        "type": "object",
        "patternProperties": {"^[a-z]{1,4}$": _COUNT},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    {
        "type": "object",
        "patternProperties": {"^k[0-9]$": _WORD},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    _array(_WORD, 4, 1),
    _array({"anyOf": [_COUNT, _WORD, {"type": "boolean"}]}, 4),
    {"type": "string", "maxLength": 16},
    {"type": "string", "minLength": 3, "maxLength": 6},
    _COUNT,
    {"type": "boolean"},
    {"enum": ["yes", "no", "perhaps"]},
    {"const": {"a": [1, 2, {"b": None}]}},
    _object({"first name": _WORD, "second-name": _WORD, "\u00fcmlaut": _WORD}),
    _object({'quote"d': _WORD, "back\\slash": _COUNT}),
    _object({"a": _object({"b": _object({"c": _object({"d": _COUNT})})})}),
    _object(
        {"user": {"$ref": "#/$defs/user"}},
        **{"$defs": {"user": _object({"id": _COUNT, "nick": _WORD})}},
    ),
    _object(
        {"left": {"$ref": "#/$defs/n"}, "right": {"$ref": "#/$defs/n"}}, **{"$defs": {"n": _COUNT}}
    ),
    {
        "$defs": {
            "tree": _object(
                {
                    "value": _COUNT,
                    "children": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/tree"}},
                }
            )
        },
        "$ref": "#/$defs/tree",
    },
    _object({"email": {"type": "string", "pattern": "^[a-z]{1,6}@[a-z]{1,6}\\.(com|org)$"}}),
    _object(
        {
            "version": {"type": "string", "pattern": "^[0-9]{1,2}\\.[0-9]{1,2}$"},
            "stable": {"type": "boolean"},
        }
    ),
    _object(
        {"title": _TEXT, "description": _TEXT, "steps": _array(_TEXT, 2)},
        title="Recipe",
        description="annotations are ignored",
    ),
    _object(
        {
            "city": {"type": "string", "maxLength": 10},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
        },
        required=["city"],
    ),
]
assert len(SCHEMAS) == 50
