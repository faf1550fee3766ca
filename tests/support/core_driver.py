"""Steps a core until it has nothing left to do: the loop that every test of one needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from loraplex_engine.core import EngineCore
from loraplex_engine.protocol import TokenEvent

DEADLINE_S: Final = 280.0  # of a machine that is busy with other tests


def run_to_end(
    core: EngineCore,
    *,
    after_step: Callable[[], None] | None = None,
    checks_steps: bool = True,
    checks_end: bool = True,
    max_steps: int | None = None,
) -> list[TokenEvent]:
    """All events, in order.

    Args:
        after_step: called after each step, and after its check.
        checks_steps: whether invariants are checked after each; False where steps are timed, or many.
        checks_end: whether they are at the end; False where a test has broken them.
        max_steps: for cores whose steps take no time; more: it does not get on.
    """
    events: list[TokenEvent] = []
    num_steps, give_up_s = 0, time.monotonic() + DEADLINE_S
    while core.has_work():
        assert time.monotonic() < give_up_s, f"still at work after {num_steps} steps"
        assert max_steps is None or num_steps < max_steps, f"still at work after {num_steps} steps"
        events += core.step()
        num_steps += 1
        if checks_steps and checks_end:
            core.check()
        if after_step is not None:
            after_step()
    if checks_end:
        core.check()
    return events
