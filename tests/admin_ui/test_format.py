"""How things are written, and that what others typed stays what it is."""

from __future__ import annotations

import pytest
from loraplex_admin import format as fmt

from tests.admin_ui.corpus import CORPUS

JOINER = "\u2060"


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


@pytest.mark.parametrize("text", CORPUS)
def test_literal_escapes_all_punctuation_and_loses_nothing(text: str) -> None:
    shown = fmt.literal(text)

    unescaped = (
        shown.replace(JOINER, "").replace("\\\\", "\0").replace("\\", "").replace("\0", "\\")
    )
    assert unescaped == " ".join(text.split())
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
