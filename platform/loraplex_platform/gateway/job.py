"""What a pump runs, and what it tells whoever listens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

from loraplex_engine.protocol import SamplingParams

from loraplex_platform.errors import PlatformError
from loraplex_platform.gateway.idempotency import Retry
from loraplex_platform.gateway.openai_schemas import FinishReasonText, UsageReport
from loraplex_platform.gateway.queries import ServedModel
from loraplex_platform.gateway.revision_choice import Side
from loraplex_platform.gateway.text_stream import TextPiece
from loraplex_platform.gateway.tools import ToolPlan
from loraplex_platform.metering.policy import RequestKind


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """What the client called what the engine may refuse."""

    max_tokens: str = "max_tokens"
    grammar: str | None = None  # which field the grammar is from
    bans: str | None = None  # which field rules out tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What an engine is asked, under one revision."""

    prompt_ids: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """What a rollout wants of a request besides its answer (`copying.py`).

    Attributes:
        stable: the model with the revision that its rollout compares with.
        prepare: the same request under another revision. It holds what was asked, in memory alone.
    """

    is_shadowed: bool
    is_scored: bool
    stable: ServedModel
    prepare: Callable[[ServedModel], Awaitable[Prepared]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that has been checked and only needs running. `key_id` None: not a user's."""

    request_id: UUID
    tenant_id: UUID
    key_id: UUID | None
    tenant_salt: bytes
    model: ServedModel
    endpoint: Literal["chat.completions", "completions"]
    is_stream: bool
    prompt_ids: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...]
    shows_stop: bool  # whether the answer includes the stop string
    arrived_s: float  # monotonic
    timeout_s: float
    tools: ToolPlan | None = None
    params: FieldNames = FieldNames()
    priority: int = 0  # of its tenant, at the engine; larger is more urgent
    weight: float = 1.0  # of its tenant, among those of its priority
    memory_weight: float | None = None  # see `Authenticated`
    max_adapters: int | None = None
    retry: Retry | None = None  # came with an Idempotency-Key, which it is to claim
    kind: RequestKind = "user"
    side: Side | None = None  # of its deployment's rollout
    copies: Copies | None = None
    shadow_of: UUID | None = None  # the user's request that this one repeats

    @property
    def num_tokens(self) -> int:
        """Prompt and one choice's longest completion."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    @property
    def sampling_record(self) -> dict[str, Any]:
        """How its tokens are drawn, in numbers, for the books; what is not there is switched off.

        Of what is text, or would say something of it, there is a count.
        """
        sampling = self.sampling
        numbers = {
            name: value
            for name, neutral in _RECORDED
            if (value := getattr(sampling, name)) != neutral
        }
        counts = {
            "num_stop_token_ids": len(sampling.stop_token_ids),
            "num_stops": len(self.stops),
            "num_logit_biases": len(sampling.logit_bias),
            "num_bad_words": len(sampling.bad_words_token_ids),
            "num_allowed_token_ids": len(sampling.allowed_token_ids),
            "num_grammars": int(sampling.grammar is not None),
        }
        return numbers | {name: count for name, count in counts.items() if count}


_RECORDED = (
    ("max_tokens", None),
    ("temperature", None),
    ("seed", None),
    ("top_p", 1.0),
    ("top_k", 0),
    ("min_p", 0.0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
    ("min_tokens", 0),
    ("ignore_eos", False),
    ("n", 1),
    ("logprobs", None),
)


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has produced the first token."""

    model_fingerprint: str


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """Released text of one choice."""

    index: int
    piece: TextPiece


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """One choice has all its text."""

    index: int
    reason: FinishReasonText


@dataclass(frozen=True, slots=True)
class Finished:
    """The end: every choice has ended, and this is billed."""

    usage: UsageReport


@dataclass(frozen=True, slots=True)
class Failed:
    """The end, with what the client is told."""

    error: PlatformError


PumpEvent = Started | ChoicePiece | ChoiceEnded | Finished | Failed
