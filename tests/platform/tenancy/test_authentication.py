from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from loraplex_platform.db.session import DatabaseUnavailableError, open_database
from loraplex_platform.errors import (
    ExpiredKeyError,
    InvalidApiKeyError,
    RevokedKeyError,
    TenantSuspendedError,
)
from loraplex_platform.tenancy import keys
from loraplex_platform.tenancy.authentication import authenticate
from pydantic import SecretStr

from tests.support.metering import PEPPER, add_customer, run_sql
from tests.support.postgres import database_settings

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database


async def test_a_live_key_gives_its_tenant(db: Database) -> None:
    await add_customer(db, "globex")
    customer = await add_customer(db, "acme")

    found = await authenticate(db.sessions, PEPPER, customer.secret)

    assert (found.key_id, found.tenant_id) == (customer.key_id, customer.tenant_id)
    assert (found.tenant_slug, found.key_version) == ("acme", 1)


async def test_unknown_malformed_and_admin_keys_are_invalid(db: Database) -> None:
    customer = await add_customer(db)
    public_id = keys.parse(customer.secret).public_id

    for secret in ("", "nonsense", keys.mint("sk").secret, keys.mint("ak").secret):
        with pytest.raises(InvalidApiKeyError) as refused:
            await authenticate(db.sessions, PEPPER, secret)
        assert refused.value.error_code == "invalid_api_key"
        assert not secret or secret not in refused.value.message
    # A right public id with another secret, and the right key under another pepper.
    forged = f"lpx_sk_{public_id}_{'x' * 40}"
    forged += "_" + keys._checksum(forged)
    with pytest.raises(InvalidApiKeyError, match="Unknown"):
        await authenticate(db.sessions, PEPPER, forged)
    with pytest.raises(InvalidApiKeyError, match="Unknown"):
        await authenticate(db.sessions, SecretStr("p" * 40), customer.secret)


async def test_revoked_expired_and_suspended_are_told_apart(db: Database) -> None:
    revoked = await add_customer(db, "revoked")
    past = datetime.now(UTC) - timedelta(seconds=1)
    expired = await add_customer(db, "expired", expires_at=past)
    suspended = await add_customer(db, "suspended")
    await run_sql(
        db, "update api_keys set status='revoked', revoked_at=now() where id=:id", id=revoked.key_id
    )
    await run_sql(db, "update tenants set status='suspended' where id=:id", id=suspended.tenant_id)

    with pytest.raises(RevokedKeyError):
        await authenticate(db.sessions, PEPPER, revoked.secret)
    with pytest.raises(ExpiredKeyError):
        await authenticate(db.sessions, PEPPER, expired.secret)
    with pytest.raises(TenantSuspendedError):
        await authenticate(db.sessions, PEPPER, suspended.secret)


async def test_a_secret_past_its_rotation_grace_says_so_to_who_holds_it(db: Database) -> None:
    customer = await add_customer(db)
    await run_sql(db, "update api_key_secrets set valid_until = now() - interval '1 s'")

    with pytest.raises(ExpiredKeyError, match="use the new one"):
        await authenticate(db.sessions, PEPPER, customer.secret)


async def test_a_database_that_is_down_is_not_a_refusal() -> None:
    settings = database_settings("postgresql://postgres@/loraplex?host=/nowhere")

    async with open_database(settings) as database:
        with pytest.raises(DatabaseUnavailableError) as down:
            await authenticate(database.sessions, PEPPER, keys.mint().secret)

    assert (down.value.status, down.value.headers) == (503, {"Retry-After": "2"})
