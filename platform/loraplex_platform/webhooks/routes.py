"""Webhooks over HTTP: a tenant's below the tenant, the operator's own beside them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Request, Response

from loraplex_platform.control.context import Context, DbSession
from loraplex_platform.control.etag import IfMatch, set_etag
from loraplex_platform.control.paging import Paging, Search, fetch, holding, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import Webhook, WebhookDelivery
from loraplex_platform.tenancy.routes import Owner
from loraplex_platform.webhooks import queries, service
from loraplex_platform.webhooks.schemas import (
    DeliveryResource,
    NewWebhook,
    Rotation,
    WebhookChange,
    WebhookResource,
    WebhookWithSecret,
    show_delivery,
    show_webhook,
)

tenant_router = admin_router("/tenants/{tenant_id}/webhooks", "Webhooks")
platform_router = admin_router("/webhooks", "Webhooks")

WebhookId = Annotated[str, Path(max_length=80, description="The webhook's id, `whk_...`.")]
DeliveryId = Annotated[str, Path(max_length=80, description="The delivery's id, `dlv_...`.")]


async def _tenant(owner: Owner) -> UUID:
    return owner.id


async def _platform() -> None:
    return None


def _add_routes(router: APIRouter, action: str, owner_of: Callable[..., Any], whose: str) -> None:
    """The same routes for a tenant's webhooks and the operator's: who owns them differs, and who may."""

    owns: Any = Depends(owner_of)

    @router.post("", status_code=201, description=_CREATE.format(whose=whose))
    @requires(f"{action}.write")
    async def create_webhook(
        body: NewWebhook,
        request: Request,
        response: Response,
        context: Context,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> WebhookWithSecret:
        made = await service.create(
            session,
            request.state.actor,
            context.webhook_vault,
            context.webhook_rules,
            owner_id,
            body,
        )
        set_etag(response, made.webhook.row_version)
        return WebhookWithSecret(**show_webhook(made.webhook).__dict__, secret=made.secret)

    @router.get(
        "",
        description=f"{whose}, newest first, without their secrets. `search`: in the address and what it is for.",
    )
    @requires(f"{action}.read")
    async def list_webhooks(
        page: Paging, session: DbSession, search: Search = None, owner_id: UUID | None = owns
    ) -> ListPage[WebhookResource]:
        statement = holding(queries.webhooks_of(owner_id), search, Webhook.url, Webhook.description)
        rows, has_more = await fetch(session, statement, Webhook.id, page, "webhook")
        return to_list(rows, has_more, show_webhook)

    @router.get("/{webhook_id}", description="One webhook.")
    @requires(f"{action}.read")
    async def get_webhook(
        webhook_id: WebhookId,
        response: Response,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> WebhookResource:
        webhook = await service.get(session, owner_id, webhook_id)
        set_etag(response, webhook.row_version)
        return show_webhook(webhook)

    @router.patch("/{webhook_id}", description=_CHANGE)
    @requires(f"{action}.write")
    async def change_webhook(
        webhook_id: WebhookId,
        body: WebhookChange,
        version: IfMatch,
        request: Request,
        response: Response,
        context: Context,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> WebhookResource:
        webhook = await service.change(
            session,
            request.state.actor,
            context.webhook_rules,
            owner_id,
            webhook_id,
            body,
            version,
        )
        set_etag(response, webhook.row_version)
        return show_webhook(webhook)

    @router.delete("/{webhook_id}", status_code=204, description="Delete it with its deliveries.")
    @requires(f"{action}.write")
    async def delete_webhook(
        webhook_id: WebhookId,
        request: Request,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> None:
        await service.delete(session, request.state.actor, owner_id, webhook_id)

    @router.post("/{webhook_id}/rotate", description=_ROTATE)
    @requires(f"{action}.write")
    async def rotate_secret(
        webhook_id: WebhookId,
        body: Rotation,
        request: Request,
        context: Context,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> WebhookWithSecret:
        made = await service.rotate(
            session,
            request.state.actor,
            context.webhook_vault,
            owner_id,
            webhook_id,
            timedelta(seconds=body.grace_s),
        )
        return WebhookWithSecret(**show_webhook(made.webhook).__dict__, secret=made.secret)

    @router.post(
        "/{webhook_id}/test", status_code=202, description="Have a test message delivered to it."
    )
    @requires(f"{action}.write")
    async def send_test(
        webhook_id: WebhookId,
        request: Request,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> DeliveryResource:
        return show_delivery(
            await service.send_test(session, request.state.actor, owner_id, webhook_id)
        )

    @router.get("/{webhook_id}/deliveries", description="What it was told, newest first.")
    @requires(f"{action}.read")
    async def list_deliveries(
        webhook_id: WebhookId,
        page: Paging,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> ListPage[DeliveryResource]:
        webhook = await service.get(session, owner_id, webhook_id)
        statement = queries.deliveries_of(webhook.id)
        rows, has_more = await fetch(
            session, statement, WebhookDelivery.id, page, "webhook_delivery"
        )
        return to_list(rows, has_more, show_delivery)

    @router.post(
        "/{webhook_id}/deliveries/{delivery_id}/replay", status_code=202, description=_REPLAY
    )
    @requires(f"{action}.write")
    async def replay_delivery(
        webhook_id: WebhookId,
        delivery_id: DeliveryId,
        request: Request,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> DeliveryResource:
        return show_delivery(
            await service.replay(session, request.state.actor, owner_id, webhook_id, delivery_id)
        )


_CREATE = (
    "Add one of: {whose}. Messages are signed as Standard Webhooks has it; `secret` is in this answer and "
    "nowhere else. Only https, and only addresses of the public internet."
)
_CHANGE = (
    "Change it. Switching on one that has failed begins its count anew; what waited for it then is not "
    "sent any more, unless it is replayed."
)
_ROTATE = (
    "Give it a new secret. Until `grace_s` is over, messages carry a signature of the old one too."
)
_REPLAY = "Have it delivered once more, under its old id, whatever became of it."

_add_routes(tenant_router, "webhook", _tenant, "The tenant's webhooks")
_add_routes(platform_router, "platform_webhook", _platform, "The operator's webhooks")
