"""How the console writes times, sizes, money, and text that others have chosen.

Streamlit reads most of what it is given as Markdown. Whatever somebody typed (names, messages with
names in them, model output) goes through `literal` or `code`, or into an element that takes text as
it is: `st.text`, `st.code`, the cells of `st.dataframe`, the options of `st.selectbox`.
"""

from __future__ import annotations

import re
import string
from datetime import UTC, datetime
from decimal import Decimal

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_PUNCTUATION = frozenset(string.punctuation)
# Invisible, and no break: keeps Streamlit from finding what it replaces after Markdown is parsed
# (emoji and icon names, arrows and dashes, bare links).
_JOINER = "\u2060"
_REPLACED = re.compile(
    r"(?<=:)(?=\S)|(?<=@)|(?<=[-<>~])(?=[-=>])|(?<=[wW]{3})(?=\.)|(?<=\.)(?=[wW]{3})"
)


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
    sign, value = ("-" if value < 0 else ""), abs(value)
    if value == 0:
        return "$0.00"
    if value >= Decimal("0.01"):
        return f"{sign}${value:,.2f}"
    return f"{sign}${value.normalize():f}"


def digest(value: str | None) -> str:
    """The first 12 hex digits of a digest; `base` for none."""
    return "base" if value is None else value.removeprefix("sha256:")[:12]


def literal(text: str) -> str:
    """Markdown that shows `text` as it is, in the type of the sentence around it."""
    words = " ".join(text.split())
    return "".join(
        f"\\{char}" if char in _PUNCTUATION else char for char in _REPLACED.sub(_JOINER, words)
    )


def code(text: str) -> str:
    """Markdown that shows `text` as it is, in the type of code: names, ids, digests."""
    words = " ".join(text.split())
    if not words:
        return ""
    longest = max((len(run) for run in re.findall("`+", words)), default=0)
    fence = "`" * (longest + 1)
    # A code span that begins and ends with a space loses one of each.
    return f"{fence} {words} {fence}" if longest else f"{fence}{words}{fence}"
