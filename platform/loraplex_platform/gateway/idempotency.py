"""`Idempotency-Key` on completions: what a lost answer cost is never billed again.

A key belongs to one API key and one endpoint and stands for the request that claimed it first, for a
day. What the next request with it hears depends on what has become of that one:

| the first request | the next one |
|---|---|
| had another body | 422 `idempotency_key_reuse`; the official client does not try again |
| is running | 409 `idempotency_in_progress`; the client tries again |
| was billed | 409 `idempotency_completed` with its id and usage; the client does not try again |
| was billed, and its tenant has its answers kept | its answer again, billed once |
| cost nothing: refused, or failed by our fault | runs, as if the key were new |

Claimed is after the reservation and before the engine hears of the request: a gateway that dies in
between leaves a reservation that the sweeper voids, one that dies later a request that it settles. So
a claim is let go of exactly when its request has ended without a charge, whoever ended it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from uuid import UUID

import msgspec
import structlog
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from fastapi import Request, Response
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db.deadline import within
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.db.transactions import run_transaction
from loraplex_platform.errors import (
    IdempotencyInProgressError,
    IdempotencyReuseError,
    PlatformError,
    UnavailableError,
)
from loraplex_platform.gateway import idempotency_queries as queries
from loraplex_platform.gateway.errors import FirstRequestReport, IdempotencyCompletedError
from loraplex_platform.gateway.idempotency_queries import Claim, FirstRequest
from loraplex_platform.gateway.openai_schemas import UsageReport
from loraplex_platform.idempotency_keys import idempotency_key_of
from loraplex_platform.ids import format_id
from loraplex_platform.tenancy.authentication import Authenticated

log = structlog.get_logger(__name__)

KEEP: Final = timedelta(hours=24)
KEEP_WAIT_S: Final = 1.0  # how long a finished answer waits until it is kept
MAX_ANSWER_BYTES: Final = 1024 * 1024  # a longer answer is not kept
_NONCE_BYTES = 12


class Kept(msgspec.Struct, frozen=True):
    """An answer as it is stored, before it is sealed."""

    content_type: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Retry:
    """A request that carries an Idempotency-Key and may run.

    Attributes:
        keeps_answer: the tenant wants its answers kept.
    """

    claim: Claim
    keeps_answer: bool


class Retries:
    """What the gateway knows of Idempotency-Keys.

    Args:
        secret: seals the answers that are kept. Under another one they are as if they were not.
        deadline_s: how long the database is waited for.
    """

    def __init__(
        self, sessions: SessionFactory, secret: SecretStr, *, deadline_s: float = 5.0
    ) -> None:
        self._sessions = sessions
        self._deadline_s = deadline_s
        self._secret = secret.get_secret_value().encode()

    async def begin(
        self, request: Request, caller: Authenticated, endpoint: str, body: bytes
    ) -> Retry | Response | None:
        """What is to be done: run with a claim to make, answer this, or (None) run without a key.

        Raises:
            InvalidRequestError: the header cannot be read.
            IdempotencyReuseError, IdempotencyInProgressError, IdempotencyCompletedError: see above.
            DatabaseUnavailableError: we cannot tell.
        """
        key_hash = idempotency_key_of(request)
        if key_hash is None:
            return None
        fingerprint = hashlib.sha256(body).digest()
        claim = Claim(caller.tenant_id, caller.key_id, endpoint, key_hash, fingerprint)
        keeps_answers, first = await within(self._deadline_s, self._look_up(claim))
        if first is None or first.is_free:
            return Retry(claim, keeps_answers)
        answer = self._open(claim, first) if keeps_answers else None
        if answer is None or first.fingerprint != fingerprint:
            raise _refusal(claim, first)
        headers = answer.headers | {
            "idempotency-replayed": "true",
            "x-loraplex-first-request-id": format_id("request", first.request_id),
        }
        return Response(answer.body, headers=headers, media_type=answer.content_type)

    async def claim(self, claim: Claim, request_id: UUID) -> None:
        """Make the key stand for this request, which is on the books.

        Raises:
            IdempotencyReuseError, IdempotencyInProgressError, IdempotencyCompletedError: another
                request was faster; ours is to be voided.
            DatabaseUnavailableError: nothing may be dispatched.
        """

        async def work(session: AsyncSession) -> FirstRequest | None:
            while not await queries.insert_claim(session, claim, request_id, KEEP):
                first = await queries.lock_first(session, claim)
                if first is None:
                    continue  # it expired and was deleted in this very moment
                # Our own: the acknowledgement of an earlier COMMIT was lost.
                if first.request_id != request_id and not first.is_free:
                    return first
                await queries.take_over(session, claim, request_id, KEEP)
                break
            return None

        claiming = run_transaction(self._sessions, work, is_idempotent=True)
        first = await within(self._deadline_s, claiming)
        if first is not None:
            raise _refusal(claim, first)

    async def keep(self, claim: Claim, request_id: UUID, answer: Kept) -> None:
        """Store an answer for later requests with the key; without a database there is none."""
        if len(answer.body) > MAX_ANSWER_BYTES:
            log.info("answer_not_kept", reason="too large", size_bytes=len(answer.body))
            return
        nonce = secrets.token_bytes(_NONCE_BYTES)
        plain = msgspec.msgpack.encode(answer)
        sealed = nonce + self._cipher(claim).encrypt(nonce, plain, request_id.bytes)

        async def work(session: AsyncSession) -> None:
            await queries.keep_answer(session, claim, request_id, sealed)

        try:
            keeping = run_transaction(self._sessions, work, is_idempotent=True)
            await within(min(KEEP_WAIT_S, self._deadline_s), keeping)
        except UnavailableError as error:
            log.warning("answer_not_kept", reason=error.message)

    async def _look_up(self, claim: Claim) -> tuple[bool, FirstRequest | None]:
        """Whether the tenant has answers kept, and whom the key stands for."""
        async with self._sessions() as session:
            keeps_answers = await queries.keeps_answers(session, claim.tenant_id)
            return keeps_answers, await queries.find_first(session, claim)

    def _open(self, claim: Claim, first: FirstRequest) -> Kept | None:
        sealed = first.sealed_answer
        if sealed is None or not first.is_billed:
            return None
        nonce, rest = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            plain = self._cipher(claim).decrypt(nonce, rest, first.request_id.bytes)
        except InvalidTag:
            log.warning("kept_answer_unreadable", request_id=str(first.request_id))
            return None
        return msgspec.msgpack.decode(plain, type=Kept)

    def _cipher(self, claim: Claim) -> AESGCM:
        # A key of its own for every tenant, API key, endpoint and Idempotency-Key: an answer that is moved
        # to another row cannot be read there.
        scope = (
            b"loraplex kept answer\0"
            + claim.tenant_id.bytes
            + claim.key_id.bytes
            + claim.key_hash
            + claim.endpoint.encode()
        )
        return AESGCM(hmac.new(self._secret, scope, hashlib.sha256).digest())


def _refusal(claim: Claim, first: FirstRequest) -> PlatformError:
    if first.fingerprint != claim.fingerprint:
        return IdempotencyReuseError(
            "This Idempotency-Key was used with another body; use a new key.",
            param="Idempotency-Key",
        )
    if not first.is_billed:
        return IdempotencyInProgressError(
            "The first request with this Idempotency-Key is still running; try again.",
            retry_after_s=1,
        )
    return IdempotencyCompletedError(
        FirstRequestReport(
            id=format_id("request", first.request_id),
            finish_reason=first.finish_reason,
            usage=UsageReport.of(first.prompt_tokens, first.completion_tokens, first.cached_tokens),
        )
    )
