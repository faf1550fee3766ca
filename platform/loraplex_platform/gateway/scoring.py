"""How likely a revision finds an answer that it need not have given: its mean log-probability a token.

A canary that answers fluent garbage of the usual length differs in nothing else that can be counted. The
engine is told the answer (`forced_token_ids`) and computes it as it would a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from loraplex_engine.protocol import SamplingParams

from loraplex_platform.fleet.absorbed import Answer, Question
from loraplex_platform.gateway.job import Job
from loraplex_platform.gateway.queries import ServedModel

ENDPOINT: Final = "score"
# What is beyond is left out on both sides alike: a long answer must not hold up everybody's next tokens.
MAX_SCORED_TOKENS: Final = 512
_TIMEOUT_S: Final = 60.0


class UnscoredError(Exception):
    """No number came of it: in a word."""


def question(
    job: Job,
    model: ServedModel,
    prompt_ids: list[int],
    answer_ids: Sequence[int],
    *,
    salt: bytes,
    priority: int,
) -> Question:
    """Ask `model` how likely it finds the beginning of an answer to `prompt_ids`.

    Args:
        job: what was answered.
    """
    forced = tuple(answer_ids[:MAX_SCORED_TOKENS])
    side = job.side
    return Question(
        tenant_id=job.tenant_id,
        endpoint=ENDPOINT,
        model=model.public_name,
        prompt_token_ids=prompt_ids,
        sampling=SamplingParams(
            max_tokens=len(forced), temperature=0.0, logprobs=0, forced_token_ids=forced
        ),
        salt=salt,
        timeout_s=_TIMEOUT_S,
        priority=priority,
        deployment_id=model.deployment_id,
        revision_id=model.revision.id,
        adapter_version_id=model.revision.adapter_version_id,
        adapter_digest=model.revision.adapter_digest,
        max_adapters=job.max_adapters,
        kind="shadow",
        rollout_id=None if side is None else side.rollout_id,
        rollout_step=None if side is None else side.step,
        shadow_of=original_of(job),
    )


def original_of(job: Job) -> UUID:
    """The user's own request: itself, or what it is the shadow of."""
    return job.request_id if job.shadow_of is None else job.shadow_of


def mean_logprob(answer: Answer, num_tokens: int) -> float:
    """Of a question's answer, over the tokens that it was told.

    Raises:
        UnscoredError: not all of them were computed, or not to a number.
    """
    if answer.finish_reason != "length":
        raise UnscoredError(answer.error_code or answer.finish_reason or "unfinished")
    if len(answer.logprobs) != min(num_tokens, MAX_SCORED_TOKENS):
        raise UnscoredError("incomplete")
    mean = math.fsum(answer.logprobs) / len(answer.logprobs)
    if not math.isfinite(mean):
        raise UnscoredError("not_finite")
    return mean
