"""Put questions to the engines for a run: which replica, how long, and again after a replica was lost.

Every question is a request of its own in the books (`fleet.absorbed`), at the lowest priority.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import time
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

import structlog
from loraplex_engine.client import EngineLostError, EngineRejectedError
from loraplex_engine.protocol import RejectCode, ReplicaRecord, SamplingParams

from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import EngineUnavailableError, PlatformError
from loraplex_platform.evals.records import PRIORITY, Target
from loraplex_platform.fleet.absorbed import Answer, Question, ask
from loraplex_platform.gateway.chat_message import ChatMessage
from loraplex_platform.gateway.detokenizer import Detokenizer
from loraplex_platform.gateway.routing import Router
from loraplex_platform.gateway.tokenization import BaseTokenizer

log = structlog.get_logger(__name__)

ENDPOINT: Final = "eval"
_WAIT_S: Final = 0.5
_MAX_WAIT_S: Final = 5.0
_LEAST_S: Final = 0.2  # with less time left than this nothing is asked
# Refusals that pass by themselves.
_TRANSIENT: Final[frozenset[RejectCode]] = frozenset(
    {"queue_full", "draining", "adapter_unavailable"}
)


class CaseError(Exception):
    """A question cannot be answered, for a reason that is not the answer's: in words."""


class CaseTimeoutError(Exception):
    """The whole answer did not come in time: in words."""


class TargetError(CaseError):
    """The revision itself cannot answer: its output is not finite, or the engine refuses its adapter."""


@dataclass(slots=True)
class Asker:
    """Asks in one run's name.

    Attributes:
        salt: this run's alone: it neither fills nor reads a tenant's prefix cache.
        owner: of the requests, in the books.
    """

    sessions: SessionFactory
    router: Router
    tokenizer: BaseTokenizer
    base_model: str
    tenant_id: UUID
    owner: str
    salt: bytes = field(repr=False)

    async def encode(self, messages: list[ChatMessage] | None, prompt: str | None) -> list[int]:
        """Token ids of a chat or a plain prompt.

        Raises:
            CaseError: too long, or the template refuses it.
        """
        context = self.context_length
        try:
            if messages is not None and self.tokenizer.has_template:
                return await self.tokenizer.encode_chat(messages, context)
            if messages is not None and prompt is None:
                raise CaseError("the base model has no chat template: use prompt")
            return await self.tokenizer.encode_prompt(prompt or "", context)
        except PlatformError as error:
            raise CaseError(error.message) from None

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer have together, on whichever replica has the longest context."""
        return self.router.max_model_len(self.base_model, self.tokenizer.context_length)

    async def put(
        self,
        target: Target,
        prompt_ids: list[int],
        sampling: SamplingParams,
        deadline_s: float,
    ) -> Answer:
        """The whole answer, from whichever replica is free; another one if the first is lost.

        Args:
            deadline_s: by the event loop's clock.

        Raises:
            CaseTimeoutError: it did not come in time.
            CaseError: no engine was there in all that time, or what is asked fits none.
            TargetError: it is the revision's own fault.
            PlatformError: the tenant cannot be asked for, or no database.
        """
        length = len(prompt_ids) + sampling.max_tokens
        if length > self.context_length:
            raise CaseError(
                f"prompt ({len(prompt_ids)}) and max_tokens ({sampling.max_tokens}) together exceed the "
                f"context of {self.context_length} tokens: shorten one"
            )
        began_s = _now_s()
        wait_s = _WAIT_S
        reason = "no engine was ready"
        while True:
            left_s = deadline_s - _now_s()
            if left_s < _LEAST_S:
                raise CaseError(f"{reason} for {_now_s() - began_s:.0f} s")
            try:
                replica = self.router.choose(self.base_model, length, builds=target.builds)
                answer = await ask(
                    self.sessions,
                    replica,
                    self._question(target, prompt_ids, sampling, left_s),
                    owner=self.owner,
                )
                return _checked(answer, left_s)
            except EngineUnavailableError:
                reason = "no engine was ready"
                if target.builds.only is not None:
                    reason = f"no engine of the build {target.builds.only} was ready"
            except EngineRejectedError as error:
                if error.code == "adapter_invalid":
                    raise TargetError(f"the engine refuses the adapter: {error.message}") from None
                if error.code not in _TRANSIENT:
                    raise CaseError(f"the engine refuses it: {error.message}") from None
                reason = f"engines refused it ({error.code})"
            except EngineLostError as error:
                reason = f"engines were lost ({error})"
                log.warning("eval_engine_lost", reason=str(error))
            await asyncio.sleep(min(wait_s, max(0.0, deadline_s - _now_s())))
            wait_s = min(wait_s * 2, _MAX_WAIT_S)

    def text_of(self, answer: Answer) -> str:
        """The answer as a client would see it: without the token that ended it."""
        ids = answer.token_ids
        if answer.finish_reason == "stop" and ids and ids[-1] in self.tokenizer.end_token_ids:
            ids = ids[:-1]
        detokenizer = Detokenizer(self.tokenizer.token_bytes)
        return detokenizer.push_all(ids) + detokenizer.flush()

    def _question(
        self, target: Target, prompt_ids: list[int], sampling: SamplingParams, timeout_s: float
    ) -> Question:
        return Question(
            tenant_id=self.tenant_id,
            endpoint=ENDPOINT,
            model=target.model,
            prompt_token_ids=prompt_ids,
            sampling=sampling,
            salt=self.salt,
            timeout_s=timeout_s,
            priority=PRIORITY,
            deployment_id=target.deployment_id,
            revision_id=target.revision_id,
            adapter_version_id=target.adapter_version_id,
            adapter_digest=target.adapter_digest,
        )


def bits_of(answer: Answer) -> str:
    """SHA-256 of the tokens and of every bit of their log-probabilities."""
    digest = hashlib.sha256(struct.pack(f"<{len(answer.token_ids)}I", *answer.token_ids))
    digest.update(struct.pack(f"<{len(answer.logprobs)}d", *answer.logprobs))
    return digest.hexdigest()


def build_of(record: ReplicaRecord, fingerprint: str) -> str | None:
    """SHA-256 of all that the row rule speaks of; None where the replica says that it does not hold."""
    if not record.row_rule_holds:
        return None
    facts = {
        "fingerprint": fingerprint,
        "device": record.device,
        "isa": record.isa,
        "dtype": record.dtype,
        "torch": record.torch_version,
        "backends": record.backends,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _checked(answer: Answer, timeout_s: float) -> Answer:
    if answer.finish_reason in ("stop", "length"):
        return answer
    if answer.is_late or answer.error_code == "deadline_exceeded":
        raise CaseTimeoutError(
            f"no whole answer within {timeout_s:.0f} s ({len(answer.token_ids)} tokens came)"
        )
    if answer.error_code in ("non_finite_logits", "adapter_invalid"):
        raise TargetError(f"the engine ended it: {answer.error_code}")
    raise CaseError(f"the engine ended it: {answer.error_code or answer.finish_reason}")


def _now_s() -> float:
    return time.monotonic()
