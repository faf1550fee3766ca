"""Money is integers: pico-USD, 10^-12 USD. Nothing is rounded before an invoice line."""

from __future__ import annotations

PICO_PER_USD = 10**12


def format_usd(pico: int) -> str:
    """Exact decimal text with 12 places: 12_345_678 -> "0.000012345678"."""
    whole, fraction = divmod(abs(pico), PICO_PER_USD)
    return f"{'-' if pico < 0 else ''}{whole}.{fraction:012d}"
