"""The console's bench: sizes of its tables."""

from __future__ import annotations

from bench.console_tables import Sizes


def test_a_scale_keeps_enough_of_each_for_a_page_to_be_one() -> None:
    assert Sizes().scaled(1.0) == Sizes()
    assert Sizes().scaled(0.05).keys == 20_000
    assert Sizes().scaled(1e-9).residents == 20
