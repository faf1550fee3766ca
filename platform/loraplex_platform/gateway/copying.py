"""What a rollout wants of answers besides the answers, done once the client has its own.

| | shadow | score |
|---|---|---|
| asks | the canary, what the stable revision was asked | the stable revision, how likely it finds an answer |
| of | a share of the requests of a shadow step | a share of the answers of both sides, shadows' too |
| books | kind `shadow`, arm `shadow`, absorbed | kind `shadow`, endpoint `score`, absorbed |
| leaves | a request of its own, that gates compare | `stable_logprob` of the request that it was made after |

Nobody waits for any of it. It is of the lowest priority, below evals'; few are under way at a time and few
wait, rollouts and tenants take turns, and no rollout has more than half of what may be under way and no tenant
all of it, so that one whose canary hangs silences no other; none begins while an engine has anybody else's request waiting, and what does not get its turn within
`MAX_WAIT_S` is dropped, as is what a step wanted that has ended since, and everything at shutdown. It takes no place in the tenant's rates and quotas, and
its prefix cache has a salt of its own: a copy that found the tenant's blocks would be cheap, but one that left
blocks would make the tenant's next prompt a cached one, which is cheaper, or push others out, which is dearer.
What is asked is held in memory until then, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hmac
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import structlog
from loraplex_engine.client import EngineLostError, EngineRejectedError
from loraplex_engine.protocol import GIVEN_UP, EngineStats

from loraplex_platform.billing.prices import NoPriceError
from loraplex_platform.errors import EngineUnavailableError, InvalidRequestError, PlatformError
from loraplex_platform.fleet import absorbed
from loraplex_platform.gateway import queries, scoring
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.gateway.job import Copies, Failed, Job, Prepared
from loraplex_platform.gateway.metrics import GatewayMetrics
from loraplex_platform.gateway.revision_params import InvalidRevisionError
from loraplex_platform.gateway.scoring import UnscoredError
from loraplex_platform.ids import uuid7
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.records import REFUSED_BY_REVISION, Refusal

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
# Answers that took long may take long again: else none of those would be among the shadows, and lengths not
# compare.
SHADOW_TIMEOUT_S: Final = 90.0
SHADOW_TIMEOUT_RATIO: Final = 3.0
_LOOK_INTERVAL_S: Final = 0.25
_STATS_TIMEOUT_S: Final = 1.0
_CLOSE_S: Final = absorbed.ABORT_GRACE_S + 3.0

Kind = Literal["shadow", "score"]
_Line = tuple["UUID", "UUID"]  # a rollout and a tenant


class ShadowGivenUpError(PlatformError):
    """A shadow was ended for our own sake: it says nothing of the canary, and gates leave it out."""

    code = GIVEN_UP


class ShadowHungError(PlatformError):
    """A shadow had no token for so long, from an engine that had nobody else's request waiting."""

    status, code = 504, "shadow_hung"


class _DroppedError(Exception):
    """It is not done: why, in a word."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One copy.

    Attributes:
        took_s: how long `job` took.
        max_tokens: what a quota paid of `job`; None: all that it asked for.
        answer_ids: of what `job` came to, to be scored.
    """

    kind: Kind
    job: Job
    copies: Copies
    due_s: float  # monotonic: dropped after
    took_s: float
    max_tokens: int | None = None
    answer_ids: tuple[int, ...] = ()

    @property
    def rollout_id(self) -> UUID:
        rollout = self.copies.stable.rollout
        if rollout is None:
            raise RuntimeError("a copy without a rollout")
        return rollout.id


class Copying:
    """See the module's header."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._counters = gateway.metrics
        # Shadows are pumped as requests are, but belong in no measure of those.
        self._metrics = GatewayMetrics()
        # By rollout and tenant, the next in turn first; none is empty.
        self._lines: OrderedDict[_Line, deque[_Wanted]] = OrderedDict()
        self._running: dict[asyncio.Task[None], _Line] = {}
        self._shadows: set[Pump] = set()
        self._is_closing = False

    @property
    def num_pending(self) -> int:
        """Copies that wait or are under way."""
        return self._num_waiting + len(self._running)

    @property
    def _num_waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    def note(self, pump: Pump, ending: Ending) -> None:
        """A request has ended and is on the books: what its rollout wants of it is put in line."""
        job, copies, usage = pump.job, pump.job.copies, ending.usage
        if copies is None or usage is None:
            return
        now_s = time.monotonic()

        def wanted(kind: Kind, answer_ids: tuple[int, ...] = ()) -> _Wanted:
            took_s = now_s - job.arrived_s
            most = pump.clamped_max_tokens
            return _Wanted(kind, job, copies, now_s + MAX_WAIT_S, took_s, most, answer_ids)

        # A client that left has seen a part: what it would have compared with is not known.
        if copies.is_shadowed and usage.outcome in ("completed", "fault"):
            self._put(wanted("shadow"))
        answer_ids = tuple(pump.answer_ids)
        if copies.is_scored and usage.outcome == "completed" and answer_ids:
            self._put(wanted("score", answer_ids))

    async def close(self) -> None:
        """Take nothing more, drop what waits, end what runs and put that on the books."""
        self._is_closing = True
        for line in self._lines.values():
            for wanted in line:
                self._drop(wanted.kind, "draining")
        self._lines.clear()
        for shadow in self._shadows:
            shadow.kill(ShadowGivenUpError("The gateway is restarting."))
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_CLOSE_S)

    # ------------------------------------------------------------------ the line

    def _put(self, wanted: _Wanted) -> None:
        if self._is_closing:
            self._drop(wanted.kind, "draining")
            return
        key = (wanted.rollout_id, wanted.job.tenant_id)
        mine = self._lines.setdefault(key, deque())
        if self._num_waiting >= MAX_WAITING:
            # Whoever has most in line makes room.
            longest = max(self._lines.values(), key=len)
            if len(longest) <= len(mine) + 1:
                self._drop(wanted.kind, "full")
                if not mine:
                    del self._lines[key]
                return
            self._drop(longest.popleft().kind, "full")
        mine.append(wanted)
        self._start()

    def _start(self) -> None:
        """Begin what may begin."""
        while len(self._running) < self._gateway.settings.shadow_concurrency:
            found = self._next()
            if found is None:
                return
            # Not in the context of whichever request came last: its id is not that of the others.
            task = asyncio.create_task(
                self._copy(found[1]), name="rollout copy", context=contextvars.Context()
            )
            self._running[task] = found[0]
            task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not self._is_closing:
            self._start()

    def _next(self) -> tuple[_Line, _Wanted] | None:
        """The next in turn whose rollout and tenant have not their share under way; what is late is dropped."""
        most = self._gateway.settings.shadow_concurrency
        shares = (max(1, most // 2), max(1, most - 1))  # of a rollout, of a tenant
        busy = Counter(id_ for line in self._running.values() for id_ in line)
        now_s = time.monotonic()
        for key, line in list(self._lines.items()):
            while line and line[0].due_s < now_s:
                self._drop(line.popleft().kind, "late")
            wanted = None
            if line and all(busy[id_] < share for id_, share in zip(key, shares, strict=True)):
                wanted = line.popleft()
                self._lines.move_to_end(key)
            if not line:
                del self._lines[key]
            if wanted is not None:
                return key, wanted
        return None

    async def _copy(self, wanted: _Wanted) -> None:
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
        try:
            rollout.canary.check_usable()
            prepared = await self._prepared(wanted, model)
        except (InvalidRequestError, InvalidRevisionError) as error:
            await self._note_refusal(job, model, error)
            raise
        # Well under a user's timeout: whatever hangs, hangs in few places and not for long.
        timeout_s = max(SHADOW_TIMEOUT_S, SHADOW_TIMEOUT_RATIO * wanted.took_s)
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
            timeout_s=min(job.timeout_s, timeout_s + _CLOSE_S),
        )
        replica = await self._free_replica(job, model, shadow.num_tokens, wanted.due_s)
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
            pumping = self._gateway.pumps.start(pump)
            if not (await asyncio.wait({pumping}, timeout=timeout_s))[0]:
                pump.kill(await _why_late(pump))
                await asyncio.shield(pumping)
        finally:
            self._shadows.discard(pump)
        last = (await pump.next_events())[-1]
        if isinstance(last, Failed):
            if isinstance(last.error, NoPriceError):  # nothing was reserved: no row says so
                await self._note_refusal(job, model, last.error)
            self._fail("shadow", last.error.error_code or "error")

    async def _score(self, wanted: _Wanted) -> None:
        """Have the stable revision say how likely it finds the answer, and note that."""
        job, model = wanted.job, wanted.copies.stable
        self._check_slots(job, model)
        prepared = await self._prepared(wanted, model)
        question = scoring.question(
            job,
            model,
            prepared.prompt_ids,
            wanted.answer_ids,
            salt=self._salt_of(job.tenant_id),
            priority=PRIORITY,
        )
        num_tokens = len(prepared.prompt_ids) + question.sampling.max_tokens
        replica = await self._free_replica(job, model, num_tokens, wanted.due_s)
        self._counters.copies_taken.labels("score").inc()
        gateway = self._gateway
        answer = await absorbed.ask(gateway.sessions, replica, question, owner=gateway.gateway_id)
        mean = scoring.mean_logprob(answer, len(wanted.answer_ids))
        await queries.note_stable_logprob(gateway.sessions, job.request_id, mean)

    async def _prepared(self, wanted: _Wanted, model: ServedModel) -> Prepared:
        """What was asked, under the revision of `model`, with the same draw."""
        job = wanted.job
        sampling = msgspec.structs.replace(job.sampling, logprobs=None)
        if model.revision.params == job.model.revision.params:
            return Prepared(prompt_ids=job.prompt_ids, sampling=sampling, stops=job.stops)
        prepared = await wanted.copies.prepare(model)
        sampling = msgspec.structs.replace(
            prepared.sampling,
            seed=job.sampling.seed,
            logprobs=None,
            # The original would have got no more either; else its own revision says how much it may be.
            max_tokens=min(
                prepared.sampling.max_tokens, wanted.max_tokens or prepared.sampling.max_tokens
            ),
        )
        return Prepared(prompt_ids=prepared.prompt_ids, sampling=sampling, stops=prepared.stops)

    async def _note_refusal(self, job: Job, model: ServedModel, error: PlatformError) -> None:
        """The canary's revision refuses what the stable one answered: its gates are to know."""
        side = job.side
        if side is None or side.rollout_id is None or side.step is None:
            return
        await metering.note_refusal(
            self._gateway.sessions,
            Refusal(
                request_id=uuid7(),
                tenant_id=job.tenant_id,
                key_id=None,
                endpoint=job.endpoint,
                model=model.public_name,
                owner=self._gateway.gateway_id,
                is_stream=False,
                deployment_id=model.deployment_id,
                revision_id=model.revision.id,
                adapter_version_id=model.revision.adapter_version_id,
                rollout_id=side.rollout_id,
                rollout_step=side.step,
                arm="shadow",
                subject_key=side.subject_key or 0,
                http_status=error.status,
                error_code=(
                    REFUSED_BY_REVISION
                    if isinstance(error, InvalidRequestError)
                    else error.error_code or "error"
                ),
                kind="shadow",
                shadow_of=job.request_id,
            ),
        )

    # ------------------------------------------------------------------ whether it may

    async def _free_replica(
        self, job: Job, model: ServedModel, num_tokens: int, due_s: float
    ) -> Replica:
        """One that has nobody else's request waiting; looks again and again until it is too late, or the
        step over."""
        if time.monotonic() > due_s:
            raise _DroppedError("late")
        while True:
            free: Replica | None = None
            try:
                # Never the canary's build for the stable revision: a likelihood is of what it names.
                replica = self._gateway.router.choose(
                    model.base_model, num_tokens, builds=model.stable_builds
                )
                if not _is_busy(await replica.client.stats(_STATS_TIMEOUT_S)):
                    free = replica
                reason = "busy"
            except (EngineUnavailableError, EngineLostError):
                reason = "no_engine"
            # Whether one is free or not: what nobody wants any more is not waited with.
            await self._check_step(job)
            if free is not None:
                return free
            if time.monotonic() + _LOOK_INTERVAL_S > due_s:
                raise _DroppedError(reason)
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def _check_step(self, job: Job) -> None:
        """What a step wanted that is over counts for nothing any more."""
        side = job.side
        if side is None or side.rollout_id is None:
            raise RuntimeError("a copy without a rollout")
        sessions = self._gateway.sessions
        if not await queries.is_in_step(sessions, side.rollout_id, side.step):
            raise _DroppedError("over")

    def _check_slots(self, job: Job, model: ServedModel) -> None:
        """A tenant that may have one adapter in a step must not wait for a copy's."""
        is_other = model.revision.adapter_digest != job.model.revision.adapter_digest
        if is_other and job.max_adapters is not None and job.max_adapters < 2:
            raise _DroppedError("max_adapters")

    def _salt_of(self, tenant_id: UUID) -> bytes:
        key = self._gateway.settings.salt_key.get_secret_value().encode()
        return hmac.digest(key, b"rollout copies" + tenant_id.bytes, "sha256")


async def _why_late(pump: Pump) -> PlatformError:
    """An engine that was given somebody else's work first may be slow with a shadow; an idle one may not."""
    replica = pump.replica
    with contextlib.suppress(EngineLostError):
        stats = await replica.client.stats(_STATS_TIMEOUT_S)
        if not (pump.has_begun or _is_busy(stats)):
            return ShadowHungError("The canary said nothing for too long.")
    return ShadowGivenUpError("It took too long.")


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
