"""One choice's place in its grammar: what may come next, and what has come.

A matcher belongs to one choice of one request for as long as that lives: preemption does not touch it,
because it has consumed exactly the choice's output tokens, whatever is recomputed. Its answers depend on
those tokens alone. Not thread-safe; the step thread owns it.

V vocabulary ids, W = ceil(V / 32) words; bit v % 32 of word v // 32 allows id v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from loraplex_engine.step import UInt32Array
from loraplex_engine.structured.errors import (
    GrammarDeadEndError,
    GrammarError,
    GrammarFailedError,
    GrammarTooComplexError,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher

_EVERYTHING = np.uint32(0xFFFF_FFFF)
_OVER_LIMITS = ("LexerTooComplex", "ParserTooComplex")
_DEAD_END = "the grammar allows no token here"
_DEAD_ENDS = ("NoExtension", "NoExtensionBias")

Result = TypeVar("Result")


class Matcher(Protocol):
    """What the core and the speculator need of a grammar."""

    @property
    def is_complete(self) -> bool:
        """The text is whole and nothing but an end token may follow: the choice is to stop."""
        ...

    def masks_for(self, drafts: Sequence[int] = ()) -> UInt32Array:
        """What may come next, and what after each draft: (1 + drafts, W).

        Rows after a draft that the grammar refuses, or that completes it, allow everything: what is
        sampled there is never used.

        Raises:
            GrammarDeadEndError, GrammarTooComplexError, GrammarFailedError: end the choice.
        """
        ...

    def validate_drafts(self, drafts: Sequence[int]) -> int:
        """How many of them, from the first on, the grammar allows. Consumes none."""
        ...

    def advance(self, token_id: int) -> None:
        """Consume an output token, an end token included. Nothing more after `is_complete`.

        Raises:
            GrammarTooComplexError, GrammarFailedError: end the choice.
        """
        ...

    def fork(self) -> Matcher:
        """An independent matcher in the same place."""
        ...


class Compilation(Protocol):
    """A grammar on its way to being usable."""

    @property
    def is_done(self) -> bool:
        """There is a matcher to be had, or an error."""
        ...

    @property
    def error(self) -> GrammarError | None:
        """Why it cannot be used."""
        ...

    def note_failure(self, error: GrammarError) -> None:
        """A matcher of it came to this, as any other would: let it be refused for a while."""
        ...

    def matcher(self) -> Matcher:
        """A new matcher at the grammar's beginning. Only when done.

        Raises:
            GrammarError: as `error`.
        """
        ...


class LlMatcher:
    """`Matcher` on llguidance.

    Args:
        native: an `llguidance.LLMatcher`, owned by this object from here on.
        vocab_size: V, which is also the tokenizer's.
    """

    def __init__(self, native: LLMatcher, vocab_size: int) -> None:
        self._native = native
        self._vocab_size = vocab_size

    @property
    def is_complete(self) -> bool:
        return bool(self._native.is_stopped()) and not self._native.is_error()

    def masks_for(self, drafts: Sequence[int] = ()) -> UInt32Array:
        num_words = -(-self._vocab_size // 32)
        masks = np.full((1 + len(drafts), num_words), _EVERYTHING, np.uint32)
        self._fill(self._native, masks[0])
        if not masks[0].any():
            raise GrammarDeadEndError(_DEAD_END)
        num_allowed = self.validate_drafts(drafts)
        if num_allowed:
            # A copy consumes them: an error there must not stick to the choice itself.
            ahead = self._call(self._native.deep_copy)
            for index, token_id in enumerate(drafts[:num_allowed]):
                if not self._call(ahead.consume_token, token_id) or ahead.is_stopped():
                    break
                try:
                    self._fill(ahead, masks[index + 1])
                except GrammarError:
                    masks[index + 1] = _EVERYTHING
                    break
        return masks

    def validate_drafts(self, drafts: Sequence[int]) -> int:
        if not drafts or self._native.is_stopped():
            return 0
        return int(self._call(self._native.validate_tokens, list(drafts)))

    def advance(self, token_id: int) -> None:
        # An error sticks to a native matcher, and one that has ended refuses everything.
        if not self._call(self._native.consume_token, token_id):
            raise self._failure(self._native)

    def fork(self) -> LlMatcher:
        return LlMatcher(self._call(self._native.deep_copy), self._vocab_size)

    def _fill(self, native: LLMatcher, mask_W: UInt32Array) -> None:
        # It writes exactly the given bytes, which it checks against its vocabulary.
        self._call(native.unsafe_compute_mask_ptr, mask_W.ctypes.data, mask_W.nbytes)
        if native.is_error():
            raise self._failure(native)

    def _failure(self, native: LLMatcher) -> GrammarError:
        message = str(native.get_error()).removesuffix("<non-verbose/>").strip()
        reason = native.stop_reason()
        if reason in _DEAD_ENDS or message in _DEAD_ENDS:
            return GrammarDeadEndError(_DEAD_END)
        if reason in _OVER_LIMITS or "limit" in message or "max is" in message:
            return GrammarTooComplexError(f"a step of the grammar takes too much work: {message}")
        return GrammarFailedError(f"the grammar cannot go on: {message}")

    def _call(self, function: Callable[..., Result], *arguments: object) -> Result:
        try:
            return function(*arguments)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # A panic in Rust is no Exception; it must end a request, not the engine.
            raise GrammarFailedError(f"the grammar broke: {type(error).__name__}") from error
