"""The request log: metadata of every request, never its text."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import Select, select

from loraplex_platform.db import Request


def requests_of(tenant_id: UUID | None) -> Select[Request]:
    """A tenant's requests; None: everybody's."""
    statement = select(Request)
    return statement if tenant_id is None else statement.where(Request.tenant_id == tenant_id)
