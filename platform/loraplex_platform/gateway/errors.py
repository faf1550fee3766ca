"""What the data plane refuses or fails with, and OpenAI's envelope around it."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from loraplex_platform.errors import (
    ConflictError,
    EngineUnavailableError,
    InvalidRequestError,
    PlatformError,
    UnavailableError,
)
from loraplex_platform.gateway.openai_schemas import UsageReport


class MalformedJsonError(InvalidRequestError):
    """The body is not JSON, or not a JSON object."""

    code = "invalid_json"


class UnsupportedParameterError(InvalidRequestError):
    """A field of OpenAI's API that we do not serve (yet), set to something that matters."""

    code = "unsupported_parameter"


class UnknownParameterError(InvalidRequestError):
    """A field that OpenAI's API does not have."""

    code = "unknown_parameter"


class InvalidValueError(InvalidRequestError):
    """A field has the wrong type or is out of range."""

    code = "invalid_value"


class MissingParameterError(InvalidRequestError):
    """A required field is missing."""

    code = "missing_required_parameter"


class ContextLengthError(InvalidRequestError):
    """Prompt and completion do not fit the context; the message has both numbers."""

    code = "context_length_exceeded"


class ChatTemplateError(InvalidRequestError):
    """The base model's chat template refuses these messages."""

    code = "invalid_messages"

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The model's chat template refused the messages: {reason}", param="messages"
        )


class MethodNotAllowedError(InvalidRequestError):
    """The path exists, the method does not."""

    status, code = 405, "method_not_allowed"


class RequestTimeoutError(InvalidRequestError):
    """The client took too long to send its body."""

    status, code = 408, "request_timeout"


class AuthBackendUnavailableError(UnavailableError):
    """Keys cannot be checked right now; never a 401."""

    code = "auth_backend_unavailable"


class DatabaseUnavailableError(UnavailableError):
    """The request could not be put on the books, so it is not run."""

    code = "database_unavailable"


class GatewayDrainingError(UnavailableError):
    """This gateway is shutting down."""

    code = "draining"


class EngineLostMidwayError(EngineUnavailableError):
    """The replica that ran the request died; nothing is billed."""

    code = "engine_lost"


class EngineFailedError(PlatformError):
    """The engine ended this request with an error; nothing is billed."""

    code = "engine_error"

    @property
    def headers(self) -> dict[str, str]:
        """The same request would fail again, after as much work that nobody pays for."""
        return {"x-should-retry": "false"}


class GrammarRefusedError(InvalidRequestError):
    """The engine cannot follow the request's grammar to its end; nothing is billed."""

    code = "grammar_invalid"


class UncheckedGrammarError(InvalidRequestError):
    """Our check of a schema or grammar crashed on it, which is in the log; the engine was not asked."""

    code = "grammar_unchecked"

    def __init__(self, param: str) -> None:
        super().__init__(
            f"'{param}' could not be checked, so the request was not run. The fault is ours and has been"
            " recorded; a simpler schema may be followed.",
            param=param,
        )


class NoTokenAllowedError(InvalidRequestError):
    """The request's own bans, filters and grammar left no token to choose; nothing is billed."""

    code = "no_token_allowed"


class DeadlineExceededError(UnavailableError):
    """The request took longer than a request may; nothing is billed."""

    status, code = 504, "deadline_exceeded"

    @property
    def headers(self) -> dict[str, str]:
        """The official client would do all of it twice more."""
        return {"x-should-retry": "false"}


class AbandonedError(PlatformError):
    """The client is gone; only the log and the books see this."""

    status: ClassVar[int] = 499
    code = "client_disconnected"


class FirstRequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """The request that an Idempotency-Key stands for, ended and billed."""

    id: str  # `req_...`, as its own answer's x-request-id said and the request log says
    finish_reason: str | None
    usage: UsageReport


class IdempotencyCompletedError(ConflictError):
    """The first request with this Idempotency-Key has been answered and billed."""

    code = "idempotency_completed"

    def __init__(self, first: FirstRequestReport) -> None:
        super().__init__(
            f"The first request with this Idempotency-Key, {first.id}, has ended and was billed:"
            f" {first.usage.prompt_tokens} prompt and {first.usage.completion_tokens} completion"
            " tokens. It is not run again; use a new key to ask anew.",
            param="Idempotency-Key",
        )
        self.first_request = first

    @property
    def headers(self) -> dict[str, str]:
        """The same call can never succeed."""
        return {"x-should-retry": "false"}


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`error` of the envelope; OpenAI's keys are always present."""

    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str
    first_request: FirstRequestReport | UnsetType = UNSET  # with `idempotency_completed`


class ErrorEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """Every error of the data plane, in bodies and in streams."""

    error: ErrorBody


def envelope(error: PlatformError, request_id: str) -> bytes:
    """The JSON of an error. `request_id` in it equals the header `x-request-id`."""
    body = ErrorBody(
        message=error.message,
        type=error.type,
        param=error.param,
        code=error.error_code,
        request_id=request_id,
        first_request=error.first_request
        if isinstance(error, IdempotencyCompletedError)
        else UNSET,
    )
    return msgspec.json.encode(ErrorEnvelope(error=body))
