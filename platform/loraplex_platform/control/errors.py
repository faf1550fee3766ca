"""Every error of the control API in one shape: {"error": {message, type, param, code}}.

Framework errors too (404 of an unknown path, 405, body validation): a client parses one shape only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from loraplex_platform.errors import InvalidRequestError, PlatformError

log = structlog.get_logger(__name__)

_CODES_OF_STATUS = {
    400: "invalid_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
}

# pydantic's error type -> what to do about it.
_REMEDIES = {
    "missing": "it is required: add it.",
    "extra_forbidden": "this field is not part of the request: remove it.",
    "string_type": "it must be a string.",
    "int_type": "it must be a whole number.",
    "int_parsing": "it must be a whole number.",
    "bool_type": "it must be true or false.",
    "json_invalid": "the body is not valid JSON: check quotes, commas and brackets.",
    "model_attributes_type": "the body must be a JSON object, sent with Content-Type: application/json.",
    "dict_type": "it must be a JSON object.",
    "list_type": "it must be a list.",
    "string_unicode": "it holds characters that are not valid Unicode.",
}
_LOCATIONS = frozenset({"body", "query", "path", "header", "cookie"})


def error_body(
    message: str, kind: str, param: str | None, code: str | None
) -> dict[str, dict[str, str | None]]:
    """OpenAI's error envelope; all four keys are always there."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: PlatformError) -> JSONResponse:
    """The HTTP answer of a platform error."""
    body = error_body(error.message, error.type, error.param, error.error_code)
    return JSONResponse(body, status_code=error.status, headers=error.headers)


def describe_validation(errors: Sequence[Mapping[str, Any]]) -> InvalidRequestError:
    """The first complaint of pydantic, naming the field and the remedy; the value is not repeated."""
    first = errors[0]
    path = [str(part) for part in first.get("loc", ()) if part not in _LOCATIONS]
    kind = str(first.get("type", ""))
    if kind == "json_invalid":
        path = []
    param = ".".join(path) or None
    remedy = _REMEDIES.get(kind)
    if remedy is None:
        text = str(first.get("msg", "it is not valid")).removeprefix("Value error, ").rstrip(".")
        remedy = text[0].lower() + text[1:] + "."
    if param is None and kind == "missing":
        remedy = _REMEDIES["model_attributes_type"]
    return InvalidRequestError(f"{param or 'body'}: {remedy}", param=param)


def install_error_handlers(app: FastAPI) -> None:
    """Replace the framework's own bodies."""

    @app.exception_handler(PlatformError)
    async def on_platform_error(_: Request, error: PlatformError) -> JSONResponse:
        if error.status >= 500:
            log.warning("request_failed", code=error.error_code, reason=error.message)
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(describe_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = _CODES_OF_STATUS.get(error.status_code, "invalid_request")
        message = {
            404: f"There is no {request.method} {request.url.path[:200]}; see /docs.",
            405: f"{request.method} is not allowed here; see /docs.",
        }.get(error.status_code, str(error.detail))
        body = error_body(message, "invalid_request_error", None, code)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)
