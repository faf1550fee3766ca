from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal
from fractions import Fraction
from typing import TYPE_CHECKING
from uuid import UUID

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loraplex_platform.billing.money import (
    PICO_PER_CENT,
    format_cents,
    format_usd,
    parse_usd,
    to_cents,
)
from loraplex_platform.billing.prices import NoPriceError, Prices, prices_of
from loraplex_platform.ids import uuid7

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database

BOOK = UUID("00000000-0000-7000-8000-000000000001")


@given(st.integers(-(10**26), 10**26))
def test_usd_text_is_exact(pico: int) -> None:
    text = format_usd(pico)

    assert Fraction(text) * 10**12 == pico
    assert len(text.split(".")[1]) == 12
    assert parse_usd(text) == pico


def test_usd_text_has_the_documented_form() -> None:
    assert format_usd(12_345_678) == "0.000012345678"
    assert format_usd(-1) == "-0.000000000001"
    assert format_usd(3 * 10**12) == "3.000000000000"
    assert format_cents(-5) == "-0.05"
    assert format_cents(123_456) == "1234.56"


@pytest.mark.parametrize(
    "text",
    ["", "1e3", ".5", "1.", "+1", "1,000", "0.0000000000001", "NaN", "--1", "٣", "1.٣", " 1"],
)
def test_what_is_no_plain_decimal_is_no_amount(text: str) -> None:
    if text == "1.":
        assert parse_usd("1.0") == parse_usd("1")
    with pytest.raises(ValueError, match="decimal"):
        parse_usd(text)


@given(st.integers(-(10**24), 10**24))
def test_cents_are_rounded_half_even_as_decimal_does(pico: int) -> None:
    exact = Decimal(pico) / PICO_PER_CENT

    assert to_cents(pico) == int(exact.quantize(Decimal(1), rounding=ROUND_HALF_EVEN))


@pytest.mark.parametrize(
    ("half_cents", "cents"), [(1, 0), (3, 2), (5, 2), (-1, 0), (-3, -2), (-5, -2)]
)
def test_a_tie_goes_to_the_even_cent(half_cents: int, cents: int) -> None:
    assert to_cents(half_cents * PICO_PER_CENT // 2) == cents


def test_cost_is_tokens_times_price_with_cached_ones_cheaper() -> None:
    prices = Prices(input=20_000, cached_input=10_000, output=40_000, request=5)

    cost = prices.cost_pico(prompt_tokens=100, cached_tokens=64, completion_tokens=7)

    assert cost == 36 * 20_000 + 64 * 10_000 + 7 * 40_000 + 5
    assert (
        prices.cost_pico(prompt_tokens=0, cached_tokens=0, completion_tokens=1, requests=0)
        == 40_000
    )


async def test_the_first_migration_publishes_a_book(db: Database) -> None:
    async with db.sessions() as session:
        base = await prices_of(session, BOOK, adapter_version_id=None, deployment_id=None)
        adapter = await prices_of(session, BOOK, adapter_version_id=uuid7(), deployment_id=None)

    assert base == Prices(20_000, 10_000, 40_000)
    assert adapter == Prices(30_000, 15_000, 60_000)


async def test_no_book_is_no_price(db: Database, db_url: str) -> None:
    async with db.sessions() as session:
        for book_id in (None, uuid7()):
            with pytest.raises(NoPriceError):
                await prices_of(session, book_id, adapter_version_id=None, deployment_id=None)


async def test_the_most_specific_target_wins_per_class(db: Database, db_url: str) -> None:
    book, base, adapter, deployment = uuid7(), uuid7(), uuid7(), uuid7()
    nil = UUID(int=0)
    items = [
        ("any_base", nil, {"input": 1, "output": 2}),
        ("any_adapter", nil, {"input": 3, "cached_input": 4, "output": 5, "request": 6}),
        ("base_model", base, {"output": 7}),
        ("adapter", adapter, {"input": 8}),
        ("deployment", deployment, {"request": 9}),
    ]
    with psycopg.connect(db_url) as owner:
        owner.execute(
            "insert into price_books (id, name, status) values (%s, 'new', 'draft')", [book]
        )
        for kind, target, prices in items:
            for price_class, price in prices.items():
                owner.execute(
                    "insert into price_items (price_book_id, target_kind, target_id, price_class,"
                    " price_pico) values (%s, %s, %s, %s, %s)",
                    [book, kind, target, price_class, price],
                )

        def found(*ids: UUID | None) -> object:
            return owner.execute(
                "select input, cached_input, output, request from loraplex_prices(%s, %s, %s, %s)",
                [book, *ids],
            ).fetchone()

        assert found(None, None, None) == (1, 1, 2, 0)
        assert found(base, None, None) == (1, 1, 7, 0)
        assert found(base, uuid7(), None) == (3, 4, 7, 6)
        assert found(base, adapter, None) == (8, 4, 7, 6)
        assert found(base, adapter, deployment) == (8, 4, 7, 9)
        assert found(None, None, deployment) == (1, 1, 2, 9)
        owner.execute(
            "delete from price_items where target_kind = 'any_base' and price_book_id = %s", [book]
        )
        assert found(base, None, None) == (None, None, 7, 0)
        assert found(None, None, None) == (None, None, None, 0)
