"""Retention on the wire."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StrictInt

from loraplex_platform.control.schemas import Body, Resource
from loraplex_platform.retention.service import Due, RuleName


class RuleChange(Body):
    """How long to keep something."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"keep_days": 90}]})

    keep_days: Annotated[StrictInt, Field(ge=0, le=36_500)] | None = Field(
        description="Days; null: for ever. Each rule has a least, which its answer names."
    )


class RetentionRule(Resource):
    """How long something is kept, and what is due now."""

    object: Literal["retention_rule"] = "retention_rule"
    id: RuleName
    keep_days: int | None = Field(description="null: for ever.")
    least_days: int
    rows_due: int = Field(description="Rows that would be deleted now.")
    months_due: list[str] = Field(description="Of requests: the months that would be dropped.")
    blocked: list[str] = Field(description="Of requests: months that may not go yet, and why.")


class RetentionRules(Resource):
    """All rules; there are few, so this is one page."""

    object: Literal["list"] = "list"
    data: list[RetentionRule]
    has_more: Literal[False] = False


class RetentionRun(Resource):
    """What was deleted: rows by rule, and of requests whole months."""

    object: Literal["retention_run"] = "retention_run"
    deleted: dict[str, int]


def show_rule(due: Due) -> RetentionRule:
    """The rule as the API shows it."""
    return RetentionRule(
        id=due.name,
        keep_days=due.keep_days,
        least_days=due.least_days,
        rows_due=due.rows,
        months_due=list(due.months),
        blocked=list(due.blocked),
    )
