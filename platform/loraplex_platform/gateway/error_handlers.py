"""Every error of the app, the framework's own included, in OpenAI's envelope."""

from __future__ import annotations

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException

from loraplex_platform.errors import InvalidRequestError, NotFoundError, PlatformError
from loraplex_platform.gateway.errors import MethodNotAllowedError, envelope
from loraplex_platform.gateway.middleware import request_id_of

log = structlog.get_logger(__name__)


def error_response(error: PlatformError, request: Request) -> Response:
    """The HTTP answer of an error."""
    return Response(
        envelope(error, request_id_of(request.scope)),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


def install(app: FastAPI) -> None:
    """Replace the framework's own bodies."""

    @app.exception_handler(PlatformError)
    async def on_platform_error(request: Request, error: PlatformError) -> Response:
        if error.status >= 500:
            log.warning("request_failed", code=error.error_code, reason=error.message)
        return error_response(error, request)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        answer: PlatformError
        if error.status_code == 404:
            answer = NotFoundError("There is nothing at this URL.")
        elif error.status_code == 405:
            answer = MethodNotAllowedError("This URL does not take this method.")
        else:
            answer = InvalidRequestError("The request could not be read.")
        response = error_response(answer, request)
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        where = [str(part) for part in error.errors()[0].get("loc", ())][1:]
        param = ".".join(where) or None
        return error_response(InvalidRequestError("Invalid request.", param=param), request)

    @app.exception_handler(DBAPIError)
    async def on_database_error(request: Request, error: DBAPIError) -> Response:
        # An outage has become a 503 in db/session.py: this is a fault of ours. Its text may quote
        # values, so only its type is logged.
        log.error("database_error", error=type(error.orig).__name__)
        return error_response(PlatformError("Something went wrong on our side."), request)
