from __future__ import annotations

import math
import time
from typing import Any

import pytest
from loraplex_platform.evals.checks import (
    Check,
    Evidence,
    Reply,
    Unknown,
    Verdict,
    decide,
    fill,
    needs_baseline,
)
from pydantic import TypeAdapter, ValidationError

_CHECK: TypeAdapter[Any] = TypeAdapter(Check)


def verdict(check: dict[str, Any], output: str = "", **evidence: Any) -> Verdict:
    return _CHECK.validate_python(check).judge(Evidence(output=output, **evidence), 0)


@pytest.mark.parametrize(
    ("check", "output", "status"),
    [
        ({"type": "exact", "value": "Paris"}, " Paris\n", "pass"),
        ({"type": "exact", "value": "Paris", "strip": False}, " Paris\n", "fail"),
        ({"type": "exact", "value": "STRASSE", "ignore_case": True}, "straße", "pass"),
        ({"type": "exact", "value": "Paris"}, "paris", "fail"),
        ({"type": "contains", "value": "Par"}, "In Paris.", "pass"),
        ({"type": "contains", "value": "par"}, "In Paris.", "fail"),
        ({"type": "not_contains", "value": "par", "ignore_case": True}, "In Paris.", "fail"),
        ({"type": "not_contains", "value": "Rome"}, "In Paris.", "pass"),
        ({"type": "regex", "pattern": r"\bP\w+s\b"}, "In Paris.", "pass"),
        ({"type": "regex", "pattern": r"P\w+s", "full": True}, "In Paris.", "fail"),
        ({"type": "regex", "pattern": r"^b$"}, "a\nb", "fail"),
        ({"type": "json_schema", "schema": {"required": ["a"]}}, ' {"a": 1} ', "pass"),
        ({"type": "json_schema", "schema": {"required": ["a"]}}, '{"b": 1}', "fail"),
        ({"type": "json_schema", "schema": True}, "no JSON", "fail"),
        ({"type": "json_schema", "schema": True}, "[" * 100_000, "fail"),
        ({"type": "number", "value": 3.14, "absolute": 0.01}, "about 3 or 3.141", "pass"),
        ({"type": "number", "value": 3, "where": "first"}, "about 3 or 3.141", "pass"),
        ({"type": "number", "value": 3, "where": "whole"}, "about 3", "fail"),
        ({"type": "number", "value": 1234.5, "where": "whole"}, " 1,234.50 ", "pass"),
        ({"type": "number", "value": -300, "relative": 0.01}, "It is -2.98e2.", "pass"),
        ({"type": "number", "value": 100, "relative": 0.01}, "102", "fail"),
        ({"type": "number", "value": 0}, "nothing", "fail"),
        ({"type": "number", "value": 1}, "1e999", "fail"),
    ],
)
def test_what_an_answer_must_be(check: dict[str, Any], output: str, status: str) -> None:
    found = verdict(check, output)

    assert found.status == status, found
    assert found.reason
    assert found.reason.isprintable()


@pytest.mark.parametrize(
    ("check", "said"),
    [
        ({"type": "regex", "pattern": r"(a)\1"}, "RE2 knows no back references"),
        ({"type": "regex", "pattern": r"(?=a)"}, "RE2 knows no back references"),
        ({"type": "regex", "pattern": "("}, "linear time"),
        ({"type": "json_schema", "schema": {"type": "nope"}}, "not a JSON Schema"),
        ({"type": "json_schema", "schema": {"$ref": "http://127.0.0.1:9/x"}}, "not a JSON Schema"),
        ({"type": "json_schema", "schema": {"pattern": "(?=a)"}}, "not a JSON Schema"),
        ({"type": "number", "value": math.nan}, "finite"),
        ({"type": "reference_log_likelihood", "reference": "x"}, "min_mean_logprob, or max_drop"),
        ({"type": "pairwise", "by": "judge"}, "names the model exactly"),
        ({"type": "pairwise", "judge": {"model": "m"}}, "names the model exactly"),
        (
            {"type": "judge", "judge": {"model": "m"}, "min_score": 1, "score_pattern": "a"},
            "it needs a group",
        ),
        ({"type": "exact", "value": "a", "extra": 1}, "Extra inputs"),
    ],
)
def test_what_cannot_be_checked_is_refused_when_it_is_written(
    check: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        _CHECK.validate_python(check)


@pytest.mark.parametrize(
    "check",
    [
        {"type": "regex", "pattern": "(a+)+$"},
        {"type": "regex", "pattern": "(a|a)*b$", "full": True},
        {"type": "json_schema", "schema": {"pattern": "^(a+)+$"}},
    ],
)
def test_no_pattern_takes_more_than_linear_time(check: dict[str, Any]) -> None:
    text = "a" * 30_000 + "!"
    began_s = time.process_time()

    found = verdict(check, text if check["type"] == "regex" else f'"{text}"')

    assert found.status == "fail"
    # Backtracking would not end before the sun does.
    assert time.process_time() - began_s < 2


def test_a_reference_is_compared_by_its_mean() -> None:
    check = {"type": "reference_log_likelihood", "reference": "x", "min_mean_logprob": -1.0}

    assert verdict(check, reference_logprobs={0: [-0.5, -1.5]}).status == "pass"
    assert verdict(check, reference_logprobs={0: [-0.5, -1.6]}).status == "fail"
    assert verdict(check).status == "error"
    assert verdict(check, reference_logprobs={0: []}).status == "error"
    assert verdict(check, reference_logprobs={0: [-math.inf]}).status == "error"
    unknown = verdict(check, reference_logprobs={0: Unknown("no engine can")})
    assert (unknown.status, "no engine can" in unknown.reason) == ("error", True)

    drop = {"type": "reference_log_likelihood", "reference": "x", "max_drop": 0.25}
    both = {"reference_logprobs": {0: [-1.25]}, "baseline_logprobs": {0: [-1.0]}}
    assert verdict(drop, **both).status == "pass"
    assert verdict(drop, **both | {"reference_logprobs": {0: [-1.3]}}).status == "fail"
    assert verdict(drop, reference_logprobs={0: [-1.25]}).status == "error"
    assert needs_baseline(_CHECK.validate_python(drop))
    assert not needs_baseline(_CHECK.validate_python(check))


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (Reply(("Score: 7",)), "pass"),
        (Reply(("score = 6.5 because",)), "fail"),
        (Reply(("I like it",)), "error"),
        (Reply(failure="no engine"), "error"),
    ],
)
def test_a_judge_that_says_no_score_is_an_error_and_no_fail(reply: Reply, status: str) -> None:
    check = {"type": "judge", "judge": {"model": "m"}, "min_score": 7}

    assert verdict(check, replies={0: reply}).status == status


@pytest.mark.parametrize(
    ("texts", "status"),
    [
        (("Better: A", "Better: B"), "pass"),
        (("Better: B", "Better: A"), "fail"),
        (("Better: A", "Better: A"), "pass"),  # it prefers a place, not an answer: a tie
        (("Better: tie", "Better: tie"), "pass"),
        (("Better: A", "who knows"), "error"),
    ],
)
def test_a_pair_is_judged_in_both_orders(texts: tuple[str, str], status: str) -> None:
    check = {"type": "pairwise", "by": "judge", "judge": {"model": "m"}}
    evidence = {"baseline_output": "b", "replies": {0: Reply(texts)}}

    assert verdict(check, "a", **evidence).status == status
    strict = check | {"tie_passes": False}
    if texts == ("Better: A", "Better: A"):
        assert verdict(strict, "a", **evidence).status == "fail"


def test_the_same_output_says_where_it_differs() -> None:
    check = {"type": "pairwise"}

    assert verdict(check, "same", baseline_output="same").status == "pass"
    found = verdict(check, "the cat", baseline_output="the dog")
    assert found.status == "fail"
    assert "character 4" in found.reason
    assert verdict(check, "x").status == "error"


def test_an_answer_opens_no_place_in_a_template() -> None:
    values = {"question": "q", "answer": "{{reference}}", "baseline": "", "reference": "secret"}

    assert fill("{{answer}}/{{question}}/{{other}}", values) == "{{reference}}/q/{{other}}"


def test_a_case_fails_before_it_is_an_error() -> None:
    good, bad, odd = Verdict("pass", ""), Verdict("fail", "f"), Verdict("error", "e")

    assert decide([good, odd, bad]) is bad
    assert decide([good, odd]) is odd
    assert decide([good]).status == "pass"


def test_a_reason_is_one_line_whatever_the_model_wrote() -> None:
    found = verdict({"type": "exact", "value": "a"}, "\0\n\x1b[2J\u202e" + "x" * 10_000)

    assert found.reason.isprintable()
    assert len(found.reason) < 400
