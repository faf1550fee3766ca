"""CPU time of a piece of work, for bounds that hold whatever else the machine or this process has to do."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def least_s(work: Callable[[], object], *, enough_s: float = 0.0, num_runs: int = 3) -> float:
    """CPU seconds of the best of `num_runs` runs; no more of them once one took less than `enough_s`.

    Other tests of this process have filled its heap: a collection of theirs is not this work's time.
    """
    spent_s: list[float] = []
    gc.disable()
    try:
        while len(spent_s) < num_runs and min(spent_s, default=float("inf")) >= enough_s:
            began_s = time.process_time()
            work()
            spent_s.append(time.process_time() - began_s)
    finally:
        gc.enable()
    return min(spent_s)
