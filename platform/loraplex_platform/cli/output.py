"""What commands print: lines of columns for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print the API's JSON, for programs.")]


def print_json(value: Any) -> None:  # noqa: ANN401 (any JSON)
    """One JSON document on standard output."""
    import json

    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_rows(rows: Iterable[Sequence[object]]) -> None:
    """Rows in aligned columns; None is a dash."""
    texts = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(padded).rstrip())


def day_of(unix_s: int | None) -> str | None:
    """The day (UTC) of a Unix time."""
    from datetime import UTC, datetime

    return None if unix_s is None else datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d")


def moment_of(unix_s: int | None) -> str | None:
    """A Unix time to the second, in UTC."""
    from datetime import UTC, datetime

    return None if unix_s is None else datetime.fromtimestamp(unix_s, UTC).strftime("%F %TZ")


def printable(text: str) -> str:
    """The text; what a terminal would act on as Python writes it, for names may hold anything."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
