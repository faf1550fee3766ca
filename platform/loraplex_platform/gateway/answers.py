"""From released text to OpenAI's JSON: whole answers, and the frames of a stream.

One class per endpoint, each knowing the order of its frames: chat begins with the role; both end
with exactly one frame that has a `finish_reason`, then the usage if it was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast
from uuid import UUID, uuid4

import msgspec
from msgspec import UNSET, UnsetType

from loraplex_platform.gateway.detokenizer import TokenBytes
from loraplex_platform.gateway.openai_schemas import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatFinishReason,
    ChatLogprobs,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    ContentLogprob,
    Delta,
    FinishReasonText,
    TopLogprob,
    UsageReport,
    encode_json,
)
from loraplex_platform.gateway.text_stream import ShownToken, TextPiece
from loraplex_platform.gateway.tool_answers import ChoiceCalls
from loraplex_platform.gateway.tools import ToolPlan

_Part = TypeVar("_Part", ChatChoice, CompletionChoice, ContentLogprob)

# JSON has no infinity; no real log-probability is this small.
_MIN_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every frame of an answer repeats."""

    request_id: UUID
    created: int
    model: str
    system_fingerprint: str
    includes_usage: bool  # in a stream
    num_top_logprobs: int | None  # None: no logprobs were asked for
    num_choices: int = 1


@dataclass(slots=True)
class WholeChoice:
    """All of one choice."""

    piece: TextPiece = field(default_factory=TextPiece)
    reason: FinishReasonText = "stop"

    @classmethod
    def of(cls, pieces: Sequence[TextPiece], reason: FinishReasonText) -> WholeChoice:
        """From what was released, piece by piece."""
        text = "".join(piece.text for piece in pieces)
        return cls(TextPiece(text, [token for piece in pieces for token in piece.tokens]), reason)


# The text of a frame that stands for any other; nobody who names a model can know it.
_MARK = uuid4().hex


@dataclass(frozen=True, slots=True)
class _Envelope:
    """A frame but for its text, encoded once: what is before the text and behind it."""

    before: bytes
    behind: bytes

    @classmethod
    def of(cls, marked: bytes) -> _Envelope:
        """Of a frame whose text is `_MARK`."""
        before, behind = marked.split(encode_json(_MARK))
        return cls(before, behind)

    def around(self, text: str) -> bytes:
        """The frame with this text."""
        return self.before + encode_json(text) + self.behind


class Answer(Protocol):
    """How an endpoint shows a completion. Each frame is the JSON of one `data:` line."""

    def first_frames(self) -> Iterator[bytes]:
        """Once the first token is there."""
        ...

    def frame(self, index: int, piece: TextPiece) -> bytes | None:
        """Released text of a choice; None: there is nothing to show of it yet."""
        ...

    def end_frames(self, index: int, reason: FinishReasonText) -> Iterator[bytes]:
        """What is left of a choice, and its end."""
        ...

    def last_frames(self, usage: UsageReport) -> Iterator[bytes]:
        """The usage, if it was asked for."""
        ...

    def whole(self, choices: Sequence[WholeChoice], usage: UsageReport) -> bytes:
        """Everything in one body. Reads nothing that changes: any thread may do it."""
        ...


class ChatAnswer:
    """`chat.completion` and its chunks.

    Args:
        tools: what the text may hold calls of; None: it is content, whatever it says.
    """

    def __init__(
        self, head: AnswerHead, token_bytes: TokenBytes, tools: ToolPlan | None = None
    ) -> None:
        self._head = head
        self._token_bytes = token_bytes
        self._envelopes: dict[int, _Envelope] = {}  # by choice
        # By choice; empty without tools.
        self._calls: list[ChoiceCalls] = []
        if tools is not None:
            self._calls = [
                ChoiceCalls(tools.parser(), f"{head.request_id.hex}{index:02x}")
                for index in range(head.num_choices)
            ]

    def first_frames(self) -> Iterator[bytes]:
        """The role, once for every choice."""
        # An answer of nothing but calls has no content, not even an empty one: it may become that.
        content: str | UnsetType = UNSET if self._calls else ""
        for index in range(self._head.num_choices):
            delta = Delta(role="assistant", content=content)
            yield self._chunk(ChunkChoice(index=index, delta=delta))

    def frame(self, index: int, piece: TextPiece) -> bytes | None:
        """A piece of content, or of calls."""
        if not self._calls and self._head.num_top_logprobs is None:
            return self._plain(index, piece.text)
        delta = Delta(content=piece.text)
        if self._calls:
            pushed = self._calls[index].push(piece.text)
            if pushed is None and not piece.tokens:
                return None
            delta = pushed or Delta()
        return self._chunk(
            ChunkChoice(index=index, delta=delta, logprobs=self._logprobs(piece.tokens))
        )

    def end_frames(self, index: int, reason: FinishReasonText) -> Iterator[bytes]:
        """What the parser held back, and a choice's terminal chunk."""
        shown: ChatFinishReason = reason
        if self._calls:
            calls = self._calls[index]
            rest = calls.finish()
            if rest is not None:
                yield self._chunk(ChunkChoice(index=index, delta=rest))
            shown = calls.reason(reason)
        yield self._chunk(ChunkChoice(index=index, delta=Delta(), finish_reason=shown))

    def last_frames(self, usage: UsageReport) -> Iterator[bytes]:
        """The usage chunk, which has no choices."""
        if self._head.includes_usage:
            yield self._chunk(None, usage)

    def whole(self, choices: Sequence[WholeChoice], usage: UsageReport) -> bytes:
        """The body of an answer that is not streamed."""
        shown = []
        for index, choice in enumerate(choices):
            message = AssistantMessage(content=choice.piece.text)
            reason: ChatFinishReason = choice.reason
            if self._calls:
                message = self._calls[index].whole(choice.piece.text)
                reason = self._calls[index].reason(reason)
            logprobs = self._logprobs(choice.piece.tokens)
            shown.append(
                _encoded(
                    ChatChoice(
                        index=index, message=message, logprobs=logprobs, finish_reason=reason
                    )
                )
            )
        return encode_json(
            ChatCompletion(
                id=f"chatcmpl-{self._head.request_id.hex}",
                created=self._head.created,
                model=self._head.model,
                choices=shown,
                usage=usage,
                system_fingerprint=self._head.system_fingerprint,
            )
        )

    def _plain(self, index: int, text: str) -> bytes:
        envelope = self._envelopes.get(index)
        if envelope is None:
            choice = ChunkChoice(index=index, delta=Delta(content=_MARK))
            envelope = self._envelopes[index] = _Envelope.of(self._chunk(choice))
        return envelope.around(text)

    def _chunk(self, choice: ChunkChoice | None, usage: UsageReport | None = None) -> bytes:
        shown: UsageReport | UnsetType | None = usage if self._head.includes_usage else UNSET
        return encode_json(
            ChatCompletionChunk(
                id=f"chatcmpl-{self._head.request_id.hex}",
                created=self._head.created,
                model=self._head.model,
                system_fingerprint=self._head.system_fingerprint,
                choices=[] if choice is None else [choice],
                usage=shown,
            )
        )

    def _logprobs(self, tokens: Sequence[ShownToken]) -> ChatLogprobs | None:
        num_top = self._head.num_top_logprobs
        if num_top is None:
            return None
        return ChatLogprobs([_encoded(self._content(token, num_top)) for token in tokens])

    def _content(self, token: ShownToken, num_top: int) -> ContentLogprob:
        label, raw = _named(self._token_bytes, token.token_id)
        values = token.logprobs
        pairs = zip(values.top_ids[:num_top], values.top_logprobs[:num_top], strict=True)
        top = [TopLogprob(*self._shown(id_, logprob)) for id_, logprob in pairs]
        return ContentLogprob(label, _finite(values.logprob), raw, top)

    def _shown(self, token_id: int, logprob: float) -> tuple[str, float, list[int] | None]:
        label, raw = _named(self._token_bytes, token_id)
        return label, _finite(logprob), raw


class CompletionAnswer:
    """`text_completion`, whole or in frames of the same shape."""

    def __init__(self, head: AnswerHead, token_bytes: TokenBytes) -> None:
        self._head = head
        self._token_bytes = token_bytes
        self._envelopes: dict[int, _Envelope] = {}  # by choice

    def first_frames(self) -> Iterator[bytes]:
        """Nothing: there is no role."""
        yield from ()

    def frame(self, index: int, piece: TextPiece) -> bytes | None:
        """A piece of text."""
        if self._head.num_top_logprobs is None:
            envelope = self._envelopes.get(index)
            if envelope is None:
                marked = self._completion([self._choice(index, TextPiece(_MARK), None)], None)
                envelope = self._envelopes[index] = _Envelope.of(marked)
            return envelope.around(piece.text)
        return self._completion([self._choice(index, piece, None)], None)

    def end_frames(self, index: int, reason: FinishReasonText) -> Iterator[bytes]:
        """A choice's terminal frame."""
        yield self._completion([self._choice(index, TextPiece(), reason)], None)

    def last_frames(self, usage: UsageReport) -> Iterator[bytes]:
        """The usage frame, which has no choices."""
        if self._head.includes_usage:
            yield self._completion([], usage)

    def whole(self, choices: Sequence[WholeChoice], usage: UsageReport) -> bytes:
        """The body of an answer that is not streamed."""
        shown = [
            _encoded(self._choice(index, choice.piece, choice.reason))
            for index, choice in enumerate(choices)
        ]
        return self._completion(shown, usage, is_whole=True)

    def _choice(
        self, index: int, piece: TextPiece, reason: FinishReasonText | None
    ) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=piece.text,
            logprobs=self._logprobs(piece.tokens),
            finish_reason=reason,
        )

    def _completion(
        self, choices: list[CompletionChoice], usage: UsageReport | None, *, is_whole: bool = False
    ) -> bytes:
        shown: UsageReport | UnsetType | None = (
            usage if is_whole or self._head.includes_usage else UNSET
        )
        return encode_json(
            Completion(
                id=f"cmpl-{self._head.request_id.hex}",
                created=self._head.created,
                model=self._head.model,
                system_fingerprint=self._head.system_fingerprint,
                choices=choices,
                usage=shown,
            )
        )

    def _logprobs(self, tokens: Sequence[ShownToken]) -> CompletionLogprobs | None:
        num_top = self._head.num_top_logprobs
        if num_top is None:
            return None
        tops: list[dict[str, float]] = []
        for token in tokens:
            values = token.logprobs
            pairs = zip(values.top_ids[:num_top], values.top_logprobs[:num_top], strict=True)
            top = {self._token_bytes.label(id_): _finite(logprob) for id_, logprob in pairs}
            # The sampled token is always among them, as in OpenAI's API.
            top.setdefault(self._token_bytes.label(token.token_id), _finite(values.logprob))
            tops.append(top)
        return CompletionLogprobs(
            tokens=[self._token_bytes.label(token.token_id) for token in tokens],
            token_logprobs=[_finite(token.logprobs.logprob) for token in tokens],
            top_logprobs=tops if num_top else None,
            text_offset=[token.offset for token in tokens],
        )


def _encoded(part: _Part) -> _Part:
    """`part` as JSON already, for a document that holds it.

    The encoder keeps the interpreter's lock while it works: a large document in one call would stop every
    other stream, also from a thread, and would need all its structs in memory at once.
    """
    return cast("_Part", msgspec.Raw(encode_json(part)))


def _named(token_bytes: TokenBytes, token_id: int) -> tuple[str, list[int] | None]:
    """A token's label and bytes; no bytes for a special token: it has no text."""
    if token_bytes.is_special(token_id):
        return token_bytes.label(token_id), None
    return token_bytes.label(token_id), list(token_bytes.text_bytes(token_id))


def _finite(logprob: float) -> float:
    # `not >=` also catches NaN.
    return logprob if logprob >= _MIN_LOGPROB else _MIN_LOGPROB
