"""Money is integers: pico-USD, 10^-12 USD, until an invoice line is rounded to cents.

Prices are pico-USD per unit: per token (the same number as micro-USD per 1M tokens) or per request. So
a cost is units times price, exactly, and nothing is rounded before an invoice line.
"""

from __future__ import annotations

from typing import Final

PICO_PER_USD = 10**12
PICO_PER_CENT = 10**10
CURRENCY: Final = "USD"


def format_usd(pico: int) -> str:
    """Exact decimal text with 12 places: 12_345_678 -> "0.000012345678"."""
    whole, fraction = divmod(abs(pico), PICO_PER_USD)
    return f"{'-' if pico < 0 else ''}{whole}.{fraction:012d}"


def format_cents(cents: int) -> str:
    """Decimal text with 2 places: -5 -> "-0.05"."""
    whole, fraction = divmod(abs(cents), 100)
    return f"{'-' if cents < 0 else ''}{whole}.{fraction:02d}"


def parse_usd(text: str) -> int:
    """Pico-USD of a decimal such as "0.25".

    Raises:
        ValueError: not a plain decimal, or more than 12 places.
    """
    digits = text.removeprefix("-")
    whole, point, fraction = digits.partition(".")
    is_decimal = whole.isascii() and whole.isdigit() and (not point or fraction.isdigit())
    if not is_decimal or not fraction.isascii() or len(fraction) > 12 or len(whole) > 15:
        raise ValueError("write dollars as a decimal with at most 12 places, such as 0.25")
    pico = int(whole) * PICO_PER_USD + int(fraction.ljust(12, "0"))
    return -pico if text.startswith("-") else pico


def round_half_even(amount: int, unit: int) -> int:
    """`amount` in whole `unit`s, ties to the even one; the same below zero as above."""
    whole, rest = divmod(amount, unit)
    if 2 * rest > unit or (2 * rest == unit and whole % 2):
        whole += 1
    return whole


def to_cents(pico: int) -> int:
    """Cents, half-even."""
    return round_half_even(pico, PICO_PER_CENT)
