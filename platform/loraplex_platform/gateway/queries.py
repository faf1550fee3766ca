"""SQL of the data plane. Everything a tenant owns is asked for with the tenant's id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Select,
    Text,
    Uuid,
    func,
    literal_column,
    or_,
    select,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.dialects.postgresql.psycopg import dialect as psycopg_dialect
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import (
    AdapterVersion,
    BaseModel,
    Deployment,
    DeploymentRevision,
    Gateway,
    Replica,
    Tenant,
)
from loraplex_platform.db.base import Json
from loraplex_platform.db.batched_calls import one_item
from loraplex_platform.db.session import SessionFactory

_FALLBACK_SEEN_WITHIN = timedelta(days=1)
_MAX_REPLICAS = 256


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a public model id stands for right now: one immutable revision."""

    public_name: str
    base_model: str
    deployment_id: UUID
    revision_id: UUID
    adapter_version_id: UUID | None
    adapter_digest: str | None
    created_at: datetime
    owner: str  # the tenant's slug, or "loraplex"
    base_model_id: UUID
    adapter_id: UUID | None


def _visible(
    tenant_id: UUID | ColumnElement[UUID], base_model: str | ColumnElement[str]
) -> Select[str, str, UUID, UUID, UUID | None, str | None, datetime, str, UUID, UUID | None]:
    return (
        select(
            Deployment.public_name,
            BaseModel.name,
            Deployment.id,
            DeploymentRevision.id,
            DeploymentRevision.adapter_version_id,
            DeploymentRevision.adapter_digest,
            Deployment.created_at,
            func.coalesce(Tenant.slug, "loraplex"),
            BaseModel.id,
            AdapterVersion.adapter_id,
        )
        .join(
            DeploymentRevision,
            (DeploymentRevision.id == Deployment.current_revision_id)
            & (DeploymentRevision.deployment_id == Deployment.id)
            & DeploymentRevision.tenant_id.is_not_distinct_from(Deployment.tenant_id),
        )
        .join(BaseModel, BaseModel.id == DeploymentRevision.base_model_id)
        .outerjoin(Tenant, Tenant.id == Deployment.tenant_id)
        .outerjoin(
            AdapterVersion,
            (AdapterVersion.id == DeploymentRevision.adapter_version_id)
            & (AdapterVersion.tenant_id == DeploymentRevision.tenant_id),
        )
        .where(
            or_(Deployment.tenant_id == tenant_id, Deployment.tenant_id.is_(None)),
            Deployment.archived_at.is_(None),
            BaseModel.name == base_model,
        )
    )


def _compile_find() -> str:
    """As text for the driver, once, for many at a time: every request asks this."""
    found = (
        _visible(
            literal_column("asked.tenant_id", Uuid()), literal_column("asked.base_model", Text())
        )
        .where(Deployment.public_name == literal_column("asked.public_name", Text()))
        .order_by(Deployment.tenant_id.is_(None))
        .limit(literal_column("1"))
    )
    compiled = found.compile(
        dialect=psycopg_dialect(),  # type: ignore[no-untyped-call] # SQLAlchemy's
        compile_kwargs={"literal_binds": True},
    )
    return f"""
        select asked.item, found.*
        from jsonb_to_recordset(%(batch)s::jsonb)
            as asked (item integer, tenant_id uuid, base_model text, public_name text)
        left join lateral ({compiled}) as found on true
    """  # noqa: S608 # SQLAlchemy's text


_FIND_MODELS = _compile_find()


async def find_model(
    sessions: SessionFactory, tenant_id: UUID, base_model: str, public_name: str
) -> ServedModel | None:
    """The tenant's deployment of that name, else the platform's."""
    if "\0" in public_name:  # Postgres has no such text, so nothing is called that
        return None
    asked = {"tenant_id": tenant_id, "base_model": base_model, "public_name": public_name}
    found = await sessions.batched(_FIND_MODELS).call(asked)
    if found is None:
        found = await sessions.calls.call(_FIND_MODELS, {"batch": one_item(asked)})
    return None if found[1] is None else ServedModel(*found[1:])


async def list_models(session: AsyncSession, tenant_id: UUID, base_model: str) -> list[ServedModel]:
    """Everything the tenant may call: the platform's first, then by name."""
    statement = _visible(tenant_id, base_model).order_by(
        Deployment.tenant_id.is_not(None), Deployment.public_name
    )
    rows = (await session.execute(statement)).all()
    return [ServedModel(*row) for row in rows]


async def mirrored_replicas(session: AsyncSession) -> Sequence[Json]:
    """Records of replicas seen within a day: whether one still lives, its connection tells."""
    statement = (
        select(Replica.record)
        .where(Replica.last_seen_at > func.now() - _FALLBACK_SEEN_WITHIN)
        .order_by(Replica.last_seen_at.desc())
        .limit(_MAX_REPLICAS)
    )
    return (await session.scalars(statement)).all()


async def note_gateway(session: AsyncSession, gateway_id: str, started_at: datetime) -> None:
    """This gateway's heartbeat."""
    statement = insert(Gateway).values(
        gateway_id=gateway_id, started_at=started_at, last_seen_at=func.now()
    )
    await session.execute(
        statement.on_conflict_do_update(
            index_elements=[Gateway.gateway_id],
            set_={"started_at": started_at, "last_seen_at": func.now()},
        )
    )


async def count_gateways(session: AsyncSession, gone_s: float) -> int:
    """Gateways with a heartbeat in the last `gone_s` seconds."""
    statement = (
        select(func.count())
        .select_from(Gateway)
        .where(Gateway.last_seen_at > func.now() - timedelta(seconds=gone_s))
    )
    return (await session.execute(statement)).scalar_one()
