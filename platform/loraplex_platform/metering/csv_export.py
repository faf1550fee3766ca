"""Usage as CSV that a spreadsheet opens as data, never as formulas."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

# A cell that starts with one of these may be run as a formula; the last four are full-width forms.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def safe_cell(value: str | int | None) -> str | int:
    """Text that could start a formula gets a leading apostrophe; numbers stay numbers."""
    if value is None:
        return ""
    if isinstance(value, str) and value.startswith(_FORMULA_STARTS):
        return f"'{value}"
    return value


def to_csv(rows: Iterable[Sequence[str | int | None]]) -> str:
    """Lines as RFC 4180 has them."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerows([safe_cell(value) for value in row] for row in rows)
    return buffer.getvalue()
