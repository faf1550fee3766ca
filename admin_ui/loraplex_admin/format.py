"""How the console writes times, sizes and money."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024


def time(unix_s: int | None) -> str:
    """`2026-11-29 18:30 UTC`; a dash for none."""
    if unix_s is None:
        return "–"
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def size(size_bytes: int) -> str:
    """`2.4 MiB`."""
    value = float(size_bytes)
    for unit in _UNITS:
        if value < _STEP or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= _STEP
    raise AssertionError("unreachable")


def count(value: int) -> str:
    """`12,345`."""
    return f"{value:,}"


def usd(amount: str) -> str:
    """Dollars with as many digits as say something: `$1.25`, `$0.000012345`."""
    value = Decimal(amount)
    if value == 0:
        return "$0.00"
    if abs(value) >= Decimal("0.01"):
        return f"${value:,.2f}"
    return f"${value.normalize():f}"


def digest(value: str | None) -> str:
    """The first 12 hex digits of a digest; `base` for none."""
    return "base" if value is None else value.removeprefix("sha256:")[:12]
