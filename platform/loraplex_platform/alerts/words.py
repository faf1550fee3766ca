"""What an alert says: in words, how bad it is, and which things it is about.

Payloads are what webhooks are told. An address is not repeated here: whoever may read alerts need not be
allowed to read webhooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal
from uuid import UUID

from loraplex_platform.ids import MalformedIdError, format_id, parse_id
from loraplex_platform.quotas import words

Severity = Literal["warning", "error"]
AlertKind = Literal[
    "limit_threshold",
    "pin_expiring",
    "pin_expired",
    "eval_changed",
    "rollout_hold",
    "rollout_aborted",
    "webhook_failed",
]

_FULL_PCT: Final = 100
# What a payload calls an id, and of what kind it is.
_SUBJECTS: Final = (
    ("limit_id", "limit"),
    ("deployment_id", "deployment"),
    ("pinned_revision_id", "deployment_revision"),
    ("revision_id", "deployment_revision"),
    ("run_id", "eval_run"),
    ("before_run_id", "eval_run"),
    ("rollout_id", "rollout"),
    ("webhook_id", "webhook"),
)
# What a payload that is not as it should be comes to: the database keeps whatever it was told.
_ODD: Final = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError)
_ERRORS: Final = frozenset({"pin_expired", "eval_changed", "rollout_aborted", "webhook_failed"})


def severity_of(kind: str, payload: Mapping[str, Any]) -> Severity:
    """`error`: something is refused, wrong or over; `warning`: it will be, if nobody looks."""
    if kind == "limit_threshold":
        try:
            is_over = int(payload.get("pct", 0)) >= _FULL_PCT and bool(payload.get("is_hard"))
        except _ODD:
            is_over = True  # nobody can tell: rather look
        return "error" if is_over else "warning"
    return "error" if kind in _ERRORS else "warning"


def subjects_of(payload: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Kind and public id of what it is about, in the order of importance."""
    found = []
    for name, kind in _SUBJECTS:
        id_ = _public_id(kind, payload.get(name))
        if id_ is not None:
            found.append((kind, id_))
    return found


def _public_id(kind: str, text: object) -> str | None:
    """As the API writes it; payloads have plain UUIDs, and of rollouts public ids."""
    if not isinstance(text, str):
        return None
    try:
        return format_id(kind, UUID(text))
    except ValueError:
        pass
    try:
        return format_id(kind, parse_id(kind, text))
    except MalformedIdError:
        return None


def summary_of(kind: str, payload: Mapping[str, Any], zone: str) -> str:
    """One or two sentences. `zone`: of the times in them."""
    say = _SENTENCES.get(kind)
    name = kind.replace("_", " ")
    if say is None:
        return f"{name}."
    try:
        return say(payload, zone)
    except _ODD:
        # The list is of all alerts: one that is not as it should be must not take it away.
        return f"{name}: what it said is not as it should be and cannot be shown."


def _limit(payload: Mapping[str, Any], _zone: str) -> str:
    metric = payload["metric"]
    name = words.limit_name(metric, payload["period"], int(payload["window_s"]))
    used, value = (words.amount(metric, int(payload[part])) for part in ("used", "value"))
    refuses = payload["is_hard"] and int(payload["pct"]) >= _FULL_PCT
    then = " Requests over it are refused." if refuses else ""
    return (
        f"{payload['pct']} % of the limit on {name} of {words.scope_name(payload['scope_kind'])} is passed: "
        f"{used} of {value}.{then}"
    )


def _pin(payload: Mapping[str, Any], zone: str) -> str:
    until = words.moment(payload["until"], zone)
    name = payload["deployment"]
    if payload["kind"] == "pin_expired":
        return f"The pin of {name} ended {until}: its current revision answers now. It was made for: {payload['reason']}"
    return f"The pin of {name} ends {until}; its current revision answers then. It was made for: {payload['reason']}"


def _eval(payload: Mapping[str, Any], _zone: str) -> str:
    told = "; ".join(
        f"{change['kind'].replace('_', ' ')}: {change['count']} "
        f"({', '.join(map(str, change['cases']))})"
        for change in payload["changes"]
    )
    return f"A revision that did not change answers its eval differently than in the run before. {told}."


def _rollout(payload: Mapping[str, Any], _zone: str) -> str:
    what = "is held" if payload["kind"] == "rollout_hold" else "was aborted by its gates"
    return f"The rollout of {payload['deployment']} {what}: {payload['message']}"


def _webhook(payload: Mapping[str, Any], _zone: str) -> str:
    return f"A webhook was switched off, for its address did not take its messages: {payload['reason']}"


_SENTENCES: Final[Mapping[str, Callable[[Mapping[str, Any], str], str]]] = {
    "limit_threshold": _limit,
    "pin_expiring": _pin,
    "pin_expired": _pin,
    "eval_changed": _eval,
    "rollout_hold": _rollout,
    "rollout_aborted": _rollout,
    "webhook_failed": _webhook,
}
