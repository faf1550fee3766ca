"""SQL of uploads and imports. A tenant's things take its id; what a job does is fenced by its lease."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import CursorResult, Select, and_, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import AdapterImport, AdapterUpload
from loraplex_platform.ids import uuid7

# ---------------------------------------------------------------------------- uploads


def uploads_of(tenant_id: UUID) -> Select[AdapterUpload]:
    """The tenant's uploads, ended ones included until they are forgotten."""
    return select(AdapterUpload).where(AdapterUpload.tenant_id == tenant_id)


async def find_upload(
    session: AsyncSession, tenant_id: UUID, upload_id: UUID
) -> AdapterUpload | None:
    """By id, only if the tenant owns it."""
    return await session.scalar(uploads_of(tenant_id).where(AdapterUpload.id == upload_id))


async def count_open_uploads(session: AsyncSession, tenant_id: UUID) -> int:
    """Unfinished ones that have not expired."""
    statement = select(func.count()).where(
        AdapterUpload.tenant_id == tenant_id,
        AdapterUpload.state == "open",
        AdapterUpload.expires_at > func.now(),
    )
    return int((await session.execute(statement)).scalar_one())


async def change_upload(
    session: AsyncSession,
    upload_id: UUID,
    keep: timedelta,
    **values: Any,  # noqa: ANN401
) -> None:
    """Change an upload's row, and keep it for so long from now on."""
    await session.execute(
        update(AdapterUpload)
        .where(AdapterUpload.id == upload_id)
        .values(expires_at=func.now() + keep, **values)
        .execution_options(synchronize_session=False)
    )


async def delete_uploads(
    session: AsyncSession, *, tenant_id: UUID | None = None, upload_id: UUID | None = None
) -> list[UUID]:
    """Delete one, a tenant's, or (neither is given) what has expired; the ids."""
    condition = AdapterUpload.expires_at <= func.now()
    if tenant_id is not None:
        condition = AdapterUpload.tenant_id == tenant_id
    statement = delete(AdapterUpload).where(condition)
    if upload_id is not None:
        statement = statement.where(AdapterUpload.id == upload_id)
    return list((await session.scalars(statement.returning(AdapterUpload.id))).all())


async def uploads_without_row(session: AsyncSession, upload_ids: Sequence[UUID]) -> set[UUID]:
    """Those of which the database knows nothing."""
    statement = select(AdapterUpload.id).where(AdapterUpload.id.in_(upload_ids))
    return set(upload_ids) - set((await session.scalars(statement)).all())


# ---------------------------------------------------------------------------- imports


def imports_of(tenant_id: UUID) -> Select[AdapterImport]:
    """The tenant's imports."""
    return select(AdapterImport).where(AdapterImport.tenant_id == tenant_id)


async def find_import(
    session: AsyncSession, tenant_id: UUID, import_id: UUID
) -> AdapterImport | None:
    """By id, only if the tenant owns it."""
    return await session.scalar(imports_of(tenant_id).where(AdapterImport.id == import_id))


async def count_open_imports(session: AsyncSession, tenant_id: UUID) -> int:
    """Queued and running ones."""
    statement = select(func.count()).where(
        AdapterImport.tenant_id == tenant_id, AdapterImport.state.in_(("queued", "running"))
    )
    return int((await session.execute(statement)).scalar_one())


async def claim_import(session: AsyncSession, lease: timedelta) -> AdapterImport | None:
    """The oldest that is due, for whoever asks: queued, or left by a process whose lease ran out."""
    due = (
        select(AdapterImport.id)
        .where(
            or_(
                and_(AdapterImport.state == "queued", AdapterImport.next_at <= func.now()),
                and_(AdapterImport.state == "running", AdapterImport.lease_until <= func.now()),
            )
        )
        .order_by(AdapterImport.next_at)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    statement = (
        update(AdapterImport)
        .where(AdapterImport.id == due.scalar_subquery())
        .values(
            state="running",
            lease_token=uuid7(),
            lease_until=func.now() + lease,
            attempts=AdapterImport.attempts + 1,
            received_bytes=0,
        )
        .returning(AdapterImport)
    )
    return await session.scalar(statement)


async def hold_import(
    session: AsyncSession,
    job: AdapterImport,
    lease: timedelta,
    **values: Any,  # noqa: ANN401
) -> bool:
    """Renew the lease and note how far it is; False if the job is not ours any more."""
    return await _change(session, job, lease_until=func.now() + lease, **values)


async def end_import(session: AsyncSession, job: AdapterImport, **values: Any) -> bool:  # noqa: ANN401
    """Give the lease up with what became of it; False if the job is not ours any more."""
    return await _change(session, job, lease_token=None, lease_until=None, **values)


async def _change(session: AsyncSession, job: AdapterImport, **values: Any) -> bool:  # noqa: ANN401
    result = await session.execute(
        update(AdapterImport)
        .where(AdapterImport.id == job.id, AdapterImport.lease_token == job.lease_token)
        .values(**values)
        .execution_options(synchronize_session=False)
    )
    assert isinstance(result, CursorResult)  # noqa: S101 # what an UPDATE returns
    return result.rowcount == 1


async def delete_imports(
    session: AsyncSession, *, tenant_id: UUID | None = None, older_than: timedelta | None = None
) -> None:
    """A tenant's, or those that ended so long ago."""
    conditions: Iterable[Any] = ()
    if tenant_id is not None:
        conditions = (AdapterImport.tenant_id == tenant_id,)
    elif older_than is not None:
        conditions = (AdapterImport.finished_at <= func.now() - older_than,)
    else:
        raise ValueError("neither a tenant nor an age")
    await session.execute(delete(AdapterImport).where(*conditions))
