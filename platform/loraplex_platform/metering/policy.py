"""Who pays for which token: the billing policy as one pure function.

| outcome | tenant pays | platform absorbs |
|---|---|---|
| completed | prompt + output up to and including the token that completes the stop string or is eos | - |
| aborted (by the client) | prompt + what was generated until the abort | - |
| fault, lost (an engine, a gateway or the platform failed: docs/adr/0004) | nothing | prompt + all output |
| any outcome of a probe or a shadow | nothing | prompt + all output |

Tokens sampled past a stop string, or past an abort, are discarded: nobody pays, but they are counted,
because engines' totals must equal billed + absorbed + discarded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RequestKind = Literal["user", "probe", "shadow"]
Outcome = Literal["completed", "aborted", "fault", "lost"]
Source = Literal["terminal", "journal", "observed"]
Account = Literal["revenue", "absorbed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptUsage:
    """What one attempt at a request did, and how we know.

    Attributes:
        source: `terminal`: the engine's last event; `journal`: read from its journal by the sweeper;
            `observed`: the engine was lost and these are the tokens that had reached us.
        prompt_tokens, cached_tokens: cached ones are part of the prompt.
        generated: every token the engine sampled, also those that nobody will see.
        discarded_past_stop, discarded_past_abort, absorbed_anyway: parts of `generated`. The last are
            tokens that the platform pays for although the tenant pays for the rest.
    """

    outcome: Outcome
    source: Source
    prompt_tokens: int
    generated: int
    cached_tokens: int = 0
    discarded_past_stop: int = 0
    discarded_past_abort: int = 0
    absorbed_anyway: int = 0
    attempt: int = 1
    replica_id: str | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """Where the generated tokens went, and which account the request's one ledger row is on."""

    account: Account
    billed: int
    absorbed: int

    @property
    def charged_tokens(self) -> int:
        """Output tokens on the ledger row."""
        return self.billed if self.account == "revenue" else self.absorbed


def split(usage: AttemptUsage, kind: RequestKind) -> Split:
    """Apply the policy.

    Raises:
        ValueError: the parts do not fit into the whole: the caller counted wrong.
    """
    kept = usage.generated - usage.discarded_past_stop - usage.discarded_past_abort
    parts = (
        usage.discarded_past_stop,
        usage.discarded_past_abort,
        usage.absorbed_anyway,
        usage.cached_tokens,
        kept - usage.absorbed_anyway,
        usage.prompt_tokens - usage.cached_tokens,
    )
    if min(parts) < 0:
        raise ValueError(f"parts exceed the whole or are negative: {usage}")
    if kind != "user" or usage.outcome in ("fault", "lost"):
        return Split("absorbed", billed=0, absorbed=kept)
    return Split("revenue", billed=kept - usage.absorbed_anyway, absorbed=usage.absorbed_anyway)
