"""Signatures that others can check, secrets that a dump does not give away."""

from __future__ import annotations

import json
import time
from uuid import UUID

import pytest
from loraplex_platform.ids import uuid7
from loraplex_platform.webhooks.signing import (
    Sealed,
    Vault,
    WebhookKeyMissingError,
    mint_secret,
    sign,
)
from pydantic import SecretStr
from standardwebhooks import Webhook as Receiver
from standardwebhooks import WebhookVerificationError

KEY = SecretStr("webhook-key-for-tests-0123456789abcdef")
OTHER_KEY = SecretStr("another-key-for-tests-0123456789abcdef")
BODY = json.dumps({"type": "alert", "data": {"pct": 80}}).encode()


def headers(secrets: list[str], body: bytes = BODY, at: float | None = None) -> dict[str, str]:
    return sign("dlv_1", int(at or time.time()), body, secrets)


def test_a_receiver_with_the_published_library_accepts_what_we_sign() -> None:
    secret = mint_secret()

    assert Receiver(secret).verify(BODY, headers([secret])) == json.loads(BODY)


def test_it_refuses_another_secret_a_changed_body_and_an_old_message() -> None:
    secret, other = mint_secret(), mint_secret()
    signed = headers([secret])

    for receiver, body, given in (
        (Receiver(other), BODY, signed),
        (Receiver(secret), BODY.replace(b"80", b"81"), signed),
        (Receiver(secret), BODY, signed | {"webhook-id": "dlv_2"}),
        (Receiver(secret), BODY, headers([secret], at=time.time() - 3600)),
    ):
        with pytest.raises(WebhookVerificationError):
            receiver.verify(body, given)


def test_while_a_rotation_lasts_both_secrets_are_good() -> None:
    old, new = mint_secret(), mint_secret()
    signed = headers([new, old])

    assert Receiver(old).verify(BODY, signed) == Receiver(new).verify(BODY, signed)


def test_secrets_are_random_and_of_the_form_that_libraries_take() -> None:
    secrets = {mint_secret() for _ in range(50)}

    assert len(secrets) == 50
    assert all(secret.startswith("whsec_") for secret in secrets)


def test_a_box_opens_with_its_key_for_its_webhook_only() -> None:
    webhook_id, secret = uuid7(), mint_secret()
    sealed = Vault(KEY).seal(secret, webhook_id)

    assert secret.encode() not in sealed.box
    assert Vault(KEY).seal(secret, webhook_id).box != sealed.box
    assert Vault(KEY).open(sealed, webhook_id) == secret
    assert Vault(OTHER_KEY, KEY).open(sealed, webhook_id) == secret, "the former key still opens"
    changed = Sealed(sealed.box[:-1] + bytes([sealed.box[-1] ^ 1]), sealed.key_id)
    for vault, box, whose in (
        (Vault(OTHER_KEY), sealed, webhook_id),
        (Vault(None), sealed, webhook_id),
        (Vault(KEY), sealed, UUID(int=1)),
        (Vault(KEY), changed, webhook_id),
    ):
        with pytest.raises(WebhookKeyMissingError, match="LORAPLEX_WEBHOOK_KEY"):
            vault.open(box, whose)


def test_without_a_key_nothing_is_sealed() -> None:
    with pytest.raises(WebhookKeyMissingError):
        Vault(None).seal("x", uuid7())


def test_a_vault_shows_no_key() -> None:
    assert KEY.get_secret_value() not in repr(vars(Vault(KEY)))
