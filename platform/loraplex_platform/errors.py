"""The platform's errors. One handler per app turns them into OpenAI's error envelope.

Status, type and code follow research on OpenAI-compatible APIs: a backend that is down is 503, never
401; what is unknown and what belongs to someone else get the same 404.
"""

from __future__ import annotations

from typing import ClassVar


class PlatformError(Exception):
    """Base: carries what the HTTP answer needs. `message` is shown to the caller; no secrets in it."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.error_code = code if code is not None else type(self).code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Extra response headers; `Retry-After` in whole seconds, at least 1."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, round(self.retry_after_s)))}


class InvalidRequestError(PlatformError):
    """The caller's input is wrong; `param` names the field and the message the remedy."""

    status, type, code = 400, "invalid_request_error", "invalid_request"


class InvalidApiKeyError(PlatformError):
    """No key, a malformed one, or one we do not know."""

    status, type, code = 401, "invalid_request_error", "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        """Retrying cannot help, so the official client is told not to."""
        return {"WWW-Authenticate": "Bearer", "x-should-retry": "false"}


class RevokedKeyError(InvalidApiKeyError):
    """The secret matched, but the key has been revoked."""

    code = "revoked_api_key"


class DisabledKeyError(InvalidApiKeyError):
    """The secret matched, but the key is switched off for now."""

    code = "disabled_api_key"


class ExpiredKeyError(InvalidApiKeyError):
    """The secret matched, but the key has expired."""

    code = "expired_api_key"


class TenantSuspendedError(PlatformError):
    """The key is good, but its tenant is suspended or closed."""

    status, type, code = 403, "permission_error", "tenant_suspended"


class PermissionDeniedError(PlatformError):
    """The caller is known but may not do this."""

    status, type, code = 403, "permission_error", "permission_denied"


class InsufficientScopeError(PermissionDeniedError):
    """The key is good, but not for this."""

    code = "insufficient_scope"


class IpNotAllowedError(PermissionDeniedError):
    """The key is good, but not from there."""

    code = "ip_not_allowed"


class NotFoundError(PlatformError):
    """Unknown, or not visible to the caller: the same answer for both."""

    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFoundError(NotFoundError):
    """No such model for this key."""

    code = "model_not_found"


class ConflictError(PlatformError):
    """The name is taken, or the state does not allow it."""

    status, type, code = 409, "invalid_request_error", "conflict"


class IdempotencyInProgressError(ConflictError):
    """The first request with this Idempotency-Key is still running: a client may ask again."""

    code = "idempotency_in_progress"


class BodyTooLargeError(PlatformError):
    """The request body is over the limit."""

    status, type, code = 413, "invalid_request_error", "request_too_large"


class IdempotencyReuseError(PlatformError):
    """An Idempotency-Key was used again with another body."""

    status, type, code = 422, "invalid_request_error", "idempotency_key_reuse"

    @property
    def headers(self) -> dict[str, str]:
        """The same call can never succeed."""
        return {"x-should-retry": "false"}


class TooManyAttemptsError(PlatformError):
    """Too many failed logins."""

    status, type, code = 429, "rate_limit_error", "too_many_attempts"


class UnavailableError(PlatformError):
    """Something we depend on is down or full; `Retry-After` says when to try again."""

    status, type, code = 503, "server_error", "unavailable"


class EngineUnavailableError(UnavailableError):
    """No engine replica is ready to take the request."""

    code = "engine_unavailable"


class StorageFullError(PlatformError):
    """There is no room for it on the server's disk; `Retry-After` says when to try again."""

    status, type, code = 507, "server_error", "storage_full"


class OverloadedError(UnavailableError):
    """The engine's queue is full or it is draining."""

    code = "overloaded"
