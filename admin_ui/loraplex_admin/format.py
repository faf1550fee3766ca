"""How the console writes times, sizes, money, and text that others have chosen.

Streamlit reads most of what it is given as Markdown. Whatever somebody typed (names, messages with
names in them, model output) goes through `literal` or `code`, or into an element that takes text as
it is: `st.text`, `st.code`, the cells of `st.dataframe`, the options of `st.selectbox`.
"""

from __future__ import annotations

import re
import string
import unicodedata
from datetime import UTC, datetime, tzinfo
from decimal import Decimal
from functools import cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_PUNCTUATION = frozenset(string.punctuation)
# Invisible, and no break: keeps Streamlit from finding what it replaces after Markdown is parsed
# (emoji and icon names, arrows and dashes, bare links).
_JOINER = "\u2060"
_REPLACED = re.compile(
    r"(?<=:)(?=\S)|(?<=@)|(?<=[-<>~])(?=[-=>])|(?<=[wW]{3})(?=\.)|(?<=\.)(?=[wW]{3})"
)
# Emoji and icon names are replaced in code too; ids and digests, which people copy, have no second colon.
_SHORTCODE = re.compile(r":(?=[^\s:]+:)")

# Letters that are written from right to left, and what turns the direction without being seen.
_RIGHT_TO_LEFT = frozenset({"R", "AL", "AN", "RLE", "RLO", "LRE", "LRO", "PDF"})
_DIRECTION_SIGNS = {
    **dict.fromkeys(range(0x202A, 0x202F), "\ufffd"),
    **dict.fromkeys(range(0x2066, 0x206A), "\ufffd"),
}
_FIRST_STRONG, _POP = "\u2068", "\u2069"
# More of one name than this says nothing more, and pushes the page apart.
_MOST_CHARS = 300
_REST_CHARS = 40
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400


def time(unix_s: int | None, zone_name: str = "UTC") -> str:
    """`2026-11-29 18:30 UTC`, `2026-11-29 19:30 Europe/Berlin`; a dash for none."""
    if unix_s is None:
        return "–"
    known, name = _zone(zone_name)
    return f"{datetime.fromtimestamp(unix_s, known):%Y-%m-%d %H:%M} {name}"


def moment(unix_s: int | None, zone_name: str = "UTC") -> str:
    """Shorter by the zone's name, for a table's cell: `2026-11-29 18:30 UTC`, `2026-11-29 19:30 +01:00`."""
    if unix_s is None:
        return "–"
    known, name = _zone(zone_name)
    at = datetime.fromtimestamp(unix_s, known)
    return f"{at:%Y-%m-%d %H:%M} {name if name == 'UTC' else at.isoformat()[-6:]}"


def zone(name: str) -> tzinfo:
    """A time zone by its name; UTC where this machine does not know it."""
    return _zone(name)[0]


@cache
def _zone(name: str) -> tuple[tzinfo, str]:
    """The zone; UTC, and named so, where this machine does not know it."""
    if name == "UTC":
        return UTC, name
    try:
        return ZoneInfo(name), name
    except (ZoneInfoNotFoundError, ValueError, OSError):  # the last one: a name too long for a file
        return UTC, "UTC"


def span(seconds: float) -> str:
    """`3 d 4 h`, `4 h 12 min`, `12 min`, `40 s`: two units at most, never rounded up."""
    left = max(0, int(seconds))
    if left < _MINUTE_S:
        return f"{left} s"
    if left < _HOUR_S:
        return f"{left // _MINUTE_S} min"
    if left < _DAY_S:
        return f"{left // _HOUR_S} h {left % _HOUR_S // _MINUTE_S} min"
    return f"{left // _DAY_S} d {left % _DAY_S // _HOUR_S} h"


def reset(unix_s: int | None, zone_name: str, now_s: float) -> str:
    """When a limit begins anew, exactly: `2026-12-01 00:00 +01:00, in 4 h 12 min`."""
    if unix_s is None:
        return "never"
    if unix_s <= now_s:
        return f"{moment(unix_s, zone_name)}, now"
    return f"{moment(unix_s, zone_name)}, in {span(unix_s - now_s)}"


def amount(value: str | None, unit: str) -> str:
    """A limit's amount with its unit: `$25.00`, `1,000,000 tokens`, `60 requests`; a dash for none."""
    if value is None:
        return "–"
    return usd(value) if unit == "USD" else f"{count(int(Decimal(value)))} {unit}"


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


def cell(text: str | None) -> str:
    """For a table's cell, which takes text as it is: direction signs made visible, and not endless; again: the same."""
    return _shorten((text or "").translate(_DIRECTION_SIGNS))


def literal(text: str) -> str:
    """Markdown that shows `text` as it is, in the type of the sentence around it."""
    words = _shorten(" ".join(text.split()))
    shown = "".join(
        f"\\{char}" if char in _PUNCTUATION else char for char in _REPLACED.sub(_JOINER, words)
    )
    return _isolated(shown)


def code(text: str) -> str:
    """Markdown that shows `text` as it is, in the type of code: names, ids, digests."""
    words = _isolated(_SHORTCODE.sub(f":{_JOINER}", _shorten(" ".join(text.split()))))
    if not words:
        return ""
    longest = max((len(run) for run in re.findall("`+", words)), default=0)
    fence = "`" * (longest + 1)
    # A code span that begins and ends with a space loses one of each.
    return f"{fence} {words} {fence}" if longest else f"{fence}{words}{fence}"


def _isolated(text: str) -> str:
    """Kept from turning the sentence around it, where it is written from right to left."""
    if not any(unicodedata.bidirectional(char) in _RIGHT_TO_LEFT for char in text):
        return text
    return f"{_FIRST_STRONG}{text.translate(_DIRECTION_SIGNS)}{_POP}"


def _shorten(text: str) -> str:
    # With room for what is said of the rest: what has been cut stays as it is when it is given again.
    if len(text) <= _MOST_CHARS + _REST_CHARS:
        return text
    return f"{text[:_MOST_CHARS]}… ({len(text) - _MOST_CHARS:,} more characters)"
