"""Aliases, and what names a version, on the wire."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel as Schema
from pydantic import ConfigDict, Field

from loraplex_platform.control.schemas import Body, Resource, UnixSeconds
from loraplex_platform.db import AdapterAlias, AdapterAliasEvent, AdapterVersion
from loraplex_platform.ids import format_id
from loraplex_platform.registry.retirement import Use, UseKind


class NewAlias(Body):
    """What the alias shall name."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"version_id": "ver_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f"}]},
    )

    version_id: str = Field(description="A version of the same adapter.")


class AliasResource(Resource):
    """A movable name of a version. Its id is its name."""

    object: Literal["adapter_alias"] = "adapter_alias"
    id: str
    adapter_id: str
    alias: str
    version_id: str
    version: int
    digest: str
    updated_at: UnixSeconds


class MovedAlias(AliasResource):
    """The alias as it is now."""

    moved: list[str] = Field(description="Deployments that followed it in this moment, by name.")


class AliasEventResource(Resource):
    """From when on an alias named what."""

    object: Literal["adapter_alias_event"] = "adapter_alias_event"
    id: str
    alias: str
    version_id: str | None = Field(description="null: it was deleted.")
    at: UnixSeconds


class UseResource(Schema):
    """One thing that names a version."""

    kind: UseKind
    id: str = Field(description="Of that thing; a pin's and a residency's: what they are of.")
    name: str


class UsesResource(Schema):
    """What names a version: it is not retired before that is gone."""

    object: Literal["adapter_version_uses"] = "adapter_version_uses"
    version_id: str
    uses: list[UseResource] = Field(description="At most 20 of each kind.")


def show_alias(alias: AdapterAlias, version: AdapterVersion) -> AliasResource:
    """The alias as the API shows it."""
    return AliasResource(
        id=alias.alias,
        adapter_id=format_id("adapter", alias.adapter_id),
        alias=alias.alias,
        version_id=format_id("adapter_version", version.id),
        version=version.version,
        digest=version.digest,
        updated_at=alias.updated_at,
    )


def show_event(event: AdapterAliasEvent) -> AliasEventResource:
    """The event as the API shows it."""
    version_id = event.version_id
    return AliasEventResource(
        id=str(event.id),
        alias=event.alias,
        version_id=None if version_id is None else format_id("adapter_version", version_id),
        at=event.at,
    )


def show_uses(version: AdapterVersion, uses: list[Use]) -> UsesResource:
    """What names the version, as the API shows it."""
    return UsesResource(
        version_id=format_id("adapter_version", version.id),
        uses=[UseResource(kind=use.kind, id=use.id, name=use.name) for use in uses],
    )
