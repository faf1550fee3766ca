"""Stream a chat through the gateway with a short-lived key of the tenant.

The gateway meters and bills it like any request of that tenant, and the control API needs no way
around authentication. The key lives in this process's memory and, as a MAC, in the database: one per
tenant, prolonged while it is used, revoked when this process stops. The conversation is not kept or
logged anywhere.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any
from uuid import UUID

import httpx
import structlog
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import SYSTEM, Actor
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import ConflictError, PlatformError, UnavailableError
from loraplex_platform.playground import revision_ticket
from loraplex_platform.playground.schemas import PlaygroundRequest
from loraplex_platform.registry import deployments, revisions
from loraplex_platform.registry import queries as registry
from loraplex_platform.tenancy import key_queries, key_service
from loraplex_platform.tenancy.key_schemas import NewKey

log = structlog.get_logger(__name__)

KEY_NAME = "playground"
KEY_LIFETIME = timedelta(minutes=15)
# A key this close to its end is not used for another conversation.
_KEY_MARGIN = timedelta(minutes=3)
_TIMEOUT = httpx.Timeout(connect=5.0, read=120.0, write=10.0, pool=5.0)


class GatewayAnswerError(PlatformError):
    """The gateway refused; its status, type and code are passed on."""

    def __init__(self, status: int, body: bytes, retry_after: str | None) -> None:
        error = _error_of(body)
        super().__init__(
            str(error.get("message") or f"The gateway answered {status}."),
            param=error.get("param"),
            code=error.get("code") or "gateway_error",
        )
        self.status = status  # type: ignore[misc]  # a class constant everywhere else
        self.type = str(error.get("type") or "server_error")  # type: ignore[misc]
        if retry_after is not None and retry_after.isdigit():
            self.retry_after_s = float(retry_after)


@dataclass(frozen=True, slots=True)
class _HeldKey:
    key_id: UUID
    secret: str = field(repr=False)
    expires_at: datetime


class Playground:
    """See the module's header. `client` is closed by its owner."""

    def __init__(
        self,
        sessions: SessionFactory,
        client: httpx.AsyncClient,
        gateway_url: str,
        pepper: SecretStr,
    ) -> None:
        self._sessions = sessions
        self._client = client
        self._url = gateway_url.rstrip("/") + "/v1/chat/completions"
        self._pepper = pepper
        self._keys: dict[UUID, _HeldKey] = {}
        self._minting: defaultdict[UUID, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def open(
        self,
        actor: Actor,
        tenant_id: UUID,
        chat: PlaygroundRequest,
        revision_id: UUID | None = None,
    ) -> AsyncIterator[bytes]:
        """The gateway's SSE bytes; closing the iterator aborts the request there.

        Args:
            revision_id: what `revision_of` has found, which answers then.

        Raises:
            GatewayAnswerError: the gateway refused.
            UnavailableError: it cannot be reached.
        """
        body = {
            **chat.model_dump(exclude={"revision_id"}),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {}
        if revision_id is not None:
            headers[revision_ticket.HEADER] = revision_ticket.sign(
                self._pepper, tenant_id, revision_id
            )
        for is_last_try in (False, True):
            key = await self._key_of(actor, tenant_id)
            stack = AsyncExitStack()
            try:
                response = await stack.enter_async_context(self._send(key, body, headers))
                if response.status_code == HTTPStatus.OK:
                    return _relay(response, stack)
                answer = await response.aread()
                retry_after = response.headers.get("retry-after")
            except httpx.HTTPError as error:
                await stack.aclose()
                log.warning("playground_gateway_unreachable", reason=type(error).__name__)
                raise UnavailableError(
                    "The gateway cannot be reached; is it running?",
                    code="gateway_unavailable",
                    retry_after_s=5,
                ) from None
            except BaseException:
                await stack.aclose()
                raise
            await stack.aclose()
            if response.status_code == HTTPStatus.UNAUTHORIZED and not is_last_try:
                # Somebody revoked the key we hold: make another one, once.
                self._keys.pop(tenant_id, None)
                continue
            raise GatewayAnswerError(response.status_code, answer, retry_after)
        raise AssertionError("the second try returns or raises")

    def _send(self, key: _HeldKey, body: dict[str, Any], headers: dict[str, str]) -> Any:  # noqa: ANN401
        return self._client.stream(
            "POST",
            self._url,
            json=body,
            headers=headers | {"authorization": f"Bearer {key.secret}"},
            timeout=_TIMEOUT,
        )

    async def _key_of(self, actor: Actor, tenant_id: UUID) -> _HeldKey:
        async with self._minting[tenant_id]:
            held = self._keys.get(tenant_id)
            now = datetime.now(UTC)
            if held is not None and held.expires_at - now > _KEY_MARGIN:
                return held
            expires_at = now + KEY_LIFETIME
            async with self._sessions() as session:
                if held is not None and await key_queries.prolong_key(
                    session, tenant_id, held.key_id, expires_at
                ):
                    await session.commit()
                    held = self._keys[tenant_id] = replace(held, expires_at=expires_at)
                    return held
                new = NewKey(name=KEY_NAME, expires_at=int(expires_at.timestamp()))
                made = await key_service.create_key(session, actor, self._pepper, tenant_id, new)
                key_id = made.key.id
                await session.commit()
            held = self._keys[tenant_id] = _HeldKey(key_id, made.secret, expires_at)
            return held

    async def close(self) -> None:
        """Revoke the keys that are held; without a database they end by themselves within minutes."""
        held, self._keys = self._keys, {}
        try:
            async with self._sessions.begin() as session:
                for tenant_id, key in held.items():
                    await key_service.revoke_key(
                        session, SYSTEM, tenant_id, key.key_id, reason="the control API stopped"
                    )
        except UnavailableError as error:
            log.warning("playground_keys_not_revoked", count=len(held), reason=error.message)


async def revision_of(
    session: AsyncSession, tenant_id: UUID, chat: PlaygroundRequest, *, is_operator: bool
) -> UUID | None:
    """The revision that is asked for, if one is: as for a pin, which would have it answer everybody.

    Raises:
        NotFoundError: the tenant reaches no such deployment, or it has no such revision.
        PermissionDeniedError: it has another price book than what answers now, and not the operator asks.
        ConflictError: its adapter version is retired.
    """
    if chat.revision_id is None:
        return None
    deployment = await deployments.get_reachable(session, tenant_id, chat.model)
    revision = await revisions.get(session, deployment, chat.revision_id, param="revision_id")
    await revisions.check_book(
        session, deployment, revision, "revision_id", is_operator=is_operator
    )
    if revision.adapter_version_id is not None:
        version = await registry.find_version(session, tenant_id, revision.adapter_version_id)
        if version is None or version.status != "ready":
            raise ConflictError(
                "revision_id: this revision's adapter version is retired; unretire it first.",
                param="revision_id",
            )
    return revision.id


async def _relay(response: httpx.Response, stack: AsyncExitStack) -> AsyncIterator[bytes]:
    async with stack:
        try:
            async for chunk in response.aiter_raw():
                yield chunk
        except httpx.HTTPError as error:
            # The 200 is out: say so in the stream, as the gateway itself would.
            log.warning("playground_stream_broke", reason=type(error).__name__)
            message = {
                "message": "The connection to the gateway broke.",
                "type": "server_error",
                "param": None,
                "code": "gateway_unavailable",
            }
            yield f"data: {json.dumps({'error': message})}\n\n".encode()


def _error_of(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    error = document.get("error") if isinstance(document, dict) else None
    return error if isinstance(error, dict) else {}
