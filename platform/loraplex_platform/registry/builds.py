"""Engine builds: noted by the worker when it first sees a replica of one, and whenever one still answers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import structlog
from loraplex_engine.protocol import ReplicaRecord
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db.session import SessionFactory
from loraplex_platform.db.transactions import run_transaction
from loraplex_platform.registry import queries
from loraplex_platform.registry.base_model import BaseModelFacts

log = structlog.get_logger(__name__)

FRESH_S = 60.0  # `last_seen_at` may be so old of a build that runs
UNKNOWN_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Noted:
    """Whether the build was seen for the first time, and whether its weights are known here."""

    is_new: bool
    has_base: bool


class BuildKeeper:
    """Keeps `engine_builds`. Most rounds find nothing new and ask the database nothing."""

    def __init__(self, sessions: SessionFactory) -> None:
        self._sessions = sessions
        self._noted_at_s: dict[tuple[str, str], float] = {}  # fingerprint and base -> monotonic

    async def note(self, records: Iterable[ReplicaRecord]) -> None:
        """These replicas answer now."""
        now_s = time.monotonic()
        for record in {(r.model_fingerprint, r.base_revision): r for r in records}.values():
            key = (record.model_fingerprint, record.base_revision)
            if now_s - self._noted_at_s.get(key, -FRESH_S) < FRESH_S or not key[0]:
                continue

            async def note(session: AsyncSession, record: ReplicaRecord = record) -> Noted:
                return await note_build(session, record)

            noted = await run_transaction(self._sessions, note, is_idempotent=True)
            if noted.is_new:
                log.info(
                    "engine_build_seen",
                    fingerprint=record.model_fingerprint,
                    base_model=record.base_model,
                    base_revision=record.base_revision,
                    dtype=record.dtype,
                    device=record.device,
                )
            is_known = noted.has_base or not record.base_revision
            if not is_known and key not in self._noted_at_s:
                log.warning(
                    "base_model_unknown",
                    name=record.base_model,
                    revision=record.base_revision,
                    tokenizer_sha256=record.tokenizer_sha256,
                    chat_template_sha256=record.chat_template_sha256,
                )
            # The control process that knows these weights may still be starting.
            self._noted_at_s[key] = now_s if is_known else now_s - FRESH_S + UNKNOWN_AGAIN_S


async def note_build(session: AsyncSession, record: ReplicaRecord) -> Noted:
    """Keep the build of a replica, and its base model if only the weights are new."""
    base_id = await _find_base(session, record)
    is_new = await queries.note_build(
        session, record.model_fingerprint, record.base_model, base_id, _facts_of(record)
    )
    return Noted(is_new, base_id is not None)


async def _find_base(session: AsyncSession, record: ReplicaRecord) -> UUID | None:
    """The base model of exactly these weights.

    New weights of a known name are registered if tokenizer and template are the known ones: then gateways can
    serve them. Others are left to a control process that is started with them.
    """
    if not record.base_revision:
        return None
    known = await queries.find_base_models(session, record.base_model)
    for base_model in known:
        if base_model.revision == record.base_revision:
            return base_model.id
    for base_model in known:
        if (base_model.tokenizer_sha256, base_model.chat_template_sha256) == (
            record.tokenizer_sha256,
            record.chat_template_sha256,
        ):
            # What its config.json says an engine does not tell; the shape of the same name's is no promise.
            added = await queries.ensure_base_model(
                session,
                BaseModelFacts(
                    name=record.base_model,
                    revision=record.base_revision,
                    tokenizer_sha256=record.tokenizer_sha256,
                    chat_template_sha256=record.chat_template_sha256,
                    license=None,
                    architecture={},
                ),
            )
            log.info("base_model_seen", name=added.name, revision=added.revision)
            return added.id
    return None


def _facts_of(record: ReplicaRecord) -> dict[str, Any]:
    return {
        "dtype": record.dtype,
        "kv_format": record.kv_format,
        "device": record.device,
        "isa": record.isa,
        "torch_version": record.torch_version,
        "backends": record.backends,
        "base_revision": record.base_revision,
        "tokenizer_sha256": record.tokenizer_sha256,
        "chat_template_sha256": record.chat_template_sha256,
    }
