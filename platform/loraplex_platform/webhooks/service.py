"""Webhooks: made, changed, told of events.

An event leaves its transaction through the outbox; the relay hands it to `fan_out`, which makes one
delivery for every webhook that wants it. The worker tries deliveries until the address answers 2xx: at
once, then with growing, spread waits for a day. An address that has failed for three days without one
success is switched off, which is itself an alert, to the operator and to the tenant's other addresses.

Every delivery is at least once: receivers dedupe by `webhook-id`, which all tries of it and its replays
share. Nothing is promised about order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import structlog
from sqlalchemy import func
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import SYSTEM, Actor, record
from loraplex_platform.control.etag import check_version
from loraplex_platform.db import Webhook, WebhookDelivery
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import ConflictError, NotFoundError
from loraplex_platform.ids import MalformedIdError, format_id, parse_id, uuid7
from loraplex_platform.outbox.queries import Message
from loraplex_platform.outbox.relay import Topic
from loraplex_platform.outbox.service import enqueue
from loraplex_platform.webhooks import queries
from loraplex_platform.webhooks.addresses import OwnerRules
from loraplex_platform.webhooks.queries import Claimed
from loraplex_platform.webhooks.schemas import NewWebhook, WebhookChange
from loraplex_platform.webhooks.sender import Outcome, Sender, body_of
from loraplex_platform.webhooks.signing import Sealed, Vault, WebhookKeyMissingError, mint_secret

log = structlog.get_logger(__name__)

# Topics of the outbox that webhooks may ask for.
TOPICS: Final = ("alert", "invoice", "rollout")
TEST_TOPIC: Final = "test"
MAX_WEBHOOKS: Final = 20
PATIENCE: Final = timedelta(days=1)
DISABLE_AFTER: Final = timedelta(days=3)
FIRST_WAIT_S: Final = 5.0
MAX_WAIT_S: Final = 3 * 3600.0
BATCH: Final = 50
# Longer than a try may take.
CLAIM_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class WithSecret:
    """A webhook and, this once, its signing secret."""

    webhook: Webhook
    secret: str = field(repr=False)


def get_id(text: str) -> UUID:
    """The id in a path.

    Raises:
        NotFoundError: it is none.
    """
    try:
        return parse_id("webhook", text)
    except MalformedIdError:
        raise NotFoundError("No such webhook.") from None


async def get(
    session: AsyncSession, tenant_id: UUID | None, webhook_id: str, *, for_update: bool = False
) -> Webhook:
    """The owner's webhook.

    Raises:
        NotFoundError: there is no such one.
    """
    found = await queries.find(session, tenant_id, get_id(webhook_id), for_update=for_update)
    if found is None:
        raise NotFoundError("No such webhook.")
    return found


async def create(
    session: AsyncSession,
    actor: Actor,
    vault: Vault,
    rules: OwnerRules,
    tenant_id: UUID | None,
    new: NewWebhook,
) -> WithSecret:
    """Add a webhook.

    Raises:
        InvalidRequestError: the URL cannot be one.
        ConflictError: the owner has too many.
        WebhookKeyMissingError: the operator has set no key for their secrets.
    """
    rules.of(tenant_id).check_url(new.url)
    if await queries.count(session, tenant_id) >= MAX_WEBHOOKS:
        raise ConflictError(f"There are {MAX_WEBHOOKS} webhooks already; delete one first.")
    webhook_id, secret = uuid7(), mint_secret()
    sealed = vault.seal(secret, webhook_id)
    webhook = Webhook(
        id=webhook_id,
        tenant_id=tenant_id,
        url=new.url,
        description=new.description,
        topics=sorted(set(new.topics)),
        secret_box=sealed.box,
        secret_key_id=sealed.key_id,
    )
    session.add(webhook)
    await session.flush()
    await session.refresh(webhook)
    _record(session, actor, "webhook.create", webhook, after=_facts(webhook))
    return WithSecret(webhook, secret)


async def change(
    session: AsyncSession,
    actor: Actor,
    rules: OwnerRules,
    tenant_id: UUID | None,
    webhook_id: str,
    wanted: WebhookChange,
    version: int | None,
) -> Webhook:
    """Change URL, topics or description, or switch it on or off.

    Raises:
        NotFoundError: no such webhook of this owner.
        InvalidRequestError: the URL cannot be one.
        VersionConflictError: it has changed since `version`.
    """
    webhook = await get(session, tenant_id, webhook_id, for_update=True)
    changes = wanted.model_dump(exclude_none=True)
    if "topics" in changes:
        changes["topics"] = sorted(set(changes["topics"]))
    check_version(version, webhook.row_version, changes, _facts(webhook))
    if "url" in changes:
        rules.of(tenant_id).check_url(changes["url"])
    before = {name: _facts(webhook)[name] for name in changes}
    changes = {name: value for name, value in changes.items() if before[name] != value}
    if not changes:
        return webhook
    for name, value in changes.items():
        setattr(webhook, name, value)
    if "status" in changes:
        webhook.disabled_at = None if webhook.status == "enabled" else func.now()
        webhook.failing_since = None
    webhook.row_version += 1
    await session.flush()
    await session.refresh(webhook)
    _record(
        session,
        actor,
        "webhook.update",
        webhook,
        before={name: before[name] for name in changes},
        after=changes,
    )
    return webhook


async def rotate(
    session: AsyncSession,
    actor: Actor,
    vault: Vault,
    tenant_id: UUID | None,
    webhook_id: str,
    grace: timedelta,
) -> WithSecret:
    """Give it a new secret; for `grace` the old one signs too.

    Raises:
        NotFoundError: no such webhook of this owner.
        WebhookKeyMissingError: the operator has set no key for their secrets.
    """
    webhook = await get(session, tenant_id, webhook_id, for_update=True)
    secret = mint_secret()
    sealed = vault.seal(secret, webhook.id)
    is_kept = grace > timedelta(0)
    webhook.old_secret_box = webhook.secret_box if is_kept else None
    webhook.old_secret_key_id = webhook.secret_key_id if is_kept else None
    webhook.old_secret_until = datetime.now(UTC) + grace if is_kept else None
    webhook.secret_box, webhook.secret_key_id = sealed.box, sealed.key_id
    webhook.row_version += 1
    await session.flush()
    await session.refresh(webhook)
    detail = {"grace_s": round(grace.total_seconds())}
    _record(session, actor, "webhook.rotate_secret", webhook, detail=detail)
    return WithSecret(webhook, secret)


async def delete(
    session: AsyncSession, actor: Actor, tenant_id: UUID | None, webhook_id: str
) -> None:
    """Delete it with its deliveries.

    Raises:
        NotFoundError: no such webhook of this owner.
    """
    webhook = await get(session, tenant_id, webhook_id, for_update=True)
    _record(session, actor, "webhook.delete", webhook, before=_facts(webhook))
    await session.delete(webhook)
    await session.flush()


async def send_test(
    session: AsyncSession, actor: Actor, tenant_id: UUID | None, webhook_id: str
) -> WebhookDelivery:
    """Have a test message delivered.

    Raises:
        NotFoundError: no such webhook of this owner.
        ConflictError: it is switched off.
    """
    webhook = await get(session, tenant_id, webhook_id)
    _check_enabled(webhook)
    payload: dict[str, Any] = {"message": "This is a test."}
    if tenant_id is not None:
        payload["tenant_id"] = str(tenant_id)
    delivery_id = await queries.add_delivery(
        session,
        webhook.id,
        tenant_id=tenant_id,
        topic=TEST_TOPIC,
        dedupe_key=uuid7().hex,
        payload=payload,
        patience=PATIENCE,
    )
    assert delivery_id is not None  # noqa: S101 # a new key is never there already
    _record(session, actor, "webhook.test", webhook)
    return await _get_delivery(session, webhook, delivery_id)


async def replay(
    session: AsyncSession, actor: Actor, tenant_id: UUID | None, webhook_id: str, delivery_id: str
) -> WebhookDelivery:
    """Have a message delivered once more, whatever became of it.

    Raises:
        NotFoundError: no such delivery of this owner's webhook.
        ConflictError: the webhook is switched off.
    """
    webhook = await get(session, tenant_id, webhook_id)
    try:
        delivery = await _get_delivery(session, webhook, parse_id("webhook_delivery", delivery_id))
    except MalformedIdError:
        raise NotFoundError("No such delivery.") from None
    _check_enabled(webhook)
    await queries.replay(session, delivery.id, PATIENCE)
    detail = {"delivery_id": format_id("webhook_delivery", delivery.id)}
    _record(session, actor, "webhook.replay", webhook, detail=detail)
    await session.refresh(delivery)
    return delivery


async def _get_delivery(
    session: AsyncSession, webhook: Webhook, delivery_id: UUID
) -> WebhookDelivery:
    delivery = await queries.find_delivery(session, webhook.id, delivery_id)
    if delivery is None:
        raise NotFoundError("No such delivery.")
    return delivery


def _check_enabled(webhook: Webhook) -> None:
    if webhook.status != "enabled":
        raise ConflictError("This webhook is switched off; switch it on first.", param="status")


# ---------------------------------------------------------------------------- events


def webhook_topics(sessions: SessionFactory) -> list[Topic]:
    """What the outbox's relay hands to webhooks."""

    def handler(topic: str) -> Topic:
        async def handle(message: Message) -> None:
            await fan_out(sessions, topic, message)

        return Topic(name=topic, handle=handle)

    return [handler(topic) for topic in TOPICS]


async def fan_out(sessions: SessionFactory, topic: str, message: Message) -> int:
    """Make a delivery for everybody whom an event concerns; how many are new. Safe to repeat."""
    found = message.payload.get("tenant_id")
    tenant_id = None if found is None else UUID(str(found))
    made = 0
    async with sessions.begin() as session:
        for webhook_id in await queries.listeners(session, topic, tenant_id):
            made += (
                await queries.add_delivery(
                    session,
                    webhook_id,
                    tenant_id=tenant_id,
                    topic=topic,
                    dedupe_key=message.dedupe_key,
                    payload=message.payload,
                    patience=PATIENCE,
                )
                is not None
            )
    return made


class Deliverer:
    """Tries deliveries that are due. Any number may run.

    Args:
        on_outcome: told of every try: "delivered", "failed" or "given_up".
    """

    def __init__(
        self,
        sessions: SessionFactory,
        vault: Vault,
        sender: Sender,
        on_outcome: Callable[[str], object] = lambda outcome: outcome,
    ) -> None:
        self._sessions = sessions
        self._vault = vault
        self._sender = sender
        self._on_outcome = on_outcome

    async def deliver_once(self) -> int:
        """Try everything that is due now; how many tries that were."""
        num_tried = 0
        while True:
            token = uuid7()
            async with self._sessions.begin() as session:
                claimed = await queries.claim(session, token, limit=BATCH, claim_s=CLAIM_S)
            if not claimed:
                return num_tried
            # Each by itself: what one raises must not leave the others without their outcome.
            ends = await asyncio.gather(
                *(self._try(token, each) for each in claimed), return_exceptions=True
            )
            num_tried += len(claimed)
            lost = [end for end in ends if isinstance(end, BaseException)]
            if lost:  # its outcome could not be noted: it is claimed anew when the claim is over
                raise lost[0]

    async def _try(self, token: UUID, claimed: Claimed) -> None:
        delivery, webhook = claimed.delivery, claimed.webhook
        try:
            secrets = self._secrets_of(webhook)
        except WebhookKeyMissingError as error:
            # Ours to mend, not the receiver's fault: it waits, and does not count against them.
            log.error("webhook_key_missing", webhook_id=str(webhook.id), reason=error.message)
            outcome = Outcome(False, None, "the operator's key for secrets is missing")
            await self._note(token, claimed, outcome, is_theirs=False)
            return
        try:
            outcome = await self._sender.send(
                webhook.url,
                format_id("webhook_delivery", delivery.id),
                body_of(delivery.topic, delivery.occurred_at, delivery.payload),
                secrets,
                tenant_id=webhook.tenant_id,
            )
        except Exception:
            # Ours to mend as well; and it is given up in its time like any other.
            log.exception("webhook_not_sent", webhook_id=str(webhook.id))
            outcome = Outcome(False, None, "it could not be sent: an internal error")
            await self._note(token, claimed, outcome, is_theirs=False)
            return
        await self._note(token, claimed, outcome, is_theirs=True)

    def _secrets_of(self, webhook: Webhook) -> list[str]:
        secrets = [self._vault.open(Sealed(webhook.secret_box, webhook.secret_key_id), webhook.id)]
        until = webhook.old_secret_until
        if (
            webhook.old_secret_box is not None
            and webhook.old_secret_key_id is not None
            and until is not None
            and until > datetime.now(UTC)
        ):
            old = Sealed(webhook.old_secret_box, webhook.old_secret_key_id)
            secrets.append(self._vault.open(old, webhook.id))
        return secrets

    async def _note(
        self, token: UUID, claimed: Claimed, outcome: Outcome, *, is_theirs: bool
    ) -> None:
        delivery, webhook = claimed.delivery, claimed.webhook
        now = datetime.now(UTC)
        values: dict[str, Any] = {"last_status": outcome.status, "last_error": outcome.error}
        if outcome.is_delivered:
            told = "delivered"
            values |= {"status": "delivered", "delivered_at": func.now()}
        elif outcome.is_gone or now >= delivery.give_up_at:
            told = "given_up"
            values |= {"status": "failed"}
        else:
            told = "failed"
            values |= {"next_at": func.now() + timedelta(seconds=wait_s(delivery.tries))}
        async with self._sessions.begin() as session:
            # The address before its deliveries, as everybody who locks both: switching one off changes all
            # of its deliveries.
            await queries.lock(session, webhook.id)
            if not await queries.note_outcome(session, delivery.id, token, values):
                return
            if is_theirs:
                since = await queries.note_health(session, webhook.id, is_well=outcome.is_delivered)
                is_over = since is not None and now - since >= DISABLE_AFTER
                if outcome.is_gone or is_over:
                    await _switch_off(session, webhook, since, outcome)
        self._on_outcome(told)
        if told != "delivered":
            log.warning(
                "webhook_given_up" if told == "given_up" else "webhook_put_off",
                webhook_id=str(webhook.id),
                topic=delivery.topic,
                tries=delivery.tries,
                reason=outcome.error,
            )


def wait_s(tries: int) -> float:
    """How long after so many tries; spread, so that what failed together does not return so."""
    longest = min(MAX_WAIT_S, FIRST_WAIT_S * 3.0 ** min(tries - 1, 20))
    return longest * random.uniform(0.8, 1.2)  # noqa: S311 # not a secret


async def _switch_off(
    session: AsyncSession, webhook: Webhook, since: datetime | None, outcome: Outcome
) -> None:
    if not await queries.give_up(session, webhook.id):
        return
    _record(
        session,
        SYSTEM,
        "webhook.switch_off",
        webhook,
        detail={"reason": outcome.error},
        before={"status": "enabled"},
        after={"status": "failed"},
    )
    payload: dict[str, Any] = {
        "kind": "webhook_failed",
        "webhook_id": str(webhook.id),
        "url": webhook.url,
        "reason": outcome.error,
        "failing_since": None if since is None else int(since.timestamp()),
    }
    if webhook.tenant_id is not None:
        payload["tenant_id"] = str(webhook.tenant_id)
    await enqueue(session, "alert", f"webhook_failed:{webhook.id}:{webhook.row_version}", payload)
    log.error("webhook_switched_off", webhook_id=str(webhook.id), reason=outcome.error)


def _facts(webhook: Webhook) -> dict[str, Any]:
    return {
        "url": webhook.url,
        "description": webhook.description,
        "topics": list(webhook.topics),
        "status": webhook.status,
    }


def _record(
    session: AsyncSession,
    actor: Actor,
    action: str,
    webhook: Webhook,
    *,
    detail: dict[str, Any] | None = None,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    record(
        session,
        actor,
        action,
        "webhook",
        format_id("webhook", webhook.id),
        tenant_id=webhook.tenant_id,
        detail=detail,
        before=before,
        after=after,
    )
