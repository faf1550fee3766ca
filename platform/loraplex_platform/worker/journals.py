"""Bring the engines' journals to Postgres: the other side of the identity.

Entries and cursor land in one transaction, so that a crash anywhere repeats entries, which changes
nothing, and never skips one that can land: what Postgres refuses for its content is logged, counted
and left behind, so that it stops nothing but itself. A journal has one writer, so reading it by "greater than the last
sequence number" is safe, unlike doing so with a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import UUID

import structlog
from loraplex_engine.client import EngineLostError
from loraplex_engine.protocol import JournalEntry
from sqlalchemy import exc
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import EngineUsage, Request
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.db.transactions import run_transaction
from loraplex_platform.metering import queries as metering_queries
from loraplex_platform.metering.policy import AttemptUsage
from loraplex_platform.worker import queries
from loraplex_platform.worker.engines import ConnectedEngines, ConnectedReplica

log = structlog.get_logger(__name__)

PAGE = 1000
_REFUSALS = (exc.DBAPIError, ValueError, OverflowError)


class JournalPuller:
    """See the module's header. `on_skipped` is called for every entry that cannot land."""

    def __init__(
        self,
        sessions: SessionFactory,
        engines: ConnectedEngines,
        *,
        on_skipped: Callable[[], object] = lambda: None,
    ) -> None:
        self._sessions = sessions
        self._engines = engines
        self._on_skipped = on_skipped
        self._journal_ids: dict[str, str] = {}  # replica id -> the journal it had last

    async def pull_once(self) -> int:
        """Everything new of every connected replica; how many entries that was."""
        landed = 0
        for replica in self._engines.all():
            try:
                landed += await self._pull(replica)
            except EngineLostError as error:
                log.info("journal_unreachable", replica_id=replica.replica_id, reason=str(error))
        return landed

    async def _pull(self, replica: ConnectedReplica) -> int:
        journal_id = self._journal_ids.get(replica.replica_id)
        if journal_id is None:
            journal_id = (await replica.client.read_journal(0, limit=0)).journal_id
        async with self._sessions() as session:
            last_seq = await queries.load_cursor(session, replica.replica_id, journal_id)
        landed = 0
        while True:
            reply = await replica.client.read_journal(last_seq, limit=PAGE)
            self._journal_ids[replica.replica_id] = reply.journal_id
            if reply.journal_id != journal_id or not reply.entries:
                return landed  # a new journal is read from its own cursor, in the next round
            if reply.entries[0].seq != last_seq + 1:
                log.error(
                    "journal_gap",
                    replica_id=replica.replica_id,
                    after_seq=last_seq,
                    found_seq=reply.entries[0].seq,
                )
            num_skipped = await land(self._sessions, replica.replica_id, journal_id, reply.entries)
            for _ in range(num_skipped):
                self._on_skipped()
            last_seq = reply.entries[-1].seq
            landed += len(reply.entries)


async def land(
    sessions: SessionFactory, replica_id: str, journal_id: str, entries: Sequence[JournalEntry]
) -> int:
    """Entries and cursor; repeating it changes nothing.

    Returns:
        How many entries cannot land, ever, and were passed over.
    """
    try:
        return await _land_together(sessions, replica_id, journal_id, entries)
    except _REFUSALS as error:
        _raise_unless_bad_data(error)
    num_skipped = 0
    for entry in entries:
        try:
            num_skipped += await _land_together(sessions, replica_id, journal_id, [entry])
        except _REFUSALS as error:
            _raise_unless_bad_data(error)
            # Its attempt stays unconfirmed or its request reserved, which the invariants show.
            reason = type(getattr(error, "orig", None) or error).__name__
            log.error("journal_entry_skipped", replica_id=replica_id, seq=entry.seq, reason=reason)
            await _land_together(sessions, replica_id, journal_id, [], entry.seq)
            num_skipped += 1
    return num_skipped


def _raise_unless_bad_data(error: Exception) -> None:
    """Let everything pass that another try, or another day, may mend."""
    if not isinstance(error, exc.DBAPIError):
        return
    # https://www.postgresql.org/docs/current/errcodes-appendix.html: 22 data exception, 23 integrity
    # constraint violation. A unique violation is another puller's success: the next round sees it.
    state = getattr(error.orig, "sqlstate", None) or ""
    if isinstance(error, exc.DataError) or (state.startswith(("22", "23")) and state != "23505"):
        return
    raise error


async def _land_together(
    sessions: SessionFactory,
    replica_id: str,
    journal_id: str,
    entries: Sequence[JournalEntry],
    last_seq: int | None = None,
) -> int:
    """All in one transaction, and the cursor to the last of them; how many were malformed."""
    known = [parsed for entry in entries if (parsed := _parse(replica_id, entry)) is not None]
    # All rows in one order, here and in renewals, so that batches never wait for each other.
    known.sort(key=lambda item: (item[0], item[2].attempt))

    async def work(session: AsyncSession) -> None:
        await queries.land_entries(session, replica_id, known)
        ids = [request_id for request_id, _, _ in known]
        for request, usage in await queries.closed_without_attempt(session, ids):
            await _absorb_late(session, request, usage)
        end = entries[-1].seq if last_seq is None else last_seq
        await queries.move_cursor(session, replica_id, journal_id, end)

    await run_transaction(sessions, work, is_idempotent=True)
    return len(entries) - len(known)


async def _absorb_late(session: AsyncSession, request: Request, landed: EngineUsage) -> None:
    """An attempt that turned up after its request was closed without it: the platform pays."""
    usage = AttemptUsage(
        outcome="lost",
        source="journal",
        prompt_tokens=landed.prompt_tokens,
        cached_tokens=landed.cached_tokens,
        generated=landed.completion_tokens,
        attempt=landed.attempt,
        replica_id=landed.replica_id,
    )
    await metering_queries.absorb_late(session, request.id, usage)
    log.warning("usage_landed_late", request_id=str(request.id), state=request.state)


def _parse(replica_id: str, entry: JournalEntry) -> tuple[UUID, UUID, JournalEntry] | None:
    try:
        return UUID(entry.request_id), UUID(entry.tenant_id), entry
    except ValueError:
        # Not a request of a gateway of ours: it must not stop the entries behind it.
        log.error("journal_entry_malformed", replica_id=replica_id, seq=entry.seq)
        return None
