from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING
from uuid import UUID

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loraplex_platform.billing.money import format_usd
from loraplex_platform.billing.prices import (
    NoPriceError,
    Prices,
    current_prices,
    prices_of,
    target_of,
)
from loraplex_platform.ids import uuid7

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database

BOOK = UUID("00000000-0000-7000-8000-000000000001")


@given(st.integers(-(10**30), 10**30))
def test_usd_text_is_exact(pico: int) -> None:
    text = format_usd(pico)

    assert Fraction(text) * 10**12 == pico
    assert len(text.split(".")[1]) == 12


def test_usd_text_has_the_documented_form() -> None:
    assert format_usd(12_345_678) == "0.000012345678"
    assert format_usd(-1) == "-0.000000000001"
    assert format_usd(3 * 10**12) == "3.000000000000"


def test_cost_is_tokens_times_price_with_cached_ones_cheaper() -> None:
    prices = Prices(input=20_000, cached_input=10_000, output=40_000)

    cost = prices.cost_pico(prompt_tokens=100, cached_tokens=64, completion_tokens=7)

    assert cost == 36 * 20_000 + 64 * 10_000 + 7 * 40_000


async def test_the_first_migration_publishes_a_book(db: Database) -> None:
    async with db.sessions() as session:
        table = await current_prices(session)

    assert table.book_id == BOOK
    assert table.of("base") == Prices(20_000, 10_000, 40_000)
    assert table.of("adapter") == Prices(30_000, 15_000, 60_000)
    assert (target_of(None), target_of(uuid7())) == ("base", "adapter")


async def test_the_latest_published_book_in_force_wins(db: Database, db_url: str) -> None:
    book, draft, future = uuid7(), uuid7(), uuid7()
    with psycopg.connect(db_url) as connection:
        for book_id, status, since in (
            (book, "published", "now() - interval '1 s'"),
            (draft, "draft", "now()"),
            (future, "published", "now() + interval '1 h'"),
        ):
            connection.execute(
                f"insert into price_books (id, name, status, effective_from)"
                f" values (%s, 'new', %s, {since})",
                [book_id, status],
            )
            connection.execute(
                "insert into price_items select %s, target_kind, token_class, 7 from price_items"
                " where price_book_id = %s",
                [book_id, BOOK],
            )

    async with db.sessions() as session:
        table = await current_prices(session)
        older = await prices_of(session, BOOK)

    assert (table.book_id, table.base.output) == (book, 7)
    assert older.base.output == 40_000


async def test_a_missing_book_or_class_is_no_price(db: Database, db_url: str) -> None:
    with psycopg.connect(db_url) as connection:
        connection.execute("delete from price_items where token_class = 'cached_input'")

    async with db.sessions() as session:
        with pytest.raises(NoPriceError):
            await current_prices(session)
        with pytest.raises(NoPriceError):
            await prices_of(session, uuid7())
