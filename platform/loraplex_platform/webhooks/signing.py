"""Secrets of webhooks: how they sign, and how they lie in the database.

Signatures are those of Standard Webhooks (https://www.standardwebhooks.com), which has libraries for
receivers in many languages: HMAC-SHA256 over `id.timestamp.body`. While a rotation's grace lasts, the old
secret signs too.

At rest a secret is encrypted with AES-256-GCM under a key that is derived from LORAPLEX_WEBHOOK_KEY. Each
box says by an id which key it is under, so that the setting can be changed: the former one goes to
LORAPLEX_WEBHOOK_OLD_KEY until all secrets have been rotated or sealed anew.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import SecretStr

from loraplex_platform.errors import UnavailableError

PREFIX: Final = "whsec_"
_SECRET_BYTES = 32
_NONCE_BYTES = 12


class WebhookKeyMissingError(UnavailableError):
    """The key that webhook secrets are encrypted under is not set, or not the one they were."""

    code = "webhook_key_missing"


@dataclass(frozen=True, slots=True)
class Sealed:
    """An encrypted secret and the id of the key that it is under."""

    box: bytes
    key_id: str


@dataclass(frozen=True, slots=True)
class _Key:
    id: str
    cipher: AESGCM = field(repr=False)


class Vault:
    """Seals and opens webhook secrets.

    Args:
        key: LORAPLEX_WEBHOOK_KEY; None: nothing can be sealed or opened.
        old_key: the one before, which opens what was sealed then.
    """

    def __init__(self, key: SecretStr | None, old_key: SecretStr | None = None) -> None:
        self._keys = [_derive(each) for each in (key, old_key) if each is not None]
        self._can_seal = key is not None

    def seal(self, secret: str, webhook_id: UUID) -> Sealed:
        """Encrypt; the box opens for this webhook only.

        Raises:
            WebhookKeyMissingError: no key is set.
        """
        if not self._can_seal:
            raise WebhookKeyMissingError(
                "Webhooks need LORAPLEX_WEBHOOK_KEY: the operator of this service has not set it."
            )
        key = self._keys[0]
        nonce = secrets.token_bytes(_NONCE_BYTES)
        box = nonce + key.cipher.encrypt(nonce, secret.encode(), webhook_id.bytes)
        return Sealed(box, key.id)

    def open(self, sealed: Sealed, webhook_id: UUID) -> str:
        """Decrypt.

        Raises:
            WebhookKeyMissingError: its key is not set here, or the box is another webhook's.
        """
        for key in self._keys:
            if key.id == sealed.key_id:
                nonce, text = sealed.box[:_NONCE_BYTES], sealed.box[_NONCE_BYTES:]
                try:
                    return key.cipher.decrypt(nonce, text, webhook_id.bytes).decode()
                except InvalidTag:
                    break
        raise WebhookKeyMissingError(
            f"The secret is encrypted under the key {sealed.key_id}: set it as LORAPLEX_WEBHOOK_KEY or "
            "LORAPLEX_WEBHOOK_OLD_KEY."
        )


def mint_secret() -> str:
    """A new signing secret, as receivers configure it."""
    return PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def sign(message_id: str, timestamp: int, body: bytes, secrets_: Sequence[str]) -> dict[str, str]:
    """The headers that prove who sent `body`.

    Args:
        message_id: the same for every try of one message; receivers dedupe by it.
        timestamp: Unix seconds of this try; receivers refuse old ones.
        secrets_: the current one first.
    """
    signed = f"{message_id}.{timestamp}.".encode() + body
    signatures = []
    for secret in secrets_:
        key = base64.b64decode(secret.removeprefix(PREFIX))
        digest = hmac.digest(key, signed, hashlib.sha256)
        signatures.append(f"v1,{base64.b64encode(digest).decode()}")
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(signatures),
    }


def _derive(key: SecretStr) -> _Key:
    material = HKDF(
        algorithm=hashes.SHA256(), length=32, salt=None, info=b"loraplex webhook secrets"
    ).derive(key.get_secret_value().encode())
    return _Key(hashlib.sha256(b"id" + material).hexdigest()[:8], AESGCM(material))
