"""Send one message to one address, within limits of time and size, and say how that went."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Self
from uuid import UUID

import certifi
import httpcore

from loraplex_platform.db.base import Json
from loraplex_platform.ids import PREFIXES, format_id
from loraplex_platform.webhooks.addresses import AddressRules, ForbiddenAddressError, PinnedBackend
from loraplex_platform.webhooks.signing import sign

TOTAL_TIMEOUT_S: Final = 15.0
CONNECT_TIMEOUT_S: Final = 5.0
# An answer says yes or no; what else it says is not read.
MAX_ANSWER_BYTES: Final = 16 * 1024
MAX_CONNECTIONS: Final = 50

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
    """Sends to what `rules` allow. Open it for as long as it is used."""

    def __init__(self, rules: AddressRules, *, ssl_context: ssl.SSLContext | None = None) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context or _trusting_context(),
            max_connections=MAX_CONNECTIONS,
            # Every try resolves and looks anew.
            max_keepalive_connections=0,
            network_backend=PinnedBackend(rules),
        )

    async def __aenter__(self) -> Self:
        await self._pool.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._pool.__aexit__(kind, error, traceback)

    async def send(self, url: str, message_id: str, body: bytes, secrets: list[str]) -> Outcome:
        """POST `body`, signed. Never raises for what the other side does."""
        headers = {
            "content-type": "application/json",
            "user-agent": "loraplex-webhooks",
            "connection": "close",
            **sign(message_id, int(time.time()), body, secrets),
        }
        try:
            async with asyncio.timeout(TOTAL_TIMEOUT_S):
                return await self._post(url, headers, body)
        except TimeoutError:
            return Outcome(False, None, f"no answer within {TOTAL_TIMEOUT_S:g} s")
        except ForbiddenAddressError as error:
            return Outcome(False, None, str(error))
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            return Outcome(False, None, _words(error))

    async def _post(self, url: str, headers: dict[str, str], body: bytes) -> Outcome:
        timeout = {
            "connect": CONNECT_TIMEOUT_S,
            "read": TOTAL_TIMEOUT_S,
            "write": TOTAL_TIMEOUT_S,
            "pool": TOTAL_TIMEOUT_S,
        }
        async with self._pool.stream(
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
            return f"TLS: {cause.verify_message}"
        if isinstance(cause, ssl.SSLError):
            return f"TLS: {cause.reason}"
        cause = cause.__cause__ or cause.__context__
    return str(error)[:200] or type(error).__name__
