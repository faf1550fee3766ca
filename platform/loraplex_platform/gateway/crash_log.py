"""Unexpected exceptions in the log: where they came from, without what they say or hold.

The text of an exception and the values of local variables may quote a prompt or a key, and neither
is ever logged.
"""

from __future__ import annotations

import traceback

import structlog

log = structlog.get_logger(__name__)


def log_crash(event: str, error: BaseException, **fields: object) -> None:
    """Log an exception's type and its frames, innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    trace = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    log.error(event, error=type(error).__name__, trace=trace, **fields)
