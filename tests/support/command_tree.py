"""The commands of `loraplex` by their words, and a quick way to run them in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import typer.main
from loraplex_platform.cli import app
from typer.testing import CliRunner, Result


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with its words."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name, child in inner.items():
        yield from walk(child, (*path, name))


def groups(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every group of commands."""
    inner = getattr(command, "commands", None)
    if inner is not None:
        yield path, command
        for name, child in inner.items():
            yield from groups(child, (*path, name))


TREE = typer.main.get_command(app)
COMMANDS = dict(walk(TREE))


def options_of(command: Any) -> set[str]:
    """Flags of a command."""
    return {flag for parameter in command.params for flag in getattr(parameter, "opts", ())}


def invoke(
    words: Sequence[str], env: Mapping[str, str | None], *, text: str | None = None
) -> Result:
    """As typer's own runner, which builds the tree of commands anew each time: a third of a second."""
    with mock.patch("typer.testing._get_command", return_value=TREE):
        return CliRunner(env=env).invoke(app, list(words), input=text)
