from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_platform.evals import suites
from loraplex_platform.evals.suites import (
    MAX_CASES,
    MAX_LINE_BYTES,
    PassThreshold,
    PerformanceThresholds,
    SuiteLineError,
    canonical,
    digest,
    load,
    parse_jsonl,
    read_checks,
    read_trace,
    to_lines,
)

CASE: dict[str, Any] = {
    "id": "france",
    "messages": [{"role": "user", "content": "Capital of France?"}],
    "checks": [{"type": "contains", "value": "Paris"}],
}


DEEP: dict[str, Any] = {}
for _ in range(500):
    DEEP = {"properties": {"a": DEEP}}


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in CASE.items() if name != field}


def test_the_same_cases_are_the_same_version_however_they_are_written() -> None:
    spelled_out = {
        **dict(reversed(CASE.items())),
        "weight": 1,
        "required": False,
        "params": {"max_tokens": 128},
    }

    first = canonical(read_checks([CASE], PassThreshold()))
    second = canonical(read_checks([None, spelled_out], PassThreshold(share=1)))

    assert first == second
    assert digest(first) == digest(second)
    assert first.isascii()


def test_an_export_makes_the_same_version() -> None:
    cases = [
        CASE,
        {
            "id": "all",
            "prompt": "p ü",
            "params": {"max_tokens": 4, "temperature": 0.5, "seed": 7},
            "tags": ["a"],
            "weight": 2.5,
            "required": True,
            "checks": [
                {"type": "exact", "value": " a ", "strip": False},
                {"type": "regex", "pattern": "a+"},
                {"type": "json_schema", "schema": {"type": "object"}},
                {"type": "number", "value": 3, "relative": 0.1, "where": "first"},
                {"type": "reference_log_likelihood", "reference": "r", "max_drop": 0.5},
                {"type": "judge", "judge": {"model": "m"}, "min_score": 5},
                {"type": "pairwise", "by": "judge", "judge": {"model": "m"}},
            ],
        },
    ]
    content = read_checks(cases, PassThreshold(share=0.5))

    again = read_checks(parse_jsonl("\n".join(to_lines(content))), PassThreshold(share=0.5))

    assert canonical(again) == canonical(content) == canonical(load(canonical(content)))


def test_a_trace_is_sorted_and_comes_back() -> None:
    lines = [
        {"at_s": 2.5, "prompt_tokens": 3, "completion_tokens": 4, "model": "m"},
        {"at_s": 0, "prompt_tokens": 1, "completion_tokens": 2},
    ]

    content = read_trace(lines, PerformanceThresholds(abort_rate=0.1), "none")

    assert [line.at_s for line in content.trace] == [0, 2.5]
    assert load(canonical(content)) == content


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([CASE, None, {**CASE}], "line 3: id: france is the id of line 1 too"),
        ([{**CASE, "id": "a\u202eb"}], "line 1: id:"),
        ([{**CASE, "id": "a\0"}], r"line 1: id: it holds U\+0000"),
        ([{**CASE, "tags": ["\ud800"]}], r"line 1: tags\[0\]: it holds U\+D800"),
        ([{**CASE, "extra": 1}], "line 1: extra: there is no such field"),
        ([without("id")], "line 1: id: it is required: add it"),
        ([without("messages")], "line 1: give messages .* or prompt"),
        ([{**CASE, "prompt": "p"}], "line 1: give messages .* or prompt"),
        ([{**CASE, "checks": []}], "line 1: checks:"),
        ([{**CASE, "checks": [{"type": "regex", "pattern": "("}]}], r"line 1: checks\[0\].pattern"),
        ([{**CASE, "checks": [{"type": "nope"}]}], r"line 1: checks\[0\]: .*expected tags"),
        ([{**CASE, "weight": float("nan")}], "line 1: weight: it is not a finite number"),
        ([{**CASE, "weight": 0}], "line 1: weight:"),
        ([{**CASE, "params": {"max_tokens": 0}}], "line 1: params.max_tokens"),
        (
            [{**CASE, "checks": [{"type": "json_schema", "schema": DEEP}]}],
            "line 1: .*nested deeper",
        ),
        (["text"], "line 1: it must be a JSON object"),
        ([None], "there is no case"),
        ([{**CASE, "id": str(i)} for i in range(MAX_CASES + 1)], "line 2001: .*split it"),
    ],
)
def test_an_error_names_line_field_and_remedy(lines: list[Any], said: str) -> None:
    with pytest.raises(SuiteLineError, match=said) as caught:
        read_checks(lines, PassThreshold())

    assert caught.value.param is not None
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"id": 1}\n{"id"', "line 2: not JSON"),
        (b'{"id": 1, "id": 2}', "line 1: id: it is there twice"),
        (b'\xff{"id": 1}', "line 1: it is not UTF-8"),
        (b'"' + b"x" * MAX_LINE_BYTES + b'"', "line 1: it has .* bytes"),
        (b"[" * 50_000, "line 1: not JSON"),
    ],
)
def test_a_file_that_is_none_names_the_line(text: bytes, said: str) -> None:
    with pytest.raises(SuiteLineError, match=said):
        parse_jsonl(text)


def test_empty_lines_are_counted_and_left_out() -> None:
    lines = parse_jsonl("\r\n" + json.dumps(CASE) + "\r\n\n" + json.dumps({**CASE, "id": "\0"}))

    with pytest.raises(SuiteLineError, match="line 4: id"):
        read_checks(lines, PassThreshold())


def test_a_version_has_an_end() -> None:
    case = {**CASE, "messages": [{"role": "user", "content": "x" * 60_000}]}

    with pytest.raises(SuiteLineError, match="split the suite"):
        read_checks([{**case, "id": str(i)} for i in range(20)], PassThreshold())


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        _JSON
        | st.builds(
            lambda extra: CASE | extra,
            st.dictionaries(
                st.sampled_from(["id", "checks", "params", "tags", "weight", "prompt", "messages"]),
                _JSON,
            ),
        ),
        max_size=3,
    )
)
def test_no_line_makes_anything_but_a_version_or_a_clear_error(lines: list[Any]) -> None:
    try:
        content = read_checks(lines, PassThreshold())
    except SuiteLineError:
        return
    assert suites.digest(canonical(content)) == digest(canonical(load(canonical(content))))
