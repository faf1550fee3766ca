"""Retiring a version: nothing may begin to use it any more, and engines let it go.

It is refused while something names the version. What runs finishes in any case: an engine evicts an adapter
only when no request of it holds a lease. The files stay in the store, for the bills and answers that name the
version and for `unretire`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.db import AdapterVersion
from loraplex_platform.errors import NotFoundError
from loraplex_platform.ids import MalformedIdError, format_id, parse_id
from loraplex_platform.registry import queries
from loraplex_platform.registry.errors import InUseError

MAX_SHOWN = 20  # of each kind

UseKind = Literal["deployment", "pin", "rollout", "alias", "residency", "request"]
_ID_KINDS = {
    "deployment": "deployment",
    "pin": "deployment",
    "rollout": "rollout",
    "alias": "adapter",
    "residency": "adapter_version",
    "request": "request",
}
_WORDS = {
    "deployment": "deployment {name} answers with it",
    "pin": "a pin of {name} names it",
    "rollout": "rollout {id} of {name} compares it",
    "alias": "alias {name} names it",
    "residency": "the operator keeps it in memory ({name})",
    "request": "request {id} runs",
}


@dataclass(frozen=True, slots=True)
class Use:
    """One thing that names a version. `id`: of that thing; a pin's is its deployment's."""

    kind: UseKind
    id: str
    name: str

    @property
    def words(self) -> str:
        """For people."""
        return _WORDS[self.kind].format(id=self.id, name=self.name)


async def get_version(
    session: AsyncSession,
    tenant_id: UUID,
    adapter_id: UUID,
    version_id: str,
    *,
    to_change: bool = False,
) -> AdapterVersion:
    """A version of the adapter.

    Raises:
        NotFoundError: it has no such version.
    """
    version = None
    with contextlib.suppress(MalformedIdError):
        version = await queries.find_version(
            session, tenant_id, parse_id("adapter_version", version_id), to_change=to_change
        )
    if version is None or version.adapter_id != adapter_id:
        raise NotFoundError("No such adapter version.")
    return version


async def uses_of(session: AsyncSession, version: AdapterVersion) -> list[Use]:
    """What names it now, at most `MAX_SHOWN` of each kind."""
    rows = await queries.uses_of(session, version, MAX_SHOWN)
    return [Use(row.kind, format_id(_ID_KINDS[row.kind], row.id), row.name) for row in rows]


async def retire(session: AsyncSession, actor: Actor, version: AdapterVersion) -> None:
    """Nothing may name it from now on. Again: no-op.

    Args:
        version: locked by `get_version`.

    Raises:
        InUseError: something names it; lists what.
    """
    if version.status == "retired":
        return
    uses = await uses_of(session, version)
    if uses:
        raise InUseError(f"It is in use: {_listed(uses)}. End that first, then retire it.")
    version.status = "retired"
    _record(session, actor, version, "retire")
    await session.flush()


async def unretire(session: AsyncSession, actor: Actor, version: AdapterVersion) -> None:
    """It may be used again. Not retired: no-op."""
    if version.status == "ready":
        return
    version.status = "ready"
    _record(session, actor, version, "unretire")
    await session.flush()


def _listed(uses: Sequence[Use]) -> str:
    return "; ".join(use.words for use in uses)


def _record(session: AsyncSession, actor: Actor, version: AdapterVersion, verb: str) -> None:
    statuses = ("ready", "retired") if verb == "retire" else ("retired", "ready")
    record(
        session,
        actor,
        f"adapter_version.{verb}",
        "adapter_version",
        format_id("adapter_version", version.id),
        tenant_id=version.tenant_id,
        detail={"version": version.version, "digest": version.digest},
        before={"status": statuses[0]},
        after={"status": statuses[1]},
    )
