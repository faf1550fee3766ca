"""What Postgres says when it is down, or when a transaction has lost a race."""

from __future__ import annotations

import psycopg

from loraplex_platform.errors import UnavailableError

RETRY_AFTER_S = 2.0

LOST_RACES = ("40001", "40P01")  # serialization failure, deadlock: nothing was done
# https://www.postgresql.org/docs/current/errcodes-appendix.html: connection exceptions (08),
# too many connections, a server that starts or stops, and our own statement timeout.
_UNAVAILABLE_CLASSES = ("08", "57P")
_UNAVAILABLE_STATES = ("53300", "57014")


class DatabaseUnavailableError(UnavailableError):
    """Postgres cannot be reached or has no time for us. Never mistaken for a refusal."""

    code = "database_unavailable"

    def __init__(self, message: str = "The database is not available.") -> None:
        super().__init__(message, retry_after_s=RETRY_AFTER_S)


class StatementTimeoutError(DatabaseUnavailableError):
    """It is there, and did not finish in the time that a statement has."""

    def __init__(
        self,
        message: str = "The database did not finish in the time it has for this. Try again, or ask for less.",
    ) -> None:
        super().__init__(message)


class NoAnswerError(psycopg.OperationalError):
    """The server has left a statement without an answer for as long as we wait. It may be done or not."""


def unavailable_error(error: BaseException) -> DatabaseUnavailableError:
    """What callers hear of an error that `means_unavailable`."""
    if isinstance(error, psycopg.errors.QueryCanceled):
        return StatementTimeoutError()
    return DatabaseUnavailableError()


def means_unavailable(error: BaseException) -> bool:
    """Whether this error of the driver is about the server, not about the statement."""
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:  # no server answered: psycopg itself gave up
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate in _UNAVAILABLE_STATES or error.sqlstate.startswith(_UNAVAILABLE_CLASSES)
