"""What a deployment's revision says for what a request leaves open: a system prompt and sampling defaults.

The control API refuses what does not fit in here, so a revision's row that does not is a fault of ours.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar
from uuid import UUID

import msgspec
from msgspec import Meta, Struct

from loraplex_platform.errors import PlatformError
from loraplex_platform.gateway import openai_schemas as shapes
from loraplex_platform.gateway.chat_message import ChatMessage
from loraplex_platform.gateway.openai_schemas import ChatRequest, CompletionRequest
from loraplex_platform.ids import format_id

MAX_SYSTEM_PROMPT_CHARS: Final = 32_768

_Body = TypeVar("_Body", ChatRequest, CompletionRequest)


class InvalidRevisionError(PlatformError):
    """What is stored of a revision cannot be used."""

    code = "revision_invalid"


class SamplingDefaults(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As the request's fields of the same names; None: the platform's own default.

    No seed: two requests must not answer alike by accident. `max_tokens` is a default and no limit: a
    prompt that leaves less gets what it leaves.
    """

    temperature: shapes.Temperature | None = None
    top_p: shapes.TopP | None = None
    top_k: shapes.TopK | None = None
    min_p: shapes.MinP | None = None
    presence_penalty: shapes.Penalty | None = None
    frequency_penalty: shapes.Penalty | None = None
    repetition_penalty: shapes.RepetitionPenalty | None = None
    max_tokens: shapes.MaxTokens | None = None
    stop: (
        Annotated[list[shapes.StopText], Meta(min_length=1, max_length=shapes.MAX_STOPS)] | None
    ) = None


class RevisionParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`system_prompt` is put before chats that have no system or developer message of their own."""

    system_prompt: Annotated[str, Meta(min_length=1, max_length=MAX_SYSTEM_PROMPT_CHARS)] | None = (
        None
    )
    sampling: SamplingDefaults = SamplingDefaults()

    def fill(self, body: _Body) -> _Body:
        """The body with the defaults in the fields that it leaves open; but for `max_tokens`, see there."""
        changes = {
            name: value
            for name in _FILLED
            if (value := getattr(self.sampling, name)) is not None and getattr(body, name) is None
        }
        return msgspec.structs.replace(body, **changes) if changes else body

    def begin(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """The conversation with the system prompt, if it has none."""
        if self.system_prompt is None or any(message.role == "system" for message in messages):
            return messages
        return [ChatMessage("system", self.system_prompt), *messages]


_FILLED: Final = tuple(name for name in SamplingDefaults.__struct_fields__ if name != "max_tokens")
NO_PARAMS: Final = RevisionParams()


def params_of(revision_id: UUID, stored: dict[str, Any] | None) -> RevisionParams:
    """Of a revision's row; None or empty: nothing.

    Raises:
        InvalidRevisionError: the row has what a revision cannot have.
    """
    if not stored:
        return NO_PARAMS
    try:
        return msgspec.convert(stored, RevisionParams)
    except msgspec.ValidationError as error:
        raise InvalidRevisionError(
            f"Revision {format_id('deployment_revision', revision_id)} cannot be used: its params are"
            f" not valid ({error}). Deploy another one."
        ) from None
