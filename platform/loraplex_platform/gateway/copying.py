"""What a rollout wants of answers besides the answers, done once the client has its own.

| | shadow | score |
|---|---|---|
| asks | the canary, what the stable revision was asked | the stable revision, how likely it finds an answer |
| of | a share of the requests of a shadow step | a share of the answers of both sides, shadows' too |
| books | kind `shadow`, arm `shadow`, absorbed | kind `shadow`, endpoint `score`, absorbed |
| leaves | a request of its own, that gates compare | `stable_logprob` of the request that it was made after |

Nobody waits for any of it. It is of the lowest priority, below evals'; few are under way at a time and few
wait, none begins while an engine has anybody else's request waiting, and what does not get its turn within
`MAX_WAIT_S` is dropped, as is everything at shutdown. It takes no place in the tenant's rates and quotas, and
its prefix cache has a salt of its own: a copy that found the tenant's blocks would be cheap, but one that left
blocks would make the tenant's next prompt a cached one, which is cheaper, or push others out, which is dearer.
What is asked is held in memory until then, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextvars
import hmac
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import structlog
from loraplex_engine.client import EngineLostError, EngineRejectedError
from loraplex_engine.protocol import GIVEN_UP, EngineStats

from loraplex_platform.errors import EngineUnavailableError, PlatformError
from loraplex_platform.fleet import absorbed
from loraplex_platform.gateway import queries, scoring
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.gateway.job import Copies, Failed, Job, Prepared
from loraplex_platform.gateway.metrics import GatewayMetrics
from loraplex_platform.gateway.scoring import UnscoredError
from loraplex_platform.ids import uuid7

if TYPE_CHECKING:
    from uuid import UUID

    from loraplex_platform.gateway.books import Ending
    from loraplex_platform.gateway.context import Gateway
    from loraplex_platform.gateway.pump import Pump
    from loraplex_platform.gateway.queries import ServedModel
    from loraplex_platform.gateway.routing import Replica

log = structlog.get_logger(__name__)

PRIORITY: Final = -2_000  # evals have -1,000: somebody waits for those
MAX_WAITING: Final = 64
MAX_WAIT_S: Final = 30.0
_LOOK_INTERVAL_S: Final = 0.25
_STATS_TIMEOUT_S: Final = 1.0
_CLOSE_S: Final = absorbed.ABORT_GRACE_S + 3.0

Kind = Literal["shadow", "score"]


class ShadowGivenUpError(PlatformError):
    """A shadow was ended for our own sake: it says nothing of the canary, and gates leave it out."""

    code = GIVEN_UP


class _DroppedError(Exception):
    """It is not done: why, in a word."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One copy. `answer_ids`: of what `job` came to, to be scored."""

    kind: Kind
    job: Job
    copies: Copies
    due_s: float  # monotonic: dropped after
    answer_ids: tuple[int, ...] = ()


class Copying:
    """See the module's header."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._counters = gateway.metrics
        # Shadows are pumped as requests are, but belong in no measure of those.
        self._metrics = GatewayMetrics()
        self._waiting: deque[_Wanted] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._shadows: set[Pump] = set()
        self._is_closing = False

    @property
    def num_pending(self) -> int:
        """Copies that wait or are under way."""
        return len(self._waiting) + len(self._workers)

    def note(self, pump: Pump, ending: Ending) -> None:
        """A request has ended and is on the books: what its rollout wants of it is put in line."""
        job, copies, usage = pump.job, pump.job.copies, ending.usage
        if copies is None or usage is None:
            return
        # A client that left has seen a part: what it would have compared with is not known.
        if copies.is_shadowed and usage.outcome in ("completed", "fault"):
            self._put("shadow", job, copies)
        answer_ids = tuple(pump.answer_ids)
        if copies.is_scored and usage.outcome == "completed" and answer_ids:
            self._put("score", job, copies, answer_ids)

    async def close(self) -> None:
        """Take nothing more, drop what waits, end what runs and put that on the books."""
        self._is_closing = True
        while self._waiting:
            self._drop(self._waiting.popleft().kind, "draining")
        for shadow in self._shadows:
            shadow.kill(ShadowGivenUpError("The gateway is restarting."))
        workers = set(self._workers)
        for worker in workers:
            worker.cancel()
        if workers:
            await asyncio.wait(workers, timeout=_CLOSE_S)

    # ------------------------------------------------------------------ the line

    def _put(self, kind: Kind, job: Job, copies: Copies, answer_ids: tuple[int, ...] = ()) -> None:
        if self._is_closing:
            self._drop(kind, "draining")
        elif len(self._waiting) >= MAX_WAITING:
            self._drop(kind, "full")
        else:
            due_s = time.monotonic() + MAX_WAIT_S
            self._waiting.append(_Wanted(kind, job, copies, due_s, answer_ids))
            if len(self._workers) < self._gateway.settings.shadow_concurrency:
                # Not in the context of whichever request came last: its id is not that of the others.
                worker = asyncio.create_task(
                    self._work(), name="rollout copies", context=contextvars.Context()
                )
                self._workers.add(worker)
                worker.add_done_callback(self._workers.discard)

    async def _work(self) -> None:
        try:
            await self._work_on()
        finally:
            # Here, with no turn of the loop between: what comes now starts a worker of its own.
            if (worker := asyncio.current_task()) is not None:
                self._workers.discard(worker)

    async def _work_on(self) -> None:
        while self._waiting:
            wanted = self._waiting.popleft()
            kind = wanted.kind
            try:
                await (self._shadow if kind == "shadow" else self._score)(wanted)
            except _DroppedError as dropped:
                self._drop(kind, str(dropped))
            except asyncio.CancelledError:
                self._drop(kind, "draining")
                raise
            except (EngineLostError, UnscoredError, EngineRejectedError, PlatformError) as error:
                self._fail(kind, _reason(error))
            except Exception as error:  # noqa: BLE001 - the others must not end with it
                log_crash("rollout_copy_crashed", error)
                self._fail(kind, "crashed")

    def _drop(self, kind: Kind, reason: str) -> None:
        self._counters.copies_dropped.labels(kind, reason).inc()

    def _fail(self, kind: Kind, reason: str) -> None:
        self._counters.copies_failed.labels(kind, reason).inc()

    # ------------------------------------------------------------------ the two kinds

    async def _shadow(self, wanted: _Wanted) -> None:
        """Ask the canary, as the stable revision was asked, and put it on the books."""
        job, copies = wanted.job, wanted.copies
        rollout = copies.stable.rollout
        if rollout is None or job.side is None:
            raise RuntimeError("a shadow without a rollout")
        model = copies.stable.answered_by(rollout.canary)
        self._check_slots(job, model)
        prepared = await self._prepared(job, copies, model)
        shadow = replace(
            job,
            request_id=uuid7(),
            key_id=None,
            tenant_salt=self._salt_of(job.tenant_id),
            model=model,
            is_stream=False,
            prompt_ids=prepared.prompt_ids,
            sampling=prepared.sampling,
            stops=prepared.stops,
            priority=PRIORITY,
            retry=None,
            kind="shadow",
            side=replace(job.side, arm="shadow"),
            copies=replace(copies, is_shadowed=False),
            shadow_of=job.request_id,
        )
        replica = await self._free_replica(model, shadow.num_tokens, wanted.due_s)
        pump = self._gateway.make_pump(
            replace(shadow, arrived_s=time.monotonic()),
            replica,
            metrics=self._metrics,
            on_closed=self.note,
        )
        self._counters.copies_taken.labels("shadow").inc()
        self._shadows.add(pump)
        try:
            # Its pump is the supervisor's: it ends, and is on the books, whatever becomes of us.
            await asyncio.shield(self._gateway.pumps.start(pump))
        finally:
            self._shadows.discard(pump)
        last = (await pump.next_events())[-1]
        if isinstance(last, Failed):
            self._fail("shadow", last.error.error_code or "error")

    async def _score(self, wanted: _Wanted) -> None:
        """Have the stable revision say how likely it finds the answer, and note that."""
        job, model = wanted.job, wanted.copies.stable
        self._check_slots(job, model)
        prepared = await self._prepared(job, wanted.copies, model)
        question = scoring.question(
            job,
            model,
            prepared.prompt_ids,
            wanted.answer_ids,
            salt=self._salt_of(job.tenant_id),
            priority=PRIORITY,
        )
        num_tokens = len(prepared.prompt_ids) + question.sampling.max_tokens
        replica = await self._free_replica(model, num_tokens, wanted.due_s)
        self._counters.copies_taken.labels("score").inc()
        gateway = self._gateway
        answer = await absorbed.ask(gateway.sessions, replica, question, owner=gateway.gateway_id)
        mean = scoring.mean_logprob(answer, len(wanted.answer_ids))
        await queries.note_stable_logprob(gateway.sessions, job.request_id, mean)

    async def _prepared(self, job: Job, copies: Copies, model: ServedModel) -> Prepared:
        """What `job` asked, under the revision of `model`, with the same draw."""
        sampling = msgspec.structs.replace(job.sampling, logprobs=None)
        if model.revision.params == job.model.revision.params:
            return Prepared(prompt_ids=job.prompt_ids, sampling=sampling, stops=job.stops)
        prepared = await copies.prepare(model)
        sampling = msgspec.structs.replace(prepared.sampling, seed=job.sampling.seed, logprobs=None)
        return Prepared(prompt_ids=prepared.prompt_ids, sampling=sampling, stops=prepared.stops)

    # ------------------------------------------------------------------ whether it may

    async def _free_replica(self, model: ServedModel, num_tokens: int, due_s: float) -> Replica:
        """One that has nobody else's request waiting; looks again and again until it is too late."""
        while True:
            try:
                replica = self._gateway.router.choose(
                    model.base_model, num_tokens, builds=model.builds
                )
                if not _is_busy(await replica.client.stats(_STATS_TIMEOUT_S)):
                    return replica
                reason = "busy"
            except (EngineUnavailableError, EngineLostError):
                reason = "no_engine"
            if time.monotonic() + _LOOK_INTERVAL_S > due_s:
                raise _DroppedError(reason)
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def _check_slots(self, job: Job, model: ServedModel) -> None:
        """A tenant that may have one adapter in a step must not wait for a copy's."""
        is_other = model.revision.adapter_digest != job.model.revision.adapter_digest
        if is_other and job.max_adapters is not None and job.max_adapters < 2:
            raise _DroppedError("max_adapters")

    def _salt_of(self, tenant_id: UUID) -> bytes:
        key = self._gateway.settings.salt_key.get_secret_value().encode()
        return hmac.digest(key, b"rollout copies" + tenant_id.bytes, "sha256")


def _is_busy(stats: EngineStats) -> bool:
    """Whether somebody waits there who is more urgent than a copy."""
    if not stats.waiting_by_priority:
        return stats.num_waiting > 0
    return any(
        count for priority, count in stats.waiting_by_priority.items() if priority > PRIORITY
    )


def _reason(error: Exception) -> str:
    if isinstance(error, EngineRejectedError):
        return error.code
    if isinstance(error, PlatformError):
        return error.error_code or "error"
    return "engine_lost" if isinstance(error, EngineLostError) else str(error)
