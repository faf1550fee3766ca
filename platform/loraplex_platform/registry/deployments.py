"""Deployments: a tenant's public model ids, and the immutable revisions they point at."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.db import AdapterVersion, BaseModel, Deployment, DeploymentRevision
from loraplex_platform.errors import ConflictError, InvalidRequestError, NotFoundError
from loraplex_platform.ids import MalformedIdError, format_id, parse_id, uuid7
from loraplex_platform.registry import queries
from loraplex_platform.registry.queries import DeployedRevision

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


async def deploy(
    session: AsyncSession,
    actor: Actor,
    base_model: BaseModel,
    tenant_id: UUID,
    *,
    name: str,
    version_id: str | None,
) -> DeployedRevision:
    """Have `name` answer with a version, or with the base, from the next request on.

    A new revision unless the current one is the same already: PUT twice is PUT once.

    Raises:
        InvalidRequestError: not a usable name.
        ConflictError: the name is the base model's.
        NotFoundError: no such version of this tenant.
    """
    if NAME_PATTERN.fullmatch(name) is None:
        raise InvalidRequestError(
            "name: use 1 to 128 letters, digits, '.', '_', ':' or '-', beginning with a letter or "
            "digit.",
            param="name",
        )
    await queries.lock_name(session, "deployment", str(tenant_id), name)
    if await queries.find_platform_deployment(session, name) is not None:
        raise ConflictError(
            f"name: {name} is a base model that every tenant has; choose another name.",
            param="name",
        )
    version = None if version_id is None else await _get_version(session, tenant_id, version_id)
    deployment = await queries.find_deployment(session, tenant_id, name)
    if deployment is None:
        deployment = Deployment(
            id=uuid7(), tenant_id=tenant_id, public_name=name, base_model_id=base_model.id
        )
        session.add(deployment)
        await session.flush()
    is_changed = await _set_revision(session, deployment, base_model, version)
    await session.refresh(deployment)
    [deployed] = await queries.resolve(session, [deployment])
    if is_changed:
        record(
            session,
            actor,
            "deployment.put",
            "deployment",
            format_id("deployment", deployment.id),
            tenant_id=tenant_id,
            detail={
                "name": name,
                "revision": deployed.revision.number,
                "digest": deployed.revision.adapter_digest,
            },
        )
    return deployed


async def ensure_base_deployment(
    session: AsyncSession, actor: Actor, base_model: BaseModel
) -> None:
    """The platform's own deployment of the base, pointing at exactly these weights."""
    await queries.lock_name(session, "deployment", "platform", base_model.name)
    deployment = await queries.find_platform_deployment(session, base_model.name)
    if deployment is None:
        deployment = Deployment(
            id=uuid7(),
            tenant_id=None,
            public_name=base_model.name,
            base_model_id=base_model.id,
        )
        session.add(deployment)
        await session.flush()
    if await _set_revision(session, deployment, base_model, None):
        record(
            session,
            actor,
            "deployment.put",
            "deployment",
            format_id("deployment", deployment.id),
            detail={"name": base_model.name, "base_revision": base_model.revision},
        )


async def find(session: AsyncSession, tenant_id: UUID, name: str) -> DeployedRevision:
    """The live deployment of that name.

    Raises:
        NotFoundError: the tenant has none.
    """
    deployment = await _get(session, tenant_id, name)
    [deployed] = await queries.resolve(session, [deployment])
    return deployed


async def archive(session: AsyncSession, actor: Actor, tenant_id: UUID, name: str) -> None:
    """Take the name away; its history stays for the bills that name it.

    Raises:
        NotFoundError: the tenant has none.
    """
    await queries.lock_name(session, "deployment", str(tenant_id), name)
    deployment = await _get(session, tenant_id, name)
    await queries.point_at(session, deployment.id, archived_at=func.now())
    record(
        session,
        actor,
        "deployment.archive",
        "deployment",
        format_id("deployment", deployment.id),
        tenant_id=tenant_id,
        detail={"name": name},
    )


async def _get(session: AsyncSession, tenant_id: UUID, name: str) -> Deployment:
    deployment = None
    if NAME_PATTERN.fullmatch(name) is not None:
        deployment = await queries.find_deployment(session, tenant_id, name)
    if deployment is None:
        raise NotFoundError("No such deployment.")
    return deployment


async def _get_version(session: AsyncSession, tenant_id: UUID, version_id: str) -> AdapterVersion:
    version = None
    try:
        version_uuid = parse_id("adapter_version", version_id)
    except MalformedIdError:
        version_uuid = None
    if version_uuid is not None:
        version = await queries.find_version(session, tenant_id, version_uuid)
    if version is None:
        raise NotFoundError("No such adapter version.", param="version_id")
    if version.status != "ready":
        raise ConflictError(
            "version_id: this version is retired; deploy another one.", param="version_id"
        )
    return version


async def _set_revision(
    session: AsyncSession,
    deployment: Deployment,
    base_model: BaseModel,
    version: AdapterVersion | None,
) -> bool:
    """Insert a revision and point at it; False if the current one is the same."""
    content: dict[str, Any] = {
        "base_model": base_model.revision,
        "base_model_id": str(base_model.id),
        "adapter_version_id": None if version is None else str(version.id),
        "adapter_digest": None if version is None else version.digest,
        "params": {},
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    if deployment.current_revision_id is not None:
        current = await session.get_one(DeploymentRevision, deployment.current_revision_id)
        if current.sha256 == sha256:
            return False
    number = await queries.last_revision_number(session, deployment.id) + 1
    revision = DeploymentRevision(
        id=uuid7(),
        deployment_id=deployment.id,
        tenant_id=deployment.tenant_id,
        number=number,
        base_model_id=base_model.id,
        adapter_version_id=None if version is None else version.id,
        adapter_digest=None if version is None else version.digest,
        params={},
        sha256=sha256,
    )
    session.add(revision)
    await session.flush()
    await queries.point_at(
        session, deployment.id, current_revision_id=revision.id, base_model_id=base_model.id
    )
    return True
