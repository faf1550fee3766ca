"""What the schemas of all domains share: strict bodies, clean text, times, lists and errors."""

from __future__ import annotations

import unicodedata
from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, StrictInt

T = TypeVar("T")


class Body(BaseModel):
    """A request body. Unknown fields are refused: nothing can be set that is not listed."""

    model_config = ConfigDict(extra="forbid")


class Resource(BaseModel):
    """A response: an allow-list of fields, never a whole database row."""

    model_config = ConfigDict(from_attributes=True)


def _clean(text: str) -> str:
    # Control characters break logs and CSV, NUL breaks Postgres, and none belongs in a name.
    if any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in text):
        raise ValueError("it must not hold control characters or line breaks.")
    return text


CleanText = Annotated[str, AfterValidator(_clean)]

_MAX_UNIX_S = 253_402_300_799  # the end of the year 9999, as far as Postgres and datetime agree
# Unix seconds as somebody sends them.
UnixTime = Annotated[StrictInt, Field(ge=0, le=_MAX_UNIX_S)]

# Unix seconds on the wire.
UnixSeconds = Annotated[
    datetime, PlainSerializer(lambda at: int(at.timestamp()), return_type=int, when_used="json")
]


class ListPage(BaseModel, Generic[T]):
    """One page, newest first. Pass `last_id` as `after` to get the next one."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class ErrorDetail(BaseModel):
    """What went wrong, and in which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    """The shape of every error."""

    error: ErrorDetail


def _example(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return {"model": ErrorEnvelope, "content": {"application/json": {"example": body}}}


_INVALID = "invalid_request_error"

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: _example("slug: it is required: add it.", _INVALID, "slug", "invalid_request")
    | {"description": "The input is wrong; `param` names the field, `message` the remedy."},
    401: _example("The session is over; log in again.", _INVALID, None, "not_authenticated")
    | {"description": "No credentials, or unknown ones."},
    403: _example("Viewers may only read.", "permission_error", None, "permission_denied")
    | {"description": "A viewer may only read."},
    404: _example("No such tenant.", _INVALID, None, "not_found")
    | {"description": "Unknown, or another tenant's: the same answer for both."},
    409: _example("The slug 'acme' is taken.", _INVALID, "slug", "conflict")
    | {"description": "The name is taken, or the same Idempotency-Key is still running."},
    413: _example("The body is larger than allowed.", _INVALID, None, "request_too_large")
    | {"description": "The body is over the cap."},
    422: _example(
        "This Idempotency-Key was used with another body.", _INVALID, None, "idempotency_key_reuse"
    )
    | {"description": "The Idempotency-Key was used with another body."},
    503: _example("The database cannot be reached.", "server_error", None, "database_unavailable")
    | {"description": "Something this needs is down; `Retry-After` says when to try again."},
}
