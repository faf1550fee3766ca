"""What a fresh installation is given; doing it again changes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from loraplex_platform.control import bootstrap
from loraplex_platform.db import AuditLog, BaseModel, Deployment, DeploymentRevision, User
from loraplex_platform.db.session import Database
from loraplex_platform.registry.base_model import BaseModelError
from pydantic import SecretStr, ValidationError
from sqlalchemy import func, select

from tests.platform.control.stand import (
    BASE,
    PASSWORD,
    Stand,
    cheap_passwords,
    settings_for,
    write_model,
)
from tests.support.metering import run_sql


async def test_ensure_is_idempotent_also_at_once(
    db_url: str, db: Database, redis_url: str, short_tmp_path: Path
) -> None:
    write_model(short_tmp_path / "model")
    settings = settings_for(db_url, redis_url, short_tmp_path)

    made = await asyncio.gather(
        *(
            bootstrap.ensure(
                settings, admin_email="Admin@Example.com", admin_password=SecretStr(PASSWORD)
            )
            for _ in range(3)
        )
    )

    assert len({ensured.base_model.id for ensured in made}) == 1
    async with db.sessions() as session:
        counts = [
            await session.scalar(select(func.count()).select_from(table))
            for table in (BaseModel, Deployment, DeploymentRevision, User)
        ]
        [deployment] = (await session.scalars(select(Deployment))).all()
        [user] = (await session.scalars(select(User))).all()
    assert counts == [1, 1, 1, 1]
    assert (deployment.tenant_id, deployment.public_name) == (None, BASE)
    assert (user.email, user.platform_role) == ("admin@example.com", "admin")


async def test_other_weights_under_the_same_name_are_registered_and_nothing_moves_to_them(
    db_url: str, db: Database, redis_url: str, short_tmp_path: Path
) -> None:
    model = write_model(short_tmp_path / "model")
    settings = settings_for(db_url, redis_url, short_tmp_path)
    first = (await bootstrap.ensure(settings)).base_model

    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"\0")
    second = (await bootstrap.ensure(settings)).base_model

    assert first.id != second.id
    assert first.tokenizer_sha256 == second.tokenizer_sha256
    async with db.sessions() as session:
        [deployment] = (await session.scalars(select(Deployment))).all()
        revisions = (
            await session.scalars(select(DeploymentRevision).order_by(DeploymentRevision.number))
        ).all()
    # That is a rollout: no process makes one by being started on another folder.
    assert [r.base_model_id for r in revisions] == [first.id]
    assert deployment.current_revision_id == revisions[0].id


async def test_an_admin_is_brought_in_line(stand: Stand) -> None:
    sessions, passwords = stand.db.sessions, cheap_passwords()
    await stand.login("viewer", "boss@example.com")

    other = SecretStr("another password")
    logged_in = await stand.login("admin", "other@example.com")
    stale = await stand.login("viewer", "boss2@example.com")
    assert (await stale.get("/admin/v1/tenants")).status_code == 200
    await bootstrap.ensure_admin_user(sessions, passwords, "boss2@example.com", other)
    user = await bootstrap.ensure_admin_user(sessions, passwords, "boss@example.com", other)
    again = await bootstrap.ensure_admin_user(sessions, passwords, "boss@example.com", other)

    assert user.id == again.id
    # Logins made with the old password are over; nobody else's are.
    assert (await stale.get("/admin/v1/tenants")).status_code == 401
    assert (await logged_in.get("/admin/v1/tenants")).status_code == 200
    login = {"email": "boss@example.com", "password": "another password"}
    answer = await stand.client(None).post("/admin/v1/sessions", json=login)
    assert answer.json()["user"]["role"] == "admin"
    async with sessions() as session:
        actions = (await session.scalars(select(AuditLog.action))).all()
    assert actions.count("user.reset") == 2
    with pytest.raises(ValidationError):
        await bootstrap.ensure_admin_user(sessions, passwords, "x@y.z", SecretStr("short"))


async def test_the_first_admin_of_the_settings_can_log_in(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    login = {"email": "ada@example.com", "password": PASSWORD}
    async with Stand.open(
        db_url, redis_url, short_tmp_path, admin_email="Ada@example.com", admin_password=PASSWORD
    ) as stand:
        answer = await stand.client(None).post("/admin/v1/sessions", json=login)

        assert answer.status_code == 201
        assert answer.json()["user"]["role"] == "admin"


async def test_housekeeping_deletes_what_is_over_and_nothing_else(stand: Stand) -> None:
    from loraplex_platform.control import housekeeping
    from loraplex_platform.db import IdempotencyRecord, LoginThrottle, Session

    client = await stand.login("admin")
    headers = {"idempotency-key": "k"}
    await client.post("/admin/v1/tenants", json={"slug": "acme"}, headers=headers)
    await stand.client(None).post("/admin/v1/sessions", json={"email": "a@b.c", "password": "x"})
    tables = (IdempotencyRecord, LoginThrottle, Session)

    async def counts() -> list[int | None]:
        async with stand.db.sessions.begin() as session:
            await housekeeping.tidy(session)
            return [await session.scalar(select(func.count()).select_from(t)) for t in tables]

    assert all(await counts())
    await run_sql(stand.db, "update idempotency set expires_at = now()")
    await run_sql(stand.db, "update login_throttle set window_start = now() - interval '1 hour'")
    await run_sql(stand.db, "update sessions set expires_at = now() - interval '31 days'")
    assert await counts() == [0, 0, 0]


async def test_a_folder_that_is_no_model_says_what_is_missing(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    model = write_model(short_tmp_path / "model")
    (model / "model.safetensors").unlink()

    with pytest.raises(BaseModelError, match="models pull"):
        await bootstrap.ensure(settings_for(db_url, redis_url, short_tmp_path))
