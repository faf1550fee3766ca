"""What a suite's version is: cases with checks, or a trace to replay, and what it takes to pass.

As JSONL, one case a line. Read here into models, written as canonical JSON (sorted keys, no spaces,
ASCII), whose SHA-256 is the version's identity: the same cases are the same version however they were
written. An error names the line, the field and the remedy. Nothing here knows of a database.

Limits: `MAX_CASES` cases, `MAX_LINE_BYTES` a line, `MAX_CONTENT_BYTES` a version.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from pydantic import Field, StrictBool, ValidationError, model_validator

from loraplex_platform.control.schemas import Body
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.evals.checks import Check, needs_baseline

MAX_CASES: Final = 2_000
MAX_TRACE_LINES: Final = 5_000
MAX_LINE_BYTES: Final = 128 * 1024
MAX_CONTENT_BYTES: Final = 900 * 1024  # the control API's bodies end at 1 MiB
MAX_CHECKS: Final = 16
MAX_DEPTH: Final = 64  # of a line's JSON
NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$"

# Characters that a database's text, or a reader's eye, cannot take: NUL and halves of pairs.
_UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")

Kind = Literal["checks", "performance"]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]


class CaseMessage(Body):
    """One turn."""

    role: Literal["system", "user", "assistant"]
    content: str = Field(max_length=MAX_LINE_BYTES)


class CaseParams(Body):
    """How the answer is drawn: greedy unless told otherwise."""

    max_tokens: int = Field(default=128, ge=1, le=4096)
    temperature: float = Field(default=0.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0, le=1_000_000)
    seed: int = Field(default=0, ge=0, lt=2**63)


class Case(Body):
    """A golden prompt and what its answer must be."""

    id: Name
    messages: list[CaseMessage] | None = Field(default=None, min_length=1, max_length=64)
    prompt: str | None = Field(default=None, min_length=1, max_length=MAX_LINE_BYTES)
    params: CaseParams = CaseParams()
    checks: list[Check] = Field(min_length=1, max_length=MAX_CHECKS)
    tags: list[Name] = Field(default_factory=list, max_length=32)
    weight: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False)
    required: StrictBool = False

    @model_validator(mode="after")
    def _asks_once(self) -> Case:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("give messages (a chat) or prompt (plain text), one of them.")
        return self

    @property
    def question(self) -> str:
        """What a judge is shown as the question."""
        if self.messages is None:
            return self.prompt or ""
        return "\n".join(f"{message.role}: {message.content}" for message in self.messages)

    @property
    def needs_baseline(self) -> bool:
        """Whether a check compares with a baseline."""
        return any(needs_baseline(check) for check in self.checks)


class TraceLine(Body):
    """A request as numbers: when it came, how long it was and which model it asked."""

    at_s: float = Field(
        ge=0, le=86_400, allow_inf_nan=False, description="After the trace's start."
    )
    prompt_tokens: int = Field(ge=1, le=1_000_000)
    completion_tokens: int = Field(ge=1, le=1_000_000)
    model: str | None = Field(
        default=None,
        max_length=128,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$",
        description="A deployment of the tenant's; null: the revision under test.",
    )


class PassThreshold(Body):
    """What a suite of checks takes to pass: a share of the weights, and all required cases."""

    share: float = Field(default=1.0, ge=0, le=1, allow_inf_nan=False)


class PerformanceThresholds(Body):
    """What a replay takes to pass; what is not named is measured only."""

    ttft_p95_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    itl_p95_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    output_tokens_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    abort_rate: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)


class ChecksContent(Body):
    """A version of a suite of checks."""

    kind: Literal["checks"] = "checks"
    threshold: PassThreshold = PassThreshold()
    cases: list[Case] = Field(min_length=1, max_length=MAX_CASES)


class PerformanceContent(Body):
    """A version of a performance suite. `pace` recorded: as it came; none: as fast as places are free."""

    kind: Literal["performance"] = "performance"
    thresholds: PerformanceThresholds = PerformanceThresholds()
    pace: Literal["recorded", "none"] = "recorded"
    trace: list[TraceLine] = Field(min_length=1, max_length=MAX_TRACE_LINES)


AnyContent = TypeVar("AnyContent", ChecksContent, PerformanceContent)
Content: TypeAlias = ChecksContent | PerformanceContent


class SuiteLineError(InvalidRequestError):
    """A line of a suite is wrong; the message names it, the field and the remedy."""

    code = "invalid_suite"


def parse_jsonl(text: str | bytes) -> list[Any]:
    """The lines of a file as JSON values; empty lines are left out and counted.

    Raises:
        SuiteLineError: not UTF-8, too long, or not JSON.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    values: list[Any] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            values.append(None)
            continue
        if len(line) > MAX_LINE_BYTES:
            raise _refusal(
                number, None, f"it has {len(line):,} bytes; at most {MAX_LINE_BYTES:,}: shorten it."
            )
        try:
            values.append(json.loads(line.decode("utf-8"), object_pairs_hook=_no_doubles))
        except UnicodeDecodeError:
            raise _refusal(number, None, "it is not UTF-8: save the file as UTF-8.") from None
        except _DoubledFieldError as error:
            raise _refusal(number, str(error), "it is there twice: keep one.") from None
        except (ValueError, RecursionError) as error:
            said = str(error) if isinstance(error, ValueError) else "nested too deeply"
            raise _refusal(number, None, f"not JSON ({said}): one object a line.") from None
    return values


def read_checks(lines: Sequence[Any], threshold: PassThreshold) -> ChecksContent:
    """A suite of checks from its lines, each a JSON value; null lines count and are left out.

    Raises:
        SuiteLineError: names the line, the field and the remedy.
    """
    cases: list[Case] = []
    line_of: dict[str, int] = {}
    for number, case in _each(lines, Case, MAX_CASES):
        if case.id in line_of:
            raise _refusal(
                number, "id", f"{case.id} is the id of line {line_of[case.id]} too: rename one."
            )
        line_of[case.id] = number
        cases.append(case)
    return _bounded(ChecksContent.model_construct(threshold=threshold, cases=cases))


def read_trace(
    lines: Sequence[Any], thresholds: PerformanceThresholds, pace: Literal["recorded", "none"]
) -> PerformanceContent:
    """A performance suite from its lines, in the order of their times.

    Raises:
        SuiteLineError: names the line, the field and the remedy.
    """
    trace = [line for _, line in _each(lines, TraceLine, MAX_TRACE_LINES)]
    trace.sort(key=lambda line: line.at_s)
    return _bounded(
        PerformanceContent.model_construct(thresholds=thresholds, pace=pace, trace=trace)
    )


def canonical(content: Content) -> str:
    """The one way to write a version."""
    document = content.model_dump(mode="json", by_alias=True)
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str) -> str:
    """SHA-256 of a version's canonical JSON, in hex."""
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def load(text: str) -> Content:
    """A version from its canonical JSON."""
    document = json.loads(text)
    if document["kind"] == "checks":
        return ChecksContent.model_validate(document)
    return PerformanceContent.model_validate(document)


def to_lines(content: Content) -> list[str]:
    """The version as lines that `read_checks` or `read_trace` makes the same version of."""
    rows: Sequence[Body] = content.cases if isinstance(content, ChecksContent) else content.trace
    return [
        json.dumps(
            row.model_dump(mode="json", by_alias=True, exclude_defaults=True), sort_keys=True
        )
        for row in rows
    ]


# ---------------------------------------------------------------------------- insides


class _DoubledFieldError(ValueError):
    pass


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _DoubledFieldError(name)
        found[name] = value
    return found


def _each(
    lines: Iterable[Any], model: type[Case] | type[TraceLine], most: int
) -> Iterable[tuple[int, Any]]:
    count = 0
    for number, value in enumerate(lines, start=1):
        if value is None:
            continue
        count += 1
        if count > most:
            raise _refusal(number, None, f"a suite has at most {most:,} lines: split it.")
        if not isinstance(value, dict):
            raise _refusal(number, None, "it must be a JSON object.")
        _check_storable(number, value)
        try:
            yield number, model.model_validate(value)
        except ValidationError as error:
            raise _explain(number, error) from None
    if count == 0:
        raise SuiteLineError(
            "lines: there is no case; write one JSON object a line.", param="lines"
        )


def _bounded(content: AnyContent) -> AnyContent:
    size = len(canonical(content))
    if size > MAX_CONTENT_BYTES:
        raise SuiteLineError(
            f"lines: together {size:,} bytes of JSON; at most {MAX_CONTENT_BYTES:,}: split the suite.",
            param="lines",
        )
    return content


def _check_storable(
    number: int,
    value: Any,  # noqa: ANN401 (any JSON)
    path: str = "",
    depth: int = 0,
) -> None:
    if depth > MAX_DEPTH:
        raise _refusal(number, None, f"it is nested deeper than {MAX_DEPTH}: flatten it.")
    if isinstance(value, str):
        bad = _UNSTORABLE.search(value)
        if bad is not None:
            raise _refusal(
                number, path, f"it holds U+{ord(bad[0]):04X}, which cannot be stored: take it out."
            )
    elif isinstance(value, float) and not math.isfinite(value):
        raise _refusal(number, path, "it is not a finite number.")
    elif isinstance(value, dict):
        for name, item in value.items():
            inner = f"{path}.{ascii(name)[1:-1]}".lstrip(".")
            _check_storable(number, name, inner, depth + 1)
            _check_storable(number, item, inner, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_storable(number, item, f"{path}[{index}]", depth + 1)


def _explain(number: int, error: ValidationError) -> SuiteLineError:
    first = error.errors(include_url=False, include_input=False)[0]
    path = ""
    for part in first["loc"]:
        # Between a list's index and its field stands which kind of check it is: not a field.
        if isinstance(part, int):
            path += f"[{part}]"
        elif not (path.endswith("]") and "checks[" in path and part in _CHECK_TYPES):
            path = f"{path}.{part}".lstrip(".")
    remedy = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        remedy = "there is no such field: take it out, or see the documentation for its name."
    elif first["type"] == "missing":
        remedy = "it is required: add it."
    return _refusal(number, path or None, remedy)


_CHECK_TYPES: Final = frozenset(
    (
        "exact",
        "contains",
        "not_contains",
        "regex",
        "json_schema",
        "number",
        "reference_log_likelihood",
        "judge",
        "pairwise",
    )
)


def _refusal(number: int, field: str | None, remedy: str) -> SuiteLineError:
    where = f"line {number}" if field is None else f"line {number}: {field}"
    return SuiteLineError(f"{where}: {remedy}", param=f"lines[{number - 1}]")
