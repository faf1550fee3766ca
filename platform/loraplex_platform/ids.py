"""Identifiers: UUIDv7 inside, `<prefix>_<32 hex>` at the API.

UUIDv7 (RFC 9562, section 5.7) is ordered by time, which is what lets `requests` and `ledger` be
partitioned by their primary key alone.
"""

from __future__ import annotations

import secrets
import time
from typing import Final
from uuid import UUID

PREFIXES: Final = {
    "tenant": "ten",
    "project": "prj",
    "user": "usr",
    "invitation": "ivt",
    "api_key": "key",
    "adapter": "adp",
    "adapter_version": "ver",
    "adapter_upload": "upl",
    "adapter_import": "imp",
    "deployment": "dep",
    "deployment_revision": "rev",
    "base_model": "bas",
    "price_book": "prb",
    "adjustment": "adj",
    "invoice": "inv",
    "request": "req",
    "limit": "lim",
    "session": "ses",
    "audit_entry": "aud",
    "webhook": "whk",
    "webhook_delivery": "dlv",
    "engine_build": "bld",
    "rollout": "rol",
    "eval_suite": "evs",
    "eval_run": "evr",
    "eval_result": "evc",
    "eval_schedule": "evd",
    "alert": "alt",
}

_HEX_CHARS = 32


class MalformedIdError(ValueError):
    """Not an id of the expected kind; callers answer as they would for an unknown one."""


def uuid7(unix_ms: int | None = None) -> UUID:
    """A new UUIDv7: 48 bits of Unix milliseconds, then 74 random bits."""
    ms = time.time_ns() // 1_000_000 if unix_ms is None else unix_ms
    random_bits = secrets.randbits(74)
    value = (ms & ((1 << 48) - 1)) << 80
    value |= 0x7 << 76
    value |= (random_bits >> 62) << 64
    value |= 0b10 << 62
    value |= random_bits & ((1 << 62) - 1)
    return UUID(int=value)


def uuid7_floor(unix_ms: int) -> UUID:
    """The smallest UUID whose timestamp is `unix_ms`: a bound for ranges and partitions."""
    return UUID(int=(unix_ms & ((1 << 48) - 1)) << 80)


def unix_s_of(value: UUID) -> float:
    """When a UUIDv7 was made, by its maker's clock."""
    return (value.int >> 80) / 1000


def format_id(kind: str, value: UUID) -> str:
    """`format_id("tenant", u)` -> `ten_<32 hex>`."""
    return f"{PREFIXES[kind]}_{value.hex}"


def parse_id(kind: str, text: str) -> UUID:
    """The UUID in an id of the given kind.

    Raises:
        MalformedIdError: another kind's prefix, or not 32 lower-case hex digits.
    """
    prefix, _, digits = text.partition("_")
    is_hex = len(digits) == _HEX_CHARS and all(c in "0123456789abcdef" for c in digits)
    if prefix != PREFIXES[kind] or not is_hex:
        raise MalformedIdError(f"not a {kind} id: expected {PREFIXES[kind]}_ and 32 hex digits")
    return UUID(hex=digits)


def parse_id_or_none(kind: str, text: str) -> UUID | None:
    """The UUID in an id of the given kind; None where the text is no such id, which nothing has."""
    try:
        return parse_id(kind, text)
    except MalformedIdError:
        return None
