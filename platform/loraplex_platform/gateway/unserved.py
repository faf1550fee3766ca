"""Requests of a rollout that were refused before anything was reserved for them.

A canary whose build is gone, whose longer system prompt leaves no room, whose price book has no price for it
or whose stored parameters cannot be used answers nothing: without a row on the books its gates would never hear
of it. So such a refusal is written as a voided request of its side. The client does not wait for that, and hears
the same if it fails.

A 4xx is the client's own doing unless the rollout's other side would have taken the same request.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import structlog

from loraplex_platform.errors import InvalidRequestError, PlatformError, UnavailableError
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.gateway.job import Prepared
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.records import REFUSED_BY_REVISION, Refusal

if TYPE_CHECKING:
    from uuid import UUID

    from loraplex_platform.db.session import SessionFactory
    from loraplex_platform.gateway.metrics import GatewayMetrics
    from loraplex_platform.gateway.queries import ServedModel
    from loraplex_platform.gateway.revision_choice import Side
    from loraplex_platform.tenancy.authentication import Authenticated

log = structlog.get_logger(__name__)

# Clients that are refused come back at once; what is not written then is like what is.
MAX_PENDING: Final = 64
_CLOSE_S: Final = 2.0

Prepare = Callable[["ServedModel"], Awaitable[Prepared]]


class Unserved:
    """See the module's header. `owner`: this gateway."""

    def __init__(self, sessions: SessionFactory, metrics: GatewayMetrics, owner: str) -> None:
        self._sessions = sessions
        self._metrics = metrics
        self._owner = owner
        self._writing: set[asyncio.Task[None]] = set()

    @property
    def num_pending(self) -> int:
        """How many are being written."""
        return len(self._writing)

    def note(
        self,
        error: PlatformError,
        *,
        request_id: UUID,
        caller: Authenticated,
        found: ServedModel,
        model: ServedModel,
        side: Side | None,
        endpoint: str,
        is_stream: bool,
        prepare: Prepare,
    ) -> None:
        """A request was refused; of one that is in no rollout nothing is written.

        Args:
            error: what its client hears.
            found: the model as it was found, with the stable revision.
            model: with the revision of `side`.
            prepare: the request under another revision.
        """
        if side is None or side.rollout_id is None or side.step is None or found.rollout is None:
            return
        other = None
        if isinstance(error, InvalidRequestError):
            other = found if side.arm == "canary" else found.answered_by(found.rollout.canary)
            if other.revision.params == model.revision.params and other.builds == model.builds:
                return
        if len(self._writing) >= MAX_PENDING:
            self._metrics.unserved.labels("dropped").inc()
            return
        refusal = Refusal(
            request_id=request_id,
            tenant_id=caller.tenant_id,
            key_id=caller.key_id,
            endpoint=endpoint,
            model=model.public_name,
            owner=self._owner,
            is_stream=is_stream,
            deployment_id=model.deployment_id,
            revision_id=model.revision.id,
            adapter_version_id=model.revision.adapter_version_id,
            rollout_id=side.rollout_id,
            rollout_step=side.step,
            arm=side.arm,
            subject_key=side.subject_key or 0,
            http_status=error.status,
            error_code=REFUSED_BY_REVISION if other is not None else error.error_code or "error",
        )
        writing = asyncio.create_task(
            self._write(refusal, other, prepare),
            name="unserved request",
            context=contextvars.Context(),
        )
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)

    async def close(self) -> None:
        """Wait for what is being written, not for long."""
        if self._writing:
            _, late = await asyncio.wait(set(self._writing), timeout=_CLOSE_S)
            for writing in late:
                writing.cancel()

    async def _write(self, refusal: Refusal, other: ServedModel | None, prepare: Prepare) -> None:
        try:
            if other is not None and not await _is_taken(other, prepare):
                return
            is_written = await metering.note_refusal(self._sessions, refusal)
            self._metrics.unserved.labels("written" if is_written else "not_admitted").inc()
        except UnavailableError as error:
            log.warning("unserved_not_written", reason=error.message)
            self._metrics.unserved.labels("failed").inc()
        except Exception as error:  # noqa: BLE001 - the client has its answer
            log_crash("unserved_crashed", error)
            self._metrics.unserved.labels("failed").inc()


async def _is_taken(model: ServedModel, prepare: Prepare) -> bool:
    try:
        await prepare(model)
    except InvalidRequestError:
        return False
    return True
