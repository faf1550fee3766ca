"""The text of an API key: made, checked for typos, and turned into what the database may hold.

`lpx_sk_<public id, 12>_<secret, 40>_<CRC-32 of all before it, 6>`, each part base62, so that a double
click selects the whole key and secret scanners find it. Admin keys are `lpx_ak_...`. The public id
finds the row; the secret (238 bits) proves the holder. What is stored is
HMAC-SHA256(pepper, whole key): with so much entropy no slow hash is needed, and a leaked table is
not a set of working keys.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import zlib
from dataclasses import dataclass, field
from typing import Final, Literal

from pydantic import SecretStr

KeyKind = Literal["sk", "ak"]

_ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_PUBLIC_ID_CHARS = 12
_SECRET_CHARS = 40
_CHECKSUM_CHARS = 6  # 62 ** 6 > 2 ** 32
_PATTERN: Final = re.compile(
    rf"(lpx_(sk|ak)_([0-9A-Za-z]{{{_PUBLIC_ID_CHARS}}})_[0-9A-Za-z]{{{_SECRET_CHARS}}})"
    rf"_([0-9A-Za-z]{{{_CHECKSUM_CHARS}}})"
)


class MalformedKeyError(ValueError):
    """Not a key of ours, or one with a typo. Known without asking the database."""


@dataclass(frozen=True, slots=True)
class MintedKey:
    """A new key. `secret` is the whole text, shown once."""

    kind: KeyKind
    public_id: str
    secret: str = field(repr=False)

    @property
    def last4(self) -> str:
        """What lists show, so that people can tell their keys apart."""
        return self.secret[-4:]


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A well-formed key; whether it is anyone's is for the database to say."""

    kind: KeyKind
    public_id: str


def mint(kind: KeyKind = "sk", public_id: str | None = None) -> MintedKey:
    """A new random key; with `public_id`, a new secret of the key that has it."""
    public_id = public_id or _random_text(_PUBLIC_ID_CHARS)
    body = f"lpx_{kind}_{public_id}_{_random_text(_SECRET_CHARS)}"
    return MintedKey(kind, public_id, f"{body}_{_checksum(body)}")


def parse(text: str) -> ParsedKey:
    """Check form and checksum.

    Raises:
        MalformedKeyError: wrong form, or a mistyped character.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise MalformedKeyError("not of the form lpx_sk_<public id>_<secret>_<checksum>")
    body, kind, public_id, checksum = match.groups()
    if checksum != _checksum(body):
        raise MalformedKeyError("the checksum does not match: a character is wrong")
    return ParsedKey("ak" if kind == "ak" else "sk", public_id)


def mac(pepper: SecretStr, secret: str) -> bytes:
    """What the database stores for a key."""
    key = pepper.get_secret_value().encode()
    return hmac.new(key, secret.encode(), hashlib.sha256).digest()


def is_valid(pepper: SecretStr, secret: str, stored_mac: bytes) -> bool:
    """Whether `secret` is the key behind `stored_mac`, in constant time."""
    return hmac.compare_digest(mac(pepper, secret), stored_mac)


def is_same_secret(pepper: SecretStr, presented: str, expected: SecretStr) -> bool:
    """Whether two whole keys are equal, in time that tells nothing, not even a length."""
    return is_valid(pepper, presented, mac(pepper, expected.get_secret_value()))


def _random_text(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def _checksum(body: str) -> str:
    value = zlib.crc32(body.encode())
    digits = []
    for _ in range(_CHECKSUM_CHARS):
        value, digit = divmod(value, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))
