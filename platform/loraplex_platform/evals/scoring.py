"""Ask an engine for the log-probabilities of given tokens: of a reference answer, under a revision."""

from __future__ import annotations

from collections.abc import Sequence


class ScoringUnavailableError(Exception):
    """No engine can score given text; the message says what to do."""


async def reference_logprobs(
    prompt_token_ids: Sequence[int], reference_token_ids: Sequence[int]
) -> Sequence[float]:
    """Natural-log probability of each reference token after the prompt and those before it.

    Raises:
        ScoringUnavailableError: always, until the engine's protocol takes `prompt_logprobs` and
            `score_from` (here: the prompt's length) and answers with them in the terminal event.
    """
    raise ScoringUnavailableError(
        f"the engines of this release cannot score given text ({len(prompt_token_ids)} prompt and "
        f"{len(reference_token_ids)} reference tokens); use another check until they can"
    )
