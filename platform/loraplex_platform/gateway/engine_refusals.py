"""What a client hears of a request that the engine refused, or ended by itself."""

from __future__ import annotations

from typing import Final

from loraplex_engine.client import EngineRejectedError
from loraplex_engine.protocol import TokenEvent

from loraplex_platform.errors import (
    InvalidRequestError,
    OverloadedError,
    PlatformError,
    UnavailableError,
)
from loraplex_platform.gateway.errors import (
    ContextLengthError,
    DeadlineExceededError,
    EngineFailedError,
    GrammarRefusedError,
    NoTokenAllowedError,
)
from loraplex_platform.gateway.job import FieldNames
from loraplex_platform.gateway.routing import RETRY_AFTER_S

_MAX_REASON_CHARS: Final = 500  # of the engine's own words


def refusal(error: EngineRejectedError, params: FieldNames) -> PlatformError:
    """What the client hears of a refusal at the engine's door."""
    retry_after_s = error.retry_after_s or 1.0
    match error.code:
        case "queue_full":
            state = f" ({error.num_waiting} requests are waiting)" if error.num_waiting else ""
            return OverloadedError(
                f"The engines are full{state}; try again.", retry_after_s=retry_after_s
            )
        case "draining":
            return OverloadedError(
                "The engine is restarting; try again.", code="draining", retry_after_s=retry_after_s
            )
        case "never_fits":
            return ContextLengthError(
                f"Prompt and {params.max_tokens} together can never fit the engine:"
                f" {error.message[:_MAX_REASON_CHARS]}",
                param=params.max_tokens,
            )
        case "invalid_request":
            return InvalidRequestError(
                f"The engine refused the request: {error.message[:_MAX_REASON_CHARS]}"
            )
        case "adapter_unavailable":
            return UnavailableError(
                "The model's adapter cannot be loaded right now; try again.",
                code="adapter_unavailable",
                retry_after_s=retry_after_s,
            )
        case "adapter_invalid":
            return EngineFailedError("The model's adapter is damaged.", code="adapter_invalid")


def engine_error(event: TokenEvent, params: FieldNames) -> PlatformError:
    """What the client hears of a request that the engine ended by itself."""
    if event.error_code == "deadline_exceeded":
        return DeadlineExceededError("The request waited too long for its turn; nothing is billed.")
    if event.error_code in ("adapter_unavailable", "draining"):
        return UnavailableError(
            "The engine gave the request up; nothing is billed. Try again.",
            code=event.error_code,
            retry_after_s=RETRY_AFTER_S,
        )
    if event.error_code == "grammar_unavailable":
        return UnavailableError(
            "The engine cannot follow grammars right now; nothing is billed. Try again.",
            code=event.error_code,
            retry_after_s=RETRY_AFTER_S,
        )
    if event.error_code is not None and event.error_code.startswith("grammar_"):
        return GrammarRefusedError(
            f"The grammar of the answer ('{params.grammar}') cannot be followed:"
            f" {(event.error_message or '')[:_MAX_REASON_CHARS]}. Nothing is billed.",
            code=event.error_code,
            param=params.grammar,
        )
    if event.error_code == "no_token_allowed":
        return NoTokenAllowedError(
            f"No token is left to choose: '{params.bans}', or it together with other fields, rules"
            " all of them out; nothing is billed.",
            param=params.bans,
        )
    code = f" ({event.error_code})" if event.error_code else ""
    return EngineFailedError(f"The engine could not complete the request{code}; nothing is billed.")
