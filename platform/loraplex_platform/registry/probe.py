"""Does the adapter do anything? A few fixed prompts, greedy, base and adapter side by side.

Each answer is a request like any other, reserved and settled as kind `probe`: the platform absorbs
its tokens, and the identity of generated and accounted tokens holds for them too.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import structlog
from loraplex_engine.client import EngineClient, EngineLostError, EngineRejectedError, EngineStream
from loraplex_engine.protocol import Generate, SamplingParams, TokenEvent, Usage

from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import EngineUnavailableError, PlatformError, UnavailableError
from loraplex_platform.fleet.engines import EngineFleet
from loraplex_platform.gateway.chat_message import ChatMessage
from loraplex_platform.gateway.detokenizer import Detokenizer
from loraplex_platform.gateway.tokenization import BaseTokenizer
from loraplex_platform.ids import uuid7
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.policy import AttemptUsage, Outcome
from loraplex_platform.metering.records import Reservation, Settlement
from loraplex_platform.registry.errors import AdapterRejectedError

log = structlog.get_logger(__name__)

PROMPTS: Final = (
    "What is the capital of France?",
    "Tell me about the sea in one sentence.",
    "How do I boil an egg?",
    "Name three colours of the rainbow.",
)
MAX_TOKENS = 24
TIMEOUT_S = 90.0
_ABORT_GRACE_S = 5.0
_LEASE_S = TIMEOUT_S + 30.0  # never renewed: longer than all of it can take
_RETRY_AFTER_S = 5.0
# What an engine ends a request with because of the adapter; all else is no verdict on it.
_ADAPTERS_FAULTS: Final = ("non_finite_logits", "adapter_invalid")


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """What is probed, and for whom."""

    tenant_id: UUID
    version_id: UUID  # of the version to be; only accounting knows it until it is inserted
    name: str
    digest: str
    base_model: str


@dataclass(slots=True)
class _Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error_code: str | None = None


@dataclass(frozen=True, slots=True)
class _Via:
    engine: EngineClient
    replica_id: str
    salt: bytes = field(repr=False)


class Prober:
    """Runs probes through whatever replica is ready."""

    def __init__(
        self, sessions: SessionFactory, fleet: EngineFleet, tokenizer: BaseTokenizer, *, owner: str
    ) -> None:
        self._sessions = sessions
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._owner = owner

    async def find_engine(self, base_model: str) -> tuple[str, EngineClient]:
        """A replica that could run a probe now; raises `EngineUnavailableError`."""
        return await self._fleet.ready_engine(base_model, num_tokens=256)

    async def run(self, target: ProbeTarget) -> dict[str, Any]:
        """The report's `probe` part.

        Raises:
            AdapterRejectedError: no effect, or output that is not finite.
            UnavailableError: no engine, or none that got it done.
        """
        replica_id, engine = await self.find_engine(target.base_model)
        # One salt for this probe alone: it neither fills nor reads any tenant's prefix cache.
        salt = secrets.token_bytes(32)
        prompts = [await self._encode(prompt) for prompt in PROMPTS]
        via = _Via(engine, replica_id, salt)
        asked = [
            self._ask(via, target, ids, digest)
            for ids in prompts
            for digest in (None, target.digest)
        ]
        # All run to their end and settle, also when one fails or the uploader hangs up.
        running = asyncio.gather(*asked, return_exceptions=True)
        answers = await asyncio.shield(running)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures:
            # What is wrong with the adapter, before what is wrong with us.
            raise min(failures, key=_status_of)
        good = [answer for answer in answers if isinstance(answer, _Answer)]
        pairs = list(zip(good[::2], good[1::2], strict=True))
        return self._report(pairs)

    async def _encode(self, prompt: str) -> list[int]:
        context = self._tokenizer.context_length
        if self._tokenizer.has_template:
            return await self._tokenizer.encode_chat([ChatMessage("user", prompt)], context)
        return await self._tokenizer.encode_prompt(prompt, context)

    # ------------------------------------------------------------------ one request

    async def _ask(
        self, via: _Via, target: ProbeTarget, prompt_ids: list[int], digest: str | None
    ) -> _Answer:
        request_id = uuid7()
        reserved = await metering.reserve(
            self._sessions,
            Reservation(
                request_id=request_id,
                tenant_id=target.tenant_id,
                key_id=None,
                endpoint="probe",
                model=target.base_model if digest is None else target.name,
                owner=self._owner,
                est_prompt_tokens=len(prompt_ids),
                est_completion_tokens=MAX_TOKENS,
                adapter_version_id=None if digest is None else target.version_id,
                replica_id=via.replica_id,
                kind="probe",
                lease_s=_LEASE_S,
            ),
        )
        generate = Generate(
            request_id=str(request_id),
            attempt=1,
            lease_token=reserved.lease_token,
            tenant_id=str(target.tenant_id),
            tenant_salt=via.salt,
            prompt_token_ids=prompt_ids,
            sampling=SamplingParams(
                max_tokens=MAX_TOKENS,
                temperature=0.0,
                stop_token_ids=self._tokenizer.end_token_ids,
                logprobs=0,
            ),
            adapter_digest=digest,
            deadline_unix_s=time.time() + TIMEOUT_S,
        )
        answer = _Answer()
        try:
            terminal = await _run(via.engine, generate, answer)
        except EngineRejectedError as error:
            await metering.void(
                self._sessions,
                request_id,
                reserved.lease_token,
                voided_by=self._owner,
                error_code=error.code,
            )
            raise _refusal(error) from None
        except EngineLostError as error:
            generated = len(answer.token_ids)
            await self._settle_lost(request_id, reserved.lease_token, len(prompt_ids), generated)
            raise _busy() from error
        await self._settle(
            request_id,
            reserved.lease_token,
            _usage_of(terminal, via.replica_id),
            finish_reason=terminal.finish_reason,
            error_code=terminal.error_code,
        )
        if terminal.finish_reason not in ("stop", "length"):
            if terminal.error_code not in _ADAPTERS_FAULTS:
                raise _busy()
            answer.error_code = terminal.error_code
        return answer

    async def _settle_lost(
        self, request_id: UUID, lease_token: int, num_prompt: int, generated: int
    ) -> None:
        usage = AttemptUsage(
            outcome="lost", source="observed", prompt_tokens=num_prompt, generated=generated
        )
        await self._settle(
            request_id, lease_token, usage, finish_reason=None, error_code="engine_lost"
        )

    async def _settle(
        self,
        request_id: UUID,
        lease_token: int,
        usage: AttemptUsage,
        *,
        finish_reason: str | None,
        error_code: str | None,
    ) -> None:
        await metering.settle(
            self._sessions,
            Settlement(
                request_id=request_id,
                lease_token=lease_token,
                usage=usage,
                settled_by=self._owner,
                kind="probe",
                finish_reason=finish_reason,
                error_code=error_code,
            ),
        )

    # ------------------------------------------------------------------ the report

    def _report(self, pairs: Sequence[tuple[_Answer, _Answer]]) -> dict[str, Any]:
        changed, largest = 0, 0.0
        samples = []
        for prompt, (base, adapter) in zip(PROMPTS, pairs, strict=True):
            if base.error_code is not None:
                raise _busy()
            values = [*adapter.logprobs]
            if adapter.error_code is not None or not all(map(math.isfinite, values)):
                raise AdapterRejectedError(
                    "adapter_model",
                    "with this adapter the model's output is not finite.",
                    "The training diverged or alpha is too large: use a sound checkpoint.",
                )
            changed += base.token_ids != adapter.token_ids
            largest = max(largest, _difference(base, adapter))
            samples.append(
                {
                    "prompt": prompt,
                    "base": self._text(base.token_ids),
                    "adapter": self._text(adapter.token_ids),
                }
            )
        if changed == 0 and largest == 0.0:
            raise AdapterRejectedError(
                "adapter_model",
                f"it changes nothing: all {len(PROMPTS)} test prompts are answered exactly as by "
                "the base.",
                "Check that training ran and that the right checkpoint was saved.",
            )
        return {
            "samples": samples,
            "changed": changed,
            "max_logprob_difference": round(largest, 6),
        }

    def _text(self, token_ids: Sequence[int]) -> str:
        detokenizer = Detokenizer(self._tokenizer.token_bytes)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


async def _run(engine: EngineClient, generate: Generate, answer: _Answer) -> TokenEvent:
    """Queue it and collect to the terminal event; past `TIMEOUT_S` abort, and still wait for its usage.

    Raises:
        EngineRejectedError: refused at admission.
        EngineLostError: the replica is gone, or does not even answer.
    """
    stream = None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            stream = await engine.generate(generate)
            return await _read_on(stream, answer)
    except TimeoutError:
        if stream is None:  # the cancelled wait has aborted it
            raise EngineLostError("no answer to a request") from None
        stream.abort(is_platform_fault=True)
    try:
        async with asyncio.timeout(_ABORT_GRACE_S):
            return await _read_on(stream, answer)
    except TimeoutError:
        raise EngineLostError("no answer to an abort") from None


async def _read_on(stream: EngineStream, answer: _Answer) -> TokenEvent:
    async for event in stream:
        answer.token_ids += event.token_ids
        answer.logprobs += [item.logprob for item in event.logprobs or ()]
        if event.usage is not None:
            return event
    raise EngineLostError("the stream ended without a terminal event")


def _usage_of(terminal: TokenEvent, replica_id: str) -> AttemptUsage:
    usage = terminal.usage or Usage(prompt_tokens=0, completion_tokens=0)
    outcome: Outcome = "completed"
    if terminal.finish_reason in ("error", "abort"):
        outcome = "fault" if terminal.finish_reason == "error" else "aborted"
    return AttemptUsage(
        outcome=outcome,
        source="terminal",
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        generated=usage.completion_tokens,
        replica_id=replica_id,
    )


def _difference(base: _Answer, adapter: _Answer) -> float:
    """Largest difference of the sampled tokens' logprobs, up to where the answers part."""
    largest = 0.0
    rows = zip(base.token_ids, adapter.token_ids, base.logprobs, adapter.logprobs, strict=False)
    for base_id, adapter_id, base_logprob, adapter_logprob in rows:
        largest = max(largest, abs(base_logprob - adapter_logprob))
        if base_id != adapter_id:
            break  # after this the contexts differ, and so would a model's own logprobs
    return largest


def _refusal(error: EngineRejectedError) -> PlatformError:
    if error.code == "adapter_invalid":
        return AdapterRejectedError(
            "adapter_model", f"the engine refused it: {error.message}", "Upload it again."
        )
    return EngineUnavailableError(
        f"The engine could not run the probe ({error.code}); try again in a few seconds.",
        retry_after_s=error.retry_after_s or _RETRY_AFTER_S,
    )


def _busy() -> UnavailableError:
    return EngineUnavailableError(
        "The engine did not finish the probe; nothing was stored, try again in a few seconds.",
        retry_after_s=_RETRY_AFTER_S,
    )


def _status_of(error: BaseException) -> int:
    return error.status if isinstance(error, PlatformError) else 500
