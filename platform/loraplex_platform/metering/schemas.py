"""Usage, the request log and the invariants on the wire."""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec
from pydantic import BaseModel as Schema
from pydantic import ConfigDict, Field

from loraplex_platform.billing.money import CURRENCY, format_usd
from loraplex_platform.control.schemas import Resource, UnixSeconds
from loraplex_platform.db import InvariantRun, Request
from loraplex_platform.ids import format_id
from loraplex_platform.metering.invariants import InvariantReport
from loraplex_platform.metering.policy import RequestKind
from loraplex_platform.metering.usage import SHORT_WIDTHS, GroupBy, UsagePage, UsageQuery, UsageRow

# The columns of each group, in the order of the report.
GROUP_COLUMNS: dict[GroupBy, tuple[str, ...]] = {
    "tenant_id": ("tenant_id", "tenant"),
    "project_id": ("project_id",),
    "key_id": ("key_id",),
    "model": ("model",),
    "deployment_id": ("deployment_id",),
    "adapter_version_id": ("adapter_version_id",),
    "price_book_id": ("price_book_id",),
    "revision_id": ("revision_id",),
}
# Of each group that is an id, its kind.
_KINDS: dict[GroupBy, str] = {
    "tenant_id": "tenant",
    "project_id": "project",
    "key_id": "api_key",
    "deployment_id": "deployment",
    "adapter_version_id": "adapter_version",
    "price_book_id": "price_book",
    "revision_id": "deployment_revision",
}
USAGE_COLUMNS = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "absorbed_tokens",
    "adapter_seconds",
    "cost_usd",
)


class UsageRowResource(Schema):
    """One time bucket and group. Only the fields grouped by are there."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "start_time": 1764374400,
                    "end_time": 1764460800,
                    "date": "2025-11-29",
                    "tenant_id": "ten_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f",
                    "tenant": "acme",
                    "requests": 12,
                    "prompt_tokens": 480,
                    "cached_tokens": 0,
                    "completion_tokens": 771,
                    "absorbed_tokens": 0,
                    "adapter_seconds": 0,
                    "cost_usd": "0.000251000000",
                }
            ]
        }
    )

    start_time: int
    end_time: int
    date: str | None = Field(
        default=None,
        description="The day or month, in the tenant's time zone; rows of several tenants hold each "
        "one's own. Minutes and hours have none.",
    )
    tenant_id: str | None = None
    tenant: str | None = Field(default=None, description="The tenant's slug.")
    project_id: str | None = Field(default=None, description="null: of no project.")
    key_id: str | None = None
    model: str | None = None
    deployment_id: str | None = None
    adapter_version_id: str | None = Field(default=None, description="null: the base model.")
    price_book_id: str | None = None
    revision_id: str | None = Field(default=None, description="Of minutes and hours only.")
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    absorbed_tokens: int = Field(description="Output tokens that the platform paid for.")
    adapter_seconds: int = Field(
        description="For which adapter versions were deployed, of days that are over; they are of no project, "
        "key or deployment, and of the model `(adapter hours)`. None in minutes and hours."
    )
    cost_usd: str = Field(description="Exact dollars, 12 digits after the point.")


class UsageReport(Schema):
    """A report, right as of now; pass `next_page` as `page` for more."""

    object: Literal["list"] = "list"
    data: list[UsageRowResource]
    first_id: None = None
    last_id: None = None
    has_more: bool
    next_page: str | None
    currency: Literal["USD"] = CURRENCY
    time_zone: str | None = Field(
        description="Whose days these are; null: each tenant's own, by its billing time zone."
    )
    final_until: UnixSeconds = Field(
        description="No request admitted before is still open: to what came later, more may be added. "
        "Adapter-hours of a day come to it some minutes after its end."
    )


class IdentityResource(Schema):
    """generated = billed + absorbed + discarded, in tokens; `difference` is what is off."""

    generated: int
    billed: int
    absorbed: int
    discarded_past_stop: int
    discarded_past_abort: int
    difference: int
    pending_requests: int
    unlanded: int = Field(description="Settled attempts whose journal entry is still on its way.")


class InvariantCheck(Schema):
    """One statement about the books."""

    code: str = Field(description="I1 to I10 as the documentation numbers them, or nothing.")
    name: str
    title: str
    ok: bool
    detail: str
    offenders: list[str] = Field(description="Ids that break it, a few at most.")


class LastInvariantRun(Schema):
    """The newest check that was kept; the worker makes one every hour."""

    ok: bool
    checked_at: UnixSeconds
    checked_by: str = Field(description="worker, reconcile, or a user's id.")
    since: UnixSeconds | None = Field(
        description="Of requests before it only the ends were looked at."
    )
    took_ms: int
    broken: list[str] = Field(description="Names of the checks that did not hold.")


class InvariantsResource(Schema):
    """Do the books add up?"""

    object: Literal["invariants"] = "invariants"
    ok: bool
    checked_at: UnixSeconds
    identity: IdentityResource
    checks: list[InvariantCheck]
    last_run: LastInvariantRun | None = None


class RequestResource(Resource):
    """Metadata of one request; its text is nowhere."""

    object: Literal["request"] = "request"
    id: str
    tenant_id: str
    key_id: str | None = Field(description="null: a probe or a shadow of the platform's own.")
    deployment_id: str | None
    revision_id: str | None
    adapter_version_id: str | None
    kind: RequestKind = Field(
        description="user: a tenant's own; probe and shadow: the platform's, at its own expense."
    )
    shadow_of: str | None = Field(
        description="Of a shadow: the tenant's own request after which it was made."
    )
    endpoint: str
    model: str
    stream: bool
    state: Literal["reserved", "settled", "voided"]
    attempt: int
    replica_id: str | None
    finish_reason: str | None
    http_status: int | None
    error_code: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None = Field(description="Billed output tokens.")
    ttft_ms: int | None
    e2e_ms: int | None
    itl_mean_ms: float | None = Field(description="Between two tokens of the first choice.")
    itl_p95_ms: float | None
    fingerprint: str | None = Field(description="Of the replica that answered: its engine build.")
    sampling: dict[str, Any] | None = Field(description="As resolved; numbers only.")
    rollout_id: str | None
    rollout_step: int | None = Field(description="From 0.")
    arm: Literal["stable", "canary", "shadow", "pinned", "named"] | None = Field(
        description="Which side of the rollout answered; pinned, named: neither. null: there was no rollout."
    )
    subject_key: str | None = Field(
        description="Who stays with one side, in this rollout only; 64 bits as a number."
    )
    stable_logprob: float | None = Field(
        description="Mean log-probability of the answer under the rollout's stable revision, if sampled."
    )
    created_at: UnixSeconds
    settled_at: UnixSeconds | None


def usage_fields(row: UsageRow, query: UsageQuery) -> dict[str, Any]:
    """A report's row, in the order of `usage_columns`."""
    ids = {
        group: None if (value := getattr(row, group)) is None else format_id(kind, value)
        for group, kind in _KINDS.items()
    }
    values: dict[str, Any] = ids | {
        "start_time": int(row.start.timestamp()),
        "end_time": int(row.end.timestamp()),
        "date": row.date,
        "tenant": row.tenant,
        "model": row.model,
        "requests": row.requests,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "completion_tokens": row.completion_tokens,
        "absorbed_tokens": row.absorbed_tokens,
        "adapter_seconds": row.adapter_seconds,
        "cost_usd": format_usd(row.cost_pico),
    }
    return {column: values[column] for column in usage_columns(query)}


def encode_usage(page: UsagePage, query: UsageQuery) -> bytes:
    """A `UsageReport` as JSON. Written from its rows as they are: checking a thousand of them, which the
    types of `usage_fields` allow no other shape, takes longer than the database takes to sum them."""
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [usage_fields(row, query) for row in page.rows],
            "first_id": None,
            "last_id": None,
            "has_more": page.next_page is not None,
            "next_page": page.next_page,
            "currency": CURRENCY,
            "time_zone": page.zone,
            "final_until": int(page.final_until.timestamp()),
        }
    )


def usage_columns(query: UsageQuery) -> list[str]:
    """The fields of a report's rows: the time, what it is grouped by, and the sums."""
    groups = [
        column
        for group, columns in GROUP_COLUMNS.items()
        if group in query.group_by
        for column in columns
    ]
    date = [] if query.bucket_width in SHORT_WIDTHS else ["date"]
    return ["start_time", "end_time", *date, *groups, *USAGE_COLUMNS]


def show_invariants(report: InvariantReport, last: InvariantRun | None) -> InvariantsResource:
    """The report as the API shows it, beside the newest one that was kept."""
    identity = report.identity
    return InvariantsResource(
        ok=report.ok,
        checked_at=report.checked_at,
        identity=IdentityResource(
            generated=identity.generated,
            billed=identity.billed,
            absorbed=identity.absorbed,
            discarded_past_stop=identity.discarded_past_stop,
            discarded_past_abort=identity.discarded_past_abort,
            difference=identity.difference,
            pending_requests=identity.pending_requests,
            unlanded=identity.unlanded,
        ),
        checks=[
            InvariantCheck(
                code=check.code,
                name=check.name,
                title=check.title,
                ok=check.ok,
                detail=check.detail,
                offenders=check.offenders,
            )
            for check in report.checks
        ],
        last_run=None if last is None else _show_run(last),
    )


def _show_run(run: InvariantRun) -> LastInvariantRun:
    return LastInvariantRun(
        ok=run.is_ok,
        checked_at=run.checked_at,
        checked_by=run.checked_by,
        since=run.since,
        took_ms=run.took_ms,
        broken=[check["name"] for check in run.report["checks"] if not check["ok"]],
    )


def show_request(request: Request) -> RequestResource:
    """The request as the API shows it."""

    def optional(kind: str, value: Any) -> str | None:  # noqa: ANN401 (a UUID or None)
        return None if value is None else format_id(kind, value)

    return RequestResource(
        id=format_id("request", request.id),
        tenant_id=format_id("tenant", request.tenant_id),
        key_id=optional("api_key", request.key_id),
        deployment_id=optional("deployment", request.deployment_id),
        revision_id=optional("deployment_revision", request.revision_id),
        adapter_version_id=optional("adapter_version", request.adapter_version_id),
        kind=cast(RequestKind, request.kind),
        shadow_of=optional("request", request.shadow_of),
        endpoint=request.endpoint,
        model=request.model,
        stream=request.is_stream,
        state=request.state,  # type: ignore[arg-type]  # checked by the table
        attempt=request.attempt,
        replica_id=request.replica_id,
        finish_reason=request.finish_reason,
        http_status=request.http_status,
        error_code=request.error_code,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        completion_tokens=request.completion_tokens,
        ttft_ms=request.ttft_ms,
        e2e_ms=request.e2e_ms,
        itl_mean_ms=request.itl_mean_ms,
        itl_p95_ms=request.itl_p95_ms,
        fingerprint=request.fingerprint,
        sampling=request.sampling,
        rollout_id=optional("rollout", request.rollout_id),
        rollout_step=request.rollout_step,
        arm=request.arm,  # type: ignore[arg-type]  # checked by the table
        subject_key=None if request.subject_key is None else str(request.subject_key),
        stable_logprob=request.stable_logprob,
        created_at=request.admitted_at,
        settled_at=request.settled_at,
    )
