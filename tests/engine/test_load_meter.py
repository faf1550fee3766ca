"""Load times: by tier, of the last few hundred."""

from __future__ import annotations

from loraplex_engine.lora.load_meter import WINDOW, LoadMeter
from loraplex_engine.protocol import AdapterLoadTimes


def test_without_a_load_there_is_nothing_to_say() -> None:
    assert LoadMeter().read() == {}


def test_quantiles_are_loads_that_were_and_tiers_do_not_mix() -> None:
    meter = LoadMeter()
    for milliseconds in range(100, 0, -1):
        meter.note("disk", milliseconds / 1000)
    meter.note("store", 7.0)

    found = meter.read()

    assert found["disk"] == AdapterLoadTimes(loads_total=100, last_s=0.001, p50_s=0.05, p95_s=0.095)
    assert found["store"] == AdapterLoadTimes(loads_total=1, last_s=7.0, p50_s=7.0, p95_s=7.0)


def test_what_was_slow_long_ago_is_forgotten_but_counted() -> None:
    meter = LoadMeter()
    for _ in range(WINDOW):
        meter.note("store", 60.0)
    for _ in range(WINDOW):
        meter.note("store", 0.25)

    found = meter.read()["store"]

    assert (found.loads_total, found.last_s, found.p95_s) == (2 * WINDOW, 0.25, 0.25)
