"""One request inside the engine: its tokens, how far they are computed, and what it holds.

There is no prefill or decode state. A request has `num_tokens` known tokens (prompt, then sampled ones),
of which the keys and values of the first `num_computed_tokens` are in its blocks; a running request
catches up, and samples whenever it has. Preemption sets the count back to zero, resumption catches up,
from where the prefix cache ends: the count of a waiting request is what it found at the last look.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from loraplex_engine.protocol import FinishReason, Generate, SamplingParams, Usage

if TYPE_CHECKING:  # numpy comes with it, which the server must not load before it set its threads
    from loraplex_engine.kv.hashing import BlockChain
    from loraplex_engine.structured.matcher import Compilation, Matcher

Identity = tuple[str, int]  # (request_id, attempt)

BASE_SLOT = -1  # the adapter slot of a row that runs the base model


class RequestStatus(Enum):
    """Where a request is. Only RUNNING ones hold a row, blocks and an adapter lease."""

    WAITING = "waiting"  # has not run yet
    RUNNING = "running"
    PREEMPTED = "preempted"  # ran, lost its row, waits to resume
    FINISHED = "finished"


class BlockReason(Enum):
    """Why a waiting request was passed over, while those behind it are served."""

    ADAPTER_LOADING = "adapter_loading"
    ADAPTER_SLOT = "adapter_slot"  # loaded, but every slot is leased
    # Its tenant has its share of the slots, and another one waits; or as many as it may ever have.
    ADAPTER_SHARE = "adapter_share"
    PARTIAL_PREFILLS = "partial_prefills"  # it is long, and enough long ones are under way
    PREFIX = "prefix"  # another request is computing the prefix that they share
    GRAMMAR = "grammar"  # being compiled


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a request ended; becomes the terminal event's fields."""

    finish_reason: FinishReason
    stop_token_id: int | None = None
    error_code: str | None = None
    error_message: str | None = None


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of one request; the scheduler and the core are its only writers."""

    seq: int  # order of arrival in this engine; the key of its block table
    generate: Generate
    stop_ids: frozenset[int]  # tokens that end it: its stop ids, and EOS unless ignored
    arrived_at_unix_s: float = 0.0
    token_ids: list[int] = field(init=False)  # prompt, then what was sampled
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_prefilled_tokens: int = 0  # prompt tokens ever computed; preemption does not set it back
    status: RequestStatus = RequestStatus.WAITING
    row: int = -1
    adapter_slot: int = BASE_SLOT
    num_preemptions: int = 0
    num_skips: int = 0  # steps in which it was passed over, being blocked
    blocked_on: BlockReason | None = None  # at the last look; None: nothing but its turn and room
    # What fair policies keep here, for want of a cheaper place.
    num_charged_tokens: int = 0  # of its known tokens, those that its tenant's account was charged
    admitted_at_charge: float | None = None  # what was on the account before it was admitted
    served_priority: int | None = None  # the class it runs in, if a turn lifted it above its own
    # Of one request's n choices; all of them, this one included (empty: it is the only one).
    choice: int = 0
    siblings: list[Request] = field(default_factory=list, repr=False)
    chain: BlockChain | None = field(default=None, repr=False)  # names of its blocks, for the cache
    # What it waits for, if it does: the choice that computes their prompt, or the name of the last block
    # that it shares with who computes it (`KvManager.leaders`).
    awaited: Request | bytes | None = field(default=None, repr=False)
    was_admitted: bool = False  # ever
    num_cached_tokens: int = 0  # prompt tokens found when the first of the choices was admitted

    # Under a grammar; both outlive preemption (`structured/rows.py`).
    compilation: Compilation | None = field(default=None, repr=False)
    matcher: Matcher | None = field(default=None, repr=False)  # made when it first samples
    grammar_excess_s: float = 0.0  # beyond what masks may take; of all choices, kept by the first
    is_deferred: bool = (
        False  # in the step in flight: its grammar has no time, so it does not sample
    )
    num_deferrals: int = 0  # steps in a row
    failure: Ending | None = (
        None  # of its grammar, in the step in flight: it ends when that is done
    )

    def __post_init__(self) -> None:
        self.token_ids = list(self.generate.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def identity(self) -> Identity:
        return (self.generate.request_id, self.generate.attempt)

    @property
    def has_begun(self) -> bool:
        """Whether it, or another choice of the same request, has ever run."""
        return self.was_admitted or any(sibling.was_admitted for sibling in self.siblings)

    @property
    def is_compiling(self) -> bool:
        """Whether its grammar is not ready yet."""
        return self.compilation is not None and not self.compilation.is_done

    @property
    def sampling(self) -> SamplingParams:
        return self.generate.sampling

    @property
    def adapter_digest(self) -> str | None:
        return self.generate.adapter_digest

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def usage(self) -> Usage:
        """What it cost so far: a prompt that was never or partly computed counts as far as it was."""
        return Usage(
            prompt_tokens=self.num_prefilled_tokens, completion_tokens=self.num_output_tokens
        )
