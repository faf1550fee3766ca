"""Output tokens in, text that may be shown out, with the log-probabilities of exactly that text.

Joins `Detokenizer` and `StopMatcher` and answers the question of the bill: which token completed
the stop string? Unit of all offsets: characters of the completion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from loraplex_engine.protocol import TokenLogprobs

from loraplex_platform.gateway.detokenizer import Detokenizer, TokenBytes
from loraplex_platform.gateway.stops import StopMatch, StopMatcher
from loraplex_platform.gateway.tool_formats.call_parser import CallParser

_LOGPROB_CHARS = 80  # of JSON per log-probability


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token whose text has been released, with where that text starts."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


@dataclass(slots=True)
class TextPiece:
    """What one push released."""

    text: str = ""
    tokens: list[ShownToken] = field(default_factory=list)

    def extend(self, other: TextPiece) -> None:
        """Append what a later push released."""
        self.text += other.text
        self.tokens += other.tokens

    @property
    def size(self) -> int:
        """How much work showing it is, in about characters."""
        return len(self.text) + _LOGPROB_CHARS * sum(
            1 + len(token.logprobs.top_ids) for token in self.tokens
        )

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens)


@dataclass(frozen=True, slots=True)
class _HeldToken:
    token_id: int
    logprobs: TokenLogprobs
    start: int
    end: int  # one past its last character; counts an unfinished character as one


class TextStream:
    """One completion's text.

    Args:
        min_tokens: no stop string ends in the text of the first so many tokens.
        shows_stop: the stop string itself is shown too.
        shown_ids: special tokens whose names are text: marks of tool calls.
        one_call: a parser of its own: the end of a tool call stops the text as a stop string does. It
            is found as the answer finds it, so that a mark within a call's arguments is none.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        shows_stop: bool = False,
        shown_ids: Collection[int] = (),
        one_call: CallParser | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(token_bytes, shown_ids)
        self._matcher = StopMatcher(stops, shows_stop=shows_stop)
        self._min_tokens = min_tokens
        self._one_call = one_call
        self._held: deque[_HeldToken] = deque()
        self._num_decoded = 0
        self._num_shown = 0
        self.num_tokens = 0
        self.is_stopped = False  # a stop string completed, with token number `num_tokens`
        # Nothing in the text ends it: what is decoded is shown.
        self.is_plain = not any(stops) and one_call is None

    def push_plain(self, token_ids: Sequence[int]) -> str:
        """Take output tokens without log-probabilities, where `is_plain`; the text that they complete."""
        self.num_tokens += len(token_ids)
        text = self._detokenizer.push_all(token_ids)
        self._num_decoded += len(text)
        self._num_shown += len(text)
        return text

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> TextPiece:
        """Take one output token; an end token goes to `count`. Nothing after `is_stopped`."""
        self.num_tokens += 1
        start = self._num_decoded
        text = self._detokenizer.push(token_id)
        self._num_decoded += len(text)
        if logprobs is not None:
            end = self._num_decoded + self._detokenizer.has_pending
            self._held.append(_HeldToken(token_id, logprobs, start, end))
        match = self._match(text)
        self.is_stopped = match.is_stopped
        return self._release(match.text, is_last=match.is_stopped)

    def count(self) -> None:
        """Take one output token that has no text: the end token."""
        self.num_tokens += 1

    def finish(self) -> TextPiece:
        """The rest, when generation ended; nothing more after a stop string."""
        if self.is_stopped:
            return TextPiece()
        tail = self._detokenizer.flush()
        self._num_decoded += len(tail)
        match = self._match(tail)
        text = match.text
        if not match.is_stopped:
            text += self._cut(StopMatch(self._matcher.flush(), is_stopped=False), len(text)).text
        return self._release(text, is_last=True)

    def _match(self, text: str) -> StopMatch:
        return self._cut(self._matcher.push(text, can_stop=self._can_stop))

    @property
    def _can_stop(self) -> bool:
        return self.num_tokens > self._min_tokens

    def _cut(self, match: StopMatch, num_before: int = 0) -> StopMatch:
        """Of text that may be shown, what is not behind the end of a call.

        Args:
            num_before: characters that are about to be shown before it.
        """
        if self._one_call is None:
            return match
        ends = self._one_call.call_ends
        num_known = len(ends)
        self._one_call.push(match.text)
        if len(ends) == num_known or not self._can_stop:
            return match
        # The call may have been found to be over only by what came after it.
        end = max(0, ends[num_known] - self._num_shown - num_before)
        return StopMatch(match.text[:end], is_stopped=True)

    def _release(self, text: str, *, is_last: bool) -> TextPiece:
        self._num_shown += len(text)
        piece = TextPiece(text)
        while self._held and self._held[0].end <= self._num_shown:
            held = self._held.popleft()
            piece.tokens.append(ShownToken(held.token_id, held.logprobs, held.start))
        if is_last:
            # The token in which the stop string begins is shown if some of its text is.
            piece.tokens += [
                ShownToken(held.token_id, held.logprobs, held.start)
                for held in self._held
                if held.start < self._num_shown
            ]
            self._held.clear()
        return piece
