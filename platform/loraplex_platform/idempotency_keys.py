"""The header `Idempotency-Key`, as both APIs read it."""

from __future__ import annotations

import hashlib
from typing import Final

from starlette.requests import Request

from loraplex_platform.errors import InvalidRequestError

HEADER: Final = "idempotency-key"
MAX_KEY_CHARS: Final = 255


def idempotency_key_of(request: Request) -> bytes | None:
    """The SHA-256 of the key that a request carries; None if it carries none.

    Raises:
        InvalidRequestError: there are several, or it is empty, too long or not printable ASCII.
    """
    values = request.headers.getlist(HEADER)
    if not values:
        return None
    key = values[0]
    is_readable = 1 <= len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable()
    if len(values) > 1 or not is_readable:
        raise InvalidRequestError(
            f"Idempotency-Key: send one, of 1 to {MAX_KEY_CHARS} printable ASCII characters, for "
            "example a UUID.",
            param="Idempotency-Key",
        )
    return hashlib.sha256(key.encode()).digest()
