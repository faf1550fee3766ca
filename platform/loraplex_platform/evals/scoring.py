"""Ask an engine for the log-probabilities of given tokens: of a reference answer, under a revision."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex_engine.protocol import SamplingParams

from loraplex_platform.evals.asking import Asker, CaseError
from loraplex_platform.evals.records import Target


async def reference_logprobs(
    asker: Asker,
    target: Target,
    prompt_token_ids: list[int],
    reference_token_ids: Sequence[int],
    deadline_s: float,
) -> Sequence[float]:
    """Natural-log probability of each reference token after the prompt and those before it.

    Args:
        deadline_s: by the event loop's clock.

    Raises:
        CaseError: there is nothing to score, or no engine did it; the message says which.
        CaseTimeoutError: it did not come in time.
    """
    forced = tuple(reference_token_ids)
    if not forced:
        raise CaseError("the reference has no tokens: there is nothing to compare with")
    sampling = SamplingParams(
        max_tokens=len(forced), temperature=0.0, logprobs=0, forced_token_ids=forced
    )
    answer = await asker.put(target, prompt_token_ids, sampling, deadline_s)
    if len(answer.logprobs) != len(forced):
        raise CaseError(
            f"the engine scored {len(answer.logprobs)} of the reference's {len(forced)} tokens"
        )
    return answer.logprobs
