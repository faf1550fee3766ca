"""SQL of webhooks and their deliveries. A tenant's take its id; the operator's have none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Select, any_, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import Webhook, WebhookDelivery
from loraplex_platform.db.base import Json
from loraplex_platform.ids import uuid7

# An address gets so many messages at once, so that a slow one does not take every place.
MAX_PER_WEBHOOK = 4

_CLAIM = text("""
with candidates as (
    select id, next_at from (
        select d.id, d.next_at, row_number() over (partition by d.webhook_id order by d.next_at) as place
        from webhook_deliveries d join webhooks w on w.id = d.webhook_id
        where d.status = 'pending' and d.next_at <= now() and w.status = 'enabled'
    ) as ranked
    where place <= :per_webhook order by next_at limit :limit
), due as (
    select id from webhook_deliveries
    where id in (select id from candidates) and status = 'pending' and next_at <= now()
    for update skip locked
)
update webhook_deliveries d
set tries = tries + 1, last_tried_at = now(), next_at = now() + make_interval(secs => :claim_s),
    lease_token = :token
from due where d.id = due.id
returning d.id
""")


@dataclass(frozen=True, slots=True)
class Claimed:
    """A delivery that is this worker's to try, and where it goes."""

    delivery: WebhookDelivery
    webhook: Webhook


def webhooks_of(tenant_id: UUID | None) -> Select[Webhook]:
    """The tenant's, or the operator's own."""
    if tenant_id is None:
        return select(Webhook).where(Webhook.tenant_id.is_(None))
    return select(Webhook).where(Webhook.tenant_id == tenant_id)


def deliveries_of(webhook_id: UUID) -> Select[WebhookDelivery]:
    """Of a webhook that the caller has found by its owner."""
    return select(WebhookDelivery).where(WebhookDelivery.webhook_id == webhook_id)


async def find(
    session: AsyncSession, tenant_id: UUID | None, webhook_id: UUID, *, for_update: bool = False
) -> Webhook | None:
    """By id, only if the owner owns it."""
    statement = webhooks_of(tenant_id).where(Webhook.id == webhook_id)
    if for_update:
        statement = statement.with_for_update()
    return await session.scalar(statement)


async def find_delivery(
    session: AsyncSession, webhook_id: UUID, delivery_id: UUID
) -> WebhookDelivery | None:
    """By id, only of this webhook."""
    return await session.scalar(deliveries_of(webhook_id).where(WebhookDelivery.id == delivery_id))


async def count(session: AsyncSession, tenant_id: UUID | None) -> int:
    """How many webhooks the owner has."""
    statement = select(func.count()).select_from(webhooks_of(tenant_id).subquery())
    return int((await session.execute(statement)).scalar_one())


async def listeners(session: AsyncSession, topic: str, tenant_id: UUID | None) -> Sequence[UUID]:
    """Whom an event concerns: the tenant's webhooks of that topic, and the operator's."""
    is_concerned: ColumnElement[bool] = Webhook.tenant_id.is_(None)
    if tenant_id is not None:
        is_concerned = or_(is_concerned, Webhook.tenant_id == tenant_id)
    statement = select(Webhook.id).where(
        Webhook.status == "enabled", any_(Webhook.topics) == topic, is_concerned
    )
    return (await session.scalars(statement)).all()


async def add_delivery(
    session: AsyncSession,
    webhook_id: UUID,
    *,
    tenant_id: UUID | None,
    topic: str,
    dedupe_key: str,
    payload: Json,
    patience: timedelta,
) -> UUID | None:
    """Have the worker deliver an event; None if this webhook has it already."""
    statement = (
        insert(WebhookDelivery)
        .values(
            id=uuid7(),
            webhook_id=webhook_id,
            tenant_id=tenant_id,
            topic=topic,
            dedupe_key=dedupe_key,
            payload=payload,
            occurred_at=func.now(),
            give_up_at=func.now() + patience,
        )
        .on_conflict_do_nothing(
            index_elements=[
                WebhookDelivery.webhook_id,
                WebhookDelivery.topic,
                WebhookDelivery.dedupe_key,
            ]
        )
        .returning(WebhookDelivery.id)
    )
    return await session.scalar(statement)


async def claim(
    session: AsyncSession, token: UUID, *, limit: int, claim_s: float
) -> Sequence[Claimed]:
    """Take deliveries that are due; nobody else gets them for `claim_s`."""
    parameters = {
        "token": token,
        "limit": limit,
        "claim_s": claim_s,
        "per_webhook": MAX_PER_WEBHOOK,
    }
    ids = (await session.execute(_CLAIM, parameters)).scalars().all()
    if not ids:
        return []
    rows = await session.execute(
        select(WebhookDelivery, Webhook)
        .join(Webhook, Webhook.id == WebhookDelivery.webhook_id)
        .where(WebhookDelivery.id.in_(ids))
        .execution_options(populate_existing=True)
    )
    return [Claimed(*row) for row in rows]


async def lock(session: AsyncSession, webhook_id: UUID) -> None:
    """Hold a webhook's row until the transaction ends."""
    await session.execute(select(Webhook.id).where(Webhook.id == webhook_id).with_for_update())


async def note_outcome(
    session: AsyncSession, delivery_id: UUID, token: UUID, values: dict[str, Any]
) -> bool:
    """Write how a try went; False if it is somebody else's by now, or was replayed meanwhile."""
    statement = (
        update(WebhookDelivery)
        .where(WebhookDelivery.id == delivery_id, WebhookDelivery.lease_token == token)
        .values(lease_token=None, **values)
        .returning(WebhookDelivery.id)
    )
    return await session.scalar(statement) is not None


async def note_health(session: AsyncSession, webhook_id: UUID, *, is_well: bool) -> datetime | None:
    """Whether the address answers as it should; since when it has not, or None."""
    failing_since = None if is_well else func.coalesce(Webhook.failing_since, func.now())
    statement = (
        update(Webhook)
        .where(Webhook.id == webhook_id)
        .values(failing_since=failing_since)
        .returning(Webhook.failing_since)
    )
    return await session.scalar(statement)


async def give_up(session: AsyncSession, webhook_id: UUID) -> bool:
    """Switch an enabled address off, with all that waits for it; False if it was not enabled."""
    statement = (
        update(Webhook)
        .where(Webhook.id == webhook_id, Webhook.status == "enabled")
        .values(status="failed", disabled_at=func.now(), row_version=Webhook.row_version + 1)
        .returning(Webhook.id)
    )
    if await session.scalar(statement) is None:
        return False
    await session.execute(
        update(WebhookDelivery)
        .where(WebhookDelivery.webhook_id == webhook_id, WebhookDelivery.status == "pending")
        .values(status="failed", last_error="the webhook was switched off")
    )
    return True


async def replay(session: AsyncSession, delivery_id: UUID, patience: timedelta) -> None:
    """Have it delivered once more, as if it were new; its id stays."""
    await session.execute(
        update(WebhookDelivery)
        .where(WebhookDelivery.id == delivery_id)
        .values(
            status="pending",
            tries=0,
            next_at=func.now(),
            give_up_at=func.now() + patience,
            delivered_at=None,
            lease_token=None,
            last_error=None,
        )
    )
