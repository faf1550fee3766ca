"""Whether a canary can be served at all, before anybody is sent to it.

Every ready replica that may run it must have said so by an answer: one token, absorbed. That is also what
loads the adapter there. So a rollout that is started while a replica loads waits for that, in words.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol
from uuid import UUID

import structlog
from loraplex_engine.client import EngineLostError, EngineRejectedError
from loraplex_engine.protocol import SamplingParams

from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import PlatformError
from loraplex_platform.fleet.absorbed import Question, ask
from loraplex_platform.gateway.builds import BuildRule
from loraplex_platform.gateway.routing import Replica, Router
from loraplex_platform.rollouts.queries import Side

log = structlog.get_logger(__name__)

ENDPOINT: Final = "rollout"
PRIORITY: Final = -1_000  # after every tenant's requests
ANSWER_S: Final = 60.0  # for loading an adapter from a store far away
ASK_AGAIN_S: Final = 5.0


class Fleet(Protocol):
    """Who can say whether a revision can be served."""

    def problem(self, side: Side, model: str) -> str | None:
        """Why it cannot be (yet), in words; None: every replica that may serve it can."""
        ...


@dataclass(slots=True)
class _Tried:
    """What a replica said when it was asked for an adapter."""

    task: asyncio.Task[str | None]
    asked_at_s: float


@dataclass(slots=True)
class ConnectedFleet:
    """The replicas that this process is connected to."""

    sessions: SessionFactory
    router: Router
    owner: str
    # By replica, its incarnation and the digest: what it has loaded once, it finds again.
    _tried: dict[tuple[str, str, str], _Tried] = field(default_factory=dict)

    def problem(self, side: Side, model: str) -> str | None:
        """See `Fleet`. Never waits: what has to be asked is asked in the background."""
        replicas = self._eligible(side)
        ready = [replica for replica in replicas if replica.is_ready]
        if not ready:
            what = f"a replica of {side.base_model.name}"
            if side.build is not None:
                what += f" with the engine build {side.build.fingerprint}"
            how = f"{len(replicas)} not ready" if replicas else "none is there"
            return f"it waits for {what} ({how})"
        revision = side.revision
        if revision.adapter_digest is None or revision.tenant_id is None:
            return None
        problems = [self._problem_of(replica, side, model) for replica in ready]
        return next((problem for problem in problems if problem is not None), None)

    async def close(self) -> None:
        """Stop asking; what was asked is aborted and its books are closed."""
        tasks = [tried.task for tried in self._tried.values()]
        self._tried.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _eligible(self, side: Side) -> Sequence[Replica]:
        builds = BuildRule(only=None if side.build is None else side.build.fingerprint)
        return [
            replica
            for replica in self.router.replicas
            if replica.record.base_model == side.base_model.name
            # Empty: a replica of a release that does not say.
            and replica.record.base_revision in ("", side.base_model.revision)
            and builds.allows(replica.fingerprint)
        ]

    def _problem_of(self, replica: Replica, side: Side, model: str) -> str | None:
        revision, record = side.revision, replica.record
        assert revision.adapter_digest is not None and revision.tenant_id is not None  # noqa: PT018, S101
        key = (record.replica_id, record.incarnation, revision.adapter_digest)
        tried = self._tried.get(key)
        if tried is not None and not tried.task.done():
            return f"replica {record.replica_id} loads its adapter"
        if tried is not None:
            problem = tried.task.result()
            if problem is None or time.monotonic() - tried.asked_at_s < ASK_AGAIN_S:
                return problem
        task = asyncio.create_task(
            self._ask(replica, side, revision.tenant_id, model), name=f"can serve {revision.id}"
        )
        self._tried[key] = _Tried(task, time.monotonic())
        return f"replica {record.replica_id} loads its adapter"

    async def _ask(self, replica: Replica, side: Side, tenant_id: UUID, model: str) -> str | None:
        revision, name = side.revision, replica.record.replica_id
        question = Question(
            tenant_id=tenant_id,
            endpoint=ENDPOINT,
            model=model,
            prompt_token_ids=[0],
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            salt=secrets.token_bytes(32),
            timeout_s=ANSWER_S,
            priority=PRIORITY,
            deployment_id=revision.deployment_id,
            revision_id=revision.id,
            adapter_version_id=revision.adapter_version_id,
            adapter_digest=revision.adapter_digest,
        )
        with contextlib.suppress(asyncio.CancelledError):
            try:
                answer = await ask(self.sessions, replica, question, owner=self.owner)
            except EngineRejectedError as error:
                return f"replica {name} refuses it: {error.message}"
            except EngineLostError as error:
                return f"replica {name} was lost when it was asked ({error})"
            except PlatformError as error:
                return f"it cannot be asked for anything: {error.message}"
            if answer.token_ids:
                return None
            return f"replica {name} gives no answer: {answer.error_code or answer.finish_reason}"
        return f"replica {name} was asked and not waited for"
