"""What can be wrong with an adapter, told so that its owner can mend it."""

from __future__ import annotations

from loraplex_engine.errors import EngineError


class ArtifactError(EngineError):
    """An adapter was refused.

    Attributes:
        field: where the fault lies: "adapter_config.r", "adapter_model.<tensor name>", a file name.
        message: what is wrong, with the values seen and allowed.
        remedy: what the owner can do about it.

    What an adapter calls its parts is quoted in all three; what is not printable there is escaped, so
    that an answer, a log line or a database can hold it: a lone surrogate has no UTF-8 at all.
    """

    def __init__(self, field: str, message: str, remedy: str) -> None:
        field, message, remedy = map(_printable, (field, message, remedy))
        super().__init__(f"{field}: {message} {remedy}")
        self.field = field
        self.message = message
        self.remedy = remedy


class AdapterNotStoredError(EngineError):
    """The store holds no adapter of this digest."""


class StoreUnavailableError(OSError):
    """The store cannot be reached, or does not let us in; the message says what its client said."""


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
