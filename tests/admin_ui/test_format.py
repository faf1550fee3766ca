"""How things are written, and that what others typed stays what it is."""

from __future__ import annotations

import pytest
from loraplex_admin import format as fmt

from tests.admin_ui.corpus import NAMES

# What keeps words apart or a direction to itself, and the signs that are made visible instead.
HIDDEN = dict.fromkeys([0x2060, 0xFFFD, *range(0x202A, 0x202F), *range(0x2066, 0x206A)])


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        ("0.000000000000", "$0.00"),
        ("1.250000000000", "$1.25"),
        ("1234567.891000000000", "$1,234,567.89"),
        ("0.000012345678", "$0.000012345678"),
        ("0.010000000000", "$0.01"),
        ("-3.500000000000", "-$3.50"),
    ],
)
def test_money_keeps_the_digits_that_say_something(amount: str, shown: str) -> None:
    assert fmt.usd(amount) == shown


def test_sizes_times_counts_and_digests() -> None:
    assert fmt.size(0) == "0 B"
    assert fmt.size(1023) == "1023 B"
    assert fmt.size(2_519_600) == "2.4 MiB"
    assert fmt.size(1 << 50) == "1024.0 TiB"
    assert fmt.time(0) == "1970-01-01 00:00 UTC"
    assert fmt.time(None) == "–"
    assert fmt.count(1234567) == "1,234,567"
    assert fmt.digest("sha256:" + "ab" * 32) == "abababababab"
    assert fmt.digest(None) == "base"


@pytest.mark.parametrize("text", NAMES)
def test_literal_escapes_all_punctuation_and_loses_nothing(text: str) -> None:
    shown = fmt.literal(text)

    # A joiner in the text itself is no loss: it is seen by nobody.
    plain_text = text.translate(HIDDEN)
    unescaped = shown.translate(HIDDEN).replace("\\\\", "\0").replace("\\", "").replace("\0", "\\")
    assert unescaped == " ".join(plain_text.split())
    plain = shown.replace("\\\\", "")
    for position, char in enumerate(plain):
        if char in "*_`<>[]$:#&~|":
            assert plain[position - 1] == "\\", shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "`plain`"),
        ("a`b", "`` a`b ``"),
        ("```", "```` ``` ````"),
        ("  two\nlines ", "`two lines`"),
        ("", ""),
    ],
)
def test_code_is_fenced_by_more_backticks_than_are_in_it(text: str, shown: str) -> None:
    assert fmt.code(text) == shown


def test_times_are_in_the_tenants_zone_and_a_reset_is_exact() -> None:
    assert fmt.time(0, "Europe/Berlin") == "1970-01-01 01:00 Europe/Berlin"
    assert fmt.time(0, "Asia/Kathmandu") == "1970-01-01 05:30 Asia/Kathmandu"
    assert fmt.moment(0, "Asia/Kathmandu") == "1970-01-01 05:30 +05:30"
    assert fmt.moment(0, "UTC") == "1970-01-01 00:00 UTC"
    assert fmt.moment(None, "UTC") == "–"
    for unknown in ("No/Where", "x" * 10_000, "../../etc/passwd", "\0"):
        assert fmt.time(0, unknown) == "1970-01-01 00:00 UTC"
    # The night in which Berlin's clocks go forward: the month ends an hour sooner than one would count.
    start_s, end_s = 1774738800, 1774994400
    assert fmt.reset(end_s, "Europe/Berlin", start_s) == "2026-04-01 00:00 +02:00, in 2 d 23 h"
    assert fmt.reset(None, "UTC", 0) == "never"
    assert fmt.reset(10, "UTC", 10) == "1970-01-01 00:00 UTC, now"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (3600, "1 h 0 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_spans_are_never_rounded_up(seconds: float, shown: str) -> None:
    assert fmt.span(seconds) == shown


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        ("1000000", "tokens", "1,000,000 tokens"),
        ("25.00", "USD", "$25.00"),
        ("0", "requests", "0 requests"),
        (None, "USD", "–"),
    ],
)
def test_amounts_carry_their_unit(value: str | None, unit: str, shown: str) -> None:
    assert fmt.amount(value, unit) == shown
