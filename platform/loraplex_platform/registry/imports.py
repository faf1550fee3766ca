"""Imports: jobs in a table, run by whichever control process is free, under a lease.

A job ends as a version or with a reason. What can pass (the place, the store or the engines are away, a
process died) is tried again, a few times and later each time; what cannot is not. A killed process's job is
taken over when its lease has run out; what it had fetched went with its quarantine folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.db import AdapterImport, Tenant
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import (
    NotFoundError,
    PlatformError,
    UnavailableError,
)
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.ids import MalformedIdError, format_id, parse_id, uuid7
from loraplex_platform.registry import queries, service, source_queries
from loraplex_platform.registry.errors import TooManyUploadsError
from loraplex_platform.registry.quarantine import Quarantine
from loraplex_platform.registry.service import AdapterIntake
from loraplex_platform.registry.sources.base import Listing, Source, SourceUnavailableError
from loraplex_platform.registry.sources.rules import ImportRules
from loraplex_platform.registry.upload import Upload

log = structlog.get_logger(__name__)

MAX_OPEN: Final = 16  # of one tenant, queued and running
MAX_ATTEMPTS: Final = 4
KEEP: Final = timedelta(days=30)  # how long ended ones are shown
_BACKOFF_S: Final = (5.0, 30.0, 120.0)

# Makes the reader of a source; the second argument is the allowed prefix that it is below.
OpenSource = Callable[[str, str], Source]


@dataclass(frozen=True, slots=True)
class ImportTimes:
    """How often and how long; tests are quicker."""

    poll_s: float = 2.0
    lease: timedelta = timedelta(seconds=30)
    beat_s: float = 2.0
    backoff_s: tuple[float, ...] = _BACKOFF_S
    transfer_s: float = 900.0


async def enqueue(
    session: AsyncSession,
    rules: ImportRules,
    actor: Actor,
    tenant: Tenant,
    *,
    name: str,
    source: str,
    is_probed: bool,
    is_operator: bool,
) -> AdapterImport:
    """A new job.

    Raises:
        InvalidRequestError: not a source.
        SourceNotAllowedError: not one for this caller.
        TooManyUploadsError: the tenant has enough unfinished imports.
    """
    rules.check(source, tenant_slug=tenant.slug, is_operator=is_operator)
    await queries.lock_name(session, "adapter_imports", str(tenant.id))
    if await source_queries.count_open_imports(session, tenant.id) >= MAX_OPEN:
        raise TooManyUploadsError(
            f"There are {MAX_OPEN} unfinished imports of this tenant; wait for one to end.",
            code="too_many_imports",
            retry_after_s=30,
        )
    job = AdapterImport(
        id=uuid7(),
        tenant_id=tenant.id,
        name=name,
        source=source,
        is_probed=is_probed,
        actor_kind=actor.kind,
        actor_id=actor.id,
        request_id=actor.request_id,
    )
    session.add(job)
    await session.flush()
    await session.refresh(job)
    record(
        session,
        actor,
        "adapter_import.create",
        "adapter_import",
        format_id("adapter_import", job.id),
        tenant_id=tenant.id,
        detail={"adapter": name, "source": source},
    )
    return job


async def find(session: AsyncSession, tenant_id: UUID, import_id: str) -> AdapterImport:
    """One of the tenant's imports.

    Raises:
        NotFoundError: no such import of this tenant.
    """
    try:
        found = await source_queries.find_import(
            session, tenant_id, parse_id("adapter_import", import_id)
        )
    except MalformedIdError:
        found = None
    if found is None:
        raise NotFoundError("No such import.")
    return found


class LeaseLostError(Exception):
    """Another process has the job, or it was deleted with its tenant."""


@dataclass(slots=True)
class _Transfer:
    """What the thread that copies and the loop that watches it share."""

    deadline_s: float  # monotonic
    received_bytes: int = 0
    is_over: threading.Event = field(default_factory=threading.Event)

    def on_bytes(self, count: int) -> None:
        self.received_bytes += count
        if self.is_over.is_set():
            raise LeaseLostError
        if time.monotonic() > self.deadline_s:
            raise SourceUnavailableError(
                "source: the transfer took longer than LORAPLEX_IMPORT_TIMEOUT_S allows.",
                retry_after_s=60,
            )


class ImportRunner:
    """Runs jobs one after another for as long as the process lives."""

    def __init__(
        self,
        sessions: SessionFactory,
        intake: AdapterIntake,
        quarantine: Quarantine,
        rules: ImportRules,
        open_source: OpenSource,
        *,
        max_model_bytes: int,
        times: ImportTimes,
    ) -> None:
        self._sessions = sessions
        self._intake = intake
        self._quarantine = quarantine
        self._rules = rules
        self._open_source = open_source
        self._max_model_bytes = max_model_bytes
        self._times = times
        self._is_new = asyncio.Event()

    def wake(self) -> None:
        """There is a new job: do not wait for the next look."""
        self._is_new.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work in the background while the block lasts; a job that is cut short is queued again."""
        task = asyncio.create_task(self._run_forever(), name="imports")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def sweep(self) -> None:
        """Forget imports that ended long ago."""
        async with self._sessions.begin() as session:
            await source_queries.delete_imports(session, older_than=KEEP)

    async def _run_forever(self) -> None:
        while True:
            try:
                while await self.run_one():
                    pass
            except UnavailableError as error:
                log.warning("imports_wait", reason=error.message)
            except Exception as error:  # noqa: BLE001 - one odd failure must not end all later jobs
                log_crash("imports_crashed", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._times.poll_s):
                    await self._is_new.wait()
            self._is_new.clear()

    async def run_one(self) -> bool:
        """Claim and run one job; False if none is due."""
        async with self._sessions.begin() as session:
            job = await source_queries.claim_import(session, self._times.lease)
            if job is None:
                return False
            session.expunge(job)
        log.info("import_began", tenant_id=str(job.tenant_id), import_id=str(job.id))
        try:
            if job.attempts > MAX_ATTEMPTS:
                # Whoever had it died each time: it may be the job that kills.
                raise ImportGivenUpError(
                    f"It was begun {MAX_ATTEMPTS} times, and each time the process that ran it ended. Look at the"
                    " control process's log and memory, then import it again."
                )
            await self._run(job)
        except LeaseLostError:
            log.warning("import_lease_lost", import_id=str(job.id))
        except asyncio.CancelledError:
            # An orderly end of the process is nobody's failed attempt.
            await self._end(job, state="queued", attempts=job.attempts - 1, next_at=_now())
            raise
        except PlatformError as error:
            await self._failed(job, error)
        except Exception as error:  # noqa: BLE001 - the job must hear of it, and the next one run
            log_crash("import_crashed", error)
            await self._failed(
                job, UnavailableError("Something went wrong on our side; see the server's log.")
            )
        return True

    async def _run(self, job: AdapterImport) -> None:
        async with self._sessions() as session:
            tenant = await session.get(Tenant, job.tenant_id)
        if tenant is None or tenant.erased_at is not None:
            raise NotFoundError("No such tenant.")
        # Once more: the list may have changed since. Who asked was looked at then.
        self._rules.check(job.source, tenant_slug=tenant.slug, is_operator=True)
        source = self._open_source(job.source, self._rules.root_of(job.source, tenant.slug))
        transfer = _Transfer(time.monotonic() + self._times.transfer_s)
        async with self._quarantine.folder() as folder:
            async with self._holding(job, transfer):
                listing = await _in_thread(transfer, source.look, self._max_model_bytes)
                total_bytes = sum(listing.sizes.values())
                await self._note(job, resolved=listing.resolved, total_bytes=total_bytes)
                await _in_thread(transfer, source.read, listing, folder, transfer.on_bytes)
                await self._note(job, received_bytes=transfer.received_bytes)
                vetted = await self._intake.vet(job.tenant_id, _upload(job, listing, folder))
            await self._keep(job, vetted)

    async def _keep(self, job: AdapterImport, vetted: service.Stored | service.Vetted) -> None:
        actor = Actor(job.actor_kind, job.actor_id, job.request_id)
        async with self._sessions.begin() as session:
            stored = vetted
            if isinstance(stored, service.Vetted):
                stored = await self._intake.keep(session, actor, job.tenant_id, stored)
            is_ours = await source_queries.end_import(
                session,
                job,
                state="succeeded",
                version_id=stored.version.id,
                finished_at=_now(),
                error=None,
            )
            if not is_ours:
                raise LeaseLostError  # and nothing of it is kept
        log.info("import_succeeded", import_id=str(job.id), version_id=str(stored.version.id))

    @contextlib.asynccontextmanager
    async def _holding(self, job: AdapterImport, transfer: _Transfer) -> AsyncIterator[None]:
        """Keep the lease while the block lasts; without it, end the block."""
        owner = asyncio.current_task()
        assert owner is not None  # noqa: S101 # we are in one

        async def beat() -> None:
            while True:
                await asyncio.sleep(self._times.beat_s)
                try:
                    await self._note(job, received_bytes=transfer.received_bytes)
                except LeaseLostError:
                    is_lost.set()
                    transfer.is_over.set()
                    owner.cancel()
                    return
                except UnavailableError:
                    continue  # the lease's length is how long the database may be away

        is_lost = asyncio.Event()
        beating = asyncio.create_task(beat(), name="import-lease")
        try:
            yield
        except asyncio.CancelledError:
            if is_lost.is_set():
                owner.uncancel()
                raise LeaseLostError from None
            raise
        finally:
            transfer.is_over.set()
            beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beating

    async def _note(self, job: AdapterImport, **values: Any) -> None:  # noqa: ANN401
        async with self._sessions.begin() as session:
            if not await source_queries.hold_import(session, job, self._times.lease, **values):
                raise LeaseLostError

    async def _failed(self, job: AdapterImport, error: PlatformError) -> None:
        told = {"message": error.message, "param": error.param, "code": error.error_code}
        if isinstance(error, UnavailableError) and job.attempts < MAX_ATTEMPTS:
            waits_s = self._times.backoff_s
            wait_s = waits_s[min(job.attempts, len(waits_s)) - 1]
            next_at = _now() + timedelta(seconds=wait_s)
            await self._end(job, state="queued", error=told, next_at=next_at)
            log.warning("import_tried_again_later", import_id=str(job.id), code=error.error_code)
            return
        await self._end(job, state="failed", error=told, finished_at=_now())
        log.info("import_failed", import_id=str(job.id), code=error.error_code)

    async def _end(self, job: AdapterImport, **values: Any) -> None:  # noqa: ANN401
        async with self._sessions.begin() as session:
            await source_queries.end_import(session, job, **values)


class ImportGivenUpError(PlatformError):
    """Tried as often as is sensible."""

    code = "import_given_up"


async def _in_thread(transfer: _Transfer, work: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
    """As `asyncio.to_thread`, but a cancelled wait ends the work too, and waits until it has."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        transfer.is_over.set()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # it is nobody's news any more
        raise


def _upload(job: AdapterImport, listing: Listing, folder: Path) -> Upload:
    return Upload(
        folder=folder,
        name=job.name,
        tokenizer_sha256=None,
        chat_template_sha256=None,
        is_probed=job.is_probed,
        fingerprint=b"",
        source=listing.resolved,
    )


def _now() -> datetime:
    return datetime.now(UTC)
