"""Adapters from upload to immutable version.

An upload passes: quarantine (upload.py) -> checks in a throw-away process (validation.py) -> the
store, by digest -> unless left out, a probe through the engine (probe.py) -> one transaction that
makes it a version.
Nothing of it is in the database before the last step.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import structlog
from loraplex_engine.artifact import AdapterStore
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.db import Adapter, AdapterVersion, BaseModel
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import ConflictError, NotFoundError, UnavailableError
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.ids import MalformedIdError, format_id, parse_id, uuid7
from loraplex_platform.registry import queries
from loraplex_platform.registry.errors import AdapterRejectedError
from loraplex_platform.registry.probe import Prober, ProbeTarget
from loraplex_platform.registry.upload import Upload
from loraplex_platform.registry.validation import Validator, Verdict

log = structlog.get_logger(__name__)


# An upload is checked and probed in far less.
ORPHAN_AGE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Stored:
    """An adapter and the version that an upload is; `is_new` False: it was there already."""

    adapter: Adapter
    version: AdapterVersion
    is_new: bool


@dataclass(frozen=True, slots=True)
class Vetted:
    """An upload that may become a version."""

    name: str
    version_id: UUID
    verdict: Verdict
    report: dict[str, Any]


class AdapterIntake:
    """Checks uploads for one base model and stores them."""

    def __init__(
        self,
        sessions: SessionFactory,
        base_model: BaseModel,
        validator: Validator,
        store: AdapterStore,
        prober: Prober,
    ) -> None:
        self._sessions = sessions
        self.base_model = base_model
        self._validator = validator
        self._store = store
        self._prober = prober

    async def sweep(self) -> int:
        """Delete stored adapters that became no version: refused by the probe, or cut off there.

        Young ones may be on their way. Returns how many went.
        """
        idle = await asyncio.to_thread(self._store.idle, ORPHAN_AGE_S)
        if not idle:
            return 0
        async with self._sessions() as session:
            in_use = await queries.digests_in_use(session, idle)
        count = 0
        for digest in idle:
            if digest not in in_use:
                count += await asyncio.to_thread(self._store.delete, digest, age_s=ORPHAN_AGE_S)
        if count:
            log.info("adapter_orphans_deleted", count=count)
        return count

    async def forget(self, digest: str) -> bool:
        """Delete a stored adapter that no tenant has any more, unless it was put within the hour.

        Raises:
            OSError: the store cannot be written.
        """
        async with self._sessions() as session:
            if await queries.digests_in_use(session, [digest]):
                return False
        return await asyncio.to_thread(self._store.delete, digest, age_s=ORPHAN_AGE_S)

    async def vet(self, tenant_id: UUID, upload: Upload) -> Stored | Vetted:
        """Check an upload through all stages; the version if the tenant has it already.

        Raises:
            AdapterRejectedError: it cannot be served; says why and what to do.
            ConflictError: the version is there, but was not probed, as is asked now.
            UnavailableError: no engine is ready for a probe, or the store cannot be written.
        """
        self._check_hashes(upload)
        verdict = await self._validator.check(upload.folder)
        async with self._sessions() as session:
            known = await _find_known(session, tenant_id, upload.name, verdict.digest)
        if known is not None:
            _check_probe(known.version, is_wanted=upload.is_probed)
            return known
        if upload.is_probed:
            # Before anything is stored: without an engine there is no probe, and no version.
            await self._prober.find_engine(self.base_model)
        try:
            await asyncio.to_thread(self._store.put, upload.folder, verdict.digest)
        except OSError as error:
            log_crash("adapter_store_failed", error)
            raise UnavailableError(
                "The adapter store cannot be written; try again later.",
                code="store_unavailable",
                retry_after_s=10,
            ) from error
        version_id = uuid7()
        probe = None
        if upload.is_probed:
            target = ProbeTarget(
                tenant_id, version_id, upload.name, verdict.digest, self.base_model
            )
            probe = await self._prober.run(target)
        return Vetted(upload.name, version_id, verdict, _report(upload, verdict, probe))

    async def keep(
        self, session: AsyncSession, actor: Actor, tenant_id: UUID, vetted: Vetted
    ) -> Stored:
        """Make it a version, in the caller's transaction; a copy uploaded meanwhile wins.

        Raises:
            ConflictError: that copy was not probed, and this one was.
        """
        await queries.lock_name(session, "adapter", str(tenant_id), vetted.name)
        adapter = await queries.find_adapter_by_name(session, tenant_id, vetted.name)
        verdict = vetted.verdict
        if adapter is None:
            adapter = Adapter(
                id=uuid7(), tenant_id=tenant_id, name=vetted.name, base_model_id=self.base_model.id
            )
            session.add(adapter)
            await session.flush()
            await session.refresh(adapter)
            record(
                session,
                actor,
                "adapter.create",
                "adapter",
                format_id("adapter", adapter.id),
                tenant_id=tenant_id,
                detail={"name": vetted.name},
            )
        known = await queries.find_version_by_digest(session, tenant_id, adapter.id, verdict.digest)
        if known is not None:
            _check_probe(known, is_wanted=vetted.report["probe"] is not None)
            return Stored(adapter, known, is_new=False)
        number = await queries.last_version_number(session, tenant_id, adapter.id) + 1
        version = AdapterVersion(
            id=vetted.version_id,
            tenant_id=tenant_id,
            adapter_id=adapter.id,
            version=number,
            digest=verdict.digest,
            status="ready",
            size_bytes=verdict.size_bytes,
            rank=verdict.rank,
            target_modules=verdict.target_modules,
            report=vetted.report,
        )
        session.add(version)
        await session.flush()
        await session.refresh(version)
        record(
            session,
            actor,
            "adapter_version.create",
            "adapter_version",
            format_id("adapter_version", version.id),
            tenant_id=tenant_id,
            detail={"adapter": vetted.name, "version": number, "digest": verdict.digest},
        )
        return Stored(adapter, version, is_new=True)

    def _check_hashes(self, upload: Upload) -> None:
        for field, given, ours in (
            ("tokenizer_sha256", upload.tokenizer_sha256, self.base_model.tokenizer_sha256),
            (
                "chat_template_sha256",
                upload.chat_template_sha256,
                self.base_model.chat_template_sha256,
            ),
        ):
            if given is not None and given != ours:
                raise AdapterRejectedError(
                    field,
                    f"the adapter was trained with {given[:12]}..., this base has {ours[:12]}...",
                    f"Train it with the tokenizer and chat template of {self.base_model.name}.",
                )


async def _find_known(
    session: AsyncSession, tenant_id: UUID, name: str, digest: str
) -> Stored | None:
    adapter = await queries.find_adapter_by_name(session, tenant_id, name)
    if adapter is None:
        return None
    version = await queries.find_version_by_digest(session, tenant_id, adapter.id, digest)
    return None if version is None else Stored(adapter, version, is_new=False)


def _check_probe(version: AdapterVersion, *, is_wanted: bool) -> None:
    """A version never changes, nor does its report: a probe cannot be made up for."""
    if is_wanted and version.report.get("probe") is None:
        raise ConflictError(
            "These files are a version already, which was uploaded with 'probe' false. Send 'probe' false for that"
            " version as it is, or another 'name' to have them probed.",
            param="probe",
        )


def _report(upload: Upload, verdict: Verdict, probe: dict[str, Any] | None) -> dict[str, Any]:
    checks = list(verdict.checks)
    if upload.tokenizer_sha256 is not None or upload.chat_template_sha256 is not None:
        checks.append({"name": "tokenizer", "ok": True, "detail": "trained with the base's own"})
    if probe is not None:
        checks.append(
            {
                "name": "probe",
                "ok": True,
                "detail": f"{probe['changed']} of {len(probe['samples'])} answers differ from the "
                f"base's; largest log-probability difference {probe['max_logprob_difference']:.3g}",
            }
        )
    return {
        "checks": checks,
        "matched_modules": verdict.matched_modules,
        "total_modules": verdict.total_modules,
        "parameters": verdict.parameters,
        "norms": {"max": verdict.max_norm},
        "probe": probe,
        "source": upload.source,
        "memory": verdict.memory,
        "overhead": verdict.overhead,
    }


async def get_adapter(
    session: AsyncSession, tenant_id: UUID, adapter_id: str
) -> tuple[Adapter, list[AdapterVersion]]:
    """One of the tenant's adapters with its versions.

    Raises:
        NotFoundError: no such adapter of this tenant.
    """
    try:
        adapter_uuid = parse_id("adapter", adapter_id)
    except MalformedIdError:
        raise NotFoundError("No such adapter.") from None
    adapter = await queries.find_adapter(session, tenant_id, adapter_uuid)
    if adapter is None:
        raise NotFoundError("No such adapter.")
    versions = await queries.versions_of(session, tenant_id, [adapter.id])
    return adapter, versions[adapter.id]
