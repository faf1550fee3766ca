"""Send one message to one address, within limits of time and size, and say how that went."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Self
from uuid import UUID

import certifi
import httpcore

from loraplex_platform.db.base import Json
from loraplex_platform.ids import PREFIXES, format_id
from loraplex_platform.webhooks.addresses import (
    AddressRules,
    ForbiddenAddressError,
    OwnerRules,
    PinnedBackend,
)
from loraplex_platform.webhooks.signing import sign

TOTAL_TIMEOUT_S: Final = 15.0
CONNECT_TIMEOUT_S: Final = 5.0
# An answer says yes or no; what else it says is not read.
MAX_ANSWER_BYTES: Final = 16 * 1024
MAX_CONNECTIONS: Final = 50
# Some of it is the receiver's words; there is room for this much.
MAX_ERROR_CHARS: Final = 200

# Fields of payloads that hold ids, and what they are ids of.
_IDS: Final = {
    "tenant_id": "tenant",
    "project_id": "project",
    "key_id": "api_key",
    "deployment_id": "deployment",
    "adapter_id": "adapter",
    "adapter_version_id": "adapter_version",
    "invoice_id": "invoice",
    "limit_id": "limit",
    "webhook_id": "webhook",
}
_SCOPES: Final = {
    "tenant": "tenant",
    "project": "project",
    "key": "api_key",
    "deployment": "deployment",
    "adapter": "adapter",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a try went. `status`: of HTTP, if there was an answer."""

    is_delivered: bool
    status: int | None
    error: str | None

    @property
    def is_gone(self) -> bool:
        """The receiver says that it will never want anything again."""
        return self.status == 410


class Sender:
    """Sends to what the owner's `rules` allow. Open it for as long as it is used."""

    def __init__(self, rules: OwnerRules, *, ssl_context: ssl.SSLContext | None = None) -> None:
        context = ssl_context or _trusting_context()
        self._stack = AsyncExitStack()
        self._operators = _pool(rules.operators, context)
        self._tenants = _pool(rules.tenants, context)

    async def __aenter__(self) -> Self:
        for pool in (self._operators, self._tenants):
            await self._stack.enter_async_context(pool)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, traceback)

    async def send(
        self, url: str, message_id: str, body: bytes, secrets: list[str], *, tenant_id: UUID | None
    ) -> Outcome:
        """POST `body`, signed. Never raises for what the other side does.

        Args:
            tenant_id: whose webhook it is; None: the operator's own.
        """
        headers = {
            "content-type": "application/json",
            "user-agent": "loraplex-webhooks",
            "connection": "close",
            **sign(message_id, int(time.time()), body, secrets),
        }
        try:
            async with asyncio.timeout(TOTAL_TIMEOUT_S):
                pool = self._operators if tenant_id is None else self._tenants
                return await _post(pool, url, headers, body)
        except TimeoutError:
            return Outcome(False, None, f"no answer within {TOTAL_TIMEOUT_S:g} s")
        except ForbiddenAddressError as error:
            return Outcome(False, None, str(error))
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            return Outcome(False, None, _words(error))
        except OSError as error:
            # httpcore leaves those of TLS past the handshake as they are (ssl.SSLError is one).
            return Outcome(False, None, _words(error))


def _pool(rules: AddressRules, context: ssl.SSLContext) -> httpcore.AsyncConnectionPool:
    return httpcore.AsyncConnectionPool(
        ssl_context=context,
        max_connections=MAX_CONNECTIONS,
        # Every try resolves and looks anew.
        max_keepalive_connections=0,
        network_backend=PinnedBackend(rules),
    )


async def _post(
    pool: httpcore.AsyncConnectionPool, url: str, headers: dict[str, str], body: bytes
) -> Outcome:
    timeout = {
        "connect": CONNECT_TIMEOUT_S,
        "read": TOTAL_TIMEOUT_S,
        "write": TOTAL_TIMEOUT_S,
        "pool": TOTAL_TIMEOUT_S,
    }
    async with pool.stream(
        "POST",
        url,
        headers=list(headers.items()),
        content=body,
        extensions={"timeout": timeout},
    ) as response:
        size = 0
        async for chunk in response.aiter_stream():
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                break
        if 200 <= response.status < 300:
            return Outcome(True, response.status, None)
        where = " (redirects are not followed)" if 300 <= response.status < 400 else ""
        return Outcome(False, response.status, f"HTTP {response.status}{where}")


def body_of(topic: str, occurred_at: datetime, payload: Json) -> bytes:
    """What is sent, the same for every try: the envelope of Standard Webhooks, ids as the API has them."""
    content = {
        "type": topic,
        "timestamp": occurred_at.astimezone(UTC).isoformat().replace("+00:00", "Z"),
        "data": _as_api(payload),
    }
    return json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def _as_api(payload: Json) -> Json:
    shown = dict(payload)
    kinds = dict(_IDS)
    scope = payload.get("scope_kind")
    if isinstance(scope, str) and scope in _SCOPES:
        kinds["scope_id"] = _SCOPES[scope]
    for name, kind in kinds.items():
        value = payload.get(name)
        if kind in PREFIXES and isinstance(value, str):
            shown[name] = _api_id(kind, value)
    return shown


def _api_id(kind: str, value: str) -> str:
    try:
        return format_id(kind, UUID(value))
    except ValueError:
        return value  # it is one already


def _trusting_context() -> ssl.SSLContext:
    """Trusts what this machine trusts, and Mozilla's list where the machine has none."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def _words(error: BaseException) -> str:
    """What went wrong, as far as the receiver can mend it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"TLS: {cause.verify_message}"[:MAX_ERROR_CHARS]
        if isinstance(cause, ssl.SSLError):
            return f"TLS: {cause.reason or cause}"[:MAX_ERROR_CHARS]
        cause = cause.__cause__ or cause.__context__
    return str(error)[:MAX_ERROR_CHARS] or type(error).__name__
