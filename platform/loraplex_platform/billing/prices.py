"""What tokens cost: the price book in force, and the arithmetic.

A price is micro-USD per 1M tokens, so tokens x price is pico-USD, exactly. A request keeps the book
that was in force when it was admitted. Published books never change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import PriceBook, PriceItem
from loraplex_platform.errors import UnavailableError

TargetKind = Literal["base", "adapter"]


class NoPriceError(UnavailableError):
    """No published price book is in force, or it lacks a class: what has no price is not served."""

    code = "no_price"


@dataclass(frozen=True, slots=True)
class Prices:
    """Micro-USD per 1M tokens of each class."""

    input: int
    cached_input: int
    output: int

    def cost_pico(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """Exact pico-USD. `cached_tokens` are part of `prompt_tokens`."""
        return (
            (prompt_tokens - cached_tokens) * self.input
            + cached_tokens * self.cached_input
            + completion_tokens * self.output
        )


@dataclass(frozen=True, slots=True)
class PriceTable:
    """A published price book."""

    book_id: UUID
    base: Prices
    adapter: Prices

    def of(self, target: TargetKind) -> Prices:
        """The prices of the base model, or of any adapter on it."""
        return self.adapter if target == "adapter" else self.base


def target_of(adapter_version_id: UUID | None) -> TargetKind:
    """What a request that ran this adapter version is priced as."""
    return "base" if adapter_version_id is None else "adapter"


async def current_prices(session: AsyncSession) -> PriceTable:
    """The book in force now.

    Raises:
        NoPriceError: there is none.
    """
    statement = (
        select(PriceBook.id)
        .where(
            PriceBook.status == "published",
            PriceBook.effective_from <= func.now(),
            or_(PriceBook.effective_to.is_(None), PriceBook.effective_to > func.now()),
        )
        .order_by(PriceBook.effective_from.desc(), PriceBook.id.desc())
        .limit(1)
    )
    book_id = await session.scalar(statement)
    if book_id is None:
        raise NoPriceError("No price book is in force; publish one before serving.")
    return await prices_of(session, book_id)


async def prices_of(session: AsyncSession, book_id: UUID) -> PriceTable:
    """A book's prices.

    Raises:
        NoPriceError: no such book, or it lacks a class.
    """
    statement = select(
        PriceItem.target_kind, PriceItem.token_class, PriceItem.micro_usd_per_mtok
    ).where(PriceItem.price_book_id == book_id)
    prices = {(kind, name): price for kind, name, price in await session.execute(statement)}
    try:
        base, adapter = (
            Prices(
                input=prices[target, "input"],
                cached_input=prices[target, "cached_input"],
                output=prices[target, "output"],
            )
            for target in ("base", "adapter")
        )
    except KeyError as error:
        raise NoPriceError(f"The price book lacks a price for {error.args[0]}.") from None
    return PriceTable(book_id, base, adapter)
