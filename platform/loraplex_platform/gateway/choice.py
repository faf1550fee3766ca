"""One completion of a request on its way: its tokens, their text, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex_engine.protocol import TokenEvent

from loraplex_platform.gateway.detokenizer import TokenBytes
from loraplex_platform.gateway.job import Job
from loraplex_platform.gateway.openai_schemas import FinishReasonText
from loraplex_platform.gateway.text_stream import TextPiece, TextStream


@dataclass(slots=True)
class Choice:
    """See the module's header."""

    text: TextStream
    shows_stop: bool  # the text includes a stop token
    num_observed: int = 0  # tokens that have reached us
    last_token_s: float | None = None
    reason: FinishReasonText | None = None  # it has ended
    has_aborted: bool = False

    @classmethod
    def of(cls, job: Job, token_bytes: TokenBytes) -> Choice:
        """A fresh one."""
        tools = job.tools
        text = TextStream(
            token_bytes,
            job.stops,
            min_tokens=job.sampling.min_tokens,
            shows_stop=job.shows_stop,
            shown_ids=tools.format.shown_ids if tools else (),
            one_call=tools.parser() if tools and tools.ends_after_call else None,
        )
        return cls(text, job.shows_stop)

    @property
    def num_kept(self) -> int:
        """Tokens that count: none past a stop string."""
        return self.text.num_tokens if self.text.is_stopped else self.num_observed

    def take(self, event: TokenEvent) -> TextPiece:
        """Count the event's tokens; return the text that they release."""
        self.num_observed += len(event.token_ids)
        if event.logprobs is None and self.text.is_plain:
            return self._take_plain(event)
        piece = TextPiece()
        for position, token_id in enumerate(event.token_ids):
            if self.text.is_stopped:
                break
            is_last = position == len(event.token_ids) - 1
            is_stop = is_last and event.finish_reason == "stop" and event.stop_token_id == token_id
            if is_stop and not self.shows_stop:
                self.text.count()
            else:
                logprobs = None if event.logprobs is None else event.logprobs[position]
                piece.extend(self.text.push(token_id, logprobs))
        return piece

    def _take_plain(self, event: TokenEvent) -> TextPiece:
        """Nothing can end the text but the event itself: all its tokens in one go."""
        ids = event.token_ids
        is_stop = bool(ids) and event.finish_reason == "stop" and event.stop_token_id == ids[-1]
        if not is_stop or self.shows_stop:
            return TextPiece(self.text.push_plain(ids))
        piece = TextPiece(self.text.push_plain(ids[:-1]))
        self.text.count()
        return piece
