"""Does the adapter do anything? A few fixed prompts, greedy, base and adapter side by side.

Each answer is a request like any other, reserved and settled as kind `probe`: the platform absorbs
its tokens, and the identity of generated and accounted tokens holds for them too.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from loraplex_engine.client import EngineLostError, EngineRejectedError
from loraplex_engine.protocol import SamplingParams

from loraplex_platform.db import BaseModel
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import EngineUnavailableError, PlatformError, UnavailableError
from loraplex_platform.fleet.absorbed import Answer, Question, ask
from loraplex_platform.fleet.engines import EngineFleet
from loraplex_platform.gateway.builds import BuildRule
from loraplex_platform.gateway.chat_message import ChatMessage
from loraplex_platform.gateway.detokenizer import Detokenizer
from loraplex_platform.gateway.routing import Replica
from loraplex_platform.gateway.tokenization import BaseTokenizer
from loraplex_platform.registry.errors import AdapterRejectedError

PROMPTS: Final = (
    "What is the capital of France?",
    "Tell me about the sea in one sentence.",
    "How do I boil an egg?",
    "Name three colours of the rainbow.",
)
MAX_TOKENS = 24
TIMEOUT_S = 90.0
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
    base_model: BaseModel


class Prober:
    """Runs probes through whatever replica is ready."""

    def __init__(
        self, sessions: SessionFactory, fleet: EngineFleet, tokenizer: BaseTokenizer, *, owner: str
    ) -> None:
        self._sessions = sessions
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._owner = owner

    async def find_engine(self, base_model: BaseModel) -> Replica:
        """A replica with these weights that could run a probe now; raises `EngineUnavailableError`."""
        builds = BuildRule(
            base_revision=base_model.revision, tokenizer_sha256=base_model.tokenizer_sha256
        )
        return await self._fleet.ready_engine(base_model.name, num_tokens=256, builds=builds)

    async def run(self, target: ProbeTarget) -> dict[str, Any]:
        """The report's `probe` part.

        Raises:
            AdapterRejectedError: no effect, or output that is not finite.
            UnavailableError: no engine, or none that got it done.
        """
        replica = await self.find_engine(target.base_model)
        # One salt for this probe alone: it neither fills nor reads any tenant's prefix cache.
        salt = secrets.token_bytes(32)
        prompts = [await self._encode(prompt) for prompt in PROMPTS]
        asked = [
            self._ask(replica, salt, target, ids, digest)
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
        good = [answer for answer in answers if isinstance(answer, Answer)]
        pairs = list(zip(good[::2], good[1::2], strict=True))
        return self._report(pairs)

    async def _encode(self, prompt: str) -> list[int]:
        context = self._tokenizer.context_length
        if self._tokenizer.has_template:
            return await self._tokenizer.encode_chat([ChatMessage("user", prompt)], context)
        return await self._tokenizer.encode_prompt(prompt, context)

    async def _ask(
        self,
        replica: Replica,
        salt: bytes,
        target: ProbeTarget,
        prompt_ids: list[int],
        digest: str | None,
    ) -> Answer:
        question = Question(
            tenant_id=target.tenant_id,
            endpoint="probe",
            model=target.base_model.name if digest is None else target.name,
            prompt_token_ids=prompt_ids,
            sampling=SamplingParams(
                max_tokens=MAX_TOKENS,
                temperature=0.0,
                stop_token_ids=self._tokenizer.end_token_ids,
                logprobs=0,
            ),
            salt=salt,
            timeout_s=TIMEOUT_S,
            adapter_version_id=None if digest is None else target.version_id,
            adapter_digest=digest,
        )
        try:
            answer = await ask(self._sessions, replica, question, owner=self._owner)
        except EngineRejectedError as error:
            raise _refusal(error) from None
        except EngineLostError as error:
            raise _busy() from error
        if not _has_answered(answer) and answer.error_code not in _ADAPTERS_FAULTS:
            raise _busy()
        return answer

    # ------------------------------------------------------------------ the report

    def _report(self, pairs: Sequence[tuple[Answer, Answer]]) -> dict[str, Any]:
        changed, largest = 0, 0.0
        samples = []
        for prompt, (base, adapter) in zip(PROMPTS, pairs, strict=True):
            if not _has_answered(base):
                raise _busy()
            values = [*adapter.logprobs]
            if not _has_answered(adapter) or not all(map(math.isfinite, values)):
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


def _has_answered(answer: Answer) -> bool:
    return answer.finish_reason in ("stop", "length")


def _difference(base: Answer, adapter: Answer) -> float:
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
