"""Which requests limits refused, so that "why was I blocked?" can be answered later.

Never on the way of a request: refusals are counted in memory and written once a second, those of one
key, limit and second as one row with the first few request ids. A flood of refusals is a row a second.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from uuid import UUID

import structlog
from sqlalchemy import insert

from loraplex_platform.db import Refusal
from loraplex_platform.db.session import DatabaseUnavailableError, SessionFactory
from loraplex_platform.errors import PlatformError
from loraplex_platform.ids import uuid7

log = structlog.get_logger(__name__)

FLUSH_INTERVAL_S = 1.0
MAX_GROUPS = 1000  # of one flush: what comes on top is not explained later
MAX_REQUEST_IDS = 32  # of one group


@dataclass(slots=True)
class _Group:
    tenant_id: UUID
    reason: str
    count: int = 0
    request_ids: list[UUID] = field(default_factory=list)


class RefusalLog:
    """Of one gateway."""

    def __init__(self, sessions: SessionFactory) -> None:
        self._sessions = sessions
        self._groups: dict[tuple[UUID | None, str, UUID | None], _Group] = {}

    def note(
        self, tenant_id: UUID, key_id: UUID | None, request_id: UUID, error: PlatformError
    ) -> None:
        """Count a refusal."""
        limit_id: UUID | None = getattr(error, "limit_id", None)
        group_key = (key_id, error.error_code or "", limit_id)
        group = self._groups.get(group_key)
        if group is None:
            if len(self._groups) >= MAX_GROUPS:
                return
            group = self._groups[group_key] = _Group(tenant_id, error.message)
        group.count += 1
        if len(group.request_ids) < MAX_REQUEST_IDS:
            group.request_ids.append(request_id)

    async def flush(self) -> None:
        """Write what has been counted.

        Raises:
            DatabaseUnavailableError: it is lost; limits do not depend on it.
        """
        groups, self._groups = self._groups, {}
        if not groups:
            return
        rows = [
            {
                "id": uuid7(),
                "tenant_id": group.tenant_id,
                "key_id": key_id,
                "code": code,
                "limit_id": limit_id,
                "reason": group.reason,
                "count": group.count,
                "request_ids": group.request_ids,
            }
            for (key_id, code, limit_id), group in groups.items()
        ]
        async with self._sessions.begin() as session:
            await session.execute(insert(Refusal), rows)

    async def run_forever(self) -> None:
        """Write once a second."""
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            try:
                await self.flush()
            except DatabaseUnavailableError as error:
                log.warning("refusals_not_logged", reason=error.message)
            except Exception as error:  # noqa: BLE001 - the next second's must still be written
                log.error("refusal_log_failed", error=type(error).__name__)
