"""Deployments: a tenant's public model ids, and the immutable revisions they point at."""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.control.etag import check_version
from loraplex_platform.db import (
    AdapterAlias,
    AdapterVersion,
    BaseModel,
    Deployment,
    DeploymentRevision,
)
from loraplex_platform.errors import ConflictError, InvalidRequestError, NotFoundError
from loraplex_platform.ids import MalformedIdError, format_id, parse_id, uuid7
from loraplex_platform.registry import pin_queries, queries, revisions
from loraplex_platform.registry.queries import DeployedRevision, RevisionFacts
from loraplex_platform.registry.revisions import Asker, Content
from loraplex_platform.registry.schemas import (
    FollowedAlias,
    NewDeployment,
    RevisionContent,
    show_deployment,
)

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


async def deploy(
    session: AsyncSession,
    actor: Actor,
    asker: Asker,
    tenant_id: UUID | None,
    name: str,
    wanted: NewDeployment,
    if_match: int | None = None,
) -> DeployedRevision:
    """Have `name` answer with a version, or with the base, from the next request on.

    PUT twice is PUT once: the same content is the same revision, also one from before.

    Args:
        tenant_id: None: the platform's own deployment, which is there already.
        if_match: the version that the caller has read; None: whichever is there.

    Raises:
        InvalidRequestError: not a usable name; or a field does not fit.
        NotFoundError: no such version, adapter or alias of this tenant, or no such platform's deployment.
        ConflictError: the name is the base model's; a version is retired; a rollout is on its way; it has
            changed since it was read.
    """
    _check_name(name)
    owner = "platform" if tenant_id is None else str(tenant_id)
    # Aliases before deployments, here and where an alias moves: nobody waits in a circle.
    alias = None if tenant_id is None else await _find_followed(session, tenant_id, wanted.follow)
    await queries.lock_name(session, "deployment", owner, name)
    base_name = asker.base_model.name
    if tenant_id is not None and await queries.find_deployment(session, None, name) is not None:
        raise ConflictError(
            f"name: {name} is a base model that every tenant has; choose another name.",
            param="name",
        )
    deployment = await queries.find_deployment(session, tenant_id, name, for_update=True)
    before = None
    if deployment is None:
        if tenant_id is None:
            raise NotFoundError(
                f"The platform has no deployment {name}: it has one of each base model that was served, and of "
                f"this fleet's, {base_name}."
            )
        check_version(if_match, 0, {}, {})
        deployment = Deployment(
            id=uuid7(), tenant_id=tenant_id, public_name=name, base_model_id=asker.base_model.id
        )
        session.add(deployment)
        await session.flush()
    else:
        [shown] = await queries.resolve(session, [deployment])
        before = _settings_of(shown)
        check_version(if_match, deployment.row_version, _asked(wanted), before)
    version = await _get_version(session, tenant_id, wanted, alias)
    content = await revisions.content_of(session, asker, deployment, wanted, version)
    revision, _ = await revisions.make(session, deployment, content)
    following = (None, None) if alias is None else (alias.adapter_id, alias.alias)
    is_moved = revision.id != deployment.current_revision_id
    if is_moved:
        await revisions.check_no_rollout(session, deployment)
    if is_moved or following != (deployment.followed_adapter_id, deployment.followed_alias):
        await queries.point_at(
            session,
            deployment.id,
            current_revision_id=revision.id,
            followed_adapter_id=following[0],
            followed_alias=following[1],
        )
        await session.refresh(deployment)
        [deployed] = await queries.resolve(session, [deployment])
        _record(session, actor, "deployment.put", deployed, before=before)
        return deployed
    await session.refresh(deployment)
    [deployed] = await queries.resolve(session, [deployment])
    return deployed


async def add_revision(
    session: AsyncSession,
    actor: Actor,
    asker: Asker,
    tenant_id: UUID | None,
    name: str,
    wanted: RevisionContent,
) -> tuple[RevisionFacts, bool]:
    """Make a revision that nothing points at yet, for a rollout or a pin; whether it is new.

    Raises:
        InvalidRequestError: a field does not fit.
        NotFoundError: no such deployment or version.
        ConflictError: the version is retired.
    """
    deployment = await get(session, tenant_id, name, for_update=True)
    version = await _get_version(session, tenant_id, wanted, None)
    content = await revisions.content_of(session, asker, deployment, wanted, version)
    revision, is_new = await revisions.make(session, deployment, content)
    [facts] = await queries.facts_of(session, [revision])
    if is_new:
        record(
            session,
            actor,
            "deployment_revision.create",
            "deployment_revision",
            format_id("deployment_revision", revision.id),
            tenant_id=tenant_id,
            detail={"deployment": name, "number": revision.number, "sha256": revision.sha256},
        )
    return facts, is_new


async def follow_alias(
    session: AsyncSession, actor: Actor, alias: AdapterAlias, version: AdapterVersion
) -> list[DeployedRevision]:
    """Give each deployment that follows `alias` its revision of the version that it names now.

    Raises:
        RolloutActiveError: a rollout of one of them is on its way: then none moves.
    """
    moved = []
    for deployment in await queries.followers_of(session, alias.adapter_id, alias.alias):
        if deployment.current_revision_id is None:
            continue
        current = await session.get_one(DeploymentRevision, deployment.current_revision_id)
        content = await revisions.moved_to(session, current, version)
        revision, _ = await revisions.make(session, deployment, content)
        if revision.id == current.id:
            continue
        await revisions.check_no_rollout(session, deployment)
        [shown] = await queries.resolve(session, [deployment])
        before = _settings_of(shown)
        await queries.point_at(session, deployment.id, current_revision_id=revision.id)
        await session.refresh(deployment)
        [deployed] = await queries.resolve(session, [deployment])
        _record(session, actor, "deployment.follow", deployed, before=before)
        moved.append(deployed)
    return moved


async def ensure_base_deployment(
    session: AsyncSession, actor: Actor, base_model: BaseModel
) -> DeployedRevision:
    """The platform's own deployment of the base. One that is there stays at its weights: moving it is a
    rollout, and no process does so by being started on another folder.
    """
    await queries.lock_name(session, "deployment", "platform", base_model.name)
    deployment = await queries.find_deployment(session, None, base_model.name)
    if deployment is None:
        deployment = Deployment(
            id=uuid7(), tenant_id=None, public_name=base_model.name, base_model_id=base_model.id
        )
        session.add(deployment)
        await session.flush()
    if deployment.current_revision_id is None:
        revision, _ = await revisions.make(session, deployment, Content(base_model))
        await queries.point_at(
            session,
            deployment.id,
            current_revision_id=revision.id,
            base_model_id=base_model.id,
        )
        record(
            session,
            actor,
            "deployment.put",
            "deployment",
            format_id("deployment", deployment.id),
            detail={"name": base_model.name, "base_revision": base_model.revision},
        )
        await session.refresh(deployment)
    [deployed] = await queries.resolve(session, [deployment])
    return deployed


async def find(session: AsyncSession, tenant_id: UUID | None, name: str) -> DeployedRevision:
    """The live deployment of that name.

    Raises:
        NotFoundError: the owner has none.
    """
    [deployed] = await queries.resolve(session, [await get(session, tenant_id, name)])
    return deployed


async def archive(
    session: AsyncSession, actor: Actor, tenant_id: UUID, name: str, if_match: int | None = None
) -> None:
    """Take the name away; its history stays for the bills that name it, and its pin is no more.

    Raises:
        NotFoundError: the tenant has none.
        ConflictError: a rollout of it is on its way; it has changed since it was read.
    """
    await queries.lock_name(session, "deployment", str(tenant_id), name)
    deployment = await get(session, tenant_id, name, for_update=True)
    [shown] = await queries.resolve(session, [deployment])
    before = without_prompt(_settings_of(shown))
    check_version(if_match, deployment.row_version, {"archived": True}, {"archived": False})
    await revisions.check_no_rollout(session, deployment)
    is_unpinned = await pin_queries.remove(session, tenant_id, deployment.id)
    await queries.point_at(
        session,
        deployment.id,
        archived_at=func.now(),
        followed_adapter_id=None,
        followed_alias=None,
    )
    record(
        session,
        actor,
        "deployment.archive",
        "deployment",
        format_id("deployment", deployment.id),
        tenant_id=tenant_id,
        detail={"name": name, "had_pin": is_unpinned},
        before=before,
    )


async def get(
    session: AsyncSession, tenant_id: UUID | None, name: str, *, for_update: bool = False
) -> Deployment:
    """The live deployment of that name.

    Raises:
        NotFoundError: the owner has none.
    """
    deployment = None
    if NAME_PATTERN.fullmatch(name) is not None:
        deployment = await queries.find_deployment(session, tenant_id, name, for_update=for_update)
    if deployment is None:
        raise NotFoundError("No such deployment.")
    return deployment


async def get_reachable(session: AsyncSession, tenant_id: UUID, name: str) -> Deployment:
    """The tenant's deployment of that name, else the platform's: what its clients reach by it.

    Raises:
        NotFoundError: neither has one.
    """
    deployment = None
    if NAME_PATTERN.fullmatch(name) is not None:
        deployment = await queries.find_deployment(
            session, tenant_id, name
        ) or await queries.find_deployment(session, None, name)
    if deployment is None:
        raise NotFoundError("No such deployment.")
    return deployment


def _check_name(name: str) -> None:
    if NAME_PATTERN.fullmatch(name) is None:
        raise InvalidRequestError(
            "name: use 1 to 128 letters, digits, '.', '_', ':' or '-', beginning with a letter or "
            "digit.",
            param="name",
        )


async def _find_followed(
    session: AsyncSession, tenant_id: UUID, follow: FollowedAlias | None
) -> AdapterAlias | None:
    if follow is None:
        return None
    alias = None
    try:
        adapter_id = parse_id("adapter", follow.adapter_id)
    except MalformedIdError:
        adapter_id = None
    if adapter_id is not None:
        await queries.lock_name(session, "alias", str(adapter_id), follow.alias)
        alias = await queries.find_alias(session, tenant_id, adapter_id, follow.alias)
    if alias is None:
        raise NotFoundError("follow: there is no such alias of this adapter.", param="follow")
    return alias


async def _get_version(
    session: AsyncSession,
    tenant_id: UUID | None,
    wanted: RevisionContent,
    alias: AdapterAlias | None,
) -> AdapterVersion | None:
    if tenant_id is None:
        for field in ("version_id", "follow"):
            if getattr(wanted, field, None) is not None:
                raise InvalidRequestError(
                    f"{field}: the platform's deployment answers with the base: send version_id null.",
                    param=field,
                )
        return None
    if alias is not None:
        version_id = format_id("adapter_version", alias.version_id)
        return await revisions.get_usable_version(session, tenant_id, version_id, param="follow")
    if wanted.version_id is None:
        return None
    return await revisions.get_usable_version(session, tenant_id, wanted.version_id)


def _settings_of(deployed: DeployedRevision) -> dict[str, Any]:
    """What a PUT sets, as the API shows it."""
    shown = show_deployment(deployed)
    follow = None if shown.follow is None else shown.follow.model_dump()
    return {
        "version_id": shown.revision.version_id,
        "engine_build_id": shown.revision.engine_build_id,
        "price_book_id": shown.revision.price_book_id,
        "params": shown.revision.params,
        "follow": follow,
    }


def _asked(wanted: NewDeployment) -> dict[str, Any]:
    """Of a PUT's fields, those that say something."""
    asked = wanted.model_dump(include={"engine_build_id", "follow"})
    asked["params"] = wanted.params
    asked |= wanted.model_dump(include={"version_id", "price_book_id"}, exclude_unset=True)
    if wanted.follow is not None:
        asked.pop("version_id", None)
    return asked


def _record(
    session: AsyncSession,
    actor: Actor,
    action: str,
    deployed: DeployedRevision,
    *,
    before: dict[str, Any] | None,
) -> None:
    deployment, revision = deployed.deployment, deployed.revision
    after = _settings_of(deployed)
    # A prompt is no tenant's traffic, but nobody's business in a log either: its revision has it.
    changes = {} if before is None else {k: v for k, v in after.items() if before[k] != v}
    record(
        session,
        actor,
        action,
        "deployment",
        format_id("deployment", deployment.id),
        tenant_id=deployment.tenant_id,
        detail={
            "name": deployment.public_name,
            "revision": revision.number,
            "revision_id": format_id("deployment_revision", revision.id),
            "digest": revision.adapter_digest,
        },
        before=None if before is None else without_prompt({k: before[k] for k in changes}),
        after=None if before is None else without_prompt(changes),
    )


def without_prompt(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the length of the system prompt instead of its text."""
    prompt = (settings.get("params") or {}).get("system_prompt")
    if prompt is None:
        return settings
    return settings | {
        "params": settings["params"] | {"system_prompt": f"({len(prompt)} characters)"}
    }
