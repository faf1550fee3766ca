"""Credits, debits and reversals on the wire."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from loraplex_platform.billing.money import CURRENCY, format_usd
from loraplex_platform.control.schemas import Body, CleanText, Resource, UnixSeconds
from loraplex_platform.db import LedgerEntry
from loraplex_platform.ids import format_id

Reason = Annotated[
    CleanText, Field(min_length=1, max_length=400, description="Shown on the invoice.")
]


class NewAdjustment(Body):
    """Money that a tenant is given (credit) or owes beside its usage (debit)."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"kind": "credit", "amount_usd": "25.00", "reason": "Goodwill for the outage"}
            ]
        },
    )

    kind: Literal["credit", "debit"]
    amount_usd: str = Field(
        pattern=r"^[0-9]{1,9}(\.[0-9]{1,12})?$",
        description="More than zero, as decimal text with at most 12 places.",
        examples=["25.00"],
    )
    reason: Reason


class NewReversal(Body):
    """Take an earlier line of account back, once."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "entry_id": "req_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f",
                    "reason": "Answered by the wrong model",
                }
            ]
        },
    )

    entry_id: str = Field(
        max_length=80,
        description="A request, `req_...`, whose charge is taken back, or a credit or debit, `adj_...`.",
    )
    reason: Reason


class AdjustmentResource(Resource):
    """A line of account that is no usage. It never changes; a reversal takes it back."""

    object: Literal["adjustment"] = "adjustment"
    id: str
    tenant_id: str
    kind: Literal["credit", "debit", "reversal"]
    amount_usd: str = Field(
        description="What it adds to what the tenant owes: a credit is below zero."
    )
    currency: Literal["USD"] = CURRENCY
    reason: str
    created_at: UnixSeconds


class BalanceResource(Resource):
    """What a tenant owes, since it exists: usage and debits less credits. Payments are not in it."""

    object: Literal["balance"] = "balance"
    tenant_id: str
    currency: Literal["USD"] = CURRENCY
    usage_usd: str
    adjustments_usd: str
    balance_usd: str


def show_adjustment(entry: LedgerEntry) -> AdjustmentResource:
    """The line as the API shows it."""
    return AdjustmentResource(
        id=format_id("adjustment", entry.entry_id),
        tenant_id=format_id("tenant", entry.tenant_id),
        kind=entry.kind,  # type: ignore[arg-type]  # what the query selects
        amount_usd=format_usd(int(entry.amount_pico)),
        reason=entry.description or "",
        created_at=entry.occurred_at,
    )
