"""What a pump runs, and what it tells whoever listens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from loraplex_engine.protocol import SamplingParams

from loraplex_platform.errors import PlatformError
from loraplex_platform.gateway.idempotency import Retry
from loraplex_platform.gateway.openai_schemas import FinishReasonText, UsageReport
from loraplex_platform.gateway.queries import ServedModel
from loraplex_platform.gateway.text_stream import TextPiece
from loraplex_platform.gateway.tools import ToolPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """What the client called what the engine may refuse."""

    max_tokens: str = "max_tokens"
    grammar: str | None = None  # which field the grammar is from
    bans: str | None = None  # which field rules out tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that has been checked and only needs running."""

    request_id: UUID
    tenant_id: UUID
    key_id: UUID
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

    @property
    def num_tokens(self) -> int:
        """Prompt and one choice's longest completion."""
        return len(self.prompt_ids) + self.sampling.max_tokens


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
