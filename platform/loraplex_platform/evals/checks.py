"""What an answer must be: every check as data, and its verdict as a pure function over evidence.

| status | meaning |
|---|---|
| pass, fail | the answer was looked at, and is or is not what the check wants |
| error | it could not be looked at: a judge that says no score, a reference that nobody scored |

A case passes if all its checks do; it fails if one fails, and is an error if none fails and one is.

Regular expressions are RE2's (google-re2): matching takes time linear in the text whatever the pattern,
so back references and lookarounds are refused. JSON Schema is checked by jsonschema-rs with its linear
regex engine too, and `$ref` never leaves the schema. Whatever needs a model's word (a judge's reply, a
baseline's answer, log-probabilities of a reference) is evidence that the runner gathers first.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import jsonschema_rs
import re2
from pydantic import ConfigDict, Field, StrictBool, field_validator, model_validator

from loraplex_platform.control.schemas import Body

Status = Literal["pass", "fail", "error"]
CaseStatus = Literal["pass", "fail", "error", "timeout"]

MAX_VALUE_CHARS: Final = 32_768
MAX_PATTERN_CHARS: Final = 2_000
MAX_SCHEMA_CHARS: Final = 32_768
RE2_MEMORY_BYTES: Final = 8 << 20
_SHOWN_CHARS: Final = 120

# A number as people and programs write it: sign, groups of three or none, fraction, exponent.
_NUMBER: Final = re.compile(
    r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:(?<=\d)\.\d*|\.\d+)?(?:[eE][-+]?\d+)?"
)
_PLACE: Final = re.compile(r"{{(question|answer|baseline|reference)}}")

DEFAULT_JUDGE_TEMPLATE: Final = (
    "You judge answers. Question:\n{{question}}\n\nAnswer:\n{{answer}}\n\nReference:\n{{reference}}\n\n"
    "Write one line, `Score: N`, where N is a whole number from 1 (wrong) to 10 (perfect)."
)
DEFAULT_PAIR_TEMPLATE: Final = (
    "You compare two answers. Question:\n{{question}}\n\nAnswer A:\n{{answer}}\n\nAnswer B:\n"
    "{{baseline}}\n\nWrite one line: `Better: A`, `Better: B` or `Better: tie`."
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one check, with the reason in words."""

    status: Status
    reason: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that checks may look at. What is gathered per check is by the check's place in the case.

    Attributes:
        output: the answer's text.
        baseline_output: the baseline revision's, or None where nobody asked it.
        replies: what judges said; an exception's words where one could not be asked.
        reference_logprobs: of each token of the reference under the revision, in nats.
        baseline_logprobs: of the same tokens under the baseline.
    """

    output: str
    baseline_output: str | None = None
    replies: Mapping[int, Reply] = field(default_factory=dict)
    reference_logprobs: Mapping[int, Sequence[float] | Unknown] = field(default_factory=dict)
    baseline_logprobs: Mapping[int, Sequence[float] | Unknown] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unknown:
    """What should be evidence and could not be had, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A judge's texts: one of a score; of a pair two, the second with the answers in the other order."""

    texts: tuple[str, ...] = ()
    failure: str | None = None


# ---------------------------------------------------------------------------- texts


class ExactCheck(Body):
    """The whole answer, apart from white space around it unless `strip` is false."""

    type: Literal["exact"]
    value: str = Field(max_length=MAX_VALUE_CHARS)
    strip: StrictBool = True
    ignore_case: StrictBool = False

    def judge(self, evidence: Evidence, index: int) -> Verdict:
        """Compare."""
        del index
        wanted, found = self.value, evidence.output
        if self.strip:
            wanted, found = wanted.strip(), found.strip()
        if self.ignore_case:
            wanted, found = wanted.casefold(), found.casefold()
        if wanted == found:
            return Verdict("pass", "the answer is exactly as wanted")
        return Verdict("fail", f"wanted {_shown(self.value)}, got {_shown(evidence.output)}")


class ContainsCheck(Body):
    """A piece of text that must, or must not, be in the answer."""

    type: Literal["contains", "not_contains"]
    value: str = Field(min_length=1, max_length=MAX_VALUE_CHARS)
    ignore_case: StrictBool = False

    def judge(self, evidence: Evidence, index: int) -> Verdict:
        """Search."""
        del index
        wanted, text = self.value, evidence.output
        if self.ignore_case:
            wanted, text = wanted.casefold(), text.casefold()
        is_found = wanted in text
        reason = f"{_shown(self.value)} is {'' if is_found else 'not '}in the answer"
        return Verdict("pass" if is_found == (self.type == "contains") else "fail", reason)


class RegexCheck(Body):
    """A regular expression (RE2) that matches somewhere, or with `full` the whole answer."""

    type: Literal["regex"]
    pattern: str = Field(min_length=1, max_length=MAX_PATTERN_CHARS)
    full: StrictBool = False

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        _compile(pattern)
        return pattern

    def judge(self, evidence: Evidence, index: int) -> Verdict:
        """Match."""
        del index
        compiled = _compile(self.pattern)
        find = compiled.fullmatch if self.full else compiled.search
        if find(evidence.output) is not None:
            return Verdict("pass", "the pattern matches")
        where = "the whole answer" if self.full else "anywhere in the answer"
        return Verdict("fail", f"{_shown(self.pattern)} does not match {where}")


class JsonSchemaCheck(Body):
    """The answer is one JSON document (white space around it apart) that the schema accepts."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    type: Literal["json_schema"]
    wanted: dict[str, Any] | bool = Field(alias="schema")

    @field_validator("wanted")
    @classmethod
    def _is_schema(cls, schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
        if len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
            raise ValueError(f"at most {MAX_SCHEMA_CHARS} characters of JSON: shorten it.")
        _validator(schema)
        return schema

    def judge(self, evidence: Evidence, index: int) -> Verdict:
        """Parse and validate."""
        del index
        try:
            document = json.loads(evidence.output)
        except (ValueError, RecursionError):
            return Verdict("fail", f"not JSON: {_shown(evidence.output)}")
        for error in _validator(self.wanted).iter_errors(document):
            place = "/".join(map(str, error.instance_path)) or "the document"
            return Verdict("fail", f"{place}: {_shown(error.message)}")
        return Verdict("pass", "the schema accepts it")


class NumberCheck(Body):
    """A number in the answer, within `absolute` or `relative` (of `value`) of what is wanted.

    `where`: `last` (default) or `first` number written in the text, or `whole`: the text is the number.
    Groups of three digits may be set off by commas.
    """

    type: Literal["number"]
    value: float = Field(allow_inf_nan=False)
    absolute: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    relative: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    where: Literal["first", "last", "whole"] = "last"

    def judge(self, evidence: Evidence, index: int) -> Verdict:
        """Find the number and compare."""
        del index
        found = _number_in(evidence.output, self.where)
        if found is None:
            return Verdict("fail", f"no number ({self.where}) in {_shown(evidence.output)}")
        tolerance = max(self.absolute, self.relative * abs(self.value))
        is_near = abs(found - self.value) <= tolerance
        reason = f"{found:g} against {self.value:g}, tolerated {tolerance:g}"
        return Verdict("pass" if is_near else "fail", reason)


# ---------------------------------------------------------------------------- against models


class ReferenceCheck(Body):
    """Mean log-probability per token (nats) of a reference answer under the revision.

    At least `min_mean_logprob`, and at most `max_drop` below the baseline revision's, whichever are given.
    """

    type: Literal["reference_log_likelihood"]
    reference: str = Field(min_length=1, max_length=MAX_VALUE_CHARS)
    min_mean_logprob: float | None = Field(default=None, le=0, allow_inf_nan=False)
    max_drop: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _says_what(self) -> ReferenceCheck:
        if self.min_mean_logprob is None and self.max_drop is None:
            raise ValueError("give min_mean_logprob, or max_drop against the baseline, or both.")
        return self

    def judge(self, evidence: Evidence, index: int) -> Verdict:
        """Compare means."""
        own = _mean_of(evidence.reference_logprobs.get(index, Unknown("nobody scored it")))
        if isinstance(own, Unknown):
            return Verdict("error", f"the reference has no log-likelihood: {own.reason}")
        if self.min_mean_logprob is not None and own < self.min_mean_logprob:
            reason = f"mean log-probability {own:.4f}, wanted {self.min_mean_logprob:.4f} or more"
            return Verdict("fail", reason)
        if self.max_drop is None:
            return Verdict("pass", f"mean log-probability {own:.4f}")
        base = _mean_of(evidence.baseline_logprobs.get(index, Unknown("nobody scored it")))
        if isinstance(base, Unknown):
            return Verdict("error", f"no log-likelihood under the baseline: {base.reason}")
        reason = f"mean log-probability {own:.4f}, baseline {base:.4f}, tolerated {self.max_drop:g}"
        return Verdict("pass" if own >= base - self.max_drop else "fail", reason)


class Judge(Body):
    """A model that is asked about an answer, through the same engines as everything else.

    In `template`, {{question}}, {{answer}}, {{baseline}} and {{reference}} stand for what they name; what
    is put there is text and is not looked at again.
    """

    model: str = Field(min_length=1, max_length=128)
    template: str | None = Field(default=None, min_length=1, max_length=MAX_VALUE_CHARS)
    reference: str = Field(default="", max_length=MAX_VALUE_CHARS)
    max_tokens: int = Field(default=64, ge=1, le=1024)


class JudgeCheck(Body):
    """A judge's score: the first group of `score_pattern` (RE2) in its reply, `min_score` or more."""

    type: Literal["judge"]
    judge_model: Judge = Field(alias="judge")
    score_pattern: str = Field(
        default=r"(?i)score\s*[:=]\s*([0-9]+(?:\.[0-9]+)?)", max_length=MAX_PATTERN_CHARS
    )
    min_score: float = Field(allow_inf_nan=False)

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    @field_validator("score_pattern")
    @classmethod
    def _has_group(cls, pattern: str) -> str:
        if _compile(pattern).groups < 1:
            raise ValueError("it needs a group, (...), around the score.")
        return pattern

    def judge(self, evidence: Evidence, index: int) -> Verdict:
        """Read the score."""
        reply = evidence.replies.get(index, Reply(failure="the judge was not asked"))
        if reply.failure is not None:
            return Verdict("error", f"judge: {reply.failure}")
        match = _compile(self.score_pattern).search(reply.texts[0])
        score = None if match is None else _float_of(match.group(1))
        if score is None:
            return Verdict("error", f"judge: no score in {_shown(reply.texts[0])}")
        reason = f"the judge's score is {score:g}, wanted {self.min_score:g} or more"
        return Verdict("pass" if score >= self.min_score else "fail", reason)


class PairwiseCheck(Body):
    """Against the baseline revision's answer: the same text, or one that a judge does not find worse.

    A judge is asked twice, with the answers in both orders; if it contradicts itself, that is a tie.
    """

    type: Literal["pairwise"]
    by: Literal["same_output", "judge"] = "same_output"
    judge_model: Judge | None = Field(default=None, alias="judge")
    tie_passes: StrictBool = True

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    @model_validator(mode="after")
    def _has_judge(self) -> PairwiseCheck:
        if (self.by == "judge") != (self.judge_model is not None):
            raise ValueError("`judge` names the model exactly where `by` is judge.")
        return self

    def judge(self, evidence: Evidence, index: int) -> Verdict:
        """Compare, or read the judge's two replies."""
        if evidence.baseline_output is None:
            return Verdict("error", "the baseline has no answer")
        if self.by == "same_output":
            if evidence.output == evidence.baseline_output:
                return Verdict("pass", "the baseline answers the same")
            return Verdict("fail", _difference(evidence.output, evidence.baseline_output))
        reply = evidence.replies.get(index, Reply(failure="the judge was not asked"))
        if reply.failure is not None:
            return Verdict("error", f"judge: {reply.failure}")
        votes = [_vote(text) for text in reply.texts]
        if None in votes or len(votes) != 2:
            return Verdict("error", f"judge: no verdict in {_shown(' | '.join(reply.texts))}")
        # The second time the answers were swapped.
        other_order = {"A": "B", "B": "A", "TIE": "TIE"}[str(votes[1])]
        verdict = votes[0] if votes[0] == other_order else "TIE"
        if verdict == "TIE":
            reason = "the judge finds neither better"
            return Verdict("pass" if self.tie_passes else "fail", reason)
        is_better = verdict == "A"
        reason = (
            f"the judge prefers {'this answer' if is_better else 'the baseline'}, both ways round"
        )
        return Verdict("pass" if is_better else "fail", reason)


Check = Annotated[
    ExactCheck
    | ContainsCheck
    | RegexCheck
    | JsonSchemaCheck
    | NumberCheck
    | ReferenceCheck
    | JudgeCheck
    | PairwiseCheck,
    Field(discriminator="type"),
]


def needs_baseline(check: Check) -> bool:
    """Whether there must be a baseline revision to run it."""
    if isinstance(check, ReferenceCheck):
        return check.max_drop is not None
    return isinstance(check, PairwiseCheck)


def fill(template: str, values: Mapping[str, str]) -> str:
    """A judge's template with its places filled, in one pass: an answer cannot open another place."""
    return _PLACE.sub(lambda match: values[match[1]], template)


def decide(verdicts: Sequence[Verdict]) -> Verdict:
    """Of a case, from its checks: the first that fails, else the first error, else a pass."""
    for status in ("fail", "error"):
        found = next((verdict for verdict in verdicts if verdict.status == status), None)
        if found is not None:
            return found
    return Verdict("pass", "all checks pass")


# ---------------------------------------------------------------------------- insides


def _compile(pattern: str) -> Any:  # noqa: ANN401 (re2 has no types)
    options = re2.Options()
    options.max_mem = RE2_MEMORY_BYTES
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        said = error.args[0] if error.args else "it does not compile"
        said = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
        raise ValueError(
            f"not a regular expression that can be matched in linear time ({said}); RE2 knows no back "
            "references and no lookarounds."
        ) from None


def _no_retrieval(uri: str) -> dict[str, Any]:
    raise ValueError(f"$ref: {uri} lies outside the schema; put it in $defs.")


def _validator(schema: dict[str, Any] | bool) -> Any:  # noqa: ANN401 (one class a draft)
    try:
        return jsonschema_rs.validator_for(
            schema, retriever=_no_retrieval, pattern_options=jsonschema_rs.RegexOptions()
        )
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise ValueError(f"not a JSON Schema: {_shown(str(error).partition(chr(10))[0])}") from None


def _number_in(text: str, where: Literal["first", "last", "whole"]) -> float | None:
    if where == "whole":
        match = _NUMBER.fullmatch(text.strip())
        return None if match is None else _float_of(match[0].replace(",", ""))
    found = [
        number
        for match in _NUMBER.finditer(text)
        if (number := _float_of(match[0].replace(",", ""))) is not None
    ]
    if not found:
        return None
    return found[0] if where == "first" else found[-1]


def _float_of(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _mean_of(logprobs: Sequence[float] | Unknown) -> float | Unknown:
    if isinstance(logprobs, Unknown):
        return logprobs
    if not logprobs:
        return Unknown("it has no tokens")
    if not all(map(math.isfinite, logprobs)):
        return Unknown("a token's log-probability is not finite")
    return math.fsum(logprobs) / len(logprobs)


def _vote(text: str) -> str | None:
    match = re.search(r"better\s*[:=]\s*(A|B|tie)\b", text, re.IGNORECASE)
    return None if match is None else match[1].upper()


def _difference(ours: str, theirs: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    start = max(0, at - 20)
    return (
        f"differs from the baseline at character {at}: {_shown(ours[start:])} against "
        f"{_shown(theirs[start:])}"
    )


def _shown(text: str) -> str:
    """Quoted, escaped and short, so that a reason is one line whatever the model wrote."""
    cut = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
    return ascii(cut) if any(not char.isprintable() for char in cut) else repr(cut)
