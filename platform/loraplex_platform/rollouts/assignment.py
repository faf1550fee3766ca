"""Which arm of a rollout answers a request: a pure function of salt, subject and weight.

A subject's bucket is a number in 0..9999, and the canary answers it while bucket < weight in basis points. So the
same subject meets the same revision on every gateway and after every restart, raising the weight moves nobody
back, and another salt draws anew. Nothing here reads a clock, a table or the process's hash seed.

Bytes: SHA-256 over fields, each of them its length in 4 bytes (unsigned, big-endian) and then itself: a tag that
names this layout, the salt, the kind of subject, the tenant's id (16 bytes), the subject's own bytes. The lengths
leave one way to read the whole, so no two (salt, subject) share an input. Of the digest, bytes 0-3 as an unsigned
big-endian number modulo 10,000 are the bucket (2^32 is no multiple of it: the first 7,296 buckets are likelier by
2 in a million), and bytes 4-11 as a signed big-endian number are the subject's key in statistics.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Literal
from uuid import UUID

NUM_BUCKETS: Final = 10_000
# Of each text of a conversation's beginning so much is hashed, beside its length: a pasted book must not cost
# the gateway a millisecond.
MAX_HASHED_CHARS: Final = 1024

StickyBy = Literal["tenant", "key", "user", "conversation"]

_LAYOUT: Final = b"loraplex.rollout.1"
_BEGINNING: Final = b"loraplex.conversation.1"
_SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_DIGEST: Final = struct.Struct(">Iq")  # bucket's number, subject's key


@dataclass(frozen=True, slots=True)
class Subject:
    """Whoever stays with one revision.

    Attributes:
        kind: what the request was in fact told apart by: "key" also where a user or a conversation was asked
            for and the request named none.
        identity: within the tenant and the kind.
    """

    kind: StickyBy
    tenant_id: UUID
    identity: bytes


@dataclass(frozen=True, slots=True)
class Assignment:
    """A subject's place in one rollout.

    Attributes:
        bucket: in 0..9999.
        subject_key: 64 bits, signed as Postgres' bigint: what tells this rollout's subjects apart in statistics
            without keeping a user's name. Another rollout's salt gives the same subject another one.
    """

    bucket: int
    subject_key: int

    def is_canary(self, weight_bp: int) -> bool:
        """Whether the canary answers at this weight.

        Raises:
            ValueError: the weight is outside 0..10000.
        """
        check_weight(weight_bp)
        return self.bucket < weight_bp


def assign(salt: bytes, subject: Subject) -> Assignment:
    """The subject's place in the rollout that has this salt."""
    number, subject_key = _DIGEST.unpack_from(
        sha256(
            _joined(
                _LAYOUT,
                salt,
                subject.kind.encode("ascii"),
                subject.tenant_id.bytes,
                subject.identity,
            )
        ).digest()
    )
    return Assignment(number % NUM_BUCKETS, subject_key)


def bucket(salt: bytes, subject: Subject) -> int:
    """The subject's bucket in 0..9999."""
    return assign(salt, subject).bucket


def chooses_canary(salt: bytes, subject: Subject, weight_bp: int) -> bool:
    """Whether the canary answers this subject while it has `weight_bp` (0..10000) of the subjects.

    Raises:
        ValueError: the weight is outside 0..10000.
    """
    return assign(salt, subject).is_canary(weight_bp)


def check_weight(weight_bp: int) -> None:
    """Raises ValueError unless the weight is in 0..10000 basis points."""
    if not 0 <= weight_bp <= NUM_BUCKETS:
        raise ValueError(f"weight_bp is {weight_bp}: it goes from 0 (nobody) to 10000 (everybody)")


# ---------------------------------------------------------------------------- the subject of a request


def subject_of(
    sticky_by: StickyBy,
    *,
    tenant_id: UUID,
    key_id: UUID,
    user: str | None = None,
    conversation_id: str | None = None,
    messages: Iterable[tuple[str, str]] = (),
) -> Subject:
    """Whom a request belongs to under a rollout's `sticky_by`.

    Args:
        user: the request's `user` field.
        conversation_id: as the client states it; it beats the messages.
        messages: role and text of each, oldest first; read no further than the first of a user.
    """
    match sticky_by:
        case "tenant":
            return Subject("tenant", tenant_id, b"")
        case "key":
            return _by_key(tenant_id, key_id)
        case "user":
            return user_or_key(tenant_id, key_id, user)
        case "conversation":
            return conversation_or_key(tenant_id, key_id, conversation_id, messages)


def user_or_key(tenant_id: UUID, key_id: UUID, user: str | None) -> Subject:
    """The user that the request names; its key where it names none (absent or empty)."""
    if not user:
        return _by_key(tenant_id, key_id)
    return Subject("user", tenant_id, _encoded(user))


def conversation_or_key(
    tenant_id: UUID,
    key_id: UUID,
    conversation_id: str | None,
    messages: Iterable[tuple[str, str]],
) -> Subject:
    """The conversation's stated id, else how it began; the key where there is neither (plain completions).

    A beginning is the first system message before the first user message, and that one: what comes later cannot
    change it, so later turns stay. A client that drops its oldest turns or writes the time of day into its system
    message has to state an id. All who begin with the same words are one subject.
    """
    if conversation_id:
        return Subject("conversation", tenant_id, _joined(b"id", _encoded(conversation_id)))
    beginning = _beginning(messages)
    if beginning is None:
        return _by_key(tenant_id, key_id)
    return Subject("conversation", tenant_id, _joined(b"beginning", beginning))


def _by_key(tenant_id: UUID, key_id: UUID) -> Subject:
    return Subject("key", tenant_id, key_id.bytes)


def _beginning(messages: Iterable[tuple[str, str]]) -> bytes | None:
    """A digest of how it begins; None where no user has spoken."""
    system: str | None = None
    for role, text in messages:
        if role == "user":
            told = (b"",) if system is None else (b"system", *_bounded(system))
            return sha256(_joined(_BEGINNING, *told, *_bounded(text))).digest()
        if system is None and role in _SYSTEM_ROLES:
            system = text
    return None


def _bounded(text: str) -> tuple[bytes, bytes]:
    return len(text).to_bytes(8, "big"), _encoded(text[:MAX_HASHED_CHARS])


def _encoded(text: str) -> bytes:
    # Half a surrogate pair, which JSON can carry, is some text as well.
    return text.encode("utf-8", "surrogatepass")


def _joined(*fields: bytes) -> bytes:
    return b"".join([part for field in fields for part in (len(field).to_bytes(4, "big"), field)])
