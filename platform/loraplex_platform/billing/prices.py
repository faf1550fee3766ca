"""What a request costs: the prices that its book has for it, and the arithmetic.

The rule (the most specific target wins, per class) is `loraplex_prices` in the database, so that
admission, settlement and checks cannot differ. A request is billed by the book that its deployment's
revision names, whether that book has begun, holds or has ended; else by the one in force when it is
admitted. It keeps it. Published books never change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.errors import UnavailableError

_ENTRY_PRICES = text("select * from loraplex_entry_prices(:book, :adapter_version, :deployment)")


class NoPriceError(UnavailableError):
    """No price book is in force, or the one that counts has no price: what has no price is not served."""

    code = "no_price"


@dataclass(frozen=True, slots=True)
class Prices:
    """Pico-USD per token of each class, and per request."""

    input: int
    cached_input: int
    output: int
    request: int = 0

    def cost_pico(
        self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int, requests: int = 1
    ) -> int:
        """Exact pico-USD. `cached_tokens` are part of `prompt_tokens`."""
        return (
            (prompt_tokens - cached_tokens) * self.input
            + cached_tokens * self.cached_input
            + completion_tokens * self.output
            + requests * self.request
        )


async def prices_of(
    session: AsyncSession,
    book_id: UUID | None,
    *,
    adapter_version_id: UUID | None,
    deployment_id: UUID | None,
) -> Prices:
    """A book's prices for what a request ran.

    Raises:
        NoPriceError: no such book, or it has no price for input or output.
    """
    parameters = {
        "book": book_id,
        "adapter_version": adapter_version_id,
        "deployment": deployment_id,
    }
    row: Row[Any] = (await session.execute(_ENTRY_PRICES, parameters)).one()
    if row.input is None or row.output is None:
        raise NoPriceError("The price book has no price for this.")
    return Prices(row.input, row.cached_input, row.output, row.request)
