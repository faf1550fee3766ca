"""What commands print: lines of columns for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

SearchOption = Annotated[
    str | None, typer.Option(show_default="all", help="Only those with this in the name.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the API's JSON, for programs.")]
OneJsonOption = Annotated[bool, typer.Option("--json", help="One JSON object.")]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]


def searched(search: str | None) -> dict[str, str]:
    """As a list's filter; none where nothing is searched for."""
    return {} if search is None else {"search": search}


def print_json(value: Any) -> None:  # noqa: ANN401 (any JSON)
    """One JSON document on standard output."""
    import json

    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_rows(rows: Iterable[Sequence[object]]) -> None:
    """Rows in aligned columns; None is a dash. At a terminal as a table, and for a pipe as plain lines."""
    texts = [["-" if cell is None else _plain(str(cell)) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_table(texts)
        return
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(padded).rstrip())


def _print_table(texts: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A row of names in capitals is the header; what has none is names and values.
    has_header = bool(texts) and all(cell == cell.upper() and cell for cell in texts[0])
    table = Table(box=None, pad_edge=False, show_header=has_header, header_style="bold")
    for name in texts[0] if texts else ():
        table.add_column(Text(name) if has_header else "", overflow="fold")
    for row in texts[1:] if has_header else texts:
        table.add_row(*map(Text, row))  # a name may hold what rich takes for markup
    Console(highlight=False).print(table)


def _plain(text: str) -> str:
    # On one line, and with nothing in it that tells a terminal what to do or turns text around.
    text = " ".join(text.splitlines()) if "\n" in text else text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


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
