"""How a grammar can fail. Each ends the request that brought it, alone, with `code` as its error code."""

from __future__ import annotations

from typing import ClassVar

from loraplex_engine.errors import EngineError

_MAX_MESSAGE_CHARS = 500


class GrammarError(EngineError):
    """Base of them; the message is for the request's sender and holds parts of its grammar."""

    code: ClassVar[str] = "grammar_failed"

    def __init__(self, message: str) -> None:
        super().__init__(message[:_MAX_MESSAGE_CHARS])


class GrammarInvalidError(GrammarError):
    """It does not compile; the message says why."""

    code = "grammar_invalid"


class GrammarTooComplexError(GrammarError):
    """Compiling it, or a step of it, takes more time or memory than a request may have."""

    code = "grammar_too_complex"


class GrammarDeadEndError(GrammarError):
    """No token continues it, and it is not complete."""

    code = "grammar_no_token"


class GrammarFailedError(GrammarError):
    """It refused a token that it had allowed, or broke."""

    code = "grammar_failed"


class GrammarUnavailableError(GrammarError):
    """It could not be tried: the worker does not start. Not the sender's fault."""

    code = "grammar_unavailable"


GRAMMAR_ERRORS: dict[str, type[GrammarError]] = {
    error.code: error
    for error in (
        GrammarDeadEndError,
        GrammarFailedError,
        GrammarInvalidError,
        GrammarTooComplexError,
        GrammarUnavailableError,
    )
}
