"""What a fresh installation needs before anyone can use it; every function may be called again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

import structlog
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import SYSTEM, record
from loraplex_platform.db import BaseModel, User
from loraplex_platform.db.session import SessionFactory, open_database
from loraplex_platform.ids import format_id, uuid7
from loraplex_platform.members import service as members
from loraplex_platform.registry import queries as registry
from loraplex_platform.registry.base_model import BaseModelFacts, read_base_model
from loraplex_platform.registry.deployments import ensure_base_deployment
from loraplex_platform.settings import ControlSettings
from loraplex_platform.users import queries as users
from loraplex_platform.users.passwords import Passwords
from loraplex_platform.users.schemas import NewUser
from loraplex_platform.users.service import forget_logins

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Ensured:
    """What is there now."""

    base_model: BaseModel
    admin: User | None


async def ensure(
    settings: ControlSettings,
    *,
    admin_email: str | None = None,
    admin_password: SecretStr | None = None,
) -> Ensured:
    """The base model with its deployment and, if named, an admin who can log in.

    Raises:
        BaseModelError: the model folder is not usable.
        DatabaseUnavailableError: no database.
        pydantic.ValidationError: not an e-mail address, or too short a password.
    """
    async with open_database(settings) as database:
        base_model = await ensure_base_model(database.sessions, settings)
        admin = None
        if admin_email is not None and admin_password is not None:
            admin = await ensure_admin_user(
                database.sessions, Passwords(), admin_email, admin_password
            )
    return Ensured(base_model, admin)


async def ensure_base_model(sessions: SessionFactory, settings: ControlSettings) -> BaseModel:
    """The row of the model in `settings.model_dir`, and the platform's own deployment of it.

    Raises:
        BaseModelError: the folder is not usable.
    """
    facts: BaseModelFacts = await asyncio.to_thread(
        read_base_model, settings.model_dir, settings.base_model
    )
    async with sessions.begin() as session:
        base_model = await registry.ensure_base_model(session, facts)
        deployed = await ensure_base_deployment(session, SYSTEM, base_model)
    log.info("base_model_registered", name=facts.name, revision=facts.revision)
    if deployed.revision.base_model_id != base_model.id:
        log.warning(
            "base_deployment_stays",
            name=facts.name,
            revision=deployed.revision.number,
            its_weights=deployed.facts.base_model.revision,
            weights_here=facts.revision,
            remedy="start a rollout of it to the engine build that serves these weights, or point "
            "LORAPLEX_MODEL_DIR at the other folder",
        )
    return base_model


async def ensure_admin_user(
    sessions: SessionFactory, passwords: Passwords, email: str, password: SecretStr
) -> User:
    """An admin of this e-mail and password: made, or brought in line if it differs.

    Raises:
        pydantic.ValidationError: not an e-mail address, or too short a password.
    """
    new = NewUser(email=email, password=password.get_secret_value(), role="admin")
    async with sessions.begin() as session:
        user = await users.find_user_by_email(session, new.email)
    if user is not None and await _is_as_wanted(user, passwords, new):
        return user
    password_hash = await passwords.hash(new.password)
    async with sessions.begin() as session:
        is_new = user is None and await users.insert_user(
            session,
            User(
                id=uuid7(),
                email=new.email,
                password_hash=password_hash,
                platform_role="admin",
                email_proven_at=datetime.now(UTC),
            ),
        )
        user = await users.get_user_by_email(session, new.email)
        if not is_new:
            await _bring_in_line(session, user.id, password_hash)
        action = "user.create" if is_new else "user.reset"
        detail = {"email": new.email, "role": "admin"}
        record(session, SYSTEM, action, "user", format_id("user", user.id), detail=detail)
    return user


async def _bring_in_line(session: AsyncSession, user_id: UUID, password_hash: str) -> None:
    user = await users.lock_user(session, user_id)
    if user is None:
        raise AssertionError("users are never deleted")
    # Whoever made this account or knew its password may be logged in, or have tied it to an identity
    # of their own: nothing of theirs opens an admin's account.
    await forget_logins(session, user)
    if user.platform_role is None:
        await members.leave_all(session, SYSTEM, user.id, reason="their owner became an operator")
    user.password_hash = password_hash
    user.platform_role = "admin"
    user.disabled_at = None
    user.email_proven_at = datetime.now(UTC)
    await session.flush()


async def _is_as_wanted(user: User, passwords: Passwords, new: NewUser) -> bool:
    if user.disabled_at is not None or user.platform_role != "admin":
        return False
    return await passwords.verify(user.password_hash, new.password)
