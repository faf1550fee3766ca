"""Webhooks on the wire."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StrictInt

from loraplex_platform.control.schemas import Body, CleanText, Resource, UnixSeconds
from loraplex_platform.db import Webhook, WebhookDelivery
from loraplex_platform.ids import format_id

TopicName = Literal["alert", "invoice", "rollout"]
Url = Annotated[str, Field(min_length=1, max_length=2000, examples=["https://example.com/hooks"])]
Topics = Annotated[
    list[TopicName],
    Field(
        min_length=1,
        max_length=3,
        description="alert: thresholds of limits, webhooks that fail, pins that end, evals that change, rollouts that a gate "
        "aborts or that wait for somebody. "
        "invoice: issued and void ones. rollout: each step and end of one.",
    ),
]
Description = Annotated[CleanText, Field(max_length=200)]


class NewWebhook(Body):
    """An address that is to be told."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"url": "https://example.com/hooks", "topics": ["alert", "invoice"]}]
        },
    )

    url: Url
    topics: Topics
    description: Description = ""


class WebhookChange(Body):
    """What to change; what is not given, or null, stays."""

    url: Url | None = None
    topics: Topics | None = None
    description: Description | None = None
    status: Literal["enabled", "disabled"] | None = None


class Rotation(Body):
    """A new secret."""

    grace_s: Annotated[StrictInt, Field(ge=0, le=7 * 86_400)] = Field(
        default=86_400, description="For so long the old secret signs too."
    )


class WebhookResource(Resource):
    """An address, without its secret."""

    object: Literal["webhook"] = "webhook"
    id: str
    tenant_id: str | None = Field(description="null: the operator's, told of all tenants.")
    url: str
    description: str
    topics: list[str]
    status: Literal["enabled", "disabled", "failed"] = Field(
        description="failed: switched off after three days without one success."
    )
    failing_since: UnixSeconds | None
    old_secret_until: UnixSeconds | None = Field(description="While a rotation's grace lasts.")
    created_at: UnixSeconds
    version: int = Field(description="As the ETag has it.")


class WebhookWithSecret(WebhookResource):
    """The answer to making or rotating it: the one time its secret is shown."""

    secret: str | None = Field(
        description="For a library of Standard Webhooks. Shown this once; a replay under the same "
        "Idempotency-Key has null here.",
        examples=["whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"],
    )


class DeliveryResource(Resource):
    """One event for one address."""

    object: Literal["webhook_delivery"] = "webhook_delivery"
    id: str = Field(description="The `webhook-id` header of every try.")
    webhook_id: str
    topic: str
    status: Literal["pending", "delivered", "failed"]
    tries: int
    occurred_at: UnixSeconds
    next_at: UnixSeconds | None = Field(description="When it is tried next; null: never.")
    last_tried_at: UnixSeconds | None
    last_status: int | None = Field(
        description="HTTP status of the last try, if there was an answer."
    )
    last_error: str | None
    delivered_at: UnixSeconds | None
    payload: dict[str, Any] = Field(description="What the event says, as it was recorded.")


def show_webhook(webhook: Webhook) -> WebhookResource:
    """The webhook as the API shows it."""
    return WebhookResource(
        id=format_id("webhook", webhook.id),
        tenant_id=None if webhook.tenant_id is None else format_id("tenant", webhook.tenant_id),
        url=webhook.url,
        description=webhook.description,
        topics=list(webhook.topics),
        status=webhook.status,  # type: ignore[arg-type]  # checked by the table
        failing_since=webhook.failing_since,
        old_secret_until=webhook.old_secret_until,
        created_at=webhook.created_at,
        version=webhook.row_version,
    )


def show_delivery(delivery: WebhookDelivery) -> DeliveryResource:
    """The delivery as the API shows it."""
    return DeliveryResource(
        id=format_id("webhook_delivery", delivery.id),
        webhook_id=format_id("webhook", delivery.webhook_id),
        topic=delivery.topic,
        status=delivery.status,  # type: ignore[arg-type]  # checked by the table
        tries=delivery.tries,
        occurred_at=delivery.occurred_at,
        next_at=delivery.next_at if delivery.status == "pending" else None,
        last_tried_at=delivery.last_tried_at,
        last_status=delivery.last_status,
        last_error=delivery.last_error,
        delivered_at=delivery.delivered_at,
        payload=delivery.payload,
    )
