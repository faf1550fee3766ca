"""Deployment revisions: what exactly answers, immutable, and the same content never twice.

| field | left open |
|---|---|
| base model | the weights of its engine build, else those that the platform's own deployment answers with |
| adapter version | the base answers |
| engine build | any replica of the base |
| price book | the one in force when a request comes |
| params | the model's own system prompt and sampling |
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.billing import price_queries
from loraplex_platform.db import (
    AdapterVersion,
    BaseModel,
    Deployment,
    DeploymentRevision,
    EngineBuild,
)
from loraplex_platform.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
)
from loraplex_platform.ids import MalformedIdError, format_id, parse_id, uuid7
from loraplex_platform.registry import queries
from loraplex_platform.registry.errors import RolloutActiveError
from loraplex_platform.registry.queries import RevisionFacts
from loraplex_platform.registry.schemas import RevisionContent


@dataclass(frozen=True, slots=True)
class Content:
    """All that makes a revision."""

    base_model: BaseModel
    version: AdapterVersion | None = None
    build: EngineBuild | None = None
    price_book_id: UUID | None = None
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Of its canonical JSON. What is left open is not in it, as in revisions that were made before
        there was a choice.
        """
        content: dict[str, Any] = {
            "base_model": self.base_model.revision,
            "base_model_id": str(self.base_model.id),
            "adapter_version_id": None if self.version is None else str(self.version.id),
            "adapter_digest": None if self.version is None else self.version.digest,
            "params": self.params,
        }
        if self.build is not None:
            content["engine_build"] = self.build.fingerprint
        if self.price_book_id is not None:
            content["price_book_id"] = str(self.price_book_id)
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Asker:
    """Who wants a revision.

    Attributes:
        base_model: what this process, and so every gateway, tokenizes for.
        is_operator: may say by which price book is billed.
    """

    base_model: BaseModel
    is_operator: bool


async def content_of(
    session: AsyncSession,
    asker: Asker,
    deployment: Deployment,
    wanted: RevisionContent,
    version: AdapterVersion | None,
) -> Content:
    """What is asked for, checked.

    Raises:
        InvalidRequestError: no such build or book, or they do not fit; names the field.
        PermissionDeniedError: another price book, by somebody who may not choose it.
    """
    if version is not None:
        trained_on = await queries.base_of_adapter(session, version.adapter_id)
        if trained_on != asker.base_model.name:
            raise InvalidRequestError(
                f"version_id: this adapter is of {trained_on}, and {asker.base_model.name} is served here; upload "
                "one that was trained on it.",
                param="version_id",
            )
    build = await _get_build(session, asker.base_model, wanted.engine_build_id)
    base_model = await _base_of(session, asker.base_model, build)
    current = None
    if deployment.current_revision_id is not None:
        current = await session.get_one(DeploymentRevision, deployment.current_revision_id)
    book_id = None if current is None else current.price_book_id
    if "price_book_id" in wanted.model_fields_set:
        book_id = await _choose_book(session, asker, wanted.price_book_id, book_id)
    if book_id is not None and asker.is_operator:
        adapter_id = None if version is None else version.adapter_id
        # As billing does it: by the base that the deployment was made for, whatever weights answer.
        if not await queries.has_price(
            session, book_id, deployment.base_model_id, adapter_id, deployment.id
        ):
            shown = format_id("price_book", book_id)
            raise InvalidRequestError(
                f"price_book_id: {shown} has no price for input and output of this; a request could not be "
                f"billed. Publish a book that has one for the base model, its adapter or this deployment, or "
                f"send null: the book in force.",
                param="price_book_id",
            )
    return Content(base_model, version, build, book_id, wanted.params)


async def moved_to(
    session: AsyncSession, current: DeploymentRevision, version: AdapterVersion
) -> Content:
    """The same but for the adapter's version: what a followed alias does."""
    [facts] = await queries.facts_of(session, [current])
    return Content(facts.base_model, version, facts.build, current.price_book_id, current.params)


async def make(
    session: AsyncSession, deployment: Deployment, content: Content
) -> tuple[DeploymentRevision, bool]:
    """The deployment's revision of this content, and whether it is new. Its row must be locked."""
    sha256 = content.sha256
    known = await queries.find_revision_by_content(session, deployment.id, sha256)
    if known is not None:
        return known, False
    version = content.version
    revision = DeploymentRevision(
        id=uuid7(),
        deployment_id=deployment.id,
        tenant_id=deployment.tenant_id,
        number=await queries.last_revision_number(session, deployment.id) + 1,
        base_model_id=content.base_model.id,
        adapter_version_id=None if version is None else version.id,
        adapter_digest=None if version is None else version.digest,
        engine_build_id=None if content.build is None else content.build.id,
        price_book_id=content.price_book_id,
        params=content.params,
        sha256=sha256,
    )
    session.add(revision)
    await session.flush()
    await session.refresh(revision)
    return revision, True


async def get(
    session: AsyncSession, deployment: Deployment, revision_id: str, *, param: str | None = None
) -> DeploymentRevision:
    """One of the deployment's.

    Raises:
        NotFoundError: it has no such revision.
    """
    revision = None
    with contextlib.suppress(MalformedIdError):
        revision = await session.get(
            DeploymentRevision, parse_id("deployment_revision", revision_id)
        )
    if revision is None or revision.deployment_id != deployment.id:
        raise NotFoundError(f"{deployment.public_name} has no such revision.", param=param)
    return revision


async def get_usable_version(
    session: AsyncSession, tenant_id: UUID, version_id: str, *, param: str = "version_id"
) -> AdapterVersion:
    """A version of the tenant's that something is about to name; it cannot be retired meanwhile.

    Raises:
        NotFoundError: the tenant has no such version.
        ConflictError: it is retired.
    """
    version = None
    try:
        version_uuid = parse_id("adapter_version", version_id)
    except MalformedIdError:
        version_uuid = None
    if version_uuid is not None:
        version = await queries.find_version(session, tenant_id, version_uuid, to_use=True)
    if version is None:
        raise NotFoundError("No such adapter version.", param=param)
    if version.status != "ready":
        raise ConflictError(
            f"{param}: this version is retired; name another one, or unretire it.", param=param
        )
    return version


async def check_no_rollout(session: AsyncSession, deployment: Deployment) -> None:
    """What a rollout compares must stay as it is.

    Raises:
        RolloutActiveError: one is on its way.
    """
    rollout = await queries.find_active_rollout(session, deployment.id)
    if rollout is not None:
        raise RolloutActiveError(
            deployment.public_name, format_id("rollout", rollout.id), rollout.state
        )


def fields_of(facts: RevisionFacts) -> dict[str, Any]:
    """All that makes a revision, by name, as people compare it."""
    revision = facts.revision
    return {
        "base_model": f"{facts.base_model.name}@{facts.base_model.revision}",
        "version_id": _shown("adapter_version", revision.adapter_version_id),
        "digest": revision.adapter_digest,
        "engine_build_id": _shown("engine_build", revision.engine_build_id),
        "fingerprint": None if facts.build is None else facts.build.fingerprint,
        "price_book_id": _shown("price_book", revision.price_book_id),
        "params.system_prompt": revision.params.get("system_prompt"),
        **{
            f"params.sampling.{name}": value
            for name, value in revision.params.get("sampling", {}).items()
        },
    }


def differences(before: RevisionFacts, after: RevisionFacts) -> dict[str, tuple[Any, Any]]:
    """Where two revisions differ: field -> what it was, what it is."""
    old, new = fields_of(before), fields_of(after)
    return {
        name: (old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


# What of `fields_of` is one thing to change, for those who warn of two at once.
_KINDS: Mapping[str, str] = {
    "base_model": "base_model",
    "version_id": "adapter",
    "digest": "adapter",
    "engine_build_id": "engine_build",
    "fingerprint": "engine_build",
    "price_book_id": "price_book",
    "params.system_prompt": "system_prompt",
}


def kinds_of_change(before: RevisionFacts, after: RevisionFacts) -> list[str]:
    """Which things differ: some of base_model, adapter, engine_build, price_book, system_prompt, sampling.

    New weights come as a build of their own, which is then no second thing.
    """
    kinds = {_KINDS.get(name, "sampling") for name in differences(before, after)}
    if "base_model" in kinds:
        kinds.discard("engine_build")
    return sorted(kinds)


async def _get_build(
    session: AsyncSession, base_model: BaseModel, build_id: str | None
) -> EngineBuild | None:
    if build_id is None:
        return None
    build = None
    with contextlib.suppress(MalformedIdError):
        build = await queries.find_build(session, parse_id("engine_build", build_id))
    if build is None:
        raise InvalidRequestError(
            "engine_build_id: there is no such build; GET /admin/v1/engine-builds lists those that were seen.",
            param="engine_build_id",
        )
    if build.base_model != base_model.name:
        raise InvalidRequestError(
            f"engine_build_id: this build serves {build.base_model}, not {base_model.name}; choose another one.",
            param="engine_build_id",
        )
    for kind in ("tokenizer", "chat_template"):
        theirs, ours = build.facts.get(f"{kind}_sha256"), getattr(base_model, f"{kind}_sha256")
        if theirs and theirs != ours:
            raise InvalidRequestError(
                f"engine_build_id: this build's {kind.replace('_', ' ')} is {theirs}, that of the gateways is "
                f"{ours}: its tokens would mean something else. Serve those weights with the gateways' files.",
                param="engine_build_id",
            )
    return build


async def _base_of(
    session: AsyncSession, base_model: BaseModel, build: EngineBuild | None
) -> BaseModel:
    """The build's weights, else those in force, which are not always those of this process's folder."""
    if build is not None and build.base_model_id is not None:
        return await session.get_one(BaseModel, build.base_model_id)
    deployment = await queries.find_deployment(session, None, base_model.name)
    if deployment is None or deployment.current_revision_id is None:
        return base_model
    current = await session.get_one(DeploymentRevision, deployment.current_revision_id)
    return await session.get_one(BaseModel, current.base_model_id)


async def _choose_book(
    session: AsyncSession, asker: Asker, book_id: str | None, current_id: UUID | None
) -> UUID | None:
    wanted = None
    if book_id is not None:
        try:
            wanted = parse_id("price_book", book_id)
        except MalformedIdError:
            raise _no_book() from None
    if wanted == current_id:
        return wanted
    if not asker.is_operator:
        raise PermissionDeniedError(
            "price_book_id: only the operator chooses it; leave it out.", param="price_book_id"
        )
    if wanted is None:
        return None
    book = await price_queries.find_book(session, wanted)
    if book is None:
        raise _no_book()
    if book.status != "published":
        raise InvalidRequestError(
            f"price_book_id: this book is {book.status}: nothing can be billed by it. Choose a published one, "
            "or send null: the book in force.",
            param="price_book_id",
        )
    return wanted


def _no_book() -> InvalidRequestError:
    return InvalidRequestError(
        "price_book_id: there is no such price book; GET /admin/v1/price-books lists them.",
        param="price_book_id",
    )


def _shown(kind: str, value: UUID | None) -> str | None:
    return None if value is None else format_id(kind, value)
