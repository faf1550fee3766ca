"""How the registry refuses an adapter."""

from __future__ import annotations

from loraplex_platform.errors import InvalidRequestError


class AdapterRejectedError(InvalidRequestError):
    """The uploaded adapter cannot be served; `param` is the faulty field, the message the remedy."""

    code = "adapter_rejected"

    def __init__(self, field: str, message: str, remedy: str) -> None:
        super().__init__(f"{field}: {message} {remedy}", param=field)
