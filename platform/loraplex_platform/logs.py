"""Logging of every platform process: structlog events on stderr, JSON lines or for people."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor


def configure_logging(level: str, log_format: str) -> None:
    """Once, at the start of a process.

    Args:
        level: debug, info, warning or error; anything else is taken as info.
        log_format: "console" for people, else JSON lines.
    """
    threshold = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    is_console = log_format == "console"
    steps: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if is_console:
        steps.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()))
    else:
        steps += [
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    structlog.configure(
        processors=steps,
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    # Libraries: only what an operator must know. At debug level they may print statements' values.
    logging.basicConfig(level=max(threshold, logging.WARNING), stream=sys.stderr)
