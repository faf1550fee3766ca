"""Errors at the terminal: one sentence and an exit code, never a traceback, for what people can cause.

Exit codes: 0 done; 1 it did not work; 2 wrong usage or settings; 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class CommandError(Exception):
    """A command cannot do what it was asked; the message says why and what to do."""


class CommandGroup(TyperGroup):
    """Runs a command and turns the errors that we raise on purpose into messages."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer brings its own copy of click, or not
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except Exception as error:
            code = _explain(error)
            if code is None:
                raise
            raise typer.Exit(code) from None


def _explain(error: Exception) -> int | None:
    """Say what happened and return the exit code; None: not one to explain (a bug, or typer's own).

    Looks only at modules that are loaded: an error's class always is.
    """
    if _is_a(error, "pydantic", "ValidationError"):
        # Not what was given: it may be a secret.
        faults = error.errors(include_input=False, include_url=False)  # type: ignore[attr-defined] # pydantic's
        lines = [_fault(fault) for fault in faults]
        if len(lines) == 1:
            _say(lines[0])
        else:
            _say("\n  ".join(["the settings are not complete or not valid:", *lines]))
        return EXIT_USAGE
    expected = (
        ("loraplex_platform.local.errors", "LocalModeError"),
        ("loraplex_platform.local.embedded", "EmbeddedServerError"),
        ("loraplex_platform.admin_client", "AdminApiError"),
        ("loraplex_platform.control.main", "ControlStartError"),
        ("loraplex_platform.db.session", "DatabaseUnavailableError"),
        ("loraplex_platform.db.migrate", "SchemaMismatchError"),
        ("loraplex_platform.db.migrate", "ServingRoleError"),
        ("loraplex_platform.backup.errors", "BackupError"),
    )
    is_expected = isinstance(error, CommandError) or any(_is_a(error, *name) for name in expected)
    if not is_expected:
        return None
    _say(str(error))
    return EXIT_FAILED


def _fault(fault: dict[str, Any]) -> str:
    name = "_".join(str(part) for part in fault["loc"]).upper()
    text = str(fault["msg"]).removeprefix("Value error, ")
    return f"LORAPLEX_{name}: {text}" if name else text


def _is_a(error: Exception, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(error, kind)


def _say(message: str) -> None:
    typer.echo(f"{typer.style('Error', fg='red')}: {message}", err=True)
