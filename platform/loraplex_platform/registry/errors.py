"""How the registry refuses an adapter."""

from __future__ import annotations

from loraplex_platform.errors import ConflictError, InvalidRequestError, PlatformError


class AdapterRejectedError(InvalidRequestError):
    """The uploaded adapter cannot be served; `param` is the faulty field, the message the remedy."""

    code = "adapter_rejected"

    def __init__(self, field: str, message: str, remedy: str) -> None:
        super().__init__(f"{field}: {message} {remedy}", param=field)


class WrongOffsetError(ConflictError):
    """Bytes for another place than the next one; the header says where to go on."""

    code = "wrong_offset"

    def __init__(self, offset: int) -> None:
        super().__init__(
            f"Upload-Offset: {offset} bytes of this file are here; go on from there.",
            param="Upload-Offset",
        )
        self.offset = offset

    @property
    def headers(self) -> dict[str, str]:
        """Where to go on."""
        return {"Upload-Offset": str(self.offset)}


class UploadBusyError(ConflictError):
    """Another request works on the same upload: one that was cut may not have noticed yet."""

    code = "upload_busy"

    def __init__(self) -> None:
        super().__init__("Another request is working on this upload; try again.", retry_after_s=1)


class RolloutActiveError(ConflictError):
    """A rollout of the deployment is on its way: what it compares stays as it is."""

    code = "rollout_active"

    def __init__(self, deployment: str, rollout_id: str, state: str) -> None:
        super().__init__(
            f"A rollout of {deployment} is on its way: {rollout_id} ({state}). Promote it, abort it, or wait for "
            "its end; then change the deployment."
        )


class InUseError(ConflictError):
    """Something names it; the message lists what."""

    code = "in_use"


class UploadGoneError(PlatformError):
    """It has expired; its bytes are deleted."""

    status, type, code = 410, "invalid_request_error", "upload_expired"


class TooManyUploadsError(PlatformError):
    """The tenant has as many unfinished uploads as it may."""

    status, type, code = 429, "rate_limit_error", "too_many_uploads"
