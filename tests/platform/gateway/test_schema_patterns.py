"""Patterns in schemas: judged as the engine's compiler judges them, in time linear in their length."""

from __future__ import annotations

import json
import random
import string
from functools import partial
from typing import Any

import pytest
from loraplex_engine.protocol import Grammar
from loraplex_engine.structured.errors import GrammarError
from loraplex_engine.structured.tokenizer import native_matcher, open_tokenizer
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.gateway.schema_check import check_schema
from loraplex_platform.gateway.schema_patterns import MAX_REGEX_CHARS, fault_of

from tests.support.cpu_time import least_s
from tests.support.grammars import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def compiles(tokenizer: Any, pattern: str) -> bool:
    schema = json.dumps({"type": "string", "pattern": pattern})
    try:
        native_matcher(tokenizer, Grammar(kind="json_schema", value=schema))
    except GrammarError:
        return False
    return True


# Each is repeated to a pattern of many thousand characters.
_HOSTILE = (
    "[",
    "[\\",
    "\\[",
    "[\\\\",
    "[^",
    "[]",
    "[a",
    "[a[",
    "[a[b]",
    "[[b]",
    "[[b\\",
    "{",
    "{ ",
    "{1",
    "{1,",
    "{0",
    "a{1,2}{",
    "\\p{",
    "\\p{a",
    "(",
    "(?",
    "(?a",
    "(?i",
    "(?<",
    "()",
    "(|",
    "|",
    "\\",
    "*",
    " ",
)


@pytest.mark.parametrize("is_end_open", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("part", _HOSTILE)
def test_a_hostile_pattern_takes_time_linear_in_its_length(
    part: str, is_end_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Beyond what is let in, so that what is quadratic shows: 8,000 characters once took 2.3 s.
    monkeypatch.setattr("loraplex_platform.gateway.schema_patterns.MAX_REGEX_CHARS", 10**9)
    end = "" if is_end_open else "a]})"
    short, long = (part * (length // len(part)) + end for length in (10_000, 20_000))

    assert least_s(partial(fault_of, long)) < 3 * least_s(partial(fault_of, short)) + 0.02


@pytest.mark.parametrize("keyword", ["pattern", "patternProperties"])
def test_a_pattern_has_a_greatest_length(keyword: str) -> None:
    longest = "a" * MAX_REGEX_CHARS
    for pattern, is_fine in ((longest, True), (longest + "a", False)):
        schema = {keyword: pattern if keyword == "pattern" else {pattern: {}}}
        if is_fine:
            check_schema(schema, "schema")
            continue
        with pytest.raises(InvalidRequestError, match=str(MAX_REGEX_CHARS)) as refusal:
            check_schema(schema, "schema")
        assert refusal.value.param == f"schema.{keyword}"


@pytest.mark.parametrize(
    "pattern",
    [
        *("a{3", "a{", "{", "a{3,", "a{,3}", "a{3,2}", "a{x}", "a{-1}", "{3}", "({3})", "|{3}"),
        *("*", "+a", "?", "a|*", "(*)", "a|?", "(", "a)", "[a", "[^]", "[[:alpha:", "[]"),
        *("a{99999999999999999999}", "a{" + "9" * 5000 + "}", "a{4294967296}", "a{1,4294967296}"),
        *(r"\q", r"\cA", r"\e", r"\Z", r"\b", r"\B", r"\0", r"\1", r"(?=a)", r"(?<!a)b", r"\<"),
        "[[:alpha:]](?=b)",
    ],
)
def test_what_the_engine_refuses_is_refused_before_it(pattern: str, tokenizer: Any) -> None:
    assert fault_of(pattern) is not None
    assert not compiles(tokenizer, pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        *("a{3}", "a{ 3 , 5 }", "a{3,}", "a{007}", "a}", "}", "a{3}{4}", "a**", "(?:)", "(?i:a)"),
        *(r"\{", "[{]", "[a{3]", r"\p{L}{2}", r"\u{41}+", r"\x{41}", "(?x)a # (\n", "[[:alpha:]{]"),
        *("a|b{2}", "(a){2}", "[]{]", "[^]{]"),
    ],
)
def test_what_the_engine_follows_is_let_through(pattern: str, tokenizer: Any) -> None:
    assert fault_of(pattern) is None
    assert compiles(tokenizer, pattern)


def test_escapes_are_those_of_the_engine(tokenizer: Any) -> None:
    # These need more behind them, which the engine alone looks at.
    for character in set(string.printable) - set("pPxuU"):
        pattern = f"\\{character}"
        assert (fault_of(pattern) is None) == compiles(tokenizer, pattern), pattern


def test_no_pattern_is_refused_that_the_engine_follows(tokenizer: Any) -> None:
    draw = random.Random(7)
    parts = [
        *"[](){}|*+?\\^$-,01ab&:<=!~ ",
        "(?",
        "[^",
        "[[:alpha:]]",
        "{2,3}",
        r"\p{L}",
        "(?:",
        "]",
    ]
    num_refused = 0
    for _ in range(2000):
        pattern = "".join(draw.choices(parts, k=draw.randint(1, 8)))
        if fault_of(pattern) is not None:
            num_refused += 1
            assert not compiles(tokenizer, pattern), pattern
    assert num_refused > 500
