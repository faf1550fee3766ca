"""What can be wrong with an adapter, told so that its owner can mend it."""

from __future__ import annotations

from loraplex_engine.errors import EngineError


class ArtifactError(EngineError):
    """An adapter was refused.

    Attributes:
        field: where the fault lies: "adapter_config.r", "adapter_model.<tensor name>", a file name.
        message: what is wrong, with the values seen and allowed.
        remedy: what the owner can do about it.
    """

    def __init__(self, field: str, message: str, remedy: str) -> None:
        super().__init__(f"{field}: {message} {remedy}")
        self.field = field
        self.message = message
        self.remedy = remedy


class AdapterNotStoredError(EngineError):
    """The store holds no adapter of this digest."""
