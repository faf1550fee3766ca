"""Idempotency-Key on POST: the first call's reply again, instead of a second effect.

The record is claimed in a transaction of its own, so that a concurrent copy sees it (409), and
completed in the transaction of the operation itself, so that effect and reply are kept together or
not at all. A failed operation has no effect and leaves no record: its key may be tried again.
Secrets are never stored: a replay shows what was made, without the secret.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from loraplex_platform.audit import queries
from loraplex_platform.errors import IdempotencyInProgressError, IdempotencyReuseError
from loraplex_platform.idempotency_keys import idempotency_key_of
from loraplex_platform.ids import uuid7

KEEP = timedelta(hours=24)
# A process that died while working frees the key after this.
RUNNING_FOR = timedelta(minutes=15)
_SECRET_FIELDS = frozenset({"secret", "password", "token"})


class Idempotency:
    """One POST under an Idempotency-Key."""

    def __init__(
        self,
        sessions: async_sessionmaker[AsyncSession],
        principal: str,
        route: str,
        key_hash: bytes,
    ) -> None:
        self._sessions = sessions
        self._scope = queries.Scope(principal, route[:160], key_hash)
        self._claim_token = uuid7()  # of this call, should another one take the key over

    @classmethod
    def of(
        cls, sessions: async_sessionmaker[AsyncSession], principal: str, request: Request
    ) -> Idempotency | None:
        """None if the request carries no key.

        Raises:
            InvalidRequestError: the key cannot be read.
        """
        key_hash = idempotency_key_of(request)
        if key_hash is None:
            return None
        return cls(sessions, principal, f"POST {request.url.path}", key_hash)

    async def begin(self, fingerprint: bytes) -> Response | None:
        """Claim the key, or the stored reply of the call that had it first.

        Raises:
            IdempotencyReuseError: that call had another body.
            IdempotencyInProgressError: it is still running.
        """
        async with self._sessions() as session:
            is_claimed = await queries.claim(
                session, self._scope, fingerprint, self._claim_token, RUNNING_FOR
            )
            await session.commit()
            if is_claimed:
                return None
            record = await queries.find(session, self._scope)
        if record is not None and record.fingerprint != fingerprint:
            raise IdempotencyReuseError(
                "This Idempotency-Key was used with another body; use a new key."
            )
        if record is None or record.status is None:
            raise IdempotencyInProgressError(
                "The first request with this Idempotency-Key is still running; try again.",
                retry_after_s=1,
            )
        return JSONResponse(
            record.response, record.status, headers={"idempotency-replayed": "true"}
        )

    async def finish(self, session: AsyncSession, response: Response) -> None:
        """Keep the reply, in the operation's transaction.

        Raises:
            IdempotencyInProgressError: it took so long that a later call has the key now; the
                transaction must not be committed.
        """
        body = json.loads(bytes(response.body)) if response.body else {}
        is_kept = await queries.finish(
            session,
            self._scope,
            self._claim_token,
            status=response.status_code,
            response=without_secrets(body),
            keep_until=datetime.now(UTC) + KEEP,
        )
        if not is_kept:
            raise IdempotencyInProgressError(
                "Another request has taken this Idempotency-Key over; try again.",
                retry_after_s=1,
            )

    async def abandon(self) -> None:
        """Free the key unless the operation had its effect.

        An error does not tell: a commit whose acknowledgement was lost looks like one that failed.
        The record does, as the reply was stored with the effect.
        """
        async with self._sessions() as session:
            await queries.drop(session, self._scope, self._claim_token)
            await session.commit()


def without_secrets(value: Any) -> Any:  # noqa: ANN401 (any JSON)
    """The same JSON with the values of secret fields gone."""
    if isinstance(value, dict):
        return {
            name: None if name in _SECRET_FIELDS else without_secrets(item)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    return value
