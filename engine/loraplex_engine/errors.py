"""The engine's errors: a small tree that knows nothing of HTTP."""

from __future__ import annotations

from typing import ClassVar

from loraplex_engine.protocol import PinRefusal, RejectCode


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class ConfigError(EngineError):
    """The engine cannot start as configured; the message names the setting and the remedy."""


class ModelError(EngineError):
    """The model folder is missing, unsupported or inconsistent; the message names the file."""


class RequestRejectedError(EngineError):
    """A request was refused at admission; no work was done for it."""

    code: ClassVar[RejectCode] = "invalid_request"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class InvalidRequestError(RequestRejectedError):
    """Ids outside the vocabulary, an empty prompt, sampling values out of range."""

    code = "invalid_request"


class NeverFitsError(RequestRejectedError):
    """Prompt plus max_tokens is more than this replica can ever hold."""

    code = "never_fits"


class QueueFullError(RequestRejectedError):
    """The waiting queue is at its bound; says how long it is and when to come again."""

    code = "queue_full"

    def __init__(
        self, message: str, *, num_waiting: int = 0, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.num_waiting = num_waiting


class DrainingError(RequestRejectedError):
    """The replica is shutting down and takes nothing new."""

    code = "draining"


class AdapterUnavailableError(RequestRejectedError):
    """The adapter could not be read from the store."""

    code = "adapter_unavailable"


class AdapterInvalidError(RequestRejectedError):
    """The stored adapter does not match its digest, or does not fit this base model or its caps."""

    code = "adapter_invalid"


class PinRefusedError(EngineError):
    """An adapter cannot be pinned; nothing was pinned or let go for it."""

    def __init__(self, code: PinRefusal, message: str) -> None:
        super().__init__(message)
        self.code = code
